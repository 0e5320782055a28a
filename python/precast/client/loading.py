"""Loading a release."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from .. import _native
from .._native import Model

_logger = logging.getLogger("precast")


def load(
    store: str | os.PathLike[str],
    model: str,
    *,
    device: str | Any | Sequence[str] = "cpu",
    instances: int = 4,
    sessions: int = 16,
    loading: Literal["before", "background", "on-demand"] = "before",
    graphs: Literal["as-built", "always", "never"] = "as-built",
    check: Literal["late", "now"] = "late",
    copy: bool = True,
    wait: float | None = None,
    weights: Mapping[str, Any] | None = None,
    libtorch: str | os.PathLike[str] | None = None,
    untried: bool = False,
    _lend: Literal["pairs", "outputs"] | None = None,
    _pad: bool = True,
) -> Model:
    """Loads the newest release of a model for this kind of host, or a named one, as `"minilm@7"`.

    `store` is a folder, or a remote, as `"s3://bucket/models"` or its name: the release is then pulled into a store
    below the user's caches first. A remote that can't be reached is no error if an earlier pull is there; it is said.

    Its modules are methods: `model.encode(input_ids, attention_mask)` takes tensors of torch, NumPy arrays or anything
    with DLPack, without a copy, and returns tensors of the same library. The model can be shared between threads.

    - `device`: `"cpu"`, `"cuda"`, `"cuda:1"`, a `torch.device`, or several of them: a replica on each.
    - `instances`: the calls of one program that run at once; others wait.
    - `sessions`: the number of open sessions.
    - `loading`: `"before"` loads every program first, `"background"` the first of each module, `"on-demand"`
      each with its first call.
    - `graphs`: the programs that run as CUDA graphs: those built with such a `mode`, every one, or none.
    - `check`: when values on a GPU are checked. `"late"` does not wait for the device: what follows from a value out of
      bounds is NaN, and a later call, or `model.check()`, raises `BadInput`. `"now"` waits in each call.
    - `copy`: whether an input may be copied to fit, if only its strides, alignment or device differ.
    - `wait`: the longest wait for a slot or a session, in seconds.
    - `weights`: the caller's own tensors by name instead of the release's, bound by pointer without a copy. A change in
      place is seen by the next call. The release has to be built with `freezing = false`.
    - `libtorch`: the folder of the package `torch`, unless the process or the environment has it.
    - `untried`: whether a torch newer than the tried ones is used.

    Raises `precast.NotFound` for an unknown model, and `precast.LoadError` for a release that can't run here.
    """
    _native.set_level(min(_logger.getEffectiveLevel(), 255) if _logger.hasHandlers() else 255)
    several = isinstance(device, Sequence) and not isinstance(device, str)
    devices = [str(one) for one in device] if several else [str(device)]
    options: dict[str, Any] = {
        "devices": devices,
        "libtorch": _libtorch() if libtorch is None else Path(libtorch),
        "untried": untried,
        "instances": instances,
        "sessions": sessions,
        "loading": loading,
        "graphs": graphs,
        # Outputs of CUDA graphs without a copy.
        "lend": _lend,
        "check": check,
        "copy": copy,
        # Whether a bucket answers smaller calls.
        "pad": _pad,
        "wait": wait,
    }
    if isinstance(store, str) and not Path(store).exists():
        from . import remotes

        if (place := remotes.place(store)) is not None:
            store, model = remotes.pulled(place, model, libtorch)
    store = Path(store)
    again = None if weights is not None else functools.partial(_again, store.absolute(), model, options)
    _end_before_libtorch()
    return _native.load(store, model, weights=dict(weights) if weights is not None else None, again=again, **options)


def _again(store: Path, model: str, options: dict[str, Any]) -> Model:
    """Loads a pickled model, in another process."""
    again = functools.partial(_again, store, model, options)
    return _native.load(store, model, weights=None, again=again, **{**options, "libtorch": _libtorch()})


def _libtorch() -> Path | None:
    """Returns the folder of torch in the environment, or none if the process has imported it."""
    if "torch" in sys.modules:
        return None
    found = importlib.util.find_spec("torch")
    return Path(found.origin).parent if found is not None and found.origin else None


@functools.cache
def _end_before_libtorch() -> None:
    """Lets running calls end before the process does: libtorch's destructors must not run during a call."""
    atexit.register(_native.shut_down)
