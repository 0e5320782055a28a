"""Every use of AOTInductor that is not documented: what it is for, and what breaks if it moves. Written against 2.11.

Some of its habits cost every fresh process 14 to 30 seconds and every artifact some more; they are answered here:

- For each instruction set that the CPU has, it compiles a test program and starts a Python that imports torch to load
  it. The CPU's own answer plus a check that the compiler knows the flags say the same in milliseconds.
- Its precompiled headers lie under TMPDIR, which is private to a build. They are kept in `PRECAST_HEADER_DIR` when
  that is set to a folder of this user that nobody else can write, and made once a machine.
- The C functions of an artifact and the container behind them are the same text in every artifact, and three fifths of
  the time that its C++ takes. They are compiled once and linked in.
- To see whether a header changed it preprocesses it twice a process and needs `openssl`. The version of torch, its
  place and the compiler's own version say the same.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shlex
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# `[target] isa` -> the vector class of torch's C++ kernels that it allows, by name in `cpu_vec_isa`.
_VECTORS = {"x86-64-v2": None, "x86-64-v3": "VecAVX2", "x86-64-v4": "VecAVX512"}


class Clock:
    """Seconds by phase of one compile; the compiler's commands are told apart by their flags."""

    def __init__(self, event: Callable[[str], None]) -> None:
        self.seconds: dict[str, float] = {}
        self._event = event

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time inside to a phase."""
        self._event(name)
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def modes() -> dict[str, dict[str, Any]]:
    """Returns the modes of torch.compile and the options they stand for."""
    import torch._inductor

    return torch._inductor.list_mode_options()  # type: ignore[return-value]


def option_names() -> set[str]:
    """Returns the names of every compiler option."""
    import torch._inductor

    return set(torch._inductor.list_options())


def unwrap(error: BaseException) -> BaseException:
    """Returns what failed inside the compiler, without the layers that say only that it failed inside the compiler."""
    while isinstance(inner := getattr(error, "inner_exception", None), BaseException):
        error = inner
    return error


def is_cpp_error(error: BaseException) -> bool:
    """Returns whether the C++ compiler failed, not inductor."""
    from torch._inductor import exc

    return isinstance(error, exc.CppCompileError)


def compile_aot(
    module: Any, inputs: list[Any], options: dict[str, Any], isa: str, out: Path, clock: Clock
) -> list[str]:
    """Compiles a module whose weights are buffers; returns the files that were generated, all under `out`.

    Breaks if: `compile_fx_aot` changes its arguments or no longer returns the list of files for
    `aot_inductor.package`.
    """
    import torch
    from torch._inductor.compile_fx import compile_fx_aot

    patches = dict(options)
    patches["aot_inductor.output_path"] = str(out / "artifact.so")
    # Compiling writes into this dictionary; a shared one would carry entries from artifact to artifact.
    patches["aot_inductor.metadata"] = {}
    with torch.no_grad(), _toolchain(isa, clock):
        files = compile_fx_aot(module, inputs, config_patches=patches)
    return [str(name) for name in files if isinstance(name, str)]


@contextmanager
def _toolchain(isa: str, clock: Clock) -> Iterator[None]:
    """Puts our answers in place of inductor's own for the time of one compile."""
    from torch._inductor import codecache, cpp_builder, cpu_vec_isa

    run, flags, header = (
        cpp_builder._run_compile_cmd,
        cpp_builder._get_optimization_cflags,
        codecache._precompile_header,
    )
    interface = _Interface()
    check, valid = cpu_vec_isa.VecISA.check_build, cpu_vec_isa.valid_vec_isa_list

    def timed(command: str, cwd: str) -> None:
        kind = _kind(command)
        if kind == "cpp" and ".wrapper.cpp " in command:
            command = interface.shorten(command, cwd, lambda made: _measured(clock, "headers", run, made, cwd))
        elif kind == "link":
            command = _only_needed(interface.link(command))
        _measured(clock, kind, run, command, cwd)

    def baseline(*args: Any, **kwargs: Any) -> Any:
        compile_flags, link_flags = flags(*args, **kwargs)
        return [f"march={isa}" if flag == "march=native" else flag for flag in compile_flags], link_flags

    cpp_builder._run_compile_cmd = timed
    cpu_vec_isa.VecISA.check_build = _compiler_knows
    codecache._precompile_header = functools.partial(_header, isa)
    if isa != "native":
        # Breaks if: the flag moves out of this function; then the first test of a baseline fails.
        cpp_builder._get_optimization_cflags = baseline
        vector = _VECTORS[isa]
        allowed = [item for item in cpu_vec_isa.supported_vec_isa_list if type(item).__name__ == vector]
        replacement = functools.cache(lambda: allowed)
        cpu_vec_isa.valid_vec_isa_list = replacement
    try:
        yield
    finally:
        cpp_builder._run_compile_cmd = run
        cpp_builder._get_optimization_cflags = flags
        codecache._precompile_header = header
        cpu_vec_isa.VecISA.check_build = check
        cpu_vec_isa.valid_vec_isa_list = valid


def _measured(clock: Clock, phase: str, run: Callable[[str, str], None], command: str, cwd: str) -> None:
    with clock.phase(phase):
        run(command, cwd)


