"""Imports the entry, makes the model, and notes what that read: the request key is taken from it."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.metadata
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import declared, failures, weights
from .torch_private.modules import own_tensors
from .watch import watching
from .wire import Failure

_TRAINING = (
    "the model was in training mode and is built in eval mode, without dropout and with the norms' running statistics: "
    "`entry` should return it after `.eval()`"
)

# Methods of a graph pass, one for each stage of a build (segment_passes.py).
STAGES = ("graph", "segment", "post_grad_pre", "post_grad_post")


@dataclass
class Opened:
    """The model and where it came from."""

    root: Path
    entry: str
    device: str
    model: Any
    sources: list[dict[str, str]]
    packages: list[dict[str, str]]
    # FQN -> method -> compile options.
    declared: dict[str, dict[str, Any]]
    # Names of tensors that have the values of a file which the spec names; none where there is no such file.
    given: frozenset[str] | None = None
    # What the user should know of it.
    notes: list[str] = field(default_factory=list)
    # Files of packages that offered passes; a key has those of passes that a program is compiled with.
    offering: set[str] = field(default_factory=set)

    def named(self) -> weights.Named:
        """Returns the tensors of the weight set."""
        return weights.collect(self.model, self.given)

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
    values: Path | None = None,
) -> Opened:
    """Imports `module:callable` under `root` and calls it; the answer is in eval mode, on the device, without grad.

    `also` names callables that a later capture will use (passes, sample inputs): their files are sources too.
    `values` is a file of weights that the model gets instead of its own.
    """
    import torch

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
        imported = set(sys.modules) - before
        _seed()
        model = _call(function, root, entry)
        for library in torch.ops.loaded_libraries:
            watch.note(library)
    _check_data(model, entry)
    notes = [_TRAINING] if any(module.training for module in model.modules()) else []
    with torch.no_grad():
        model.eval().requires_grad_(False)
        given = None if values is None else weights.fill(model, values)
        model.to(device)
        _straighten(model)
    used = watch.files | module_files(root)
    files = with_later_imports(root, used)
    sources = [_source(root, path) for path in sorted(files)]
    changed = next((path for path in sorted(used) if watch.changed(path)), None)
    if changed is not None:
        name = os.path.relpath(changed, root).replace(os.sep, "/")
        raise Failure(
            "entry_import",
            f"`{name}` changed while the model was made from it",
            location=f"{name}:1",
            hint="run `precast build` again",
        )
    imported = {name.partition(".")[0] for name in imported}
    later = {name.partition(".")[0] for name in set(sys.modules) - before}
    imported |= later
    imported |= {"torch"} | _named_imports(path for path in files if path.endswith(".py"))
    return Opened(root, entry, device, model, sources, packages(imported), declared.declared(model, root), given, notes)


def load(root: Path, entry: str) -> Any:
    """Returns what `module:callable` names: a callable, or a graph pass with a method for a stage."""
    name, _, path = entry.partition(":")
    if not name or not path:
        raise Failure("entry_import", f"entry `{entry}` is not `module:callable`", spec=entry)
    importlib.invalidate_caches()
    try:
        found = importlib.import_module(name)
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name in _packages_of(name):
            files = sorted(p.stem for p in root.glob("*.py")) + sorted(
                p.parent.name for p in root.glob("*/__init__.py")
            )
            hint = failures.nearest(name, files, "modules beside the spec")
            message = f"there is no Python module `{error.name}` beside the spec, and none is installed"
            raise Failure("entry_import", message, hint=hint, spec=entry) from error
        raise Failure(
            "entry_import",
            f"can't import `{name}`: {type(error).__name__}: {failures.one_line(error)}",
            location=failures.location(error, root),
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            known = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
            raise Failure(
                "entry_call",
                f"`{name}` has no `{path}`",
                location=_place(found, root),
                hint=failures.nearest(part, known, "it has"),
                spec=entry,
            )
        found = getattr(found, part)
    if not callable(found) and not any(callable(getattr(found, stage, None)) for stage in STAGES):
        raise Failure("entry_call", f"`{entry}` is not callable but {_kind(found)}", spec=entry)
    return found


def _packages_of(name: str) -> list[str]:
    """Returns the module and the packages that it is in."""
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _call(function: Any, root: Path, entry: str) -> Any:
    import torch

    try:
        with torch.no_grad():
            made = function()
    except BaseException as error:
        raise Failure(
            "entry_call",
            f"`{entry}` raised {type(error).__name__}: {failures.one_line(error)}",
            location=failures.location(error, root),
        ) from error
    if isinstance(made, torch.nn.Module):
        return made
    place = _place(function, root)
    if not isinstance(made, dict) or not made:
        raise Failure(
            "entry_call",
            f"`{entry}` returned {_kind(made)}, not a torch.nn.Module or a dict of them",
            location=place,
        )
    holder = torch.nn.Module()
    # Not the modules in it: what they are in is theirs to say.
    holder.training = False
    for name, module in made.items():
        if not isinstance(module, torch.nn.Module) or not isinstance(name, str) or not name or "." in name:
            raise Failure(
                "entry_call",
                f"`{entry}` returned a dict whose `{name}` is {_kind(module)}, not a torch.nn.Module",
                location=place,
                hint="keys are names without dots, values are modules",
            )
        holder.add_module(name, module)
    return holder


def _check_data(model: Any, entry: str) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type == "meta":
            raise Failure(
                "entry_call",
                f"`{entry}` returned a model whose `{name}` has no data: it is on the meta device",
                hint="load the weights before returning the model",
            )


def _seed() -> None:
    """Makes weights that an entry draws at random the same in every worker of a build."""
    import torch

    torch.manual_seed(0)
    random.seed(0)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(0)


def _straighten(model: Any) -> None:
    """Gives every parameter and buffer the contiguous strides that the weight set stores it with; ties stay ties."""
    import torch

    done: dict[tuple[Any, ...], Any] = {}
    for module in model.modules():
        for tensor in own_tensors(module):
            if tensor.layout != torch.strided or tensor.device.type == "meta":
                continue
            plain = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").stride()
            if tensor.stride() == plain:
                continue
            key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            if key not in done:
                done[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
            tensor.data = done[key]


def module_files(root: Path) -> set[str]:
    """Returns the project's own files that are imported."""
    # The build's own folder may lie in the project, with this file and what the compiler makes.
    private = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "")
    found = set()
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str):
            real = os.path.realpath(path)
            # Modules that torch makes up (`torch.classes`) claim files that are not there.
            if failures.own_file(real, root) and os.path.isfile(real) and not real.startswith(private):
                found.add(real)
    return found


