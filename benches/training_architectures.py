"""Training steps of many architectures with random weights, both ways: losses and gradients as eager's?

    .venv-python/bin/python -m benches.training_architectures [NAME …] [--kind autograd] \\
        | python -m benches.results training-cpu.json architectures

Five steps of AdamW on one batch. `autograd`: `maybe_compile` with `kind = "autograd"`, with the architecture's dropout;
losses and gradients of each step are compared with eager's. `step`: `kind = "step"`, without dropout, trained by
`precast train`; compared are the losses, the gradients of the first step, and the sum of all that AdamW keeps. Those
come from checkpoints: AdamW's first average has a tenth of the first gradient.

A gradient's error is its norm's share; one whose norm is below a thousandth of the largest counts as a share of that.
Exit code 1 if one disagrees or can't be built.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .architectures import SMALL, main
from .cases import ROOT

STEPS = 5
RATE = 1e-3
FIRST = 0.1
"""The share of a gradient that AdamW's first average gets of it."""
TOLERANCE = 1e-3
NAMES = ("bert", "gpt2", "llama", "qwen2", "gemma", "t5", "whisper", "vit", "resnet", "resnet18")


def batch(name: str) -> dict[str, Any]:
    """Returns one batch of an architecture."""
    import torch

    torch.manual_seed(1)
    return SMALL[name].batch(SMALL[name].sizes[0])


def loss(answer: Any) -> Any:
    """Returns the squared distance of all results from fixed numbers: it moves every parameter that they depend on.

    The order of the rows says nothing: `precast train` draws another one in each pass over its file.
    """
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
    net, given = SMALL[name].make().train(), batch(name)
    began = time.perf_counter()
    module = maybe_compile(
        net, CompileConfig(kind="autograd", prefer="artifact", name=name, store=folder / "store"), None, given
    )
    seconds = time.perf_counter() - began
    attempt = module.precast_report()["regions"][""]["attempt"]
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE)
    result = CompileSmoketest(STEPS).run(module, given, optimizer, loss)
    report = module.precast_report()
    reason = attempt["exception"] or result.reason
    answered = report["artifact"] > 0 and not report["reasons"]
    return {
        "compiled": attempt["success"],
        "build_seconds": round(seconds, 1),
        "agrees": result.ok and result.steps == STEPS and answered,
        "reason": reason,
        "error": result.max_error,
    }


SOURCE = """
import sys

sys.path.insert(0, {root!r})
from benches.training_architectures import bare, loss
import torch


class Trained(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = bare({name!r})

    def forward(self, {names}):
        return loss(self.net({given}))


def load():
    torch.manual_seed(0)
    return Trained()
"""


def bare(name: str) -> Any:
    """Returns an architecture without dropout: the program of a step draws other masks than eager."""
    net = SMALL[name].make()
    for module in net.modules():
        for key, value in vars(module).items():
            if "drop" in key and isinstance(value, float):
                setattr(module, key, 0.0)
        if "Dropout" in type(module).__name__:
            module.p = 0.0
    for key, value in vars(getattr(net, "config", None) or net).items():
        if ("drop" in key or "pdrop" in key) and isinstance(value, float):
            setattr(net.config, key, 0.0)
    return net


def project(name: str, folder: Path) -> None:
    """Writes the project of a step: the model with a loss, the spec, and the batch."""
    from safetensors.torch import save_file

    given = batch(name)
    pairs = ", ".join(f"{each}={each}" for each in given)
    source = SOURCE.format(root=str(ROOT), name=name, names=", ".join(given), given=pairs)
    (folder / "model.py").write_text(source)
    inputs = []
    for each, tensor in given.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        high = 2 if each == "attention_mask" else SMALL[name].vocabulary
        within = "" if tensor.is_floating_point() else f", range = [0, {high}]"
        inputs.append(f'{each} = {{ dtype = "{dtype}", shape = {list(tensor.shape)}{within} }}')
    spec = f'schema = 1\n[model]\nname = "{name}"\nentry = "model:load"\n[[module]]\nname = "train"\nkind = "step"\n'
    spec += "[module.inputs]\n" + "\n".join(inputs) + '\n[module.train]\noptimizer = "adamw"\n'
    (folder / "precast.toml").write_text(spec)
    save_file({each: tensor.contiguous() for each, tensor in given.items()}, folder / "batch.safetensors")


def trained(folder: Path, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Trains to a step by the command; returns its document and the newest checkpoint."""
    from precast.client.command import find
    from safetensors.torch import load_file

    command = [find(), "--store", "store", "--format", "json", "train", "train", "--data", "batch.safetensors"]
    command += ["--steps", str(steps), "--lr", str(RATE), "--checkpoint", "run", "--every", "1"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"`precast train` fails: {done.stderr[-2000:]}")
    document = json.loads(done.stdout)
    return document, load_file(folder / document["checkpoint"])


def step(name: str, folder: Path) -> dict[str, Any]:
    """Builds the step of an architecture, trains with it, and compares with eager."""
    import torch
    from precast.client import building
    from precast.compare import gradients
    from precast.errors import BuildError

    folder.mkdir()
    project(name, folder)
    began = time.perf_counter()
    try:
        building.build_spec(folder / "precast.toml", store=folder / "store", progress=False)
    except BuildError as error:
        return {"compiled": False, "agrees": False, "reason": "; ".join(error.failures) or str(error)}
    seconds = time.perf_counter() - began
    first, after_one = trained(folder, 1)
    more, after_all = trained(folder, STEPS)
    losses = [*first["losses"], *more["losses"]]

    torch.manual_seed(0)
    net, given = bare(name).train(), batch(name)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    expected, grads, worst, reason = [], {}, 0.0, None
    for number in range(STEPS):
        value = loss(net(**given))
        value.backward()
        if number == 0:
            grads = {key: FIRST * one.grad.clone() for key, one in net.named_parameters() if one.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(value.detach()))
    averages = {key: optimizer.state[one]["exp_avg"] for key, one in net.named_parameters() if one in optimizer.state}
    for saved, wanted, what in ((after_one, grads, "first step"), (after_all, averages, "all steps")):
        got = {key: saved.get(f"optimizer.exp_avg.net.{key}") for key in wanted}
        problem, error = gradients.difference(got, wanted, TOLERANCE)
        worst, reason = max(worst, error), reason or (problem and f"{what}: {problem}")
    for number, (mine, theirs) in enumerate(zip(losses, expected, strict=True)):
        error = abs(mine - theirs) / abs(theirs)
        worst = max(worst, error)
        if error > TOLERANCE:
            reason = reason or f"the loss of step {number} is {mine}, eager's is {theirs}"
    result = {"compiled": True, "build_seconds": round(seconds, 1), "agrees": reason is None, "reason": reason}
    return {**result, "error": worst, "losses": [losses[0], losses[-1]]}


if __name__ == "__main__":
    checks = {"autograd": autograd, "step": step}
    facts = {"steps": STEPS, "tolerance": TOLERANCE}
    sys.exit(main(__doc__, "benches.training_architectures", NAMES, checks, facts))
