"""Bytecode of torch: where it lacks its own, a folder that outlives builds has it, made once."""

from __future__ import annotations

import json
import os
import py_compile
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

WORKER = Path(__file__).resolve().parent.parent.parent / "crates/precast-builder/worker"
# What a worker does: looks for bytecode, imports torch. Says where it came from, and what this process had made.
USE = """
import json, subprocess, sys
sys.dont_write_bytecode = True
sys.path.insert(0, sys.argv[1])
import bytecode
sys.path.pop(0)
started = []
popen = subprocess.Popen
bytecode.subprocess.Popen = lambda *args, **kwargs: started.append(popen(*args, **kwargs))
bytecode.use()
import torch, beside
for child in started:
    child.wait()
spec, other = torch.__spec__, beside.__spec__
print(json.dumps({"cached": spec.cached, "beside": other.cached, "std": json.__spec__.cached, "made": len(started)}))
"""


class BytecodeTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        for name in ("torch", "torch/nn", "torch/test", "sympy"):
            (self.root / "packages" / name).mkdir(parents=True)
            (self.root / "packages" / name / "__init__.py").write_text("answer = 42\n")
        (self.root / "packages/beside.py").write_text("")
        self.torch = self.root / "packages/torch/__init__.py"
        self.kept = self.root / "kept"
        self.own = str(self.root / "packages/torch/__pycache__")

    def use(self, **more: str) -> dict[str, object]:
        env = {"PYTHONPATH": str(self.root / "packages"), "PRECAST_BYTECODE_DIR": str(self.kept), **more}
        command = [sys.executable, "-P", "-S", "-c", USE, str(WORKER)]
        done = subprocess.run(command, env={**os.environ, **env}, stdout=subprocess.PIPE, check=True)
        return json.loads(done.stdout)

    def files(self) -> set[str]:
        return {path.parent.name for path in self.kept.rglob("__init__.*.pyc")}

    def test_it_is_made_once_and_read_from_then_on(self) -> None:
        first = self.use()
        self.assertEqual(first["made"], 1)
        kept = Path(str(first["cached"]))
        self.assertTrue(kept.is_relative_to(self.kept) and kept.is_file(), first)
        self.assertEqual(kept.read_bytes()[4], 3, "it is compared with the hash of its source")
        self.assertEqual(kept.stat().st_mode & 0o077, 0)
        for elsewhere in (first["beside"], first["std"]):
            self.assertFalse(Path(str(elsewhere)).is_relative_to(self.kept), elsewhere)
        self.assertEqual(self.files(), {"torch", "nn", "sympy"}, "no tests")
        self.assertEqual(self.use()["made"], 0)
        self.assertEqual(list((self.root / "packages").rglob("*.pyc")), [], "nothing beside the sources")

    def test_what_importing_torch_imports_is_made_first(self) -> None:
        code = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import bytecode
sys.path.pop(0)
import torch
if len(sys.argv) > 2:
    import torch._inductor.compile_fx
stages = {}
for module in list(sys.modules.values()):
    path = getattr(module, "__file__", None) or ""
    name = path.partition("site-packages/")[2]
    if name.endswith(".py") and name.partition("/")[0] in bytecode._PACKAGES:
        stage = str(bytecode._stage(name))
        stages[stage] = stages.get(stage, 0) + os.path.getsize(path)
print(json.dumps(stages))
"""
        for more, made in (([], ["0"]), (["compiler"], ["0", "1"])):
            command = [sys.executable, "-P", "-c", code, str(WORKER), *more]
            stages = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
            late = sum(size for stage, size in stages.items() if stage not in made)
            self.assertLess(late, sum(stages.values()) / 10, stages)

    def test_another_torch_in_its_place_is_made_again(self) -> None:
        self.use()
        self.torch.write_text("answer = 43\n")
        os.utime(self.torch, (1, 1))
        self.assertEqual(self.use()["made"], 1)

    def test_a_torch_that_has_its_own_is_left_alone(self) -> None:
        py_compile.compile(str(self.torch))
        self.check_own()

    def test_a_folder_that_others_can_write_is_not_used(self) -> None:
        self.kept.mkdir()
        for mode in (0o777, 0o755):
            self.kept.chmod(mode)
            self.check_own()
        self.check_own(PRECAST_BYTECODE_DIR="")

    def check_own(self, **more: str) -> None:
        self.assertEqual((os.path.dirname(str(self.use(**more)["cached"])), self.files()), (self.own, set()))

    def test_a_folder_that_can_not_be_used_ends_no_worker(self) -> None:
        self.kept.mkdir(mode=0o700)
        (self.kept / "lock").mkdir()
        self.check_own()

    def test_what_could_not_be_compiled_is_not_marked(self) -> None:
        broken = self.root / "packages/sympy/broken.py"
        broken.write_text("(")
        self.assertEqual([self.use()["made"], self.use()["made"]], [1, 1])
        broken.write_text("()")
        self.assertEqual([self.use()["made"], self.use()["made"]], [1, 0])

    def test_a_folder_of_tests_above_the_packages_hides_nothing(self) -> None:
        (self.root / "packages").rename(self.root / "test")
        (self.root / "packages").symlink_to(self.root / "gone")
        self.use(PYTHONPATH=str(self.root / "test"))
        self.assertEqual(self.files(), {"torch", "nn", "sympy"})

    def test_one_whose_maker_died_is_waited_for_no_longer(self) -> None:
        self.kept.mkdir(mode=0o700)
        (self.kept / "lock").touch()
        self.assertEqual(self.use()["made"], 1)


if __name__ == "__main__":
    unittest.main()
