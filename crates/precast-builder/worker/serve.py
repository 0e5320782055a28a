"""Serves requests, one at a time, until stdin closes."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import failures
from .model import names
from .wire import PROTOCOL, Failure, Wire


class Session:
    """The state between requests: the opened model."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.opened: Any = None

    def model(self) -> Any:
        """Returns the opened model; without one, raises a protocol error."""
        if self.opened is None:
            raise Failure("protocol", "no model is open", hint="send `open` first")
        return self.opened


def _part(name: str) -> Any:
    """Imports a module of the worker for the first request that needs it."""
    return importlib.import_module(f"{__package__}.{name}")


def _for_model(name: str, session: Session) -> Any:
    """Returns a module of the worker that works on the opened model."""
    session.model()
    return _part(name)


def _torch(name: str) -> Any:
    """Returns a module of the worker that can do nothing without torch."""
    _part("hello").torch_or_fail()
    return _part(name)


def _out(request: dict[str, Any]) -> Path:
    folder = Path(request["out"])
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _hello(session: Session, request: dict[str, Any]) -> Any:
    names.check(Path(request.get("root") or "."), request.get("names") or ())
    return _part("hello").hello()


def _open(session: Session, request: dict[str, Any]) -> Any:
    session.opened = None
    values = None
    if request.get("weights"):
        paths, unused = [Path(path) for path in request["weights"]], request.get("unused_weights") or ()
        values = _torch("weights").Files(paths, Path(request["weights_name"]), unused)
    also = request.get("also") or ()
    root, entry, device = Path(request["root"]), request["entry"], request["device"]
    context, unsaved = request.get("context"), request.get("unsaved") or ()
    session.opened = _torch("model.entry").open_model(root, entry, device, also, values, context, unsaved)
    return session.opened.answer()


def _capture(session: Session, request: dict[str, Any]) -> Any:
    capture = _for_model("capture", session).capture
    try:
        return capture(session.model(), request["module"], request["sizes"], _out(request), session.wire)
    finally:
        session.model().rest()


def _truth(session: Session, request: dict[str, Any]) -> Any:
    truth = _for_model("truth", session)
    try:
        given, out = Path(request["samples"]), _out(request)
        dtype, runs = request["dtype"], request["runs"]
        return truth.run(session.model(), request["module"], request["sizes"], given, dtype, runs, out, session.wire)
    finally:
        session.model().rest()


def _shim(session: Session, request: dict[str, Any]) -> Any:
    shims = _torch("torch_private.cpp_shim")
    try:
        return shims.compile_shim(request["sources"], request["device"], _out(request), session.wire.event)
    except shims.NotCompiled as error:
        raise Failure("shim", str(error)) from error


OPERATIONS: dict[str, Callable[[Session, dict[str, Any]], Any]] = {
    "hello": _hello,
    "open": _open,
    "weights": lambda session, request: _for_model("weights", session).write(session.model(), _out(request)),
    "inputs": lambda session, request: _for_model("model.inputs", session).find(session.model(), request),
    "capture": _capture,
    "truth": _truth,
    "check": lambda session, request: _for_model("check", session).check(session.model(), request, session.wire),
    "describe": lambda session, request: _for_model("describe", session).describe(
        session.model(), request, session.wire
    ),
    "compile": lambda session, request: _torch("compiler").compile_segment(request, _out(request), session.wire),
    "shim": _shim,
    "warm_up": lambda session, request: _torch("compiler").warm_up(request, _out(request), session.wire),
}


def answer(session: Session, line: str) -> dict[str, Any]:
    """Returns the result or the error of a request line."""
    session.wire.id = 0
    try:
        request = json.loads(line)
        session.wire.id = int(request["id"])
        operation = OPERATIONS.get(request.get("op"))
        if operation is None:
            known = ", ".join(sorted(OPERATIONS))
            raise Failure("protocol", f"unknown operation `{request.get('op')}`", hint=f"this worker knows {known}")
        value = operation(session, request)
        return {"kind": "result", "id": session.wire.id, "value": value}
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a model may raise anything, SystemExit too
        if session.wire.id == 0 and isinstance(error, ValueError | KeyError | TypeError):
            error = Failure("protocol", f"not a request: {error}")
        root = session.opened.root if session.opened is not None else None
        return {"kind": "error", "id": session.wire.id, "error": failures.describe(error, root)}


def _free_unused(answered: dict[str, Any]) -> None:
    """Frees what the heap and torch's cache of device memory keep, for the other workers and for gates."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        if answered.get("error", {}).get("code") == failures.OUT_OF_MEMORY:
            gc.collect()
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:  # an error that stays on the device: the answer has its cause
            print(f"the device's memory can't be freed: {failures.one_line(error)}", file=sys.stderr)


def serve(wire: Wire) -> int:
    """Answers until the other side closes stdin or stops reading."""
    session = Session(wire)
    try:
        for line in wire.requests():
            answered = answer(session, line)
            _free_unused(answered)
            wire.send(answered)
            sys.stderr.flush()
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130
    return 0


__all__ = ["PROTOCOL", "answer", "serve"]
