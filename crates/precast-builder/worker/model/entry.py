"""Imports the entry, calls it for the model, and notes the files that were read: they are in the request key."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.metadata
import itertools
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import failures, valueless, weights
from ..torch_private.modules import own_tensors
from ..wire import Failure
from . import declared, generation, names
from .watch import Watch, watching

_TRAINING = (
    "the model was in training mode and is built in eval mode, without dropout and with the norms' running statistics, "
    "except for training: `entry` should return it after `.eval()`"
)

# Methods of a graph pass, one for each stage of a build (segments.py).
STAGES = ("graph", "segment", "post_grad_pre", "post_grad_post")


@dataclass
class Opened:
    """The model and its sources."""

    root: Path
    entry: str
    device: str
    model: Any
    sources: list[dict[str, str]]
    packages: list[dict[str, str]]
    # FQN -> method -> compile options.
    declared: dict[str, dict[str, Any]]
    # Names of the tensors whose values come from the spec's file of weights; None without such a file.
    from_file: frozenset[str] | None = None
    # The spec's files of weights.
    values: weights.Files | None = None
    # Remarks for the user.
    notes: list[str] = field(default_factory=list)
    # Number of the entry's modules in training mode, and the line of the entry.
    training: int = 0
    place: str | None = None
    # Files of packages that offered passes. Keys cover them only if a program is compiled with such a pass.
    offering: set[str] = field(default_factory=set)
    # Parameters without `requires_grad` in the entry's model: training keeps them as they are.
    frozen: frozenset[str] = frozenset()
    # Path and method of a module -> the buffers that it writes into, as far as they are known.
    states: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    # Globs of buffers that are states and begin with other values than their own.
    unsaved: Sequence[str] = ()
    # Module that fills states -> its outputs on sample inputs, by name.
    fillings: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)

    def named(self) -> weights.Named:
        """Returns the tensors of the weight set."""
        return weights.collect(self.model, self.from_file, self.unsaved)

    def rest(self) -> None:
        """Gives back memory that is needed again only when the model runs."""
        if self.values is not None:
            self.values.release()

    def answer(self) -> dict[str, Any]:
        """Returns the protocol's `Opened`."""
        modules = {name: type(module).__name__ for name, module in self.model.named_modules(remove_duplicate=False)}
        return {
            "sources": self.sources,
            "packages": self.packages,
            "modules": modules,
            "declared": self.declared,
            "fingerprint": weights.fingerprint(self.model),
            "notes": self.notes,
        }


def open_model(
    root: Path,
    entry: str,
    device: str,
    also: Sequence[str] = (),
    values: weights.Files | None = None,
    context: int | None = None,
    unsaved: Sequence[str] = (),
) -> Opened:
    """Imports `module:callable` under `root` and calls it; the model is in eval mode, on the device, without gradients.

    `also` names callables that later captures use (passes, sample inputs): their files are sources too. `values` are
    files of weights, which replace the model's own. `context` is the size of the cache that a generative model gets.
    `unsaved` are globs of buffers that the weight set lacks.
    """
    root = Path(os.path.realpath(root))
    if device == "cuda" and not torch.cuda.is_available():
        raise Failure("no_device", "device `cuda` was asked for and torch sees no CUDA device", hint="set `device`")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    before = set(sys.modules)
    with watching(root) as watch:
        function = load(root, entry)
        for name in also:
            load(root, name)
        model, from_file = _model(lambda: _call(function, root, entry), entry, values, watch)
        for library in torch.ops.loaded_libraries:
            watch.note(library)
    training = sum(module.training for module in model.modules())
    frozen = frozenset(name for name, one in model.named_parameters() if not one.requires_grad)
    notes = [_TRAINING] if training else []
    with torch.no_grad():
        model.eval().requires_grad_(False)
        if context is not None:
            generation.attach(model, entry, context)
        model.to(device)
        _straighten(model)
    used = watch.files | module_files(root)
    files = with_later_imports(root, used)
    sources = [_source(root, path) for path in sorted(files)]
    changed = next((path for path in sorted(used) if watch.changed(path)), None)
    if changed is not None:
        name = os.path.relpath(changed, root)
        raise Failure(
            "entry_import",
            f"`{name}` changed while the model was made from it",
            location=f"{name}:1",
            hint="run `precast build` again",
        )
    named = {name for path in files for name in _names(path, root)}
    # Imported before or now, or named by a file of the project.
    tops = {name.partition(".")[0] for name in (set(sys.modules) - before) | named} & sys.modules.keys() | {"torch"}
    known, place = (packages(tops), declared.declared(model, root)), _place(function, root)
    opened = Opened(root, entry, device, model, sources, *known, from_file, values, notes, training, place)
    opened.frozen, opened.unsaved = frozen, unsaved
    return opened


def load(root: Path, entry: str) -> Any:
    """Returns the object that `module:callable` names: a callable, or a graph pass with a method for a stage."""
    name, path = names.split(entry)
    importlib.invalidate_caches()
    try:
        found = importlib.import_module(name)
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name in _prefixes(name):
            raise names.no_module(str(error.name), root, entry) from error
        message = f"can't import `{name}`: {failures.named(error)}"
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        hint = f"install it for {sys.executable}, or name another Python with `--python`" if missing else None
        raise Failure("entry_import", message, location=failures.location(error, root), hint=hint) from error
    for part in path.split("."):
        if not hasattr(found, part):
            known = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
            raise names.no_name(name, path, part, known, _place(found, root), entry)
        found = getattr(found, part)
    if not callable(found) and not any(callable(getattr(found, stage, None)) for stage in STAGES):
        raise Failure("entry_call", f"`{entry}` is not callable but {_kind(found)}", spec=entry)
    return found


