"""AOTInductor: its options, one compile, and the files that it generates."""

from __future__ import annotations

import json
import re
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import errors
from .cpp_toolchain import WarmedUp, begin, toolchain


def modes() -> dict[str, dict[str, Any]]:
    """Returns the modes of torch.compile, each with its options.

    Private: `torch._inductor.list_mode_options`. Without it: nothing compiles.
    """
    import torch._inductor

    return torch._inductor.list_mode_options()  # type: ignore[return-value]


def option_names() -> set[str]:
    """Returns the names of all compiler options.

    Private: `torch._inductor.list_options`. Without it: nothing compiles.
    """
    import torch._inductor

    return set(torch._inductor.list_options())


def compile_aot(
    module: Any, inputs: list[Any], options: dict[str, Any], out: Path, patches: list[AbstractContextManager[None]]
) -> list[str]:
    """Compiles a module whose weights are buffers; returns the files that were generated, all under `out`.

    `patches` are entered after the compiler is imported: its modules import each other, and only this one can be first.

    Private: `torch._inductor.compile_fx.compile_fx_aot`, which returns the list of files for `aot_inductor.package`.
    Without it: nothing compiles.
    """
    from torch._inductor.compile_fx import compile_fx_aot

    config = dict(options)
    config["aot_inductor.output_path"] = str(out / "artifact.so")
    # The compiler writes into this dictionary; a shared one would carry entries from artifact to artifact.
    config["aot_inductor.metadata"] = {}
    with torch.no_grad(), ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        files = compile_fx_aot(module, inputs, config_patches=config)
    return [str(name) for name in files if isinstance(name, str)]


@dataclass
class Generated:
    """The files of one compile."""

    libraries: list[str]
    """Shared objects."""
    proxy: str | None
    """Operators that the artifact calls through the proxy executor, as JSON; None for an artifact that calls none."""
    metadata: dict[str, Any]
    constants: list[str]
    """Names of the constants that the artifact needs."""


def generated(files: list[str]) -> Generated:
    """Returns the parts of a compile's answer.

    Private: the names of the files, the key `nodes` of the proxy executor's JSON, and the lines of the wrapper that
    name constants. Without it: operators without a C function are not found when the artifact runs, or a constant that
    the compiler derived from random weights is not noticed.
    """
    found = Generated([name for name in files if name.endswith(".so")], None, {}, [])
    for name in files:
        if name.endswith("_metadata.json"):
            found.metadata |= json.loads(Path(name).read_text())
        elif name.endswith(".json"):
            nodes = json.loads(Path(name).read_text()).get("nodes", [])
            found.proxy = name if nodes else found.proxy
        elif name.endswith("wrapper.cpp"):
            pattern = r'constants_info_\[\d+\]\.original_fqn = "([^"]*)"'
            found.constants += re.findall(pattern, Path(name).read_text())
    return found


def warm_up(device: str, isa: str, options: dict[str, Any], out: Path, clock: Any) -> None:
    """Imports the compiler, and compiles the C++ headers that every compile on a machine needs.

    The C++ compiler starts before Python imports the rest of the compiler: both take about as long. A graph of one
    addition then goes through the compiler up to its first C++ file, which fills its tables.

    Private: as `compile_aot`. Without it: the first compile of each worker takes longer.
    """
    out.mkdir(parents=True, exist_ok=True)
    headers = begin(isa, device, options, out)
    from torch._inductor.compile_fx import compile_fx_aot

    graph = torch.fx.Graph()
    placeholder = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (placeholder, 1)),))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    config = {**options, "aot_inductor.output_path": str(out / "nothing.so"), "aot_inductor.metadata": {}}
    with torch.no_grad(), toolchain(isa, clock, _no_operators, warm_up=True):
        try:
            compile_fx_aot(module, [torch.ones(64, device=device)], config_patches=config)
        except Exception as error:
            if not isinstance(errors.unwrap(error), WarmedUp):
                raise
    with clock.phase("headers"):
        # The first compile tries a header again that failed here, and reports the cause.
        headers.exception()


def _no_operators(node: Any) -> set[str]:
    return set()
