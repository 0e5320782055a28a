"""Writes the rows of a training: the text of this repository's guide, as tokens of the model.

rows.py FILE    a safetensors file with `ids`, 64 tokens a row
"""

import sys
from pathlib import Path

import torch
from model import tokenizer
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 64


def main(out: Path) -> None:
    texts = [path.read_text() for path in sorted(ROOT.glob("docs/src/**/*.md"))]
    ids = torch.tensor(tokenizer().encode("\n\n".join(texts)))
    rows = ids[: len(ids) // TOKENS * TOKENS].view(-1, TOKENS)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file({"ids": rows.contiguous()}, out)
    print(f"{len(rows)} rows of {TOKENS} tokens from {len(texts)} pages")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
