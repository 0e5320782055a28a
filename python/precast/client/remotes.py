"""Releases of a remote, in a store of this user's."""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from pathlib import Path

from ..errors import BuildError, NotFound, PrecastWarning
from . import building

# What the command says of a remote that is not there, or does not answer.
UNREACHED = (
    "is no remote: can't open",
    "has no `precast-store.json`",
    "can't read `",
    "can't look at `",
    "can't list `",
)


def place(store: str | os.PathLike[str]) -> str | None:
    """Returns the URL of a remote that stands in the place of a store: itself, or that of its name. None for a folder,
    which comes before a name."""
    if not isinstance(store, str):
        return None
    if "://" in store:
        return store
    if "/" in store or Path(store).exists():
        return None
    named = {one["name"]: one["url"] for one in building.remotes()["remotes"]}
    return named.get(store)


def folder(remote: str) -> Path:
    """Returns the store for what comes from a remote: one for each, below the user's caches."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "precast" / "remotes" / hashlib.sha256(remote.encode()).hexdigest()[:16]


def pulled(remote: str, model: str, libtorch: os.PathLike[str] | str | None) -> tuple[Path, str]:
    """Pulls a release; returns the store that has it, and its name there. Where the remote can't be reached, an earlier
    pull has to do; it is said. Of each model the newest three releases stay, and what a process uses."""
    store = folder(remote)
    try:
        moved = building.pull(remote, model, store=store, libtorch=libtorch)["releases"][0]
    except (BuildError, NotFound) as error:
        if not any(sign in str(error) for sign in UNREACHED) or not _has(store, model):
            raise
        text = f"{remote} can't be reached ({error}): {model} is answered by an earlier pull"
        warnings.warn(PrecastWarning(text), stacklevel=3)
        return store, model
    if moved["published"]:
        with contextlib.suppress(BuildError):  # a machine that can't delete has more on its disk
            building.gc(store=store)
    return store, f"{model.partition('@')[0]}@{moved['to']}"


def bring(remote: str, model: str, begins: str, store: os.PathLike[str] | str) -> bool:
    """Pulls the releases of a model whose names begin so. Returns whether any came."""
    url = place(remote)
    if url is None:
        raise BuildError(f"there is no remote `{remote}`: `precast remote ls` lists those that have a name")
    try:
        listed = building.ls(url)["releases"]
        names = {one["name"] for one in listed if one["model"] == model and (one["name"] or "").startswith(begins)}
        moved = [building.pull(url, f"{model}@{name}", store=store)["releases"] for name in sorted(names)]
    except NotFound:
        return False
    return bool(moved)


def is_new(error: BuildError) -> bool:
    """Returns whether a place is not there yet: the first push makes it."""
    return UNREACHED[0] in str(error)


def _has(store: Path, model: str) -> bool:
    if not store.exists():
        return False
    name, _, which = model.partition("@")
    found = [one for one in building.releases(store=store)["releases"] if one["model"] == name]
    return any(not which or which in (str(one["seq"]), one.get("name")) for one in found)
