"""The rule of each operator over a padded axis: the table of `padding_graph`.

| operators | harmless content of the padding |
|---|---|
| `sum`, norms, matrix products (one factor), `any`, `scatter_add` | 0 |
| `prod`; `all` | 1; true |
| `amax`, `argmax`, `topk`, `sort` descending | the lowest value of the dtype, or of the operand: 0 after a `relu` |
| `amin`, `argmin`, `kthvalue`, `sort` | the highest value |
| `softmax`, `logsumexp`, attention (in its mask) | -1000 or less |
| `mean`, `var`, `median`, norms of layers and groups, adaptive pools, losses | no value: they count positions |
| convolutions, pools | their own fill value; anything where they don't pad: a valid result sees valid values only |
| `cumsum` and the like | anything, as the padding comes last; after a `flip` as a reduction |
| `select` and `slice` from the end, `roll`, RNNs in two directions, their last state | no value |
| elementwise operators, views, `cat`, `pad`, `embedding` | anything: see `padding_moves` |
| all others | not known: the samples decide |
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from ..torch_private import overloads
from .padding_moves import MOVES, RULES, SHIFTS, axes_of, elementwise, for_each, rank_of
from .padding_walk import LOST, OTHER, UNKNOWN, Content, Mark, Marked, Walk, constant

# Operators that count positions: no content is right.
_COUNTS = ("mean", "nanmean", "var", "std", "var_mean", "std_mean", "median", "nanmedian", "mode", "quantile")
_COUNTS += ("nanquantile", "aminmax", "renorm", "fft_fft", "fft_ifft", "fft_rfft", "fft_irfft")
_ZERO = ("sum", "nansum", "norm", "linalg_vector_norm", "linalg_norm", "count_nonzero", "any", "cosine_similarity")
_LOW, _HIGH = ("amax", "max", "argmax", "topk"), ("amin", "min", "argmin", "kthvalue")
_POSITIONS = ("argmax", "argmin")
_SOFT = ("softmax", "log_softmax", "_softmax", "_log_softmax", "special_softmax", "_safe_softmax")
_CUMULATIVE = {"cumsum": "0", "cumprod": "1", "cummax": "low", "cummin": "high", "logcumsumexp": "soft"}
_NORMS = ("layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm")
# Norms of all axes but the first ones.
_SPATIAL = {"instance_norm": 2, "group_norm": 1, "native_group_norm": 1}
_LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy", "nll_loss", "dist")
_LOSSES += ("binary_cross_entropy_with_logits", "cross_entropy_loss", "nll_loss_nd", "soft_margin_loss")
# A letter for each axis of two factors and of the result.
_LETTERS = {"mm": "mk kn mn", "addmm": "mk kn mn", "bmm": "bmk bkn bmn", "baddbmm": "bmk bkn bmn", "mv": "mk k m"}
_LETTERS |= {"dot": "k k -", "vdot": "k k -", "outer": "m n mn"}
_PRODUCTS = ("linear", "matmul", "einsum", *_LETTERS)
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution")
_CONVOLUTIONS += ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_SCATTERS = ("scatter", "scatter_add", "scatter_reduce", "index_add", "index_reduce", "index_copy")


def apply(walk: Walk, node: Any) -> Any:
    """Returns the marks of an operator's result, or the list of those of its results; notes leaks."""
    if node.target is operator.getitem:
        marked = walk.marked.get(node.args[0], Marked())
        return marked[node.args[1]] if isinstance(marked, list) else marked
    name = overloads.name_of(node.target)
    if not overloads.is_overload(node.target) or node.target.namespace != "aten":
        return LOST
    rule = _RULES.get(name) or RULES.get(name)
    if rule is None and overloads.is_elementwise(node.target):
        rule = elementwise
    return (rule or _other)(walk, node)


def _other(walk: Walk, node: Any) -> Any:
    name = overloads.name_of(node.target)
    if name.startswith(("upsample_nearest", "_upsample_nearest")):
        return walk.of(node.args[0]).each(lambda mark: Mark(mark.content, at_end=mark.plain))
    if name.startswith(("avg_pool", "max_pool")):
        return _pool(walk, node)
    mixes = ("reflection_pad", "replication_pad", "upsample_", "_upsample_", "adaptive_", "_adaptive_")
    if name.startswith(mixes):
        first = rank_of(node.args[0]) - _planes(name)
        over = [mark for axis, mark in walk.of(node.args[0]).axes.items() if axis >= first]
        if over:
            return walk.leak(node, over[0].content, "")
    return LOST


