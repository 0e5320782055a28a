"""Precompiled C++ headers, compiled once on a machine.

Inductor keeps them under TMPDIR, which is private to a build, and preprocesses each header twice in a process to detect
changes, for which it needs `openssl`. Here they are in `PRECAST_HEADER_DIR`, if that names a folder of this user that
nobody else can write. Their names contain the versions of torch and of the compiler.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .cpp_flags import compiler_identity

Run = Callable[[str, str], None]
"""Runs a command in a folder; raises when it fails."""


@functools.cache
def header(isa: str, name: str, hashable_cmd_line: str, **asked: Any) -> str:
    """Returns the path of a header with its compiled form in the same folder; compiles it the first time.

    Private: `torch._inductor.cpp_builder._run_compile_cmd`, and that a header is compiled with the flags of the code
    that includes it. Without it: GCC ignores the compiled header, and builds take longer.
    """
    from torch._inductor import cpp_builder

    path, *command = header_command(isa, name, hashable_cmd_line, asked)
    compile_header(cpp_builder._run_compile_cmd, path, *command)
    return str(path)


def header_command(isa: str, name: str, hashable_cmd_line: str, asked: dict[str, Any]) -> tuple[Path, Path, str]:
    """Returns a header's text, the file that it compiles to, and the command that compiles it.

    Private: `CppBuilder` and `CppTorchDeviceOptions` of `torch._inductor.cpp_builder`. Without them: nothing compiles.
    """
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions

    path = Path(header_text(isa, name, hashable_cmd_line, **asked))
    options = CppTorchDeviceOptions(**asked, precompiling=True)
    builder = CppBuilder(name=str(path), sources=str(path), BuildOption=options)
    return path, Path(builder.get_target_file_path()), builder.get_command_line()


def compile_header(run: Run, path: Path, target: Path, command: str) -> None:
    """Compiles a header, unless another process has; waits for a process that is compiling it.

    Private: `torch.utils._filelock.FileLock`. Without it: nothing compiles.
    """
    from torch.utils._filelock import FileLock

    with FileLock(str(path.with_suffix(".lock"))):
        if not path.with_suffix(".h.gch").exists():
            # Written under another name and renamed: a killed compiler leaves no half a header.
            partial = str(target) + ".partial"
            run(command.replace(f"-o {target}", f"-o {partial}"), str(path.parent))
            os.replace(partial, target)


def header_text(isa: str, name: str, hashable_cmd_line: str, **asked: Any) -> str:
    """Returns the path of a header's text. Until its compiled form exists, compilers read the text.

    Private: as `header_command`.
    """
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions

    options = CppTorchDeviceOptions(**asked, precompiling=True)
    probe = CppBuilder(name="header", sources="header.h", BuildOption=options)
    path = header_folder() / f"{digest([isa, name, hashable_cmd_line, probe.get_command_line()])}.h"
    if not path.exists():
        # Written under another name and renamed: another process may be reading it.
        partial = path.with_suffix(f".h.{os.getpid()}")
        partial.write_text(f"#include <{name}>\n")
        os.replace(partial, path)
    return str(path)


def digest(parts: list[str]) -> str:
    """Returns a file name for code compiled from `parts`, with this compiler and this torch."""
    return hashlib.sha256("\0".join([*parts, *compiler_identity()]).encode()).hexdigest()[:32]


def header_folder() -> Path:
    """Returns the folder for precompiled headers: the shared one if it is safe, else the build's own.

    Private: `torch._inductor.runtime.cache_dir_utils.cache_dir`. Without it: nothing compiles.
    """
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
