"""Writes the rows of a training, and eager's losses on them, into a folder.

A row is 65 characters of the texts of this repository: the inputs, and behind each character the next one. The rows are
in a random order, the same in every run.
"""

import json
import sys
import time
from pathlib import Path

import torch
from model import CONTEXT, load

ROOT = Path(__file__).resolve().parents[2]


def rows() -> torch.Tensor:
    texts = sorted(path for pattern in ("*.md", "docs/src/**/*.md") for path in ROOT.glob(pattern))
    text = "\n".join(path.read_text() for path in texts).encode("ascii", "ignore")
    count = len(text) // (CONTEXT + 1)
    found = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: count * (CONTEXT + 1)].view(count, -1)
    return found[torch.randperm(count, generator=torch.Generator().manual_seed(0))]


def main(out: Path, steps: int, rate: float) -> None:
    out.mkdir(parents=True, exist_ok=True)
    text = rows()
    (out / "rows.bin").write_bytes(text.contiguous().numpy().tobytes())
    model = load().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1)
    losses, started = [], time.perf_counter()
    for step in range(steps):
        batch = text[[(step * 8 + row) % len(text) for row in range(8)]].long()
        loss, _ = model.loss(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    seconds = time.perf_counter() - started
    (out / "eager.json").write_text(json.dumps({"losses": losses, "seconds": seconds}))
    print(f"eager: {steps} steps in {seconds:.1f} s, loss {losses[-1]:.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
