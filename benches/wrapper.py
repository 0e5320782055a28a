"""`maybe_compile` beside `torch.compile` and eager, in one process: one row for each architecture.

    python benches/wrapper.py [NAME …] [--device cuda] [--dtype bfloat16] [--batch 1 16] [--out FILE] [--processes N]

The architectures are those of `architectures.py` at their usual sizes, with random weights. The builds come first, in
processes of their own, then a fresh process for each architecture, which is a later process of a user: it starts from
the release. On a GPU both compilers have `mode="reduce-overhead"`. With LAYERS=2 in the environment models of
transformers have two layers, which is quick to build and says who answers.

| | |
|---|---|
| start | seconds from the module in hand to the first answer, at all batch sizes; without the imports |
| single | a call, and a wait for the device: a request that is served |
| pipelined | many calls, and one wait: the device is never idle, if the host is quick enough |
| host | the time until a call returns, on a GPU, while the device is behind by a few calls at most |
| far | distance from the module in float32, by norm, as a share |

All times are medians over rounds, in which the contenders take turns; eager takes part in the first. `ratio` is the
time of the peer over ours, round by round: above 1 we are quicker. A row says who answered: `artifact`, or the reason
for which the original did.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benches.architectures import USUAL
from benches.machine import document

ROUNDS = 5


class Case:
    """An architecture on a device."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        import torch

        torch.manual_seed(0)
        self.name, self.device, self.options = name, options.device, options
        self.dtype, self.model = getattr(torch, options.dtype), USUAL[name]
        self.mode = "default" if self.device == "cpu" else "reduce-overhead"
        self.net = self.model.make().eval().to(self.device, self.dtype)
        self.given = {batch: self.model.inputs({"batch": batch}, self.device, self.dtype) for batch in options.batch}

    def wrapped(self) -> Any:
        """Returns the module with artifacts: from the store, if they are there."""
        import precast

        config = precast.CompileConfig(
            name=f"{self.name}-{self.options.dtype}",
            store=self.options.store,
            mode=self.mode,
            buckets={"batch": self.options.batch},
            shapes={name: list(axes) for name, axes in self.model.axes.items()},
        )
        return precast.maybe_compile(self.net, config, None, self.given[max(self.given)])

    def peer(self) -> Any:
        """Returns the module behind `torch.compile`."""
        import torch

        return torch.compile(self.net, mode=self.mode, dynamic=False)


def _first(answer: Any) -> Any:
    import torch

    leaves = torch.utils._pytree.tree_leaves(answer)
    return next(one for one in leaves if isinstance(one, torch.Tensor))


def _wait(device: str) -> None:
    if device != "cpu":
        import torch

        torch.cuda.synchronize()


def _timed(call: Callable[[], Any], device: str, count: int) -> tuple[list[float], float]:
    """Returns the milliseconds until each of some calls returned, and those until the device had done them all."""
    took, begin = [], time.perf_counter()
    for _ in range(count):
        called = time.perf_counter()
        call()
        took.append((time.perf_counter() - called) * 1e3)
    _wait(device)
    return took, (time.perf_counter() - begin) * 1e3


