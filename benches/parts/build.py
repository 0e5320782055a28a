"""Building: the programs of every case, a build that finds nothing to do, and a cold build against the plain script."""

import json
import sys

from ..cases import CASES, ROOT, variant
from ..contenders import Failed, once, tail
from ..run import Run, spread


def measure(run: Run) -> None:
    """Builds what is missing, then asks again: that is the warm build. Beside it: how long Python takes to say `import
    torch`, which any check of freshness in Python would have to pay."""
    for case in run.chosen("build"):
        spec = case.spec(run.host.device)
        limit = max(1.0, run.left)
        options = ["--tune"] if run.tune else []
        options += ["--set", "passes=['precast_kernels:fuse']"] if run.kernels else []
        try:
            events, ran = run.host.precast("build", "-f", spec, *options, limit=limit)
            finished = next(event for event in events if event["event"] == "finished")
            lost = [program for program in finished["programs"] if program["state"] not in ("built", "hit")]
            if lost:
                whys = dict.fromkeys(program.get("message") or program.get("why") for program in lost)
                raise Failed(f"not built: {', '.join(program['program'] for program in lost)}: {'; '.join(whys)}")
            warm, imports = [], []
            for _ in range(run.rounds):
                warm.append(run.host.precast("build", "-f", spec, *options)[1].seconds)
                command = [sys.executable, "-c", "import torch"]
                imports.append(once(command, run.host.python(), run.host.logs / "import.log", 60).seconds)
        except Failed as error:
            run.skip(f"build {case.name}", error)
            continue
        run.say(f"build {case.name}: {ran.seconds:.1f} s, warm {min(warm) * 1e3:.0f} ms")
        run.add(
            "build",
            {
                "case": case.name,
                "command": " ".join(["precast build -f", str(spec.relative_to(ROOT)), *options]),
                "seconds": ran.seconds,
                "compiled": finished["compiled"],
                "programs": len(finished["programs"]),
                "warm_seconds": spread(warm),
                "import_torch_seconds": spread(imports),
                "ratio_import_torch_to_warm": spread([a / b for a, b in zip(imports, warm, strict=True)]),
            },
        )


COLD = {"cpu": [{"batch": 1, "seq": 32}, {"batch": 8, "seq": 128}], "cuda": None}
"""The buckets of MiniLM that are built from nothing; on a GPU machine it is all of the stack's."""


def cold(run: Run) -> None:
    """Cold builds against the plain script: `benches/cold_build.py` measures both in one run."""
    points = COLD[run.host.device]
    if points:
        spec = variant(CASES["minilm"], run.host.device, run.host.work / "cold", "minilm-cold", points)
    else:
        spec = CASES["blocks"].spec(run.host.device)
    log = run.host.logs / "cold-build.log"
    command = [sys.executable, str(ROOT / "benches/cold_build.py"), "--precast", str(run.host.binaries / "precast")]
    try:
        ran = once([*command, "--spec", str(spec), "--plain"], run.host.environment(), log, max(1.0, run.left))
        if ran.code != 0:
            raise Failed(tail(log))
        found = json.loads(ran.output)
    except Failed as error:
        return run.skip("cold-build", error)
    times = found["plain"]["seconds"] / found["precast"]["seconds"]
    run.result["cold-build"] = {
        "case": "minilm" if points else "blocks",
        "buckets": found["buckets"],
        "precast_seconds": found["precast"]["seconds"],
        "plain_seconds": found["plain"]["seconds"],
        "times_precast": times,
        "precast": found["precast"]["seconds_by_job_over_all_workers"],
        "plain": found["plain"]["seconds_by_bucket"],
    }
    run.write()
    run.say(f"cold-build: the plain script takes {times:.1f} x precast")
