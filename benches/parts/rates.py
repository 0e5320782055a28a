"""How fast the machine multiplies and moves bytes, in a process of its own."""

import json
import sys

from ..contenders import Failed, once, tail
from ..run import Run


def measure(run: Run) -> None:
    log = run.host.logs / "rates.log"
    command = [sys.executable, "-m", "benches.machine", run.host.device]
    try:
        ran = once(command, run.host.environment(), log, min(120.0, max(1.0, run.left)))
        if ran.code != 0:
            raise Failed(tail(log))
        run.result["rates"] = json.loads(ran.output)
        run.write()
    except Failed as error:
        run.skip("rates", error)