class _Interface:
    """Takes the part that all artifacts share out of one artifact's code, and links it in compiled.

    Breaks if: torch's `interface.cpp` is no longer copied into the code as it is, or the class it drives changes; the
    code is then compiled whole, as torch does it.
    """

    _MODEL = "#include <torch/csrc/inductor/aoti_runtime/model.h>\n"
    _BASE = "template class torch::aot_inductor::AOTInductorModelBase<torch::aot_inductor::AOTInductorModel>;\n"
    _failed = False

    def __init__(self) -> None:
        self._object: Path | None = None
        self._wrapper = ""

    def shorten(self, command: str, cwd: str, run: Callable[[str], None]) -> str:
        """Returns the command that compiles the rest of a wrapper, after compiling the shared part if need be."""
        from torch._inductor import exc

        source = next(word for word in shlex.split(command) if word.endswith(".wrapper.cpp"))
        target = source.removesuffix(".cpp") + ".o"
        shared = _interface_text()
        text = Path(source).read_text()
        if _Interface._failed or shared is None or shared not in text or f"-o {target}" not in command:
            return command
        rest = source.removesuffix(".wrapper.cpp") + ".model.cpp"
        flags = command.replace(source, "", 1).replace(target, "", 1)
        try:
            self._object = self._shared(shared, command, source, target, flags, run)
        except exc.CppCompileError:
            _Interface._failed = True
            return command
        Path(rest).write_text(text.replace(shared, f"{self._MODEL}extern {self._BASE}", 1))
        self._wrapper = target
        return command.replace(source, rest, 1)

    def link(self, command: str) -> str:
        """Returns the command that links the shared part too."""
        if self._object is None or f"{self._wrapper} " not in command:
            return command
        return command.replace(f"{self._wrapper} ", f"{self._wrapper} {self._object} ", 1)

    def _shared(
        self, text: str, command: str, source: str, target: str, flags: str, run: Callable[[str], None]
    ) -> Path:
        from torch.utils._filelock import FileLock

        folder = _header_folder()
        name = _digest([flags, text, *_compiler_identity()])
        made = folder / f"{name}.o"
        with FileLock(str(folder / f"{name}.lock")):
            if not made.exists():
                code = folder / f"{name}.cpp"
                code.write_text(f"{self._MODEL}{self._BASE}{text}\n")
                partial = folder / f"{name}.o.partial"
                run(command.replace(source, str(code), 1).replace(f"-o {target}", f"-o {partial}", 1))
                os.replace(partial, made)
        return made


@functools.cache
def _interface_text() -> str | None:
    from torch._inductor.codegen import cpp_wrapper_cpu

    path = Path(cpp_wrapper_cpu.__file__).parent / "aoti_runtime" / "interface.cpp"
    return path.read_text().strip() if path.is_file() else None


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@functools.cache
def _compiler_identity() -> tuple[str, ...]:
    import torch
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    version = get_compiler_version_info(get_cpp_compiler())
    # `-march=native` means another thing on another machine that mounts the same folder.
    native = subprocess.run(
        [get_cpp_compiler(), "-march=native", "-Q", "--help=target"], capture_output=True, text=True, check=False
    ).stdout
    return (version, native, torch.__version__, str(torch.version.git_version), torch.__file__)


def _kind(command: str) -> str:
    if " c++-header " in command:
        return "headers"
    return "cpp" if " -c " in command else "link"


def _only_needed(command: str) -> str:
    """A link that names only libraries the object uses, and no folder of this machine.

    Inductor names `libtorch.so`, which holds nothing but copies of C++ templates and brings the whole CUDA half of
    libtorch into a CPU process, and the place of torch here. Whoever loads the object has libtorch loaded already.
    """
    program, rest = command.split(" ", 1)
    rest = re.sub(r" (-Wl,-rpath[=,]\S+|-Wl,--no-as-needed|-ltorch)(?= |$)", "", rest)
    return f"{program} -Wl,--as-needed {rest}"


def _compiler_knows(vector: Any, code: str) -> bool:
    """Whether the compiler takes an instruction set's flags; that the CPU has it is asked of the CPU elsewhere."""
    return _knows_flags(vector._arch_flags)


@functools.cache
def _knows_flags(flags: str) -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler

    command = [get_cpp_compiler(), *shlex.split(flags), "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0


@functools.cache
def _header(isa: str, header: str, hashable_cmd_line: str, **compile_command: Any) -> str:
    """Returns a header that has been compiled before, making it if it is the first time.

    Breaks if: the compiler's flags for a header differ from those for the code that includes it; GCC then ignores the
    compiled header, and builds get slower but stay right.
    """
    from torch._inductor import cpp_builder
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch.utils._filelock import FileLock

    options = CppTorchDeviceOptions(**compile_command, precompiling=True)
    probe = CppBuilder(name="header", sources="header.h", BuildOption=options)
    name = _digest([isa, header, hashable_cmd_line, probe.get_command_line(), *_compiler_identity()])
    folder = _header_folder()
    path = folder / f"{name}.h"
    compiled = folder / f"{name}.h.gch"
    with FileLock(str(folder / f"{name}.lock")):
        if not compiled.exists():
            path.write_text(f"#include <{header}>\n")
            builder = CppBuilder(name=str(path), sources=str(path), BuildOption=options)
            target = Path(builder.get_target_file_path())
            partial = str(target) + ".partial"
            # Written beside and renamed: a killed compiler leaves no half header behind.
            cpp_builder._run_compile_cmd(
                builder.get_command_line().replace(f"-o {target}", f"-o {partial}"), str(folder)
            )
            os.replace(partial, target)
    return str(path)


def _header_folder() -> Path:
    """The folder for precompiled headers: the shared one if it is safe, else the build's own."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    shared = os.environ.get("PRECAST_HEADER_DIR")
    if shared:
        folder = Path(shared)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o022:
            return folder
    folder = Path(cache_dir()) / "headers"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
