"""Finds mistakes in names of the project's callables (`module:callable`) before torch is imported, which takes seconds.

A name is refused when the module is neither a file of the project nor installed, or when its file binds no such name
anywhere. A file that may make names in other ways is not judged: the import will tell.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from .. import failures
from ..wire import Failure

# With one of these in it, a file may make any name.
_ANY = {"__getattr__", "globals", "locals", "vars", "setattr", "exec", "eval"}


def check(root: Path, names: Sequence[str]) -> None:
    """Raises the failure of the first name that is wrong for sure."""
    for name in names:
        module, path = split(name)
        file = _file(root, module)
        top = module.partition(".")[0]
        if file is None:
            if not (root / top).exists() and not _installed(top):
                raise no_module(top, root, name)
            continue
        first = path.partition(".")[0]
        bound, known = _bound(file)
        if bound is not None and first not in bound:
            raise no_name(module, path, first, known, f"{file.relative_to(root)}:1", name)


def split(name: str) -> tuple[str, str]:
    """Returns the module and the callable of a name."""
    module, _, path = name.partition(":")
    if not module or not path:
        raise Failure("entry_import", f"entry `{name}` is not `module:callable`", spec=name)
    return module, path


def no_module(missing: str, root: Path, name: str) -> Failure:
    """Returns the failure of a module that is nowhere."""
    files = sorted(path.stem for path in root.glob("*.py"))
    files += sorted(path.parent.name for path in root.glob("*/__init__.py"))
    hint = failures.nearest(missing, files, "modules beside the spec")
    message = f"there is no Python module `{missing}` beside the spec, and none is installed"
    return Failure("entry_import", message, hint=hint, spec=name)


def no_name(module: str, path: str, part: str, known: Sequence[str], place: str | None, name: str) -> Failure:
    """Returns the failure of a name that a module does not have. `known` are callables that it has."""
    hint = failures.nearest(part, known, "it has")
    return Failure("entry_call", f"`{module}` has no `{path}`", location=place, hint=hint, spec=name)


def _file(root: Path, module: str) -> Path | None:
    """Returns the file of a module of the project."""
    base = root.joinpath(*module.split("."))
    return next((file for file in (base / "__init__.py", base.with_suffix(".py")) if file.is_file()), None)


def _installed(top: str) -> bool:
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return True


def _bound(file: Path) -> tuple[set[str] | None, list[str]]:
    """Returns every word that a file may bind somewhere, and its functions and classes; None where it may bind more."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None, []
    bound: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.Name(id=name):
                bound.add(name)
            case ast.Global(names=names):
                bound |= set(names)
            case ast.alias(name=name, asname=other):
                bound.add(other or name.partition(".")[0])
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                bound.add(name)
    defined = (node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    known = [name for name in defined if not name.startswith("_")]
    return (None if bound & (_ANY | {"*"}) else bound), known
