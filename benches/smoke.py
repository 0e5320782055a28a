"""A guard against getting slower, by hand before a release: ratios of a short run against the stored ones.

Ratios, not times, so that it may run on another machine than the stored result came from; the bound is generous. A
case counts as slower when its ratio of eager to `precast` is less than half of the stored one.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from .cases import ROOT
from .parts import PARTS
from .run import main_kind, start

BOUND = 0.5
CASES = ["mlp", "minilm", "blocks"]
"""The cases measured by default: they build in a minute."""


def check(args: argparse.Namespace, work: Path) -> int:
    name = "h200.json" if args.device == "cuda" else "cpu.json"
    stored = json.loads((args.stored or ROOT / "benches/results" / name).read_text())

    def ratios(result: dict[str, Any]) -> dict[tuple[str, str], float]:
        rows = [row for row in result.get("latency", []) if row["case"] in args.cases]
        eager = {(row["case"], row["bucket"]): row["times_precast"].get("eager") for row in rows}
        return {key: times[main_kind(args.device)]["median"] for key, times in eager.items() if times}

    known = ratios(stored)
    args.out, args.cases = work / "smoke.json", [case for case in args.cases if case in {case for case, _ in known}]
    run = start(args, work)
    for part in ("build", "latency"):
        PARTS[part](run)
    slower, found = 0, ratios(run.result)
    for (case, bucket), before in known.items():
        if (now := found.get((case, bucket))) is None:
            print(f"MISSING {case} {bucket}: it was not measured; see what was skipped")
            continue
        verdict = "SLOWER" if now < before * BOUND else "ok"
        slower += verdict == "SLOWER"
        print(f"{verdict:6}  {case} {bucket}: eager takes {now:.2f} x precast, stored {before:.2f} x")
    missing = len(known.keys() - found.keys())
    print(f"{slower} slower than {BOUND} of what {stored['date']} says, {missing} missing")
    return 1 if slower or missing else 0
