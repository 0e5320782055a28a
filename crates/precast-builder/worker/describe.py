"""The content of a spec for a model, which `init` writes: inputs, their dimensions and values, repeated submodules.

Inputs come from the command line or from a callable of the project. Axes that vary are found

- by their names on the command line;
- by calling a callable that takes sizes (`def samples(batch=1, seq=32)`) with other sizes;
- by comparing the samples, if it returns several;
- else by running the model with one row more, and with one token more.

A generative model of transformers needs none of that: its modules are those of `generation.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from . import capture, failures, globs, tensors
from .graph import call, cut, segment
from .model import entry, generation, inputs, repeats
from .values import samples
from .wire import Failure, Wire

# A list of as many equal submodules is worth a region.
_REPEATS = 3
# Sizes to try a dimension at that only the command line names.
_DEFAULTS = {"batch": 2}
_SIZE = 16
# Bucket sizes without information about requests.
_USUAL = {"batch": [1, 8]}
_LENGTHS, _IMAGES = [32, 128], [64, 224]


@dataclass
class Draft:
    """The inputs of a spec as far as they are known."""

    specs: list[dict[str, Any]]
    structure: dict[str, Any] | None
    # Dimension -> every size that was seen.
    sizes: dict[str, list[int]] = field(default_factory=dict)
    # The values of one sample, if there is one.
    values: list[Any] | None = None

    @property
    def flat(self) -> bool:
        """Returns whether a spec can express the inputs: tensors by name, and nothing else."""
        if self.structure is None:
            return True
        arguments = [*self.structure["args"], *self.structure["kwargs"].values()]
        return all("tensor" in one or one == {"value": None} for one in arguments)


def describe(opened: Any, request: dict[str, Any], wire: Wire) -> dict[str, Any]:
    """Returns the protocol's `Described`."""
    notes: list[str] = []
    wire.event("run")
    if request["inputs"]:
        draft = _asked(request["inputs"])
    elif request.get("samples"):
        draft = _sampled(opened, request["samples"])
    elif generation.is_generative(opened.model):
        return _generative(opened, wire)
    else:
        raise _nothing(opened)
    module = {"name": "model", "path": "", "method": "forward", "regions": [], "inputs": draft.specs}
    module["structure"] = None if draft.flat else draft.structure
    sizes = {dim: seen[0] for dim, seen in draft.sizes.items()}
    traced, regions = None, []
    try:
        traced = capture.trace(opened, module, sizes, wire)
        dtype = _dtype(traced)
        regions = _regions(opened, module, traced, wire)
    except Exception as error:  # a model may raise anything; the rest of the spec is known
        failed = failures.describe(error, opened.root)
        place = f"{failed['location']}: " if failed["location"] else ""
        notes.append(f"it can't be captured as it is: {place}{failed['message']}; `precast check` says what to change")
        traced, dtype = None, None
    described = []
    for index, spec in enumerate(draft.specs):
        limit = traced.limits[index] if traced is not None else None
        value = draft.values[index] if draft.values is not None else None
        described.append({**_named(spec), "pad": _pad(spec), "range": _range(spec, limit, value)})
    forward = {"name": "forward", "method": "forward", "state": {}, "regions": regions}
    return {
        "class": type(opened.model).__name__,
        "modules": [{**forward, "inputs": described if draft.flat else None}],
        "generative": False,
        "sizes": _useful(opened, draft),
        "dtype": dtype,
        "notes": notes,
    }


def _generative(opened: Any, wire: Wire) -> dict[str, Any]:
    """Returns the modules `prefill` and `decode` of a generative model."""
    kind, most, notes = type(opened.model).__name__, generation.positions(opened.model), []
    if most is None:
        notes.append(f"`{kind}` names no largest position: choose the sizes of `context`, and that of `[model]`")
    sizes = generation.sizes(opened.model)
    generation.attach(opened.model, opened.entry, sizes["context"][0])
    state = generation.states(opened.model)
    modules: list[dict[str, Any]] = []
    dtypes = []
    for name, (method, rows) in generation.modules(opened.model).items():
        if modules and modules[-1]["method"] == method:
            # The same at other sizes.
            ranges = {one["name"]: one["range"] for one in modules[-1]["inputs"]}
            regions = modules[-1]["regions"]
        else:
            first = {dim: own[0] for dim, own in sizes.items()}
            specs = [_spec(key, dtype, axes, first) for key, (dtype, axes, _) in rows.items()]
            module = {"name": name, "path": "", "method": method, "regions": [], "inputs": specs}
            traced = capture.trace(opened, module, first, wire)
            regions = _regions(opened, module, traced, wire)
            pairs = zip(specs, traced.limits, strict=False)
            ranges = {spec["name"]: rows[spec["name"]][2] or _range(spec, limit, None) for spec, limit in pairs}
            dtypes.append(_dtype(traced))
        inputs_ = [
            {"name": key, "dtype": dtype, "shape": axes, "pad": None, "range": ranges[key]}
            | ({"default": generation.GREEDY[key]} if key in generation.GREEDY else {})
            for key, (dtype, axes, _) in rows.items()
        ]
        modules.append({"name": name, "method": method, "inputs": inputs_, "state": state, "regions": regions})
    for module in modules:
        # An encoder has no cache of tokens.
        if module["method"] == "encode":
            module["state"] = {glob: axes for glob, axes in state.items() if "context" not in axes}
    return {
        "class": kind,
        "modules": modules,
        "generative": True,
        "sizes": sizes,
        "dtype": dtypes[-1],
        "notes": notes,
    }


