"""The gain of regions: builds examples/blocks with its layers cut out, and whole, in one run, into new stores.

    .venv/bin/python benches/regions.py [--precast target/release/precast] [--spec examples/blocks/precast.toml]
                                        [--plain] | python -m benches.results build-cpu.json regions

Both builds use one worker, one after the other; headers are compiled before. `--plain` adds what people do
without Precast: for each bucket a fresh process that exports the model and compiles it whole.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def build(precast: Path, spec: Path, store: Path) -> dict:
    """Builds with one worker and returns seconds, and the compiled artifacts by name of step."""
    started = time.perf_counter()
    command = [precast, "build", "-f", spec, "--store", store, "-j", "1", "--format", "json"]
    run = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PRECAST_PYTHON": sys.executable}
    )
    seconds = time.perf_counter() - started
    events = [json.loads(line) for line in run.stdout.splitlines()]
    ends = [event for event in events if event["event"] == "end"]
    phases: dict[str, float] = {}
    for event in ends:
        phases[event["job"]] = phases.get(event["job"], 0.0) + event["seconds"]
    failed = [event for event in events if event["event"] == "failed"]
    if failed:
        raise SystemExit(f"a program failed: {failed[0]['message']}")
    compiled = [event["what"] for event in ends if event["job"] == "compile"]
    blocks = sum(" blocks." in step for step in compiled)
    return {
        "seconds": seconds,
        "compiled": len(compiled),
        "block_segments": blocks,
        "steps": compiled,
        "seconds_by_job": phases,
    }


def plain(spec_text: str, folder: Path) -> dict:
    """Runs examples/blocks/plain.py once per bucket."""
    grid = {
        name: json.loads(values) for name, values in re.findall(r"^(batch|seq)\s*=\s*(\[[\d, ]+\])", spec_text, re.M)
    }
    started = time.perf_counter()
    script = ROOT / "examples/blocks/plain.py"
    for batch in grid["batch"]:
        for seq in grid["seq"]:
            caches = folder / f"caches-{batch}-{seq}"
            env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(caches), "TMPDIR": str(folder)}
            command = [sys.executable, script, "load_small", str(batch), str(seq), folder / f"{batch}-{seq}.pt2"]
            subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return {"seconds": time.perf_counter() - started, "processes": len(grid["batch"]) * len(grid["seq"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precast", type=Path, default=ROOT / "target/release/precast")
    parser.add_argument("--spec", type=Path, default=ROOT / "examples/blocks/precast.toml")
    parser.add_argument("--plain", action="store_true")
    args = parser.parse_args()
    text = args.spec.read_text()
    with tempfile.TemporaryDirectory(prefix="precast-regions-") as name:
        folder = Path(name)
        for file in args.spec.parent.glob("*.py"):
            (folder / file.name).write_text(file.read_text())
        cut, whole, warm = folder / "cut.toml", folder / "whole.toml", folder / "warm.toml"
        cut.write_text(text)
        whole.write_text(re.sub(r"^regions.*$", "", text, flags=re.M))
        warm.write_text(text.replace("load_small", "load_tiny").replace("256]", "64]"))
        build(args.precast, warm, folder / "store-warm")
        result = {
            "schema": 1,
            "command": " ".join(["benches/regions.py", *sys.argv[1:]]),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
            "cut": build(args.precast, cut, folder / "store-cut"),
            "whole": build(args.precast, whole, folder / "store-whole"),
        }
        if args.plain:
            result["plain"] = plain(text, folder)
        compile_seconds = [result[kind]["seconds_by_job"]["compile"] for kind in ("whole", "cut")]
        result["ratios"] = {
            "compile_whole_to_cut": compile_seconds[0] / compile_seconds[1],
            "build_whole_to_cut": result["whole"]["seconds"] / result["cut"]["seconds"],
        }
        if args.plain:
            result["ratios"]["plain_to_cut"] = result["plain"]["seconds"] / result["cut"]["seconds"]
    json.dump(result, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
