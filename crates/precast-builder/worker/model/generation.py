"""Generative models of transformers: a cache in buffers, and a method that makes one token.

`attach` gives a model the buffers `cache.N.keys` and `cache.N.values` and the method `step`, for `[model] context`. A
model with an encoder also gets `cross.N.keys`, `cross.N.values` and the method `encode`. The library's own
decomposition of `generate` with a static cache lists the layers that keep keys and values, with their shapes. The masks
are the model's own, from the sizes and positions that a cache reports.

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

from .. import failures, globs
from ..wire import Failure

# The most tokens that a random one is chosen from.
LIKELIEST = 50
# The tokens that an encoder takes where its config names no number.
SOURCE = 512
# The inputs that a step gives a model, and flags.
_GIVEN = {"input_ids", "decoder_input_ids", "attention_mask", "position_ids", "encoder_outputs", "past_key_values"}
_GIVEN |= {"cache_position", "use_cache", "return_dict"}
_BY_HAND = "write a module with state of your own: the guide's chapter on state shows one"

# The values of a greedy step.
GREEDY: dict[str, float | int] = {"temperature": 0.0, "top_k": 1, "top_p": 1.0, "random": 0.0}
# Name -> dtype, sizes and dimensions, range.
Inputs = dict[str, tuple[str, list[Any], list[Any] | None]]
_STEP: Inputs = {
    "ids": ("int64", [1, "seq"], None),
    "at": ("int64", ["seq"], [0, "context"]),
    "temperature": ("float32", [1], None),
    "top_k": ("int64", [1], [1, LIKELIEST + 1]),
    "top_p": ("float32", [1], None),
    "random": ("float32", [1], None),
}


class Kept(nn.Module):
    """The keys and values of one layer."""

    def __init__(self, keys: Tensor, values: Tensor, length: int) -> None:
        super().__init__()
        for name, one in (("keys", keys), ("values", values)):
            empty = one.new_zeros(*one.shape[:2], length, one.shape[3])
            self.register_buffer(name, empty, persistent=False)


def is_generative(model: Any) -> bool:
    """Returns whether a model is one of transformers that has `generate`."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.GenerationMixin) and model.can_generate()


def positions(model: Any) -> int | None:
    """Returns how many positions a model has; None where its config names no number."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "max_target_positions", None) or getattr(config, "max_position_embeddings", None)


def sizes(model: Any) -> dict[str, list[int]]:
    """Returns usual sizes of a call and of the cache. The prompt of a model with an encoder has few tokens."""
    most = positions(model)
    context = sorted({min(size, most or size) for size in (512, 2048)})
    usual = (4,) if model.config.is_encoder_decoder else (16, 128)
    return {"seq": [size for size in usual if size <= context[0]] or context[:1], "context": context}


def modules(model: Any) -> dict[str, tuple[str, Inputs]]:
    """Returns the modules of a model that has a cache: name -> method and inputs."""
    one = {
        name: (dtype, [1 if axis == "seq" else axis for axis in axes], span)
        for name, (dtype, axes, span) in _STEP.items()
    }
    steps = {"prefill": ("step", _STEP), "decode": ("step", one)}
    return {"encode": ("encode", _source(model)), **steps} if model.config.is_encoder_decoder else steps


def _source(model: Any) -> Inputs:
    """Returns the inputs of a model's encoder: features of a fixed size, or tokens and which of them are valid."""
    config, kind = model.config, type(model).__name__
    if model.main_input_name == "input_features" and hasattr(config, "max_source_positions"):
        # The encoder halves the frames.
        return {"source": ("float32", [1, config.num_mel_bins, 2 * config.max_source_positions], None)}
    if model.main_input_name != "input_ids":
        message = f"the encoder of `{kind}` takes `{model.main_input_name}`, neither tokens nor features of sound"
        raise Failure("entry_call", message, hint=_BY_HAND)
    length = min(SOURCE, getattr(config, "max_position_embeddings", None) or SOURCE)
    return {"source": ("int64", [1, length], None), "mask": ("int64", [1, length], [0, 2])}


