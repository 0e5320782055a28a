"""Helpers of the worker's tests: the package under its name, a project in a temp folder, a composed program."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import unittest
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "crates/precast-builder/worker"
# Headers outlive a run of the tests, as they outlive a build.
os.environ.setdefault("PRECAST_HEADER_DIR", str(ROOT / "target" / "headers"))


def _package() -> None:
    if "precast_worker" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        "precast_worker", SOURCES / "__init__.py", submodule_search_locations=[str(SOURCES)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["precast_worker"] = module
    spec.loader.exec_module(module)


def long(test: Any) -> Any:
    """Marks a test that `make test` leaves out and `make test-long` runs."""
    return unittest.skipUnless(os.environ.get("PRECAST_LONG_TESTS"), "`make test-long` runs it")(test)


def part(name: str) -> Any:
    _package()
    return importlib.import_module(f"precast_worker.{name}")


class Quiet:
    """A wire that keeps its messages."""

    def __init__(self) -> None:
        self.id = 1
        self.phases: list[str] = []

    def event(self, phase: str) -> None:
        self.phases.append(phase)


class Project(unittest.TestCase):
    """A test with a folder of its own; every project module gets a name that no other test has."""

    count = 0

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(os.path.realpath(folder.name))
        self.out = self.root / "out"
        self.out.mkdir()
        path = list(sys.path)
        self.addCleanup(lambda: sys.path.__setitem__(slice(None), path))

    def write(self, text: str) -> str:
        Project.count += 1
        name = f"project_{Project.count}"
        (self.root / f"{name}.py").write_text(textwrap.dedent(text))
        return name

    def open(
        self,
        text: str,
        entry: str = "load",
        device: str = "cpu",
        also: Sequence[str] = (),
        context: int | None = None,
        unsaved: Sequence[str] = (),
    ) -> Any:
        name = f"{self.write(text)}:{entry}"
        return part("model.entry").open_model(self.root, name, device, also, context=context, unsaved=unsaved)

    def capture(self, opened: Any, **request: Any) -> dict[str, Any]:
        """Captures; `inputs` are (name, dtype, shape) or (name, dtype, shape, dims), `specs` as the plan sends them."""
        inputs = request.pop("specs", None) or [spec(*entry) for entry in request.pop("inputs")]
        sizes = request.pop("sizes", {})
        module = {"name": "m", "path": "", "method": "forward", "regions": [], **request, "inputs": inputs}
        self.wire = Quiet()
        return part("capture").capture(opened, module, sizes, self.out, self.wire)

    def fails(self, code: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the failure with this code that a call raises."""
        with self.assertRaises(part("wire").Failure) as caught:
            function(*args, **kwargs)
        failure = caught.exception
        self.assertEqual(failure.code, code, failure.message)
        self.assertNotIn("\n", failure.message)
        return failure

    def refused(self, code: str, model: Any, **request: Any) -> Any:
        """Returns the failure of the capture of a model, opened or as source."""
        opened = self.open(model) if isinstance(model, str) else model
        return self.fails(code, self.capture, opened, **request)

    def checked(self, model: Any, **request: Any) -> dict[str, Any]:
        """Captures a model, opened or as source; fails unless the steps give eager's results, bit for bit."""
        opened = self.open(model) if isinstance(model, str) else model
        captured = self.capture(opened, **request)
        self.check_composed(opened, captured)
        return captured

    def compile(self, captured: dict[str, Any], name: str = "compiled", **request: Any) -> dict[str, Any]:
        """Compiles a segment into a folder of this name."""
        request = {"device": "cpu", "isa": "native", "mode": "default", "options": {}, **request}
        request["file"] = captured["segments"][request.pop("segment", 0)]["file"]
        out = self.out / name
        out.mkdir()
        return part("compiler").compile_segment(request, out, Quiet())

    def wrapper(self, name: str = "compiled") -> str:
        """Returns the C++ code of a compile that calls its kernels."""
        return "".join(file.read_text() for file in (self.out / name).rglob("*wrapper.cpp"))

    def weights(self, opened: Any, captured: dict[str, Any] | None = None) -> dict[str, Any]:
        """Writes the weight set and reads it back, with the further tensors of a capture."""
        files = [part("weights").write(opened, self.out)["file"], (captured or {}).get("extra_weights")]
        held: dict[str, Any] = {}
        for file in filter(None, files):
            held |= part("tensors").read(Path(file))
        return held

    def samples(self, captured: dict[str, Any]) -> dict[str, Any]:
        return part("tensors").read(Path(captured["samples"]))

    def bound(self, captured: dict[str, Any], weights: dict[str, Any], step: int = 0) -> dict[str, Any]:
        return {name: weights[tensor] for name, tensor in captured["steps"][step]["binding"].items()}

    def run_eager(self, captured: dict[str, Any], inputs: list[Any], weights: dict[str, Any]) -> list[Any]:
        """Makes the calls of the runtime's eager."""
        from . import shim

        given = [*inputs, *(weights[name] for name in captured["exported_weights"])]
        return shim.run(Path(captured["exported"]), given)

    def load_segment(
        self, text: str, shape: list[int], dtype: str = "float32"
    ) -> tuple[Any, dict[str, Any], list[Any]]:
        """Returns the one segment of a model with one input, loaded, with the model's own weights by constant."""
        opened = self.open(text)
        captured = self.capture(opened, inputs=[("x", dtype, shape)])
        module, inputs, _ = part("graph.segment").load(Path(captured["segments"][0]["file"]), "cpu")
        weights = self.bound(captured, self.weights(opened))
        for name, buffer in module.named_buffers():
            buffer.copy_(weights[name])
        return module, weights, inputs

    def given(self, captured: dict[str, Any], samples: dict[str, Any]) -> list[Any]:
        """Returns the sample inputs and states. Kept in `states`, where a run leaves new values."""
        self.states = [samples[f"state.{index}"].clone() for index in range(len(captured["states"]))]
        return [*(samples[f"in.{index}"] for index in range(len(captured["inputs"]))), *self.states]

    def check_near(self, opened: Any, rtol: float, atol: float | None, **request: Any) -> dict[str, Any]:
        """Captures; fails unless the steps, and eager's calls, give about the samples' outputs and states.

        Without `atol` the largest output is what `rtol` is a share of.
        """
        captured = self.capture(opened, **request)
        weights, samples = self.weights(opened, captured), self.samples(captured)
        if atol is None:
            atol = rtol * max(one.abs().max().item() for name, one in samples.items() if name.startswith("out."))
        runs = [lambda: self.composed(captured, weights)]
        runs.append(lambda: self.run_eager(captured, self.given(captured, samples), weights))
        for run in runs:
            made = [(one["name"], f"out.{at}") for at, one in enumerate(captured["outputs"])]
            kept = [(one["name"], f"after.{at}") for at, one in enumerate(captured["states"])]
            for got, (name, sample) in zip([*run()[: len(made)], *self.states], [*made, *kept], strict=True):
                says = functools.partial("{}: {}".format, name)
                torch.testing.assert_close(got, samples[sample], rtol=rtol, atol=atol, msg=says)
        return captured

    def check_states(self, samples: dict[str, Any]) -> None:
        """Fails unless the last run left the states that the module left."""
        for index, state in enumerate(self.states):
            self.assertTrue(torch.equal(state, samples[f"after.{index}"]), f"state {index} differs from eager")

    def composed(self, captured: dict[str, Any], weights: dict[str, Any]) -> list[Any]:
        """Runs the captured steps one after the other, uncompiled, on the sample inputs; returns the results."""
        values = self.values(captured, weights, self.given(captured, self.samples(captured)))
        return [values[number] for number in captured["results"]]

    def values(self, captured: dict[str, Any], weights: dict[str, Any], given: list[Any]) -> dict[int, Any]:
        """Runs the captured steps one after the other, uncompiled; returns all values by their numbers."""
        values: dict[int, Any] = dict(enumerate(given))
        with torch.inference_mode():
            for at, step in enumerate(captured["steps"]):
                segment = captured["segments"][step["segment"]]
                given = {f"in{index}": values[number] for index, number in enumerate(step["inputs"])}
                given |= self.bound(captured, weights, at)
                for held, layout in zip(step["inputs"], segment["inputs"], strict=True):
                    actual = part("tensors").layout(values[held])
                    assert actual == layout, f"{step['name']}: {actual} is not {layout}"
                outputs = interpret(Path(segment["file"]), given)
                values |= dict(zip(step["outputs"], outputs, strict=True))
        return values

    def check_composed(self, opened: Any, captured: dict[str, Any]) -> None:
        """Fails unless the steps give eager's results, bit for bit."""
        weights, samples = self.weights(opened, captured), self.samples(captured)
        results = self.composed(captured, weights)
        self.assertEqual(len(results), len(captured["outputs"]))
        for index, result in enumerate(results):
            expected = samples[f"out.{index}"]
            self.assertEqual(part("tensors").layout(result)["shape"], captured["outputs"][index]["shape"])
            self.assertEqual(part("tensors").layout(result)["stride"], captured["outputs"][index]["stride"])
            self.assertTrue(torch.equal(result, expected), f"output {index} differs from eager")
        self.check_states(samples)
        self.check_eager(captured, weights, samples)

    def check_eager(self, captured: dict[str, Any], weights: dict[str, Any], samples: dict[str, Any]) -> None:
        """Fails unless the calls of the runtime's eager give the module's results, bit for bit."""
        results = self.run_eager(captured, self.given(captured, samples), weights)
        self.assertEqual(len(results), len(captured["outputs"]) + len(captured["checks"]))
        for index, output in enumerate(captured["outputs"]):
            layout = part("tensors").layout(results[index])
            self.assertEqual([layout["shape"], layout["stride"]], [output["shape"], output["stride"]])
            self.assertTrue(torch.equal(results[index], samples[f"out.{index}"]), f"output {index} of eager differs")
        self.check_states(samples)


