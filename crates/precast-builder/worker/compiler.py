"""Compiles one segment with AOTInductor into one shared object without weights."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import bounds, failures, prepacked, segment, segment_passes
from .clock import Clock
from .torch_private import errors, inductor, lowerings
from .torch_private.cpp_toolchain import toolchain
from .torch_private.early_launch import early_launch
from .wire import Failure, Wire

# What makes an artifact self-contained, and keeps values of weights out of it.
_FIXED = {
    "aot_inductor.package": True,
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.embed_kernel_binary": True,
    # Small tensors stay constants instead of becoming literals.
    "always_keep_tensor_constants": True,
    "aot_inductor.use_runtime_constant_folding": False,
    "fx_graph_cache": False,
}
_REFUSED = {
    **dict.fromkeys(_FIXED, "it decides what an artifact is"),
    "aot_inductor.output_path": "the store decides where an artifact lies",
    "aot_inductor.metadata": "it is written by the compiler",
    "aot_inductor.package_cpp_only": "an artifact is a shared object",
    "aot_inductor.package_constants_on_disk_format": "weights are a weight set of their own",
    "aot_inductor.force_mmap_weights": "weights are a weight set of their own",
    "aot_inductor.dynamic_linkage": "an artifact is a shared object",
    "aot_inductor.cross_target_platform": "an artifact runs on the target",
    "cpp_wrapper": "an artifact is C++ already",
    "fx_wrapper": "an artifact is C++ already",
    "triton.cudagraphs": "the runtime captures graphs: set `mode`",
}
# Values of the option `attention`, which is not inductor's own, and torch's names for them.
_ATTENTION = {
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
}


def compile_segment(request: dict[str, Any], out: Path, wire: Wire) -> dict[str, Any]:
    """Returns the protocol's `Compiled`."""
    import torch

    device = request["device"]
    if device == "cuda" and not torch.cuda.is_available():
        raise Failure("no_device", "device `cuda` was asked for and torch sees no CUDA device", hint="set `device`")
    out = out.resolve()
    path = Path(request["file"])
    if not path.is_file():
        raise Failure("protocol", f"there is no segment at `{path}`")
    clock = Clock(wire.event)
    started = time.perf_counter()
    wire.event("load")
    module, inputs, root = segment.load(path, device)
    options = _options(request, device)
    attention = _attention(request)
    how = _How(device, options, attention, request.get("passes") or [], request["isa"], out)
    clock.seconds["load"] = time.perf_counter() - started
    wire.event("lower")
    answer, left = None, False
    if options["freezing"] and (device == "cpu" or how.passes):
        try:
            answer = _compile(module, inputs, how, root, clock)
        except Exception as error:
            # On a device the passes for weights take memory of it themselves.
            mistaken = isinstance(errors.unwrap(error), Failure)
            if mistaken or (failures.short_of_memory(error) and device == "cpu"):
                raise _failure(error, root, attention) from error
            # The passes for weights know fewer programs than the compiler does.
            print(f"weights are left as they are: {_failure(error, root, attention).message}", file=sys.stderr)
            options["freezing"], left = False, True
    try:
        if left:
            del module, inputs
            if device == "cuda":
                torch.cuda.empty_cache()
            module, inputs, _ = segment.load(path, device)
        answer = answer or _compile(module, inputs, how, root, clock)
    except Exception as error:
        raise _failure(error, root, attention) from error
    total = time.perf_counter() - started
    clock.seconds["lower"] = max(0.0, total - sum(clock.seconds.values()))
    answer["seconds"] = {name: round(value, 4) for name, value in clock.seconds.items()}
    return answer


@dataclass
class _How:
    """What a segment is compiled for, and with."""

    device: str
    options: dict[str, Any]
    attention: str | None
    passes: list[dict[str, str]]
    isa: str
    out: Path


def _compile(module: Any, inputs: list[Any], how: _How, root: Path, clock: Clock) -> dict[str, Any]:
    weights = prepacked.Weights.of(module)
    context = segment_passes.Context(how.device, how.options, weights)
    passes = segment_passes.load(how.passes, context, root)
    passes.segment(module)
    options = how.options | passes.hooks()
    # A tensor of one element counts as a known value in inductor's folding, unless it is told not to fold.
    if any(buffer.numel() == 1 for buffer in module.buffers()):
        options["joint_graph_constant_folding"] = False
    if how.device == "cuda":
        # Inductor's own would pack values of weights.
        options["freezing"] = False
    with _attending(how.attention):
        files = generate(module, inputs, options, how.isa, how.out, clock, weights)
    return result(files, weights)


def generate(
    module: Any,
    inputs: list[Any],
    options: dict[str, Any],
    isa: str,
    out: Path,
    clock: Clock,
    weights: prepacked.Weights,
) -> list[str]:
    """Runs the compiler; returns the files that it generated. `weights` gets the prepacked ones."""
    patches = [
        toolchain(isa, clock, bounds.operators_of),
        lowerings.no_packed_weights(),
        prepacked.recording(weights, isa),
    ]
    if options.get("triton.enable_pdl"):
        patches.append(early_launch())
    return inductor.compile_aot(module, inputs, options, out, patches)


