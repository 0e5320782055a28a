"""Every use of AOTInductor that is not documented: what it is for, and what breaks if it moves. Written against 2.11.

`cpp_private` is its sibling for the C++ compiler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from . import cpp_private as cpp
from . import prepared


class Clock:
    """Seconds by phase of one compile; the compiler's commands are told apart by their flags."""

    def __init__(self, event: Callable[[str], None]) -> None:
        self.seconds: dict[str, float] = {}
        self._event = event

    def tell(self, name: str) -> None:
        """Says that a phase has begun."""
        self._event(name)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time inside to a phase."""
        self.tell(name)
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def modes() -> dict[str, dict[str, Any]]:
    """Returns the modes of torch.compile and the options they stand for."""
    import torch._inductor

    return torch._inductor.list_mode_options()  # type: ignore[return-value]


def option_names() -> set[str]:
    """Returns the names of every compiler option."""
    import torch._inductor

    return set(torch._inductor.list_options())


def unwrap(error: BaseException) -> BaseException:
    """Returns what failed inside the compiler, without the layers that say only that it failed inside the compiler."""
    while isinstance(inner := getattr(error, "inner_exception", None), BaseException):
        error = inner
    return error


def is_cpp_error(error: BaseException) -> bool:
    """Returns whether the C++ compiler failed, not inductor."""
    from torch._inductor import exc

    return isinstance(error, exc.CppCompileError)


def compile_aot(
    module: Any,
    inputs: list[Any],
    options: dict[str, Any],
    isa: str,
    out: Path,
    clock: Clock,
    weights: prepared.Weights,
) -> list[str]:
    """Compiles a module whose weights are buffers; returns the files that were generated, all under `out`. `weights`
    gets how the constants are made that are not the module's.

    Breaks if: `compile_fx_aot` changes its arguments or no longer returns the list of files for
    `aot_inductor.package`.
    """
    import torch
    from torch._inductor.compile_fx import compile_fx_aot

    patches = dict(options)
    patches["aot_inductor.output_path"] = str(out / "artifact.so")
    # Compiling writes into this dictionary; a shared one would carry entries from artifact to artifact.
    patches["aot_inductor.metadata"] = {}
    early = _started_early() if options.get("triton.enable_pdl") else nullcontext()
    with (
        torch.no_grad(),
        cpp.toolchain(isa, clock),
        early,
        _no_packed_weights(),
        prepared.recording(weights, isa),
    ):
        files = compile_fx_aot(module, inputs, config_patches=patches)
    return [str(name) for name in files if isinstance(name, str)]


def call_by_name(operator: Any, fake: Callable[..., Any], channels_last: bool) -> None:
    """Lowers an operator to a call by its name, with what it makes as `fake` says.

    Breaks if: `lowering.fallback_handler` or `ExternKernel.require_channels_last` go.
    """
    import torch
    from torch._inductor import ir, lowering

    if operator in lowering.lowerings:
        return
    fall_back = lowering.fallback_handler(operator)

    def given(value: Any) -> Any:
        is_image = channels_last and isinstance(value, ir.TensorBox) and len(value.get_size()) == 4
        return ir.ExternKernel.require_channels_last(value) if is_image else value

    def lower(*args: Any, **kwargs: Any) -> Any:
        return fall_back(*map(given, args), **{name: given(value) for name, value in kwargs.items()})

    lowering.register_lowering(operator, type_promotion_kind=None)(lower)
    torch.library.register_fake(operator._schema.name, fake, allow_override=True)


@contextmanager
def _no_packed_weights() -> Iterator[None]:
    """Keeps the C++ GEMM template from products with a weight, whose values it packs into the artifact.

    It may have products of two activations, as in attention. Breaks if: the places that ask
    `utils.use_cpp_gemm_template` get other names. What was packed all the same is found by its constant.
    """
    from torch._inductor import ir, mkldnn_lowerings, quantized_lowerings, utils
    from torch._inductor.kernel import bmm, mm

    places = [(module, "use_cpp_gemm_template") for module in (mm, mkldnn_lowerings, quantized_lowerings)]
    before = [(module, name, getattr(module, name)) for module, name in [*places, (bmm, "use_cpp_bmm_template")]]

    def use_for_activations(layout: Any, mat1: Any, mat2: Any) -> bool:
        inner = mat2
        while isinstance(inner, ir.MutableBox | ir.BaseView):
            inner = inner.data
        return not isinstance(inner, ir.ConstantBuffer) and utils.use_cpp_bmm_template(layout, mat1, mat2)

    try:
        for module, name in places:
            setattr(module, name, lambda *_, **__: False)
        bmm.use_cpp_bmm_template = use_for_activations  # type: ignore[assignment]
        yield
    finally:
        for module, name, original in before:
            setattr(module, name, original)


# As inductor's `launchKernel`, but started while the kernel before it in the stream ends.
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
def _started_early() -> Iterator[None]:
    """Has kernels launched as `triton.enable_pdl` promises, and wait before they touch anything.

    Inductor's C++ launches all kernels plainly, so that what waits in them is for nothing. Those that wait are
    launched with the attribute for programmatic dependent launch; a template's do not, and are not.
    Inductor lets a kernel wait where it reads what the node before it in the schedule writes, which need not be the
    kernel before it in the stream: here it waits at once. Breaks if `_filter_pdl` is no longer the last to see a
    kernel's body, or if the text of a launch changes: then nothing is started early.
    """
    from torch._inductor.codegen.cpp_wrapper_gpu import DeferredTritonCallWrapper
    from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.utils import IndentedBuffer

    driver, order = CUDADeviceOpOverrides.kernel_driver, TritonKernel._filter_pdl
    launch = DeferredTritonCallWrapper.generate_launch_kernel
    words = (TritonKernel.GDC_LAUNCH, TritonKernel.GDC_WAIT)

    def wait_first(self: Any, code: Any) -> None:
        if self._enable_pdl_codegen():
            others = [line for line in code._lines if not (isinstance(line, str) and line.strip() in words)]
            code._lines = [*words, *others]

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


def warm_up(device: str, isa: str, options: dict[str, Any], out: Path, clock: Clock) -> None:
    """Compiles nothing worth having, so that what a process and a machine need once is there when something has.

    That is the compiler's own modules and tables, and C++ headers: the C++ compiler makes them while Python imports.
    """
    import torch

    out.mkdir(parents=True, exist_ok=True)
    headers = cpp.begin(isa, device, options, out)
    from torch._inductor.compile_fx import compile_fx_aot

    module = torch.nn.Module()
    graph = torch.fx.Graph()
    x = torch.ones(64, device=device)
    placeholder = graph.placeholder("x")
    added = graph.call_function(torch.ops.aten.add.Tensor, (placeholder, 1))
    graph.output((added,))
    patches = {**options, "aot_inductor.output_path": str(out / "nothing.so"), "aot_inductor.metadata": {}}
    with torch.no_grad(), cpp.toolchain(isa, clock, warm_up=True):
        try:
            compile_fx_aot(torch.fx.GraphModule(module, graph), [x], config_patches=patches)
        except Exception as error:
            if not isinstance(unwrap(error), cpp.Enough):
                raise
    with clock.phase("headers"):
        # A header that could not be made is tried again by the first compile, which reports the cause.
        headers.exception()
