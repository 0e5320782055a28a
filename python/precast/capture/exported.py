"""A model object of the caller's process: captured here, compiled by workers.

```python
precast.build(
    net,
    {"input_ids": ids, "attention_mask": mask},
    name="encoder",
    shapes={"input_ids": ["batch", "seq"], "attention_mask": ["batch", "seq"]},
    buckets={"batch": [1, 8], "seq": [64, 128]},
)
```

The class of the module may be in a notebook or in `__main__`. Values of its weights are no part of a program: new ones
cost no compile. Names of weights are those of the module, so that `precast.load(…, weights=parameters(net))` can bind
the module's own tensors to a release that was built with `options={"freezing": False}`.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..client.building import build_spec
from ..client.objects import BuildResult
from ..errors import BadInput
from ..spec import Buckets, Compile, Gate, Input, Module, Spec
from ..torch_private import modules as of_torch
from . import captured, replay
from .nesting import Call, call_of
from .programs import Capture, Plain, check_build

Shapes = Mapping[str, Sequence[int | str] | Mapping[int, str]]
BucketSizes = Mapping[str, Sequence[int]] | Sequence[Mapping[str, int]]


def build(
    net: torch.nn.Module,
    example_inputs: Any,
    *,
    name: str,
    shapes: Shapes | None = None,
    buckets: BucketSizes | None = None,
    pad: Mapping[str, float] | None = None,
    ranges: Mapping[str, tuple[int, int]] | None = None,
    method: str = "forward",
    regions: Sequence[str] | None = None,
    padding: str | None = None,
    gate: Gate | None = None,
    mode: str | None = None,
    dynamic: bool | Mapping[str, Mapping[str, int]] | None = None,
    options: Mapping[str, Any] | None = None,
    compile: Compile | None = None,
    isa: str | None = None,
    imports: Sequence[str] = (),
    folder: str | Path | None = None,
    **command: Any,
) -> BuildResult:
    """Builds a module for these buckets, and publishes a release of the model `name`.

    The module is captured in eval mode, on the device that it is on, and is left as it was. The release has one module
    with the name of the method. Its inputs are the tensors among `example_inputs`, which are a tensor, a tuple of
    arguments, a dict of keyword arguments, or a tuple and a dict. A tensor in a list or a dict is named by its place,
    as `past.0`. Numbers, text, booleans and None are constants of the release.

    - `shapes`: the axes of each input that are bucketed dimensions: `["batch", 3, 32, 32]` or `{0: "batch"}`. Others
      have the sizes of the example.
    - `buckets`: the sizes of each dimension, `{"batch": [1, 8]}`, or a list of points, `[{"batch": 1, "seq": 512}]`.
    - `pad`: what fills an input up to a bucket, 0 if left out; `ranges`: the values that an integer input may have.
    - `mode`, `dynamic`, `options`, all other keys of `[compile]` in `compile`, `regions`, `padding`, `gate`, `isa`: as
      in a spec.
    - `imports`: modules that register operators of the module, for the workers to import.
    - `folder`: keeps the spec and the captured programs, for `precast check` and `precast build`. Without it they are
      temporary.
    - `command`: arguments of `precast.build` for a spec: `store`, `release`, `jobs`, `progress` and so on.

    Raises `BadInput` for inputs that no artifact takes, and `BuildError` with the module's line where it can't be
    captured, or with the command's error.
    """
    net, call, dims, points = asked(net, example_inputs, shapes, buckets, method)
    source = Plain(net, method, call)
    device = check_build({**source.weights(), **dict(zip(call.names, call.tensors, strict=True))})
    inputs = inputs_of(call.names, call.tensors, dims, pad or {}, ranges or {})
    settings = compile or Compile()
    for key, value in {"mode": mode, "dynamic": dynamic, "options": options}.items():
        if value is not None:
            setattr(settings, key, value)
    spec = Spec(
        name=name,
        entry="replay:load",
        weights=replay.WEIGHTS,
        device=device,
        isa=isa,
        compile=settings,
        modules=[
            Module(method, regions=regions, inputs=inputs, buckets=buckets_of(buckets), gate=gate, padding=padding)
        ],
    )
    with tempfile.TemporaryDirectory(prefix="precast-") as temporary:
        place = Path(folder or temporary)
        save(source, dims, points, place, imports, settings.dynamic)
        spec.write(place / "precast.toml")
        return build_spec(place / "precast.toml", **command)


def save(
    source: Plain,
    dims: list[list[str | None]],
    points: list[dict[str, int]],
    folder: Path,
    imports: Sequence[str] = (),
    dynamic: Any = None,
) -> captured.Function:
    """Captures a method of a module, and writes the folder that a build compiles it from."""
    programs = Capture(source, source.call.tensors, dims, points, dynamic).programs()
    given = dict(zip(source.names, source.call.tensors, strict=True))
    function = captured.Function(given, dims, source.flat.outputs, programs)
    modules = [name for name, _ in source.net.named_modules(remove_duplicate=False) if name]
    captured.save([captured.held_by(source.net)], {"forward": function}, folder, imports, modules)
    return function


def inputs_of(
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    dims: list[list[str | None]],
    pad: Mapping[str, float],
    ranges: Mapping[str, tuple[int, int]],
) -> dict[str, Input]:
    """Returns the inputs of a call, as a spec has them."""
    inputs = {}
    for one, tensor, axes in zip(names, tensors, dims, strict=True):
        fill = pad.get(one, False if tensor.dtype == torch.bool else 0.0 if tensor.is_floating_point() else 0)
        inputs[one] = Input(captured.dtype(tensor), captured.shape_of(tensor, axes), fill, ranges.get(one))
    _known("pad", pad, names)
    _known("ranges", ranges, names)
    return inputs


def parameters(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the module's parameters and persistent buffers under the names that a release has, tied ones under each.

    The tensors share memory with the module's.
    """
    own = captured.tensors_of(_unwrapped(net))
    return {name: tensor.detach() for name, tensor, kind in own if kind != "constant"}