def model(body: str, init: str = "pass", extra: str = "", inputs: str = "x, y=None") -> str:
    """Returns the source of a model with `load`. The body of `forward` begins at line 8, unless there is more above."""
    indent = "\n        "
    return (
        f"import torch\n{extra}\nclass Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        {init.replace(chr(10), indent)}\n    def forward(self, {inputs}):\n"
        f"        {body.replace(chr(10), indent)}\ndef load():\n    return Model()\n"
    )


def interpret(path: Path, given: dict[str, Any]) -> list[Any]:
    """Runs a segment's graph as it was saved."""
    program = part("torch_private.archives").load_program(path)
    order = [node.target for node in program.graph.nodes if node.op == "placeholder"]
    module = torch.fx.GraphModule(program.graph_module, program.graph)
    return list(torch.fx.Interpreter(module).run(*[given[name] for name in order]))


def static_compiler(folder: Path) -> dict[str, str]:
    """Returns an environment whose `CXX` links the C++ library statically, as some hosts' compilers do."""
    found = shutil.which("g++")
    script = f'#!/bin/sh\ncase " $* " in *" -shared "*) set -- -static-libstdc++ "$@" ;; esac\nexec {found} "$@"\n'
    (folder / "g++").write_text(script)
    (folder / "g++").chmod(0o755)
    # By its usual name, so that headers are compiled once for both.
    return {"CXX": "g++", "PATH": f"{folder}:{os.environ['PATH']}"}


def spec(name: str, dtype: str, shape: list[int], dims: list[str | None] | None = None) -> dict[str, Any]:
    """Returns one input as the plan sends it."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.insert(0, step)
        step *= size
    dims = dims if dims is not None else [None] * len(shape)
    return {"name": name, "dtype": dtype, "shape": shape, "stride": stride, "dims": dims, "pad": 0}


def talk(lines: list[dict[str, Any] | str], env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Runs a real worker on request lines; returns its answers without events."""
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    done = subprocess.run(
        [sys.executable, "-P", "-u", str(SOURCES)],
        input=text,
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return [answer for answer in answers if answer["kind"] in ("result", "error")]