def _prefixes(name: str) -> list[str]:
    """Returns a dotted name and those of the packages that it is in, the outermost first."""
    return list(itertools.accumulate(name.split("."), "{}.{}".format))


def _call(function: Any, root: Path, entry: str) -> Any:
    try:
        with torch.no_grad():
            returned = function()
    except BaseException as error:
        raise failures.raised("entry_call", f"`{entry}`", error, root) from error
    if isinstance(returned, torch.nn.Module):
        return returned
    place = _place(function, root)
    if not isinstance(returned, dict) or not returned:
        raise Failure(
            "entry_call",
            f"`{entry}` returned {_kind(returned)}, not a torch.nn.Module or a dict of them",
            location=place,
        )
    holder = torch.nn.Module()
    # The holder only: each module in it keeps its own mode.
    holder.training = False
    for name, module in returned.items():
        if not isinstance(module, torch.nn.Module) or not isinstance(name, str) or not name or "." in name:
            raise Failure(
                "entry_call",
                f"`{entry}` returned a dict whose `{name}` is {_kind(module)}, not a torch.nn.Module",
                location=place,
                hint="keys are names without dots, values are modules",
            )
        holder.add_module(name, module)
    return holder


def _model(
    make: Callable[[], Any], entry: str, values: weights.Files | None, watch: Watch
) -> tuple[Any, frozenset[str] | None]:
    """Returns the model of an entry with the values of files, and the names of the tensors that the files have.

    The files of weights are no sources: their values alone need no new capture.
    """
    if values is not None:
        seed()
        model = valueless.call(make)
        if model is not None:
            with torch.no_grad(), watch.paused():
                names = weights.fill(model, values)
            if not valueless.lacks_values(model):
                return model, names
    seed()
    model = make()
    _check_data(model, entry)
    with torch.no_grad(), watch.paused():
        return model, None if values is None else weights.fill(model, values)


def _check_data(model: Any, entry: str) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type == "meta":
            raise Failure(
                "entry_call",
                f"`{entry}` returned a model whose `{name}` has no data: it is on the meta device",
                hint="load the weights before returning the model",
            )


def seed() -> None:
    """Seeds the random generators: an entry with random weights creates the same model in every worker of a build."""
    torch.manual_seed(0)
    random.seed(0)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(0)


def _straighten(model: Any) -> None:
    """Gives every parameter and buffer the contiguous strides that it has in the weight set; tied ones stay tied."""
    done: dict[tuple[Any, ...], Any] = {}
    for module in model.modules():
        for tensor in own_tensors(module):
            if tensor.layout != torch.strided or tensor.device.type == "meta":
                continue
            contiguous = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").stride()
            if tensor.stride() == contiguous:
                continue
            key = weights.identity(tensor)
            if key not in done:
                done[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
            tensor.data = done[key]


def module_files(root: Path) -> set[str]:
    """Returns the imported files of the project."""
    # The build's scratch folder may lie in the project, with this file and the compiler's files.
    scratch = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "")
    found = set()
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str):
            real = os.path.realpath(path)
            # Some modules of torch (`torch.classes`) name files that do not exist.
            if failures.own_file(real, root) and os.path.isfile(real) and not real.startswith(scratch):
                found.add(real)
    return found


def check_imports(opened: Opened) -> None:
    """Refuses a module of the project that a capture was the first to import: no key covers it."""
    known = {source["path"] for source in opened.sources}
    for path in sorted(module_files(opened.root) - opened.offering):
        name = os.path.relpath(path, opened.root)
        if name not in known:
            raise Failure(
                "capture",
                f"`{name}` was first imported when the module ran, so a change of it would go unnoticed",
                hint="import it where the entry is imported",
            )


def with_later_imports(root: Path, files: set[str]) -> set[str]:
    """Adds the project's files that imports inside functions load: captures run those functions."""
    found, pending = set(files), list(files)
    while pending:
        for name in _names(pending.pop(), root):
            for prefix in _prefixes(name):
                base = root.joinpath(*prefix.split("."))
                for file in (base.with_suffix(".py"), base / "__init__.py"):
                    real = os.path.realpath(file)
                    if real not in found and os.path.isfile(real) and failures.own_file(real, root):
                        found.add(real)
                        pending.append(real)
    return found


def _names(path: str, root: Path) -> Iterator[str]:
    """Yields the dotted names that a Python file imports; relative ones are seen from the project's root."""
    if not path.endswith(".py"):
        return
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    package = os.path.relpath(os.path.dirname(path), root)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = [] if not node.level or package == "." else package.split(os.sep)
            parts = parts[: len(parts) - node.level + 1] if node.level > 1 else parts
            parts += node.module.split(".") if node.module else []
            yield from (".".join([*parts, alias.name]) for alias in node.names)


def _source(root: Path, path: str) -> dict[str, str]:
    with open(path, "rb") as file:
        return {"path": os.path.relpath(path, root), "digest": hashlib.file_digest(file, "sha256").hexdigest()}


def packages(imported: set[str]) -> list[dict[str, str]]:
    """Returns the installed packages that modules of these names come from."""
    owners = importlib.metadata.packages_distributions()
    names = {owner for name in imported for owner in owners.get(name, ())}
    found = {name: importlib.metadata.version(name) for name in names}
    return [{"name": name, "version": found[name]} for name in sorted(found)]


def _place(thing: Any, root: Path) -> str | None:
    code = getattr(thing, "__code__", None)
    if code is not None:
        return failures.inside(code.co_filename, code.co_firstlineno, root)
    return failures.inside(getattr(thing, "__file__", None), 1, root)


def _kind(thing: Any) -> str:
    if thing is None:
        return "None"
    name = type(thing).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
