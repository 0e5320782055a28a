"""Writes inputs and eager's answers as safetensors, for comparisons with the answers of artifacts.

For every case `DIM=SIZE,…` two files appear in the output folder: `CASE.inputs.safetensors`, which `precast run` takes,
and `CASE.eager.safetensors` with the model's answers to them, as `out.0`, `out.1`, …

Without arguments it reads them from stdin, one JSON list a line, and answers each line with the exit status. Every list
is worked off by a process forked from this one, so that no model sees modules of another and torch is imported once.
"""

import argparse
import importlib
import json
import os
import sys
import tomllib
import traceback
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def sample(declared: dict[str, Any], sizes: dict[str, int], generator: torch.Generator) -> Tensor:
    """Returns a random tensor for one `[module.inputs]` entry of the spec, at these sizes."""
    shape = [sizes[dim] if isinstance(dim, str) else dim for dim in declared["shape"]]
    dtype = getattr(torch, declared["dtype"])
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    low, high = declared.get("range", [0, 2])
    return torch.randint(low, high, shape, generator=generator, dtype=dtype)


def serve() -> None:
    # Nothing is computed in this process: a forked child would lack its OpenMP threads.
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.dup2(2, 1)  # What a model prints is no answer.
                main(json.loads(line))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", required=True, type=Path, help="the precast.toml to take model and inputs from")
    parser.add_argument("--module", required=True, help="name of the module, or name(input,…) of one of its variants")
    parser.add_argument("--out", required=True, type=Path, help="folder to write to")
    parser.add_argument("cases", nargs="+", metavar="DIM=SIZE,…")
    args = parser.parse_args(arguments)

    spec = tomllib.loads(args.spec.read_text(encoding="utf-8"))
    name, _, variant = args.module.rstrip(")").partition("(")
    modules = [module for module in spec["module"] if module["name"] == name]
    declared = next(module for module in modules if variant in ("", ",".join(module["inputs"])))
    device = spec.get("target", {}).get("device", "cpu")
    sys.path.insert(0, str(args.spec.resolve().parent))
    module, function = spec["model"]["entry"].split(":")
    model = getattr(importlib.import_module(module), function)().to(device)
    call = getattr(model.get_submodule(declared.get("path", "")), declared.get("method", "forward"))

    args.out.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for case in args.cases:
        sizes = {name: int(size) for name, size in (pair.split("=") for pair in case.split(",") if pair)}
        inputs = {name: sample(entry, sizes, generator) for name, entry in declared["inputs"].items()}
        with torch.inference_mode():
            answer = call(**{name: tensor.to(device) for name, tensor in inputs.items()})
        answers = (
            [answer] if isinstance(answer, Tensor) else list(answer.values() if isinstance(answer, dict) else answer)
        )
        save_file(inputs, args.out / f"{case}.inputs.safetensors")
        save_file(
            {f"out.{i}": tensor.cpu().contiguous() for i, tensor in enumerate(answers)},
            args.out / f"{case}.eager.safetensors",
        )


if __name__ == "__main__":
    main(sys.argv[1:]) if len(sys.argv) > 1 else serve()
