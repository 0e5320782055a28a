"""The example's encoder, cut at its layers: the uncompiled composition equals the model bit for bit."""

from __future__ import annotations

import sys
import tomllib

from .support import ROOT, Project, Quiet, part, spec

EXAMPLE = ROOT / "examples" / "minilm"


class MiniLmTest(Project):
    def test_the_composition_of_the_layers_is_bit_equal(self) -> None:
        declared = tomllib.loads((EXAMPLE / "precast.toml").read_text())
        (module,) = declared["module"]
        opened = part("model.entry").open_model(EXAMPLE, declared["model"]["entry"], "cpu")
        self.addCleanup(sys.modules.pop, "model", None)
        sizes = {"batch": 2, "seq": 32}
        inputs = []
        for name, entry in module["inputs"].items():
            shape = [sizes[dim] for dim in entry["shape"]]
            inputs.append({**spec(name, entry["dtype"], shape, entry["shape"]), "range": entry["range"]})
        request = {"name": "encode", "path": "", "method": "forward", "inputs": inputs, "regions": module["regions"]}
        captured = part("capture").capture(opened, request, sizes, self.out, Quiet())
        layers = [step for step in captured["steps"] if step["name"].startswith("bert.encoder.layer.")]
        self.assertEqual(len(layers), 6)
        self.assertEqual(len({step["segment"] for step in layers}), 1)
        self.assertEqual(len({step["binding"]["c0"] for step in layers}), 6)
        self.check_composed(opened, captured)
