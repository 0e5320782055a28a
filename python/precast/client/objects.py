"""Documents of the command as objects: fields are attributes, lists of objects are tables.

```python
listing = precast.ls(store="artifacts")
listing.programs[0].bucket       # a field of `docs/schema/ls.json`
listing["programs"]              # the same, for names that are Python keywords
listing.json                     # the document itself, as `json.loads` returns it
```

The fields are those of `docs/schema/NAME.json` in the repository. A class below names the fields at the top of its
document; deeper objects are plain `Document`s.
"""

from __future__ import annotations

import datetime
import html
from collections.abc import Iterable, Iterator
from typing import Any

_ROWS = 60
_ITEMS = 4
_TIMES = frozenset({"created", "used", "built", "made"})
_SIZES = frozenset({"after", "before", "bytes", "content", "logical", "reclaimable", "shared", "stored"})
_SIZES |= {"prepacked", "unpacked"}
_DIGEST = 64


class Document:
    """One JSON object, with its fields as attributes. `json` is the object itself."""

    json: dict[str, Any]

    def __init__(self, json: dict[str, Any]) -> None:
        self.json = json

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling ask for private names before `json` is set.
        if name == "json" or name.startswith("_") or name not in self.json:
            raise AttributeError(f"{type(self).__name__} has no field `{name}`")
        return view(self.json[name])

    def __getitem__(self, name: str) -> Any:
        return view(self.json[name])

    def __contains__(self, name: object) -> bool:
        return name in self.json

    def __iter__(self) -> Iterator[str]:
        return iter(self.json)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Document) and self.json == other.json

    __hash__ = None  # type: ignore[assignment]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.json]

    def __repr__(self) -> str:
        short = ", ".join(f"{name}={text(name, value)}" for name, value in self._short())
        tables = [f"{name}:\n{table!r}" for name, table in self._tables()]
        head = [f"{type(self).__name__}({short})"] if short or not tables else []
        return "\n".join(head + tables)

    def _repr_html_(self) -> str:
        short = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th><td>{html.escape(text(name, value))}</td></tr>"
            for name, value in self._short()
        )
        tables = "".join(f"<p><b>{html.escape(name)}</b></p>{table._repr_html_()}" for name, table in self._tables())
        return f"<table>{short}</table>{tables}"

    def _short(self) -> list[tuple[str, Any]]:
        return [(name, value) for name, value in fields(self.json) if is_short(value) and value not in ([], None)]

    def _tables(self) -> list[tuple[str, Table]]:
        return [(name, Table(value)) for name, value in fields(self.json) if value and isinstance(view(value), Table)]


class Table(list[Document]):
    """A list of objects, printed with a column for each short field. `json` is the list of the objects themselves."""

    def __init__(self, rows: Iterable[Document | dict[str, Any]] = ()) -> None:
        super().__init__(row if isinstance(row, Document) else Document(row) for row in rows)

    @property
    def json(self) -> list[dict[str, Any]]:
        return [row.json for row in self]

    def __repr__(self) -> str:
        names, rows = self._cells()
        if not names:
            return f"[{count(len(self), 'row')}]" if self else "[]"
        widths = [max(len(row[place]) for row in [names, *rows]) for place in range(len(names))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [names, *rows]
        ]
        return "\n".join([line.rstrip() for line in lines] + self._rest())

    def _repr_html_(self) -> str:
        names, rows = self._cells()
        head = "".join(f"<th style='text-align:left'>{html.escape(name)}</th>" for name in names)
        body = "".join(
            "<tr>" + "".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in rows
        )
        rest = "".join(f"<p>{html.escape(line)}</p>" for line in self._rest())
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}"

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        shown = self.json[:_ROWS]
        filled = (name for row in shown for name, value in row.items() if value is not None and is_short(value))
        names = [name for name in dict.fromkeys(filled) if name != "schema"]
        return names, [[text(name, row.get(name)) for name in names] for row in shown]

    def _rest(self) -> list[str]:
        return [f"… {len(self) - _ROWS} more"] if len(self) > _ROWS else []


def view(value: Any) -> Any:
    """Returns a JSON value as an object: a `Document`, a `Table`, or the value itself. An empty list is a `Table`."""
    if isinstance(value, dict):
        return Document(value)
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return Table(value)
    return value


