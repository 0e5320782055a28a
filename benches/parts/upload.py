"""Weights to the device against one pinned copy of the same bytes: the figure of the GPU tests."""

import json

from ..contenders import Failed, once, tail
from ..run import Run


def measure(run: Run) -> None:
    tests = run.host.binaries / "gpu-tests"
    if run.host.device != "cuda":
        return run.skip("upload", "there is no device to upload to")
    if not tests.exists():
        return run.skip("upload", f"no {tests.name} beside `precast`: it is packed by benches/pack.sh")
    log = run.host.logs / "upload.log"
    environment = {**run.host.environment(), "PRECAST_STORE": str(run.host.store)}
    command = [str(tests), "figures_of_an_upload", "--nocapture", "--test-threads", "1"]
    try:
        ran = once(command, environment, log, min(120.0, max(1.0, run.left)))
        # The first of them stands behind the name of its test.
        figures = [json.loads("{" + line.partition("{")[2]) for line in ran.output.splitlines() if '{"figure"' in line]
        if ran.code != 0 or not figures:
            raise Failed(f"exit code {ran.code}: {tail(log)}")
    except Failed as error:
        return run.skip("upload", error)
    for figure in figures:
        run.add("upload", figure)
