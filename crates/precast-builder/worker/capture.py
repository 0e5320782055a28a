"""Captures one module at one bucket: the graph, its segments and steps, sample inputs, and eager's outputs.

Eager's outputs come from the module itself, never from the captured graph: every artifact is compared with them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import failures, measure, tensors
from .graph import call, cut, eager, flat, flops, operators, segment, structure
from .model import entry, states
from .passes import masks, norm_fusion
from .passes import programs as passes
from .passes import segments as segment_passes
from .sizes import dynamic, output_sizes, padding, padding_graph, smallest
from .torch_private import fake, overloads
from .train import training
from .values import bounds, checks, samples
from .wire import Failure, Wire

# Message and hint for a module that keeps state in Python.
ANOTHER = "gives another answer when it is called again with the same inputs"
STATE = "keep what changes between calls in a registered buffer, or take it as an input and return its new value"
# Microseconds of a call up to which running the module is cheaper than computing its shapes on fake tensors.
_QUICK = 200_000
# Operators that move values; operators that fill some in, with the position of the fill value among the arguments.
_MOVES = {"getitem", "clone", "contiguous", "reshape", "cat", "stack", "embedding", "index", "index_select", "gather"}
_MOVES |= {"zeros", "zeros_like", "ones", "ones_like"}
_FILLS = {"scalar_tensor": 0, "full": 1, "full_like": 1, "where": 1, "masked_fill": 2}


@dataclass
class Traced:
    """A module's graph at one bucket, ready to be cut. Its inputs are those of a call and its states."""

    what: str
    # Runs the module without changing the state tensors in its arguments.
    wrapped: Any
    # Runs the module, and returns the new values of states too: the result and the inputs after the call.
    run: Any
    specs: list[dict[str, Any]]
    # The positions of states among them, and the first value of each.
    states: dict[int, Any]
    sizes: dict[str, int]
    graph: flat.Flat
    # Bounds of dynamic dimensions; bounds of each input's values in the graph, and in the record.
    held: dynamic.Bounds | None
    limits: list[bounds.Bounds | None]
    ranges: list[list[int] | None]
    # The part of a training step, if it is one.
    training: training.Training | None = None
    # The inputs of one real call, where drawn values may be none.
    examples: list[Any] | None = None
    # The pair that it is a half of, with that half, if it is one.
    pair: Any = None
    # Whether the outputs are gradients.
    gradients: bool = False
    # Floating-point operations of a part of a training step.
    flops: dict[str, int] | None = None


def call_of(opened: Any, module: dict[str, Any]) -> tuple[str, Any]:
    """Returns a module's name in messages, and the call to capture."""
    target = call.find(opened.model, module["path"])
    function = call.method_of(target, module["path"], module["method"])
    what, names = call.describe(module), [spec["name"] for spec in module["inputs"]]
    nesting = module.get("structure")
    if nesting is None:
        call.check_inputs(target.forward if module["method"] == "forward" else function, names, what)
    return what, call.wrap(target, module["method"], names, nesting, module.get("buffers") or ())


def trace(opened: Any, module: dict[str, Any], sizes: dict[str, int], wire: Wire) -> Traced:
    """Captures a module's graph; refuses operators and outputs that no artifact can have.

    Buffers that a call writes into, or replaces by another tensor, are states: inputs of the capture. So are buffers
    that the spec names and the call only reads. If the call fails, the capture finds the written buffers, and a second
    capture takes them as inputs.
    """
    if module.get("train"):
        return _graph(opened, module, sizes, wire, training.Training(opened, module))
    if module.get("pair"):
        return _pair(opened, module, sizes, wire)
    key = (module["path"], module["method"])
    if key not in opened.states:
        called = call_of(opened, module)[1]
        given = samples.lowest(module["inputs"], opened.device)
        opened.states[key] = call.written_buffers(call.find(opened.model, module["path"]), called, given)
    while True:
        buffers = [*opened.states[key], *states.only_read(opened, module, opened.states[key])]
        try:
            traced = _trace(opened, {**module, "buffers": buffers}, sizes, wire)
        except flat.WritesBuffers as found:
            if set(found.names) <= set(buffers):
                raise
            opened.states[key] = [*opened.states[key], *found.names]
        else:
            states.refuse_unknown(module, [spec["name"] for spec in traced.specs])
            return traced


