"""Training steps of many architectures with random weights: losses and gradients as eager's?

    .venv-python/bin/python -m benches.training_architectures [NAME …] \\
        | python -m benches.results training-cpu.json architectures

Five steps of AdamW on one batch by `maybe_compile` with `kind = "autograd"`, with the architecture's dropout: losses
and gradients of each step are compared. A gradient's error is its norm's share; one whose norm is below a thousandth of
the largest counts as a share of that. Exit code 1 if one disagrees or can't be built.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from .architectures import SMALL, main

STEPS = 5
NAMES = ("bert", "gpt2", "llama", "qwen2", "gemma", "t5", "whisper", "vit", "resnet", "resnet18")


def loss(answer: Any) -> Any:
    """Returns the squared distance of all results from fixed numbers: it moves every parameter that they depend on."""
    import torch
    from precast.compare.batches import tensors

    def distance(each: Any) -> Any:
        wanted = torch.arange(each[0].numel(), dtype=torch.float32).sin().view(each.shape[1:])
        return (each.float() - wanted).square().mean()

    return sum(distance(each) for each in tensors(answer) if each.is_floating_point())


def autograd(name: str, folder: Path) -> dict[str, Any]:
    """Compiles the pair of an architecture, and compares training steps with eager's."""
    import torch
    from precast import CompileConfig, CompileSmoketest, maybe_compile

    torch.manual_seed(0)
    net = SMALL[name].make().train()
    torch.manual_seed(1)
    given = SMALL[name].batch(SMALL[name].sizes[0])
    config = CompileConfig(kind="autograd", prefer="artifact", name=name, store=folder / "store")
    began = time.perf_counter()
    module = maybe_compile(net, config, None, given)
    seconds = time.perf_counter() - began
    attempt = module.precast_report()["regions"][""]["attempt"]
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    result = CompileSmoketest(STEPS).run(module, given, optimizer, loss)
    report = module.precast_report()
    answered = report["artifact"] > 0 and not report["reasons"]
    return {
        "compiled": attempt["success"],
        "build_seconds": round(seconds, 1),
        "agrees": result.ok and result.steps == STEPS and answered,
        "reason": attempt["exception"] or result.reason,
        "error": result.max_error,
    }


if __name__ == "__main__":
    sys.exit(main(__doc__, "benches.training_architectures", NAMES, autograd, {"steps": STEPS}))
