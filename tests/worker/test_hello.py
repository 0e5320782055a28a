"""The worker's description of itself."""

import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from .support import part

hello = part("hello")


class SitePackages(unittest.TestCase):
    def test_every_folder_with_packages_is_named_in_the_order_of_imports(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            other, empty = Path(name) / "other", Path(name) / "empty"
            (other / "torch-2.11.0.dist-info").mkdir(parents=True)
            empty.mkdir()
            own = hello.site_packages()
            path = ["", str(empty), str(other), *sys.path, str(other)]
            with mock.patch.object(sys, "path", path):
                self.assertEqual(hello.site_packages(), [str(other), *own])

    def test_torch_is_in_one_of_them(self) -> None:
        self.assertTrue(any((Path(path) / "torch" / "version.py").exists() for path in hello.site_packages()))

    def test_a_python_without_torch_is_named_with_what_to_do(self) -> None:
        with mock.patch.dict(sys.modules, {"torch": None}), self.assertRaises(part("wire").Failure) as caught:
            hello.hello()
        failure = caught.exception
        self.assertEqual(failure.code, "torch_missing")
        self.assertIn(f"at `{sys.executable}` can't import torch: there is none", failure.message)
        self.assertEqual(
            failure.hint,
            "name an interpreter that has torch with `--python PATH` or `PRECAST_PYTHON`, or install torch there",
        )
