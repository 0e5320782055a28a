"""Building: the programs of every case, a build that finds nothing to do, and a cold build against the plain script."""

import json
import sys

from ..cases import ROOT
from ..contenders import Failed, once, tail
from ..run import Run, spread


def measure(run: Run) -> None:
    """Builds what is missing, then asks again: that is the warm build. Beside it: how long Python takes to say `import
    torch`, which any check of freshness in Python would have to pay."""
    for case in run.chosen("build"):
        spec = case.spec(run.host.device)
        limit = max(1.0, run.left)
        try:
            events, ran = run.host.precast("build", "-f", spec, limit=limit)
            finished = next(event for event in events if event["event"] == "finished")
            lost = [p["program"] for p in finished["programs"] if p["state"] not in ("built", "hit")]
            if lost:
                run.skip(f"build {case.name}", f"not built: {', '.join(lost)}; see `precast log`")
            warm, imports = [], []
            for _ in range(run.rounds):
                warm.append(run.host.precast("build", "-f", spec)[1].seconds)
                command = [sys.executable, "-c", "import torch"]
                imports.append(once(command, run.host.environment(), run.host.logs / "import.log", 60).seconds)
        except Failed as error:
            run.skip(f"build {case.name}", error)
            continue
        run.say(f"build {case.name}: {ran.seconds:.1f} s, warm {min(warm) * 1e3:.0f} ms")
        run.add(
            "build",
            {
                "case": case.name,
                "command": f"precast build -f {spec.relative_to(ROOT)}",
                "seconds": ran.seconds,
                "compiled": finished["compiled"],
                "programs": len(finished["programs"]),
                "warm_seconds": spread(warm),
                "import_torch_seconds": spread(imports),
                "ratio_import_torch_to_warm": spread([a / b for a, b in zip(imports, warm, strict=True)]),
            },
        )


def cold(run: Run) -> None:
    """Cold builds against the plain script: `benches/cold_build.py` measures both in one run."""
    script = ROOT / "benches" / "cold_build.py"
    if not script.exists():
        return run.skip("cold-build", f"no {script.relative_to(ROOT)}")
    log = run.host.logs / "cold-build.log"
    command = [sys.executable, str(script), "--precast", str(run.host.binaries / "precast")]
    if run.host.device == "cuda":
        command += ["--spec", str(ROOT / "examples/blocks/precast.cuda.toml"), "--plain"]
    try:
        ran = once(command, run.host.environment(), log, max(1.0, run.left))
        if ran.code != 0:
            raise Failed(tail(log))
        run.result["cold-build"] = json.loads(ran.output)
        run.write()
    except Failed as error:
        run.skip("cold-build", error)
