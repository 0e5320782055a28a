"""Outputs of a module that returns an object with fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Fields(dict[str, Any]):
    """The fields of an output such as a dataclass, a named tuple or a `ModelOutput` of transformers.

    `out.logits`, `out["logits"]` and `out[0]` are the same field. The class itself is not imported: `kind` is its name.
    """

    def __init__(self, kind: str, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self.__dict__["kind"] = kind

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getitem__(name)
        except KeyError:
            raise AttributeError(f"the output `{self.kind}` has no field `{name}`; it has {', '.join(self)}") from None

    def __getitem__(self, key: str | int | slice) -> Any:
        if isinstance(key, str):
            return super().__getitem__(key)
        return self.to_tuple()[key]

    def to_tuple(self) -> tuple[Any, ...]:
        """The fields that are not `None`, in order."""
        return tuple(value for value in self.values() if value is not None)

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def __reduce__(self) -> Any:
        return Fields, (self.kind, dict(self))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.items())
        return f"{self.kind}({fields})"
