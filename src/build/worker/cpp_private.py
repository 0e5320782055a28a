"""What inductor does with the C++ compiler, done once a machine instead of once a process or an artifact.

Some of its habits cost every fresh process 14 to 30 seconds and every artifact some more; they are answered here:

- For each instruction set that the CPU has, it compiles a test program and starts a Python that imports torch to load
  it. The CPU's own answer plus a check that the compiler knows the flags say the same in milliseconds.
- Its precompiled headers lie under TMPDIR, which is private to a build. They are kept in `PRECAST_HEADER_DIR` when
  that is set to a folder of this user that nobody else can write, and made once a machine.
- The C functions of an artifact and the container behind them are the same text in every artifact, and three fifths of
  the time that its C++ takes. They are compiled once and linked in.
- To see whether a header changed it preprocesses it twice a process and needs `openssl`. The version of torch, its
  place and the compiler's own version say the same.
- It compiles one file after the other. They are independent until the link, which waits for them.

One habit costs those who run an artifact: its kernels start as many threads as the build had, whatever the process may
use. A service that gives each caller one thread would get them all for each. They start that many at most.

Written against torch 2.11, as `inductor_private`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shlex
import stat
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import cpp_checks

# `[target] isa` -> the vector class of torch's C++ kernels that it allows, by name in `cpu_vec_isa`.
_VECTORS = {"x86-64-v2": None, "x86-64-v3": "VecAVX2", "x86-64-v4": "VecAVX512"}

Run = Callable[[str, str], None]


class Enough(Exception):
    """A warm-up has what it wanted."""


@contextmanager
def toolchain(isa: str, clock: Any, warm_up: bool = False) -> Iterator[None]:
    """Puts our answers in place of inductor's own for the time of one compile, or of a warm-up."""
    from torch._inductor import codecache, cpp_builder
    from torch._inductor.codegen import cpp as kernels

    run, header = cpp_builder._run_compile_cmd, codecache._precompile_header
    parallel = kernels.WorkSharing.parallel
    commands = _Commands(run, clock, warm_up)

    def precompile(header: str, hashable_cmd_line: str, **compile_command: Any) -> str:
        return (_header_text if warm_up else _header)(isa, header, hashable_cmd_line, **compile_command)

    kernels.WorkSharing.parallel = _parallel  # type: ignore[method-assign]
    cpp_builder._run_compile_cmd = commands
    codecache._precompile_header = precompile
    try:
        with _flags(isa), cpp_checks.noted():
            yield
    finally:
        commands.close()
        kernels.WorkSharing.parallel = parallel  # type: ignore[method-assign]
        cpp_builder._run_compile_cmd = run
        codecache._precompile_header = header


@contextmanager
def _flags(isa: str) -> Iterator[None]:
    """Has commands of the C++ compiler made for an instruction set; needs no other part of inductor."""
    from torch._inductor import cpp_builder, cpu_vec_isa

    flags = cpp_builder._get_optimization_cflags
    check, valid = cpu_vec_isa.VecISA.check_build, cpu_vec_isa.valid_vec_isa_list

    def baseline(*args: Any, **kwargs: Any) -> Any:
        compile_flags, link_flags = flags(*args, **kwargs)
        return [f"march={isa}" if flag == "march=native" else flag for flag in compile_flags], link_flags

    cpu_vec_isa.VecISA.check_build = _compiler_knows
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
        cpp_builder._get_optimization_cflags = flags
        cpu_vec_isa.VecISA.check_build = check
        cpu_vec_isa.valid_vec_isa_list = valid


