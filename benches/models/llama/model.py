"""A small model of the Llama family from transformers, with random weights and no cache: a prefill."""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel


class Prefill(nn.Module):
    """Token ids to hidden states: `[batch, seq]` int64 to `[batch, seq, width]`."""

    def __init__(self, width: int, layers: int, dtype: torch.dtype) -> None:
        super().__init__()
        heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 256}
        sizes = {"hidden_size": width, "intermediate_size": width * 11 // 4, "num_hidden_layers": layers}
        config = LlamaConfig(**sizes, **heads, vocab_size=32_000, use_cache=False, attn_implementation="sdpa")
        self.llama = LlamaModel(config).to(dtype)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.llama(input_ids=input_ids, use_cache=False).last_hidden_state


def load() -> nn.Module:
    """8 layers of width 512 in float32, for the CPU."""
    torch.manual_seed(0)
    return Prefill(512, 8, torch.float32).eval()


def load_half() -> nn.Module:
    """16 layers of width 2048 in bfloat16, for a GPU: about a billion parameters."""
    torch.manual_seed(0)
    return Prefill(2048, 16, torch.bfloat16).eval()
