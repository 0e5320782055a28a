"""Runs a compiled artifact through its C functions, as the Rust runtime does, in a process that has not imported torch.

`tests/gpu/container.py` runs one in a Python that has imported torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from .support import Project, part


def run(library: str, device: str, weights: dict[str, Any], inputs: list[Any], outputs: int) -> list[Any]:
    """Loads, binds weights by their names `c0`, `c1`, …, runs once; returns the outputs on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        given = {f"w.{name}": tensor for name, tensor in weights.items()}
        given |= {f"in.{index}": tensor for index, tensor in enumerate(inputs)}
        part("tensors").write(Path(folder, "given.safetensors"), given)
        job = {
            "torch": str(Path(torch.__file__).parent / "lib"),
            "library": library,
            "device": device,
            "given": str(Path(folder, "given.safetensors")),
            "inputs": len(inputs),
            "outputs": outputs,
            "answer": str(Path(folder, "answer.bin")),
        }
        script = Path(__file__).with_name("artifact_process.py")
        done = subprocess.run(
            [sys.executable, "-I", str(script)], input=json.dumps(job), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr}"
        data = bytearray(Path(folder, "answer.bin").read_bytes())
    results = []
    for entry in json.loads(done.stdout):
        dtype = getattr(torch, entry["dtype"])
        flat = torch.frombuffer(data[entry["begin"] : entry["end"]], dtype=dtype)
        made = torch.empty_strided(entry["shape"], entry["stride"], dtype=dtype)
        results.append(made.copy_(flat.reshape(entry["shape"])))
    return results


def agrees(
    test: Project,
    opened: Any,
    captured: dict[str, Any],
    answer: dict[str, Any],
    inputs: list[Any],
    near: tuple[float, float] = (1e-5, 1e-6),
    device: str = "cpu",
    made: dict[str, Any] | None = None,
) -> None:
    """Runs an artifact of one step with the weights of the model, and those made of them; compares it with the model.

    The tolerances are `rtol` and `atol`.
    """
    (step,) = captured["steps"]
    weights = test.bound(captured, test.weights(opened)) | (made or {})
    given = run(answer["library"], device, weights, inputs, len(step["outputs"]))
    values = dict(zip(step["outputs"], given, strict=True))
    with torch.inference_mode():
        expected = torch.utils._pytree.tree_leaves(opened.model(*(one.to(device) for one in inputs)))
    expected = [one.cpu() for one in expected if isinstance(one, torch.Tensor)]
    torch.testing.assert_close([values[at] for at in captured["results"]], expected, rtol=near[0], atol=near[1])