def _asked(given: list[dict[str, Any]]) -> Draft:
    dims = dict.fromkeys(dim for one in given for dim in one["shape"] if isinstance(dim, str))
    sizes = {dim: _DEFAULTS.get(dim, _SIZE) for dim in dims}
    specs = [_spec(one["name"], one["dtype"], one["shape"], sizes) for one in given]
    return Draft(specs, None, {dim: [size] for dim, size in sizes.items()})


def _spec(name: str, dtype: str, shape: list[Any], sizes: dict[str, int]) -> dict[str, Any]:
    numbers = [sizes[dim] if isinstance(dim, str) else dim for dim in shape]
    dims = [dim if isinstance(dim, str) else None for dim in shape]
    return {"name": name, "dtype": dtype, "shape": numbers, "dims": dims, "pad": 0, "range": None}


def _sampled(opened: Any, name: str) -> Draft:
    function = entry.load(opened.root, name)
    several = _several(function, name, opened)
    if several is not None:
        return _compared(opened, several)
    numbers = {
        parameter.name: parameter.default
        for parameter in inspect.signature(function).parameters.values()
        if isinstance(parameter.default, int) and not isinstance(parameter.default, bool) and parameter.default > 0
    }
    request = {"path": "", "method": "forward", "samples": name, "sizes": numbers}
    found = inputs.find(opened, request)
    specs = [{**one, "range": None} for one in found["inputs"]]
    draft = Draft(specs, found["structure"], values=inputs.values(opened, request))
    for spec in specs:
        for dim, size in zip(spec["dims"], spec["shape"], strict=True):
            if dim is not None:
                draft.sizes[dim] = [size]
    if not numbers and draft.flat:
        _try(opened, draft)
    return draft


def _several(function: Callable[..., Any], name: str, opened: Any) -> list[Any] | None:
    """Returns the samples of a callable that gives a list of them: tuples or dicts of arguments."""
    try:
        made = function()
    except Exception as error:
        raise failures.raised("entry_call", f"`{name}`", error, opened.root) from error
    several = isinstance(made, list) and len(made) > 1 and all(isinstance(one, tuple | dict) for one in made)
    return made if several else None


def _compared(opened: Any, several: list[Any]) -> Draft:
    """Names the axes whose sizes differ between samples; axes that change alike are one dimension."""
    seen = [inputs.called_with(opened.model.forward, one, opened.device) for one in several]
    first = seen[0]
    if any(other.names != first.names for other in seen):
        raise Failure("bad_input", "the samples have different inputs", hint="give samples of one kind of call")
    draft = Draft([], first.structure, values=first.values)
    known: dict[tuple[int, ...], str] = {}
    for index, name in enumerate(first.names):
        shapes = [tuple(one.values[index].shape) for one in seen]
        if len({len(shape) for shape in shapes}) > 1:
            raise Failure("bad_input", f"the rank of input `{name}` differs between samples")
        dims: list[str | None] = []
        for axis, column in enumerate(zip(*shapes, strict=True)):
            if len(set(column)) > 1 and column not in known:
                known[column] = _dim_name(axis, len(shapes[0]), set(known.values()))
                draft.sizes[known[column]] = sorted(set(column))
            dims.append(known.get(column) if len(set(column)) > 1 else None)
        value = first.values[index]
        draft.specs.append({**_spec(name, tensors.dtype_name(value.dtype), list(value.shape), {}), "dims": dims})
    return draft


def _dim_name(axis: int, rank: int, taken: set[str]) -> str:
    wanted = "batch" if axis == 0 else {4: ["", "", "height", "width"]}.get(rank, ["", "seq"])[axis : axis + 1]
    name = wanted if isinstance(wanted, str) else (wanted[0] if wanted and wanted[0] else f"dim{axis}")
    number = 2
    while name in taken:
        name, number = f"{name.rstrip('0123456789')}{number}", number + 1
    return name


