"""Padding of batches to a few fixed shapes, so that a compiler sees few of them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..compare import batches
from ..torch_private import modules as of_torch

Axes = Sequence[str | int | None]


@dataclass(frozen=True)
class Stabilized:
    """A batch at the sizes of a bucket."""

    batch: Any
    """The padded batch, in the form of the original."""
    sizes: dict[str, int]
    """The sizes of the batch before padding."""
    bucket: dict[str, int]
    """The sizes after it."""
    masks: dict[str, Tensor]
    """For each dimension a bool tensor of its padded size: `True` at the batch's own positions."""
    outputs: Mapping[str, Axes] | Axes | None = None

    @property
    def padded(self) -> bool:
        """Whether any dimension was padded."""
        return self.sizes != self.bucket

    def crop(self, output: Any, outputs: Mapping[str, Axes] | Axes | None = None) -> Any:
        """Returns an answer without the rows of the padding.

        `outputs` has the dimensions of each output, by path, as `{"last_hidden_state": ["batch", "seq", None]}`, or
        one list for all outputs. Its default is `outputs` of the stabilizer. Raises `ValueError` for a padded answer
        without dimensions.
        """
        axes = outputs if outputs is not None else self.outputs
        if not self.padded:
            return output
        if axes is None:
            raise ValueError("the dimensions of the outputs are not known: pass `outputs`")

        def cropped(path: str, tensor: Tensor) -> Tensor:
            named = axes.get(path) if isinstance(axes, Mapping) else axes
            if named is None:
                raise ValueError(f"`outputs` has no dimensions for `{path}`")
            for axis, dim in enumerate(named):
                if isinstance(dim, str) and dim in self.sizes:
                    if axis >= tensor.dim() or tensor.shape[axis] != self.bucket[dim]:
                        at = f"`{path}`" if path else "the output"
                        raise ValueError(f"{at} has shape {list(tensor.shape)}, and no `{dim}` at axis {axis}")
                    tensor = tensor.narrow(axis, 0, self.sizes[dim])
            return tensor

        return batches.mapped(output, cropped)


class ShapeStabilizer:
    """Pads batches to buckets, marks dynamic dimensions, and counts the shapes that it has seen.

    - `buckets`: sizes of each bucketed dimension, `{"batch": [1, 8], "seq": [32, 128]}`
    - `shapes`: dimensions of each input, `{"input_ids": ["batch", "seq"]}`; an input without an entry is not padded
    - `pad`: the padding value of each input; 0 without one
    - `outputs`: dimensions of the outputs, for `Stabilized.crop`
    - `dynamic`: dimensions that `torch.compile` shall see as dynamic, `["seq"]` or `{"seq": (2, 512)}`; such a
      dimension needs no bucket
    - `names`: the names of positional inputs; those of `shapes` in order without it

    Padding changes no answer only if the module ignores it, as with an attention mask that is padded with 0.
    """

    def __init__(
        self,
        buckets: Mapping[str, Sequence[int]],
        shapes: Mapping[str, Sequence[str | int]],
        *,
        pad: Mapping[str, float] | None = None,
        outputs: Mapping[str, Axes] | Axes | None = None,
        dynamic: Iterable[str] | Mapping[str, tuple[int, int] | None] = (),
        names: Sequence[str] = (),
    ) -> None:
        self.buckets = {dim: sorted(set(sizes)) for dim, sizes in buckets.items()}
        self.shapes = {name: tuple(axes) for name, axes in shapes.items()}
        self.pad = dict(pad or {})
        self.outputs = outputs
        self.dynamic = dict(dynamic) if isinstance(dynamic, Mapping) else dict.fromkeys(dynamic)
        self.names = tuple(names) or tuple(self.shapes)
        known = {axis for axes in self.shapes.values() for axis in axes}
        for dim in (*self.buckets, *self.dynamic):
            if dim not in known:
                raise ValueError(f"`shapes` has no dimension `{dim}`")
        for dim, sizes in self.buckets.items():
            if not sizes or sizes[0] < 1:
                raise ValueError(f"`buckets` has {sizes!r} for `{dim}`, not a list of sizes")
        for name in self.pad:
            if name not in self.shapes:
                raise ValueError(f"`pad` has a value for `{name}`, which `shapes` has not")
        self._lock = threading.Lock()
        self._seen: set[tuple[tuple[str, int], ...]] = set()
        self._compiled: set[tuple[tuple[str, int], ...]] = set()
        self._counts = {"calls": 0, "padded": 0, "not covered": 0}

    def bucket(self, sizes: Mapping[str, int]) -> dict[str, int] | None:
        """Returns the smallest bucket that covers the sizes, or `None`. Dimensions without buckets keep their size."""
        found = dict(sizes)
        for dim, size in sizes.items():
            if dim in self.buckets:
                covering = [each for each in self.buckets[dim] if each >= size]
                if not covering:
                    return None
                found[dim] = covering[0]
        return found

    def stabilize(self, batch: Any) -> Stabilized:
        """Returns the batch at the sizes of its bucket. A batch beyond all buckets is returned unchanged.

        Raises `ValueError` if an input has another rank than in `shapes`, or two inputs disagree on a size.
        """
        sizes = batches.sizes(batch, self.shapes, self.names)
        bucket = self.bucket(sizes)
        covered, bucket = bucket is not None, bucket if bucket is not None else dict(sizes)
        positional, named = batches.arguments(batch)
        keys = (*(self.names[at] if at < len(self.names) else "" for at in range(len(positional))), *named)
        values = [
            self._padded(name, value, bucket) for name, value in zip(keys, (*positional, *named.values()), strict=True)
        ]
        made = self._rebuilt(batch, values)
        self._count(sizes, bucket, covered)
        masks = {dim: torch.arange(bucket[dim]) < size for dim, size in sizes.items()}
        return Stabilized(made, sizes, bucket, masks, self.outputs)

    def stats(self) -> dict[str, int]:
        """Returns counters.

        `calls`, `padded`, `not covered`, `shapes` (different sizes that came in) and `recompiles`: how often a compiler
        that makes one program for each shape would have compiled again.
        """
        with self._lock:
            recompiles = max(len(self._compiled) - 1, 0)
            return {**self._counts, "shapes": len(self._seen), "recompiles": recompiles}

    def _padded(self, name: str, value: Any, bucket: Mapping[str, int]) -> Any:
        axes = self.shapes.get(name)
        if axes is None or not isinstance(value, Tensor):
            return value
        shape = [bucket[axis] if isinstance(axis, str) else axis for axis in axes]
        if shape != list(value.shape):
            whole = value.new_full(shape, self.pad.get(name, 0))
            whole[tuple(slice(0, size) for size in value.shape)] = value
            value = whole
        for axis, dim in enumerate(axes):
            if dim in self.dynamic:
                low, high = self.dynamic[dim] or (None, None)
                value = of_torch.marked_dynamic(value, axis, low, high)
        return value

    @staticmethod
    def _rebuilt(batch: Any, values: list[Any]) -> Any:
        if isinstance(batch, Mapping):
            return dict(zip(batch, values, strict=True))
        if isinstance(batch, (tuple, list)):
            return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
        return values[0]

    def _count(self, sizes: Mapping[str, int], bucket: Mapping[str, int], covered: bool) -> None:
        compiled = tuple((dim, size) for dim, size in bucket.items() if dim not in self.dynamic)
        with self._lock:
            self._counts["calls"] += 1
            self._counts["padded"] += sizes != bucket
            self._counts["not covered"] += not covered
            self._seen.add(tuple(sizes.items()))
            self._compiled.add(compiled)
