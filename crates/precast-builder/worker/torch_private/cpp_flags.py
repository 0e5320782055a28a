"""Instruction sets: flags of the C++ compiler, and the vector classes of torch's kernels."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
from contextlib import AbstractContextManager
from typing import Any

import torch

from .patches import replaced

# Linker flag: symbols of static libraries stay inside the object. A compiler may link the C++ library statically. Its
# exported symbols would bind to another copy in the process, as that of a Python with torch, and a call would crash.
OWN_LIBRARIES = "-Wl,--exclude-libs,ALL"


@functools.cache
def cpp_library() -> list[str]:
    """Returns the path of the C++ library that torch has in this process, for the end of a link command.

    A compiler that links its own copy statically then takes from that copy only names that this library lacks. With a
    copy of its own, an object has another `std::cerr` than libtorch, and messages of libtorch are lost.
    """
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "libstdc++.so" in line}
    return sorted(path for path in paths if os.path.isfile(path))[:1]


# `[target] isa` -> the vector class of torch's C++ kernels that it allows, by name in `cpu_vec_isa`.
_VECTORS = {"x86-64-v2": None, "x86-64-v3": "VecAVX2", "x86-64-v4": "VecAVX512"}


def flags_for(isa: str) -> AbstractContextManager[None]:
    """Sets the instruction set of the C++ compiler's commands.

    For each instruction set that the CPU has, inductor compiles a test program and starts a Python that imports torch
    to load it: 14 to 30 seconds in every new process. The CPU's feature list, and a check that the compiler knows the
    flags, give the same result in milliseconds.

    Private: `torch._inductor.cpp_builder._get_optimization_cflags`; `VecISA.check_build`, `valid_vec_isa_list` and
    `supported_vec_isa_list` of `torch._inductor.cpu_vec_isa`. Without them: artifacts are compiled for the CPU of the
    build, and `[target] isa` has no effect.
    """
    from torch._inductor import cpp_builder, cpu_vec_isa

    flags = cpp_builder._get_optimization_cflags

    def baseline(*args: Any, **kwargs: Any) -> Any:
        compile_flags, link_flags = flags(*args, **kwargs)
        return [f"march={isa}" if flag == "march=native" else flag for flag in compile_flags], link_flags

    places: list[tuple[Any, str, Any]] = [(cpu_vec_isa.VecISA, "check_build", _compiler_knows)]
    if isa != "native":
        vector = _VECTORS[isa]
        allowed = [item for item in cpu_vec_isa.supported_vec_isa_list if type(item).__name__ == vector]
        places.append((cpu_vec_isa, "valid_vec_isa_list", functools.cache(lambda: allowed)))
        places.append((cpp_builder, "_get_optimization_cflags", baseline))
    return replaced(*places)


def _compiler_knows(vector: Any, code: str) -> bool:
    """Returns whether the compiler accepts an instruction set's flags. Does not check the CPU."""
    return _knows_flags(vector._arch_flags)


@functools.cache
def _knows_flags(flags: str) -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler

    command = [get_cpp_compiler(), *shlex.split(flags), "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0


@functools.cache
def compiler_identity() -> tuple[str, ...]:
    """Returns compiler, CPU and torch: compiled headers and objects depend on them, besides their text and flags.

    Private: `get_compiler_version_info` and `get_cpp_compiler` of `torch._inductor.cpp_builder`. Without them: nothing
    compiles.
    """
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    version = get_compiler_version_info(get_cpp_compiler())
    # `-march=native` has another meaning on another machine that mounts the same folder.
    native = subprocess.run(
        [get_cpp_compiler(), "-march=native", "-Q", "--help=target"], capture_output=True, text=True, check=False
    ).stdout
    return (version, native, torch.__version__, str(torch.version.git_version), torch.__file__)
