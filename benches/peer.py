"""One contender from Python, in a process of its own: `python -m benches.peer WAY SPEC MODULE --device cpu`.

It reads one JSON command a line and answers with one JSON line; whatever else is printed goes to stderr. With `--once
SIZES` it answers once and ends: that is a start, and its phases.
"""

import time

BEGAN = time.time()
# ruff: noqa: E402

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .cases import Sizes, Spec, label

BATCH = 256
"""Calls that are queued before a caller waits, as `precast bench` does."""


class Peer:
    """A module of a spec, run in one of the ways."""

    def __init__(self, way: str, spec: Spec, device: str, freezing: bool, saved: Path) -> None:
        import torch

        from . import ways

        self.marks = {"import": time.time()}
        self.torch, self.spec, self.device, self.saved = torch, spec, device, saved
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self.module = spec.load().to(device)
        self.synchronize()
        self.marks["model"] = time.time()
        self.prepare_call = ways.WAYS[way](self.module, freezing)
        self.calls: dict[str, Callable[[], Any]] = {}

    def synchronize(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def prepare(self, sizes: Sizes) -> dict[str, Any]:
        """Makes a bucket ready and answers once."""
        folder = self.saved / label(sizes)
        folder.mkdir(parents=True, exist_ok=True)
        call = self.calls[label(sizes)] = self.prepare_call(self.spec.tensors(sizes, self.device), folder)
        answer = call()
        self.synchronize()
        return {"sample": self.sample(answer)}

    def sample(self, answer: Any) -> list[float]:
        """Returns a few numbers of the first output, to compare with other contenders'."""
        if hasattr(answer, "copy_outputs_to_cpu"):
            try:
                answer = self.torch.from_numpy(answer.copy_outputs_to_cpu()[0])
            except (RuntimeError, TypeError):  # bfloat16 has no numpy type
                return []
        flat = self.leaves(answer)[0].float().flatten()
        return [*flat[:: max(1, flat.numel() // 8)].tolist(), flat.abs().mean().item()]

    def leaves(self, answer: Any) -> list[Any]:
        return [leaf for leaf in self.torch.utils._pytree.tree_leaves(answer) if self.torch.is_tensor(leaf)]

    def time(self, sizes: Sizes, seconds: float) -> dict[str, Any]:
        """Measures a bucket: each call waited for, and then not waited for."""
        call = self.calls[label(sizes)]
        self.loop(call, min(0.2, seconds))
        times, begin = [], time.perf_counter()
        while time.perf_counter() - begin < seconds or len(times) < 5:
            called = time.perf_counter()
            call()
            self.synchronize()
            times.append(time.perf_counter() - called)
        calls, took = self.loop(call, seconds)
        p99 = sorted(times)[round((len(times) - 1) * 0.99)]
        return {"synchronous": statistics.median(times), "p99": p99, "pipelined": took / calls}

    def loop(self, call: Callable[[], Any], seconds: float) -> tuple[int, float]:
        calls, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds or calls == 0:
            call()
            calls += 1
            if calls % BATCH == 0:
                self.synchronize()
        self.synchronize()
        return calls, time.perf_counter() - begin

    def threads(self, sizes: Sizes, threads: int, seconds: float) -> dict[str, Any]:
        """Measures answers a second of several callers."""

        def work(limit: float) -> int:
            with self.torch.inference_mode():
                return self.loop(self.calls[label(sizes)], limit)[0]

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, [min(0.2, seconds)] * threads))
            begin = time.perf_counter()
            count = sum(pool.map(work, [seconds] * threads))
        return {"throughput": count / (time.perf_counter() - begin)}

    def work(self, sizes: Sizes) -> dict[str, Any]:
        """Returns the minimum work of a call: floating point operations, and bytes of weights, inputs and outputs.
        Of an embedding only some rows are read: its bytes are left out."""
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.utils.flop_counter import FlopCounterMode

        inputs = self.spec.tensors(sizes, self.device)
        weights = [*self.module.parameters(), *self.module.buffers()]
        tables = [m.weight for m in self.module.modules() if isinstance(m, self.torch.nn.Embedding)]
        # The counter knows attention's kernels, but not with fewer heads of keys than of queries.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            answer = self.module(*inputs)
        groups = (weights, tables, [*inputs, *self.leaves(answer)])
        size, left_out, moved = (sum(each.nbytes for each in group) for group in groups)
        dtype = str(next(self.module.parameters()).dtype).removeprefix("torch.")
        least = size - left_out + moved
        return {"flops": counter.get_total_flops(), "bytes": least, "weight_bytes": size, "dtype": dtype}

    def memory(self) -> dict[str, Any]:
        """Returns peak bytes so far."""
        device = self.torch.cuda.max_memory_reserved() if self.device == "cuda" else None
        return {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "device": device}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way")
    parser.add_argument("spec", type=Path)
    parser.add_argument("module")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--freezing", action="store_true")
    parser.add_argument("--saved", type=Path, default=tempfile.mkdtemp(), help="keeps files of a later start here")
    parser.add_argument("--once", type=json.loads, metavar="SIZES")
    args = parser.parse_args()
    # Compilers and exporters print to stdout; the answers have a file of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(document: dict[str, Any]) -> None:
        answers.write(json.dumps(document) + "\n")

    import torch

    try:
        peer = Peer(args.way, Spec(args.spec, args.module), args.device, args.freezing, args.saved)
        with torch.inference_mode():
            if args.once:
                peer.prepare(args.once)
                marks = {"python": BEGAN, **peer.marks, "answer": time.time()}
                read = resource.getrusage(resource.RUSAGE_SELF).ru_inblock * 512
                answer({"marks": marks, "bytes_read": read, **peer.memory()})
                return
            answer({"ready": True})
            for line in sys.stdin:
                command = json.loads(line)
                try:
                    answer(getattr(peer, command.pop("do"))(**command))
                except Exception as error:
                    answer({"failed": message(error)})
    except Exception as error:
        answer({"failed": message(error)})


def message(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # what is left to tear down is no part of any figure
