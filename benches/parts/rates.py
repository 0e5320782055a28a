"""The machine's rates of multiplication and memory, and the share of them that calls reach."""

import sys
from typing import Any

from ..run import Run, main_kind


def measure(run: Run) -> None:
    with run.skipping("rates"):
        found, _ = run.host.run("rates", [sys.executable, "-m", "benches.machine", run.host.device], min(120, run.left))
        run.result["rates"] = better(run.result.get("rates") or {}, found)
        run.write()


def better(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Returns the higher of two measurements of each rate."""

    def higher(known: Any, rate: Any) -> Any:
        return better(known or {}, rate) if isinstance(rate, dict) else max(rate, known or 0)

    return {**before, **{name: higher(before.get(name), rate) for name, rate in now.items()}}


def floor(run: Run) -> None:
    """Measures the rates once more, since the machine may be busy at any time, and says how near calls came to them.

    The floor of a call is the longer of its arithmetic at the rate of a large matrix product in its dtype, and its
    bytes (weights, inputs, outputs) at the rate of a large copy. Weights that stay in the CPU's cache from call to call
    have no such floor: theirs is the arithmetic.
    """
    if not run.result.get("latency"):
        return
    measure(run)
    rates = run.result.get("rates")
    if not rates:
        return run.skip("floor", "the machine's rates were not measured")
    cache = run.result["machine"]["cache_bytes"] if run.host.device == "cpu" else 0
    for row in run.result["latency"]:
        work = row.get("work")
        if not work or work["dtype"] not in rates["flops"]:
            run.skip(f"floor {row['case']} {row['bucket']}", "its work or the rate of its dtype is not known")
            continue
        seconds = {"arithmetic": work["flops"] / rates["flops"][work["dtype"]]}
        if work["bytes"] > cache:
            seconds["bytes"] = work["bytes"] / rates["bytes"]
        decides = max(seconds, key=lambda name: seconds[name])
        ours = row["seconds"]["precast"][main_kind(run.host.device)]["median"]
        row["floor"] = {"seconds": seconds, "decides": decides, "times_floor": ours / seconds[decides]}
    run.write()