def _try(opened: Any, draft: Draft) -> None:
    """Frees the first axis of all inputs, and the second of those of token ids, where the model runs at other sizes."""
    wrapped = call.wrap(opened.model, "forward", [spec["name"] for spec in draft.specs])
    ids = [spec for spec in draft.specs if not _floating(spec)]
    for name, axis, own in (("batch", 0, draft.specs), ("seq", 1, ids)):
        sizes = {spec["shape"][axis] for spec in own if len(spec["shape"]) > axis}
        if len(sizes) != 1 or not all(len(spec["shape"]) > axis for spec in own):
            continue
        (size,) = sizes
        trial = [_spec(s["name"], s["dtype"], list(s["shape"]), {}) for s in draft.specs]
        for spec, original in zip(trial, draft.specs, strict=True):
            if any(original is one for one in own):
                spec["shape"][axis] = size + 1
        if _runs(wrapped, trial, opened.device):
            for spec in own:
                spec["dims"][axis] = name
            draft.sizes[name] = [size]


def _runs(wrapped: Any, specs: list[dict[str, Any]], device: str) -> bool:
    try:
        with torch.no_grad():
            wrapped(*samples.lowest(specs, device))
    except Exception:  # any error: the module does not take this size
        return False
    return True


def _useful(opened: Any, draft: Draft) -> dict[str, list[int]]:
    """Returns sizes for buckets: those of several samples, else usual ones at which the model runs."""
    names = [spec["name"] for spec in draft.specs]
    wrapped = call.wrap(opened.model, "forward", names, None if draft.flat else draft.structure)
    found = dict(draft.sizes)

    def runs(**sizes: int) -> bool:
        first = {dim: seen[0] for dim, seen in draft.sizes.items()}
        return _runs(wrapped, samples.at_sizes(draft.specs, first | sizes), opened.device)

    for dim, seen in draft.sizes.items():
        usual = _USUAL.get(dim, _LENGTHS if not _is_image(draft, dim) else _IMAGES)
        if len(seen) == 1 and seen[0] <= _SIZE:
            found[dim] = [size for size in usual if runs(**{dim: size})] or seen
    if found != draft.sizes and not runs(**{dim: sizes[-1] for dim, sizes in found.items()}):
        return draft.sizes
    return found


def _is_image(draft: Draft, dim: str) -> bool:
    """Returns whether a dimension is the height or width of an input of four axes."""
    return any(len(spec["dims"]) == 4 and dim in spec["dims"][2:] for spec in draft.specs)


def _named(spec: dict[str, Any]) -> dict[str, Any]:
    shape = [size if dim is None else dim for dim, size in zip(spec["dims"], spec["shape"], strict=True)]
    return {"name": spec["name"], "dtype": spec["dtype"], "shape": shape}


def _pad(spec: dict[str, Any]) -> Any:
    if spec["dtype"] == "bool":
        return False
    return 0.0 if _floating(spec) else 0


def _floating(spec: dict[str, Any]) -> bool:
    return spec["dtype"].startswith(("float", "bfloat"))


def _range(spec: dict[str, Any], limit: Any, value: Any) -> list[int] | None:
    """Returns the values that an integer input may have: rows of the tables it indexes, or zero and one for a mask."""
    if spec["dtype"] == "bool" or _floating(spec):
        return None
    if limit is not None and limit.end > max(limit.low, 0):
        return [max(limit.low, 0), limit.end]
    flags = value is not None and value.numel() > 0 and 0 <= int(value.min()) and int(value.max()) <= 1
    return [0, 2] if flags or "mask" in spec["name"] else None


def _dtype(traced: Any) -> str | None:
    """Returns the coarsest floating dtype that an output has, or was computed in."""
    order = ["bfloat16", "float16", "float32", "float64"]
    held = [tensors.dtype_name(node.meta["val"].dtype) for node in traced.graph.outputs]
    held += [one for one in capture.compute_dtypes(traced.graph) if one is not None]
    return next((one for one in order if one in held), None)


def _regions(opened: Any, module: dict[str, Any], traced: Any, wire: Wire) -> list[dict[str, Any]]:
    """Returns lists of submodules of which several have one graph, with their numbers of members and of graphs."""
    names = set(cut.called(traced.graph))
    repeated = [one for one in repeats.find(opened.model) if len(names & one.members.keys()) >= _REPEATS]
    candidates = [one.glob for one in repeated]
    if not candidates:
        return []
    wire.event("regions")
    parts = capture.parts_of(traced, {**module, "regions": candidates})
    texts = [(part.name, segment.build(part, traced.graph).text) for part in parts]
    found = []
    for glob in candidates:
        own = [text for part, text in texts if globs.matches(glob, part)]
        if len(own) >= _REPEATS and len(set(own)) <= len(own) // 2:
            found.append({"glob": glob, "count": len(own), "artifacts": len(set(own))})
    return found


def _nothing(opened: Any) -> Failure:
    parameters = [
        parameter.name
        for parameter in inspect.signature(opened.model.forward).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    first = parameters[0] if parameters else "x"
    known = ", ".join(f"`{name}`" for name in parameters[:8]) or "none"
    return Failure(
        "bad_input",
        "nothing says what the model is called with",
        hint=f"give `--sample MODULE:CALLABLE`, or each input as `--input '{first}=int64[batch,seq]'`; "
        f"forward has {known}",
    )