def _planes(name: str) -> int:
    """Returns the number of an operator's spatial axes, which its name has."""
    return int(next(letter for letter in name if letter.isdigit()))


# Reductions


def _span(walk: Walk, node: Any) -> tuple[float, float]:
    """Returns bounds of a tensor's values."""
    dtype = node.meta["val"].dtype
    if dtype == torch.bool:
        return 0, 1
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    whole = (float(limits.min), float(limits.max))
    while node.op == "call_function":
        name = overloads.name_of(node.target)
        if name in ("relu", "abs", "square", "exp", "softplus", "relu_", "linalg_vector_norm", "norm"):
            return 0, whole[1]
        if name in ("sigmoid", "softmax", "_softmax", "hardsigmoid"):
            return 0, 1
        if name not in MOVES | SHIFTS:
            return whole
        node = node.args[0]
    low, end = walk.bounds.get(node) or (whole[0], whole[1] + 1)
    return float(low), float(end) - 1


def _needs(walk: Walk, node: Any, name: str, kind: str) -> tuple[Callable[[Content], bool], str]:
    """Returns a test of a content for the identity of a reduction, and the identity in words."""
    dtype = node.args[0].meta["val"].dtype
    if kind in ("low", "high"):
        low, high = _span(walk, node.args[0])
        sign = -1 if kind == "low" else 1
        bound = low if kind == "low" else high
        if name in _POSITIONS and dtype.is_floating_point:
            # Of equal values the position is open.
            bound = sign * torch.finfo(dtype).max
        words = f"{'-' if kind == 'low' else ''}inf" if dtype.is_floating_point else f"{bound:g}"
        return lambda content: content.kind in ("constant", "far") and content.value * sign >= bound * sign, words
    if kind == "soft":
        return lambda content: content.is_far(-1), "-inf"
    if kind == "true":
        return lambda content: content.kind == "constant" and content.value != 0, "true"
    return lambda content: content == constant(float(kind)), kind


def _reduction(kind: str) -> Callable[[Walk, Any], Any]:
    """Returns the rule of a reduction; `kind` is its identity, empty if it has none."""

    def rule(walk: Walk, node: Any) -> Any:
        name = overloads.name_of(node.target)
        if name in ("max", "min") and len(node.args) > 1 and hasattr(node.args[1], "meta"):
            return elementwise(walk, node)
        wanted = kind
        if name == "topk" and overloads.argument(node, "largest") is False:
            wanted = "high"
        if name in ("norm", "linalg_vector_norm", "linalg_norm"):
            order = overloads.argument(node, "p" if name == "norm" else "ord")
            wanted = "" if isinstance(order, int | float) and order < 0 else wanted
        axes, marked = axes_of(node), walk.of(node.args[0])
        held = node.meta["val"]
        keeps = (held[0] if isinstance(held, list | tuple) else held).dim() == rank_of(node.args[0])
        over = {axis: mark for axis, mark in marked.axes.items() if axis in axes}
        if over and (leaking := _first_leak(walk, node, name, wanted, over)) is not None:
            return for_each(node, walk.leak(node, *leaking))
        kept = {}
        for axis, mark in marked.axes.items():
            if axis not in axes:
                place = axis if keeps else axis - sum(other < axis for other in axes)
                kept[place] = mark.of(_over_others(mark.content, wanted, name) if not over else UNKNOWN)
        return for_each(node, Marked(kept, marked.lost))

    return rule


def _first_leak(walk: Walk, node: Any, name: str, kind: str, over: dict[int, Mark]) -> tuple[Content, str] | None:
    contents = [mark.content for mark in over.values()]
    if not kind:
        return contents[0], ""
    fits, words = _needs(walk, node, name, kind)
    for content in contents:
        if content != UNKNOWN and not fits(content):
            return content, words
    # Where both axes are padded, the content of neither is known.
    return (OTHER, words) if len(contents) > 1 and UNKNOWN not in contents else None


