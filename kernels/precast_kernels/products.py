"""Small products with weights on a CPU, in an artifact's own code.

A call of MKL copies the matrix into a layout of its own before it multiplies, and a call of oneDNN takes 10 to 15 us
before it multiplies: more than a small product takes. Inductor has a template for small products, into which it fuses
the operations after them. But the template packs weights into the artifact, and g++ writes the sums of its inner loop
to memory in every step. Here the matrix is a prepacked weight, and the inner loop has a variable for each sum.

Such a product runs on one thread: it ends before other threads have woken. An MLP of 48, 64 and 10 columns took 2 us a
call with it; `examples/vlm` is faster than ONNX Runtime with it (`benches/results/cpu.json`).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

# The largest product: multiplications, which one thread does in 25 us, and elements, which stay in its cache.
_MAX_PRODUCTS = 1 << 20
_MAX_ELEMENTS = 1 << 16

# Values in a vector -> rows of a tile, each multiplied by up to three vectors: three quarters of the CPU's registers
# hold sums. Tiles with fewer rows have the same columns, so that buckets share prepacked weights.
_ROWS = {16: 8, 8: 4}
_VECTORS = 3


class SmallProducts:
    """The pass `small_products`."""

    def post_grad_pre(self, module: Any, context: Any) -> None:
        """Replaces the small products that inductor's passes over weights have left."""
        if context.device == "cpu":
            replace_products(module.graph, context)


def replace_products(graph: Any, context: Any) -> None:
    """Replaces small products with weights by calls of `small_product`.

    Private: `CppGemmTemplate`, the function that it calls for its inner loop, and its order of column blocks. Without
    them: this pass fails.
    """
    aten = torch.ops.aten
    prepacked: dict[Any, Any] = {}
    for node in list(graph.nodes):
        if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
            continue
        *bias, rows, matrix = node.args
        if not context.is_constant(matrix) or not is_small(rows.meta["val"], matrix.meta["val"]):
            continue
        columns = matrix.meta["val"].shape[1]
        block = _columns(columns)
        if block == 0:
            continue
        with graph.inserting_before(node):
            if matrix not in prepacked:
                prepacked[matrix] = context.prepack(_column_blocks(graph, matrix, block))
            if prepacked[matrix] is None:
                continue
            product = graph.call_function(_operator(), (rows, prepacked[matrix], bias[0] if bias else None, columns))
            product.meta = dict(node.meta)
        node.replace_all_uses_with(product)
        graph.erase_node(node)


