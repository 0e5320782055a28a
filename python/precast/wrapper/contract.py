"""The contract of a release for a module in hand: for which calls its programs answer, and how their results nest.

It is an asset of the release (`parts.CALL`), made where the programs are captured:

| key | content |
|---|---|
| `record` | what the answer depends on beside the inputs: see `precast.record` |
| `under` | what the names of modules and tensors in the release begin with |
| `inputs` | the names of the tensors that the programs take |
| `results` | for each leaf of the answer: a result of the program, a tensor that was given or read, or a value |
| `shares` | how far eager is from the truth: see `precast.compare.truth` |

The name of a release is a digest of what is known before a call is traced (`key`), and one of the contract. A process
looks for the names that begin with its key, and takes the release whose record holds.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import _native
from ..client import remotes
from ..compare.rounding import checked
from ..compare.truth import Shares
from ..config import CompileConfig
from ..errors import BuildError, LoadError, NotFound
from ..record import values
from ..record.record import Live, Record
from .logs import Log
from .parts import CALL
from .traced import Traced, prefixed

_FORMAT = 1


@dataclass
class Contract:
    """For which calls the programs of a release answer."""

    record: Record
    under: str
    """What the names of modules and tensors in the release begin with."""
    inputs: list[str]
    results: list[Any]
    shares: Shares = field(default_factory=dict)

    @classmethod
    def of(cls, traced: Traced) -> Contract:
        """Returns the contract of a module that was traced."""
        assert traced.results is not None
        return cls(traced.record, traced.under, traced.names, traced.results, traced.shares)

    def document(self) -> dict[str, Any]:
        """Returns the contract as JSON."""
        return {
            "format": _FORMAT,
            "record": self.record.document(),
            "under": self.under,
            "inputs": self.inputs,
            "results": self.results,
            "shares": self.shares,
        }

    @classmethod
    def read(cls, text: bytes) -> Contract:
        """Reads a contract. Raises `ValueError` for another format, and `KeyError` for one that lacks something."""
        held = json.loads(text)
        if held.get("format") != _FORMAT:
            raise ValueError(f"a contract of format {held.get('format')!r}")
        record = Record.read(held["record"])
        return cls(record, held["under"], held["inputs"], held["results"], checked(held["shares"]))

    def weights(self, live: Live) -> dict[str, Tensor]:
        """Returns the tensors that the programs read, by the names that they have in a release."""
        return {prefixed(self.under, name): live.value(node).detach() for name, node in self.record.weights.items()}


class Candidates:
    """The releases of a key in a store, read once."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._read: dict[tuple[str, str, str], list[tuple[str, Contract]]] = {}

    def of(self, config: CompileConfig, model: str, key: str) -> list[tuple[str, Contract]]:
        """Returns the names of releases and their contracts, the newest first. If the store has none, those of the
        remote come into it."""
        store, remote = config.store, config.remote or os.environ.get("PRECAST_REMOTE")
        place = (str(store), model, key)
        if place not in self._read:
            found = list(_contracts(store, model, key))
            if not found and remote and self._came(remote, model, key, config):
                found = list(_contracts(store, model, key))
            self._read[place] = found
        return self._read[place]

    def _came(self, remote: str, model: str, key: str, config: CompileConfig) -> bool:
        """Returns whether releases came from a remote. One that fails is logged: the caller makes them itself."""
        try:
            return remotes.bring(remote, model, key, config.store)
        except BuildError as error:
            if not (config.push and remotes.is_new(error)):
                self._log.remote(model, remote, error)
            return False


def _contracts(store: str | Path, model: str, key: str) -> Iterator[tuple[str, Contract]]:
    try:
        found = _native.assets(Path(store), model, key, CALL)
    except (NotFound, LoadError):
        return
    for name, text in found:
        try:
            yield name, Contract.read(text)
        except (ValueError, KeyError, TypeError):  # of another version
            continue


def key(request: Any) -> str:
    """Returns the first half of the name of a release: the digest of what is known before a trace."""
    return _digest({"format": _FORMAT, "torch": torch.__version__, "python": sys.version_info[:2], "request": request})


def name(key: str, contract: Contract, code: str) -> str:
    """Returns the name of a release; `code` is the text of the traced graph."""
    document = contract.document()
    return key + _digest({"record": document["record"], "results": contract.results, "code": code})


def _digest(held: Any) -> str:
    text = json.dumps(held, sort_keys=True, default=_encoded)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _encoded(value: Any) -> Any:
    try:
        return values.encoded(value)
    except values.Unknown:
        return values.named(type(value))
