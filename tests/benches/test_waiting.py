"""The trials, sums and leftovers of `benches/waiting.py`."""

from __future__ import annotations

import os
import subprocess
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from benches import waiting


class WaitingTest(unittest.TestCase):
    def test_every_variant_is_written_as_a_shell_takes_it(self) -> None:
        tried = waiting.variants(4)
        self.assertEqual(tried["as it is"], {})
        self.assertIn("OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive", tried)
        # One core has no half.
        self.assertTrue(all(one.get("OMP_NUM_THREADS", "1") == "1" for one in waiting.variants(1).values()))

    def test_a_variant_is_the_whole_environment_of_openmp(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            fake = Path(folder) / "precast"
            fake.write_text(
                '#!/bin/sh\nprintf \'{"buckets": [{"policy": "%s", "threads": "%s"}]}\' '
                '"$OMP_WAIT_POLICY" "$OMP_NUM_THREADS"\n'
            )
            fake.chmod(0o755)
            with mock.patch.dict(os.environ, {"OMP_WAIT_POLICY": "active"}):
                environment = waiting.bench(fake, Path(folder), {"OMP_NUM_THREADS": "2"}, 0.1)
        self.assertEqual(environment, {"policy": "", "threads": "2"})

    def test_rounds_are_added_up_in_milliseconds(self) -> None:
        rounds = [{"median": ms / 1e3, "p99": 2 * ms / 1e3, "calls": 10} for ms in (5, 3, 100)]
        wanted = {"median_ms": 5, "least_ms": 3, "most_ms": 100, "p99_ms": 10, "calls": 30}
        self.assertEqual(waiting.spread(rounds), wanted)

    def test_what_ran_beside_ends_with_it(self) -> None:
        started = []
        real = subprocess.Popen

        def popen(*args: object, **kwargs: object) -> subprocess.Popen:
            started.append(real(*args, **kwargs))
            return started[-1]

        with mock.patch.object(waiting.subprocess, "Popen", popen), self.assertRaises(KeyError):
            with waiting.beside(2):
                self.assertEqual([process.poll() for process in started], [None, None])
                raise KeyError
        self.assertTrue(all(process.poll() is not None for process in started))
