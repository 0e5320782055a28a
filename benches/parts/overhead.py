"""The overhead of `Model::run` over the artifact's own C call: `benches/overhead.rs`."""

import json
import os
import shutil

from ..cases import ROOT
from ..contenders import Failed, once, tail
from ..run import Run

COMMAND = ["cargo", "bench", "--features", "tch", "--bench", "overhead"]


def measure(run: Run) -> None:
    if not shutil.which("cargo") or not (ROOT / "Cargo.toml").exists():
        return run.skip("overhead", "no cargo on this machine")
    log, figures = run.host.logs / "overhead.log", run.host.work / "overhead.json"
    environment = {**os.environ, "OMP_NUM_THREADS": str(run.host.threads)}
    with run.skipping("overhead"):
        if once([*COMMAND, "--", str(figures)], environment, log, max(1.0, run.left)).code != 0:
            raise Failed(tail(log))
        found = json.loads(figures.read_text())
        run.result["overhead"] = {"command": " ".join(COMMAND), "calls": found["figures"], "added_ns": found["added"]}
        run.say(f"overhead: {found['added']}")
