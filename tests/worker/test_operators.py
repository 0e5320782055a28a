"""Custom operators: one in C++ builds and runs through the proxy executor's description, one in Python is refused."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from unittest import mock

import torch

from .shim import cpp_standard
from .support import Project, long, model, part
from .test_capture import X

CODE = """
#include <ATen/ATen.h>
#include <torch/library.h>
static at::Tensor twice(const at::Tensor& x, double k) { return x * k; }
TORCH_LIBRARY(precast_test, m) { m.def("twice(Tensor x, float k) -> Tensor"); }
TORCH_LIBRARY_IMPL(precast_test, CompositeExplicitAutograd, m) { m.impl("twice", &twice); }
"""
USING = model(
    "return torch.relu(torch.ops.precast_test.twice(torch.sin(x), 3.0))",
    extra="""\
import os
torch.ops.load_library(os.path.join(os.path.dirname(__file__), "twice.so"))

@torch.library.register_fake("precast_test::twice")
def _(x, k):
    if os.environ.get("PRECAST_TEST_BREAK"):
        raise ValueError("no shape today")
    return torch.empty_like(x)
""",
)
PYTHON = """
@torch.library.custom_op("precast_python::half", mutates_args=())
def half(x: torch.Tensor) -> torch.Tensor:
    return x / 2

@half.register_fake
def _(x):
    return torch.empty_like(x)
"""


def build(path: Path) -> None:
    home = Path(torch.__file__).parent
    source = path.with_suffix(".cpp")
    source.write_text(CODE)
    include = [f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include"]
    link = [f"-L{home}/lib", "-ltorch", "-ltorch_cpu", "-lc10"]
    compiler = os.environ.get("CXX", "g++")
    flags = ["-O0", "-shared", "-fPIC", f"-std={cpp_standard()}"]
    subprocess.run([compiler, *flags, *include, str(source), *link, "-o", str(path)], check=True)


class OperatorsTest(Project):
    @long
    def test_the_library_of_a_cpp_operator_is_part_of_the_segment(self) -> None:
        """That it runs in an artifact, with no Python, is in `tests/numerics/operators.rs`."""
        build(self.root / "twice.so")
        opened = self.open(USING)
        self.assertIn("twice.so", [source["path"] for source in opened.sources])
        captured = self.capture(opened, inputs=[X], sizes={"n": 4})
        (segment,) = captured["segments"]
        self.assertEqual(segment["libraries"], [str(self.root / "twice.so")])
        self.assertIn("library sha256=", segment["graph"])
        self.assertIn("precast_test.twice.default<", segment["graph"])
        self.assertNotIn(str(self.root), segment["graph"])
        nodes = json.loads(Path(self.compile(captured)["proxy"]).read_text())["nodes"]
        self.assertEqual([node["node"]["target"] for node in nodes], ["precast_test::twice"])
        with mock.patch.dict(os.environ, {"PRECAST_TEST_BREAK": "1"}):
            failure = self.fails("compile", self.compile, captured, "broken")
        self.assertIn("no shape today", failure.message)
        self.assertRegex(failure.location, r"^project_\d+\.py:8$")

    def test_the_body_of_an_operator_in_python_is_traced(self) -> None:
        text = model("return torch.ops.precast_python.half(torch.nn.functional.gelu(x)) + 1", extra=PYTHON)
        (segment,) = self.checked(text, inputs=[X], sizes={"n": 4})["segments"]
        self.assertNotIn("precast_python", segment["graph"])
        self.assertIn("aten.div", segment["graph"])
        self.assertIn("aten.gelu", segment["graph"])
        self.assertEqual(segment["libraries"], [])
        self.assertTrue(part("torch_private.overloads").has_native_kernel("aten::linear", "cpu"))

    def test_an_operator_whose_body_can_not_be_traced_is_refused_by_name(self) -> None:
        body = PYTHON.replace("precast_python", "precast_numpy").replace("x / 2", "torch.from_numpy(x.numpy() / 2)")
        failure = self.refused("capture", model("return torch.ops.precast_numpy.half(x) + 1", extra=body), inputs=[X])
        self.assertIn("operator `precast_numpy::half`, called by the model, has no C++ kernel for cpu", failure.message)
        self.assertIn("its body can't be traced", failure.message)
        self.assertRegex(failure.location, r"^project_\d+\.py:16$")
        self.assertIn("TORCH_LIBRARY_IMPL", failure.hint)

    def test_an_operator_in_python_without_a_function_of_its_own_is_refused(self) -> None:
        library = torch.library.Library("precast_impl", "FRAGMENT")
        library.define("half(Tensor x) -> Tensor")
        library.impl("half", lambda x: x / 2, "CPU")
        torch.library.register_fake("precast_impl::half", torch.empty_like)
        extra = (
            "class Inner(torch.nn.Module):\n    def forward(self, x):\n        return torch.ops.precast_impl.half(x)\n"
        )
        text = model("return self.inner(x) + 1", "self.inner = Inner()", extra=extra)
        failure = self.refused("capture", text, inputs=[X])
        self.assertIn("`precast_impl::half`, called by `inner`, has no C++ kernel for cpu", failure.message)
