"""The offers of the package to `precast build --tune`, also as an installed package."""

from __future__ import annotations

import sys
import tomllib
from types import SimpleNamespace
from typing import Any

from precast_kernels.offers import offers

from tests.worker.support import Project, model, part

from . import FOLDER
from .test_small_batch import BLOCK

PLAIN = model("return x @ x + 1")

CONVOLVES = model("return self.conv(x)", "self.conv = torch.nn.Conv2d(3, 8, 3)")


class OffersTest(Project):
    def graphs(self, text: str, dtype: str, shape: list[int]) -> list[Any]:
        opened = self.open(text)
        captured = self.capture(opened, inputs=[("x", dtype, shape)])
        load = part("torch_private.archives").load_program
        return [load(segment["file"]).graph for segment in captured["segments"]]

    def offered(self, device: str, graphs: list[Any]) -> list[str]:
        rows = []
        for offer in offers(device, graphs):
            passes = [name.removeprefix("precast_kernels:") for name in offer["passes"]]
            rows.append(" ".join([*passes, *(f"{name}={value}" for name, value in offer["options"].items())]))
        return rows

    def test_a_program_is_offered_what_it_has_something_for(self) -> None:
        block = self.graphs(BLOCK.replace("{dtype}", "bfloat16"), "bfloat16", [1, 48, 1024])
        split = "split_k triton.enable_pdl=True"
        both = "split_k single_tile_attention triton.enable_pdl=True"
        self.assertEqual(self.offered("cuda", block), [split, both])
        self.assertEqual(self.offered("cpu", block), [])
        many = self.graphs(BLOCK.replace("{dtype}", "bfloat16"), "bfloat16", [1, 256, 1024])
        self.assertEqual(self.offered("cuda", many), [])
        # Too wide a dtype, and weights that a CPU multiplies a few rows by in no time.
        small = self.graphs(
            BLOCK.replace("{dtype}", "float32").replace("1024, 192", "1024, 64 * 3"), "float32", [1, 4, 1024]
        )
        self.assertEqual(self.offered("cuda", small), [])
        self.assertEqual(self.offered("cpu", small), ["fuse"])
        self.assertEqual(self.offered("cpu", self.graphs(PLAIN, "float32", [8, 8])), [])
        convolves = self.graphs(CONVOLVES, "float32", [1, 3, 8, 8])
        self.assertEqual(self.offered("cuda", convolves), ["fuse"])
        self.assertEqual(self.offered("cpu", convolves), [])

    def test_an_installed_package_is_found_by_its_entry_point(self) -> None:
        project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
        info = self.root / f"precast_kernels-{project['version']}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        )
        ((group, points),) = project["entry-points"].items()
        lines = [f"{name} = {value}" for name, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
        sys.path.append(str(self.root))
        found = part("passes.segments")._entry_points
        found.cache_clear()
        self.addCleanup(found.cache_clear)
        graphs = self.graphs(BLOCK.replace("{dtype}", "bfloat16"), "bfloat16", [1, 48, 1024])
        offered = part("passes.segments").offered(SimpleNamespace(device="cuda", root=self.out, offering=set()), graphs)
        names = [[one["callable"] for one in offer["passes"]] for offer in offered]
        self.assertIn(["precast_kernels:split_k"], names)
