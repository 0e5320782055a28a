"""Peak host and device memory of 1 and of 8 buckets of one model."""

import time

from ..cases import CASES, Case, Sizes, variant
from ..contenders import Failed, Peer, Precast
from ..run import Run

ONE: list[Sizes] = [{"batch": 1, "seq": 128}]
EIGHT: list[Sizes] = [
    {"batch": batch, "seq": seq}
    for batch, seq in ((1, 16), (1, 32), (1, 64), (1, 128), (4, 32), (2, 128), (8, 64), (8, 128))
]


def variants(run: Run) -> dict[int, Case]:
    """Returns MiniLM with 1 and with 8 buckets, in the run's store."""
    made = {}
    for grid in (ONE, EIGHT):
        name = f"minilm-{len(grid)}"
        folder = run.host.work / name
        file = variant(CASES["minilm"], run.host.device, folder, name, grid)
        run.host.precast("build", "-f", file, limit=max(1.0, run.left))
        made[len(grid)] = Case(name, str(folder), "encode")
    return made


def measure(run: Run) -> None:
    if "minilm" not in run.cases:
        return run.skip("memory", "it is measured on minilm, which is not in this run")
    try:
        cases = variants(run)
    except Failed as error:
        return run.skip("memory", error)
    row = {"case": "minilm", "peak_bytes": {}, "eight_to_one": {}}
    cuda = run.host.device == "cuda"
    ways = [way for way in run.ways if way in ("eager", "aoti", "reduce-overhead")]
    for name in ["precast", *ways]:
        peaks = {}
        for count, case in cases.items():
            try:
                peaks[count] = precast(run, case, cuda) if name == "precast" else peer(run, case, name)
            except Failed as error:
                run.skip(f"memory {name} {count} buckets", error)
        row["peak_bytes"][name] = peaks
        if len(peaks) == len(cases):
            row["eight_to_one"][name] = {
                kind: peaks[8][kind] / peaks[1][kind] for kind in ("host", "device") if peaks[1].get(kind)
            }
            run.say(f"memory {name}: {row['eight_to_one'][name]}")
    run.add("memory", row)


def precast(run: Run, case: Case, cuda: bool) -> dict[str, float]:
    contender = Precast(run.host, case, "always" if cuda else "as-built")
    contender.bench(0.05, case.measured(run.host.device))
    return contender.memory


def peer(run: Run, case: Case, way: str) -> dict[str, float]:
    deadline = time.time() + min(run.prepare, max(1.0, run.left))
    peer = Peer(run.host, case, way)
    try:
        peer.receive(deadline)
        for sizes in case.measured(run.host.device):
            peer.send("prepare", sizes=sizes)
            peer.receive(deadline)
        return peer.ask("memory", 30)
    finally:
        peer.end()