def run_of(opened: Any, module: dict[str, Any]) -> tuple[Any, list[dict[str, Any]], dict[int, Any]]:
    """Returns a function as `Traced.run`, of a module that was captured, with its inputs and its states."""
    written = opened.states.get((module["path"], module["method"]), [])
    module = {**module, "buffers": [*written, *states.only_read(opened, module, written)]}
    specs, kept = states.of_module(opened, module)
    return functools.partial(states.run, call_of(opened, module)[1], kept), specs, kept


def _trace(opened: Any, module: dict[str, Any], sizes: dict[str, int], wire: Wire) -> Traced:
    specs, kept = states.of_module(opened, module)
    what, wrapped = call_of(opened, module)
    wire.event("capture")
    asked, held = module.get("dynamic") or None, None
    fixed = {dim for at in kept for dim in specs[at]["dims"]}
    if asked is not None and fixed.intersection(asked):
        # A session has one size in these.
        asked = {dim: bounds_ for dim, bounds_ in asked.items() if dim not in fixed}
        if not asked:
            raise Failure("capture", f"{what} has no dimension that is not one of its states")
    if asked is not None:

        def capture_at(at: dict[str, int]) -> tuple[Any, dynamic.Bounds]:
            those = samples.at_sizes(specs, at)
            return dynamic.export(wrapped, samples.lowest(those, opened.device), those, asked, opened.root, what)

        def takes(at: dict[str, int]) -> bool:
            return _takes(wrapped, samples.at_sizes(specs, at), opened.device)

        exported, held, sizes = dynamic.widest(capture_at, takes, asked, dynamic.sizes(asked, sizes))
        specs = samples.at_sizes(specs, sizes)
    else:
        exported = flat.export(wrapped, samples.lowest(specs, opened.device), opened.root, what)
    graph, limits, ranges = _flat(opened, module, specs, kept, exported, what, wire)
    run = functools.partial(states.run, wrapped, kept)
    pure = (lambda *inputs: run(inputs)[0]) if kept else wrapped
    return Traced(what, pure, run, specs, kept, sizes, graph, held, limits, ranges)


def _graph(opened: Any, module: dict[str, Any], sizes: dict[str, int], wire: Wire, part: training.Training) -> Traced:
    """Captures a part of a training step."""
    wire.event("capture")
    specs, kept = part.specs, part.states
    exported = part.export()
    counted = flops.of(exported.graph)
    graph, limits, ranges = _flat(opened, module, specs, kept, exported, part.what, wire)
    return Traced(
        part.what,
        lambda *inputs: part.run(inputs)[0],
        part.run,
        specs,
        kept,
        sizes,
        graph,
        None,
        limits,
        ranges,
        part,
        flops=counted,
    )


def _pair(opened: Any, module: dict[str, Any], sizes: dict[str, int], wire: Wire) -> Traced:
    """Captures a program of a pair."""
    from .train import pairs  # imports Inductor

    wire.event("capture")
    pair = pairs.Pair(opened, module)
    halves = pair.halves(samples.lowest(module["inputs"], opened.device))
    backward = module["pair"]["part"] == "backward"
    # The forward graph says which values the inputs may have.
    specs, exported = pair.specs_of(halves.forward), pair.export(halves.forward)
    first = {**module, "passes": []} if backward else module
    graph, limits, ranges = _flat(opened, first, specs, {}, exported, pair.what, wire)
    drawn, tables = _drawn(graph, specs, limits)
    count = len(module["inputs"])
    pair.fill(halves, samples.draw(drawn[:count], tables[:count], opened.device))
    half, eager_ = (halves.backward, pair.backward) if backward else (halves.forward, pair.forward)
    if backward:
        specs, exported = pair.specs_of(half), pair.export(half)
        graph, limits, ranges = _flat(opened, module, specs, {}, exported, pair.what, wire)
    return Traced(
        pair.what,
        half.module,
        lambda inputs: (eager_(half, inputs), inputs),
        specs,
        {},
        sizes,
        graph,
        None,
        limits,
        ranges,
        examples=list(half.inputs.values()),
        pair=(pair, half, eager_),
        gradients=backward,
    )


def _drawn(
    graph: flat.Flat, specs: list[dict[str, Any]], limits: list[bounds.Bounds | None]
) -> tuple[list[dict[str, Any]], list[int | None]]:
    """Returns the inputs as samples are drawn for them, and the sizes of the tables that they index."""
    tables = [samples.table_of(node) for node in graph.inputs]
    return [_with_sample_range(*each) for each in zip(specs, tables, limits, strict=True)], tables


