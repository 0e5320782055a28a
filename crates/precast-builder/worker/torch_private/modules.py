"""Modules: their own tables of tensors, and marks on their methods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def own_tensors(module: Any) -> Iterator[Any]:
    """Yields the parameters and buffers of one module, without those of its submodules; tied ones again.

    Private: `Module._parameters`, `Module._buffers`. Without them: weights whose memory is not in order keep it, and
    artifacts are compiled for strides that the weight set does not have.
    """
    for table in (module._parameters, module._buffers):
        yield from (tensor for tensor in table.values() if tensor is not None)


def is_persistent(module: Any, buffer: str) -> bool:
    """Returns whether a module's state dict contains one of its own buffers.

    Private: `Module._non_persistent_buffers_set`. Without it: a file of weights would have to name buffers such as
    `position_ids`.
    """
    return buffer not in module._non_persistent_buffers_set


def is_disabled(function: Any) -> bool:
    """Returns whether a function is marked with `torch.compiler.disable`.

    Private: the attribute `_torchdynamo_disable`. Without it: the mark has no effect.
    """
    return bool(getattr(function, "_torchdynamo_disable", False))


def own_attributes(module: Any) -> Iterator[tuple[str, Any]]:
    """Yields the attributes that a module's code set, without tensors, submodules and torch's own tables.

    Private: that `torch.nn.Module` keeps its tables in attributes with a leading underscore. Without it: more is
    compared than has a name in the code.
    """
    for name, value in vars(module).items():
        if not name.startswith("_") and name != "training":
            yield name, value
