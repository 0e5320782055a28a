"""Parts of a model in one build: each is a submodule, captured by itself, and gets a release of its own.

All parts are saved in one folder (`captured`), and compiled by one build: its workers start once. The tensors and the
modules of a part begin with the name of the part, if there are several. Its release is then published from a spec of
the part alone, whose programs are there already.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..capture import captured, replay
from ..client import building
from ..errors import BuildError
from ..spec import Compile, Module, Spec
from .engine import CompileFailed

CALL = "call"
"""The asset of a release that says for which calls of a module its programs answer."""


@dataclass
class Part:
    """A captured submodule."""

    name: str
    """What the names of its tensors and modules begin with; empty for the only part of a build."""
    device: str
    tensors: Mapping[str, captured.Held]
    functions: dict[str, captured.Function]
    modules: list[Module]
    """The modules of a spec that compile the functions."""
    document: dict[str, Any]
    """The asset `CALL` of its release."""
    imports: tuple[str, ...] = ()
    """Modules that register operators."""


def called(name: str) -> str:
    """Returns the name of the module of a part for calls without gradients."""
    return f"{name}_forward" if name else "forward"


def build(model: str, found: Mapping[str, Part], compile: Compile, **command: Any) -> dict[str, Exception]:
    """Builds parts, each with the name of its release; returns the errors of those that have none."""
    failed: dict[str, Exception] = {}
    with tempfile.TemporaryDirectory(prefix="precast-") as temporary:
        folder = Path(temporary)
        functions = {name: one for part in found.values() for name, one in part.functions.items()}
        imports = sorted({one for part in found.values() for one in part.imports})
        captured.save([part.tensors for part in found.values()], functions, folder, imports)

        def run(file: str, some: Sequence[Part], **options: Any) -> None:
            assets = {}
            if len(some) == 1:
                assets[CALL] = f"{some[0].name or 'forward'}.json"
                (folder / assets[CALL]).write_text(json.dumps(some[0].document, sort_keys=True), "utf-8")
            spec = Spec(
                name=model,
                entry="replay:load",
                weights=replay.WEIGHTS,
                unused_weights=["*"],
                assets=assets or None,
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
                run(f"{part.name or 'forward'}.toml", [part], release=release)
            except (BuildError, CompileFailed) as error:
                failures = getattr(error, "failures", ())
                failed[release] = CompileFailed("; ".join(failures[:3])) if failures else error
    return failed
