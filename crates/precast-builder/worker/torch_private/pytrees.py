"""Nested arguments and results, flattened as torch.export flattens them.

Private: `torch.utils._pytree`. Without it: outputs in lists, tuples, dicts and registered classes have no names, and
an exported program can't be put together.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch.utils import _pytree

# torch 2.11 warns of its own class `LeafSpec` whenever it copies one.
warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)


def leaves(value: Any) -> list[Any]:
    """Returns the leaves of a nested value."""
    return _pytree.tree_leaves(value)


def leaves_with_path(value: Any) -> list[tuple[list[str], Any]]:
    """Returns the leaves with the keys, indices and attributes that lead to them."""
    return [([_key(part) for part in path], leaf) for path, leaf in _pytree.tree_flatten_with_path(value)[0]]


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns a nested value with other leaves."""
    return _pytree.tree_map(function, value)


def children(value: Any) -> tuple[str, list[Any] | None, list[Any]] | None:
    """Returns kind, keys (None for a sequence) and children of one level of a nested value; None for a leaf."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return ("list" if isinstance(value, list) else "tuple", None, list(value))
    if isinstance(value, dict):
        return (type(value).__name__, list(value), list(value.values()))
    if _pytree._get_node_type(value) not in _pytree.SUPPORTED_NODES:
        return None
    pairs, _ = _pytree.tree_flatten_with_path(value, is_leaf=lambda item: item is not value)
    return (type(value).__name__, [_key(path[0]) for path, _ in pairs], [item for _, item in pairs])


def structure(value: Any) -> Any:
    """Returns torch's description of the structure of a value."""
    return _pytree.tree_structure(value)


def _key(part: Any) -> str:
    return str(getattr(part, "key", getattr(part, "idx", getattr(part, "name", part))))
