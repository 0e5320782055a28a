"""A Llama of 1.1 billion parameters in bfloat16, with random weights and no cache: a prefill."""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM


class Prefill(nn.Module):
    """Token ids to logits: `[batch, seq]` int64 to `[batch, seq, vocabulary]`."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=22,
            num_attention_heads=32,
            num_key_value_heads=4,
            vocab_size=32_000,
            max_position_embeddings=4096,
            use_cache=False,
            attn_implementation="sdpa",
        )
        self.llama = LlamaForCausalLM(config).to(torch.bfloat16)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.llama(input_ids=input_ids, use_cache=False).logits


def load() -> nn.Module:
    torch.manual_seed(0)
    return Prefill().eval()
