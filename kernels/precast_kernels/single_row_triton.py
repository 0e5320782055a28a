"""The Triton kernels of `single_row`, in a file of their own: only a torch for CUDA has Triton.

A kernel that starts early (`EARLY`) runs while the previous one ends, and waits before it reads or writes anything that
another kernel writes. A product reads its first weights before it waits, and lets the next kernel start when all its
weights are read; attention lets it start at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import early

# The most elements of a row that are read at once.
_STEP = 2048
# Keys that one program reads, at least, and keys of a tile. There are at most `_PARTS` programs for a head.
_CHUNK, _KEYS = 64, 64
_PARTS = 32


@triton.jit
def _row_product(
    x,  # noqa: ANN001
    norm,  # noqa: ANN001
    weight,  # noqa: ANN001
    gate,  # noqa: ANN001
    bias,  # noqa: ANN001
    residual,  # noqa: ANN001
    out,  # noqa: ANN001
    EPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = columns < COLUMNS
    rows = columns.to(tl.int64)[:, None] * DEPTH
    dtype = out.dtype.element_ty
    if EARLY:
        begin = tl.arange(0, STEP)
        there = inside[:, None] & (begin < DEPTH)[None, :]
        first = tl.load(weight + rows + begin[None, :], mask=there, other=0.0)
        if GATE:
            first_gate = tl.load(gate + rows + begin[None, :], mask=there, other=0.0)
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((TILE, STEP), dtype=tl.float32)
    gated = tl.zeros((TILE, STEP), dtype=tl.float32)
    squares = tl.zeros((STEP,), dtype=tl.float32)
    for index in tl.static_range(0, (DEPTH + STEP - 1) // STEP):
        depth = index * STEP + tl.arange(0, STEP)
        within = depth < DEPTH
        there = inside[:, None] & within[None, :]
        if EARLY and index == 0:
            factors = first.to(tl.float32)
        else:
            factors = tl.load(weight + rows + depth[None, :], mask=there, other=0.0).to(tl.float32)
        part = tl.load(x + depth, mask=within, other=0.0).to(tl.float32)
        if NORM:
            squares += part * part
            part *= tl.load(norm + depth, mask=within, other=0.0).to(tl.float32)
        total += factors * part[None, :]
        if GATE:
            if EARLY and index == 0:
                factors = first_gate.to(tl.float32)
            else:
                factors = tl.load(gate + rows + depth[None, :], mask=there, other=0.0).to(tl.float32)
            gated += factors * part[None, :]
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    scale = 1.0
    if NORM:
        # The product is linear in the row, so that no weight has to wait for its root mean square.
        scale = tl.rsqrt(tl.sum(squares) / DEPTH + EPS)
    result = tl.sum(total, 1) * scale
    if BIAS:
        result += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    result = result.to(dtype).to(tl.float32)
    if GATE:
        opened = (tl.sum(gated, 1) * scale).to(dtype).to(tl.float32)
        result *= (opened / (1.0 + tl.exp(-opened))).to(dtype).to(tl.float32)
    if RESIDUAL:
        result += tl.load(residual + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + columns, result, mask=inside)


@triton.jit
def _attend_part(
    query,  # noqa: ANN001
    key,  # noqa: ANN001
    value,  # noqa: ANN001
    mask,  # noqa: ANN001
    out,  # noqa: ANN001
    best,  # noqa: ANN001
    share,  # noqa: ANN001
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERY_BATCH: tl.constexpr,
    QUERY_HEAD: tl.constexpr,
    KEY_BATCH: tl.constexpr,
    KEY_HEAD: tl.constexpr,
    KEY_ROW: tl.constexpr,
    VALUE_BATCH: tl.constexpr,
    VALUE_HEAD: tl.constexpr,
    VALUE_ROW: tl.constexpr,
    MASK_BATCH: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    batch = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    part = tl.program_id(1)
    row = tl.arange(0, GROUP_TILE)
    width = tl.arange(0, WIDTH)
    there = row[:, None] < GROUP
    place = query + batch * QUERY_BATCH + (head * GROUP + row[:, None]) * QUERY_HEAD + width[None, :]
    queries = tl.load(place, mask=there, other=0.0)
    high = tl.full((GROUP_TILE,), float("-inf"), dtype=tl.float32)
    sums = tl.zeros((GROUP_TILE,), dtype=tl.float32)
    total = tl.zeros((GROUP_TILE, WIDTH), dtype=tl.float32)
    for start in range(0, CHUNK, TILE):
        at = part * CHUNK + start + tl.arange(0, TILE)
        seen = tl.load(mask + batch * MASK_BATCH + at, mask=at < KEYS, other=float("-inf")).to(tl.float32)
        # Keys that no query sees are not read: the part of a cache that is not filled.
        visible = seen > float("-inf")
        if tl.max(seen, 0) > float("-inf"):
            keys = tl.load(
                key + batch * KEY_BATCH + head * KEY_HEAD + at[None, :] * KEY_ROW + width[:, None],
                mask=visible[None, :],
                other=0.0,
            )
            values = tl.load(
                value + batch * VALUE_BATCH + head * VALUE_HEAD + at[:, None] * VALUE_ROW + width[None, :],
                mask=visible[:, None],
                other=0.0,
            )
            score = tl.dot(queries, keys) * SCALE + seen[None, :]
            now = tl.maximum(high, tl.max(score, 1))
            shares = tl.exp(score - now[:, None])
            before = tl.exp(high - now)
            sums = sums * before + tl.sum(shares, 1)
            total = total * before[:, None] + tl.dot(shares.to(values.dtype), values)
            high = now
    heads = (batch * HEADS + head) * GROUP + row
    tl.store(best + heads * PARTS + part, high, mask=row < GROUP)
    tl.store(share + heads * PARTS + part, sums, mask=row < GROUP)
    tl.store(out + (heads[:, None] * PARTS + part) * WIDTH + width[None, :], total, mask=there)


@triton.jit
def _attend_whole(
    part,  # noqa: ANN001
    best,  # noqa: ANN001
    share,  # noqa: ANN001
    out,  # noqa: ANN001
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PART_TILE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0)
    at = tl.arange(0, PART_TILE)
    width = tl.arange(0, WIDTH)
    high = tl.load(best + head * PARTS + at, mask=at < PARTS, other=float("-inf"))
    sums = tl.load(share + head * PARTS + at, mask=at < PARTS, other=0.0)
    parts = tl.load(part + (head * PARTS + at[:, None]) * WIDTH + width[None, :], mask=at[:, None] < PARTS, other=0.0)
    factor = tl.exp(high - tl.max(high, 0))
    result = tl.sum(parts * factor[:, None], 0) / tl.sum(sums * factor, 0)
    tl.store(out + head * WIDTH + width, result)


early.name_outputs(
    {_row_product.fn: ["out"], _attend_part.fn: ["out", "best", "share"], _attend_whole.fn: ["out"]},
)


@torch.library.triton_op("precast_kernels::row_product", mutates_args={})
def row_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None,
    eps: float,
    gate: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """Returns the product of one row `x[K]` and `weight[N, K]`.

    With `norm` the row is divided by its root mean square and multiplied by `norm` before; with `gate` the product is
    multiplied by `silu` of the product with `gate`; `bias` and `residual` are added.
    """
    columns, depth = weight.shape
    out = torch.empty((columns,), dtype=x.dtype, device=x.device)
    # The fastest of those tried on an H100: a long row is for more columns.
    tile = 4 if depth > columns else 2
    torch.library.wrap_triton(_row_product)[(triton.cdiv(columns, tile),)](
        x.contiguous(),
        x if norm is None else norm,
        weight,
        weight if gate is None else gate,
        weight if bias is None else bias,
        x if residual is None else residual.contiguous(),
        out,
        EPS=eps,
        COLUMNS=columns,
        DEPTH=depth,
        TILE=tile,
        STEP=min(_STEP, triton.next_power_of_2(depth)),
        NORM=norm is not None,
        GATE=gate is not None,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        EARLY=early.starts(x),
        num_warps=4 if gate is None else 8,
        num_stages=1,
    )
    return out


@torch.library.triton_op("precast_kernels::cached_attention", mutates_args={})
def cached_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Returns the attention of one query for each head, `[B, H, 1, D]`, to keys and values `[B, H / G, N, D]`.

    The mask `[B or 1, N]` is added to all scores. Keys that it hides from all, by -inf, are not read.
    """
    query, key, value = (one if one.stride(-1) == 1 else one.contiguous() for one in (query, key, value))
    batch, heads, _, width = query.shape
    kept, keys = key.shape[1:3]
    chunk = max(_CHUNK, triton.cdiv(triton.cdiv(keys, _PARTS), _KEYS) * _KEYS)
    parts = triton.cdiv(keys, chunk)
    part = torch.empty((batch * heads, parts, width), dtype=torch.float32, device=query.device)
    best = torch.empty((batch * heads, parts), dtype=torch.float32, device=query.device)
    share = torch.empty((batch * heads, parts), dtype=torch.float32, device=query.device)
    torch.library.wrap_triton(_attend_part)[(batch * kept, parts)](
        query,
        key,
        value,
        mask,
        part,
        best,
        share,
        SCALE=scale,
        HEADS=kept,
        GROUP=heads // kept,
        KEYS=keys,
        WIDTH=width,
        QUERY_BATCH=query.stride(0),
        QUERY_HEAD=query.stride(1),
        KEY_BATCH=key.stride(0),
        KEY_HEAD=key.stride(1),
        KEY_ROW=key.stride(2),
        VALUE_BATCH=value.stride(0),
        VALUE_HEAD=value.stride(1),
        VALUE_ROW=value.stride(2),
        MASK_BATCH=0 if mask.shape[0] == 1 else mask.stride(0),
        CHUNK=chunk,
        PARTS=parts,
        GROUP_TILE=max(16, triton.next_power_of_2(heads // kept)),
        TILE=_KEYS,
        EARLY=early.starts(query),
        num_warps=4,
        num_stages=1,
    )
    out = torch.empty((batch * heads, width), dtype=query.dtype, device=query.device)
    torch.library.wrap_triton(_attend_whole)[(batch * heads,)](
        part,
        best,
        share,
        out,
        PARTS=parts,
        WIDTH=width,
        PART_TILE=triton.next_power_of_2(parts),
        EARLY=early.starts(query),
        num_warps=1,
        num_stages=1,
    )
    return out.view(batch, heads, 1, width)
