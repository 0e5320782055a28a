"""State: tensors that a module writes into are inputs that the captured steps write in place."""

from __future__ import annotations

from typing import Any

import torch

from . import artifact
from .support import Project, model, spec

# A decoder with a cache in buffers, as many modules as blocks, and a position that it counts itself.
BUFFERS = model(
    """\
position = self.position + torch.arange(x.shape[1])
for block in self.blocks:
    x = block(x, position)
self.position += x.shape[1]
return x * self.scale""",
    """\
torch.manual_seed(0)
self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
self.register_buffer("position", torch.tensor(5))
self.register_buffer("scale", torch.tensor([2.0]))""",
    extra="""\
from torch.nn import functional as F

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)
        self.register_buffer("k", torch.zeros(2, 2, 16, 4))
        self.register_buffer("v", torch.zeros(2, 2, 16, 4), persistent=False)

    def forward(self, x, position):
        q, k, v = self.qkv(x).view(2, -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        self.k.index_copy_(2, position, k)
        self.v.index_copy_(2, position, v)
        mask = torch.arange(16) <= position[:, None]
        y = F.scaled_dot_product_attention(q, self.k, self.v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).reshape(2, -1, 8))
""",
)

# Reads two states, and has methods that give their first values, right ones and wrong ones.
FILLED = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mood", torch.zeros(1, 4), persistent=False)
        self.register_buffer("pace", torch.zeros(1, 4), persistent=False)
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x):
        return x * self.scale + self.mood - 3 * self.pace

    def start(self, style):
        return {"pace": style + 1, "mood": style * 2}

    def pair(self, style):
        return style, style + 1

    def one(self, style):
        return style

    def half(self, style):
        return {"mood": style, "other": style}

    def wide(self, style):
        return style.repeat(2, 1), style

    def writes(self, style):
        self.scale.mul_(2)
        return style, style

    def raises(self, style):
        raise ValueError("no style")

def load():
    return Model()