def _flat(
    opened: Any,
    module: dict[str, Any],
    specs: list[dict[str, Any]],
    kept: dict[int, Any],
    exported: Any,
    what: str,
    wire: Wire,
) -> tuple[flat.Flat, list[bounds.Bounds | None], list[list[int] | None]]:
    """Returns the graph of an exported module, with the bounds of its inputs in the graph and in the record."""
    exported = operators.inline(exported, opened.device, opened.root)
    names = [spec["name"] for spec in specs]
    graph = flat.flatten(exported, opened.named(), module["path"], opened.root, names, kept)
    if module.get("train") or module.get("pair"):
        training.reshape(graph.graph)
    for name in module.get("passes") or []:
        wire.event(f"pass {name}")
        passes.run(name, graph, opened.root)
    masks.as_numbers(graph)
    operators.check(graph.graph.nodes, opened.device, opened.root)
    limits = bounds.of_inputs(graph.graph, graph.inputs)
    ranges = [bounds.check_range(*pair, what, opened.root) for pair in zip(specs, limits, strict=True)]
    known = {node: (held[0], held[1] - 1) for node, held in zip(graph.inputs, ranges, strict=True) if held}
    if opened.device in checks.DEVICES:
        checks.add(graph, known, specs, opened.root, marks=not module.get("train"))
    else:
        bounds.refuse_negative(graph, known)
    flat.own_outputs(graph)
    if not graph.outputs:
        raise Failure("capture", f"{what} returns no tensor")
    return graph, limits, ranges


def _takes(wrapped: Any, specs: list[dict[str, Any]], device: str) -> bool:
    """Returns whether the module runs on inputs of these sizes without data."""
    try:
        with torch.no_grad(), fake.mode_with_real_parameters() as mode:
            wrapped(*map(mode.from_tensor, samples.lowest(specs, device)))
    except Exception:  # any error: the module does not take these sizes
        return False
    return True


def parts_of(traced: Traced, module: dict[str, Any]) -> list[cut.Part]:
    """Returns a graph cut at its regions."""
    regions = module["regions"] if not module.get("dynamic") else []
    if regions:
        cut.check_regions(traced.graph, regions, module["path"])
        return norm_fusion.cut_and_fuse(traced.graph, regions, module["path"])
    return cut.cut(traced.graph, [], module["path"])


@dataclass
class Answers:
    """One run of the module on sample inputs."""

    # The inputs as samples are drawn for them, and the sizes of the tables that they index.
    drawn: list[dict[str, Any]]
    tables: list[int | None]
    inputs: list[Any]
    returned: Any
    results: list[Any]
    # The inputs after the call: states have their new values.
    after: list[Any]
    outputs: list[dict[str, Any]]
    notes: list[str]
    # Inputs and results of calls of a training step that follow each other.
    sequence: list[tuple[list[Any], list[Any]]]


def capture(opened: Any, module: dict[str, Any], sizes: dict[str, int], out: Path, wire: Wire) -> dict[str, Any]:
    """Returns the protocol's `Captured`."""
    started = time.perf_counter()
    captured = written(opened, module, trace(opened, module, sizes, wire), out.resolve(), wire)
    return {**captured, "seconds": time.perf_counter() - started}


