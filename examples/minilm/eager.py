"""Writes eager PyTorch's embeddings of the sentences, for the Rust example to compare its own with.

Every sentence runs alone and without padding, so that these are the model's own numbers.
"""

import argparse
from collections.abc import Callable

import model
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn


def embed(encoder: nn.Module, ids: Tensor) -> Tensor:
    """Returns the mean over the tokens at unit length, float32 `[384]`; `ids` is `[1, seq]`."""
    tokens = encoder(ids, torch.ones_like(ids))[0].float()
    return nn.functional.normalize(tokens.mean(dim=0), dim=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sentences", required=True, help="text file, one sentence a line")
    parser.add_argument("--out", required=True, help="safetensors file to write: `embeddings`, float32 [n, 384]")
    parser.add_argument("--entry", default="load", help="callable of model.py that returns the encoder")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    load: Callable[[], nn.Module] = getattr(model, args.entry)
    encoder = load().to(args.device)
    tokenizer = Tokenizer.from_file(str(model.folder() / "tokenizer.json"))
    tokenizer.no_padding()
    with open(args.sentences, encoding="utf-8") as file:
        sentences = [line.strip() for line in file if line.strip()]
    with torch.inference_mode():
        rows = [embed(encoder, torch.tensor([tokenizer.encode(s).ids], device=args.device)) for s in sentences]
    save_file({"embeddings": torch.stack(rows).cpu()}, args.out)


if __name__ == "__main__":
    main()
