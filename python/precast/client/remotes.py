"""Releases of a remote, in a store of this user's."""

from __future__ import annotations

import hashlib
import os
import warnings
from pathlib import Path

from ..errors import BuildError, PrecastWarning
from . import building


def folder(remote: str) -> Path:
    """Returns the store for what comes from a remote: one for each, below the user's caches."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "precast" / "remotes" / hashlib.sha256(remote.encode()).hexdigest()[:16]


def pulled(remote: str, model: str, libtorch: os.PathLike[str] | str | None) -> Path:
    """Pulls a release, and returns the store that has it. Without the remote an earlier pull has to do; it is said."""
    store = folder(remote)
    try:
        building.pull(remote, model, store=store, libtorch=libtorch)
    except BuildError as error:
        if not _has(store, model):
            raise
        text = f"{remote} can't be read ({error}): {model} is answered by an earlier pull"
        warnings.warn(PrecastWarning(text), stacklevel=3)
    return store


def _has(store: Path, model: str) -> bool:
    if not store.exists():
        return False
    name, _, which = model.partition("@")
    found = [one for one in building.releases(store=store)["releases"] if one["model"] == name]
    return any(not which or which in (str(one["seq"]), one.get("name")) for one in found)