def written(opened: Any, module: dict[str, Any], traced: Traced, out: Path, wire: Wire) -> dict[str, Any]:
    """Cuts a graph, runs the module on samples, and writes both. Returns the protocol's `Captured` without its time."""
    specs, graph = traced.specs, traced.graph

    wire.event("cut")
    compiled = module.get("compiled", True)
    order = _order(traced)
    inputs = [graph.inputs[at] for at in order]
    segments, steps, values, numbers = _steps(parts_of(traced, module), graph, inputs, out, opened, compiled)
    program = {"segments": [one for one, _ in segments], "steps": steps}
    if compiled:
        program["passes"] = {
            "own": segment_passes.described(module.get("passes") or [], opened.root),
            "offered": segment_passes.offered(opened, [built for _, built in segments]),
        }

    wire.event("eager")
    answers = _answers(traced, opened, traced.examples or _examples(opened, module))
    receipt = {**measure.eager(traced.wrapped, answers.inputs, opened.device), "flops": traced.flops or {}}
    entry.seed()
    if not same(answers.results, structure.tensors_of(_eager(traced, answers.inputs, opened)[0])):
        raise Failure("capture", f"{traced.what} {ANOTHER}", hint=f"{STATE}; `precast check` names the line")

    held, ends, ones = traced.held, [], []
    if held is not None and not compiled:
        wire.event("smallest sizes")
        held, ends, ones = _lowered(opened, module, traced, answers, wire)

    wire.event("padding")
    exact, smaller = _padded(opened, module, traced, answers, receipt)

    wire.event("save")
    exported, exported_weights, more = _save_eager(
        graph, order, out, traced.what, compiled, _choices(ones, specs, order)
    )
    names = [spec["name"] for spec in specs]
    called = [at for at in range(len(specs)) if at not in traced.states]
    captured = {
        **program,
        "inputs": [_input(specs[at], traced.ranges[at]) for at in called],
        "states": [
            {"name": specs[at]["name"], **_layout(specs[at]), "dims": specs[at]["dims"], "first": first}
            for at, first in traced.states.items()
        ],
        "outputs": answers.outputs,
        "results": [numbers[node] for node in graph.outputs],
        "checks": [
            {
                "value": numbers[check.outcome],
                "text": check.text,
                "location": check.location,
                "input": check.input,
            }
            for check in graph.checks
        ],
        "values": values,
        "call_spec": {
            "inputs": module.get("structure") or names,
            "outputs": structure.describe(answers.returned),
        },
        "exact": exact,
        "notes": answers.notes + more,
        "compute_dtypes": compute_dtypes(graph, traced.states),
        "largest": _largest(answers.results) if traced.gradients else None,
        "samples": str(_write_samples(out, traced, answers, smaller + ends)),
        "receipt": receipt,
        "dynamic": held,
        "exported": exported,
        "exported_weights": exported_weights,
    }
    for _, one in ones:
        graph.extra |= one.extra
    if graph.extra:
        captured["extra_weights"] = str(tensors.write(out / "extra.safetensors", graph.extra))
    entry.check_imports(opened)
    return captured


def _examples(opened: Any, module: dict[str, Any]) -> list[Any] | None:
    """Returns the inputs of one real call, by the function's name, where the model was captured with them.

    Drawn values may be no values of a call: the index of a maximum, which a backward function reads.
    """
    known = getattr(opened.model, "precast_examples", None)
    found = known.get(module["method"]) if isinstance(known, dict) and not module["path"] else None
    return None if found is None else [value.to(opened.device) for value in found]


def _answers(traced: Traced, opened: Any, examples: list[Any] | None) -> Answers:
    """Runs the module on its examples, or on sample inputs."""
    graph, what = traced.graph, traced.what
    drawn, tables = _drawn(graph, traced.specs, traced.limits)
    draw = functools.partial(samples.draw, drawn, tables, opened.device, states=traced.states)
    inputs = draw() if examples is None else examples
    states.fill(inputs, traced.states, opened, lambda given: _eager(traced, given, opened)[1], draw)
    sequence: list[tuple[list[Any], list[Any]]] = []
    if traced.training is not None:
        first = states.first(inputs, traced.states, opened)
        sequence = traced.training.sequence(first, draw)
        traced.training.settle(inputs)
    entry.seed()
    returned, after = _eager(traced, inputs, opened)
    results, names, notes = [], [], []
    for name, leaf in structure.named(returned):
        if isinstance(leaf, torch.Tensor):
            results.append(leaf)
            names.append(name)
        elif leaf is not None:
            kind = type(leaf).__name__
            notes.append(f"output `{name}` of {what} is a {kind}: only tensors are returned, it is left out")
    if len(results) != len(graph.outputs):
        raise Failure("capture", f"{what} returns {len(results)} tensors, its graph {len(graph.outputs)}")
    return Answers(
        drawn, tables, inputs, returned, results, after, _outputs(graph, names, results, what), notes, sequence
    )


def _lowered(
    opened: Any, module: dict[str, Any], traced: Traced, answers: Answers, wire: Wire
) -> tuple[dynamic.Bounds, list[padding.Unpadded], list[tuple[tuple[str, ...], flat.Flat]]]:
    """Returns the sizes that eager answers, the module's answers at the smallest, and further graphs for size 1."""

    def at_one(fixed: dict[str, int]) -> Traced:
        free = {dim: bounds for dim, bounds in module["dynamic"].items() if dim not in fixed}
        called = traced.specs[: len(module["inputs"])]
        at = {**module, "inputs": samples.at_sizes(called, fixed), "dynamic": free}
        return trace(opened, at, {**traced.sizes, **fixed}, wire)

    lower = smallest.lowered(traced, module["dynamic"], answers.drawn, answers.tables, opened.device, at_one)
    return lower.held, lower.ends, lower.ones


