"""The exceptions of the package. All of them are a `precast.Error`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Error(Exception):
    """An error of Precast: a message, a hint, and a code.

    `hint` says how to mend it and may be empty. `code` is the name of the error in the Rust library, or that of the
    command's error document.
    """

    def __init__(self, message: str, hint: str = "", code: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        self.code = code

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n  hint: {self.hint}" if self.hint else message

    def __reduce__(self) -> Any:
        return type(self), (self.args[0], self.hint, self.code), self.__dict__


class PrecastWarning(UserWarning):
    """What a user of `maybe_compile` should know: a build, a failure, or the original in place of an artifact."""


class BadInput(Error, ValueError):
    """An argument that is refused, as an input that the module does not take: its name, dtype, sizes or values."""


class NoFit(BadInput):
    """Sizes that no bucket of the module takes."""


class NotFound(Error, LookupError):
    """No store, model, release, module or output has this name."""


class Busy(Error, TimeoutError):
    """Every slot or session is taken, and the wait was limited."""


class LoadError(Error):
    """A release can't be loaded on this host, from this store or under this torch."""


class CallFailed(Error):
    """A call that was accepted failed during its run."""


class OutOfMemory(LoadError, CallFailed, MemoryError):
    """There is too little memory for a load or a call, on the host or on the device."""


class BuildError(Error):
    """The command failed.

    `document` is its error document, as `--format json` writes it. `result` is the `BuildResult` of a build whose
    programs were tried, and `failures` names the programs that failed, with the cause.
    """

    document: Any = None
    result: Any = None
    failures: Sequence[str] = ()