def states(model: Any) -> dict[str, list[Any]]:
    """Returns globs of the buffers of caches, with their shapes."""
    shapes = {}
    for cache, length in (("cache", "context"), ("cross", None)):
        kept = getattr(model, cache, None)
        found = dict(kept.named_buffers(prefix=cache)) if kept is not None else {}
        own = {name: [*one.shape[:2], length or one.shape[2], one.shape[3]] for name, one in found.items()}
        shapes |= _by_glob(cache, own)
    padded = getattr(model, "padded", None)
    return shapes if padded is None else {**shapes, "padded": list(padded.shape)}


def _by_glob(cache: str, found: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Returns the shapes of buffers by as few globs as name them all."""
    for patterns in ([f"{cache}.*.*"], [f"{cache}.*.keys", f"{cache}.*.values"]):
        own = [[shape for name, shape in found.items() if globs.matches(glob, name)] for glob in patterns]
        if found and all(shape == shapes[0] for shapes in own for shape in shapes):
            return {glob: shapes[0] for glob, shapes in zip(patterns, own, strict=True)}
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
    layers, cross = _layers(model, kind)
    model.add_module("cache", nn.ModuleList(Kept(one.keys, one.values, context) for one in layers))
    model.step = MethodType(step, model)
    if model.config.is_encoder_decoder:
        source = _source(model)
        length = source["mask"][1][1] if "mask" in source else cross[0].keys.shape[2]
        model.add_module("cross", nn.ModuleList(Kept(one.keys, one.values, length) for one in cross))
        if "mask" in source:
            # Zeros, as of a new session, are a source without padding.
            padded = torch.zeros(source["mask"][1], dtype=torch.int64, device=model.device)
            model.register_buffer("padded", padded, persistent=False)
        model.encode = MethodType(encode, model)


def _layers(model: Any, kind: str) -> tuple[list[Any], list[Any]]:
    """Returns the layers of a model's static cache, with keys and values of few tokens; then the layers of its cache
    for the encoder."""
    import transformers
    from transformers.cache_utils import EncoderDecoderCache

    try:
        decompose = importlib.import_module("transformers.exporters.utils").decompose_for_generation
    except (ImportError, AttributeError) as error:
        message = f"transformers {transformers.__version__} can't decompose `generate`: {failures.one_line(error)}"
        raise Failure("entry_call", message, hint="install transformers 5.17 or newer") from error
    config = transformers.GenerationConfig(
        cache_implementation="static", max_cache_len=4, do_sample=False, num_beams=1, disable_compile=True
    )
    given = {"input_ids": torch.zeros(1, 1, dtype=torch.int64, device=model.device)}
    if model.config.is_encoder_decoder and model.main_input_name != "input_ids":
        given = {
            model.main_input_name: torch.zeros(_source(model)["source"][1], dtype=model.dtype, device=model.device)
        }
    try:
        parts = decompose(model, given, config)
    except Exception as error:  # the model's code may raise anything
        cause = failures.one_line(error.__cause__ or error)
        message = f"`generate` of `{kind}` fails with a static cache: {cause}"
        raise Failure("entry_call", message, hint=_BY_HAND) from error
    passed = parts["decode"][1] if parts.keys() == {"prefill", "decode"} else parts
    other = [name for name, value in passed.items() if value is not None and name not in _GIVEN]
    if other:
        names = ", ".join(f"`{name}`" for name in other)
        raise Failure("entry_call", f"`generate` of `{kind}` needs more than tokens: {names}", hint=_BY_HAND)
    cache = passed.get("past_key_values")
    if isinstance(cache, EncoderDecoderCache):
        return _static(cache.self_attention_cache, kind), _static(cache.cross_attention_cache, kind)
    return _static(cache, kind), []


def _static(cache: Any, kind: str) -> list[Any]:
    """Returns the layers of a cache. Each must keep keys and values by position."""
    from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

    layers = list(getattr(cache, "layers", []))
    for index, layer in enumerate(layers):
        if type(layer) not in (StaticLayer, StaticSlidingWindowLayer) or not layer.is_initialized:
            message = f"layer {index} of `{kind}` keeps a `{type(layer).__name__}`, not keys and values by position"
            raise Failure("entry_call", message, hint=_BY_HAND)
    if not layers:
        raise Failure("entry_call", f"`{kind}` supports no static cache", hint=_BY_HAND)
    return layers


def _cache(kept: Any, length: Any, at: Tensor | None) -> Any:
    """Returns a cache of transformers over buffers. It reports `length` tokens, and writes new keys and values at
    positions, or over all."""
    from transformers.cache_utils import Cache, StaticLayer

    class Layer(StaticLayer):
        def __init__(self, keys: Tensor, values: Tensor) -> None:
            super().__init__(keys.shape[2])
            self.keys, self.values, self.cumulative_length = keys, values, length
            self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

        def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            for kept, new in ((self.keys, keys), (self.values, values)):
                kept.copy_(new) if at is None else kept.index_copy_(2, at, new)
            return self.keys, self.values

    return Cache(layers=[Layer(one.keys, one.values) for one in kept])


def encode(model: Any, source: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """Encodes a source, and keeps its keys and values for the decoder. `mask` is 0 at padding."""
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache
    from transformers.modeling_outputs import BaseModelOutput

    valid = {"attention_mask": mask} if mask is not None else {}
    hidden = model.get_encoder()(**{model.main_input_name: source}, **valid).last_hidden_state
    if mask is not None:
        model.padded.copy_(1 - mask)
    # One token through the decoder: each of its layers projects the source into its keys and values.
    model(
        decoder_input_ids=torch.zeros(1, 1, dtype=torch.int64, device=source.device),
        encoder_outputs=BaseModelOutput(hidden),
        past_key_values=EncoderDecoderCache(DynamicCache(), _cache(model.cross, 0, None)),
        use_cache=True,
        **valid,
    )
    return {"hidden": hidden}


def step(
    model: Any, ids: Tensor, at: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, random: Tensor
) -> dict[str, Tensor]:
    """Takes tokens `[1, n]` and their consecutive positions `[n]`; returns the next token and its logits."""
    from transformers.cache_utils import EncoderDecoderCache
    from transformers.modeling_outputs import BaseModelOutput

    cache = _cache(model.cache, at[0], at)
    # Without padding: models that count positions by a mask need one.
    mask = ids.new_ones(1, model.cache[0].keys.shape[2])
    if model.config.is_encoder_decoder:
        keys = model.cross[0].keys
        # Its size is read, and no value: the keys and values are there.
        hidden = BaseModelOutput(keys.new_zeros(1, keys.shape[2], model.config.hidden_size))
        cross = EncoderDecoderCache(cache, _cache(model.cross, keys.shape[2], None))
        given = {"decoder_input_ids": ids, "decoder_attention_mask": mask, "encoder_outputs": hidden}
        given |= {"past_key_values": cross, "decoder_position_ids": at[None]}
        if hasattr(model, "padded"):
            given["attention_mask"] = 1 - model.padded
    else:
        given = {"input_ids": ids, "attention_mask": mask, "position_ids": at[None], "past_key_values": cache}
        given["logits_to_keep"] = 1
    takes = inspect.signature(model.forward).parameters
    optional = {"logits_to_keep", "decoder_position_ids", "position_ids"} - takes.keys()
    out = model(**{name: value for name, value in given.items() if name not in optional}, use_cache=True)
    logits = out.logits[:, -1].float()
    return {"token": sample(logits, temperature, top_k, top_p, random), "logits": logits}


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, random: Tensor) -> Tensor:
    """Returns a token by its logits: the likeliest one at temperature 0, else a random one within `top_k` and `top_p`,
    by a number from 0 to 1. All settings are tensors, so that one program has the step and its sampling."""
    count = min(LIKELIEST, logits.shape[-1])
    values, ids = logits.topk(count)
    weights = (values / temperature.clamp(min=1e-6)).softmax(-1)
    rank = torch.arange(count, device=logits.device)
    allowed = (rank < top_k) & (weights.cumsum(-1) - weights < top_p)
    weights = torch.where(allowed, weights, 0.0)
    chosen = (weights.cumsum(-1) <= random * weights.sum(-1, keepdim=True)).sum(-1, keepdim=True)
    token = ids.gather(-1, chosen.clamp(max=count - 1))
    return torch.where(temperature > 0, token, ids[:, :1])
