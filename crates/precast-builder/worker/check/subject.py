"""The checked module: its call, its inputs, and the open questions about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .. import capture
from ..model import inputs
from ..values import samples
from ..wire import Wire
from .sources import Sources


@dataclass
class Subject:
    """A module at the checked bucket."""

    opened: Any
    # The protocol's `ModuleRequest`; its inputs have the sizes of the bucket.
    module: dict[str, Any]
    sizes: dict[str, int]
    buckets: list[dict[str, int]]
    wire: Wire
    sources: Sources
    # Its name in messages, the call to capture, and inputs of it.
    what: str
    call: Any
    # The project's callable for sample inputs, where the spec leaves the module's inputs out.
    samples: str | None
    inputs: list[Any] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, opened: Any, request: dict[str, Any], wire: Wire) -> Subject:
        """Returns the subject of a request."""
        module, sizes = request["module"], request["sizes"]
        what, call = capture.call_of(opened, module)
        given = request.get("samples") if module.get("structure") is not None else None
        subject = cls(opened, module, sizes, request["buckets"], wire, Sources(opened.root), what, call, given)
        subject.inputs = subject.values(sizes)
        return subject

    @property
    def specs(self) -> list[dict[str, Any]]:
        """Returns the inputs as the plan has them."""
        return self.module["inputs"]

    @property
    def dims(self) -> list[str]:
        """Returns the bucketed dimensions."""
        return sorted({dim for spec in self.specs for dim in spec["dims"] if dim is not None})

    @property
    def asked(self) -> dict[str, Any]:
        """Returns the dimensions for which the spec requests a dynamic artifact."""
        return self.module.get("dynamic") or {}

    def values(self, sizes: dict[str, int]) -> list[Any]:
        """Returns inputs at some sizes. Those of the project may have values that others lack, as an image's token."""
        if self.samples is None:
            return self.inputs_at(sizes)
        module = self.module
        given = {"path": module["path"], "method": module["method"], "samples": self.samples, "sizes": sizes}
        return inputs.values(self.opened, given)

    def inputs_at(self, sizes: dict[str, int]) -> list[Any]:
        """Returns inputs at some sizes, with the lowest values that they may have."""
        return samples.lowest(samples.at_sizes(self.specs, sizes), self.opened.device)

    def distinct(self) -> dict[str, int]:
        """Returns sizes near those of the bucket, of which none is 0 or 1 and no two are equal."""
        at: dict[str, int] = {}
        for dim in self.dims:
            size = max(self.sizes.get(dim, 2), 2)
            while size in at.values():
                size += 1
            at[dim] = size
        return at