def check_imports(opened: Opened) -> None:
    """Refuses a module of the project that was first imported by a capture: no key knows of it."""
    known = {source["path"] for source in opened.sources}
    for path in sorted(module_files(opened.root) - opened.offering):
        name = os.path.relpath(path, opened.root).replace(os.sep, "/")
        if name not in known:
            raise Failure(
                "capture",
                f"`{name}` was first imported when the module ran, so a change of it would go unnoticed",
                hint="import it where the entry is imported",
            )


def with_later_imports(root: Path, files: set[str]) -> set[str]:
    """Adds the project's own files that an `import` inside a function would load: captures run those functions."""
    found, pending = set(files), [path for path in files if path.endswith(".py")]
    while pending:
        path = pending.pop()
        for name in _names(path, os.path.relpath(os.path.dirname(path), root)):
            parts = name.split(".")
            for count in range(1, len(parts) + 1):
                base = root.joinpath(*parts[:count])
                for file in (base.with_suffix(".py"), base / "__init__.py"):
                    real = os.path.realpath(file)
                    if real not in found and os.path.isfile(real) and failures.own_file(real, root):
                        found.add(real)
                        pending.append(real)
    return found


def _names(path: str, package: str) -> Iterator[str]:
    """Yields the dotted names that a file imports, from the project's root; `package` is the file's folder."""
    for node in _imports(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = [] if not node.level or package == "." else package.split(os.sep)
            parts = parts[: len(parts) - node.level + 1] if node.level > 1 else parts
            parts += node.module.split(".") if node.module else []
            yield from (".".join([*parts, alias.name]) for alias in node.names)


def _imports(path: str) -> list[ast.Import | ast.ImportFrom]:
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def _source(root: Path, path: str) -> dict[str, str]:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"path": os.path.relpath(path, root).replace(os.sep, "/"), "digest": digest.hexdigest()}


def _named_imports(files: Iterator[str]) -> set[str]:
    """Top-level names that files import, also those that something else had imported before."""
    found = set()
    for node in (node for path in files for node in _imports(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return {name for name in found if name in sys.modules}


def packages(imported: set[str]) -> list[dict[str, str]]:
    """Returns the installed packages that modules of these names belong to."""
    owners = importlib.metadata.packages_distributions()
    names = {owner for name in imported for owner in owners.get(name, ())}
    found = {name: importlib.metadata.version(name) for name in names}
    return [{"name": name, "version": found[name]} for name in sorted(found)]


def _place(thing: Any, root: Path) -> str | None:
    code = getattr(thing, "__code__", None)
    path = code.co_filename if code is not None else getattr(thing, "__file__", None)
    if path and failures.own_file(os.path.realpath(path), root):
        relative = os.path.relpath(os.path.realpath(path), root).replace(os.sep, "/")
        return f"{relative}:{code.co_firstlineno}" if code is not None else f"{relative}:1"
    return None


def _kind(thing: Any) -> str:
    if thing is None:
        return "None"
    name = type(thing).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
