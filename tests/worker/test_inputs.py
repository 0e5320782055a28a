"""Inputs that the spec leaves out: found by watching the model run, nested as they were, then captured."""

from __future__ import annotations

from typing import Any

from .support import Project, part
from .support import spec as input_spec

MODEL = """
import torch

class Inner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x, cache, mask=None, scale=1.0, *, state):
        keys, values = cache
        h = self.linear(x) * scale + keys.sum(1, keepdim=True) + state["h"]
        return {"h": (h, [values + 1, None])}

    def project(self, x):
        return x * 2

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(20, 8)
        self.inner = Inner()
        self.unused = torch.nn.Linear(1, 1)

    def forward(self, ids):
        x = self.embed(ids)
        out = self.inner(x, [x + 1, x[:, :2]], None, 2.0, state={"h": x.mean(1, keepdim=True)})
        return self.inner.project(out["h"][0])

def load():
    return Model()

def samples(batch=2, seq=5):
    return torch.randint(0, 20, (batch, seq))

def keywords(**sizes):
    return {"ids": torch.zeros(sizes["batch"], sizes["seq"], dtype=torch.int64)}

def doubled(batch):
    return torch.zeros(2 * batch, batch, dtype=torch.int64)

def broken():
    return [].pop()
"""
SIZES = {"batch": 2, "seq": 5}


class InputsTest(Project):
    def find(self, opened: Any, **request: Any) -> dict[str, Any]:
        name = opened.entry.partition(":")[0]
        if "samples" in request:
            request["samples"] = f"{name}:{request['samples']}"
        return part("model.inputs").find(opened, {"path": "inner", "method": "forward", "sizes": SIZES, **request})

    def test_nested_inputs_are_found_and_captured(self) -> None:
        opened = self.open(MODEL)
        found = self.find(opened, samples="samples")
        inputs = [(entry["name"], entry["dtype"], entry["shape"], entry["dims"]) for entry in found["inputs"]]
        wanted = [
            ("x", "float32", [2, 5, 8], ["batch", "seq", None]),
            ("cache.0", "float32", [2, 5, 8], ["batch", "seq", None]),
            ("cache.1", "float32", [2, 2, 8], ["batch", None, None]),
            ("state.h", "float32", [2, 1, 8], ["batch", None, None]),
        ]
        self.assertEqual(inputs, wanted)
        args = [{"tensor": 0}, {"list": [{"tensor": 1}, {"tensor": 2}]}, {"value": None}, {"value": 2.0}]
        self.assertEqual(found["structure"], {"args": args, "kwargs": {"state": {"dict": {"h": {"tensor": 3}}}}})
        captured = self.checked(opened, inputs=inputs, sizes=SIZES, path="inner", structure=found["structure"])
        self.assertEqual([output["name"] for output in captured["outputs"]], ["h.0", "h.1.0"])
        outputs = {"dict": {"h": {"tuple": [{"tensor": 0}, {"list": [{"tensor": 1}, {"value": None}]}]}}}
        self.assertEqual(captured["call_spec"], {"inputs": found["structure"], "outputs": outputs})

    def test_the_models_own_inputs_serve_too(self) -> None:
        opened = self.open(MODEL)
        root = [input_spec("ids", "int64", [2, 5], ["batch", "seq"])]
        self.assertEqual(self.find(opened, inputs=root), self.find(opened, samples="keywords"))
        found = self.find(opened, samples="samples", method="project")
        self.assertEqual([entry["name"] for entry in found["inputs"]], ["x"])
        found = self.find(opened, samples="samples", path="")
        self.assertEqual([(entry["name"], entry["dims"]) for entry in found["inputs"]], [("ids", ["batch", "seq"])])
        # Watching left nothing behind.
        self.assertNotIn("forward", vars(opened.model.inner))
        self.assertNotIn("project", vars(opened.model.inner))

    def test_mistakes(self) -> None:
        opened = self.open(MODEL)
        self.assertIn("`samples` in [model]", self.fails("bad_input", self.find, opened).hint)
        unused, doubled = {"samples": "samples", "path": "unused"}, {"samples": "doubled", "sizes": {"batch": 3}}
        for request, message in (
            (unused, "the model does not call `unused.forward` on its sample inputs"),
            (doubled, "axis 0 of input `x` is 6 at `batch` = 3 and 8 at 4"),
        ):
            self.assertEqual(self.fails("bad_input", self.find, opened, **request).message, message)
        failure = self.fails("entry_call", self.find, opened, samples="broken")
        self.assertRegex(failure.location, r"^project_\d+\.py:42$")
