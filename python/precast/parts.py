"""Parts of a model in one build: each is a submodule, captured by itself, and gets a release of its own.

All parts are saved in one folder (`captured`), and compiled by one build: its workers start once. The tensors and the
modules of a part begin with the name of the part. Its release is then published from a spec of the part alone, whose
programs are there already.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from . import building, captured, exported, pairs, replay
from .capture import Capture, check_build, device_of, held_under
from .engine import CompileFailed
from .errors import BuildError
from .nesting import Call
from .spec import Compile, Gate, Module, Spec

if TYPE_CHECKING:
    from .joint import Pair


@dataclass
class Part:
    """A captured submodule."""

    name: str
    net: nn.Module
    """Holds the submodule under the name of the part."""
    device: str
    functions: dict[str, captured.Function]
    modules: list[Module]
    """The modules of a spec that compile the functions."""
    imports: tuple[str, ...] = ()
    """Modules that register operators."""


def called(name: str) -> str:
    """Returns the name of the module of a part for calls without gradients."""
    return f"{name}_forward"


def of_call(
    name: str,
    net: nn.Module,
    example_inputs: Any,
    *,
    shapes: exported.Shapes | None = None,
    buckets: exported.BucketSizes | None = None,
    pad: Mapping[str, float] | None = None,
    gate: Gate | None = None,
    **settings: Any,
) -> Part:
    """Captures a submodule for calls without gradients, as `exported.build` does."""
    net, call, dims, points = exported.asked(net, example_inputs, shapes, buckets, "forward")
    device = check_build(net, call)
    inputs = exported.inputs_of(call, dims, pad or {}, {})
    function = captured.function(Capture(net, "forward", call, dims, points, name))
    at = called(name)
    module = Module(at, method=at, inputs=inputs, buckets=exported.buckets_of(buckets), gate=gate, **settings)
    return Part(name, held_under(net, name), device, {at: function}, [module])


def of_pairs(
    name: str, net: nn.Module, call: Call, found: Sequence[Pair], gate: Gate | None = None, **settings: Any
) -> Part:
    """Returns the part of a submodule that trains. Its pairs have the names of tensors of the part."""
    holder = held_under(net, name)
    functions, modules = pairs.functions_of(holder, found, gate, name)
    for module in modules:
        module.mode, module.options = settings["mode"], settings["options"]
    return Part(name, holder, device_of(net, call), functions, modules, pairs.IMPORTS)


def build(model: str, found: Mapping[str, Part], compile: Compile, **command: Any) -> dict[str, Exception]:
    """Builds parts, each with the name of its release; returns the errors of those that have none."""
    failed: dict[str, Exception] = {}
    with tempfile.TemporaryDirectory(prefix="precast-") as temporary:
        folder = Path(temporary)
        functions = {name: one for part in found.values() for name, one in part.functions.items()}
        imports = sorted({one for part in found.values() for one in part.imports})
        captured.save([part.net for part in found.values()], functions, folder, imports)

        def run(file: str, some: Sequence[Part], **options: Any) -> None:
            spec = Spec(
                name=model,
                entry="replay:load",
                weights=replay.WEIGHTS,
                unused_weights=["*"],
                device=some[0].device,
                compile=compile,
                modules=[module for part in some for module in part.modules],
            )
            spec.write(folder / file)
            building.build_spec(folder / file, **command, **options)

        causes: Sequence[str] = ()
        if len(found) > 1:
            try:
                run("precast.toml", list(found.values()))
            except BuildError as error:
                causes = error.failures
                if not causes:
                    raise
        for release, part in found.items():
            own = [cause for cause in causes if cause.startswith(f"{part.name}_")]
            try:
                if own:
                    raise CompileFailed("; ".join(own[:3]))
                run(f"{part.name}.toml", [part], release=release)
            except (BuildError, CompileFailed) as error:
                failures = getattr(error, "failures", ())
                failed[release] = CompileFailed("; ".join(failures[:3])) if failures else error
    return failed