def _padded(
    opened: Any, module: dict[str, Any], traced: Traced, answers: Answers, receipt: dict[str, Any]
) -> tuple[dict[str, str], list[padding.Unpadded]]:
    """Returns why dimensions can't be padded, if they can't, and answers at smaller sizes; adds to the receipt."""
    if traced.training is not None:
        return dict.fromkeys(traced.sizes, "a loss, and so the gradients, would count the padding"), []
    specs, drawn, tables, wrapped, device = traced.specs, answers.drawn, answers.tables, traced.wrapped, opened.device
    kept = {dim for at in traced.states for dim in specs[at]["dims"]}
    named = {dim for spec in specs for dim in spec["dims"]} - kept
    used = {dim: size for dim, size in traced.sizes.items() if dim in named}
    probes = [padding.run_unpadded(wrapped, at, drawn, tables, device) for at in padding.points(used)]
    exact = _find_output_dims(traced, answers, used, probes, device, quick=receipt["eager_us"] < _QUICK)
    exact |= {dim: f"a state has the size of `{dim}`" for dim in traced.sizes if dim in kept}
    if traced.held is not None:
        return {}, probes  # its inputs are never padded
    if module.get("padding") == "trusted":
        return exact, []
    for leak in padding_graph.leaks(traced.graph, specs, used, traced.ranges):
        exact.setdefault(leak.dim, leak.reason(opened.root))
    kinds = samples.kinds(device, traced.graph.computed())
    check = padding.Check(wrapped, specs, drawn, tables, device, answers.outputs, exact, kinds)
    receipt["padding"], smaller = check.run(used)
    return exact, smaller


def _input(spec: dict[str, Any], values: list[int] | None) -> dict[str, Any]:
    """Returns the record of an input; `values` are the bounds of its values."""
    record = {key: value for key, value in spec.items() if key != "sample"} | _layout(spec)
    return record if values is None else {**record, "bounds": values}


def _largest(results: list[Any]) -> float:
    """Returns the largest absolute value of some results."""
    finite = [one.double().nan_to_num(0, 0, 0).abs().max().item() for one in results if one.numel()]
    return max(finite, default=0.0)


def _layout(spec: dict[str, Any]) -> dict[str, Any]:
    return {"dtype": spec["dtype"], "shape": spec["shape"], "stride": tensors.dense(spec["shape"])}


def _with_sample_range(spec: dict[str, Any], table: int | None, limit: bounds.Bounds | None) -> dict[str, Any]:
    """Returns an input with the range that samples are drawn from: its bounds, unless a table's size implies them."""
    if spec.get("range") or limit is None or (table == limit.end and limit.low <= 0):
        return spec
    low = max(limit.low, 0)
    return {**spec, "range": [low, limit.end]} if low < limit.end else spec


def _eager(traced: Traced, inputs: list[Any], opened: Any) -> tuple[Any, list[Any]]:
    """Runs the module on copies of inputs. Returns its result, and the inputs after the call."""
    try:
        with torch.inference_mode():
            return traced.run([value.clone() for value in inputs])
    except Exception as error:
        hint = "check the dtypes and shapes of the module's inputs"
        raise failures.on_samples(traced.what, error, opened.root, hint) from error


def same(results: list[Any], again: list[Any]) -> bool:
    """Returns whether two calls gave the same answer, but for the rounding of another order."""
    if [one.shape for one in results] != [one.shape for one in again]:
        return False
    for one, other in zip(results, again, strict=True):
        if not one.is_floating_point() and not torch.equal(one, other):
            return False
        largest = one.nan_to_num(0, 0, 0).abs().max().item() if one.is_floating_point() and one.numel() else 0
        if largest and not torch.allclose(one, other, rtol=0, atol=1e-3 * largest, equal_nan=True):
            return False
    return True