def fields(json: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Returns the fields of an object and of the objects in it, the latter as `outer.inner`."""
    for name, value in json.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", item) for inner, item in value.items() if inner != "schema")
        elif name != "schema":
            yield name, value


def is_short(value: Any) -> bool:
    """Returns whether a value fits into a cell: a plain one, a list of a few plain ones, or a list of reasons."""
    if isinstance(value, list):
        reasons = bool(value) and all(isinstance(item, dict) and "reason" in item for item in value)
        return reasons or (len(value) <= _ITEMS and not any(isinstance(item, (dict, list)) for item in value))
    return not isinstance(value, dict)


def text(name: str, value: Any) -> str:
    """Returns the text of a cell: 12 digits of a digest, 4 of a float, a size with its unit, a time as a date."""
    name = name.rpartition(".")[2]
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}"
        case int() if name in _SIZES:
            return size(value)
        case int() if name in _TIMES:
            return datetime.datetime.fromtimestamp(value).strftime("%Y-%m-%d %H:%M")
        case str() if len(value) == _DIGEST and all(digit in "0123456789abcdef" for digit in value):
            return value[:12]
        case list() if len(value) > _ITEMS:
            return count(len(value), "item")
        case list():
            return ", ".join(text(name, item["reason"] if isinstance(item, dict) else item) for item in value) or "-"
        case _:
            return str(value)


def size(count: float) -> str:
    """Returns a number of bytes as `797 kB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def seconds(value: float) -> str:
    """Returns a duration as `120 ms`, `12.3 s` or `2 min 5 s`, as the command prints it."""
    if value < 1:
        return f"{value * 1e3:.0f} ms"
    if value < 100:
        return f"{value:.1f} s"
    return f"{value // 60:.0f} min {value % 60:.0f} s"


def count(number: int, noun: str) -> str:
    """Returns `1 program` or `3 programs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


class BuildResult(Document):
    """The result of a build: the last line of `precast build --format json` (`build.json`)."""

    programs: Table
    findings: Table
    compiled: int
    fetched: int
    release: Document | None
    published: bool
    lost: list[str]
    unanswered: list[str]
    without: list[str]
    generated: int | None
    eager_instead: Table
    seconds: float

    @property
    def failed(self) -> Table:
        """The programs that could not be built."""
        return Table(row for row in self.programs if row.state == "failed")

    def __repr__(self) -> str:
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        lines = "".join(f"<p>{html.escape(line)}</p>" for line in self._lines())
        return f"{lines}{Table(self.programs)._repr_html_()}"

    def _lines(self) -> list[str]:
        states = [row.state for row in self.programs]
        built, hits, failed = (states.count(state) for state in ("built", "hit", "failed"))
        if built or failed:
            there = f", {count(hits, 'program')} there already" if hits else ""
            lost = f", {failed} failed" if failed else ""
            compiled = f"{count(self.compiled, 'artifact')} compiled"
            lines = [f"built {count(built, 'program')}, {compiled}{there} ({seconds(self.seconds)}){lost}"]
        else:
            lines = [f"fresh: {hits} of {count(len(states), 'program')} are in the store ({seconds(self.seconds)})"]
        if self.published and self.release is not None:
            partial = ", a partial one" if self.release.lacks else ""
            lines.append(f"published release {self.release.seq}{partial}")
        for row in self.failed:
            place = f"{row.location}: " if row.location else ""
            lines += [f"failed {row.program}: {place}{row.message}", f"  hint: {row.hint}"]
        lines += [f"lost {name}: the release before has it, the new one does not" for name in self.lost]
        lines += [f"without {name}: nothing answers it" for name in self.without]
        return lines


class Plan(Document):
    """The result of `precast.plan` (`plan.json`)."""

    model: str
    target: Document | None
    missing: int
    programs: Table
    weights: str | None
    hint: str | None


class CheckResult(Document):
    """The result of `precast.check` (`check.json`)."""

    model: str
    failed: bool
    modules: Table
    unused: Table
    build: Document
    padding: Table

    @property
    def findings(self) -> Table:
        """The findings of all modules in one table, with the module's name and the fix as text."""
        return Table(
            {
                "module": module["module"],
                **finding,
                "fix": "\n".join([finding["fix"]["text"], *finding["fix"]["lines"]]),
            }
            for module in self.json["modules"]
            for finding in module["findings"]
        )

    def _tables(self) -> list[tuple[str, Table]]:
        return [("modules", Table(self.json["modules"])), ("findings", self.findings)]


class NewSpec(Document):
    """The result of `precast.init` (`init.json`): the spec's file and text."""

    file: str
    text: str
    notes: list[str]

    def __repr__(self) -> str:
        return "\n".join([f"# {self.file}", self.text, *(f"# note: {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


class Diagnosis(Document):
    """The result of `precast.doctor` (`doctor.json`)."""

    precast: str
    can_build: bool
    can_run: bool
    checks: Table


class Why(Document):
    """The result of `precast.why` (`why.json`)."""

    why: Table
    without_effect: Table


class DiskUsage(Document):
    """The result of `precast.du` (`du.json`)."""

    by: str
    total: Document
    rest: Document
    groups: Table
    unpacked: int
    prepacked: int


class Collection(Document):
    """The result of `precast.gc` (`gc.json`): the plan, and the deleted parts unless it was a dry run."""

    dry_run: bool
    plan: Document
    done: Document | None


class Report(Document):
    """The result of `precast.report` (`report.json`)."""

    store: str
    made: int
    usage: Document
    models: Table
    failures: Table
    production: Table
    training: Table
    checks: Table
    damage: list[str]
