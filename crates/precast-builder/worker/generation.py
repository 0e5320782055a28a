"""Generative models of transformers: a cache in buffers, and a method that makes one token.

`attach` gives a model what `[model] context` asks for: buffers `cache.N.keys` and `cache.N.values`, and the method
`step`. The library's own decomposition of `generate` with a static cache says which layers keep keys and values, and in
which shapes. The masks are the model's own, from the sizes and positions that a cache reports.

Every layer keeps all positions, also one whose attention slides over a window: its mask hides the earlier ones. The
library's cache for such a layer shifts its rows once the window is full, by a count in Python, so that a session could
neither be set back to an earlier position nor be captured for every position.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from . import cut, failures
from .wire import Failure

# The most tokens that a random one is chosen from.
LIKELIEST = 50
# The inputs that `step` gives a model, and flags.
_GIVEN = {"input_ids", "attention_mask", "position_ids", "past_key_values", "cache_position", "use_cache", "return_dict"}
# The inputs of `step`: dtype, shape, range.
INPUTS: dict[str, tuple[str, list[Any], list[Any] | None]] = {
    "ids": ("int64", [1, "seq"], None),
    "at": ("int64", ["seq"], [0, "context"]),
    "temperature": ("float32", [1], None),
    "top_k": ("int64", [1], [1, LIKELIEST + 1]),
    "top_p": ("float32", [1], None),
    "random": ("float32", [1], None),
}
_BY_HAND = "write a module with state of your own: the guide's chapter on state shows one"


class Kept(nn.Module):
    """The keys and values of one layer."""

    def __init__(self, keys: Tensor, values: Tensor, context: int) -> None:
        super().__init__()
        for name, one in (("keys", keys), ("values", values)):
            empty = one.new_zeros(*one.shape[:2], context, one.shape[3])
            self.register_buffer(name, empty, persistent=False)


def is_generative(model: Any) -> bool:
    """Returns whether a model is one of transformers that has `generate`."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.GenerationMixin) and model.can_generate()


def positions(model: Any) -> int | None:
    """Returns how many positions a model has; None where its config names no number."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def sizes(most: int | None) -> dict[str, list[int]]:
    """Returns usual sizes of a call and of the cache, for a model with so many positions."""
    context = sorted({min(size, most or size) for size in (512, 2048)})
    return {"seq": [size for size in (16, 128) if size <= context[0]] or context[:1], "context": context}


def states(model: Any) -> dict[str, list[Any]]:
    """Returns globs of the cache's buffers, with their shapes."""
    found = {name: [*one.shape[:2], "context", one.shape[3]] for name, one in model.cache.named_buffers(prefix="cache")}
    for globs in (["cache.*.*"], ["cache.*.keys", "cache.*.values"]):
        own = [[shape for name, shape in found.items() if cut.matches(glob, name)] for glob in globs]
        if all(shape == shapes[0] for shapes in own for shape in shapes):
            return {glob: shapes[0] for glob, shapes in zip(globs, own, strict=True)}
    return found


def attach(model: Any, entry: str, context: int) -> None:
    """Gives a generative model a cache for `context` tokens, and the method `step`."""
    kind = type(model).__name__
    if not is_generative(model):
        raise Failure(
            "entry_call",
            f"`{entry}` returned a {kind}, and `context` is for generative models of transformers",
            hint="leave `context` out; a module with state of your own needs none",
        )
    most = positions(model)
    if most is not None and context > most:
        raise Failure(
            "entry_call",
            f"`context = {context}` lies beyond the {most} positions of `{kind}`",
            hint=f"write `context = {most}`, and no larger bucket of `context`",
        )
    layers = _layers(model, kind)
    model.add_module("cache", nn.ModuleList(Kept(one.keys, one.values, context) for one in layers))
    model.step = MethodType(step, model)


