"""The benchmark's own bookkeeping, without a measurement: answers of contenders, sizes, tables."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

from benches.cases import CASES
from benches.contenders import Failed, Peer
from benches.parts import latency
from benches.parts.rates import better
from benches.run import merged, ratio
from benches.table import draw


def peer(script: str) -> Peer:
    """Returns a peer that a shell script plays."""
    made = object.__new__(Peer)
    made.name, made.received, made.caches = "fake", b"", "caches/fake"
    made.log = Path(os.devnull)
    made.host = type("Host", (), {"work": Path(tempfile.mkdtemp())})()  # type: ignore[assignment]
    made.process = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, bufsize=0, start_new_session=True)
    return made


def result() -> dict[str, Any]:
    def spread(value: float) -> dict[str, float]:
        return {"median": value, "low": value, "high": value, "rounds": 1}

    def both(value: float) -> dict[str, Any]:
        return {"synchronous": spread(value), "pipelined": spread(value)}

    return {
        "schema": 1,
        "date": "2026-01-01",
        "device": "cpu",
        "command": "python -m benches run",
        "intra_op_threads": 4,
        "machine": {"processor": "a CPU", "gpu": None, "versions": {"torch": "2.11.0"}},
        "latency": [
            {
                "case": "minilm",
                "bucket": "batch=1 seq=32",
                "seconds": {"precast": both(0.004)},
                "times_precast": {"eager": both(2.0), "onnxruntime": both(0.5)},
                "floor": {"seconds": {"arithmetic": 0.002}, "decides": "arithmetic", "times_floor": 2.0},
            }
        ],
    }


class Harness(unittest.TestCase):
    def test_answers_that_come_together_are_read_one_by_one(self) -> None:
        both = peer("""printf '{"ready": true}\\n{"seconds": 1}\\n'; sleep 600""")
        time.sleep(0.2)
        self.assertEqual(both.receive(time.time() + 300), {"ready": True})
        self.assertEqual(both.receive(time.time() + 300), {"seconds": 1})
        both.end()

    def test_a_peer_that_says_why_or_ends_or_hangs_has_failed(self) -> None:
        for script, why, patience in (
            ("""echo '{"failed": "no provider"}'""", "no provider", 300),
            ("exit 3", "exit code 3", 300),
            ("sleep 600", "not ready", 0.5),
        ):
            failing = peer(script)
            with self.assertRaisesRegex(Failed, why):
                failing.receive(time.time() + patience)
            failing.end()

    def test_every_case_names_a_module_and_buckets_that_its_spec_has(self) -> None:
        for case in CASES.values():
            for device in ("cpu", "cuda"):
                if case.spec(device).exists():
                    self.assertTrue(case.measured(device), f"{case.name} on {device}")

    def test_who_is_ready_is_measured_in_the_time_there_is(self) -> None:
        host = type("Host", (), {"device": "cpu"})()
        options = argparse.Namespace(ways=["eager"], rounds=2, seconds=1.0, prepare=100.0)
        buckets = len(CASES["mlp"].measured("cpu"))
        rounds = 2 * 3 * buckets * 3
        for left, wanted in ((1000.0, 100.0), (rounds + 60.0, 60.0), (5.0, 1.0)):
            run = type("Run", (), {"host": host, "options": options, "left": left})()
            self.assertEqual(latency.patience(run, [CASES["mlp"]]), wanted)

    def test_ratios_are_taken_round_by_round(self) -> None:
        self.assertEqual(ratio([2.0, 9.0, 4.0], [1.0, 3.0, 1.0]), {"median": 3.0, "low": 2.0, "high": 4.0, "rounds": 3})

    def test_of_rows_about_the_same_the_last_counts(self) -> None:
        first = {"schema": 1, "commit": "c", "device": "cpu", "command": "a", "seconds": 5.0}
        rows = [{"case": "minilm", "callers": 1, "is": 1}, {"case": "minilm", "callers": 8, "is": 2}]
        again = {**first, "command": "b", "threads": [{"case": "minilm", "callers": 1, "is": 3}]}
        whole = merged([{**first, "threads": rows}, again])
        self.assertEqual([row["is"] for row in whole["threads"]], [3, 2])
        self.assertEqual((whole["command"], whole["seconds"]), (["a", "b"], 5.0))
        with self.assertRaisesRegex(SystemExit, "commit is c and d"):
            merged([first, {**again, "commit": "d"}])

    def test_the_better_of_two_rates_counts(self) -> None:
        joined = better({"flops": {"float32": 2.0}, "bytes": 5.0}, {"flops": {"float32": 3.0}, "bytes": 4.0})
        self.assertEqual(joined, {"flops": {"float32": 3.0}, "bytes": 5.0})

    def test_a_page_gets_the_table_and_names_who_is_ahead(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            file, page = Path(name) / "results/cpu.json", Path(name) / "cpu.md"
            file.parent.mkdir()
            file.write_text(json.dumps(result()))
            page.write_text("before\n<!-- bench:cpu -->\nstale\n<!-- /bench:cpu -->\nafter\n")
            for _ in range(2):
                draw(file, page)
                text = page.read_text()
                self.assertIn("| minilm | B=1 T=32 | 4 ms | 2.00 x | **0.50 x** | 2.0 |", text)
                self.assertIn("- minilm B=1 T=32: ONNX Runtime 0.50 x. ", text)
                self.assertIn('"cpu-latency-dark.svg"', text)
                self.assertIn("`benches/results/cpu.json`", text)
                self.assertNotIn("stale", text)
                self.assertEqual((text[:7], text[-6:]), ("before\n", "after\n"))
            self.assertTrue((page.parent / "cpu-latency-light.svg").read_text().startswith("<svg"))

    def test_what_is_no_result_is_not_drawn(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            file = Path(name) / "torture.json"
            file.write_text('{"schema": 1}')
            with self.assertRaisesRegex(SystemExit, "no result"):
                draw(file, Path(name) / "page.md")
