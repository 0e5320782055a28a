"""Sizes that depend on values.

Private: `torch.fx.experimental.symbolic_shapes.free_unbacked_symbols`. Without it: a build says that a program has such
a size, and not at which line.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental import symbolic_shapes


def depends_on_values(value: Any) -> bool:
    """Returns whether a size of a tensor depends on values, and not on the sizes of inputs alone."""
    unbacked = getattr(symbolic_shapes, "free_unbacked_symbols", None)
    return isinstance(value, torch.Tensor) and unbacked is not None and bool(unbacked(value))
