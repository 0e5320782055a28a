"""Runs the worker's tests with several versions of torch, one after the other, and prints a table.

    make torches                        every version of requirements/
    make torches ARGS="2.12.1 2.13.0"
    make torches ARGS="2.14.1 --only tests/worker/test_capture.py --keep"
    make torches ARGS="--store target/tmp/numerics/store --models minilm small vlm"

With `--store`, the gates of these models' releases, which an older torch has built, are run in a copy of the store
with each version too: `precast verify --host`.

A missing environment is made for the run (`make torch`), and removed after it. The output of tests is in
target/torches/VERSION.log.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("tests/worker", "tests/check", "kernels/tests")


def versions() -> list[str]:
    """Returns the versions that there are requirements for, oldest first."""
    names = [path.stem.removeprefix("torch-") for path in (ROOT / "requirements").glob("torch-*.txt")]
    return sorted(names, key=lambda name: [int(number) for number in name.split(".")])


def all_tests() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).glob("test_*.py"))


def inside(files: list[str]) -> dict[str, Any]:
    """Runs tests in this process, with its torch; returns a row of the table."""
    sys.path[:0] = [str(ROOT)]
    os.chdir(ROOT)
    names = [name.removesuffix(".py").replace("/", ".") for name in files]
    started = time.perf_counter()
    result = unittest.TextTestRunner(verbosity=2).run(unittest.defaultTestLoader.loadTestsFromNames(names))
    import torch

    from tests.worker.support import part

    table = part("torch_private.versions")
    failed = [*result.failures, *result.errors, *((test, "") for test in result.unexpectedSuccesses)]
    return {
        "torch": str(torch.__version__),
        "triton": importlib.metadata.version("triton"),
        "cuda": torch.version.cuda,
        "run": result.testsRun - len(result.skipped),
        "skipped": len(result.skipped),
        "failed": [str(test) for test, _ in failed],
        "off": [one["what"] for one in table.off(table.in_use())],
        "gone": [one.option for one in table.GONE if table.gone(one.option)],
        "seconds": round(time.perf_counter() - started),
    }


def outside(version: str, files: list[str], keep: bool, store: Path | None, models: list[str]) -> dict[str, Any]:
    """Makes an environment if need be, and runs the tests in it; returns a row of the table."""
    folder = ROOT / f".venv-torch-{version}"
    was_there = folder.exists()
    logs = ROOT / "target" / "torches"
    logs.mkdir(parents=True, exist_ok=True)
    try:
        with (logs / f"{version}.log").open("w") as log:
            if not was_there:
                print(f"torch {version}: makes an environment", file=sys.stderr, flush=True)
                command = ["make", "--no-print-directory", "torch", f"TORCH={version}"]
                subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=True)
            print(f"torch {version}: runs the tests", file=sys.stderr, flush=True)
            python = folder / "bin" / "python"
            row = tests(python, files, log)
            if store is not None:
                print(f"torch {version}: runs the gates of releases", file=sys.stderr, flush=True)
                row["gates"] = gates(python, store, models, log)
            return row
    finally:
        if not was_there and not keep:
            shutil.rmtree(folder, ignore_errors=True)


def tests(python: Path, files: list[str], log: TextIO) -> dict[str, Any]:
    """Runs tests with an interpreter; returns a row of the table."""
    command = [str(python), str(Path(__file__).resolve()), "--inside", "--only", *files]
    # The output of tests goes to the log; the row is the last line.
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True, check=False)
    *printed, last = ran.stdout.splitlines() or [""]
    log.writelines(f"{line}\n" for line in printed)
    if ran.returncode:
        raise SystemExit(f"error: the tests ended with {ran.returncode}; `{log.name}` has what they said")
    return json.loads(last)


def gates(python: Path, store: Path, models: list[str], log: TextIO) -> list[dict[str, Any]]:
    """Runs the gates of releases in a copy of a store, with the torch of an interpreter; returns the result of each."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "store"
        shutil.copytree(store, copy, symlinks=True)
        command = [str(ROOT / "target/release/precast"), "verify", "--host", *models, "--format", "json"]
        # LIBTORCH would be another torch than this interpreter's.
        environment = {name: value for name, value in os.environ.items() if name != "LIBTORCH"}
        command += ["--store", str(copy), "--python", str(python)]
        ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, env=environment, text=True)
        log.write(ran.stdout)
        if not ran.stdout:
            raise SystemExit(f"error: the gates ended with {ran.returncode}; `{log.name}` has what they said")
        return json.loads(ran.stdout)["releases"]


def of_gates(row: dict[str, Any]) -> str:
    """Returns the results of the gates of releases, for the table."""
    releases = row.get("gates")
    if releases is None:
        return "not run"
    programs = [program for release in releases for program in release["programs"]]
    failed = [f"{one['module']} {one['bucket']}" for one in programs if one["error"]]
    most = max((one["max_abs"] or 0.0 for one in programs if not one["error"]), default=0.0)
    passed = f"{len(programs) - len(failed)} of {len(programs)} passed, at most {most:.0e} from eager"
    return f"{passed}; failed: {', '.join(failed)}" if failed else passed


def table(rows: list[dict[str, Any]]) -> str:
    """Returns rows as a table in Markdown."""
    head = "torch, Triton, CUDA, tests run, failed, skipped, features off, options gone, gates, minutes".split(", ")
    lines = [head, ["---"] * len(head)]
    for row in rows:
        off, gone = (", ".join(names) or "none" for names in (row["off"], [f"`{one}`" for one in row["gone"]]))
        numbers = [str(row["run"]), str(len(row["failed"])), str(row["skipped"]), off, gone]
        versions = [row["torch"], row["triton"], row["cuda"] or "none"]
        lines.append([*versions, *numbers, of_gates(row), f"{row['seconds'] / 60:.0f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="[default: all of requirements/]")
    parser.add_argument("--only", nargs="+", metavar="FILE", help="run these files of tests")
    parser.add_argument("--keep", action="store_true", help="keep environments")
    parser.add_argument("--store", type=Path, metavar="DIR", help="run the gates of releases in this store as well")
    parser.add_argument("--models", nargs="+", default=[], metavar="MODEL", help="whose [default: all models]")
    parser.add_argument("--inside", action="store_true", help="run the tests in this process, and print a row as JSON")
    args = parser.parse_args()
    files = args.only or all_tests()
    if args.inside:
        print(json.dumps(inside(files)))
        return 0
    wanted = args.versions or versions()
    if unknown := [name for name in wanted if name not in versions()]:
        parser.error(f"no requirements/torch-{unknown[0]}.txt; there is: {', '.join(versions())}")
    rows = []
    for version in wanted:
        rows.append(outside(version, files, args.keep, args.store, args.models))
        for name in rows[-1]["failed"]:
            print(f"torch {version}: failed: {name}", file=sys.stderr)
        print(table(rows), flush=True)
    refused = [one for row in rows for one in row.get("gates", []) if not one["passed"]]
    return 1 if refused or any(row["failed"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
