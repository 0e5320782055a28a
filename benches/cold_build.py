"""The cost of a first build: `precast build` against the plain script, both with nothing cached, in one run.

    .venv/bin/python -m benches.cold_build [--precast PATH] [--spec PATH] [--plain] \\
        | python -m benches.results build-cpu.json cold_build

Needs Python 3.11 with torch, and a C++ compiler; of this project the harness, the binary and the spec with its model.
`precast` gets a new store and a new cache folder. The plain script is the way without it: for each bucket a fresh
process with empty caches that makes the model, exports it and compiles it whole, one after the other. Without `--plain`
only `precast` is measured.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from .cases import ROOT, Spec, label
from .contenders import Failed, Host
from .machine import document

LIMIT = 3600
# One bucket: python -c PLAIN SPEC MODULE-INDEX SIZES OUT.pt2
PLAIN = """
import json, sys, torch
from pathlib import Path
from benches.cases import Spec
spec, sizes = Spec(Path(sys.argv[1]).resolve(), int(sys.argv[2])), json.loads(sys.argv[3])
with torch.no_grad():
    module = spec.load().eval().to(spec.device)
    exported = torch.export.export(module, tuple(spec.tensors(sizes, spec.device)))
    torch._inductor.aoti_compile_and_package(exported, package_path=sys.argv[4])
"""


def cold(host: Host, name: str) -> dict[str, str]:
    """Returns an environment in which nothing is cached."""
    caches = host.work / name
    return {**host.environment(caches=name), "XDG_CACHE_HOME": str(caches / "xdg"), "TRITON_HOME": str(caches / "home")}


def precast(host: Host, spec: Path) -> dict[str, Any]:
    """Builds once, with nothing cached, and then again."""
    command = [host.binaries / "precast", "build", "-f", spec, "--store", host.store, "--format", "json", "-v"]
    events, ran = host.run("cold", command, LIMIT, cold(host, "cold"))
    end = events[-1]
    if failed := [program for program in end["programs"] if program["state"] == "failed"]:
        raise Failed(f"{failed[0]['program']} failed: {failed[0]['message']}")
    spent: dict[str, float] = {}
    for event in events:
        if event["event"] == "end":
            spent[event["job"]] = round(spent.get(event["job"], 0.0) + event["seconds"], 2)
    again, warm = host.run("again", command, LIMIT, cold(host, "cold"))
    assert again[-1]["compiled"] == 0
    return {
        "command": " ".join(["precast", *map(str, command[1:])]).replace(str(host.work), "NEW"),
        "seconds": round(ran.seconds, 2),
        "artifacts": end["compiled"],
        "seconds_by_job_over_all_workers": spent,
        "second_build_seconds": round(warm.seconds, 3),
    }


def plain(host: Host, spec: Path) -> dict[str, Any]:
    """Compiles every bucket in a process of its own."""
    taken = {}
    for index, each in enumerate(Spec.all(spec)):
        for sizes in each.buckets:
            name = f"{each.module['name']} {label(sizes)}"
            folder = f"plain-{len(taken)}"
            environment = cold(host, folder)
            command = [sys.executable, "-c", PLAIN, spec, index, json.dumps(sizes), host.work / folder / "model.pt2"]
            _, ran = host.run(folder, command, LIMIT, environment)
            taken[name] = round(ran.seconds, 2)
            print(f"plain {name}: {taken[name]} s", file=sys.stderr, flush=True)
    command = "python -c PLAIN: torch.export.export, then torch._inductor.aoti_compile_and_package"
    return {"command": command, "seconds": round(sum(taken.values()), 2), "seconds_by_bucket": taken}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precast", type=Path, default=ROOT / "target/release/precast")
    parser.add_argument("--spec", type=Path, default=ROOT / "examples/minilm/precast.toml")
    parser.add_argument("--plain", action="store_true")
    args = parser.parse_args()
    spec, binaries = args.spec.resolve(), args.precast.resolve().parent
    result = document(" ".join(["python -m benches.cold_build", *sys.argv[1:]]), binaries)
    result |= {"spec": str(args.spec), "buckets": sum(len(each.buckets) for each in Spec.all(spec))}
    with tempfile.TemporaryDirectory(prefix="precast-cold-") as work:
        host = Host(Spec(spec, 0).device, len(os.sched_getaffinity(0)), Path(work), binaries)
        result["precast"] = precast(host, spec)
        print(f"precast: {result['precast']['seconds']:.2f} s", file=sys.stderr, flush=True)
        if args.plain:
            result["plain"] = plain(host, spec)
            result["ratio"] = round(result["precast"]["seconds"] / result["plain"]["seconds"], 3)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
