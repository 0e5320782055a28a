"""Generative models of transformers: the spec of `init`, and the module `step`, which answers as `generate`."""

from __future__ import annotations

import importlib.util
import sys
import unittest
from typing import Any
from unittest import mock

import torch

from .support import Project, Quiet, long, part, spec

MODEL = """
import torch
import transformers

def load():
    torch.manual_seed(0)
    config = transformers.{name}Config(**{options!r})
    model = {kind}(config).eval()
    for value in model.parameters():
        if value.dim() > 1:
            value.data.normal_(0, 0.3)
    return model
"""
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
SLIDING = {**SMALL, "head_dim": 8, "sliding_window": 8}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 97, "n_positions": 64}
LAYERS = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
# Each with a list of its blocks. `tests/sweep` has more of them.
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "Llama": (SMALL, "model.layers.*"),
    "GPT2": (GPT2, "transformer.h.*"),
    # Windows that are shorter than the prompt: in all layers, and in two of three.
    "Mistral": (SLIDING, "model.layers.*"),
    "Gemma3Text": ({**SLIDING, **LAYERS}, "model.layers.*"),
}
# The graphs of these are looked at too.
CAPTURED = ("GPT2", "Gemma3Text")
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 97}
T5 |= {"decoder_start_token_id": 1}
BOTH = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
WHISPER = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in BOTH.items()}
WHISPER |= {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 64, "d_model": 32, "vocab_size": 97}
WHISPER |= {"pad_token_id": 0, "decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2}
WHISPER |= {"suppress_tokens": None, "begin_suppress_tokens": None}
# Each with the sizes of its source, and the states of `encode`.
ENCODERS: dict[str, tuple[dict[str, Any], list[int], dict[str, list[int]]]] = {
    "T5": (T5, [1, 512], {"cross.*.*": [1, 4, 512, 8], "padded": [1, 512]}),
    "Whisper": (WHISPER, [1, 8, 40], {"cross.*.*": [1, 4, 20, 8]}),
}
PROMPT, TOKENS = 12, 20
GREEDY = [torch.tensor([0.0]), torch.tensor([1]), torch.tensor([1.0]), torch.tensor([0.5])]


def source(name: str, options: dict[str, Any], kind: str = "transformers.AutoModelForCausalLM.from_config") -> str:
    return MODEL.replace("{name}", name).replace("{kind}", kind).replace("{options!r}", repr(options))


@unittest.skipUnless(importlib.util.find_spec("transformers"), "transformers is not installed")
class GenerationTest(Project):
    def describe(self, text: str) -> dict[str, Any]:
        return part("describe").describe(self.open(text), {"samples": None, "inputs": []}, Quiet())

    def generated(self, model: Any, prompt: Any, chunk: int) -> list[int]:
        """Returns the tokens of `step`: the prompt in calls of `chunk` tokens, then one token a call."""
        count = prompt.shape[1]
        tokens = prompt[0].tolist()
        with torch.inference_mode():
            for at in range(0, count, chunk):
                out = model.step(prompt[:, at : at + chunk], torch.arange(at, at + chunk), *GREEDY)
            while len(tokens) < count + TOKENS - 1:
                tokens.append(int(out["token"]))
                out = model.step(torch.tensor([tokens[-1:]]), torch.tensor([len(tokens) - 1]), *GREEDY)
        return [*tokens[count:], int(out["token"])]

    def check_graphs(self, opened: Any, modules: list[dict[str, Any]], states: list[int]) -> None:
        """Fails unless the graphs, cut at their regions, are the modules bit for bit, with a smaller cache."""
        for module, count in zip(modules, states, strict=True):
            sizes = {"seq": 4, "context": 16}
            globs = [one["glob"] for one in module["regions"]]
            captured = self.capture(opened, sizes=sizes, regions=globs, **sized(module, sizes))
            self.check_composed(opened, captured)
            self.assertEqual(len(captured["states"]), count)

    @long
    def test_a_step_answers_as_generate(self) -> None:
        prompt = torch.randint(1, 97, (1, PROMPT), generator=torch.Generator().manual_seed(3))
        for name, (options, glob) in FAMILIES.items():
            with self.subTest(name):
                text = source(name, options)
                found = self.describe(text)
                self.assertEqual(found["sizes"], {"seq": [16], "context": [64]})
                prefill, decode = found["modules"]
                self.assertEqual([prefill["name"], decode["name"]], ["prefill", "decode"])
                heads = 4 if name == "GPT2" else 2
                self.assertEqual(prefill["state"], {"cache.*.*": [1, heads, "context", 8]})
                self.assertEqual(decode["state"], prefill["state"])
                self.assertEqual([one["glob"] for one in prefill["regions"]], [glob])
                self.assertEqual(prefill["inputs"][0]["range"], [0, 97])
                # Greedy calls give tokens alone.
                defaults = {one["name"]: one["default"] for one in decode["inputs"] if "default" in one}
                self.assertEqual(defaults, {"temperature": 0.0, "top_k": 1, "top_p": 1.0, "random": 0.0})

                opened = self.open(text, context=64)
                limits = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
                with torch.inference_mode():
                    whole = opened.model.generate(prompt, **limits, eos_token_id=None)
                wanted = whole[0, PROMPT:].tolist()
                for chunk in (4, PROMPT):
                    self.assertEqual(self.generated(opened.model, prompt, chunk), wanted)
                if name in CAPTURED:
                    self.check_graphs(opened, found["modules"], [6, 6])

    def test_a_model_with_an_encoder_answers_as_generate(self) -> None:
        generator = torch.Generator().manual_seed(3)
        start = torch.tensor([[1, 50, 7, 33]])
        for name, (options, shape, states) in ENCODERS.items():
            with self.subTest(name):
                text = source(name, options, kind=f"transformers.{name}ForConditionalGeneration")
                found = self.describe(text)
                encode, prefill, _ = found["modules"]
                self.assertEqual((encode["inputs"][0]["shape"], encode["state"]), (shape, states))
                self.assertEqual(prefill["state"], {"cache.*.*": [1, 4, "context", 8], **states})
                opened = self.open(text, context=40)
                if name == "Whisper":
                    given = {"input_features": torch.randn(shape, generator=generator)}
                    inputs = list(given.values())
                else:
                    own = torch.randint(3, 97, (1, 11), generator=generator)
                    given = {"input_ids": own, "attention_mask": torch.ones_like(own)}
                    # Padded at the end.
                    inputs = [torch.nn.functional.pad(one, (0, shape[1] - 11)) for one in given.values()]
                limits = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "num_beams": 1}
                opened.model.generation_config.update(eos_token_id=None, forced_eos_token_id=None)
                with torch.inference_mode():
                    whole = opened.model.generate(**given, decoder_input_ids=start, **limits)
                    opened.model.encode(*inputs)
                self.assertEqual(self.generated(opened.model, start, 4), whole[0].tolist()[-TOKENS:])
                if name == "T5":
                    self.check_graphs(opened, found["modules"], [5, 9, 9])

    def test_a_token_is_drawn_as_it_is_asked_for(self) -> None:
        sample = part("model.generation").sample
        logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])

        def drawn(temperature: float, top_k: int, top_p: float, random: float) -> int:
            given = torch.tensor([temperature]), torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([random])
            return int(sample(logits, *given))

        self.assertEqual(drawn(0.0, 50, 1.0, 0.99), 1)
        self.assertEqual([drawn(1.0, 50, 1.0, random) for random in (0.0, 0.7, 0.9, 0.99)], [1, 2, 3, 0])
        self.assertEqual(drawn(1.0, 2, 1.0, 0.99), 2)
        self.assertEqual(drawn(1.0, 50, 0.6, 0.99), 1)
        self.assertEqual(drawn(9.0, 50, 1.0, 0.99), 0)

    def test_models_that_have_no_such_cache_are_refused_by_name(self) -> None:
        by_hand = "write a module with state of your own: the guide's chapter on state shows one"
        small = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 97}
        hybrid = {**SMALL, "layer_types": ["conv", "conv", "full_attention"]}
        for name, options, message in (
            ("Mamba", small, "`generate` of `MambaForCausalLM` needs more than tokens: `cache_params`"),
            ("Lfm2", hybrid, "layer 0 of `Lfm2ForCausalLM` keeps a `LinearAttentionLayer`, not keys and values by"),
        ):
            failure = self.fails("entry_call", self.describe, source(name, options))
            self.assertTrue(failure.message.startswith(message), failure.message)
            self.assertEqual(failure.hint, by_hand)
        failure = self.fails("entry_call", self.open, source("Llama", SMALL), context=65)
        self.assertEqual(failure.message, "`context = 65` lies beyond the 64 positions of `LlamaForCausalLM`")
        linear = "import torch\ndef load():\n    return torch.nn.Linear(2, 3)"
        failure = self.fails("entry_call", self.open, linear, context=8)
        self.assertIn("returned a Linear, and `context` is for generative models of transformers", failure.message)
        with mock.patch.dict(sys.modules, {"transformers.exporters.utils": None}):
            failure = self.fails("entry_call", self.open, source("Llama", SMALL), context=64)
        self.assertIn("can't decompose `generate`", failure.message)
        self.assertEqual(failure.hint, "install transformers 5.17 or newer")
        failure = self.fails("entry_import", self.open, "import no_such_package")
        self.assertEqual(failure.hint, f"install it for {sys.executable}, or name another Python with `--python`")

    def test_a_model_without_a_largest_position(self) -> None:
        found = self.describe(source("Bloom", {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": 97}))
        self.assertEqual(found["sizes"], {"seq": [16, 128], "context": [512, 2048]})
        self.assertIn("`BloomForCausalLM` names no largest position", found["notes"][0])


def sized(module: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    """Returns a described module as the plan sends it."""

    def at(axes: list[Any]) -> dict[str, Any]:
        dims = [axis if isinstance(axis, str) else None for axis in axes]
        return {"shape": [sizes.get(axis, axis) for axis in axes], "dims": dims}

    specs = []
    for one in module["inputs"]:
        first, past = one["range"] or (None, None)
        made = {**spec(one["name"], one["dtype"], at(one["shape"])["shape"], at(one["shape"])["dims"])}
        if past is not None:
            made |= {"range": [first, sizes.get(past, past)]}
        specs.append({**made, "within": past} if isinstance(past, str) else made)
    state = [{"name": glob, "first": "zeros", **at(axes)} for glob, axes in module["state"].items()]
    return {"name": module["name"], "method": module["method"], "specs": specs, "state": state}
