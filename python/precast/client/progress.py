"""The progress of a build from its events: a line that moves on a terminal and in a notebook, lines elsewhere."""

from __future__ import annotations

import html
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from .objects import count

Json = dict[str, Any]


class Progress(Protocol):
    """A display of the events of `precast build --format json`."""

    def event(self, event: Json) -> None: ...

    def close(self) -> None: ...


def progress() -> Progress:
    """Returns the display for this process: of the notebook, of the terminal of standard error, or plain lines."""
    return _line_that_moves() or Lines()


def _line_that_moves() -> Line | None:
    if display := _notebook():
        return Line(display)
    return Line(_Terminal()) if sys.stderr.isatty() else None


class Told:
    """A build that is told of once, with the number of its programs: a line that moves, and nothing elsewhere."""

    def __init__(self, tell: Callable[[int], object]) -> None:
        self._tell, self._line = tell, _line_that_moves()

    def event(self, event: Json) -> None:
        if event["event"] == "planned" and event["missing"]:
            self._tell(event["missing"])
        if self._line is not None:
            self._line.event(event)

    def close(self) -> None:
        if self._line is not None:
            self._line.close()


class Lines:
    """One line on standard error for the plan, and for each program that is done."""

    def event(self, event: Json) -> None:
        if line := _line(event):
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


class Line:
    """The state of the build in one line, below the lines of failures and notes."""

    def __init__(self, screen: _Screen) -> None:
        self._screen = screen
        self._of = 0
        self._done = 0
        self._end: float | None = None
        self._jobs: dict[int, str] = {}

    def event(self, event: Json) -> None:
        match event["event"]:
            case "planned":
                self._of, self._done = event["missing"], 0
                self._jobs.clear()
            case "begin":
                self._jobs[event["worker"]] = f"{event['job']} {event['what']}"
            case "end":
                self._jobs.pop(event["worker"], None)
            case "left":
                self._end = time.monotonic() + event["seconds"]
            case "published" | "left_out":
                self._done += 1
            case "failed" | "note":
                self._done += event["event"] == "failed"
                self._screen.above(_line(event))
            case "builder":
                self._builder(event)
            case _:
                return
        if self._of:
            self._screen.show(self._text())

    def close(self) -> None:
        self._screen.show("")

    def _builder(self, event: Json) -> None:
        """Shows what a builder on another machine is at as one job, whichever of its workers it is."""
        said, builder = event["said"], event["builder"]
        match said.get("event"):
            case "begin":
                self._jobs[builder] = f"{event['node']}: {said['job']} {said['what']}"
            case "published" | "left_out":
                self._done = min(self._done + 1, self._of)
            case "finished":
                self._jobs.pop(builder, None)
            case _:
                if (line := _line(event)) and said.get("event") != "planned":
                    self._screen.above(line)

    def _text(self) -> str:
        filled = round(20 * self._done / self._of)
        left = "" if self._end is None else f", about {_rounded(self._end - time.monotonic())} left"
        jobs = "".join(f" · {job}" for job in self._jobs.values())
        return f"Building [{'=' * filled:<20}] {self._done}/{count(self._of, 'program')}{left}{jobs}"


class _Screen(Protocol):
    def show(self, line: str) -> None: ...

    def above(self, line: str) -> None: ...


class _Terminal:
    def show(self, line: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"\r\x1b[K{line[:width]}")
        sys.stderr.flush()

    def above(self, line: str) -> None:
        sys.stderr.write(f"\r\x1b[K{line}\n")


class _Notebook:
    def __init__(self) -> None:
        from IPython.display import display  # type: ignore[import-not-found]

        self._lines: list[str] = []
        self._line = ""
        self._handle = display(self, display_id=True)

    def show(self, line: str) -> None:
        self._line = line
        self._handle.update(self)

    def above(self, line: str) -> None:
        self._lines.append(line)

    def __repr__(self) -> str:
        return "\n".join([*self._lines, self._line])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


def _notebook() -> _Notebook | None:
    """Returns the display of a notebook, if this process is a kernel of one."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return _Notebook() if type(shell).__name__ == "ZMQInteractiveShell" else None


def _rounded(seconds: float) -> str:
    return f"{max(1.0, seconds):.0f} s" if seconds < 55 else f"{max(1.0, seconds / 60):.0f} min"


def _line(event: Json) -> str:
    """Returns the line of an event; an empty one for an event of no interest outside of a line that moves."""
    match event["event"]:
        case "planned":
            return f"plan: {event['missing']} of {count(event['programs'], 'program')} are missing"
        case "published":
            return f"published: {event['module']} {event['bucket']}"
        case "left_out" | "failed" as name:
            return f"{name.replace('_', ' ')}: {event['module']} {event['bucket']}: {event['message']}"
        case "note":
            return f"note: {event['message']}"
        case "builder":
            said = event["said"]
            line = _line(said) if "event" in said else said.get("log") or said.get("error") or said.get("warning") or ""
            return line and f"{event['node']}: {line}"
    return ""
