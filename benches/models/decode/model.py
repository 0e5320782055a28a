"""A Llama of 1.1 B in bfloat16 with random weights, and a step that returns the likeliest token."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache, StaticLayer


class Rows(StaticLayer):
    """A layer of a cache that keeps keys and values at given positions."""

    def __init__(self, keys: Tensor, values: Tensor, at: Tensor) -> None:
        super().__init__(keys.shape[2])
        self.keys, self.values, self.at, self.cumulative_length = keys, values, at, at[0]
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.at, keys)
        self.values.index_copy_(2, self.at, values)
        return self.keys, self.values


class Greedy(nn.Module):
    """A step that returns the likeliest token."""

    def __init__(self, model: Any, batch: int, context: int) -> None:
        super().__init__()
        self.model, c = model, model.config
        shape = (batch, c.num_key_value_heads, context, c.hidden_size // c.num_attention_heads)
        self.cache = nn.ModuleList()
        for _ in range(c.num_hidden_layers):
            one = nn.Module()
            one.register_buffer("keys", torch.zeros(shape, dtype=model.dtype, device=model.device), persistent=False)
            one.register_buffer("values", torch.zeros(shape, dtype=model.dtype, device=model.device), persistent=False)
            self.cache.append(one)

    def forward(self, ids: Tensor, at: Tensor) -> dict[str, Tensor]:
        cache = Cache(layers=[Rows(one.keys, one.values, at) for one in self.cache])
        mask = ids.new_ones(ids.shape[0], self.cache[0].keys.shape[2])
        given = {"input_ids": ids, "attention_mask": mask, "position_ids": at.expand(ids.shape[0], 1)}
        out = self.model(**given, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits = out.logits[:, -1]
        return {"token": logits.argmax(-1), "logits": logits}


def load(batch: int = 1, context: int = 4096) -> Greedy:
    torch.manual_seed(0)
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "vocab_size": 32000}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 4096}
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(torch.bfloat16).eval()
    return Greedy(model, batch, context)


def load8() -> Greedy:
    return load(8)


def load32() -> Greedy:
    return load(32)
