"""Building: the programs of every case, and a build that finds nothing to do. `cold_build.py` measures first builds."""

from typing import Any

from ..cases import ROOT, Case
from ..contenders import Failed
from ..run import Run, spread


def measure(run: Run) -> None:
    """Builds what is missing, then asks again: that is the warm build."""
    options = ["--tune"] if run.options.tune else []
    options += ["--set", "passes=['precast_kernels:fuse']"] if run.options.kernels else []
    for case in run.chosen("build"):
        with run.skipping(f"build {case.name}"):
            build(run, case, ["build", "-f", case.spec(run.host.device), *options])


def build(run: Run, case: Case, command: list[Any]) -> None:
    events, ran = run.host.precast(*command, limit=run.left)
    finished = next(event for event in events if event["event"] == "finished")
    lost = [program for program in finished["programs"] if program["state"] not in ("built", "hit")]
    if lost:
        whys = dict.fromkeys(program.get("message") or program.get("why") for program in lost)
        raise Failed(f"not built: {', '.join(program['program'] for program in lost)}: {'; '.join(whys)}")
    warm = [run.host.precast(*command)[1].seconds for _ in range(run.options.rounds)]
    run.say(f"build {case.name}: {ran.seconds:.1f} s, warm {min(warm) * 1e3:.0f} ms")
    row = {
        "case": case.name,
        "command": " ".join(["precast", *map(str, command)]).replace(f"{ROOT}/", ""),
        "seconds": ran.seconds,
        "compiled": finished["compiled"],
        "programs": len(finished["programs"]),
        "warm_seconds": spread(warm),
    }
    run.add("build", row)
