"""Serves requests, one at a time, until stdin closes."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

from . import failures
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


def _hello(session: Session, request: dict[str, Any]) -> Any:
    from . import hello

    return hello.hello()


def _open(session: Session, request: dict[str, Any]) -> Any:
    from . import entry, hello

    hello.torch_or_fail()
    session.opened = None
    values = Path(request["weights"]) if request.get("weights") else None
    opened = entry.open_model(
        Path(request["root"]),
        request["entry"],
        request["device"],
        request.get("also") or (),
        values,
        request.get("unused_weights") or (),
    )
    session.opened = opened
    return opened.answer()


def _weights(session: Session, request: dict[str, Any]) -> Any:
    from . import weights

    return weights.write(session.model(), _folder(request["out"]))


def _capture(session: Session, request: dict[str, Any]) -> Any:
    from . import capture

    return capture.capture(session.model(), request["module"], request["sizes"], _folder(request["out"]), session.wire)


def _inputs(session: Session, request: dict[str, Any]) -> Any:
    from . import inputs

    return inputs.find(session.model(), request)


def _describe(session: Session, request: dict[str, Any]) -> Any:
    from . import describe

    return describe.describe(session.model(), request, session.wire)


def _check(session: Session, request: dict[str, Any]) -> Any:
    from . import check

    return check.check(session.model(), request, session.wire)


def _compile(session: Session, request: dict[str, Any]) -> Any:
    from . import compiler, hello

    hello.torch_or_fail()
    return compiler.compile_segment(request, _folder(request["out"]), session.wire)


def _shim(session: Session, request: dict[str, Any]) -> Any:
    from . import hello
    from .torch_private import cpp_shim

    hello.torch_or_fail()
    try:
        folder = _folder(request["out"])
        return cpp_shim.compile_shim(request["sources"], request["device"], folder, session.wire.event)
    except cpp_shim.NotCompiled as error:
        raise Failure("shim", str(error)) from error


def _warm_up(session: Session, request: dict[str, Any]) -> Any:
    from . import compiler, hello

    hello.torch_or_fail()
    return compiler.warm_up(request, _folder(request["out"]), session.wire)


OPERATIONS = {
    "hello": _hello,
    "open": _open,
    "weights": _weights,
    "inputs": _inputs,
    "capture": _capture,
    "check": _check,
    "describe": _describe,
    "compile": _compile,
    "shim": _shim,
    "warm_up": _warm_up,
}


def _folder(path: str) -> Path:
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


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
    except (ValueError, KeyError, TypeError) as error:
        if session.wire.id == 0:
            error = Failure("protocol", f"not a request: {error}")
        return {"kind": "error", "id": session.wire.id, "error": failures.describe(error, _root(session))}
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a model may raise anything, SystemExit too
        return {"kind": "error", "id": session.wire.id, "error": failures.describe(error, _root(session))}


def _free_unused(answered: dict[str, Any]) -> None:
    """Frees the device memory that torch keeps in its cache, for the other workers."""
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


def _root(session: Session) -> Path | None:
    return session.opened.root if session.opened is not None else None


__all__ = ["PROTOCOL", "answer", "serve"]
