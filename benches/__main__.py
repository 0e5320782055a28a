"""`python -m benches run|draw|smoke`: see `python -m benches --help`."""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from . import smoke, table
from .cases import CASES, ROOT
from .parts import PARTS
from .run import merged, start


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benches", description="Side by side with what people use today.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure, and write the result after each part")
    run.add_argument("--out", type=Path, required=True, help="the result; written after each step")
    run.add_argument("--parts", type=names, default=list(PARTS), help=f"of {','.join(PARTS)}")
    run.add_argument("--ways", type=names, help="Python contenders, of eager,compile,… [default: all]")
    run.add_argument("--seconds", type=float, default=0.25, help="one contender at one bucket in one round")
    run.add_argument("--prepare", type=float, default=240, help="seconds that contenders may take to get ready")
    run.add_argument("--together", action="store_true", help="all cases' contenders get ready at once: takes memory")
    run.add_argument("--page-cache", type=names, default=["warm", "cold"], help="how processes start, of warm,cold")
    run.add_argument("--tune", action="store_true", help="part `build` keeps the fastest of several option sets")
    run.add_argument("--minutes", type=float, default=60, help="no part begins a case after these")
    check = commands.add_parser("smoke", help="few, short measurements against the stored ratios")
    check.add_argument("--stored", type=Path, help="[default: benches/results/DEVICE.json]")
    check.set_defaults(ways=["eager"], seconds=0.2, prepare=120, together=False, page_cache=["warm"], tune=False)
    check.set_defaults(minutes=20)
    for command, cases, rounds in ((run, list(CASES), 5), (check, smoke.CASES, 3)):
        command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
        command.add_argument("--cases", type=names, default=cases, help=f"of {','.join(CASES)}")
        command.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
        command.add_argument("--rounds", type=int, default=rounds)
        command.add_argument("--binaries", type=Path, default=ROOT / "target/release")
        command.add_argument("--kernels", action="store_true", help="precast builds with the graph passes of kernels/")
        command.add_argument("--work", type=Path, help="keeps stores and caches here, for the next run")
    merge = commands.add_parser("merge", help="one result of several runs on one machine, to stdout")
    merge.add_argument("results", type=Path, nargs="+")
    pictures = commands.add_parser("draw", help="draw a result as SVG, light and dark, and fill a page's table")
    pictures.add_argument("result", type=Path)
    pictures.add_argument("--page", type=Path, help="[default: docs/src/benchmarks/NAME.md, by the result's name]")
    args = parser.parse_args()

    if args.command == "merge":
        print(json.dumps(merged([json.loads(file.read_text()) for file in args.results]), indent=1))
        return 0
    if args.command == "draw":
        table.draw(args.result, args.page or ROOT / f"docs/src/benchmarks/{args.result.stem}.md")
        return 0
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    # An ended harness ends its contenders too: they are killed on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="precast-bench-", ignore_cleanup_errors=True) as temporary:
        work = (args.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        return smoke.check(args, work) if args.command == "smoke" else measure(args, work)


def measure(args: argparse.Namespace, work: Path) -> int:
    run = start(args, work)
    for name in args.parts:
        run.say(f"== {name}")
        before = time.time()
        if run.left <= 0:
            run.skip(name, "no time was left")
            continue
        try:
            PARTS[name](run)
        except Exception as error:  # a mistake in one part is no reason to lose the others
            traceback.print_exc()
            run.skip(name, f"{type(error).__name__}: {error}")
        run.result["part_seconds"][name] = round(time.time() - before, 1)
        run.result["load_after"][name] = round(os.getloadavg()[0], 1)
        run.write()
    run.say(f"wrote {args.out}; {len(run.result['skipped'])} skipped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
