"""The facts that `init` finds about a model: inputs, dimensions, values, repeated submodules."""

from __future__ import annotations

from typing import Any

from tests.worker.support import Project, Quiet, part

from .support import HEAD

STACK = (
    HEAD
    + """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(50, 8), nn.Embedding(64, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids, mask):
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x * mask[..., None]

def load():
    return Model().eval()

def sized(batch=2, seq=6):
    return {"ids": torch.zeros(batch, seq, dtype=torch.int64), "mask": torch.ones(batch, seq, dtype=torch.int64)}

def one():
    return torch.zeros(2, 6, dtype=torch.int64), torch.ones(2, 6, dtype=torch.int64)

def several():
    return [(torch.zeros(2, n, dtype=torch.int64), torch.ones(2, n, dtype=torch.int64)) for n in (6, 9, 17)]

class Nested(nn.Module):
    def forward(self, x, pair):
        return x + pair[0] * pair[1]

def nested():
    return torch.ones(2, 3), (torch.ones(2, 3), torch.ones(2, 3))

def broken():
    raise ValueError("no samples today")

class Images(nn.Module):
    def forward(self, x):
        return F.avg_pool2d(x, 8)

class Pair(nn.Module):
    def forward(self, x):
        first, second = x
        return first + second

class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        import transformers

        config = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
            vocab_size=32, max_position_embeddings=32,
        )
        self.model = transformers.LlamaModel(config)
        self.cache = transformers.StaticCache(config=config, max_cache_len=32)

    def forward(self, ids):
        return self.model(ids, past_key_values=self.cache, use_cache=True).last_hidden_state

class Branch(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x
"""
)
IDS = {"name": "ids", "dtype": "int64", "shape": ["batch", "seq"], "pad": 0, "range": [0, 50]}
MASK = {"name": "mask", "dtype": "int64", "shape": ["batch", "seq"], "pad": 0, "range": [0, 2]}


class Describe(Project):
    def describe(self, entry: str = "load", samples: str | None = None, inputs: Any = ()) -> dict[str, Any]:
        name = self.write(STACK)
        opened = part("model.entry").open_model(self.root, f"{name}:{entry}", "cpu", ())
        request = {"samples": f"{name}:{samples}" if samples else None, "inputs": list(inputs)}
        found = part("describe").describe(opened, request, Quiet())
        (module,) = found["modules"]
        self.assertEqual((module["name"], module["method"], module["state"]), ("forward", "forward", {}))
        return {**found, **module}

    def test_inputs_and_sizes_are_found_from_samples_or_the_command_line(self) -> None:
        asked = [{"name": name, "dtype": "int64", "shape": ["batch", "seq"]} for name in ("ids", "mask")]
        # A callable with sizes; one sample, which is tried with another row and another token; no samples.
        for request in ({"samples": "sized"}, {"samples": "one"}, {"inputs": asked}):
            found = self.describe(**request)
            self.assertEqual((found["class"], found["inputs"], found["notes"]), ("Model", [IDS, MASK], []))
            # The model has 64 positions.
            self.assertEqual(found["sizes"], {"batch": [1, 8], "seq": [32]})
            self.assertEqual(found["regions"], [{"glob": "blocks.*", "count": 4, "artifacts": 1}])
            self.assertEqual(found["dtype"], "float32")

    def test_several_samples_are_compared(self) -> None:
        found = self.describe(samples="several")
        shapes = [one["shape"] for one in found["inputs"]]
        self.assertEqual((shapes, found["sizes"]), ([[2, "seq"], [2, "seq"]], {"seq": [6, 9, 17]}))

    def test_what_no_spec_can_write_is_left_to_the_samples(self) -> None:
        found = self.describe("Nested", "nested")
        self.assertEqual((found["inputs"], found["notes"]), (None, []))

    def test_a_model_that_can_not_be_captured_is_described_all_the_same(self) -> None:
        inputs = [{"name": "x", "dtype": "float32", "shape": ["batch", 4]}]
        found = self.describe("Branch", inputs=inputs)
        self.assertEqual(found["inputs"], [{**inputs[0], "pad": 0.0, "range": None}])
        self.assertIn("can't be captured as it is", found["notes"][0])
        found = self.describe("Cached", inputs=[{"name": "ids", "dtype": "int64", "shape": ["batch", "seq"]}])
        self.assertEqual([one["name"] for one in found["inputs"]], ["ids"])
        self.assertIn("can't be captured as it is: ", found["notes"][0])

    def test_buckets_are_sizes_that_the_model_takes(self) -> None:
        def asked(entry: str, shape: list[Any]) -> dict[str, list[int]]:
            return self.describe(entry, inputs=[{"name": "x", "dtype": "float32", "shape": shape}])["sizes"]

        self.assertEqual(asked("Images", ["batch", 3, "height", "width"])["height"], [64, 224])
        # Two rows, and no other number of them.
        self.assertEqual(asked("Pair", ["batch", 4]), {"batch": [2]})

    def test_any_error_of_a_capture_is_a_note(self) -> None:
        capture = part("capture")

        def fails(*_: Any) -> Any:
            raise AttributeError("a cache has no `get_mask_sizes`")

        for name in ("trace", "parts_of"):
            self.addCleanup(setattr, capture, name, getattr(capture, name))
            setattr(capture, name, fails)
            found = self.describe(samples="sized")
            self.assertEqual((found["inputs"][0]["name"], found["regions"]), ("ids", []))
            self.assertIn("AttributeError: a cache has no `get_mask_sizes`", found["notes"][0])

    def test_mistakes_are_named(self) -> None:
        failure = self.fails("bad_input", self.describe)
        self.assertIn("`ids`, `mask`", failure.hint)
        failure = self.fails("entry_call", self.describe, samples="broken")
        self.assertIn("no samples today", failure.message)