def _outputs(graph: flat.Flat, names: list[str], results: list[Any], what: str) -> list[dict[str, Any]]:
    outputs = []
    for node, name, real in zip(graph.outputs, names, results, strict=True):
        held = node.meta["val"]
        if tensors.layout(held)["shape"] != list(real.shape) or held.dtype != real.dtype:
            raise Failure("capture", f"output `{name}` of {what} is {_show(real)}, in the graph {_show(held)}")
        if not tensors.supported(held.dtype):
            raise Failure("capture", f"output `{name}` of {what} is {tensors.dtype_name(held.dtype)}")
        outputs.append({"name": name, **tensors.layout(held), "dims": [None] * held.dim()})
    return outputs


def compute_dtypes(graph: flat.Flat, states: Collection[int] = ()) -> list[str | None]:
    """Returns the compute dtype of each output, and of the new value of each state: the coarsest dtype below float32
    that its values were rounded to.
    """
    ranks = [None, torch.float16, torch.bfloat16]
    found: dict[Any, int] = {}
    for node in graph.graph.nodes:
        held = node.meta.get("val")
        dtype = getattr(held, "dtype", None)
        if isinstance(held, (int, torch.SymInt)) or (dtype and not (dtype.is_floating_point or dtype.is_complex)):
            found[node] = 0  # exact, and so a new start
            continue
        rounded = node.op == "call_function" and dtype in ranks[1:] and not _moves(node, dtype)
        before = [found[value] for value in node.all_input_nodes]
        found[node] = max([ranks.index(dtype) if rounded else 0, *before])
    writes = {write.args[0]: write for write in graph.writes}
    after = [writes.get(graph.inputs[at]) for at in states]
    dtypes = [None if node is None else ranks[found[node]] for node in [*graph.outputs, *after]]
    return [None if dtype is None else tensors.dtype_name(dtype) for dtype in dtypes]


def _moves(node: Any, dtype: Any) -> bool:
    """Returns whether a node rounds nothing: it moves values of its own dtype, or fills in values that are exact in it.

    A cast from a wider dtype rounds in eager; a fused kernel may continue with the value before rounding.
    """
    name = overloads.name_of(node.target)
    given = [getattr(value.meta.get("val"), "dtype", None) for value in node.all_input_nodes]
    if name in operators.CASTS:
        return all(one in (dtype, torch.bool) for one in given)
    if name not in _MOVES and name not in _FILLS and not (given and fake.is_view(node)):
        return False
    first = _FILLS.get(name, len(node.args))
    filled = [value for value in node.args[first : first + 2] if isinstance(value, (int, float))]
    if any(float(value) != float(torch.tensor(value, dtype=dtype)) for value in filled):
        return False
    return not any(one is not None and one.is_floating_point and one != dtype for one in given)


def _show(tensor: Any) -> str:
    return f"{tensors.dtype_name(tensor.dtype)}{list(tensor.shape)}"


def _find_output_dims(
    traced: Traced,
    answers: Answers,
    sizes: dict[str, int],
    probes: list[padding.Unpadded],
    device: str,
    quick: bool,
) -> dict[str, str]:
    """Fills in how outputs depend on the bucketed dimensions; returns why dimensions can't be padded, if they can't."""

    def inputs(at: dict[str, int]) -> list[Any]:
        return samples.draw(samples.at_sizes(answers.drawn, at), answers.tables, device, "padding")

    def real(at: dict[str, int]) -> Any:
        return traced.wrapped(*inputs(at))

    def without_data(at: dict[str, int]) -> Any:
        with fake.mode_with_real_parameters() as mode:
            return traced.wrapped(*map(mode.from_tensor, inputs(at)))

    def run(at: dict[str, int]) -> output_sizes.Shapes:
        # One of them may fail: real values may need more memory than there is, or the module may need them.
        first, second = (real, without_data) if quick else (without_data, real)
        with torch.no_grad():
            try:
                returned = first(at)
            except Exception:
                returned = second(at)
        return shapes(structure.tensors_of(returned))

    def shapes(tensors: list[Any]) -> output_sizes.Shapes:
        return [tuple(int(size) for size in tensor.shape) for tensor in tensors]

    outputs = answers.outputs
    seen = [(one.sizes, shapes(one.outputs)) for one in probes if one.error is None]
    base = [tuple(output["shape"]) for output in outputs]
    found, exact = output_sizes.solve(sizes, base, [output["name"] for output in outputs], seen, run)
    for output, dims in zip(outputs, found, strict=True):
        output["dims"] = dims
    return exact


