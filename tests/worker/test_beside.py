"""Imports in a thread while the model is made: nobody sees half a module, and the model is the one it would be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

from .support import SOURCES, Project

# Opens a model in a fresh process, with the imports beside it or without, and says what came of it.
OPEN = """
import importlib, json, os, sys
from pathlib import Path
root, entry, with_imports = Path(sys.argv[2]), sys.argv[3], sys.argv[4] == "with"
sys.path.insert(0, os.path.dirname(sys.argv[1]))
import torch
beside, entries = (importlib.import_module(os.path.basename(sys.argv[1]) + "." + name) for name in ("beside", "entry"))
sys.path.pop(0)
if not with_imports:
    beside.FOR_CAPTURES = ()
before = "torch._dynamo" in sys.modules
opened = entries.open_model(root, entry, "cpu")
print(json.dumps({
    "before": before,
    "after": "torch._dynamo" in sys.modules,
    "fingerprint": opened.answer()["fingerprint"],
    "packages": [package["name"] for package in opened.packages],
    "said": getattr(opened.model, "said", None),
    "beside": getattr(opened.model, "beside", None),
}))
"""
# Either may be imported first by one thread; by two at once, each would see half of the other.
LEFT = "import time\ntime.sleep(0.3)\nfrom right import R\nL = 1\n"
RIGHT = "import time\ntime.sleep(0.3)\nimport left\nR = 2\n"
CROSSED = """
import builtins, importlib, os, sys, time
sys.path[:0] = [sys.argv[2], os.path.dirname(sys.argv[1])]
beside = importlib.import_module(os.path.basename(sys.argv[1]) + ".beside")
statement, by_name = builtins.__import__, importlib.import_module
with beside.importing(["gone", "left"]):
    time.sleep(0.1)
    how = sys.argv[3]
    if how == "statement":
        from right import R
    elif how == "function":
        R = by_name("right").R
    elif how == "fork":
        child = os.fork()
        if not child:
            import left
            os._exit(left.L)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        from right import R
    elif how == "thread":
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor() as threads:
            R = threads.submit(by_name, "right").result().R
import left
assert (left.L, R) == (1, 2) and builtins.__import__ is statement
"""


class BesideTest(Project):
    def open_fresh(self, text: str, how: str = "with") -> dict[str, Any]:
        name = f"project_{how}.py"
        (self.root / name).write_text(textwrap.dedent(text))
        command = [sys.executable, "-P", "-c", OPEN, str(SOURCES), str(self.root), f"{name[:-3]}:load", how]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=300)
        return json.loads(done.stdout)

    def test_the_model_is_the_one_it_would_be(self) -> None:
        text = """
        import random, threading, torch
        def load():
            beside = any(thread.name == "imports" for thread in threading.enumerate())
            model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
            model.said = [random.random() for _ in range(3)]
            model.beside = beside
            return model
        """
        plain, made = self.open_fresh(text, "without"), self.open_fresh(text)
        self.assertEqual((made["before"], made["after"], plain["after"]), (False, True, False))
        # It waited for nothing before it began.
        self.assertEqual((made["beside"], plain["beside"]), (True, False))
        for what in ("fingerprint", "said", "packages"):
            self.assertEqual(made[what], plain[what])

    def test_an_entry_may_import_the_same_at_the_same_time(self) -> None:
        made = self.open_fresh(
            """
            import importlib, threading, torch
            found = []
            def also():
                found.append(importlib.import_module("torch._inductor.compile_fx"))
            def load():
                thread = threading.Thread(target=also)
                thread.start()
                import torch.onnx, torch.distributed.tensor
                from torch._export.serde import serialize
                import sympy
                model = torch.nn.Linear(2, 2)
                thread.join()
                model.said = [sympy.__name__, serialize.__name__, torch._functorch.__name__, found[0].__name__]
                return model
            """
        )
        expected = ["sympy", "torch._export.serde.serialize", "torch._functorch", "torch._inductor.compile_fx"]
        self.assertEqual(made["said"], expected)
        self.assertIn("sympy", made["packages"])

    def test_nobody_sees_half_a_module(self) -> None:
        (self.root / "left.py").write_text(LEFT)
        (self.root / "right.py").write_text(RIGHT)
        for how in ("statement", "function", "fork", "thread"):
            command = [sys.executable, "-P", "-c", CROSSED, str(SOURCES), str(self.root), how]
            with self.subTest(how):
                subprocess.run(command, env={**os.environ, "PYTHONWARNINGS": "ignore"}, check=True, timeout=300)

    def test_all_that_a_capture_imports_is_named(self) -> None:
        code = """
import importlib.metadata, os, sys
from pathlib import Path
sys.path.insert(0, os.path.dirname(sys.argv[1]))
worker = os.path.basename(sys.argv[1])
beside, capture = (importlib.import_module(f"{worker}.{name}") for name in ("beside", "capture"))
import torch
own, state = set(sys.modules), torch.get_rng_state()
for name in beside.FOR_CAPTURES:
    importlib.import_module(name)
there = set(sys.modules)
assert torch.equal(state, torch.get_rng_state())
class Quiet:
    def event(self, phase): pass
capture.rehearse(Path(sys.argv[2]), Quiet())
owners = importlib.metadata.packages_distributions()
new = {name.partition(".")[0] for name in there - own} & set(owners)
print(len(set(sys.modules) - there), *sorted(new - beside.PACKAGES - {"torch", "functorch"}))
"""
        command = [sys.executable, "-P", "-c", code]
        done = subprocess.run([*command, str(SOURCES), str(self.root)], stdout=subprocess.PIPE, check=True, text=True)
        more, *others = done.stdout.split()
        self.assertLess(int(more), 20)
        self.assertEqual(others, [])