def begin(isa: str, device: str, options: dict[str, Any], out: Path) -> Future[list[Any]]:
    """Starts the C++ compiler on the machine's headers, before what else a compile needs is imported. A header that
    another process makes is waited for.

    That takes as long, and the compiler's commands need one module of inductor alone. Threads only wait for processes:
    modules are imported, and commands made, before there are any.

    Breaks if: `AotCodeCompiler.compile` gives the compiler other flags, or asks for other headers; those are then made
    by the first compile, and these for nothing.
    """
    from torch._inductor import config, cpp_builder, cpu_vec_isa
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions

    with config.patch(options), _flags(isa):
        vector = cpu_vec_isa.pick_vec_isa()
        probe = CppTorchDeviceOptions(vec_isa=vector, device_type=device, aot_mode=True)
        hashable = repr(CppBuilder(name="o", sources="i", BuildOption=probe).get_command_line())
        asked: dict[str, Any] = {
            "aot_mode": True,
            "device_type": device,
            "use_mmap_weights": False,
            "use_mmap_weights_external": False,
            "use_relative_path": False,
            "vec_isa": vector,
        }
        include = "torch/csrc/inductor/aoti_include"
        stack = device == "cpu" and config.aot_inductor.allow_stack_allocation
        headers = [(f"{include}/{'array_ref' if stack else device}.h", {"min_optimize": True, **asked})]
        if device == "cpu":
            headers.append(("torch/csrc/inductor/cpp_prefix.h", asked))
        run = cpp_builder._run_compile_cmd
        work: list[Callable[[], Any]] = [
            functools.partial(_compile_header, run, *_header_command(isa, header, hashable, command))
            for header, command in headers
        ]
        wrapper = CppTorchDeviceOptions(compile_only=True, min_optimize=True, **asked)
        header, command = headers[0]
        wrapper.precompiled_header = _header_text(isa, header, hashable, **command)
        source = str(out / "nothing.wrapper.cpp")
        built = CppBuilder(name="nothing.wrapper", sources=source, output_dir=str(out), BuildOption=wrapper)
        work.append(_Interface(run).making(built.get_command_line()))
    threads = ThreadPoolExecutor(len(work) + 1)
    running = [threads.submit(item) for item in work]
    begun = threads.submit(lambda: [item.result() for item in running])
    threads.shutdown(wait=False)
    return begun


def _parallel(self: Any, threads: int) -> None:
    """Opens a parallel region as `WorkSharing.parallel` does, of at most the threads that the process may use.

    Breaks if: that method changes. Templates, whose loops need exactly as many threads, write regions of their own.
    """
    from torch._inductor import config

    if self.in_parallel and threads != self.num_threads:
        self.close()
    if not self.in_parallel:
        self.num_threads, self.in_parallel = threads, True
        most = "" if config.cpp.dynamic_threads else f" num_threads(std::min({threads}, omp_get_max_threads()))"
        self.code.writeline(f"#pragma omp parallel{most}")
        self.stack.enter_context(self.code.indent())
        self.code.writeline("int tid = omp_get_thread_num();")


class _Commands:
    """Runs the compiler's commands: those that compile a file in the background, a link when they have ended."""

    def __init__(self, run: Run, clock: Any, warm_up: bool) -> None:
        self._run = run
        self._clock = clock
        self._warm_up = warm_up
        self._interface = _Interface(run)
        self._threads = ThreadPoolExecutor(4)
        self._running: list[Future[None]] = []

    def __call__(self, command: str, cwd: str) -> None:
        kind = _kind(command)
        if kind == "headers":
            with self._clock.phase(kind):
                self._run(command, cwd)
            return
        if kind == "link":
            with self._clock.phase("cpp"):
                self.wait()
                command = self._interface.link(command)
            with self._clock.phase(kind):
                self._run(_only_needed(command), cwd)
            return
        if self._warm_up:
            raise Enough
        if ".cpp " not in command:
            # The constants, in assembler: a matter of milliseconds, and removed at once.
            self._run(command, cwd)
            return
        self._clock.tell("cpp")
        if _wrapper(command):
            command = self._interface.shorten(command, self._threads)
        else:
            _note_checks(command)
        # The folder that inductor names is removed as soon as this returns.
        self._running.append(self._threads.submit(self._run, command, str(_header_folder())))

    def wait(self) -> None:
        """Waits for what was started, and raises what failed."""
        running, self._running = self._running, []
        for future in running:
            future.result()

    def close(self) -> None:
        """Waits for whatever still runs."""
        self._threads.shutdown(wait=True, cancel_futures=True)


def _note_checks(command: str) -> None:
    """Rewrites the checks of a file of kernels that is about to be compiled."""
    for name in (word for word in shlex.split(command) if word.endswith(".cpp")):
        path = Path(name)
        text = path.read_text()
        made = cpp_checks.note_in(text)
        if made != text:
            path.write_text(made)


def _wrapper(command: str) -> bool:
    return ".wrapper.cpp " in command


