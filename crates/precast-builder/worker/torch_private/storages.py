"""Memory of tensors: an identity that needs no address, and whether something still uses it."""

from __future__ import annotations

from typing import Any


class Memory:
    """The memory of a tensor, which this object does not keep alive.

    Private: `torch.multiprocessing.reductions.StorageWeakRef`. Without it: a view of a parameter's earlier memory goes
    unnoticed, and keeps values that are not those of the file.
    """

    def __init__(self, tensor: Any) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._weak = StorageWeakRef(tensor.untyped_storage())

    def is_used(self) -> bool:
        """Returns whether a tensor still has this memory."""
        return not self._weak.expired()
