"""Workers that are forks: they answer, fail and end as those that Python starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

from .support import ROOT

WORKER = ROOT / "crates" / "precast-builder" / "worker"


class ForksTest(unittest.TestCase):
    # Longer than the address of a socket may be. It goes with the process.
    folder = tempfile.TemporaryDirectory(prefix="f" * 110)

    def start(self, **environ: str) -> subprocess.Popen[str]:
        program = WORKER / "torch_private" / "forks.py"
        command = [sys.executable, "-I", "-S", "-u", str(program), self.folder.name, str(WORKER)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        made: Any = subprocess.Popen(command, env=os.environ | environ, text=True, process_group=0, **pipes)
        self.addCleanup(made.__exit__, None, None, None)
        self.addCleanup(made.kill)
        return made

    def hello(self, worker: subprocess.Popen[str]) -> dict[str, object]:
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdin.write('{"id": 1, "op": "hello"}\n')
        worker.stdin.flush()
        answer = json.loads(worker.stdout.readline())
        self.assertEqual(answer["kind"], "result")
        return answer["value"]

    def group(self, worker: subprocess.Popen[str]) -> list[int]:
        """Returns the other processes of its group."""
        found = subprocess.run(["ps", "-e", "-o", "pid=,pgid="], capture_output=True, text=True, check=True).stdout
        pairs = (map(int, line.split()) for line in found.splitlines())
        return [pid for pid, group in pairs if group == worker.pid and pid != worker.pid]

    def sources(self) -> list[Path]:
        return [path for path in Path(self.folder.name).iterdir() if path.is_socket()]

    def test_a_fork_answers_with_one_thread_and_ends_with_its_input(self) -> None:
        workers = [self.start(), self.start()]
        for worker in workers:
            self.assertTrue(self.hello(worker)["torch"])
            (fork,) = self.group(worker)
            self.assertEqual(len(os.listdir(f"/proc/{fork}/task")), 1)
        self.assertEqual(len(self.sources()), 1)
        for worker in workers:
            worker.stdin.close()  # type: ignore[union-attr]
            self.assertEqual(worker.wait(30), 0)

    def test_an_end_by_a_signal_is_the_workers(self) -> None:
        worker = self.start()
        self.hello(worker)
        (fork,) = self.group(worker)
        os.kill(fork, signal.SIGSEGV)
        self.assertEqual(worker.wait(30), -signal.SIGSEGV)
        worker = self.start()
        self.hello(worker)
        os.killpg(worker.pid, signal.SIGKILL)
        self.assertEqual(worker.wait(30), -signal.SIGKILL)

    def test_the_stack_is_asked_for_by_the_number_that_the_build_knows(self) -> None:
        worker = self.start()
        self.hello(worker)
        os.kill(worker.pid, signal.SIGUSR1)
        assert worker.stderr is not None
        self.assertIn("(most recent call first)", worker.stderr.readline())

    def test_another_environment_has_a_source_of_its_own(self) -> None:
        self.hello(self.start())
        before = self.sources()
        self.hello(self.start(TORCHINDUCTOR_CACHE_DIR="elsewhere", TMPDIR=self.folder.name))
        self.assertEqual(self.sources(), before)
        self.hello(self.start(TORCH_LOGS="-dynamo"))
        self.assertEqual(len(self.sources()), 1 + len(before))

    def test_a_source_that_ended_is_started_again_and_one_that_cannot_be_is_done_without(self) -> None:
        self.hello(self.start())
        (path,) = self.sources()[:1]
        os.kill(int(path.with_suffix(".lock").read_text()), signal.SIGKILL)
        time.sleep(0.2)
        self.hello(self.start())
        # It ends with its socket.
        for path in self.sources():
            pid = int(path.with_suffix(".lock").read_text())
            path.unlink()
            for _ in range(100):
                if not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text():
                    break
                time.sleep(0.1)
            else:
                self.fail("it goes on without its socket")
            path.with_suffix(".unable").write_text("it has 2 threads")
            self.addCleanup(path.with_suffix(".unable").unlink)
        worker = self.start()
        self.hello(worker)
        self.assertEqual(self.group(worker), [])

    def test_a_torch_that_ends_the_process_ends_the_worker_too(self) -> None:
        package = Path(self.folder.name) / "package"
        package.mkdir()
        (package / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
        worker = self.start(PYTHONPATH=str(package))
        assert worker.stdin is not None
        worker.stdin.write('{"id": 1, "op": "hello"}\n')
        worker.stdin.flush()
        self.assertEqual(worker.wait(30), -signal.SIGKILL)