def _over_others(content: Content, kind: str, name: str) -> Content:
    """Returns the content of a reduction over axes that are not padded."""
    if content.kind != "constant" or name in _POSITIONS:
        return content.computed()
    same = kind in ("low", "high", "true") or name in ("mean", "any", "median")
    return content if same or (kind in ("0", "1") and content == constant(float(kind))) else OTHER


def _softmax(walk: Walk, node: Any) -> Marked:
    axis, marked = axes_of(node)[0], walk.of(node.args[0])
    found = marked.each(Mark.computed)
    if axis in marked.axes:
        content = marked.axes[axis].content
        if content != UNKNOWN and not content.is_far(-1):
            return walk.leak(node, content, "-inf")
        zero = content != UNKNOWN and "log" not in overloads.name_of(node.target)
        found.axes[axis] = marked.axes[axis].of(constant(0) if zero else UNKNOWN)
    return found


def _sort(walk: Walk, node: Any) -> Any:
    axis, marked = axes_of(node)[0], walk.of(node.args[0])
    name, held = overloads.name_of(node.target), node.meta["val"]
    results = len(held) if isinstance(held, list | tuple) else 1
    if axis in marked.axes:
        fits, words = _needs(walk, node, name, "low" if overloads.argument(node, "descending") else "high")
        content = marked.axes[axis].content
        if content != UNKNOWN and not fits(content):
            marked = walk.leak(node, content, words)
    if results > 1:
        return [marked, *[marked.each(lambda mark: mark.of(OTHER))] * (results - 1)]
    return marked if name == "msort" else LOST


def _cumulative(walk: Walk, node: Any) -> Any:
    axis, marked = axes_of(node)[0], walk.of(node.args[0])
    name = overloads.name_of(node.target)
    mark = marked.axes.get(axis)
    if mark is not None and not mark.plain and mark.content != UNKNOWN and mark.at_end:
        fits, words = _needs(walk, node, name, _CUMULATIVE[name])
        if not fits(mark.content):
            walk.leak(node, mark.content, words)
    return for_each(node, marked.each(Mark.computed))


def _counted(first: Callable[[Any], Any]) -> Callable[[Walk, Any], Any]:
    """Returns the rule of operators that count the positions of some axes and keep the shape."""

    def rule(walk: Walk, node: Any) -> Any:
        marked, axes = walk.of(node.args[0]), first(node)
        over = [mark for axis, mark in marked.axes.items() if axis in axes]
        if over:
            marked = walk.leak(node, over[0].content, "")
        return for_each(node, marked.each(Mark.computed))

    return rule


def _last(node: Any) -> Any:
    rank = rank_of(node.args[0])
    return range(rank - len(overloads.argument(node, "normalized_shape")), rank)


def _loss(walk: Walk, node: Any) -> Marked:
    if node.meta["val"].dim() == 0:
        for value in node.all_input_nodes:
            for mark in walk.of(value).axes.values():
                return walk.leak(node, mark.content, "")
    return LOST


# Products, attention, convolutions, RNNs


def _equation(node: Any) -> tuple[list[Any], list[str], str] | None:
    """Returns the factors of a product, a letter for each of their axes, and the letters of the result."""
    name = overloads.name_of(node.target)
    if name == "einsum":
        text = node.args[0].replace(" ", "")
        factors = node.args[1]
        if "..." in text or "->" not in text:
            return None
        terms, out = text.split("->")
        return list(factors), terms.split(","), out
    factors = [one for one in node.args if hasattr(one, "meta")]
    if name in ("addmm", "baddbmm"):
        factors = factors[1:3]
    if name in _LETTERS:
        first, second, out = _LETTERS[name].split()
        return factors[:2], [first, second], out.strip("-")
    one, two = rank_of(factors[0]), rank_of(factors[1])
    batch = "abcdefgh"[: max(one, two, 2) - 2]
    if name == "linear":
        rows = "abcdefgh"[: one - 1]
        return factors[:2], [f"{rows}k", "nk"[-two:]], rows + ("n" if two == 2 else "")
    left = "k" if one == 1 else batch[len(batch) - one + 2 :] + "mk"
    right = "k" if two == 1 else batch[len(batch) - two + 2 :] + "kn"
    return factors[:2], [left, right], batch + ("m" if one > 1 else "") + ("n" if two > 1 else "")