def _measured(call: Callable[[], Any], device: str, seconds: float) -> dict[str, float]:
    """Returns the milliseconds of a call."""
    _, each = _timed(call, device, 1)
    count = max(5, min(100, int(seconds * 1e3 / max(each, 1e-2))))
    found = {"single": median(_timed(call, device, 1)[1] for _ in range(count))}
    if device != "cpu":
        found["pipelined"] = _timed(call, device, count)[1] / count
        found["host"] = median(one for _ in range(max(2, count // 5)) for one in _timed(call, device, 5)[0])
    return found


def _kernels(call: Callable[[], Any]) -> list[tuple[str, int, float]]:
    """Returns the kernels of a call, with their number and microseconds, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        _wait("cuda")
    count: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for event in profiled.events():
        if event.device_type.name == "CUDA":
            count[event.name[:90]] += 1
            total[event.name[:90]] += event.device_time
    return [(name, count[name], round(took, 1)) for name, took in total.most_common()]


def row(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one architecture, in this process."""
    import torch

    case = Case(name, options)
    made: dict[str, Any] = {"name": name, "dtype": options.dtype, "batches": {}}
    with torch.no_grad():
        ours, made["start"] = _started(case, case.wrapped, 1)
        report = ours.precast_report()
        attempts = [one["attempt"] for one in report["regions"].values() if one.get("attempt")]
        made["artifact"], made["reasons"] = report["artifact"], report["reasons"]
        made["built"] = [attempt.get("built") for attempt in attempts]
        if not report["artifact"]:
            made["why"] = [attempt["exception"] for attempt in attempts]
        if not report["artifact"] or (options.start and options.builds):
            return made
        peer, made["peer_start"] = _started(case, case.peer, 3)
        if options.start:  # both compilers have filled their caches
            return made
        calls = {"ours": ours, "peer": peer, "eager": case.net}
        truth = copy.deepcopy(case.net).float() if options.dtype != "float32" else None
        for batch, inputs in case.given.items():
            found = made["batches"][str(batch)] = {"far": _far(calls, truth, inputs)} if truth is not None else {}
            found |= _compared({key: functools.partial(call, **inputs) for key, call in calls.items()}, case)
        made["answers"] = ours.precast_report()["artifact"]
    return made


def _started(case: Case, make: Callable[[], Any], times: int) -> tuple[Any, float]:
    """Returns a callable after its first answers, and the seconds from the module in hand to them."""
    _wait(case.device)
    begin = time.perf_counter()
    call = make()
    for inputs in case.given.values():
        for _ in range(times):
            call(**inputs)
    _wait(case.device)
    return call, time.perf_counter() - begin


def _far(calls: dict[str, Any], truth: Any, inputs: dict[str, Any]) -> dict[str, float]:
    """Returns the distances of answers from those of the module in float32."""
    wide = {key: one.float() if one.is_floating_point() else one for key, one in inputs.items()}
    exact = _first(truth(**wide)).double()
    return {key: float((_first(call(**inputs)).double() - exact).norm() / exact.norm()) for key, call in calls.items()}


def _compared(calls: dict[str, Callable[[], Any]], case: Case) -> dict[str, Any]:
    """Returns the milliseconds of each contender, and the ratios to ours."""
    rounds: dict[str, list[dict[str, float]]] = {key: [] for key in calls}
    order = list(calls.items())
    for number in range(ROUNDS):
        for key, call in order[number % 3 :] + order[: number % 3]:
            if key != "eager" or not number:  # the slowest, and no contender
                rounds[key].append(_measured(call, case.device, case.options.seconds))
    found: dict[str, Any] = {}
    for kind in rounds["ours"][0]:
        found[kind] = {key: round(median(one[kind] for one in taken), 4) for key, taken in rounds.items()}
        for other in ("peer", "eager"):
            ratios = [b[kind] / a[kind] for a, b in zip(rounds["ours"], rounds[other], strict=False)]
            found[kind][f"ratio_{other}"] = round(median(ratios), 3)
    if case.options.kernels:
        found["kernels"] = {key: _kernels(calls[key]) for key in ("ours", "peer")}
    return found


def _child(name: str, options: list[str], log: Path) -> str | None:
    """Runs one architecture in a process of its own; returns the last line that it prints."""
    command = [sys.executable, __file__, name, "--row", *options]
    with log.open("w") as file:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=file, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    return lines[-1] if done.returncode == 0 and lines else None


def main() -> None:
    """Builds, measures and prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="architectures; all without")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--store", default="wrapper-store")
    parser.add_argument("--out", help="a JSON file for the rows")
    parser.add_argument("--logs", default="wrapper-logs")
    parser.add_argument("--processes", type=int, default=1, help="builds at a time")
    parser.add_argument("--seconds", type=float, default=0.15, help="of each measurement in a round")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no row is begun")
    parser.add_argument("--kernels", action="store_true", help="list the kernels of a call on a GPU")
    parser.add_argument("--builds", action="store_true", help="only build, and say who answers")
    parser.add_argument("--row", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--start", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    begun = time.monotonic()
    names = options.names or list(USUAL)
    if options.row:
        print(json.dumps(row(names[0], options)))
        return
    kept = [part for key in ("device", "dtype", "store", "seconds") for part in (f"--{key}", str(vars(options)[key]))]
    kept += ["--batch", *map(str, options.batch)]
    kept += [f"--{key}" for key in ("kernels", "builds") if vars(options)[key]]
    logs = Path(options.logs)
    logs.mkdir(exist_ok=True)

    def build(name: str) -> dict[str, Any]:
        first = json.loads(_child(name, [*kept, "--start"], logs / f"{name}.build") or "{}")
        who = f"{first.get('artifact', 0)} calls by artifacts, built in {first.get('start', 0):.0f} s"
        print(f"{name:20} {options.dtype} {who} {first.get('why') or first.get('reasons') or ''}", file=sys.stderr)
        return first

    with ThreadPoolExecutor(options.processes) as pool:
        built = dict(zip(names, pool.map(build, names), strict=True))
    print(f"built in {time.monotonic() - begun:.0f} s", file=sys.stderr)
    rows = []
    for name, first in built.items():
        if options.builds or time.monotonic() - begun > options.limit:
            break
        last = _child(name, kept, logs / f"{name}.row") if first.get("artifact") else None
        made = json.loads(last) if last else {"name": name, "failed": True, **first}
        made["build"], made["peer_build"] = first.get("start"), first.get("peer_start")
        rows.append(made)
        for batch, found in made.get("batches", {}).items():
            kinds = {kind: found[kind] for kind in ("single", "pipelined", "host") if kind in found}
            ratios = [f"{kind} {each['ours']:.3f} ms, {each['ratio_peer']:.2f}" for kind, each in kinds.items()]
            print(f"{name:20} {batch:>3}  {'  '.join(ratios)}", file=sys.stderr)
        if not made.get("batches"):
            print(f"{name:20} {made.get('why') or made.get('reasons') or 'no row'}", file=sys.stderr)
        if options.out:
            from precast.client.command import find

            written = {**document(" ".join(sys.argv), Path(find()).parent), "rows": rows}
            Path(options.out).write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
