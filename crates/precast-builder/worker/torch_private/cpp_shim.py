"""The shim: C++ between the runtime and one torch, compiled once for this torch and this compiler.

It is compiled for every CPU of the architecture: a special instruction set would not make it faster.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from .cpp_flags import OWN_LIBRARIES, cpp_library
from .cpp_headers import digest, header_folder

_FLAGS = (
    *("-std=c++20", "-O2", "-fPIC", "-w", "-shared"),
    *("-Wl,-z,noexecstack", "-Wl,--build-id=none", OWN_LIBRARIES),
)


class NotCompiled(Exception):
    """The C++ compiler refused the shim."""


def compile_shim(
    sources: dict[str, str], device: str, out: Path, phase: Callable[[str], None]
) -> dict[str, str | None]:
    """Returns the shared objects `file` and, for CUDA, `cuda`; `why` names a missing header of CUDA.

    Private: `get_cpp_compiler` of `torch._inductor.cpp_builder`, `torch.utils._filelock.FileLock`. Without them:
    nothing compiles.
    """
    from torch.utils.cpp_extension import include_paths

    for name, text in sources.items():
        (out / name).write_text(text)
    torch = include_paths()
    found: dict[str, str | None] = {"cuda": None, "why": None}
    found["file"] = str(_compiled("shim_cpu.cpp", sources, torch, out, phase))
    if device == "cuda":
        cuda = _cuda_headers()
        if isinstance(cuda, str):
            found["why"] = cuda
        else:
            found["cuda"] = str(_compiled("shim_cuda.cpp", sources, [*torch, *cuda], out, phase))
    return found


def _compiled(main: str, sources: dict[str, str], include: list[str], out: Path, phase: Callable[[str], None]) -> Path:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch.utils._filelock import FileLock

    headers = [f"-I{path}" for path in include]
    texts = [text for pair in sorted(sources.items()) for text in pair]
    folder = header_folder().resolve()
    name = f"shim-{digest([main, *_FLAGS, *cpp_library(), *headers, *texts])}"
    made = folder / f"{name}.so"
    with FileLock(str(folder / f"{name}.lock")):
        if not made.exists():
            phase("cpp")
            partial = folder / f"{name}.partial"
            # Relative, so that no path of this build is in the object.
            command = [get_cpp_compiler(), *_FLAGS, *headers, main, "-o", str(partial), *cpp_library()]
            done = subprocess.run(command, cwd=out, capture_output=True, text=True, check=False)
            print(done.stderr, end="", flush=True)
            if done.returncode:
                first = next(
                    (line for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}"
                )
                raise NotCompiled(f"the shim `{main}` does not compile: {first}")
            os.replace(partial, made)
    return made


def _cuda_headers() -> list[str] | str:
    """Returns the folders with the CUDA headers that torch's own headers include, or the reason why there are none.

    They come with the wheels that torch depends on (`nvidia/cu13/include` next to torch), or a toolkit (`CUDA_HOME`).
    The runtime's wheel has no `crt/`; that is in `nvidia-cuda-crt`, and a copy of it in triton's.
    """
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    site = Path(torch.__file__).parent.parent
    named = os.environ.get("CUDA_HOME")
    folders = [Path(named) / "include"] if named else []
    folders += sorted(site.glob("nvidia/cu*/include"), reverse=True)
    folders.append(site / "triton/backends/nvidia/include")
    # A toolkit of the machine may be of another version: last.
    folders += [Path(CUDA_HOME) / "include"] if CUDA_HOME else []
    for header in ("cuda_runtime_api.h", "crt/host_defines.h"):
        if not any((folder / header).exists() for folder in folders):
            return f"no `{header}` beside torch or under CUDA_HOME"
    return [str(folder) for folder in folders if folder.is_dir()]