def _layers(model: Any, kind: str) -> list[Any]:
    """Returns the layers of the static cache that `generate` makes for a model, with keys and values of few tokens."""
    import transformers
    from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

    if model.config.is_encoder_decoder:
        raise Failure("entry_call", f"`{kind}` has an encoder, and `context` is for decoders", hint=_BY_HAND)
    try:
        decompose = importlib.import_module("transformers.exporters.utils").decompose_for_generation
    except (ImportError, AttributeError) as error:
        message = f"transformers {transformers.__version__} can't decompose `generate`: {failures.one_line(error)}"
        raise Failure("entry_call", message, hint="install transformers 5.17 or newer") from error
    config = transformers.GenerationConfig(
        cache_implementation="static", max_cache_len=4, do_sample=False, num_beams=1, disable_compile=True
    )
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        parts = decompose(model, {"input_ids": token}, config)
    except Exception as error:  # the model's code may raise anything
        cause = failures.one_line(error.__cause__ or error)
        message = f"`generate` of `{kind}` fails with a static cache: {cause}"
        raise Failure("entry_call", message, hint=_BY_HAND) from error
    given = parts["decode"][1] if parts.keys() == {"prefill", "decode"} else parts
    other = [name for name, value in given.items() if value is not None and name not in _GIVEN]
    if other:
        names = ", ".join(f"`{name}`" for name in other)
        raise Failure("entry_call", f"`generate` of `{kind}` needs more than tokens: {names}", hint=_BY_HAND)
    layers = getattr(given.get("past_key_values"), "layers", [])
    for index, layer in enumerate(layers):
        if type(layer) not in (StaticLayer, StaticSlidingWindowLayer) or not layer.is_initialized:
            message = f"layer {index} of `{kind}` keeps a `{type(layer).__name__}`, not keys and values by position"
            raise Failure("entry_call", message, hint=_BY_HAND)
    if not layers:
        raise Failure("entry_call", f"`{kind}` supports no static cache", hint=_BY_HAND)
    return list(layers)


def _cache(kept: Any, at: Tensor) -> Any:
    """Returns a cache of transformers over buffers, which writes new keys and values at positions."""
    from transformers.cache_utils import Cache, StaticLayer

    class Layer(StaticLayer):
        def __init__(self, keys: Tensor, values: Tensor) -> None:
            super().__init__(keys.shape[2])
            self.keys, self.values, self.cumulative_length = keys, values, at[0]
            self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

        def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            self.keys.index_copy_(2, at, keys)
            self.values.index_copy_(2, at, values)
            return self.keys, self.values

    return Cache(layers=[Layer(one.keys, one.values) for one in kept])


def step(
    model: Any, ids: Tensor, at: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, random: Tensor
) -> dict[str, Tensor]:
    """Takes tokens `[1, n]` and their positions `[n]`, which follow each other; returns the next token and its logits."""
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    out = model(
        input_ids=ids,
        # Without padding: models that count positions by a mask need one.
        attention_mask=ids.new_ones(1, model.cache[0].keys.shape[2]),
        position_ids=at[None],
        past_key_values=_cache(model.cache, at),
        use_cache=True,
        **last,
    )
    logits = out.logits[:, -1].float()
    return {"token": sample(logits, temperature, top_k, top_p, random), "logits": logits}


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, random: Tensor) -> Tensor:
    """Returns a token by its logits: the likeliest one at temperature 0, else one of those that `top_k` and `top_p`
    allow, by a random number from 0 to 1. Everything is a tensor, so that a step has its sampling in one program."""
    count = min(LIKELIEST, logits.shape[-1])
    values, ids = logits.topk(count)
    weights = (values / temperature.clamp(min=1e-6)).softmax(-1)
    rank = torch.arange(count, device=logits.device)
    allowed = (rank < top_k) & (weights.cumsum(-1) - weights < top_p)
    weights = torch.where(allowed, weights, 0.0)
    chosen = (weights.cumsum(-1) <= random * weights.sum(-1, keepdim=True)).sum(-1, keepdim=True)
    token = ids.gather(-1, chosen.clamp(max=count - 1))
    return torch.where(temperature > 0, token, ids[:, :1])
