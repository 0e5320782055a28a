"""Models with random weights whose training steps `table.py` measures; each returns the loss of a batch.

`STEPS_MODEL` in the environment names the model, `STEPS_BATCH` the rows of a batch: the entry of a spec takes no
arguments.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

TOKENS = 64
CLASSES = 10


class Trained(nn.Module):
    """A model of transformers and its loss: the mean over rows, from the first token's values or from all logits."""

    def __init__(self, net: nn.Module, loss: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.net(x), targets)


def _classes(out: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(out.logits.float(), targets)


def _tokens(out: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(out.logits.float().flatten(0, 1), targets.flatten())


def _made(kind: str, **settings: Any) -> Callable[[], nn.Module]:
    """Returns a maker of a model of transformers."""
    made = getattr(transformers, kind)
    return lambda: made(made.config_class(**settings))


ENCODER = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
STACK = {"n_embd": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 8192, "n_positions": TOKENS}
SMOLLM2 = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
SMOLLM2 |= {"intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True}

# Name -> the model, its loss, its vocabulary: an encoder of MiniLM's size, a stack of 24 blocks of 1,024, a ResNet-50,
# a decoder of SmolLM2-135M's size.
MODELS = {
    "encoder": (_made("BertForSequenceClassification", **ENCODER, num_labels=CLASSES), _classes, 30522),
    "blocks": (_made("GPT2LMHeadModel", **STACK, use_cache=False), _tokens, 8192),
    "resnet50": (_made("ResNetForImageClassification", num_labels=CLASSES), _classes, 0),
    "smollm2": (_made("LlamaForCausalLM", **SMOLLM2, use_cache=False), _tokens, 49152),
}


def device() -> str:
    """Returns the device of this process."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def load() -> Trained:
    """Returns the model that the environment names, in training mode and without dropout.

    Ways that draw other masks would have other losses.
    """
    make, loss, _ = MODELS[os.environ["STEPS_MODEL"]]
    torch.manual_seed(0)
    with torch.device(device()):
        net = Trained(make(), loss)
    for each in net.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0
    return net.train()


def batch(rows: int) -> dict[str, Tensor]:
    """Returns a batch of the model that the environment names, on the CPU."""
    _, loss, vocabulary = MODELS[os.environ["STEPS_MODEL"]]
    generator = torch.Generator().manual_seed(1)
    if not vocabulary:
        x = torch.randn(rows, 3, 224, 224, generator=generator)
    else:
        x = torch.randint(0, vocabulary, (rows, TOKENS), generator=generator)
    shape, classes = ((rows, TOKENS), vocabulary) if loss is _tokens else ((rows,), CLASSES)
    return {"x": x, "targets": torch.randint(0, classes, shape, generator=generator)}
