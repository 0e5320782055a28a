"""The project's own source: statements by line, and the functions they are in."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from .. import failures
from .finding import Finding, Fix

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass
class File:
    """One parsed file."""

    name: str
    lines: list[str]
    statements: dict[int, ast.stmt] = field(default_factory=dict)
    functions: dict[int, str] = field(default_factory=dict)
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)

    def around(self, node: ast.AST | None) -> Iterator[ast.AST]:
        """Yields a node, the one around it, and so on."""
        while node is not None:
            yield node
            node = self.parents.get(node)


@dataclass
class Place:
    """One line of the project, with the statement that it belongs to."""

    file: File
    line: int

    @property
    def location(self) -> str:
        """Returns `file:line`."""
        return f"{self.file.name}:{self.line}"

    @property
    def source(self) -> str:
        """Returns the text of the line."""
        return self.file.lines[self.line - 1].strip() if self.line <= len(self.file.lines) else ""

    @property
    def statement(self) -> ast.stmt | None:
        """Returns the innermost statement on the line."""
        return self.file.statements.get(self.line)

    @property
    def definition(self) -> ast.FunctionDef | None:
        """Returns the function around the statement."""
        return next((one for one in self.file.around(self.statement) if isinstance(one, ast.FunctionDef)), None)

    @property
    def following(self) -> ast.stmt | None:
        """Returns the next statement in the same block."""
        statement = self.statement
        parent = self.file.parents.get(statement) if statement is not None else None
        for name in ("body", "orelse", "finalbody"):
            block = getattr(parent, name, None)
            if isinstance(block, list) and statement in block:
                return next(iter(block[block.index(statement) + 1 :]), None)
        return None

    @property
    def function(self) -> str | None:
        """Returns the qualified name of the function around the line."""
        return self.file.functions.get(self.line)


class Sources:
    """Reads files of the project lazily."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._files: dict[str, File | None] = {}

    def place(self, path: str, line: int) -> Place | None:
        """Returns a line of the project, none for any other file."""
        file = self.file(path)
        return None if file is None else Place(file, line)

    def at(self, location: str | None) -> Place | None:
        """Returns the line that `file:line` names."""
        path, _, line = (location or "").rpartition(":")
        return self.place(os.path.join(self.root, path), int(line)) if line.isdigit() else None

    def file(self, path: str) -> File | None:
        """Returns a parsed file of the project; None for other files and unreadable ones."""
        if path not in self._files:
            self._files[path] = self._read(path)
        return self._files[path]

    def _read(self, path: str) -> File | None:
        inside = failures.inside(path, 1, self.root)
        if inside is None:
            return None
        try:
            text = Path(path).read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError):
            return None
        file = File(inside.rpartition(":")[0], text.splitlines())
        _index(tree, file, [])
        return file


def _index(node: ast.AST, file: File, names: list[str]) -> None:
    for child in ast.iter_child_nodes(node):
        file.parents[child] = node
        inner = [*names, child.name] if isinstance(child, _SCOPES) else names
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            for line in range(_first(child), (child.end_lineno or child.lineno) + 1):
                file.functions[line] = ".".join(inner)
        if isinstance(child, ast.stmt):
            for line in range(child.lineno, header_end(child) + 1):
                file.statements[line] = child
        _index(child, file, inner)


def _first(node: Any) -> int:
    return min([node.lineno, *(one.lineno for one in node.decorator_list)])


def header_end(statement: ast.stmt) -> int:
    """Returns the last line of a statement without the block it holds."""
    body = getattr(statement, "body", None)
    if isinstance(body, list) and body:
        return max(body[0].lineno - 1, statement.lineno)
    return statement.end_lineno or statement.lineno


def executable(code: CodeType) -> set[int]:
    """Returns the lines of a function that can run."""
    return {line for _, _, line in code.co_lines() if line is not None and line > code.co_firstlineno}


def finding_at(place: Place | None, category: str, severity: str, why: str, fix: Fix) -> Finding:
    """Returns a finding at a line of the project; `place` is none if it has no line there."""
    if place is None:
        return Finding(category, severity, why, fix)
    return Finding(category, severity, why, fix, place.location, place.function, place.source)