def _attending(attention: str | None) -> AbstractContextManager[Any]:
    """Has scaled_dot_product_attention lowered to this kernel alone; without one, torch chooses by device and shapes.

    Captured graphs have it whole: torch takes it apart where the compiler traces them.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if attention is None:
        return nullcontext()
    return sdpa_kernel(SDPBackend.__members__[_ATTENTION[attention]])


def prepare(request: dict[str, Any], out: Path, wire: Wire) -> dict[str, Any]:
    """Gets ready to compile for a device, and makes the headers that every compile needs."""
    device = request["device"]
    clock = Clock(wire.event)
    started = time.perf_counter()
    wire.event("import")
    options = {**_FIXED, **_threads({}, device)}
    inductor.warm_up(device, request["isa"], options, out.resolve(), clock)
    clock.seconds["import"] = max(0.0, time.perf_counter() - started - sum(clock.seconds.values()))
    return {"seconds": {name: round(value, 4) for name, value in clock.seconds.items()}}


def _threads(options: dict[str, Any], device: str) -> dict[str, Any]:
    """Keeps inductor from starting processes of its own, as workers are parallel; but trying Triton kernels."""
    many = device == "cuda" and _tries_many(options)
    return {} if many else {"compile_threads": 1}


def _tries_many(options: dict[str, Any]) -> Any:
    return options.get("max_autotune") or options.get("max_autotune_gemm") or options.get("coordinate_descent_tuning")


def _options(request: dict[str, Any], device: str) -> dict[str, Any]:
    mode = request.get("mode") or "default"
    modes = inductor.modes()
    if mode not in modes:
        raise Failure("compile", f"unknown mode `{mode}`", hint=failures.nearest(mode, modes, "modes"))
    options = {key: value for key, value in modes[mode].items() if key != "triton.cudagraphs"}
    known = inductor.option_names() | {"attention"}
    for key, value in (request.get("options") or {}).items():
        if key in _REFUSED:
            raise Failure("compile", f"option `{key}` can't be set: {_REFUSED[key]}")
        if key not in known:
            raise Failure("compile", f"unknown option `{key}`", hint=failures.nearest(key, known, "options"))
        if key != "attention":
            options[key] = value
    options.setdefault("freezing", False)
    if device == "cpu":
        # Values that a loop must have for each thread before it takes more than one: inductor's 512 take less time
        # than waking a thread does.
        options.setdefault("cpp.min_chunk_size", 4096)
    if options["freezing"] and device == "cpu":
        # Two or three matrices of one shape that multiply the same rows, as a query's, a key's and a value's, are
        # laid out as one: one call.
        options.setdefault("cpp.enable_concat_linear", True)
    return {**_threads(options, device), **options, **_FIXED}


def _attention(request: dict[str, Any]) -> str | None:
    word = (request.get("options") or {}).get("attention")
    if word is not None and word not in list(_ATTENTION):
        raise Failure("compile", f"unknown attention `{word}`", hint=failures.nearest(str(word), _ATTENTION, "known"))
    return word


def _failure(outer: Exception, root: Path, attention: str | None) -> Failure:
    if isinstance(outer, Failure):
        return outer
    error = errors.unwrap(outer)
    if isinstance(error, Failure):
        return error
    if attention and errors.no_attention_kernel(error):
        return Failure(
            "compile",
            f"torch has no `{attention}` attention for this device and these inputs",
            location=failures.location(error, root) or failures.location(outer, root),
            hint="leave the option `attention` out, or name another kernel",
        )
    text = failures.one_line(error)
    operator = errors.failed_operator(error)
    where = f"operator `{operator}`: " if operator else ""
    if errors.is_cpp_error(error):
        lines = [line for line in str(error).splitlines() if "error:" in line]
        text = "the C++ compiler failed: " + (lines[0].strip() if lines else text)
    else:
        text = f"{type(error).__name__}: {text}"
    place = failures.location(error, root) or failures.location(outer, root)
    return Failure("compile", f"{where}{text}"[:500], location=place)


def result(files: list[str], weights: prepacked.Weights) -> dict[str, Any]:
    """Returns the protocol's `Compiled`. A constant that is neither the segment's nor prepacked can't be bound."""
    found = inductor.generated(files)
    if len(found.libraries) != 1:
        raise Failure("internal", f"the compiler made {len(found.libraries)} shared objects, not one")
    for constant in found.constants:
        if constant not in weights:
            raise Failure(
                "compile",
                f"the compiler derived a constant (`{constant}`) from the weights it was shown",
                hint="an option or a pass made it pack or fold weights: leave it out",
            )
    fields = ("call", "dtype", "shape", "stride")
    recipes = weights.prepacked
    used = [name for name in recipes if name in found.constants]
    return {
        "library": str(Path(found.libraries[0]).resolve()),
        "proxy": found.proxy,
        "metadata": found.metadata,
        "prepared": [{"name": name, **{field: recipes[name][field] for field in fields}} for name in used],
    }