class _Interface:
    """Takes the part that all artifacts share out of one artifact's code, and links it in compiled.

    Breaks if: torch's `interface.cpp` is no longer copied into the code as it is, or the class it drives changes; the
    code is then compiled whole, as torch does it.
    """

    _MODEL = "#include <torch/csrc/inductor/aoti_runtime/model.h>\n"
    _BASE = "template class torch::aot_inductor::AOTInductorModelBase<torch::aot_inductor::AOTInductorModel>;\n"
    _failed = False

    def __init__(self, run: Run) -> None:
        self._run = run
        self._whole = ""
        self._wrapper = ""
        self._made: Future[Path] | None = None

    def shorten(self, command: str, threads: ThreadPoolExecutor) -> str:
        """Returns the command that compiles the rest of a wrapper; the shared part is compiled beside it if need be."""
        source, target = _source_and_target(command)
        shared = _interface_text()
        text = Path(source).read_text()
        if _Interface._failed or shared is None or shared not in text or f"-o {target}" not in command:
            return command
        rest = source.removesuffix(".wrapper.cpp") + ".model.cpp"
        Path(rest).write_text(text.replace(shared, f"{self._MODEL}extern {self._BASE}", 1))
        self._whole, self._wrapper = command, target
        self._made = threads.submit(self.make, command)
        return command.replace(source, rest, 1)

    def link(self, command: str) -> str:
        """Returns the command that links the shared part too."""
        from torch._inductor import exc

        if self._made is None or f"{self._wrapper} " not in command:
            return command
        try:
            made = self._made.result()
        except exc.CppCompileError:
            _Interface._failed = True
            self._run(self._whole, str(_header_folder()))
            return command
        return command.replace(f"{self._wrapper} ", f"{self._wrapper} {made} ", 1)

    def make(self, command: str) -> Path:
        """Compiles the shared part with the flags of a wrapper, unless it is there; returns its object."""
        return self.making(command)()

    def making(self, command: str) -> Callable[[], Path]:
        """Returns what does so, without importing anything."""
        from torch.utils._filelock import FileLock

        source, target = _source_and_target(command)
        flags = command.replace(source, "", 1).replace(target, "", 1)
        text = _interface_text() or ""
        folder = _header_folder()
        name = _digest([flags, text, *_compiler_identity()])
        made = folder / f"{name}.o"

        def make() -> Path:
            with FileLock(str(folder / f"{name}.lock")):
                if not made.exists():
                    code = folder / f"{name}.cpp"
                    code.write_text(f"{self._MODEL}{self._BASE}{text}\n")
                    partial = folder / f"{name}.o.partial"
                    replaced = command.replace(source, str(code), 1).replace(f"-o {target}", f"-o {partial}", 1)
                    self._run(replaced, str(folder))
                    os.replace(partial, made)
            return made

        return make


def _source_and_target(command: str) -> tuple[str, str]:
    source = next(word for word in shlex.split(command) if word.endswith(".wrapper.cpp"))
    return source, source.removesuffix(".cpp") + ".o"


@functools.cache
def _interface_text() -> str | None:
    import torch._inductor

    path = Path(torch._inductor.__file__).parent / "codegen" / "aoti_runtime" / "interface.cpp"
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

    The constants are assembled from a file that does not say that it needs no executable stack, so the link says it.
    """
    program, rest = command.split(" ", 1)
    rest = re.sub(r" (-Wl,-rpath[=,]\S+|-Wl,--no-as-needed|-ltorch)(?= |$)", "", rest)
    return f"{program} -Wl,--as-needed -Wl,-z,noexecstack {rest}"


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

    path, *command = _header_command(isa, header, hashable_cmd_line, compile_command)
    _compile_header(cpp_builder._run_compile_cmd, path, *command)
    return str(path)


def _header_command(isa: str, header: str, hashable_cmd_line: str, asked: dict[str, Any]) -> tuple[Path, Path, str]:
    """Returns a header's text, the file that it compiles to, and the command that does it."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions

    path = Path(_header_text(isa, header, hashable_cmd_line, **asked))
    options = CppTorchDeviceOptions(**asked, precompiling=True)
    builder = CppBuilder(name=str(path), sources=str(path), BuildOption=options)
    return path, Path(builder.get_target_file_path()), builder.get_command_line()


def _compile_header(run: Run, path: Path, target: Path, command: str) -> None:
    from torch.utils._filelock import FileLock

    with FileLock(str(path.with_suffix(".lock"))):
        if not path.with_suffix(".h.gch").exists():
            # Written beside and renamed: a killed compiler leaves no half header behind.
            partial = str(target) + ".partial"
            run(command.replace(f"-o {target}", f"-o {partial}"), str(path.parent))
            os.replace(partial, target)


def _header_text(isa: str, header: str, hashable_cmd_line: str, **compile_command: Any) -> str:
    """Returns where a compiled header lies or will; the text beside it does in its place until then."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions

    options = CppTorchDeviceOptions(**compile_command, precompiling=True)
    probe = CppBuilder(name="header", sources="header.h", BuildOption=options)
    name = _digest([isa, header, hashable_cmd_line, probe.get_command_line(), *_compiler_identity()])
    path = _header_folder() / f"{name}.h"
    if not path.exists():
        # Written beside and renamed: another process may be reading it.
        partial = path.with_suffix(f".h.{os.getpid()}")
        partial.write_text(f"#include <{header}>\n")
        os.replace(partial, path)
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
