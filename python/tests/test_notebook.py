"""The notebook of the examples, cell by cell, as a kernel runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from conftest import command

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples/python/quickstart.ipynb"

# Runs the cells in one namespace, and asks each value at the end of a cell for what a notebook would show.
RUN = """
import ast, json, sys
names = {"__name__": "__main__"}
for cell in json.loads(open(sys.argv[1]).read())["cells"]:
    if cell["cell_type"] != "code":
        continue
    tree = ast.parse("".join(cell["source"]).rstrip(";"))
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        shown = value._repr_html_() if hasattr(value, "_repr_html_") else repr(value)
        assert shown, ast.unparse(last)
"""


def test_the_cells_of_the_notebook_run(tmp_path: Path) -> None:
    environment = {**os.environ, "PRECAST_COMMAND": command(), "TMPDIR": str(tmp_path)}
    arguments = [sys.executable, "-c", RUN, str(NOTEBOOK)]
    done = subprocess.run(arguments, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
