"""What FSDP2, `torch.distributed.fsdp.fully_shard`, leaves in the modules that it shards.

Between calls a sharded parameter is a `DTensor`. A forward pre-hook puts the whole parameter in its place: one object
for all calls, whose memory is freed after the forward and allocated again before the backward call.

Private: the names of its attributes, and `_orig_cls_mro_index`. Without them a module that was sharded after it was
compiled is answered by the original, with the reason `attributes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params", "__composable_api_state_key")


def mark(key: Any) -> bool:
    """Returns whether an attribute of a module is FSDP2's, and changes nothing in a computation."""
    return isinstance(key, str) and key.startswith(_MARKS)


def original(kind: type) -> type:
    """Returns the class that a module had before it was sharded."""
    return kind.__mro__[getattr(kind, "_orig_cls_mro_index", 0)]


def shard(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Returns the text about the first shard among tensors, if there is one."""
    for name, tensor in tensors:
        if hasattr(tensor, "to_local"):
            return f"`{name}` is a `{type(tensor).__name__}`: call `maybe_compile` with a sample before `fully_shard`"
    return None


def unbindable(tensors: Mapping[str, Tensor]) -> str | None:
    """Returns why a program can't read one of these tensors, if it can't."""
    if (found := shard(tensors.items())) is not None:
        return found
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.device.type != "meta" and tensor.data_ptr() == 0:
            return f"`{name}` has no memory"
    return None
