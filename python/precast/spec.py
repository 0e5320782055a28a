"""The spec as dataclasses, which read and write `precast.toml`.

```python
spec = Spec(
    name="minilm",
    entry="model:load",
    modules=[
        Module(
            "encode",
            regions=["bert.encoder.layer.*"],
            inputs={
                "input_ids": Input("int64", ["batch", "seq"], pad=0, range=[0, 30522]),
                "attention_mask": Input("int64", ["batch", "seq"], pad=0, range=[0, 2]),
            },
            buckets=Buckets(batch=[1, 8], seq=[32, 128]),
        )
    ],
)
spec.write("precast.toml")
```

The names are those of the spec ("Every key of the spec" in the documentation): the keys of `[model]` and `[target]` are
fields of `Spec`, those of `[compile]` are fields of `Compile` and of `Module`. None is a key that is left out: the
defaults are the command's. Names of keys are checked here, values by the command.

A file that is read and written again has equal content, without its comments.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from .errors import BadInput

T = TypeVar("T")
Table = dict[str, Any]

_SCHEMA = 1


@dataclass(kw_only=True)
class Compile:
    """The compile settings: of all modules in `Spec.compile`, of one as fields of a `Module`."""

    enabled: bool | None = None
    backend: str | None = None
    mode: str | None = None
    dynamic: bool | Mapping[str, Mapping[str, int]] | None = None
    options: Mapping[str, Any] | None = None
    passes: Sequence[str] | None = None
    allowlist: Sequence[str] | None = None
    blocklist: Sequence[str] | None = None
    fullgraph: bool | None = None
    healthcheck: bool | None = None
    smoketest_steps: int | None = None
    fail_policy: str | None = None


@dataclass
class Input:
    """An input: sizes and names of bucketed dimensions in `shape`; `pad` fills the rest of a bucket. A session's call
    that gives no input beside tokens has the `default`.
    """

    dtype: str
    shape: Sequence[int | str]
    pad: float | bool | None = None
    range: Sequence[int | str] | None = None
    default: float | bool | None = None


@dataclass
class State:
    """A buffer that stays from call to call.

    `first` is its value in a new session: `"zeros"`, `"own"`, or the name of a module whose output fills it.
    """

    shape: Sequence[int | str] | None = None
    first: str | None = None


@dataclass(init=False)
class Buckets:
    """The sizes of bucketed dimensions: a grid, `Buckets(batch=[1, 8], seq=[32, 128])`, or a list of `points`."""

    grid: dict[str, Sequence[int]]
    points: Sequence[Mapping[str, int]] | None

    def __init__(self, *, points: Sequence[Mapping[str, int]] | None = None, **grid: Sequence[int]) -> None:
        self.points = points
        self.grid = grid


@dataclass
class Gate:
    """Tolerances: an output may differ from eager by `atol + rtol * |eager|`."""

    rtol: float | None = None
    atol: float | None = None


@dataclass
class Train:
    """A training step: the method of the loss, and the optimizer with its options. For a module of kind `"step"`.

    One of kind `"autograd"` has `autocast`, and the inputs that get `gradients`.
    """

    optimizer: str | None = None
    loss: str | None = None
    betas: Sequence[float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    momentum: float | None = None
    clip: float | None = None
    accumulate: bool | None = None
    autocast: str | None = None
    gradients: Sequence[str] | None = None


@dataclass
class Allow:
    """A finding of `precast check` that is intended, and why."""

    finding: str
    reason: str
    function: str | None = None


@dataclass
class Module(Compile):
    """A module under the name that callers use, with its inputs in call order."""

    name: str
    path: str | None = None
    method: str | None = None
    regions: Sequence[str] | None = None
    inputs: Mapping[str, Input] | None = None
    state: Mapping[str, str | State] | None = None
    buckets: Buckets | None = None
    gate: Gate | None = None
    padding: str | None = None
    kind: str | None = None
    train: Train | None = None


@dataclass
class Spec:
    """A spec. `folder` is where its modules are imported from, and the place of `weights`; it is no key."""

    name: str
    entry: str
    modules: Sequence[Module]
    weights: str | os.PathLike[str] | None = None
    unused_weights: Sequence[str] | None = None
    samples: str | None = None
    context: int | None = None
    assets: Mapping[str, str] | None = None
    device: str | None = None
    isa: str | None = None
    compile: Compile = field(default_factory=Compile)
    allow: Sequence[Allow] = field(default_factory=list)
    folder: Path = field(default=Path("."), compare=False)

    @classmethod
    def read(cls, path: str | os.PathLike[str] = "precast.toml") -> Spec:
        """Returns the spec of a file. Raises `BadInput` for a key that no spec has."""
        path = Path(path)
        return cls.parse(path.read_text("utf-8"), folder=path.parent)

    @classmethod
    def parse(cls, toml: str, folder: str | os.PathLike[str] = ".") -> Spec:
        """Returns the spec of a text. Raises `BadInput` for a key that no spec has."""
        try:
            top = tomllib.loads(toml)
        except tomllib.TOMLDecodeError as error:
            raise BadInput(f"invalid TOML: {error}") from error
        _check(top, ["schema", "model", "target", "compile", "module", "check"], "the spec")
        if (schema := top.get("schema")) != _SCHEMA:
            raise BadInput(f"unknown schema {schema}", hint=f"write `schema = {_SCHEMA}`")
        model, target, check = (top.get(name, {}) for name in ("model", "target", "check"))
        _check(model, _MODEL, "[model]")
        _check(target, _TARGET, "[target]")
        _check(check, ["allow"], "[check]")
        return _make(
            cls,
            {**model, **target},
            "[model]",
            modules=[_module(table) for table in top.get("module", [])],
            compile=_make(Compile, top.get("compile", {}), "[compile]"),
            allow=[_make(Allow, table, "[[check.allow]]") for table in check.get("allow", [])],
            folder=Path(folder),
        )

    def toml(self) -> str:
        """Returns the text of the spec."""
        lines = [f"schema = {_SCHEMA}", *_lines("[model]", _of(self, _MODEL)), *_lines("[target]", _of(self, _TARGET))]
        lines += _lines("[compile]", _of(self.compile))
        for module in self.modules:
            table = _of(module)
            if module.buckets is not None:
                points = module.buckets.points
                table["buckets"] = module.buckets.grid if points is None else {"points": points}
            inner = {name: table.pop(name) for name in _INNER if name in table}
            lines += _lines("[[module]]", table)
            for name, value in inner.items():
                lines += _lines(f"[module.{name}]", value, even_empty=True)[1:]
        for allow in self.allow:
            lines += _lines("[[check.allow]]", _of(allow))
        return "\n".join(lines) + "\n"

    def write(self, path: str | os.PathLike[str] = "precast.toml") -> None:
        """Writes the spec to a file, whose folder must have the modules that it names."""
        Path(path).write_text(self.toml(), "utf-8")


_MODEL = ["name", "entry", "weights", "unused_weights", "samples", "context", "assets"]
_TARGET = ["device", "isa"]
# Tables of a module that get a header of their own.
_INNER = ["inputs", "state", "buckets", "gate", "train"]


def _module(table: Table) -> Module:
    place = f"[[module]] `{table.get('name', '')}`"
    inputs, state, buckets, gate, train = (table.get(name) for name in _INNER)
    made: Table = {}
    if inputs is not None:
        made["inputs"] = {name: _make(Input, value, f"input `{name}` of {place}") for name, value in inputs.items()}
    if state is not None:
        made["state"] = {
            name: value if isinstance(value, str) else _make(State, value, f"state `{name}` of {place}")
            for name, value in state.items()
        }
    if buckets is not None:
        made["buckets"] = Buckets(**buckets)
    if gate is not None:
        made["gate"] = _make(Gate, gate, f"[module.gate] of {place}")
    if train is not None:
        made["train"] = _make(Train, train, f"[module.train] of {place}")
    return _make(Module, {name: value for name, value in table.items() if name not in _INNER}, place, **made)


def _make(kind: type[T], table: Table, place: str, **made: Any) -> T:
    """Returns a dataclass with the fields of a table, and those of `made`."""
    fields = {at.name: at for at in dataclasses.fields(kind)}  # type: ignore[arg-type]
    _check(table, [name for name in fields if name not in made], place)
    for name, at in fields.items():
        required = at.default is dataclasses.MISSING and at.default_factory is dataclasses.MISSING
        if required and name not in table and name not in made:
            raise BadInput(f"missing key `{name}` in {place}")
    return kind(**table, **made)


def _check(table: Table, known: Sequence[str], place: str) -> None:
    for name in table:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(f'`{key}`' for key in known)}"
            raise BadInput(f"unknown key `{name}` in {place}", hint=hint)


def _of(value: Any, names: Sequence[str] | None = None) -> Table:
    """Returns the fields of a dataclass that are set; all, or those of `names`."""
    names = [at.name for at in dataclasses.fields(value)] if names is None else names
    return {name: getattr(value, name) for name in names if getattr(value, name) is not None}


def _lines(header: str, table: Any, even_empty: bool = False) -> list[str]:
    """Returns a table with its header, and a blank line before it; nothing for an empty one."""
    table = _of(table) if dataclasses.is_dataclass(table) else table
    if not table and not even_empty:
        return []
    return ["", header, *(f"{_key(name)} = {literal(value)}" for name, value in table.items())]


def literal(value: Any) -> str:
    """Returns a value as TOML writes it on one line."""
    if dataclasses.is_dataclass(value):
        value = _of(value)
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            # JSON and TOML have the same escapes. TOML requires one for DEL, and JSON does not.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case os.PathLike():
            return literal(os.fspath(value))
        case Mapping():
            return "{ " + ", ".join(f"{_key(name)} = {literal(inner)}" for name, inner in value.items()) + " }"
        case Sequence():
            return "[" + ", ".join(map(literal, value)) + "]"
    raise BadInput(f"a spec has no value of type {type(value).__name__}: {value!r}")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else literal(name)
