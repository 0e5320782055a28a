"""Other architectures, tiny and with random weights: the composition of their regions is the model, bit for bit.

Every weight is random, norms and biases among them, which a fresh model has at one and zero: a constant that is bound
to the weight of another block shows. One segment is expected for each kind of block, and one before and after them.
"""

from __future__ import annotations

from typing import Any

from .support import Project

LOADED = """
import torch
import transformers

class Model(torch.nn.Module):
    def __init__(self, name, options, result, call):
        super().__init__()
        config = getattr(transformers, name.replace("Encoder", "") + "Config")(**options)
        self.model = getattr(transformers, name + "Model", None)(config)
        self.head = torch.nn.Linear(16, 5) if result == "logits" else torch.nn.Identity()
        self.call = call

    def forward(self, given):
        return self.head(self.model(given, **self.call).last_hidden_state)

def load():
    model = Model({name!r}, {options!r}, {result!r}, {call!r})
    torch.manual_seed(0)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if value.is_floating_point() and "inv_freq" not in name:
            value.data.normal_(0, 0.2)
            if name.endswith("running_var"):
                value.data.abs_().add_(0.5)
    return model
"""

WORDS = ("given", "int64", [2, 6])
PICTURE = ("given", "float32", [2, 3, 8, 8])
SMALL = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 32, "num_hidden_layers": 3, "vocab_size": 50}
GPT = {"n_embd": 16, "n_head": 2, "n_layer": 3, "vocab_size": 50, "n_positions": 8, "bos_token_id": 0}
GPT |= {"eos_token_id": 0}
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 3, "num_heads": 4, "vocab_size": 50}
NO_CACHE = {"use_cache": False}


class ArchitecturesTest(Project):
    def steps(
        self,
        name: str,
        options: dict[str, Any],
        region: str,
        given: tuple[str, str, list[int]] = WORDS,
        result: str = "hidden",
        call: dict[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Captures, compares with eager bit for bit, and returns the steps."""
        text = LOADED
        for key, value in {"name": name, "options": options, "result": result, "call": call or {}}.items():
            text = text.replace(f"{{{key}!r}}", repr(value))
        return list(self.checked(text, inputs=[given], regions=[region])["steps"])

    def segments(self, *args: Any, **kwargs: Any) -> list[int]:
        return [step["segment"] for step in self.steps(*args, **kwargs)]

    def test_blocks_are_one_segment(self) -> None:
        # A table of positions and tied weights; the code after the last block gives its result another shape.
        self.assertEqual(self.segments("GPT2", GPT, "model.h.*", call=NO_CACHE), [0, 1, 1, 1, 2])
        # Fewer heads for keys than for queries, and biases.
        qwen = {**SMALL, "num_key_value_heads": 2}
        steps = self.steps("Qwen2", qwen, "model.layers.*", call=NO_CACHE, result="logits")
        self.assertEqual([step["segment"] for step in steps], [0, 1, 1, 1, 2])
        self.assertEqual(set(steps[4]["binding"].values()), {"head.weight", "head.bias"})
        # A block ends with the norm that the next one begins with.
        self.assertIn("model.layers.1.input_layernorm.weight", steps[1]["binding"].values())
        self.assertIn("model.norm.weight", steps[3]["binding"].values())
        # The first block makes the bias of positions for all of them.
        self.assertEqual(self.segments("T5Encoder", T5, "model.encoder.block.*"), [0, 1, 2, 2])

    def test_a_block_that_runs_several_times_is_one_segment_with_one_binding(self) -> None:
        region = "model.encoder.albert_layer_groups.*.albert_layers.*"
        steps = self.steps("Albert", {**SMALL, "embedding_size": 8}, region)
        self.assertEqual([step["segment"] for step in steps], [0, 1, 1, 1])
        block = region.replace("*", "0")
        self.assertEqual([step["name"] for step in steps[1:]], [block, f"{block}#2", f"{block}#3"])
        self.assertEqual(steps[1]["binding"], steps[3]["binding"])

    def test_stages_of_convolutions(self) -> None:
        # The first block of a stage that makes pictures smaller is of its own kind.
        resnet = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 3], "layer_type": "basic"}
        segments = self.segments("ResNet", resnet, "model.encoder.stages.*.layers.*", PICTURE)
        self.assertEqual(segments, [0, 1, 1, 2, 3, 3])