def _product(walk: Walk, node: Any) -> Marked:
    equation = _equation(node)
    if equation is None or any(len(set(term)) != len(term) for term in equation[1]):
        return LOST
    factors, terms, out = equation
    # A bias is added to all rows.
    added = len([one for one in node.args if hasattr(one, "meta")]) > len(factors)
    places = [dict(zip(term, range(len(term)), strict=True)) for term in terms]
    marks: dict[str, Mark] = {}
    lost = any(walk.of(factor).lost for factor in factors)
    for factor, place in zip(factors, places, strict=True):
        for letter, axis in place.items():
            if axis in walk.of(factor).axes:
                marks.setdefault(letter, walk.of(factor).axes[axis])
    axes = {}
    for letter, mark in marks.items():
        contents, causal = [], None
        for factor, place in zip(factors, places, strict=True):
            if letter not in place:
                continue
            axis, shape = place[letter], factor.meta["val"].shape
            if factor in walk.static:
                # The rows of a square constant are positions of the same dimension, as in a causal mean.
                square = [other for other in range(len(shape)) if other != axis and shape[other] == shape[axis]]
                contents.append(walk.beyond(factor, axis, square) if shape[axis] > 1 else OTHER)
                causal = next((key for key, other in place.items() if other in square), None)
            else:
                contents.append(walk.content(factor, axis, len(shape)))
        zero = constant(0) in contents or (_all_known(contents) and math.prod(one.value for one in contents) == 0)
        content = constant(0) if zero else UNKNOWN if UNKNOWN in contents or lost else OTHER
        if letter in out:
            axes[out.index(letter)] = mark.of(OTHER if added and content != UNKNOWN else content)
        elif content == OTHER:
            return walk.leak(node, next((one for one in contents if one != OTHER), OTHER), "0")
        elif causal is not None and causal in out:
            axes.setdefault(out.index(causal), Mark(OTHER))
    return Marked(axes, lost)


def _all_known(contents: list[Content]) -> bool:
    return bool(contents) and all(content.kind == "constant" for content in contents)


def _attention(walk: Walk, node: Any) -> Marked:
    query, key, value = node.args[:3]
    mask, causal = overloads.argument(node, "attn_mask"), overloads.argument(node, "is_causal")
    rank = rank_of(query)
    more = node.meta["val"].dim() - rank
    axes = {axis + more: mark.computed() for axis, mark in walk.of(query).axes.items()}
    keys = walk.of(key).axes.get(rank_of(key) - 2) or walk.of(value).axes.get(rank_of(value) - 2)
    if keys is not None and not (causal and rank - 2 in walk.of(query).axes):
        content = keys.content if mask is None else None
        if mask is not None:
            others = [rank - 2] if rank - 2 in walk.of(query).axes else []
            found = walk.content(mask, rank - 1, rank, others)
            boolean = str(mask.meta["val"].dtype) == "torch.bool"
            masked = found == constant(0) if boolean else found.is_far(-1)
            content = None if masked or found == UNKNOWN else found
        if content is not None and content != UNKNOWN:
            return walk.leak(node, content, "false in its mask" if mask is None or boolean else "-inf in its mask")
    for width in (walk.of(query).axes.get(rank - 1), walk.of(key).axes.get(rank_of(key) - 1)):
        if width is not None and width.content not in (UNKNOWN, constant(0)):
            return walk.leak(node, width.content, "0")
    return Marked(axes, any(walk.of(one).lost for one in (query, key, value)))


def _convolution(walk: Walk, node: Any) -> Marked:
    marked, weight = walk.of(node.args[0]), node.args[1].meta["val"]
    planes, name = weight.dim() - 2, overloads.name_of(node.target)
    first = rank_of(node.args[0]) - planes
    transposed = "transpose" in name or overloads.argument(node, "transposed") is True
    biased = overloads.argument(node, "bias") is not None

    def of(argument: str, plane: int) -> Any:
        given = overloads.argument(node, argument)
        return given[min(plane, len(given) - 1)] if isinstance(given, list | tuple) else given

    axes = {}
    for axis, mark in marked.axes.items():
        plane, content = axis - first, mark.content
        harmless = content in (UNKNOWN, constant(0))
        result = content if content == constant(0) and not biased else content.computed()
        if axis == first - 1:
            if not harmless:
                return walk.leak(node, content, "0")
            continue
        if axis < first:
            axes[axis] = mark.of(result)
            continue
        width, padding = weight.shape[2 + plane], of("padding", plane)
        pads = width > 1 and padding not in (0, "valid")
        if (pads or transposed or not mark.plain) and width > 1 and not harmless:
            return walk.leak(node, content, "0")
        # The valid values next to the padding spread into it.
        axes[axis] = Mark(result if width == 1 else content.computed(), at_end=mark.plain)
    return Marked(axes, marked.lost)


