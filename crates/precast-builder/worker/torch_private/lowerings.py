"""Lowerings of AOTInductor, which translate operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .patches import replaced


def call_by_name(operator: Any, fake: Callable[..., Any], channels_last: bool) -> None:
    """Lowers an operator to a call by its name. `fake` returns its results without data.

    Private: `torch._inductor.lowering` with `lowerings`, `fallback_handler` and `register_lowering`;
    `torch._inductor.ir.ExternKernel.require_channels_last`. Without them: `Context.call_by_name` of graph passes fails.
    """
    from torch._inductor import ir, lowering

    if operator in lowering.lowerings:
        return
    fall_back = lowering.fallback_handler(operator)

    def ordered(value: Any) -> Any:
        is_image = channels_last and isinstance(value, ir.TensorBox) and len(value.get_size()) == 4
        return ir.ExternKernel.require_channels_last(value) if is_image else value

    def lower(*args: Any, **kwargs: Any) -> Any:
        return fall_back(*map(ordered, args), **{name: ordered(value) for name, value in kwargs.items()})

    lowering.register_lowering(operator, type_promotion_kind=None)(lower)
    torch.library.register_fake(operator._schema.name, fake, allow_override=True)


@contextmanager
def no_packed_weights() -> Iterator[None]:
    """Keeps the C++ GEMM template from products with a weight, whose values it packs into the artifact.

    Products of two activations, as in attention, keep it.

    Private: `use_cpp_gemm_template` and `use_cpp_bmm_template` in the modules of `torch._inductor` that call them, and
    the classes of `torch._inductor.ir` for constants and views. Without them: a segment with such a product does not
    compile, because no weight set has the packed weight.
    """
    from torch._inductor import ir, mkldnn_lowerings, quantized_lowerings, utils
    from torch._inductor.kernel import bmm, mm

    def use_for_activations(layout: Any, mat1: Any, mat2: Any) -> bool:
        base = mat2
        while isinstance(base, ir.MutableBox | ir.BaseView):
            base = base.data
        return not isinstance(base, ir.ConstantBuffer) and utils.use_cpp_bmm_template(layout, mat1, mat2)

    callers = (mm, mkldnn_lowerings, quantized_lowerings)
    refused = [(module, "use_cpp_gemm_template", lambda *_, **__: False) for module in callers]
    with replaced(*refused, (bmm, "use_cpp_bmm_template", use_for_activations)):
        yield


@contextmanager
def decomposing(table: dict[Any, Callable[..., Any]]) -> Iterator[None]:
    """Has the compiler put these functions in the place of operators, also where it takes others apart.

    Private: `torch._inductor.compile_fx.select_decomp_table`. Without it: the compiler has its own functions alone.
    """
    from torch._inductor import compile_fx

    own = compile_fx.select_decomp_table
    with replaced((compile_fx, "select_decomp_table", lambda: {**own(), **table})):
        yield


@contextmanager
def checked_scatters() -> Iterator[None]:
    """Has an artifact fail where libtorch refuses to scatter, as for a number beyond the rows of a table.

    Private: `CppWrapperCpu._generate_scatter_fallback`, which writes such a call with `writeline`. Without them: the
    artifact goes on with values that nothing was scattered into.
    """
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    generate = CppWrapperCpu._generate_scatter_fallback

    def checked(self: Any, *args: Any, **named: Any) -> None:
        lines: list[str] = []
        with replaced((self, "writeline", lines.append)):
            generate(self, *args, **named)
        for line in lines:
            call = line.removesuffix(";")
            self.writeline(f"AOTI_TORCH_ERROR_CODE_CHECK({call});" if call.startswith("aoti_torch_") else line)

    with replaced((CppWrapperCpu, "_generate_scatter_fallback", checked)):
        yield
