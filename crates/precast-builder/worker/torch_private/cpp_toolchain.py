"""The compiler's use of the C++ compiler, for the time of one compile.

Inductor compiles one C++ file after the other. They do not depend on each other until the link, which waits for them
here. Headers and shared code are compiled once on a machine (`cpp_headers`, `cpp_interface`).

The kernels that it generates start as many threads as the build had, also in a process that may use fewer: a service
that gives each caller one thread would get all of them for each. Here that number is an upper bound.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import cpp_checks, cpp_headers, versions
from .cpp_flags import OWN_LIBRARIES, cpp_library, flags_for
from .cpp_headers import Run, header_folder
from .cpp_interface import Interface
from .patches import replaced


class WarmedUp(Exception):
    """A warm-up has reached its first C++ file."""


@contextmanager
def toolchain(isa: str, clock: Any, operators_of: Callable[[Any], set[str]], warm_up: bool = False) -> Iterator[None]:
    """Replaces inductor's use of the C++ compiler.

    `clock` measures each phase; `operators_of` names the operators of a node that take an index, for messages.

    Private: `torch._inductor.cpp_builder._run_compile_cmd`, `torch._inductor.codecache._precompile_header`,
    `torch._inductor.codegen.cpp.WorkSharing.parallel`. Without them: builds take longer, and artifacts use all threads.
    """
    from torch._inductor import codecache, cpp_builder
    from torch._inductor.codegen import cpp as kernels

    commands = _Commands(cpp_builder._run_compile_cmd, clock, warm_up)

    def precompile(header: str, hashable_cmd_line: str, **compile_command: Any) -> str:
        find = cpp_headers.header_text if warm_up else cpp_headers.header
        return find(isa, header, hashable_cmd_line, **compile_command)

    places = [(kernels.WorkSharing, "parallel", _parallel), (cpp_builder, "_run_compile_cmd", commands)]
    if versions.works(versions.SHARED_HEADERS):
        places.append((codecache, "_precompile_header", precompile))
    with replaced(*places), flags_for(isa), cpp_checks.noted(operators_of):
        try:
            yield
        finally:
            commands.close()


def begin(isa: str, device: str, options: dict[str, Any], out: Path) -> Future[list[Any]]:
    """Starts to compile the machine's headers, before the rest of the compiler is imported: both take as long.

    A header that another process compiles is waited for. The commands need one module of inductor only. Threads wait
    for processes and do nothing else: modules are imported, and commands built, before threads start.

    Private: the flags and the headers that `AotCodeCompiler.compile` asks for. Without them: the first compile makes
    its own headers, and these are of no use.
    """
    from torch._inductor import config, cpp_builder, cpu_vec_isa
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions

    with config.patch(options), flags_for(isa):
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
            functools.partial(
                cpp_headers.compile_header, run, *cpp_headers.header_command(isa, header, hashable, command)
            )
            for header, command in headers
        ]
        wrapper = CppTorchDeviceOptions(compile_only=True, min_optimize=True, **asked)
        header, command = headers[0]
        wrapper.precompiled_header = cpp_headers.header_text(isa, header, hashable, **command)
        source = str(out / "nothing.wrapper.cpp")
        built = CppBuilder(name="nothing.wrapper", sources=source, output_dir=str(out), BuildOption=wrapper)
        work.append(Interface(run).compilation(built.get_command_line()))
    threads = ThreadPoolExecutor(len(work) + 1)
    running = [threads.submit(item) for item in work]
    begun = threads.submit(lambda: [item.result() for item in running])
    threads.shutdown(wait=False)
    return begun


def _parallel(self: Any, threads: int) -> None:
    """Opens a parallel region as `WorkSharing.parallel` does, with at most the threads that the process may use.

    Templates, whose loops need an exact number of threads, write separate regions.

    Private: that method, which this repeats. Without it: artifacts use all threads.
    """
    from torch._inductor import config

    if self.in_parallel and threads != self.num_threads:
        self.close()
    if not self.in_parallel:
        self.num_threads, self.in_parallel = threads, True
        limit = "" if config.cpp.dynamic_threads else f" num_threads(std::min({threads}, omp_get_max_threads()))"
        self.code.writeline(f"#pragma omp parallel{limit}")
        self.stack.enter_context(self.code.indent())
        self.code.writeline("int tid = omp_get_thread_num();")


class _Commands:
    """Runs the compiler's commands: compilations in the background, a link when they have ended."""

    def __init__(self, run: Run, clock: Any, warm_up: bool) -> None:
        self._run = run
        self._clock = clock
        self._warm_up = warm_up
        self._interface = Interface(run)
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
            raise WarmedUp
        if ".cpp " not in command:
            # The constants, in assembler: it takes milliseconds, and the file is removed at once.
            self._run(command, cwd)
            return
        self._clock.begin("cpp")
        if ".wrapper.cpp " in command:
            command = self._interface.shorten(command, self._threads)
        else:
            _note_checks(command)
        # The folder that inductor names is removed as soon as this returns.
        self._running.append(self._threads.submit(self._run, command, str(header_folder())))

    def wait(self) -> None:
        """Waits for all compilations; raises the error of a failed one."""
        running, self._running = self._running, []
        for future in running:
            future.result()

    def close(self) -> None:
        """Waits for compilations that still run."""
        self._threads.shutdown(wait=True, cancel_futures=True)


def _note_checks(command: str) -> None:
    """Rewrites the checks of a file of kernels that is about to be compiled."""
    for name in (word for word in shlex.split(command) if word.endswith(".cpp")):
        path = Path(name)
        text = path.read_text()
        changed = cpp_checks.note_in(text)
        if changed != text:
            path.write_text(changed)


def _kind(command: str) -> str:
    if " c++-header " in command:
        return "headers"
    return "cpp" if " -c " in command else "link"


def _only_needed(command: str) -> str:
    """Returns a link command that names only libraries that the object uses, and no folder of this machine.

    Inductor names `libtorch.so`, which has only copies of C++ templates and loads the CUDA half of libtorch into a CPU
    process, and the folder of torch here. A process that loads the object has loaded libtorch before.

    The assembler file of the constants does not declare that it needs no executable stack, so the link does. Symbols of
    static libraries are not exported, and the C++ library is torch's.
    """
    program, rest = command.split(" ", 1)
    rest = re.sub(r" (-Wl,-rpath[=,]\S+|-Wl,--no-as-needed|-ltorch)(?= |$)", "", rest)
    return f"{program} -Wl,--as-needed -Wl,-z,noexecstack {OWN_LIBRARIES} {rest} {shlex.join(cpp_library())}"
