"""Products and attention of few rows: which are made otherwise, and that they give the same (interpreted)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .support import SOURCES, Project, part

BLOCK = """
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(1024)
        self.qkv, self.out = torch.nn.Linear(1024, 192), torch.nn.Linear(64, 1024, bias=False)
        self.up, self.down = torch.nn.Linear(1024, 2048), torch.nn.Linear(2048, 1024)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 1, 3, 64).permute(3, 0, 2, 1, 4).unbind(0)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.out(attended.reshape(*x.shape[:2], 64))
        return x + self.down(torch.nn.functional.gelu(self.up(x)))

def load():
    return Block().to(torch.{dtype})
"""

# Splits a captured segment, and says what that did and how far from the plain one it is.
KERNEL = """
import importlib, os, sys
from pathlib import Path
sys.path.insert(0, os.path.dirname(sys.argv[1]))
import torch
torch.library.wrap_triton = lambda kernel: kernel  # the interpreter's is called as it is
worker = os.path.basename(sys.argv[1])
few_rows, segment = (importlib.import_module(f"{worker}.{name}") for name in ("few_rows", "segment"))
module, inputs, _ = segment.load(Path(sys.argv[2]), "cpu")
inputs = [torch.randn_like(value) for value in inputs]
for weight in module.buffers():
    weight.div_(32)
(before,) = module(*inputs)
assert few_rows.split(module.graph, 132) == 4
assert few_rows.attend(module.graph) == 1
assert not few_rows.attend(module.graph)
module.graph.lint()
module.recompile()
(after,) = module(*inputs)
assert after.dtype == before.dtype and after.shape == before.shape
far = (after.double() - before.double()).norm() / before.double().norm()
assert far < 2e-3, far
"""


class FewRowsTest(Project):
    def segment(self, dtype: str, rows: int) -> Any:
        opened = self.open(BLOCK.replace("{dtype}", dtype))
        captured = self.capture(opened, inputs=[("x", dtype, [1, rows, 1024])])
        return captured["segments"][0]["file"]

    def test_only_few_rows_of_a_narrow_dtype_are_split(self) -> None:
        for dtype, rows in (("float32", 48), ("bfloat16", 65)):
            module, _, _ = part("segment").load(Path(self.segment(dtype, rows)), "cpu")
            self.assertEqual(part("few_rows").split(module.graph, 132), 0)

    def test_the_kernels_give_the_same(self) -> None:
        file = self.segment("float16", 48)
        command = [sys.executable, "-P", "-c", KERNEL, str(SOURCES), file]
        subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, check=True, timeout=300)

    def test_what_is_started_early_waits_before_anything_else(self) -> None:
        from torch._inductor.codegen.cpp_wrapper_gpu import DeferredTritonCallWrapper
        from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides
        from torch._inductor.codegen.triton import TritonKernel
        from torch._inductor.utils import IndentedBuffer

        places = [
            (CUDADeviceOpOverrides, "kernel_driver"),
            (TritonKernel, "_filter_pdl"),
            (DeferredTritonCallWrapper, "generate_launch_kernel"),
        ]
        before = [getattr(owner, name) for owner, name in places]

        class Kernel(TritonKernel):
            def __init__(self) -> None:
                pass

            @staticmethod
            def _enable_pdl_codegen() -> bool:
                return True

        class Launch(DeferredTritonCallWrapper):
            def __init__(self, body: str) -> None:
                self.kernel_name, self.kernel_name_to_body = "kernel", {"kernel": body}

        def plain(self: object, prefix: IndentedBuffer, wrapper: object, name: str, params: object) -> None:
            prefix.writeline(f"launchKernel({name});")

        body = IndentedBuffer()
        body.writelines(["at = xindex", TritonKernel.GDC_WAIT, "x = tl.load(at)", TritonKernel.GDC_LAUNCH])
        DeferredTritonCallWrapper.generate_launch_kernel = plain  # type: ignore[method-assign]
        try:
            with part("inductor_private")._started_early():
                self.assertIn("cuLaunchKernelEx", CUDADeviceOpOverrides().kernel_driver())
                Kernel()._filter_pdl(body)
                texts = []
                for source in (body.getvalue(), "x = tl.load(at)"):
                    text = IndentedBuffer()
                    Launch(source).generate_launch_kernel(text, None, "kernel", {})
                    texts.append(text.getvalue().strip())
        finally:
            DeferredTritonCallWrapper.generate_launch_kernel = before[2]  # type: ignore[method-assign]
        words = [TritonKernel.GDC_LAUNCH, TritonKernel.GDC_WAIT]
        self.assertEqual(body.getvalue().split("\n")[:4], [*words, "at = xindex", "x = tl.load(at)"])
        self.assertEqual(texts, ["launchEarly(kernel);", "launchKernel(kernel);"])
        self.assertEqual([getattr(owner, name) for owner, name in places], before)
