"""Kernels that start early: what they write, and what they read before they wait (compiled, not run)."""

from __future__ import annotations

import re
import unittest
from typing import Any

import torch
from torch._higher_order_ops import triton_kernel_wrap

try:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
except ImportError:
    triton = None

# The instructions of a kernel that count here, each as one letter.
_EVENTS = {
    "W": r"griddepcontrol\.wait",
    "D": r"griddepcontrol\.launch_dependents",
    "L": r"ld\.global",
    "S": r"st\.global",
}


@unittest.skipIf(triton is None, "this torch has no Triton")
class EarlyTest(unittest.TestCase):
    def events(self, kernel: Any, tensors: str, floats: str = "", warps: int = 4, **constants: Any) -> str:
        """Compiles a kernel for compute capability 9.0; returns its waits, loads and stores in their order."""
        signature = dict.fromkeys(tensors.split(), "*bf16") | dict.fromkeys(floats.split(), "*fp32")
        signature = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
        values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=values)
        options = {"num_warps": warps, "num_stages": 1}
        text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
        found = (
            next((letter for letter, pattern in _EVENTS.items() if re.search(pattern, line)), "")
            for line in text.splitlines()
        )
        return "".join(found)

    def product(self, early: bool, gate: bool) -> str:
        from precast_kernels import single_row_triton as kernels

        sizes = {"COLUMNS": 256, "DEPTH": 2048, "TILE": 2, "STEP": 2048, "EPS": 1e-6}
        flags = {"NORM": True, "GATE": gate, "BIAS": False, "RESIDUAL": not gate, "EARLY": early}
        return self.events(kernels._row_product, "x norm weight gate bias residual out", **sizes, **flags)

    def test_a_product_reads_weights_before_it_waits_and_writes_after(self) -> None:
        for gate in (False, True):
            with self.subTest(gate=gate):
                before, after = self.product(True, gate).split("W")
                self.assertEqual(set(before), {"L"})
                self.assertRegex(after, "^L+DL*S$")  # the next kernel starts when all weights are read
                # Only reads of weights moved: there is none more.
                self.assertEqual((before + after).count("L"), self.product(False, gate).count("L"))

    def test_attention_waits_before_it_reads_or_writes(self) -> None:
        from precast_kernels import single_row_triton as kernels

        strides = "QUERY_BATCH QUERY_HEAD KEY_BATCH KEY_HEAD KEY_ROW VALUE_BATCH VALUE_HEAD VALUE_ROW MASK_BATCH"
        sizes = {"SCALE": 0.125, "HEADS": 4, "GROUP": 8, "KEYS": 1024, "WIDTH": 64, "CHUNK": 64, "PARTS": 16}
        sizes |= dict.fromkeys(strides.split(), 64) | {"GROUP_TILE": 16, "TILE": 64, "EARLY": True}
        part = self.events(kernels._attend_part, "query key value mask", "out best share", **sizes)
        self.assertRegex(part, "^DW[LS]+$")
        sizes = {"PARTS": 16, "WIDTH": 64, "PART_TILE": 16, "EARLY": True}
        whole = self.events(kernels._attend_whole, "out", "part best share", warps=1, **sizes)
        self.assertRegex(whole, "^DW[LS]+$")

    @unittest.skipUnless(hasattr(triton_kernel_wrap, "identify_mutated_tensors"), "a newer torch looks on a GPU")
    def test_torch_knows_the_outputs_also_of_a_kernel_with_a_number_of_warps(self) -> None:
        from precast_kernels import single_row_triton, small_batch_triton

        kernels = {
            single_row_triton._row_product: ["out"],
            single_row_triton._attend_part: ["out", "best", "share"],
            small_batch_triton._product: ["out"],
        }
        for kernel, outputs in kernels.items():
            wrapped = triton.autotune(configs=[triton.Config(kwargs={}, num_warps=4)], key=[])(kernel)
            given = dict.fromkeys(kernel.arg_names, torch.empty(1))
            for one in (kernel, wrapped):
                self.assertEqual(triton_kernel_wrap.identify_mutated_tensors(one, given, {}), outputs)
