"""The C++ code that all artifacts share: their C functions, and the container class that these call.

It is the same text in every artifact, and half of the time that its C++ takes to compile: for a linear layer and a GELU
on a CPU, the compiler takes 2.4 s (user and system time, median of 3, on an AMD EPYC) instead of 5.4 s. So it is taken
out of the code of an artifact, compiled once on a machine, and linked in.
"""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from .cpp_headers import Run, digest, header_folder


class Interface:
    """The shared part of one artifact's code.

    Private: `torch/_inductor/codegen/aoti_runtime/interface.cpp`, which inductor copies unchanged into the code,
    and the class `AOTInductorModelBase` that it drives. Without them: the code is compiled whole, as inductor does it.
    """

    _MODEL = "#include <torch/csrc/inductor/aoti_runtime/model.h>\n"
    _BASE = "template class torch::aot_inductor::AOTInductorModelBase<torch::aot_inductor::AOTInductorModel>;\n"
    _failed = False

    def __init__(self, run: Run) -> None:
        self._run = run
        self._whole = ""
        self._wrapper = ""
        self._shared: Future[Path] | None = None

    def shorten(self, command: str, threads: ThreadPoolExecutor) -> str:
        """Returns the command that compiles the rest of a wrapper, and starts to compile the shared part if need be."""
        source, target = _source_and_target(command)
        shared = _interface_text()
        text = Path(source).read_text()
        if Interface._failed or shared is None or shared not in text or f"-o {target}" not in command:
            return command
        rest = source.removesuffix(".wrapper.cpp") + ".model.cpp"
        Path(rest).write_text(text.replace(shared, f"{self._MODEL}extern {self._BASE}", 1))
        self._whole, self._wrapper = command, target
        self._shared = threads.submit(self.compilation(command))
        return command.replace(source, rest, 1)

    def link(self, command: str) -> str:
        """Returns the command that links the shared part too.

        If the shared part does not compile, the wrapper is compiled whole, and the command returned unchanged.
        """
        from torch._inductor import exc

        if self._shared is None or f"{self._wrapper} " not in command:
            return command
        try:
            shared = self._shared.result()
        except exc.CppCompileError:
            Interface._failed = True
            self._run(self._whole, str(header_folder()))
            return command
        return command.replace(f"{self._wrapper} ", f"{self._wrapper} {shared} ", 1)

    def compilation(self, command: str) -> Callable[[], Path]:
        """Returns a function that compiles the shared part with the flags of a wrapper, if need be, and returns it.

        The function imports nothing: a thread may call it while others import.
        """
        from torch.utils._filelock import FileLock

        source, target = _source_and_target(command)
        flags = command.replace(source, "", 1).replace(target, "", 1)
        text = _interface_text() or ""
        folder = header_folder()
        name = digest([flags, text])
        library = folder / f"{name}.o"

        def compiled() -> Path:
            with FileLock(str(folder / f"{name}.lock")):
                if not library.exists():
                    code = folder / f"{name}.cpp"
                    code.write_text(f"{self._MODEL}{self._BASE}{text}\n")
                    partial = folder / f"{name}.o.partial"
                    replaced = command.replace(source, str(code), 1).replace(f"-o {target}", f"-o {partial}", 1)
                    self._run(replaced, str(folder))
                    os.replace(partial, library)
            return library

        return compiled


def _source_and_target(command: str) -> tuple[str, str]:
    source = next(word for word in shlex.split(command) if word.endswith(".wrapper.cpp"))
    return source, source.removesuffix(".cpp") + ".o"


@functools.cache
def _interface_text() -> str | None:
    import torch._inductor

    path = Path(torch._inductor.__file__).parent / "codegen" / "aoti_runtime" / "interface.cpp"
    return path.read_text().strip() if path.is_file() else None
