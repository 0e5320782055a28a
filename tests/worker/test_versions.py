"""The table of versions of torch: right for the torch in use; features that are off are left out and reported."""

from __future__ import annotations

import json
import subprocess
import sys
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from .support import Project, long, part

versions = part("torch_private.versions")

LINEAR = """
import torch

def load():
    return torch.nn.Linear(512, 1024).eval()
"""


@contextmanager
def untried(*lacking: object) -> Iterator[None]:
    """Makes the torch in use look untried, and without one name of each of these features."""
    versions._why_off.cache_clear()
    missing = {feature: feature.needs[0] for feature in lacking}
    with (
        mock.patch.object(versions, "in_use", return_value=(2, 16)),
        mock.patch.object(versions, "missing", side_effect=missing.get),
    ):
        yield
    versions._why_off.cache_clear()


class TableTest(unittest.TestCase):
    def test_what_works_has_its_private_names_and_what_is_off_says_why(self) -> None:
        self.assertLessEqual(versions.OLDEST, versions.in_use())
        self.assertLessEqual(versions.in_use(), versions.NEWEST)
        self.assertIsNone(versions.missing(versions.EVERY_BUILD))
        for feature in versions.FEATURES:
            self.assertEqual(feature.off_since is not None, bool(feature.why), feature.name)
            if versions.works(feature):
                self.assertIsNone(versions.missing(feature), feature.name)

    def test_a_name_that_is_not_there_is_found_out(self) -> None:
        for name in ("torch._no_such:module", "torch._inductor:no_such", "torch._inductor:list_options.no_such"):
            feature = versions.Feature("f", "m", ("torch._inductor:list_options", name), "")
            self.assertEqual(versions.missing(feature), name)

    def test_options_are_gone_where_the_table_says_so(self) -> None:
        known = part("torch_private.inductor").option_names()
        for one in versions.GONE:
            self.assertEqual(one.option in known, versions.gone(one.option) is None, one.option)
        self.assertIsNone(versions.gone("epilogue_fusion"))

    def test_versions_are_compared_by_their_first_two_numbers(self) -> None:
        for text, numbers in (("2.11.0+cu130", (2, 11)), ("2.15.0a0+git1", (2, 15)), ("3.0.1", (3, 0))):
            self.assertEqual(versions.parsed(text), numbers)
        feature = versions.Feature("f", "m", (), "instead", off_since=(2, 13), why="it moved")
        with mock.patch.object(versions, "FEATURES", (feature,)):
            said = [{"what": "f", "why": "it moved: instead"}]
            self.assertEqual([versions.off((2, minor)) for minor in (12, 13, 15)], [[], said, said])

    def test_it_is_printed_without_torch(self) -> None:
        command = [sys.executable, "-I", "-S", versions.__file__, "2.15.0+cu132"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        self.assertEqual(json.loads(done.stdout), versions.off((2, 15)))


class UntriedTest(Project):
    def test_a_newer_torch_is_asked_for_its_names(self) -> None:
        hello = part("hello")
        with untried():
            self.assertEqual(hello.hello()["off"], [])
        with untried(versions.EARLY_LAUNCH):
            name = versions.EARLY_LAUNCH.needs[0].replace(":", ".")
            why = f"torch 2.16 has no `{name}`: each kernel starts when the one before it has ended"
            self.assertEqual(hello.hello()["off"], [{"what": versions.EARLY_LAUNCH.name, "why": why}])
        with untried(versions.EVERY_BUILD):
            failure = self.fails("torch_untried", hello.hello)
            self.assertIn("has no `torch._inductor.list_mode_options`, which every build needs", failure.message)

    @long
    def test_what_is_off_is_left_out_of_a_compile(self) -> None:
        captured = self.capture(self.open(LINEAR), inputs=[("input", "float32", [64, 512])])
        options = {"freezing": True, "triton.enable_pdl": True}
        for name, lacking in (("on", ()), ("off", versions.FEATURES)):
            with untried(*lacking):
                prepared = self.compile(captured, name, options=options)["prepared"]
            self.assertEqual(bool(prepared), name == "on")
        with mock.patch.object(versions, "GONE", (versions.Gone("was_there", (2, 11)),)):
            failure = self.fails("compile", self.compile, captured, "gone", options={"was_there": 1})
        self.assertEqual(failure.message, "option `was_there` is gone: torch 2.11 has dropped it")
        self.assertEqual(failure.hint, "leave it out")
