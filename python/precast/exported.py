"""Builds a module object of the caller's process: captured here, compiled by workers from the captured programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from . import capture, replay
from .errors import BadInput, BuildError

_ENTRY = '''"""Opens the captured module in this folder."""

from pathlib import Path

from precast import replay


def load():
    return replay.load(Path(__file__).parent)
'''


def build(
    net: torch.nn.Module,
    example_inputs: Any,
    *,
    name: str,
    store: str | Path = "artifacts",
    shapes: Mapping[str, Sequence[int | str] | Mapping[int, str]] | None = None,
    buckets: Mapping[str, Sequence[int]] | Sequence[Mapping[str, int]] | None = None,
    pad: Mapping[str, float] | None = None,
    ranges: Mapping[str, tuple[int, int]] | None = None,
    mode: str = "default",
    dynamic: bool | Mapping[str, Mapping[str, int]] = False,
    options: Mapping[str, Any] | None = None,
    compile: Mapping[str, Any] | None = None,
    regions: Sequence[str] = (),
    gate: Mapping[str, float] | None = None,
    padding: str = "checked",
    imports: Sequence[str] = (),
    folder: str | Path | None = None,
    arguments: Sequence[str] = (),
) -> dict[str, Any]:
    net = capture.unwrapped(net)
    call = capture.call_of(net, example_inputs)
    dims = dims_of(call, shapes or {})
    points = points_of(buckets or {}, dims)
    captured = capture.capture(net, call, dims, points)
    spec = {
        "schema": 1,
        "model": {"name": name, "entry": "entry:load", "weights": replay.WEIGHTS},
        "target": {"device": captured.device},
        "compile": {"mode": mode, "dynamic": dynamic, "options": options or {}, **(compile or {})},
    }
    inputs = {}
    for input_, tensor, axes in zip(call.names, call.tensors, dims, strict=True):
        shape = [size if dim is None else dim for size, dim in zip(tensor.shape, axes, strict=True)]
        inputs[input_] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": shape}
        inputs[input_]["pad"] = (pad or {}).get(input_, 0.0 if tensor.is_floating_point() else 0)
        if input_ in (ranges or {}):
            inputs[input_]["range"] = list(ranges[input_])
    module = {"name": "forward", "regions": list(regions), "padding": padding, "inputs": inputs}
    if isinstance(buckets, Mapping):
        module["buckets"] = {dim: list(sizes) for dim, sizes in buckets.items()}
    elif buckets:
        module["buckets"] = {"points": [dict(point) for point in buckets]}
    if gate:
        module["gate"] = dict(gate)
    spec["module"] = [module]
    with tempfile.TemporaryDirectory(prefix="precast-") as temporary:
        place = Path(folder or temporary)
        capture.save(captured, place, imports)
        (place / "entry.py").write_text(_ENTRY)
        (place / "precast.toml").write_text(toml(spec))
        return run(place, store, arguments)


def run(place, store, arguments):
    command = os.environ.get("PRECAST_COMMAND", "precast")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [command, "--store", str(store), "--format", "json", "build", str(place / "precast.toml"), "--python", sys.executable, *arguments],
        capture_output=True, text=True, env=env,
    )
    sys.stderr.write(done.stderr)
    lines = done.stdout.splitlines()
    if not lines:
        raise BuildError(done.stderr)
    return json.loads(lines[-1])


def dims_of(call, shapes):
    found = [[None] * tensor.dim() for tensor in call.tensors]
    for name, shape in shapes.items():
        if name not in call.names:
            known = ", ".join(f"`{one}`" for one in call.names)
            raise BadInput(f"`shapes` names `{name}`, which is no input", hint=f"the inputs are {known}")
        at = call.names.index(name)
        axes = shape.items() if isinstance(shape, Mapping) else enumerate(shape)
        for axis, dim in axes:
            if isinstance(dim, str):
                found[at][axis] = dim
    return found


def points_of(buckets, dims):
    import itertools
    if not isinstance(buckets, Mapping):
        return [dict(point) for point in buckets]
    if not buckets:
        return []
    return [dict(zip(buckets, sizes, strict=True)) for sizes in itertools.product(*buckets.values())]


def toml(value: Any) -> str:
    """Returns a TOML document."""
    lines = []
    for key, item in value.items():
        if key == "module":
            for one in item:
                lines += ["[[module]]", *(f"{name} = {inline(held)}" for name, held in one.items())]
        elif isinstance(item, dict):
            lines += [f"[{key}]", *(f"{name} = {inline(held)}" for name, held in item.items())]
        else:
            lines.append(f"{key} = {inline(item)}")
    return "\n".join(lines) + "\n"


def inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(str(key))} = {inline(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(inline, value))}]"
    return json.dumps(value)