def _unwrapped(net: torch.nn.Module) -> torch.nn.Module:
    """Returns the module itself for one that torch.compile returned."""
    return of_torch.original(net, net)


def asked(
    net: torch.nn.Module, example_inputs: Any, shapes: Shapes | None, buckets: BucketSizes | None, method: str
) -> tuple[torch.nn.Module, Call, list[list[str | None]], list[dict[str, int]]]:
    """Returns the module itself, its call, the bucketed dimension of each axis, and the sizes of each bucket."""
    net = _unwrapped(net)
    if isinstance(net, torch.jit.ScriptModule):
        raise BadInput("a TorchScript module can't be captured", hint="give the torch.nn.Module that it was made from")
    call = call_of(getattr(net, method), example_inputs)
    if not call.tensors:
        raise BadInput("the example inputs have no tensor")
    dims, points = sizes_of(call.names, call.tensors, shapes or {}, buckets)
    return net, call, dims, points


def sizes_of(
    names: Sequence[str], tensors: Sequence[torch.Tensor], shapes: Shapes, buckets: BucketSizes | None
) -> tuple[list[list[str | None]], list[dict[str, int]]]:
    """Returns the bucketed dimension of each axis of some tensors, and the sizes of each bucket."""
    dims = _dims(names, tensors, shapes)
    if buckets is None or isinstance(buckets, Mapping):
        grid = buckets or {}
        points = [dict(zip(grid, sizes, strict=True)) for sizes in itertools.product(*grid.values())]
    else:
        points = [dict(point) for point in buckets]
    if not points:
        raise BadInput("a dimension in `buckets` has no size")
    named = {dim for axes in dims for dim in axes if dim is not None}
    for point in points:
        if missing := sorted(named - point.keys()):
            raise BadInput(f"`shapes` names the dimension `{missing[0]}`, and `buckets` has no sizes of it")
        if unused := sorted(point.keys() - named):
            hint = 'say which axes it is, as `shapes={"x": ["batch", 3, 32, 32]}`'
            raise BadInput(f"`buckets` has sizes of `{unused[0]}`, and no input has this dimension", hint=hint)
    return dims, points


def buckets_of(buckets: BucketSizes | None) -> Buckets | None:
    if not buckets:
        return None
    if not isinstance(buckets, Mapping):
        return Buckets(points=buckets)
    found = Buckets()
    found.grid = dict(buckets)
    return found


def _dims(names: Sequence[str], tensors: Sequence[torch.Tensor], shapes: Shapes) -> list[list[str | None]]:
    _known("shapes", shapes, names)
    found: list[list[str | None]] = []
    for name, tensor in zip(names, tensors, strict=True):
        shape = shapes.get(name, {})
        if not isinstance(shape, Mapping) and len(shape) != tensor.dim():
            raise BadInput(f"`shapes` has {len(shape)} axes of `{name}`, the example has {tensor.dim()}")
        axes: list[str | None] = [None] * tensor.dim()
        for axis, dim in shape.items() if isinstance(shape, Mapping) else enumerate(shape):
            if not -tensor.dim() <= axis < tensor.dim():
                raise BadInput(f"`shapes` names axis {axis} of `{name}`, the example has {tensor.dim()}")
            if isinstance(dim, str) and tensor.shape[axis]:
                axes[axis] = dim
            elif isinstance(dim, str):
                raise BadInput(f"axis {axis} of `{name}` has no element in the example")
            elif dim != tensor.shape[axis]:
                raise BadInput(f"axis {axis} of `{name}` is {dim} in `shapes`, and {tensor.shape[axis]} in the example")
        found.append(axes)
    return found


def _known(what: str, named: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in named:
        if name not in names:
            known = ", ".join(f"`{one}`" for one in names)
            raise BadInput(f"`{what}` names `{name}`, which is no tensor of the example", hint=f"these are {known}")
