"""Graph passes with kernels of their own, for `passes` of a Precast spec and for `precast build --tune`.

| pass | device | does |
|---|---|---|
| `fuse` | both | `fused_linear`, `small_products` and `conv_epilogues`, each where it applies |
| `fused_linear` | both | one product in place of several with the same rows, with prepacked weights |
| `small_products` | CPU | small products with weights as the artifact's own code |
| `conv_epilogues` | CUDA | batch norms in filters, filters channels last, bias, addition and ReLU in cuDNN's kernel |
| `split_k` | CUDA | small-batch GEMM: products of at most 64 rows, with the sum split over the device |
| `single_tile_attention` | CUDA | attention to at most 128 keys, in one kernel |
| `decode` | CUDA | products of one row with the operations beside them, and attention of one query to a cache |
"""

from __future__ import annotations

from typing import Any

from .convolutions import ConvEpilogues
from .linear import FusedLinear
from .products import SmallProducts
from .single_row import Decode
from .small_batch import SingleTileAttention, SplitK


class Fuse:
    """The passes that help without measurements, each at its own stage."""

    _passes = (FusedLinear(), SmallProducts(), ConvEpilogues())

    def segment(self, module: Any, context: Any) -> None:
        """Fused linear, and batch norms multiplied into filters."""
        self._run("segment", module, context)

    def post_grad_pre(self, module: Any, context: Any) -> None:
        """Small products."""
        self._run("post_grad_pre", module, context)

    def post_grad_post(self, module: Any, context: Any) -> None:
        """Filters channels last, and fused epilogues of convolutions."""
        self._run("post_grad_post", module, context)

    def _run(self, stage: str, module: Any, context: Any) -> None:
        for one in self._passes:
            method = getattr(one, stage, None)
            if method is not None:
                method(module, context)


fuse = Fuse()
fused_linear = FusedLinear()
small_products = SmallProducts()
conv_epilogues = ConvEpilogues()
split_k = SplitK()
single_tile_attention = SingleTileAttention()
decode = Decode()