def _pool(walk: Walk, node: Any) -> Any:
    name, marked = overloads.name_of(node.target), walk.of(node.args[0])
    first = rank_of(node.args[0]) - _planes(name)
    average = name.startswith("avg")
    padding, ceil = overloads.argument(node, "padding"), overloads.argument(node, "ceil_mode")
    axes = {}
    for axis, mark in marked.axes.items():
        plane, content = axis - first, mark.content
        if plane < 0:
            axes[axis] = mark
            continue
        pads = padding[min(plane, len(padding) - 1)] if isinstance(padding, list | tuple) and padding else padding or 0
        fits, words = _needs(walk, node, name, "0" if average else "low")
        counts = average and overloads.argument(node, "count_include_pad") is False
        wrong = (pads and (counts or not fits(content))) or (ceil and (average or not fits(content)))
        if (wrong or not mark.plain) and content != UNKNOWN:
            return for_each(node, walk.leak(node, content, "" if counts or (ceil and average) else words))
        axes[axis] = mark.computed()
    return for_each(node, Marked(axes, marked.lost))


def _recurrent(walk: Walk, node: Any) -> Any:
    marked, rank = walk.of(node.args[0]), rank_of(node.args[0])
    steps = 1 if overloads.argument(node, "batch_first") and rank == 3 else 0
    mark = marked.axes.get(steps)
    if mark is not None and mark.content != UNKNOWN:
        states = [user for user in node.users if user.target is operator.getitem and user.args[1] > 0]
        if overloads.argument(node, "bidirectional") or any(user.users for user in states) or not mark.plain:
            return for_each(node, walk.leak(node, mark.content, ""))
    return [marked.each(lambda one: one.of(OTHER)), *for_each(node, LOST)[1:]]


def _scatter(walk: Walk, node: Any) -> Marked:
    """A sum into places that an index names: the padded rows are added too."""
    axis, name, index = axes_of(node)[0], overloads.name_of(node.target), overloads.argument(node, "index")
    source = overloads.argument(node, "source" if name.startswith("index") else "src")
    mark = walk.of(source).axes.get(axis)
    along = walk.of(index).axes.get(0 if name.startswith("index") else axis)
    if mark is None and along is not None:
        mark = along.of(OTHER)
    sums = name in ("scatter_add", "index_add")
    if mark is not None and mark.content != UNKNOWN and not (sums and mark.content == constant(0)):
        return walk.leak(node, mark.content, "0" if sums else "")
    return walk.of(node.args[0]).each(lambda one: one.of(UNKNOWN))


def _training(node: Any) -> list[int]:
    trains = overloads.argument(node, "training")
    return [axis for axis in range(rank_of(node.args[0])) if axis != 1] if trains else []


_RULES: dict[str, Callable[[Walk, Any], Any]] = {
    **dict.fromkeys(_COUNTS, _reduction("")),
    **dict.fromkeys(_ZERO, _reduction("0")),
    **dict.fromkeys(_LOW, _reduction("low")),
    **dict.fromkeys(_HIGH, _reduction("high")),
    "prod": _reduction("1"),
    "all": _reduction("true"),
    "logsumexp": _reduction("soft"),
    **dict.fromkeys(_SOFT, _softmax),
    **dict.fromkeys(("sort", "argsort", "msort"), _sort),
    **dict.fromkeys(_CUMULATIVE, _cumulative),
    **dict.fromkeys(_NORMS, _counted(_last)),
    **{
        name: _counted(lambda node, first=first: range(first, rank_of(node.args[0])))
        for name, first in _SPATIAL.items()
    },
    "batch_norm": _counted(_training),
    "roll": _counted(lambda node: axes_of(node, "dims")),
    **dict.fromkeys(_LOSSES, _loss),
    **dict.fromkeys(_PRODUCTS, _product),
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    **dict.fromkeys(_SCATTERS, _scatter),
}