def _column_blocks(graph: Any, matrix: Any, block: int) -> Any:
    """Returns the matrix in dense blocks of columns; the last block is padded with zeros."""
    aten = torch.ops.aten
    inner, columns = matrix.meta["val"].shape

    def call(operator: Any, of: Any, *args: Any, **named: Any) -> Any:
        node = graph.call_function(operator, (of, *args), named)
        node.meta = {"val": operator(of.meta["val"], *args, **named)}
        return node

    blocks = -(-columns // block)
    if blocks * block != columns:
        matrix = call(aten.constant_pad_nd.default, matrix, [0, blocks * block - columns])
    split = call(aten.reshape.default, matrix, [inner, blocks, block])
    return call(aten.clone.default, call(aten.permute.default, split, [1, 0, 2]), memory_format=torch.contiguous_format)


def is_small(*held: Any) -> bool:
    """Returns whether a product of rows and a matrix is small."""
    if any(value.dtype != torch.float32 or value.device.type != "cpu" for value in held):
        return False
    sizes = [*held[0].shape, held[1].shape[1]]
    if not all(isinstance(size, int) for size in sizes):
        return False
    return 0 < math.prod(sizes) <= _MAX_PRODUCTS and sizes[1] * sizes[2] <= _MAX_ELEMENTS


def _width() -> int:
    """Returns the number of values in a vector; 0 without vectors.

    Private: `torch._inductor.cpu_vec_isa.pick_vec_isa`. Without it: this pass fails.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    isa = pick_vec_isa()
    return isa.nelements() if isa and isa.nelements() in _ROWS else 0


def _columns(columns: int) -> int:
    """Returns the columns of a block: the widest with the fewest padded columns; 0 if all pad too many."""
    width = _width()
    if width == 0:
        return 0
    best = min((width * count for count in range(_VECTORS, 0, -1)), key=lambda block: -columns % block)
    return best if 8 * (-columns % best) <= columns else 0


@functools.cache
def _operator() -> Any:
    """Returns the operator `small_product`, which is lowered and never called.

    Private: as `replace_products`, and inductor's lowerings. Without them: this pass fails.
    """
    from torch._inductor import lowering
    from torch._inductor.codegen import cpp_gemm_template
    from torch._inductor.codegen.cpp_utils import GemmBlocking
    from torch._inductor.ir import ExternKernel, FixedLayout
    from torch._inductor.kernel.mm_common import realize_inputs

    library = torch.library.Library("precast_kernels", "FRAGMENT")
    library.define("small_product(Tensor rows, Tensor blocks, Tensor? bias, int columns) -> Tensor")
    library.impl("small_product", lambda rows, _, __, columns: rows.new_empty(rows.shape[0], columns), "Meta")
    operator = torch.ops.precast_kernels.small_product.default

    class Template(cpp_gemm_template.CppGemmTemplate):
        def get_options(self, *args: Any, **kwargs: Any) -> Any:
            def ours(name: str, *_: Any, **__: Any) -> Any:
                return _kernel()(name, int(self.m), self.register_blocking)

            theirs = cpp_gemm_template.create_micro_gemm
            cpp_gemm_template.create_micro_gemm = ours  # type: ignore[assignment]
            try:
                return super().get_options(*args, **kwargs)
            finally:
                cpp_gemm_template.create_micro_gemm = theirs

    def lower(rows: Any, blocks: Any, bias: Any, columns: int) -> Any:
        rows, blocks = realize_inputs(rows, blocks)
        rows, blocks = ExternKernel.require_stride1(rows), ExternKernel.require_contiguous(blocks)
        count = int(rows.get_size()[0])
        layout = FixedLayout(rows.get_device(), torch.float32, [count, columns])
        biases = [] if bias is None else [realize_inputs(lowering.expand(bias, (count, columns)))]
        blocking = GemmBlocking(min(count, _ROWS[_width()]), int(blocks.get_size()[2]), 1)
        template = Template([rows, blocks, *biases], layout, 1, blocking, has_bias=bool(biases), name="product")
        return template.generate().output_node()

    lowering.register_lowering(operator, type_promotion_kind=None)(lower)
    operator.library = library
    return operator


@functools.cache
def _kernel() -> Any:
    """Returns the class that generates the inner loop. Private: `CppMicroGemm`."""
    from torch._inductor.codegen.cpp_micro_gemm import CppMicroGemm

    class Kernel(CppMicroGemm):
        def __init__(self, name: str, rows: int, blocking: Any) -> None:
            super().__init__(name, *[torch.float32] * 4, blocking)
            self.rows = rows

        def codegen_define(self, kernel: Any) -> str:
            block, columns, _ = self.register_blocking
            heights = sorted({block, self.rows % block or block}, reverse=True)
            loops = [_loop(f"{self.name}_{height}", height, columns, _width()) for height in heights]
            calls = " else ".join(
                f"if (M - m {'>=' if height == block else '=='} {height}) "
                f"{self.name}_{height}<accum>(A + m * lda, B + n, C + m * ldc + n, K, lda, ldb, ldc);"
                for height in heights
            )
            each = f"for (int64_t m = 0; m < M; m += {block}) {{ {calls} }}"
            body = f"{{ for (int64_t n = 0; n < N; n += {columns}) {each} }}\n"
            return "".join(loops) + self.get_kernel_declaration() + body

    return Kernel


def _loop(name: str, rows: int, columns: int, width: int) -> str:
    """Returns a C++ function for a tile of rows and columns; each sum is a variable, and so a register."""
    vectors = range(columns // width)
    cells = [(row, vector) for row in range(rows) for vector in vectors]
    at = {(row, vector): f"C + {row} * ldc + {vector * width}" for row, vector in cells}
    lines = [
        "template <bool accum>",
        f"inline void {name}(const float* __restrict__ A, const float* __restrict__ B, float* __restrict__ C,",
        "    int64_t K, int64_t lda, int64_t ldb, int64_t ldc) {",
        "    using V = at::vec::Vectorized<float>;",
        *[f"    V c{row}_{vector}(0.0f);" for row, vector in cells],
        "    if constexpr (accum) {",
        *[f"        c{row}_{vector} = V::loadu({at[row, vector]});" for row, vector in cells],
        "    }",
        "    for (int64_t k = 0; k < K; ++k) {",
        *[f"        V b{vector} = V::loadu(B + k * ldb + {vector * width});" for vector in vectors],
    ]
    for row in range(rows):
        lines.append(f"        V a{row}(A[{row} * lda + k]);")
        lines += [f"        c{row}_{v} = at::vec::fmadd(a{row}, b{v}, c{row}_{v});" for v in vectors]
    lines += ["    }", *[f"    c{row}_{vector}.store({at[row, vector]});" for row, vector in cells], "}", ""]
    return "\n".join(lines)