"""

INPUTS = model("cache.index_copy_(1, at, x)\nreturn cache.sum(1)", inputs="x, cache, at")


def named(name: str, shape: list[int] | None = None, dims: list[str | None] | None = None) -> dict[str, Any]:
    """Returns a state as the plan sends it."""
    return {"name": name, "first": "zeros", "shape": shape, "dims": dims or []}


class State(Project):
    def test_buffers_that_are_written_are_states(self) -> None:
        for regions in ([], ["blocks.*"]):
            with self.subTest(regions=regions):
                opened = self.open(BUFFERS)
                captured = self.capture(opened, inputs=[("x", "float32", [2, 1, 8])], regions=regions)
                names = [state["name"] for state in captured["states"]]
                own = [f"blocks.{index}.{name}" for index in range(3) for name in ("k", "v")]
                self.assertEqual(sorted(names), sorted([*own, "position"]))
                for state in captured["states"]:
                    self.assertEqual(state["first"], {"tensor": state["name"]})
                self.assertEqual([one["name"] for one in captured["inputs"]], ["x"])
                after = self.samples(captured)[f"after.{names.index('position')}"]
                # It was 5; three calls fill the states of the sample, and one more is the sample.
                self.assertEqual(after.tolist(), 9)
                if regions:
                    blocks = [step for step in captured["steps"] if step["name"].startswith("blocks")]
                    self.assertEqual(len({step["segment"] for step in blocks}), 1)
                    # A cache never passes from step to step.
                    self.assertTrue(all(len(step["outputs"]) <= 1 for step in captured["steps"]))
                self.check_composed(opened, captured)
                self.assertTrue(torch.equal(opened.model.position, torch.tensor(5)), "the model itself is left alone")

    def test_inputs_that_the_spec_names_are_states(self) -> None:
        opened = self.open(INPUTS)
        specs = [
            spec("x", "float32", [2, 1, 4], ["batch", None, None]),
            spec("cache", "float32", [2, 8, 4], ["batch", "context", None]),
            {**spec("at", "int64", [1]), "range": [0, 8]},
        ]
        captured = self.capture(opened, specs=specs, state=[named("cache")], sizes={"batch": 2, "context": 8})
        self.assertEqual([one["name"] for one in captured["inputs"]], ["x", "at"])
        state = {"name": "cache", "dtype": "float32", "shape": [2, 8, 4], "stride": [32, 4, 1]}
        self.assertEqual(captured["states"], [{**state, "dims": ["batch", "context", None], "first": "zeros"}])
        # A session keeps the sizes of its states, so no request is padded in them.
        self.assertEqual(sorted(captured["exact"]), ["batch", "context"])
        self.check_composed(opened, captured)

    def test_a_buffer_has_the_size_of_the_bucket_where_the_spec_names_its_dimension(self) -> None:
        text = model(
            "self.cache.index_copy_(1, y, x)\nreturn self.cache.sum(1)",
            'self.register_buffer("cache", torch.ones(2, 8, 4))',
        )
        inputs = [("x", "float32", [2, 1, 4]), ("y", "int64", [1])]
        opened = self.open(text)
        for shape in ([2, 4, 4], [2, 8, 4]):
            state = [named("cache", shape, [None, "context", None])]
            captured = self.checked(opened, inputs=inputs, state=state, sizes={"context": shape[1]})
            (kept,) = captured["states"]
            self.assertEqual((kept["shape"], kept["first"]), (shape, "zeros"))
        wrong = [named("cache", [2, 9, 4], [None, "context", None])]
        failure = self.refused("bad_input", opened, inputs=inputs, state=wrong)
        self.assertEqual(failure.message, "state `cache` is [2, 8, 4], in the spec [2, 9, 4]")
        failure = self.refused("bad_input", opened, inputs=inputs, state=[named("cahce")])
        self.assertEqual(failure.message, "`cahce` is no input and no buffer of module `m`")
        self.assertEqual(failure.hint, "did you mean `cache`?")

    def test_a_buffer_that_a_module_only_reads_is_a_state_where_the_spec_says_so(self) -> None:
        init = 'self.register_buffer("kept", torch.ones(2, 4), persistent=False)'
        opened = self.open(model("return x + self.kept", init))
        inputs = [("x", "float32", [2, 4])]
        self.assertEqual(self.capture(opened, inputs=inputs)["states"], [])
        captured = self.checked(opened, inputs=inputs, state=[named("kept")])
        self.assertEqual([one["name"] for one in captured["states"]], ["kept"])

    def test_outputs_of_another_module_are_first_values(self) -> None:
        opened = self.open(FILLED, unsaved=["mood", "pace"])
        filler = {"name": "start", "path": "", "method": "start", "inputs": [spec("style", "float32", [1, 4])]}

        def capture(names: list[str], **changes: Any) -> Any:
            opened.fillings.clear()
            asked = [{**named(name), "first": {"module": {**filler, **changes}}} for name in names]
            return self.capture(opened, inputs=[("x", "float32", [1, 4])], state=asked)

        captured = capture(["mood", "pace"])
        firsts = {one["name"]: one["first"]["output"] for one in captured["states"]}
        self.assertEqual(firsts, {"mood": {"module": "start", "index": 1}, "pace": {"module": "start", "index": 0}})
        self.check_composed(opened, captured)
        # Outputs with other names, in the order of the states.
        captured = capture(["mood", "pace"], method="pair")
        indices = [one["first"]["output"]["index"] for one in captured["states"]]
        self.assertEqual(indices, [0, 1])
        # The weight set has neither of them.
        self.assertEqual(sorted(self.weights(opened)), ["scale"])

        for method, message in {
            "one": "module `start` has 1 outputs, and fills 2 states: mood, pace",
            "half": "module `start` has no output `pace`, and fills that state",
            "wide": "module `start` gives state `mood` float32 [2, 4], and it is float32 [1, 4]",
            "writes": "module `start` fills states, and has one: `scale`",
            "raises": "no style",
        }.items():
            failure = self.fails("bad_input", capture, ["mood", "pace"], method=method)
            self.assertIn(message, failure.message)
        self.assertEqual(opened.model.scale.tolist(), [2.0])
        self.fails("no_method", capture, ["mood", "pace"], method="nothing")

    def test_a_buffer_with_its_own_values_that_the_weight_set_lacks_is_refused(self) -> None:
        opened = self.open(FILLED, unsaved=["mood", "pace"])
        inputs = [("x", "float32", [1, 4])]
        own = [{**named(name), "first": "own"} for name in ("mood", "pace")]
        self.assertEqual(
            [one["first"] for one in self.capture(opened, inputs=inputs, state=own)["states"]], ["zeros"] * 2
        )
        opened.model.pace.fill_(1)
        failure = self.fails("bad_input", self.capture, opened, inputs=inputs, state=own)
        self.assertEqual(failure.message, "state `pace` begins with values that the weight set lacks")

    def test_a_later_region_reads_the_old_value_or_the_new_one(self) -> None:
        source = model(
            "old, new = self.held[None, :2], self.a(self.held + x)\n"
            "self.held.copy_(new)\n"
            "return self.b(x) + READ, self.held",
            "self.a, self.b = torch.nn.Tanh(), torch.nn.Tanh()\nself.register_buffer('held', torch.arange(4.0))",
        )
        for read in ("old.sum()", "self.held[:2].sum()", "old.sum() + new.sum()"):
            with self.subTest(read=read):
                self.checked(source.replace("READ", read), inputs=[("x", "float32", [4])], regions=["a", "b"])

    def test_a_buffer_that_gets_another_tensor_keeps_its_value(self) -> None:
        init = 'self.register_buffer("total", torch.ones(3))'
        text = model("self.total = self.total + x\nreturn self.total * 2", init)
        captured = self.checked(text, inputs=[("x", "float32", [3])])
        self.assertEqual([state["name"] for state in captured["states"]], ["total"])

    def test_an_artifact_writes_in_place(self) -> None:
        """The generated code copies no cache, and calls one after the other give what the module gives."""
        opened = self.open(BUFFERS)
        captured = self.capture(opened, inputs=[("x", "float32", [2, 1, 8])])
        (step,) = captured["steps"]
        compiled = self.compile(captured)
        # No buffer of the size of a cache.
        self.assertNotIn("empty_strided(4, {2L, 2L, 16L, 4L}", self.wrapper())
        samples = self.samples(captured)
        values = self.given(captured, samples)
        weights = self.bound(captured, self.weights(opened, captured))
        given = [values[number] for number in step["inputs"]]
        (output,) = artifact.run(compiled["library"], "cpu", weights, given, 1)
        torch.testing.assert_close(output, samples["out.0"])
