"""Compiles one segment with AOTInductor into one shared object without weights."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import failures
from .clock import Clock
from .graph import segment
from .passes import added_rows, one_query, one_row, prepacked
from .passes import segments as segment_passes
from .torch_private import errors, inductor, lowerings, overloads, versions
from .torch_private.cpp_toolchain import toolchain
from .torch_private.early_launch import early_launch
from .values import bounds
from .wire import Failure, Wire

# Options that make an artifact self-contained, and keep values of weights out of it.
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
# Values of the option `attention`, which is Precast's own, and torch's names for them.
_ATTENTION = {
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
}


# Bytes of weights from which a collection after a compile is worth its third of a second.
_COLLECTED = 64 << 20


def compile_segment(request: dict[str, Any], out: Path, wire: Wire) -> dict[str, Any]:
    """Returns the protocol's `Compiled`."""
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
    collected = sum(buffer.nbytes for buffer in module.buffers()) >= _COLLECTED
    options = _options(request, device)
    if device == "cpu" and not request.get("passes") and not prepacked.is_faster(module):
        options["freezing"] = False
    attention = _attention(request)
    target = _Target(device, options, attention, request.get("passes") or [], request["isa"], out)
    clock.seconds["load"] = time.perf_counter() - started
    wire.event("lower")
    compiled, retried = None, False
    if options["freezing"] and (device == "cpu" or target.passes):
        try:
            compiled = _compile(module, inputs, target, root, clock)
        except Exception as error:
            # On a device the passes over weights take memory of it themselves.
            refused = isinstance(errors.unwrap(error), Failure)
            if refused or (failures.is_out_of_memory(error) and device == "cpu"):
                raise _failure(error, root, attention) from error
            # The passes over weights can handle fewer programs than the compiler.
            print(f"weights are not prepacked: {_failure(error, root, attention).message}", file=sys.stderr)
            options["freezing"], retried = False, True
    try:
        if retried:
            del module, inputs
            if device == "cuda":
                torch.cuda.empty_cache()
            module, inputs, _ = segment.load(path, device)
        compiled = compiled or _compile(module, inputs, target, root, clock)
    except Exception as error:
        raise _failure(error, root, attention) from error
    total = time.perf_counter() - started
    clock.seconds["lower"] = max(0.0, total - sum(clock.seconds.values()))
    compiled["seconds"] = {name: round(value, 4) for name, value in clock.seconds.items()}
    if collected:
        # The compiler leaves cycles behind, which hold the random weights and their prepacked forms.
        del module
        gc.collect()
    return compiled


@dataclass
class _Target:
    """The device, the options and the passes of one compile."""

    device: str
    options: dict[str, Any]
    attention: str | None
    passes: list[dict[str, str]]
    isa: str
    out: Path


def _compile(module: Any, inputs: list[Any], target: _Target, root: Path, clock: Clock) -> dict[str, Any]:
    weights = prepacked.Weights.of(module)
    context = segment_passes.Context(target.device, target.options, weights)
    passes = segment_passes.load(target.passes, context, root)
    passes.segment(module)
    options = target.options | passes.hooks()
    # Inductor's folding takes the value of a tensor of one element for known, unless this option is off.
    if any(buffer.numel() == 1 for buffer in module.buffers()):
        options["joint_graph_constant_folding"] = False
    if target.device == "cuda":
        # Inductor's freezing would put values of weights into the artifact.
        options["freezing"] = False
        if _normalizes_in_half(module):
            options.setdefault("emulate_precision_casts", True)
    if target.device == "cpu":
        one_query.rewrite(module.graph)
        module.recompile()
        if one_row.has_one_row(module.graph):
            # Joined weights would be a copy, and buy nothing.
            options["cpp.enable_concat_linear"] = False
            options |= one_row.after(options.get("post_grad_custom_pre_pass"), context.is_constant)
    with _attention_kernel(target.attention), _fixed_order(module, target.device):
        files = generate(module, inputs, options, target.isa, target.out, clock, weights)
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
    """Runs the compiler, and returns the files that it generated. `weights` receives the prepacked weights."""
    patches = [
        toolchain(isa, clock, bounds.operators_of),
        lowerings.no_packed_weights(),
        lowerings.checked_scatters(),
        lowerings.decomposing(added_rows.decompositions()),
        prepacked.recording(weights, isa),
    ]
    if options.get("triton.enable_pdl") and versions.works(versions.EARLY_LAUNCH):
        patches.append(early_launch())
    return inductor.compile_aot(module, inputs, options, out, patches)


