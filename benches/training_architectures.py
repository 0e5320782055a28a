"""Training steps of `maybe_compile` over eight architectures: losses and gradients as eager's?

    .venv-python/bin/python -m benches.training_architectures [NAME …] \\
        | python -m benches.results training-cpu.json architectures

Random weights, dropout where the architecture has it. A step is forward, loss, backward and AdamW; losses and gradients
are compared in each. Exit code 1 if one disagrees.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .architectures import ARCHITECTURES
from .training import made

NAMES = ("bert", "distilbert", "albert", "gpt2", "llama", "t5", "vit", "resnet")
STEPS = 3


def loss(answer: Any) -> Any:
    """Returns a number that all results count in."""
    from precast.batches import tensors

    return sum(each.float().square().mean() for each in tensors(answer) if each.requires_grad)


def sweep(name: str, store: Path) -> dict[str, Any]:
    """Compiles the pair of an architecture, and compares training steps with eager's; returns the result."""
    import torch
    from precast import CompileConfig, CompileSmoketest, maybe_compile

    architecture = ARCHITECTURES[name]
    torch.manual_seed(0)
    net = architecture.make().train()
    batch = architecture.batch(architecture.sizes[0])
    began = time.perf_counter()
    module = maybe_compile(net, CompileConfig(kind="autograd", name=name, store=store), None, batch)
    seconds = time.perf_counter() - began
    attempt = module.precast_report()["regions"][""]["attempt"]
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    result = CompileSmoketest(STEPS).run(module, batch, optimizer, loss)
    report = module.precast_report()
    return {
        "name": name,
        "compiled": attempt["success"],
        "exception": attempt["exception"],
        "compile_seconds": round(seconds, 1),
        "agrees": result.ok and result.steps == STEPS,
        "reason": result.reason,
        "max_error": result.max_error,
        "artifact": report["artifact"],
        "reasons": report["reasons"],
    }


def main() -> None:
    """Prints one JSON document, and a line for each architecture to stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    names = parser.parse_args().names
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            rows.append(sweep(name, Path(folder)))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps({**made("benches.training_architectures"), "steps": STEPS, "architectures": rows}))
    sys.exit(0 if all(row["compiled"] and row["agrees"] for row in rows) else 1)


if __name__ == "__main__":
    main()
