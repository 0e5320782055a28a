"""The Triton kernels of `small_batch`, in a file of their own: only a torch for CUDA has Triton.

A kernel that starts early (`EARLY`) runs while the previous one ends: it prefetches its weights before it waits for the
previous result. It lets the next kernel start at once, which waits in turn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import early


@triton.jit
def _product(
    x,  # noqa: ANN001
    weight,  # noqa: ANN001
    bias,  # noqa: ANN001
    out,  # noqa: ANN001
    rows,  # noqa: ANN001
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PART: tl.constexpr,
    ROW_TILE: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    LINES: tl.constexpr,
    BIAS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    part = tl.program_id(1)
    row = tl.arange(0, ROW_TILE)
    there = row[:, None] < rows
    depth = part * PART + tl.arange(0, STEP)
    left = x + row[:, None] * DEPTH + depth[None, :]
    right = weight + columns[None, :] * DEPTH + depth[:, None]
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        # Lines of 128 bytes, up to the end of this part.
        line = tl.minimum(tl.arange(0, LINES) * 64, PART - 64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [weight + columns[:, None] * DEPTH + part * PART + line[None, :]],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((ROW_TILE, TILE), dtype=tl.float32)
    for _ in range(PART // STEP):
        total = tl.dot(tl.load(left, mask=there, other=0.0), tl.load(right), total)
        left += STEP
        right += STEP
    if BIAS:
        total += tl.load(bias + columns)[None, :].to(tl.float32)
    tl.store(out + (part * rows + row[:, None]) * COLUMNS + columns[None, :], total, mask=there)


@triton.jit
def _attention(
    query,  # noqa: ANN001
    key,  # noqa: ANN001
    value,  # noqa: ANN001
    out,  # noqa: ANN001
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERY_BATCH: tl.constexpr,
    QUERY_HEAD: tl.constexpr,
    QUERY_ROW: tl.constexpr,
    KEY_BATCH: tl.constexpr,
    KEY_HEAD: tl.constexpr,
    KEY_ROW: tl.constexpr,
    VALUE_BATCH: tl.constexpr,
    VALUE_HEAD: tl.constexpr,
    VALUE_ROW: tl.constexpr,
    CAUSAL: tl.constexpr,
    ROW_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    batch = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    row = tl.program_id(1) * ROW_TILE + tl.arange(0, ROW_TILE)
    at = tl.arange(0, KEY_TILE)
    width = tl.arange(0, WIDTH)
    queries = tl.load(
        query + batch * QUERY_BATCH + head * QUERY_HEAD + row[:, None] * QUERY_ROW + width[None, :],
        mask=row[:, None] < QUERIES,
        other=0.0,
    )
    keys = tl.load(
        key + batch * KEY_BATCH + head * KEY_HEAD + at[None, :] * KEY_ROW + width[:, None],
        mask=at[None, :] < KEYS,
        other=0.0,
    )
    values = tl.load(
        value + batch * VALUE_BATCH + head * VALUE_HEAD + at[:, None] * VALUE_ROW + width[None, :],
        mask=at[:, None] < KEYS,
        other=0.0,
    )
    score = tl.dot(queries, keys) * SCALE
    visible = at[None, :] < KEYS
    if CAUSAL:
        visible = visible & (at[None, :] <= row[:, None])
    score = tl.where(visible, score, float("-inf"))
    share = tl.exp(score - tl.max(score, 1)[:, None])
    result = tl.dot(share.to(values.dtype), values) / tl.sum(share, 1)[:, None]
    # As `[batch, row, head, width]`, the layout that the next product reads.
    place = ((batch * QUERIES + row[:, None]) * HEADS + head) * WIDTH + width[None, :]
    tl.store(out + place, result, mask=row[:, None] < QUERIES)


early.name_outputs({_product.fn: ["out"], _attention.fn: ["out"]})


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, parts: int, tile: int
) -> None:
    (rows, depth), columns, part = x.shape, weight.shape[0], weight.shape[1] // parts
    step = 128 if part % 128 == 0 else 64
    torch.library.wrap_triton(_product)[(columns // tile, parts)](
        x.contiguous(),
        weight,
        weight if bias is None else bias,
        out,
        rows,
        COLUMNS=columns,
        DEPTH=depth,
        PART=part,
        ROW_TILE=max(16, triton.next_power_of_2(rows)),
        TILE=tile,
        STEP=step,
        LINES=triton.next_power_of_2(part // 64),
        BIAS=bias is not None,
        EARLY=early.starts(x),
        num_warps=4,
        # The fastest numbers on an H200 that fit into the shared memory of smaller devices.
        num_stages=4 if step == 128 else 6,
    )


@torch.library.triton_op("precast_kernels::parts_of_product", mutates_args={})
def parts_of_product(x: torch.Tensor, weight: torch.Tensor, parts: int, tile: int) -> torch.Tensor:
    """Returns the parts of the product of `x[M, K]` and `weight[N, K]`, as float32 `[parts, M, N]`."""
    out = torch.empty((parts, x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    _multiply(x, weight, None, out, parts, tile)
    return out


@torch.library.triton_op("precast_kernels::product", mutates_args={})
def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: int) -> torch.Tensor:
    """Returns the product of `x[M, K]` and `weight[N, K]`, plus a bias, in the dtype of both."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    _multiply(x, weight, bias, out, 1, tile)
    return out


@torch.library.triton_op("precast_kernels::attention", mutates_args={})
def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    """Returns the attention of `query[B, H, M, D]` to keys and values `[B, H, N, D]`; a head's keys are one tile."""
    query, key, value = (one if one.stride(-1) == 1 else one.contiguous() for one in (query, key, value))
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    out = torch.empty((batch, queries, heads, width), dtype=query.dtype, device=query.device)
    row_tile = min(64, max(16, triton.next_power_of_2(queries)))
    torch.library.wrap_triton(_attention)[(batch * heads, triton.cdiv(queries, row_tile))](
        query,
        key,
        value,
        out,
        SCALE=scale,
        HEADS=heads,
        QUERIES=queries,
        KEYS=keys,
        WIDTH=width,
        QUERY_BATCH=query.stride(0),
        QUERY_HEAD=query.stride(1),
        QUERY_ROW=query.stride(2),
        KEY_BATCH=key.stride(0),
        KEY_HEAD=key.stride(1),
        KEY_ROW=key.stride(2),
        VALUE_BATCH=value.stride(0),
        VALUE_HEAD=value.stride(1),
        VALUE_ROW=value.stride(2),
        CAUSAL=causal,
        ROW_TILE=row_tile,
        KEY_TILE=max(16, triton.next_power_of_2(keys)),
        EARLY=early.starts(query),
        num_warps=4,
        num_stages=1,
    )
    return out.transpose(1, 2)
