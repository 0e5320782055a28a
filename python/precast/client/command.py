"""The command `precast`, run as a child process with `--format json`.

| part | it is |
|---|---|
| the command | `PRECAST_COMMAND`, else `precast` in the scripts folder of this Python, else on `PATH` |
| the Python of its workers | `PRECAST_PYTHON`, else the Python of this process |
| standard output | one JSON document, or one for each line: events, the result last |
| standard error | JSON documents: an error is raised, a warning goes to `warnings`, a note to the logger `precast` |
| Ctrl-C | reaches the command once, which ends its workers and keeps finished artifacts. A second one ends it at once |
| a killed caller | ends the command as Ctrl-C does: its standard input is a pipe that the caller holds |
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import IO, Any

from ..errors import BuildError, Error, NotFound

Json = dict[str, Any]

log = logging.getLogger("precast")


def find() -> str:
    """Returns the path of the command. Raises `NotFound` if it is not installed."""
    named = os.environ.get("PRECAST_COMMAND")
    places = [named] if named else [os.path.join(sysconfig.get_path("scripts"), "precast"), "precast"]
    for place in places:
        if path := shutil.which(place):
            return path
    missing = f"`PRECAST_COMMAND` names `{named}`, which is no program" if named else "the command `precast` is missing"
    raise NotFound(missing, hint="`pip install precast` installs it; `PRECAST_COMMAND` is the path of another one")


def run(*arguments: str, on_event: Callable[[Json], object] | None = None) -> Json:
    """Runs the command and returns its document: the last one, if it prints a document on each line.

    `on_event` is called with each of these lines. A defect that `check`, `doctor` or `verify` finds is in the document
    and raises nothing. Raises `NotFound` if the store lacks a named part, and `BuildError` for all other errors.
    """
    last: Json | None = None
    with _running("--format=json", *arguments) as (process, output, errors):
        if on_event is None:
            text = output.read()
            last = json.loads(text) if text.strip() else None
        else:
            for line in output:
                last = json.loads(line)
                on_event(last)
    error, other = None, []
    for line in errors:
        document = document_of(line)
        if "error" in document:
            error = document
        elif "warning" in document:
            hint = document["hint"]
            warnings.warn(document["warning"] + (f"; {hint}" if hint else ""), stacklevel=3)
        elif "note" in document:
            log.info(document["note"])
        else:
            other.append(line.rstrip())
    if error is not None:
        raise error_of(error)
    if last is None:
        raise _ended(arguments, process.returncode, other)
    for line in other:
        log.info(line)
    return last


def write(*arguments: str) -> None:
    """Runs the command without `--format json`: for the files that it writes only then."""
    with _running("--quiet", *arguments) as (process, output, errors):
        output.read()
    if process.returncode:
        raise _ended(arguments, process.returncode, [line.rstrip() for line in errors])


def error_of(document: Json) -> Error:
    """Returns the exception of an error document (`error.json`)."""
    lines = [": ".join([document["error"], *document["causes"]])]
    if mistakes := document["mistakes"]:
        lines = [f"{at['file']}:{at['line']}:{at['column']}: {at['message']}; {at['help']}" for at in mistakes]
    if location := document["location"]:
        lines[0] = f"{location}: {lines[0]}"
    message, hint, code = "\n".join([*lines, *document["log"]]), document["hint"], document["code"]
    if code == _NOT_IN_THE_STORE:
        return NotFound(message, hint, str(code))
    error = BuildError(message, hint, str(code))
    error.document = document
    return error


# The exit code of a missing part, as `docs/src/reference/commands.md` lists it.
_NOT_IN_THE_STORE = 3


@contextlib.contextmanager
def _running(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], IO[str], list[str]]]:
    """Starts the command. Yields the process, its output, and the lines of its errors, which are complete at the end.

    The command gets a process group of its own, so that Ctrl-C reaches it once, from `_stop`: a second signal would end
    it at once. A thread never sees Ctrl-C; a command of a thread is left in the group of the terminal.
    """
    in_main = threading.current_thread() is threading.main_thread()
    process = subprocess.Popen(
        [find(), "--until-stdin-ends", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env={"PRECAST_PYTHON": sys.executable, **os.environ},
        process_group=0 if in_main else None,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    errors: list[str] = []
    # Read beside the output: a full pipe would stop the command.
    reader = threading.Thread(target=errors.extend, args=(process.stderr,), daemon=True)
    reader.start()
    try:
        yield process, process.stdout, errors
        process.wait()
    except BaseException:
        _stop(process)
        raise
    finally:
        reader.join()
        process.stdin.close()
        process.stdout.close()
        process.stderr.close()


def _stop(process: subprocess.Popen[str]) -> None:
    """Interrupts the command and waits until it has ended its workers. Another Ctrl-C ends it at once.

    A process that ignores Ctrl-C, as one behind `nohup`, passes that on to the command: then it is terminated.
    """
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    assert process.stdout is not None
    process.stdout.close()
    while process.poll() is None:
        process.send_signal(signal.SIGTERM if ignored else signal.SIGINT)
        with contextlib.suppress(KeyboardInterrupt):
            process.wait()


def document_of(line: str) -> Json:
    """Returns the JSON object of a line, and an empty one for other text, as libtorch prints it."""
    try:
        document = json.loads(line)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _ended(arguments: tuple[str, ...], code: int, lines: list[str]) -> BuildError:
    ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    return BuildError("\n".join([f"`precast {arguments[0]}` {ended}", *lines]), code=str(code))