def _order(traced: Traced) -> list[int]:
    """Returns the positions of the inputs of a call, and then of the states."""
    return sorted(range(len(traced.specs)), key=lambda at: at in traced.states)


def _steps(
    parts: list[cut.Part], graph: flat.Flat, inputs: list[Any], out: Path, opened: Any, compiled: bool
) -> tuple[list[tuple[dict[str, Any], Any]], list[dict[str, Any]], int, dict[Any, int]]:
    """Returns the segments, one for each canonical text, with their graphs; the steps that call them; the number of
    values, and the number of each."""
    numbers = {node: index for index, node in enumerate(inputs)}
    segments: list[tuple[dict[str, Any], Any]] = []
    known: dict[str, int] = {}
    steps = []
    values = len(inputs)
    for part in parts:
        built = segment.build(part, graph)
        index = known.get(built.text)
        if index is None:
            index = known[built.text] = len(segments)
            path = out / f"segment{index}.pt2"
            if compiled:
                segment.save(built, path, opened.root, opened.entry)
            segments.append((_segment(built, path), built.graph))
        outputs = []
        for node in part.outputs:
            numbers[node] = values
            outputs.append(values)
            values += 1
        steps.append(
            {
                "name": part.name,
                "segment": index,
                "inputs": [numbers[node] for node in part.inputs],
                "outputs": outputs,
                "binding": {f"c{position}": graph.weights[node] for position, node in enumerate(part.constants)},
            }
        )
    return segments, steps, values, numbers


def _choices(
    ones: list[tuple[tuple[str, ...], flat.Flat]], specs: list[dict[str, Any]], order: list[int]
) -> list[eager.Choice]:
    """Returns graphs for size 1 of dimensions, each with the axes of inputs that have to be 1."""
    where = {dim: (place, axis) for place, at in enumerate(order) for axis, dim in enumerate(specs[at]["dims"])}
    return [eager.Choice([where[dim] for dim in dims], graph) for dims, graph in ones]


def _save_eager(
    graph: flat.Flat, order: list[int], out: Path, what: str, compiled: bool, choices: list[eager.Choice]
) -> tuple[str | None, list[str], list[str]]:
    """Saves the list of calls for eager. Returns the file, the names of its weights, and notes.

    A graph that can't be a list of calls has no file; then the module must be compiled.
    """
    path = out / "eager.json"
    try:
        return str(path), eager.save(graph, order, path, choices), []
    except eager.Refused as reason:
        message = f"eager can't run {what} without Python: {reason}"
        if not compiled:
            raise Failure("capture", message, hint="let the spec compile this module") from reason
        return None, [], [f"{message}; requests that no bucket covers are refused"]


def _segment(built: segment.Segment, path: Path) -> dict[str, Any]:
    def layouts(nodes: list[Any]) -> list[dict[str, Any]]:
        return [tensors.layout(node.meta["val"]) for node in nodes]

    constants = [{"name": f"c{index}", **entry} for index, entry in enumerate(layouts(built.constants))]
    return {
        "graph": built.text,
        "file": str(path),
        "inputs": layouts(built.inputs),
        "outputs": layouts(built.outputs),
        "constants": constants,
        "libraries": built.libraries,
    }


def _write_samples(out: Path, traced: Traced, answers: Answers, smaller: list[padding.Unpadded]) -> Path:
    """Writes inputs, states and results of calls, the one at the sizes of the bucket with its states after the call."""
    named = {}
    runs = [(run.inputs, run.outputs) for run in smaller if run.error is None]
    sets = [("", answers.inputs, answers.results), *((f"smaller.{index}.", *run) for index, run in enumerate(runs))]
    count = len(traced.specs) - len(traced.states)
    for prefix, ins, outs in sets:
        for index, at in enumerate(_order(traced)):
            kind, number = ("in", index) if index < count else ("state", index - count)
            named[f"{prefix}{kind}.{number}"] = ins[at]
        named |= {f"{prefix}out.{index}": tensor for index, tensor in enumerate(outs)}
    for number, (ins, outs) in enumerate(answers.sequence):
        for kind, all_ in (("in", ins), ("out", outs)):
            named |= {f"sequence.{number}.{kind}.{index}": tensor for index, tensor in enumerate(all_)}
    named |= {f"after.{index}": answers.after[at] for index, at in enumerate(traced.states)}
    return tensors.write(out / "samples.safetensors", named)
