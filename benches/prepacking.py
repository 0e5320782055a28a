"""Compares products with a weight as it is and prepacked, by rows: what prepacking buys a bucket of few rows.

    .venv/bin/python benches/prepacking.py [--rounds N] > benches/results/prepacking-cpu.json

Each product runs over as many weights of one shape as exceed the caches, as a call of a model does. Both forms
alternate, and the fastest round of each counts: other work on the machine only adds time.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# Bytes of all weights of one shape: more than the last cache has.
BYTES = 96 << 20
# Output and input features: attention and MLP of SmolLM2-135M and of a Llama of 1.1 billion parameters, and its heads.
SHAPES = [(576, 576), (1536, 576), (576, 1536), (256, 2048), (2048, 2048), (5632, 2048), (2048, 5632), (32000, 2048)]
ROWS = [1, 2, 4, 8, 16, 32, 64]


def seconds(product: Callable[[Any], Any], weights: list[Any]) -> float:
    started = time.perf_counter()
    for weight in weights:
        product(weight)
    return time.perf_counter() - started


def ratio(rows: int, plain: list, packed: list, rounds: int) -> dict[str, float]:
    """Returns the microseconds of a product in both forms, and the time as it is over the time prepacked."""
    features = plain[0].shape[1]
    x = torch.randn(rows, features, dtype=plain[0].dtype)
    forms = {
        "plain": (lambda weight: torch.mm(x, weight.t()), plain),
        "packed": (lambda weight: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""), packed),
    }
    taken = {name: [] for name in forms}
    for number in range(rounds + 1):
        for name, (product, weights) in forms.items():
            one = seconds(product, weights)
            if number:  # the first round generates kernels
                taken[name].append(one)
    best = {name: min(times) / len(plain) * 1e6 for name, times in taken.items()}
    found = {f"{name}_us": round(micros, 1) for name, micros in best.items()}
    return {**found, "ratio": round(best["plain"] / best["packed"], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from benches import machine

    result = {
        "schema": 1,
        "commit": machine.commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": " ".join(["benches/prepacking.py", *sys.argv[1:]]),
        "machine": machine.describe(Path("target/release")),
        "products": [],
    }
    torch.set_grad_enabled(False)
    for dtype in (getattr(torch, name) for name in args.dtypes):
        for outputs, features in SHAPES:
            count = min(64, max(1, BYTES // (outputs * features * dtype.itemsize)))
            plain = [torch.randn(outputs, features, dtype=dtype) for _ in range(count)]
            packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 1024) for weight in plain]
            shape = {"dtype": str(dtype).removeprefix("torch."), "outputs": outputs, "features": features}
            for rows in args.rows:
                row = {**shape, "rows": rows, **ratio(rows, plain, packed, args.rounds)}
                print(json.dumps(row), file=sys.stderr, flush=True)
                result["products"].append(row)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
