"""How far eager is from the truth, kept in the store: a process that starts again need not measure it.

Where the plain comparison of a training call fails, `double` measures the distance of each of eager's values from the
same value with more digits. That takes five more runs of eager and one with more digits, and the larger part of the
time and memory of a start. A later comparison of the same module accepts a value that is about as far from eager's as
eager was from the truth, by the rule of `double`; for any other value it measures again.

```text
cache/noise/3f9c….json      {"gradient net.weight": 0.03, …}: shares of the norm of each value
```

The name is a digest of the module's code and structure, of its inputs, and of the device. The file is a cache: it is
read only if no other user can have written it, and may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

_KEPT = 1000
"""Files in a store, each of some kilobytes; the oldest is deleted for another one."""


class Noise:
    """Eager's distance from the truth, as a share of its norm, by the name of a value."""

    def __init__(self, store: str | Path | None = None, digest: Callable[[], str] | None = None) -> None:
        """Without a store, the shares are known to the steps of one comparison alone."""
        self._store, self._digest = store, digest
        self._shares: dict[str, float] | None = None
        self._measured = False

    def share(self, name: str) -> float | None:
        """Returns the share of a value, if it was measured."""
        if self._shares is None:
            self._shares = self._read()
        return self._shares.get(name)

    def measured(self, shares: Mapping[str, float]) -> None:
        """Takes the shares of all values of a comparison."""
        self._shares, self._measured = dict(shares), True

    def keep(self) -> None:
        """Writes the shares that were measured, where the store can be written."""
        if self._measured and (path := self._path()) is not None:
            with contextlib.suppress(OSError):
                _write(path, json.dumps(self._shares))

    def _path(self) -> Path | None:
        if self._store is None or self._digest is None:
            return None
        try:
            return Path(self._store) / "cache" / "noise" / f"{self._digest()}.json"
        except Exception:  # a module that has none is measured at each start
            return None

    def _read(self) -> dict[str, float]:
        path = self._path()
        if path is None:
            return {}
        try:
            with path.open(encoding="utf-8") as file:
                status = os.fstat(file.fileno())
                if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                    return {}
                found = json.load(file)
        except (OSError, ValueError, RecursionError):
            return {}
        shares = found.items() if isinstance(found, dict) else ()
        return {name: share for name, share in shares if isinstance(share, float)}


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)  # in a store alone
    others = sorted(path.parent.iterdir(), key=lambda each: each.stat().st_mtime)
    for old in others[: len(others) + 1 - _KEPT]:
        old.unlink(missing_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)  # for its user alone
    os.replace(file.name, path)
