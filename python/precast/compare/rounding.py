"""How far eager is from the truth, kept in the store: a process that starts again need not measure it.

Where the plain comparison of a call fails, `truth` measures the distance of each of eager's values from the same value
with more digits. In training that takes five more runs of eager and one with more digits, and the larger part of the
time and memory of a start.

```text
cache/rounding/3f9c….json      {"gradient net.weight": [0.03, 0.1], …}: shares of the norm and of the worst element
```

The name is that of the release, with the device and the state of the module. The file is a cache: it is read only if no
other user can have written it, and may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from pathlib import Path

from .truth import Shares

_KEPT = 1000
"""Files in a store, each of some kilobytes; the oldest is deleted for another one."""


class Kept:
    """Eager's distances for one release: read from the store, and written there."""

    def __init__(self, store: str | Path, key: str) -> None:
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        self._path = Path(store) / "cache" / "rounding" / f"{name}.json"

    def read(self) -> Shares:
        """Returns what is known."""
        try:
            return checked(json.loads(readable(self._path)))
        except (OSError, ValueError, RecursionError):
            return {}

    def write(self, shares: Shares) -> None:
        """Writes what was measured, where the store can be written."""
        with contextlib.suppress(OSError):
            write(self._path, json.dumps(shares))


def checked(found: object) -> Shares:
    """Returns the shares of a JSON document; what is none is left out."""
    rows = found.items() if isinstance(found, dict) else ()
    return {
        name: (row[0], row[1])
        for name, row in rows
        if isinstance(row, list) and len(row) == 2 and all(isinstance(one, float) for one in row)
    }


def readable(path: Path) -> bytes:
    """Returns the content of a file of a cache. Raises `OSError` for one that another user can have written."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"another user can have written {path}")
        return file.read()


def write(path: Path, text: str) -> None:
    """Writes a file of a cache."""
    path.parent.mkdir(exist_ok=True)  # in a store alone
    others = sorted(path.parent.iterdir(), key=lambda each: each.stat().st_mtime)
    for old in others[: len(others) + 1 - _KEPT]:
        old.unlink(missing_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)  # for its user alone
    os.replace(file.name, path)
