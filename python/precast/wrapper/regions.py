"""The choice of the submodules that are compiled, each by itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ..compare import batches
from ..config import CompileConfig
from ..torch_private import modules as of_torch

DECLARATION = "get_torch_compile_config"


def chosen(module: nn.Module, config: CompileConfig) -> dict[str, CompileConfig]:
    """Returns the settings of each region by its name; `""` is the module itself.

    A region is the largest submodule that the allowlist names, in which all submodules have the same settings and none
    is left out. A submodule is left out by the blocklist, by `torch.compiler.disable` on its `forward`, or if its
    `get_torch_compile_config` returns `enabled = False`; all submodules in it are left out too. Other settings that it
    declares hold for it and the submodules in it.
    """
    settings = {"": _own(module, config, "")}
    allowed = {"": _matches("", config.allowlist)}
    for name, each in module.named_modules(remove_duplicate=False):
        if name:
            parent = name.rpartition(".")[0]
            settings[name] = _own(each, settings[parent], name)
            allowed[name] = allowed[parent] or _matches(name, config.allowlist)
    found: dict[str, CompileConfig] = {}
    taken: set[int] = set()

    def descend(name: str, each: nn.Module) -> None:
        own, inside = settings[name], f"{name}." if name else ""
        whole = all(settings[other] == own for other in settings if other.startswith(inside))
        if own is not None and allowed[name] and whole and _callable(each):
            if id(each) not in taken:
                taken.add(id(each))
                found[name] = own
            return
        for key, child in each.named_children():
            descend(f"{inside}{key}", child)

    descend("", module)
    return found


def declared(module: nn.Module) -> dict[str, Any]:
    """Returns the settings that a submodule declares for `forward`.

    `get_torch_compile_config()` returns settings by method, as `{"forward": {"mode": "max-autotune"}}`, or only those
    of `forward`. Raises `TypeError` if it returns anything else.
    """
    function = getattr(type(module), DECLARATION, None)
    if not callable(function):
        return {}
    settings = getattr(module, DECLARATION)()
    if settings is None:
        return {}
    if not isinstance(settings, Mapping) or not all(isinstance(key, str) for key in settings):
        raise TypeError(f"`{DECLARATION}` of `{type(module).__name__}` returned {type(settings).__name__}, not a dict")
    by_method = settings and all(
        isinstance(value, Mapping) and callable(getattr(module, key, None)) for key, value in settings.items()
    )
    return dict(settings.get("forward", {})) if by_method else dict(settings)


def disabled(module: nn.Module) -> bool:
    """Returns whether `torch.compiler.disable` marks the `forward` of a submodule."""
    function = vars(module).get("forward", getattr(type(module), "forward", None))
    return of_torch.is_disabled(function)


def resized(
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    shapes: Mapping[str, Sequence[str | int]],
    names: Sequence[str],
    sizes: Mapping[str, int],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns arguments at other sizes of the bucketed dimensions: its values are repeated or left out."""

    made: dict[Any, Any] = {}  # one tensor that is in two places stays one

    def at(name: str, value: Any) -> Any:
        axes = tuple(shapes.get(name, ()))
        if (id(value), axes) not in made:
            made[id(value), axes] = at_sizes(axes, value)
        return made[id(value), axes]

    def at_sizes(axes: Sequence[str | int], value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        for axis, dim in enumerate(axes):
            if isinstance(dim, str) and dim in sizes and value.shape[axis] != sizes[dim]:
                rows = torch.arange(sizes[dim], device=value.device) % value.shape[axis]
                value = value.index_select(axis, rows)
        return value

    positional, named = arguments
    args = tuple(at(name, value) for name, value in itertools.zip_longest(names[: len(positional)], positional))
    return args, {name: at(name, value) for name, value in named.items()}


def dimensions(
    calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], names: Sequence[str]
) -> tuple[dict[str, list[str | int]], list[dict[str, int]]]:
    """Returns the dimensions of a region's inputs, and its buckets, from its calls.

    An axis with one size in all calls is fixed. Axes that have the same sizes in all calls are one dimension; they are
    named `d0`, `d1` and so on. Calls with other inputs than the first are left out.
    """
    seen = [{name: tuple(each.shape) for name, each in batches.flat(*call, names)[0].items()} for call in calls]
    ranks = {name: len(shape) for name, shape in seen[0].items()}
    seen = [shapes for shapes in seen if {name: len(shape) for name, shape in shapes.items()} == ranks]
    dims: dict[tuple[int, ...], str] = {}
    axes: dict[str, list[str | int]] = {}
    for name in seen[0]:
        axes[name] = []
        for sizes in zip(*(shapes[name] for shapes in seen), strict=True):
            axes[name].append(sizes[0] if len(set(sizes)) == 1 else dims.setdefault(sizes, f"d{len(dims)}"))
    points = [{dim: sizes[at] for sizes, dim in dims.items()} for at in range(len(seen))]
    return axes, [point for at, point in enumerate(points) if point and point not in points[:at]]


def _own(module: nn.Module, inherited: CompileConfig | None, name: str) -> CompileConfig | None:
    if inherited is None or not inherited.enabled or disabled(module) or _matches(name, inherited.blocklist):
        return None
    config = inherited.declared(settings) if (settings := declared(module)) else inherited
    return config if config.enabled else None


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _callable(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)
