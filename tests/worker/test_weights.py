"""A file of weights that the spec names: its tensors, those of the model, and the message of each mistake."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from .support import Project, model, part

# As in transformers: a buffer outside of state dicts, one in every state dict, and a head tied to the table after it.
MODEL = model(
    """\
x = self.table(ids) + self.angles[self.position_ids[: ids.shape[1]]]
return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))""",
    """\
self.head, self.table = torch.nn.Linear(4, 40, bias=False), torch.nn.Embedding(40, 4)
self.head.weight = self.table.weight
self.norm = torch.nn.BatchNorm1d(4)
self.register_buffer("position_ids", torch.arange(40), persistent=False)
self.register_buffer("angles", torch.rand(40, 4), persistent=False)""",
    inputs="ids",
)
# It keeps a parameter, and is converted.
KEEPS = model(
    "return self.b(self.a(x)) + self.kept[0].sum()",
    """\
self.a, self.b = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
self.kept = [self.a.weight]
called.append(self.a.weight.is_meta)
self.register_buffer("own", torch.arange(3.0), persistent=False)""",
    extra="called = []\n",
).replace("return Model()\n", "return Model().half().float()\n")
# What it does with the values of its parameters follows.
USES = """\
called.append(1)
w = torch.ones(4, 4)
self.before = w[0]
self.w, self.b = torch.nn.Parameter(w), torch.nn.Parameter(torch.zeros(4))
"""
EXPORT = "export the file from the model that `entry` makes, or have `entry` make the model of the file"


def inside(line: str, address: int) -> bool:
    """Returns whether a line of `/proc/self/maps` is about the range with this address."""
    start, end = line.split(" ", 1)[0].split("-")
    return int(start, 16) <= address < int(end, 16)


class FileTest(Project):
    def saved(self, **change: Any) -> Path:
        """Writes the tensors of a state dict of the model, without the name of a tied tensor that comes first."""
        values = {
            "table.weight": torch.rand(40, 4),
            "norm.weight": torch.rand(4),
            "norm.bias": torch.rand(4),
            "norm.running_mean": torch.rand(4),
            "norm.running_var": torch.rand(4) + 1,
            **change,
        }
        held = {name: value for name, value in values.items() if value is not None}
        return part("tensors").write(self.root / "model.safetensors", held)

    def filled(self, path: Path) -> Any:
        files = part("weights").Files([path], path)
        return part("model.entry").open_model(self.root, f"{self.write(MODEL)}:load", "cpu", (), files)

    def fill(self, model: Any, path: Path, unused: Collection[str] = ()) -> Any:
        return part("weights").fill(model, part("weights").Files([path], path, unused))

    def test_what_no_state_dict_has_comes_from_the_model(self) -> None:
        path = self.saved()
        opened = self.filled(path)
        self.assertIsNone(part("weights").write(opened, self.out)["file"])
        self.assertEqual(part("weights").write(opened, self.out)["aliases"], {"head.weight": "table.weight"})
        captured = self.capture(opened, inputs=[("ids", "int64", [2, 8])])
        # A release has the file, and each program its further tensors.
        held = part("tensors").read(path)
        held |= part("tensors").read(Path(captured["extra_weights"]))
        names = {name for step in captured["steps"] for name in step["binding"].values()}
        self.assertLessEqual(names | set(captured["exported_weights"]), set(held))
        self.assertIn("table.weight", names)
        samples = self.samples(captured)
        (result,) = self.composed(captured, held)
        self.assertTrue(torch.equal(result, samples["out.0"]))

    def test_a_tied_tensor_may_have_any_of_its_names_and_one_value(self) -> None:
        table = torch.rand(40, 4)
        opened = self.filled(self.saved(**{"head.weight": table, "table.weight": None}))
        self.assertTrue(torch.equal(opened.model.table.weight, table))
        self.assertEqual(opened.named().aliases, {"table.weight": "head.weight"})
        self.filled(self.saved(**{"head.weight": table, "table.weight": table}))
        failure = self.fails("weights", self.filled, self.saved(**{"head.weight": table + 1, "table.weight": table}))
        self.assertIn("`head.weight` and `table.weight` of", failure.message)
        self.assertIn("differ, and in the model they are one tensor", failure.message)

    def test_what_is_missing_or_other_is_named_with_the_file(self) -> None:
        path = self.root / "model.safetensors"
        add = "add it to the file, or leave `weights` out: then the model's own are taken"
        cases: list[tuple[dict[str, Any], str, str]] = [
            ({"norm.bias": None}, f"`{path}` has no tensor `norm.bias`, float32 [4] in the model", add),
            (
                {"norm.running_mean": None, "norm.running_var": None},
                f"`{path}` has no tensor `norm.running_mean`, float32 [4] in the model and 1 more",
                add,
            ),
            (
                {"norm.bias": torch.zeros(5)},
                f"tensor `norm.bias` of `{path}` is float32 [5], the model expects float32 [4]",
                EXPORT,
            ),
            (
                {"table.weight": torch.zeros(40, 4, dtype=torch.float16)},
                f"tensor `table.weight` of `{path}` is float16 [40, 4], the model expects float32 [40, 4]",
                EXPORT,
            ),
            (
                {"table.weight": None, "encoder.head.weight": torch.zeros(40, 4)},
                f"`{path}` has no tensor `head.weight`, float32 [40, 4] in the model and 1 more",
                "the file calls it `encoder.head.weight`: it is that of a larger model; "
                "export it from the one that `entry` makes",
            ),
            (
                {"norm.bias": None, "bias": torch.zeros(4)},
                f"`{path}` has no tensor `norm.bias`, float32 [4] in the model",
                "the file calls it `bias`: it is that of the submodule `norm`; "
                "export it from the model that `entry` makes",
            ),
        ]
        for change, message, hint in cases:
            with self.subTest(message):
                failure = self.fails("weights", self.filled, self.saved(**change))
                self.assertEqual((failure.message, failure.hint), (message, hint))

    def test_what_the_model_lacks_is_refused_unless_it_is_named(self) -> None:
        path = self.root / "model.safetensors"
        model, fill, zeros = self.open(MODEL).model, self.fill, torch.zeros(3)
        blocks = [f"norm.blocks.{block}.{name}" for block in (4, 5) for name in ("bias", "weight")]
        many = range(6)
        for extra, message, globs in [
            (["other.weight"], "tensor `other.weight`, float32 [3]:", ["other.**"]),
            (["norm.scale"], "tensor `norm.scale`, float32 [3]:", ["norm.scale"]),
            (["lone"], "tensor `lone`, float32 [3]:", ["lone"]),
            (blocks, "tensor `norm.blocks.4.bias`, float32 [3] and 3 more:", ["norm.blocks.**"]),
            ([f"b_{at}.0" for at in many], "tensor `b_0.0`, float32 [3] and 5 more:", [f"b_{at}.**" for at in many]),
        ]:
            with self.subTest(message):
                values = dict.fromkeys(extra, zeros)
                failure = self.fails("weights", fill, model, self.saved(**values))
                self.assertEqual(failure.message, f"`{path}` has {message} the model has none of that name")
                hint = f"{EXPORT}; or allow unused tensors in [model]: "
                self.assertTrue(failure.hint.startswith(hint), failure.hint)
                said = tomllib.loads(failure.hint.removeprefix(hint).strip("`"))
                self.assertEqual(said, {"unused_weights": globs})
                self.assertNotIn(extra[0], fill(model, path, extra))

    def test_a_buffer_that_no_state_dict_has_may_be_there_as_it_is(self) -> None:
        model, fill = self.open(MODEL).model, self.fill
        fill(model, self.saved(position_ids=torch.arange(40)))
        other = torch.arange(40) + 1
        failure = self.fails("weights", fill, model, self.saved(position_ids=other))
        self.assertIn("has tensor `position_ids`, int64 [40]: the model has none", failure.message)

    def open_with(self, text: str, values: dict[str, Any]) -> tuple[Any, Any]:
        """Opens a model with the values of two files; returns it, and the module that has the entry."""
        tensors, names = part("tensors"), sorted(values)
        halves = [names[::2], names[1::2]]
        paths = [
            tensors.write(self.root / f"{index}.safetensors", {name: values[name] for name in half})
            for index, half in enumerate(halves)
        ]
        name = self.write(text)
        opened = part("model.entry").open_model(
            self.root, f"{name}:load", "cpu", (), part("weights").Files(paths, self.root / "all")
        )
        return opened, sys.modules[name]

    def test_parameters_are_over_the_mapped_files(self) -> None:
        opened, made = self.open_with(
            KEEPS,
            {f"{name}.{part_}": torch.rand(64, 64)[:size] for name in "ab" for part_, size in [("weight", 64)]}
            | {f"{name}.bias": torch.rand(64) for name in "ab"},
        )
        model = opened.model
        self.assertEqual(made.called, [True])
        self.assertIs(model.kept[0], model.a.weight)
        self.assertEqual(model.own.tolist(), [0, 1, 2])
        self.assertEqual(model(torch.ones(1, 64)).shape, (1, 64))
        maps = Path("/proc/self/maps").read_text().splitlines()
        before = [parameter.clone() for parameter in model.parameters()]
        opened.rest()
        for parameter, value in zip(model.parameters(), before, strict=True):
            self.assertTrue(torch.equal(parameter, value))
        for name, parameter in model.named_parameters():
            here = next(line for line in maps if inside(line, parameter.data_ptr()))
            self.assertIn(".safetensors", here, name)

    def test_an_entry_that_needs_values_gets_them(self) -> None:
        bodies = {
            "a decision": "self.scale = 2 if self.w.sum() > 0 else 3",
            "a buffer of values": "self.register_buffer('norm', self.w.detach() * 2, persistent=False)",
            "a view in a list": "self.views = [self.w.detach()[0]]",
            "an attribute": "self.view = self.w.detach()[0]",
            "memory of before": "self.views = [self.before]",
            "a device": "self.to('cpu')",
        }
        for what, body in bodies.items():
            with self.subTest(what):
                text = model("return x", USES + body, "called = []\n")
                opened, made = self.open_with(text, {"w": torch.full((4, 4), 7.0), "b": torch.ones(4)})
                held = opened.model
                self.assertEqual(len(made.called), 2)
                self.assertEqual(held.w.tolist(), [[7.0] * 4] * 4)
                # A view has the values of the file, as when the model's own are overwritten.
                self.assertEqual(held.before.tolist(), [7.0] * 4)
                self.assertEqual(held.b.tolist(), [1.0] * 4)

    def test_a_file_that_is_not_whole_is_refused(self) -> None:
        path = self.saved(**{"other.weight": torch.rand(3)})
        whole = path.read_bytes()
        none = "it is no safetensors file, or it was cut off"
        for bytes_, message in [
            *((text, none) for text in (b"", b"PK\x03\x04 what torch.save writes", whole[:100])),
            (whole[:-8], "it was cut off: tensor `other.weight` ends at byte"),
            (whole.replace(b'"shape":[3]', b'"shape":[4]'), "tensor `other.weight` is F32 [4] and has 12 bytes"),
            (whole.replace(b'"F32","shape":[3]', b'"F99","shape":[3]'), "tensor `other.weight` is F99; weight sets"),
        ]:
            with self.subTest(message):
                path.write_bytes(bytes_)
                failure = self.fails("weights", self.filled, path)
                self.assertIn(f"can't read the weights in `{path}`: {message}", failure.message)
