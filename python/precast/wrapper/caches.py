"""Key-value caches of models that generate: objects that no artifact takes or returns. Sessions hold that state."""

from __future__ import annotations

from typing import Any

from ..errors import BuildError
from .refusal import Refusal

_HINT = (
    "`precast init` writes a spec with sessions, which hold such a cache; without one (`use_cache=False`) artifacts of "
    "this module answer"
)
GIVEN = Refusal("cache", f"the call has a key-value cache. {_HINT}")


class CacheReturned(BuildError):
    """A call returns a key-value cache."""

    def __init__(self) -> None:
        super().__init__("its result has a key-value cache", hint=_HINT)
        self.refusal = Refusal("cache", f"the call returns a key-value cache. {_HINT}")


def is_cache(value: Any) -> bool:
    """Returns whether a value is a cache as transformers has them."""
    return any(kind.__name__.endswith("Cache") for kind in type(value).__mro__)


def given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a call has a cache."""
    return any(map(is_cache, args)) or any(map(is_cache, kwargs.values()))


def asked(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Returns the argument and the setting that say whether a call returns a cache."""
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    return named.get("use_cache"), getattr(getattr(module, "config", None), "use_cache", None)
