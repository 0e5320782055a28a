"""Helpers of the passes' tests: a context like the worker's, and recorded recipes."""

from __future__ import annotations

from typing import Any

from tests.worker.support import part


def context_of(module: Any, device: str = "cuda", freezing: bool = True, **options: Any) -> Any:
    """Returns the context of a segment that is compiled for a device, none of whose weights is prepacked yet."""
    weights = part("passes.prepacked").Weights.of(module)
    return part("passes.segments").Context(device, {"freezing": freezing, **options}, weights)


def recipes(context: Any) -> dict[str, Any]:
    """Returns the recipes of prepacked weights, by constant."""
    return context._weights.prepacked


def tidy(module: Any, context: Any, passes: list[Any]) -> None:
    """Runs the stage `segment` of some passes, as a compile does."""
    named = [(type(one).__name__, one) for one in passes]
    part("passes.segments").Passes(named, context, None).segment(module)


def hooks(context: Any, passes: list[Any]) -> dict[str, Any]:
    """Returns inductor's options that run the other stages of some passes."""
    named = [(type(one).__name__, one) for one in passes]
    return part("passes.segments").Passes(named, context, None).hooks()
