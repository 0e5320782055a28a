"""Training steps and starts of `maybe_compile` beside eager and `torch.compile`.

    .venv-python/bin/python -m benches.training | python -m benches.results training-cpu.json training

Each way trains the same model on one batch with fused AdamW, in fresh processes, in turns, round after round. A process
imports torch and makes the model; the start is the time from the model to the end of the first step. Then it makes
steps, and the time of a step is their median. `precast` is a process that finds its release. `compile, warm` has the
caches of a process before. The first process of `precast` and of `compile` is the cold start; `precast, regions` has
one pair for all layers of the encoder. A ratio is taken in each round, and its median and range are kept. The peak is
that of the whole process.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WAYS = ("eager", "precast", "precast, regions", "compile")
CASES = ("encoder", "resnet")
LAYERS = "encoder.layer.*"


def encoder() -> tuple[Any, dict[str, Any]]:
    """Returns an encoder of MiniLM's size with random weights and its dropout, and a batch of 8 rows of 64 tokens."""
    import torch
    import transformers

    settings = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, vocab_size=30522
    )
    ids = torch.randint(0, 30522, (8, 64))
    return transformers.BertModel(settings), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def resnet() -> tuple[Any, dict[str, Any]]:
    """Returns a small residual network, and a batch of 16 pictures of 64 x 64."""
    import torch
    import transformers

    settings = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 2, 2], layer_type="basic"
    )
    return transformers.ResNetModel(settings), {"pixel_values": torch.randn(16, 3, 64, 64)}


def child(way: str, case: str, folder: Path, steps: int) -> dict[str, Any]:
    """Trains in one way; returns seconds, losses and the peak of memory."""
    import torch

    torch.manual_seed(0)
    net, batch = {"encoder": encoder, "resnet": resnet}[case]()
    net.train()
    model: Any = net
    ready = time.perf_counter()
    if way.startswith("precast"):
        from precast import CompileConfig, maybe_compile

        allowed = [LAYERS] if "regions" in way else ["*"]
        store = folder / "store"
        config = CompileConfig(
            kind="autograd", prefer="artifact", name=way.replace(", ", "-"), store=store, allowlist=allowed
        )
        model = maybe_compile(net, config, None, batch)
    elif way == "compile":
        model = torch.compile(net, dynamic=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    losses, seconds = [], []
    torch.manual_seed(1)
    for _ in range(steps + 1):
        began = time.perf_counter()
        loss = model(**batch)[0].sin().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - began)
        if len(seconds) == 1:
            start = time.perf_counter() - ready
    found: dict[str, Any] = {
        "start": start,
        "step": statistics.median(seconds[1:] or seconds),
        "losses": [losses[0], losses[-1]],
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    if way.startswith("precast"):
        report = model.precast_report()
        found |= {"artifact": report["artifact"], "reasons": report["reasons"]}
        found["recompiles"] = sum(each["recompiles"] for each in report["regions"].values())
        found["built"] = sum(bool(one.get("built")) for each in report["regions"].values() for one in each["pairs"])
    return found


def run(way: str, case: str, folder: Path, steps: int) -> dict[str, Any]:
    """Trains in a fresh process; returns its document."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "caches"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "benches.training", "--child", way, "--case", case, "--folder", str(folder)]
    command += ["--steps", str(steps)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **caches}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{way} {case}: {done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{case} {way}: {json.dumps(found)}", file=sys.stderr, flush=True)
    return found


def measure(case: str, folder: Path, rounds: int, steps: int) -> dict[str, Any]:
    """Returns the figures of all ways; those of cold starts only in a new folder."""
    fresh = not folder.exists()
    ways = [way for way in WAYS if case == "encoder" or "regions" not in way]
    cold = {way: run(way, case, folder, 0) for way in ways} if fresh else {}
    seen: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            seen[way].append(run(way, case, folder, steps))
    table = {}
    for way in ways:
        row: dict[str, Any] = {"cold_start": round(cold[way]["start"], 2)} if cold else {}
        for part in ("start", "step", "peak_mib"):
            values = [each[part] for each in seen[way]]
            beside = [each[part] / mine[part] for each, mine in zip(seen[way], seen["precast"], strict=True)]
            row[part] = {
                "median": round(statistics.median(values), 4),
                "times_precast": round(statistics.median(beside), 2),
                "range": [round(min(beside), 2), round(max(beside), 2)],
            }
        row["losses"] = seen[way][-1]["losses"]
        row |= {key: seen[way][-1][key] for key in ("artifact", "reasons", "recompiles") if key in seen[way][-1]}
        table[way] = row
    return table


def made(module: str) -> dict[str, Any]:
    """Returns the command of a measurement, its date and the machine."""
    from precast.client.command import find

    from .machine import describe

    date = time.strftime("%Y-%m-%d", time.gmtime())
    return {"schema": 1, "command": f"python -m {module}", "date": date, "machine": describe(Path(find()).parent)}


def main() -> None:
    """Prints one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--folder", type=Path, help="the stores and caches of an earlier run")
    parser.add_argument("--child", choices=WAYS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(child(given.child, given.case, given.folder, given.steps)))
        return
    folder = given.folder or Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    try:
        cases = [given.case] if given.case else CASES
        tables = {case: measure(case, folder / case, given.rounds, given.steps) for case in cases}
        measured = {"rounds": given.rounds, "steps": given.steps, "cases": tables}
        print(json.dumps({**made("benches.training"), **measured}))
    finally:
        if given.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
