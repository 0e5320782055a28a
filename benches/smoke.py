"""A guard against getting slower, by hand before a release: ratios of a short run against the stored ones.

Ratios, not times, so that it may run on another machine than the stored result came from; the bound is generous. A
case counts as slower when its ratio of eager to `precast` is less than half of the stored one.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from .cases import ROOT
from .run import Run, main_kind

BOUND = 0.5
CASES = ["mlp", "minilm", "blocks"]
"""The cases measured by default: they build in a minute."""


def check(args: argparse.Namespace, work: Path, start: Callable[[argparse.Namespace, Path], Run]) -> int:
    from .parts import PARTS

    name = "h200.json" if args.device == "cuda" else "cpu.json"
    stored = json.loads((args.stored or ROOT / "benches/results" / name).read_text())
    rows = [row for row in stored["latency"] if row["case"] in args.cases and "eager" in row["times_precast"]]
    known = {(row["case"], row["bucket"]): row for row in rows}
    args.out, args.ways, args.seconds, args.prepare, args.minutes = work / "smoke.json", ["eager"], 0.2, 120, 20
    args.page_cache, args.tune, args.together = ["warm"], False, False
    args.cases = [case for case in args.cases if any(case == known_case for known_case, _ in known)]
    args.rounds = 3
    run = start(args, work)
    for part in ("build", "latency"):
        PARTS[part](run)
    slower = 0
    kind = main_kind(args.device)
    measured = run.result.get("latency", [])
    for row in measured:
        if "eager" not in row["times_precast"] or (row["case"], row["bucket"]) not in known:
            continue
        now = row["times_precast"]["eager"][kind]["median"]
        before = known.pop((row["case"], row["bucket"]))["times_precast"]["eager"][kind]["median"]
        verdict = "SLOWER" if now < before * BOUND else "ok"
        slower += verdict == "SLOWER"
        print(f"{verdict:6}  {row['case']} {row['bucket']}: eager takes {now:.2f} x precast, stored {before:.2f} x")
    for case, bucket in known:
        print(f"MISSING {case} {bucket}: it was not measured; see what was skipped")
    print(f"{slower} slower than {BOUND} of what {stored['date']} says, {len(known)} missing")
    return 1 if slower or known else 0
