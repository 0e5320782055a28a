"""Eager's list of calls against libtorch's interpreter of archives, on the same graph, tensors and threads, in turns.

    .venv/bin/python -m benches.eager [--rounds 30] > benches/results/eager-cpu.json

Torch 2.11 alone has both. The worker captures each module and writes the list; the archive is made of the same graph,
as Precast kept it before. Both run in this process through the shim, which is what the runtime calls; a round measures
one after the other, and the ratio is the median of the rounds' ratios: below 1 the list of calls is faster. Times are
of the processor, with one thread: other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.worker import shim
from tests.worker.support import Quiet, part, spec

from .cases import ROOT
from .machine import describe

# Module -> entry, inputs, and the sizes that are measured; `small` is nothing but calls.
CASES: dict[str, tuple[str, str, list[tuple[str, str, list[str | int]]], list[dict[str, int]]]] = {
    "minilm": (
        "examples/minilm",
        "model:load",
        [("input_ids", "int64", ["batch", "seq"]), ("attention_mask", "int64", ["batch", "seq"])],
        [{"batch": 1, "seq": 32}, {"batch": 8, "seq": 128}],
    ),
    "small": ("", "small:load", [("x", "float32", ["batch", 16])], [{"batch": 4}]),
}
SMALL = """
import torch

class Small(torch.nn.Module):
    def forward(self, x):
        for at in range(50):
            x = torch.relu(x + at) * 0.5
            x = x - x.mean(-1, keepdim=True)
        return x

def load():
    return Small()
"""


@contextmanager
def archive(path: Path) -> Iterator[ctypes.c_void_p]:
    """Loads an archive with libtorch's interpreter."""
    library, handle = shim.library(("archive.cpp", "shim.cpp")), ctypes.c_void_p()
    assert library.precast_archive_new(str(path).encode(), ctypes.byref(handle)) == 0, library.precast_last_error()
    try:
        yield handle
    finally:
        library.precast_archive_delete(handle)


def save_archive(graph: Any, weights: list[str], path: Path) -> None:
    """Writes a captured graph as an archive whose weights are inputs, in the order of the list of calls."""
    cut, segment, archives = part("cut"), part("segment"), part("torch_private.archives")
    (whole,) = cut.cut(graph, [], "")
    names = {name: node for node, name in graph.weights.items()}
    whole.inputs, whole.outputs = list(graph.inputs), list(graph.outputs)
    whole.constants = [names[name] for name in weights]
    built = segment.build(whole, graph)
    for node in built.graph.nodes:
        node.meta.pop("stack_trace", None)
    archives.save_program(built.graph, {}, path, {}, built.ranges)


def measure(call: Callable[[], Any], seconds: float) -> float:
    """Returns the microseconds of one call on the processor, over as many as fit into some seconds."""
    calls, started = 0, time.process_time()
    while time.process_time() - started < seconds:
        call()
        calls += 1
    return (time.process_time() - started) / calls * 1e6


def case(name: str, sizes: dict[str, int], rounds: int, out: Path) -> dict[str, Any]:
    """Captures one module at one size and measures both ways."""
    import torch

    torch.set_num_threads(1)
    folder, entry, inputs, _ = CASES[name]
    root = ROOT / folder if folder else out
    opened = part("entry").open_model(root, entry, "cpu", ())
    specs = [spec(key, kind, [sizes.get(str(size), size) for size in shape]) for key, kind, shape in inputs]
    module = {"name": name, "path": "", "method": "forward", "regions": [], "inputs": specs, "compiled": False}
    capture, wire = part("capture"), Quiet()
    graph = capture.trace(opened, module, {}, wire).graph
    weights = part("eager").save(graph, out / "calls.json")
    save_archive(graph, weights, out / "archive.pt2")
    held = {**opened.named().tensors, **graph.extra}
    given = [
        torch.randint(0, 2, one["shape"]) if one["dtype"] == "int64" else torch.randn(one["shape"]) for one in specs
    ]
    tensors = [*given, *(held[key].detach() for key in weights)]
    document, outputs = json.loads((out / "calls.json").read_text()), len(graph.outputs)
    started = time.perf_counter()
    with shim.loaded(document) as calls:
        load_ms = (time.perf_counter() - started) * 1e3
        started = time.perf_counter()
        with archive(out / "archive.pt2") as interpreter:
            archive_ms = (time.perf_counter() - started) * 1e3
            old = shim.library(("archive.cpp", "shim.cpp")).precast_archive_run
            new = shim.library().precast_calls_run
            ways = {
                "calls": lambda: shim.call(new, calls, tensors, outputs),
                "archive": lambda: shim.call(old, interpreter, tensors, outputs),
            }
            first = {way: call() for way, call in ways.items()}
            same = all(torch.equal(*pair) for pair in zip(*first.values(), strict=True))
            figures: dict[str, list[float]] = {way: [] for way in ways}
            for at in range(rounds):
                for way in list(ways) if at % 2 else reversed(list(ways)):
                    figures[way].append(measure(ways[way], 0.2))
    ratios = sorted(a / b for a, b in zip(figures["calls"], figures["archive"], strict=True))
    return {
        "sizes": sizes,
        "calls": len(document["calls"]),
        "same_bits": same,
        "calls_us": round(statistics.median(figures["calls"]), 2),
        "archive_us": round(statistics.median(figures["archive"]), 2),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(ratios[len(ratios) // 4], 4), round(ratios[-1 - len(ratios) // 4], 4)],
        "resolve_ms": round(load_ms, 2),
        "archive_load_ms": round(archive_ms, 2),
        "calls_bytes": (out / "calls.json").stat().st_size,
        "archive_bytes": (out / "archive.pt2").stat().st_size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--cases", default=",".join(CASES))
    args = parser.parse_args()
    results = {}
    for name in args.cases.split(","):
        for sizes in CASES[name][3]:
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder).resolve()
                (out / "small.py").write_text(SMALL)
                title = " ".join([name, *(f"{dim}={size}" for dim, size in sizes.items())])
                results[title] = case(name, sizes, args.rounds, out)
                print(title, results[title], file=sys.stderr)
    document = {
        "schema": 1,
        "machine": describe(ROOT / "target" / "release"),
        "command": f"python -m benches.eager --rounds {args.rounds}",
    }
    json.dump({**document, "cases": results}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
