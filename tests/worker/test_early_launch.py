"""Kernels that start while the one before them ends: `triton.enable_pdl`."""

from __future__ import annotations

from .support import Project, part


class EarlyTest(Project):
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
            with part("torch_private.early_launch").early_launch():
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