def _normalizes_in_half(module: Any) -> bool:
    """Returns whether a batch norm has inputs in half precision. Then the program rounds where eager does.

    Statistics as they are made scale by 1 / sqrt(1 + 1e-5): eager rounds that away, and a sum of two results then lies
    often in the middle between two numbers, and is rounded to the even one. A fused kernel, which has the product with
    more digits, rounds all such sums in one direction: ResNet-50 was 2.2 times as far from float32 as eager.
    """
    names = {overloads.name_of(node.target) for node in module.graph.nodes if node.op == "call_function"}
    half = any(one.is_floating_point() and one.dtype.itemsize == 2 for one in module.buffers())
    return half and not names.isdisjoint({"batch_norm", "_native_batch_norm_legit_no_training"})


def _attention_kernel(attention: str | None) -> AbstractContextManager[Any]:
    """Restricts scaled_dot_product_attention to one kernel; with None, torch chooses by device and shapes.

    Captured graphs have the operator whole: torch decomposes it when the compiler traces them.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if attention is None:
        return nullcontext()
    return sdpa_kernel(SDPBackend.__members__[_ATTENTION[attention]])


@contextmanager
def _fixed_order(module: Any, device: str) -> Iterator[None]:
    """Has the compiler sum in an order that no thread decides, as the gradients of an embedding's rows: a training on
    the CPU that continues from a checkpoint then has the losses of an unbroken one. `added_rows` has the calls.
    """
    names = [overloads.name_of(node.target) for node in module.graph.nodes if node.op == "call_function"]
    adds = any(name.endswith("_backward") or name in added_rows.ADDING for name in names)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or (device == "cpu" and adds))
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def warm_up(request: dict[str, Any], out: Path, wire: Wire) -> dict[str, Any]:
    """Imports the compiler and compiles the headers that a device needs; returns the protocol's `WarmedUp`."""
    device = request["device"]
    clock = Clock(wire.event)
    started = time.perf_counter()
    wire.event("import")
    options = {**_FIXED, **_threads({}, device)}
    inductor.warm_up(device, request["isa"], options, out.resolve(), clock)
    clock.seconds["import"] = max(0.0, time.perf_counter() - started - sum(clock.seconds.values()))
    return {"seconds": {name: round(value, 4) for name, value in clock.seconds.items()}}


def _threads(options: dict[str, Any], device: str) -> dict[str, Any]:
    """Keeps inductor from starting processes, because workers run in parallel; autotuning of Triton kernels may."""
    autotunes = device == "cuda" and _autotunes(options)
    return {} if autotunes else {"compile_threads": 1}


def _autotunes(options: dict[str, Any]) -> Any:
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
        if key not in known and (gone := versions.gone(key)):
            name = "torch {}.{}".format(*gone.since)
            raise Failure("compile", f"option `{key}` is gone: {name} has dropped it", hint=gone.instead)
        if key not in known:
            raise Failure("compile", f"unknown option `{key}`", hint=failures.nearest(key, known, "options"))
        if key != "attention":
            options[key] = value
    options.setdefault("freezing", False)
    if not versions.works(versions.PREPACKED):
        options["freezing"] = False
    if device == "cpu":
        # The minimum of values for each thread of a loop: inductor's 512 take less time than to wake a thread.
        options.setdefault("cpp.min_chunk_size", 4096)
    if options["freezing"] and device == "cpu":
        # Fused linear: two or three matrices of one shape that multiply the same rows, as those of query, key and
        # value, become one product.
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
                f"the compiler derived the constant `{constant}` from weights",
                hint="an option or a pass lets it pack or fold weights: leave it out",
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
