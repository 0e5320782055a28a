"""The start of a fresh machine: from nothing in a cache to the first answer, with a server of S3 of this machine.

    make wheel .venv-servers/bin/moto_server          # the latter brings the server
    .venv-python/bin/python -m pip install --no-deps --force-reinstall target/wheels/release/*.whl
    .venv-python/bin/python -m benches.fresh_machine | python3 -m benches.results remote-cpu.json fresh_machine

Every way is a new Python process with empty caches, timed from outside until it has its answer: MiniLM for one text
of 32 tokens. `precast` pulls the release from the server and loads it, or loads a local store; the peers make the model
with transformers and compile it by `torch.compile`, with nothing cached, or with torch's mega-cache from the same
server. Then eight processes at once, which share one cache folder as those of one machine do.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from .machine import document
from .remote import ROOT, weed

PRECAST = """
import sys, numpy, precast
model = precast.load(*sys.argv[1:], libtorch=LIBTORCH)
ids = numpy.full((1, 32), 1012)
model.encode(ids, numpy.ones_like(ids))
"""
PEER = """
import sys, urllib.request, torch
sys.path.insert(0, FOLDER)
import model
if sys.argv[1:]:
    torch.compiler.load_cache_artifacts(urllib.request.urlopen(sys.argv[1]).read())
ids = torch.full((1, 32), 1012)
with torch.inference_mode():
    torch.compile(model.load())(ids, torch.ones_like(ids))
if SAVE:
    open(SAVE, "wb").write(torch.compiler.save_cache_artifacts()[0])
"""


def started(code: str, arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Starts a process with empty caches, but for those that the environment names."""
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env={**os.environ, **environment})


def taken(code: str, arguments: list[str], environment: dict[str, str], processes: int = 1) -> float:
    """Returns the seconds until all of so many processes have their answers."""
    begun = time.perf_counter()
    all_ = [started(code, arguments, environment) for _ in range(processes)]
    if any(one.wait() for one in all_):
        raise SystemExit(f"a process failed: {code}")
    return time.perf_counter() - begun


def measure(store: Path, work: Path, rounds: int) -> dict[str, Any]:
    """Returns the seconds of each way."""
    (work / "server").mkdir()
    libtorch = str((ROOT / ".venv/libtorch").resolve())
    precast = PRECAST.replace("LIBTORCH", repr(libtorch))
    peer = PEER.replace("FOLDER", repr(str(ROOT / "examples/minilm")))
    numbers = iter(range(10**6))

    def fresh() -> dict[str, str]:
        folder = str(work / f"caches-{next(numbers)}")
        return {"XDG_CACHE_HOME": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}

    with weed(work / "server") as url:
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "testtest", "AWS_REGION": "us-east-1"}
        os.environ.update(keys | {"AWS_ENDPOINT_URL": url})
        remote, cache = ["s3://models/precast", "minilm"], f"{url}/models/mega-cache"
        subprocess.run(["precast", "push", "minilm", remote[0], "--store", store], check=True, stdout=sys.stderr)
        saved = work / "mega-cache"
        taken(peer.replace("SAVE", repr(str(saved))), [], fresh())
        peer = peer.replace("SAVE", "None")
        request = urllib.request.Request(cache, data=saved.read_bytes(), method="PUT")
        urllib.request.urlopen(request).read()
        ways = {
            "precast_remote": lambda: taken(precast, remote, fresh()),
            "precast_local": lambda: taken(precast, [str(store), "minilm"], fresh()),
            "torch_compile_cold": lambda: taken(peer, [], fresh()),
            "torch_mega_cache": lambda: taken(peer, [cache], fresh()),
            "eight_precast_remote": lambda: taken(precast, remote, fresh(), 8),
            "eight_torch_mega_cache": lambda: taken(peer, [cache], fresh(), 8),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                seconds[name].append(round(way(), 2))
                print(name, seconds[name][-1], file=sys.stderr, flush=True)
    medians = {name: statistics.median(all_) for name, all_ in seconds.items()}
    return {
        "seconds": seconds,
        "times_precast_remote": {
            name: round(medians[name] / medians["precast_remote"], 2)
            for name in medians
            if not name.startswith("eight")
        },
        "eight_at_once": round(medians["eight_torch_mega_cache"] / medians["eight_precast_remote"], 2),
        "bytes_of_mega_cache": saved.stat().st_size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--store", type=Path, help="a store with minilm [default: one that is built first]")
    options = parser.parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as folder:
        store = options.store or Path(folder) / "store"
        if options.store is None:
            spec = ROOT / "examples/minilm/precast.toml"
            subprocess.run(["precast", "build", "-q", "-f", spec, "--store", store], check=True)
        result = measure(store.resolve(), Path(folder), options.rounds)
    command = f"python -m benches.fresh_machine --rounds {options.rounds}"
    json.dump(document(command, Path(sys.executable).parent) | result, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
