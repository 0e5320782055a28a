"""Programmatic dependent launch of Triton kernels, as the option `triton.enable_pdl` promises it.

The C++ that inductor generates launches all kernels plainly, so that the waits in them have no effect. Here kernels
that wait are launched with the attribute for programmatic dependent launch; kernels of templates do not wait, and keep
the plain launch.

The passes of `kernels/` need it: with `split_k`, 24 blocks of 64 rows on an H200 take 702 us instead of 946 us. Without
these passes the option has little effect: 926 us (`benches/results/kernels-h200.json`).

Inductor makes a kernel wait where it reads the result of the node before it in the schedule. That node need not be the
kernel before it in the stream: here a kernel waits at its start.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# As inductor's `launchKernel`, but the kernel starts while the one before it in the stream ends.
_LAUNCH_EARLY = """
            static inline void launchEarly(
                    CUfunction func,
                    uint32_t gridX,
                    uint32_t gridY,
                    uint32_t gridZ,
                    uint32_t numWarps,
                    uint32_t sharedMemBytes,
                    void* args[],
                    cudaStream_t stream) {
                CUlaunchAttribute early{};
                early.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
                early.value.programmaticStreamSerializationAllowed = 1;
                CUlaunchConfig how{};
                how.gridDimX = gridX;
                how.gridDimY = gridY;
                how.gridDimZ = gridZ;
                how.blockDimX = 32 * numWarps;
                how.blockDimY = 1;
                how.blockDimZ = 1;
                how.sharedMemBytes = sharedMemBytes;
                how.hStream = stream;
                how.attrs = &early;
                how.numAttrs = 1;
                CUDA_DRIVER_CHECK(cuLaunchKernelEx(&how, func, args, nullptr));
            }
"""


@contextmanager
def early_launch() -> Iterator[None]:
    """Generates early launches for the time of one compile.

    Private: `CUDADeviceOpOverrides.kernel_driver`, `TritonKernel._filter_pdl` as the last to change a kernel's body,
    `DeferredTritonCallWrapper.generate_launch_kernel`, and the text `launchKernel(` that it writes. Without them:
    kernels are launched plainly.
    """
    from torch._inductor.codegen.cpp_wrapper_gpu import DeferredTritonCallWrapper
    from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.utils import IndentedBuffer

    driver, order = CUDADeviceOpOverrides.kernel_driver, TritonKernel._filter_pdl
    launch = DeferredTritonCallWrapper.generate_launch_kernel
    calls = (TritonKernel.GDC_LAUNCH, TritonKernel.GDC_WAIT)

    def wait_first(self: Any, code: Any) -> None:
        if self._enable_pdl_codegen():
            others = [line for line in code._lines if not (isinstance(line, str) and line.strip() in calls)]
            code._lines = [*calls, *others]

    def launch_early(self: Any, prefix: Any, wrapper: Any, name: str, params: Any) -> None:
        text = IndentedBuffer()
        launch(self, text, wrapper, name, params)
        waits = TritonKernel.GDC_WAIT in self.kernel_name_to_body[self.kernel_name]
        prefix.splice(text.getvalue().replace("launchKernel(", "launchEarly(") if waits else text)

    try:
        CUDADeviceOpOverrides.kernel_driver = lambda self: driver(self) + _LAUNCH_EARLY  # type: ignore[method-assign]
        TritonKernel._filter_pdl = wait_first  # type: ignore[method-assign]
        DeferredTritonCallWrapper.generate_launch_kernel = launch_early  # type: ignore[method-assign]
        yield
    finally:
        CUDADeviceOpOverrides.kernel_driver = driver  # type: ignore[method-assign]
        TritonKernel._filter_pdl = order  # type: ignore[method-assign]
        DeferredTritonCallWrapper.generate_launch_kernel = launch  # type: ignore[method-assign]
