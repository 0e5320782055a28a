"""The overhead of `Model::run` over the artifact's own C call: `cargo bench -p precast-benches --bench overhead`."""

import os
import re
import shutil

from ..cases import ROOT
from ..contenders import Failed, once, tail
from ..run import Run


def measure(run: Run) -> None:
    if not shutil.which("cargo") or not (ROOT / "Cargo.toml").exists():
        return run.skip("overhead", "no cargo on this machine")
    log = run.host.logs / "overhead.log"
    command = [
        "cargo",
        "bench",
        "--bench",
        "overhead",
        "--",
        *("--output-format", "bencher", "--warm-up-time", "0.5", "--measurement-time", "2"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(run.host.threads), "CARGO_TERM_COLOR": "never"}
    try:
        ran = once(command, environment, log, max(1.0, run.left))
        if ran.code != 0:
            raise Failed(tail(log))
    except Failed as error:
        return run.skip("overhead", error)
    found = re.findall(r"^test (.+?) \.\.\. bench:\s+([\d,]+) ns/iter \(\+/- ([\d,]+)\)", ran.output, re.M)
    nanos = {name: {"ns": number(value), "spread_ns": number(around)} for name, value, around in found}
    if not nanos:
        return run.skip("overhead", "the benchmark printed no figures")
    added = {
        group: nanos[f"{group}/run"]["ns"] - nanos[f"{group}/raw"]["ns"]
        for group in ("one input", "eight inputs")
        if f"{group}/run" in nanos and f"{group}/raw" in nanos
    }
    run.result["overhead"] = {"command": " ".join(command[:4]), "calls": nanos, "added_ns": added}
    run.write()
    run.say(f"overhead: {added}")


def number(text: str) -> int:
    return int(text.replace(",", ""))
