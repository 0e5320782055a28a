"""Steps a second, first step and memory of training, by model, batch and way.

    python table.py OUT.json [--models encoder resnet50] [--batches 1 8 32] [--ways eager step] [--steps 30] [--jobs 8]

| way | a step |
|---|---|
| `eager` | PyTorch with fused AdamW |
| `compile` | `torch.compile` of model and optimizer |
| `graphs` | the same with `reduce-overhead`, on a GPU |
| `autograd` | `precast.maybe_compile` with `kind="autograd"`, fused AdamW |
| `autograd-graphs` | the same with `reduce-overhead`, on a GPU |
| `step` | `precast train`: a module of kind `step`, without Python |

On a GPU in bfloat16 by autocast, on a CPU in float32. Each way but `eager` has two processes: one fills its caches or
its store, and the other one is measured, so that the first step is that of a process that starts again. With `--jobs`
so many fill at once, and then one after the other is measured; `--only fill` and `--only measure` with one `--folder`
are the halves of a run. The first step counts from the start of the process; the time of a step is the median of those
after it, and `host_ms` has that of the lines of the loop on the host. Memory is the peak of the process, on a GPU that
of the device as its driver counts it, less what was used before. A row that fails is in the document with its error.
The document is written after each row.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WAYS = ("eager", "compile", "graphs", "autograd", "autograd-graphs", "step")
PARTS = ("forward", "backward", "update", "zero_grad")
RATE = 1e-4
SPEC = """schema = 1
[model]
name  = "{name}"
entry = "model:load"
[target]
device = "{device}"
[compile]
mode = "{mode}"
[[module]]
name = "train"
kind = "step"
[module.inputs]
x       = {{ dtype = "{dtype}", shape = {x}{x_range} }}
targets = {{ dtype = "int64", shape = {targets}, range = [0, {classes}] }}
[module.train]
loss      = "forward"
optimizer = "adamw"
{autocast}
"""


def trainer(way: str, rows: int, store: Path) -> tuple[Callable[..., Any], Any]:
    """Returns a function that makes one step in this process and returns the loss, and the model that it trains.

    The function calls its argument after each of `PARTS`.
    """
    import torch
    from model import batch, device, load

    net: Any = load()
    on = device()
    given = {name: value.to(on) for name, value in batch(rows).items()}
    pairs = way.startswith("autograd")
    plain = way == "eager" or pairs
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, fused=plain, capturable=on == "cuda" and not plain)
    model, update = net, optimizer.step
    # Autocast is the caller's for a module in hand, as it is for torch.compile.
    cast = torch.autocast(on, torch.bfloat16, enabled=on == "cuda")
    mode = "reduce-overhead" if way.endswith("graphs") else "default"
    if pairs:
        import precast

        name = f"{os.environ['STEPS_MODEL']}-{rows}"
        config = precast.CompileConfig(kind="autograd", mode=mode, name=name, store=store)
        with cast:
            model = precast.maybe_compile(net, config, None, given)
    elif way != "eager":
        model, update = torch.compile(net, mode=mode), torch.compile(optimizer.step)

    def step(done: Callable[[], None] = lambda: None) -> Any:
        # The gradients of a compiled backward pass are in its graph's memory until the next run.
        torch.compiler.cudagraph_mark_step_begin()
        with cast:
            loss = model(**given)
        done()
        loss.backward()
        done()
        update()
        done()
        optimizer.zero_grad(set_to_none=True)
        done()
        return loss.detach()

    return step, model


def child(way: str, rows: int, steps: int, store: Path) -> dict[str, Any]:
    """Trains in one way in this process; returns milliseconds of each step, and losses."""
    step, model = trainer(way, rows, store)
    times, losses, parts = [], [], []
    for _ in range(steps + 1):
        clock = [time.perf_counter()]
        loss = step(lambda clock=clock: clock.append(time.perf_counter()))
        losses.append(float(loss))  # waits for the device, as a loop that logs does
        times.append((time.perf_counter() - clock[0]) * 1e3)
        parts.append([(end - begin) * 1e3 for begin, end in itertools.pairwise(clock)])
        if len(times) == 1:
            print("first", flush=True)
    medians = map(statistics.median, zip(*parts[1:], strict=True))
    host = {name: round(ms, 3) for name, ms in zip(PARTS, medians, strict=True)}
    found = {"ms": times, "losses": [losses[0], losses[-1]], "host_ms": host}
    return found | ({"fallbacks": model.precast_report()["reasons"]} if way.startswith("autograd") else {})


def project(folder: Path, rows: int) -> None:
    """Writes the spec of the step, and rows for it."""
    from model import MODELS, batch, device
    from safetensors.torch import save_file

    given, name = batch(rows), os.environ["STEPS_MODEL"]
    vocabulary, cuda = MODELS[name][2], device() == "cuda"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "model.py", folder)
    text = SPEC.format(
        name=name,
        device=device(),
        mode="reduce-overhead" if cuda else "default",
        dtype=str(given["x"].dtype).removeprefix("torch."),
        x=list(given["x"].shape),
        x_range=f", range = [0, {vocabulary}]" if vocabulary else "",
        targets=list(given["targets"].shape),
        classes=vocabulary if given["targets"].dim() > 1 else 10,
        autocast='autocast  = "bfloat16"' if cuda else "",
    )
    (folder / "precast.toml").write_text(text)
    save_file({key: value.contiguous() for key, value in given.items()}, folder / "rows.safetensors")


def used(process: int | None) -> float:
    """Returns the most MiB that a process had, or without one those of the device now."""
    if process is None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
        return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout)
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return max((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), default=0.0)


def started(command: list[str], env: dict[str, str], gpu: bool, cwd: Path) -> dict[str, Any]:
    """Runs a process to its end; returns its last line as JSON, its seconds to the first step, its memory."""
    before, peaks, lines = used(None) if gpu else 0.0, [0.0], []
    with tempfile.TemporaryFile("w+") as errors:
        began = time.perf_counter()
        process = subprocess.Popen(command, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=errors, text=True)

        def watch() -> None:
            while process.poll() is None:
                peaks.append(used(None if gpu else process.pid))
                time.sleep(0.05)

        watching, first = threading.Thread(target=watch), None
        watching.start()
        assert process.stdout is not None
        for line in process.stdout:
            first = time.perf_counter() - began if line == "first\n" else first
            lines.append(line)
        code = process.wait()
        watching.join()
        if code != 0:
            errors.seek(0)
            raise RuntimeError(errors.read()[-1500:] or "".join(lines)[-1500:])
    text = "".join(line for line in lines if line != "first\n")
    return {**json.loads(text), "first": first, "memory": round(max(peaks) - before, 1)}


class Row:
    """One way of a model and a batch: its processes."""

    def __init__(self, model: str, rows: int, way: str, steps: int, work: Path, gpu: bool) -> None:
        self.rows, self.way, self.steps, self.gpu = rows, way, steps, gpu
        self.store, self.folder = work / f"{model}-{rows}-{way}", work / f"project-{model}-{rows}"
        own = {"STEPS_MODEL": model, "TORCHINDUCTOR_CACHE_DIR": str(work / "caches"), "HF_HUB_OFFLINE": "1"}
        self.env = {**os.environ, **own}
        self.names = {"model": model, "batch": rows, "way": way}

    def fill(self, threads: int) -> str | None:
        """Fills the caches, or the store, with so many compile threads; returns the error if that failed."""
        # Each of them imports torch: with those of the other rows that fill, they would be more than the cores.
        env = self.env | {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
        began, failure = time.perf_counter(), None
        try:
            if self.way == "step":
                self._python(env, "--project", self.folder)
                build = ["precast", "build", "--store", str(self.store)]
                done = subprocess.run(build, cwd=self.folder, env=env, capture_output=True, text=True, check=False)
                failure = done.stderr[-1500:] if done.returncode else None
            elif self.way != "eager":
                self._python(env, "--folder", self.store, "--child", self.way, "--steps", 1)
        except Exception as error:
            failure = str(error)
        print(f"{self.names}: filled in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        return failure

    def measure(self) -> dict[str, Any]:
        """Returns the row."""
        if self.way == "step":
            command = ["precast", "train", "train", "--data", "rows.safetensors", "--lr", str(RATE), "--format", "json"]
            command += ["--store", str(self.store), "--steps", str(self.steps + 1)]
            found = started(command, self.env, self.gpu, self.folder)
            own, losses = found["artifact"], found["losses"]
            row = {"ms": 1e3 / own["steps_per_second"], "first_s": own["first_step_seconds"]}
            row["losses"] = [losses[0], losses[-1]]
        else:
            found = self._python(self.env, "--folder", self.store, "--child", self.way, "--steps", self.steps)
            row = {"ms": statistics.median(found["ms"][1:]), "first_s": found["first"]}
            row |= {key: found[key] for key in ("losses", "fallbacks", "host_ms") if key in found}
        numbers = {key: round(value, 3) for key, value in row.items() if isinstance(value, float)}
        return row | numbers | {"steps_per_second": round(1e3 / row["ms"], 2), "memory_mib": found["memory"]}

    def _python(self, env: dict[str, str], *arguments: object) -> dict[str, Any]:
        command = [sys.executable, str(HERE / "table.py"), "--batches", str(self.rows), *map(str, arguments)]
        return started(command, env, self.gpu, HERE)


def main() -> None:
    """Measures all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--models", nargs="+", default=["encoder", "blocks", "resnet50", "smollm2"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--folder", type=Path, help="stores and caches of an earlier run")
    parser.add_argument("--only", choices=["fill", "measure"], help="one half of a run, with `--folder`")
    parser.add_argument("--jobs", type=int, default=1, help="how many fill their caches at once")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--project", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only and not given.folder:
        parser.error("`--only` needs `--folder`")
    if given.child:
        print(json.dumps(child(given.child, given.batches[0], given.steps, given.folder)))
        return
    if given.project:
        project(given.project, given.batches[0])
        print("{}")
        return
    import torch

    gpu, cores = torch.cuda.is_available(), os.cpu_count() or 1
    work = given.folder or Path(tempfile.mkdtemp())
    device = torch.cuda.get_device_name() if gpu else f"{platform.processor() or platform.machine()}, {cores} cores"
    document: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": " ".join(["python table.py", *sys.argv[1:]]),
        "machine": {"device": device, "torch": torch.__version__, "python": platform.python_version()},
        "what": (__doc__ or "").splitlines()[0],
        "rows": [],
    }
    ways = [way for way in given.ways if gpu or not way.endswith("graphs")]
    named = itertools.product(given.models, given.batches, ways)
    rows = [Row(*names, given.steps, work, gpu) for names in named]
    threads = max(1, cores // given.jobs)
    failures: Iterable[str | None] = (row.fill(threads) for row in rows)  # each before it is measured
    if given.only == "measure":
        failures = [None] * len(rows)
    elif given.jobs > 1 or given.only == "fill":
        with ThreadPoolExecutor(given.jobs) as pool:
            failures = list(pool.map(lambda row: row.fill(threads), rows))
    for row, failure in zip(rows, failures, strict=True):
        if given.only == "fill":
            print(f"{row.names}: {failure or 'filled'}", flush=True)
            continue
        found: dict[str, Any] = {"error": failure}
        if failure is None:
            try:
                found = row.measure()
            except Exception as error:
                found = {"error": str(error)}
        document["rows"].append(row.names | found)
        print(json.dumps(row.names | found), flush=True)
        if given.out:
            given.out.write_text(json.dumps(document, indent=1) + "\n")
    if given.folder is None:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
