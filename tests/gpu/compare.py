"""Compares two safetensors files tensor by tensor, in order, and prints one JSON document. Exit code 1: they differ."""

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("got", type=Path)
    parser.add_argument("want", type=Path)
    parser.add_argument("--rtol", type=float, required=True)
    parser.add_argument("--atol", type=float, required=True)
    args = parser.parse_args()

    got, want = load_file(args.got), load_file(args.want)
    pairs = list(zip(got.items(), want.values(), strict=True))
    tensors = []
    for (name, a), b in pairs:
        same = a.shape == b.shape and a.dtype == b.dtype
        tensors.append(
            {
                "name": name,
                "dtype": str(a.dtype).removeprefix("torch."),
                "shape": list(a.shape),
                "max_abs_error": (a.double() - b.double()).abs().max().item() if same else None,
                "close": same and torch.allclose(a.double(), b.double(), rtol=args.rtol, atol=args.atol),
            }
        )
    close = bool(tensors) and all(tensor["close"] for tensor in tensors)
    print(json.dumps({"schema": 1, "rtol": args.rtol, "atol": args.atol, "close": close, "tensors": tensors}, indent=2))
    return 0 if close else 1


if __name__ == "__main__":
    sys.exit(main())
