"""`precast.build`: of a spec, or of a model in hand. For a spec torch is not imported."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from ..client import objects
from ..client.building import PathLike, build_spec
from ..spec import Spec

if TYPE_CHECKING:
    import torch


@overload
def build(
    spec: PathLike | Spec = "precast.toml",
    *,
    store: PathLike | None = None,
    only: str | None = None,
    settings: Mapping[str, Any] | None = None,
    tune: bool = False,
    release: str | None = None,
    without: Sequence[str] = (),
    allow_lost: bool = False,
    locked: bool = False,
    jobs: int | None = None,
    memory: str | None = None,
    timeout: float | None = None,
    trace: PathLike | None = None,
    python: PathLike | None = None,
    untried_torch: bool = False,
    shared: bool = False,
    progress: bool = True,
) -> objects.BuildResult: ...


@overload
def build(spec: torch.nn.Module, *arguments: Any, **options: Any) -> Any: ...


def build(spec: PathLike | Spec | torch.nn.Module = "precast.toml", *arguments: Any, **options: Any) -> Any:
    """Builds a spec, or a model in hand.

    Of a spec, the programs that the store lacks are built, and a release is published: see `build_spec`. Of a
    `torch.nn.Module`, see `exported.build`, which takes example inputs, `buckets` and `name`.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(spec, torch.nn.Module):
        from . import exported

        return exported.build(spec, *arguments, **options)
    return build_spec(spec, *arguments, **options)  # type: ignore[arg-type]
