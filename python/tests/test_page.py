"""The Python of the README and the guide."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import precast
import pytest
from precast.client import building

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "docs/src/guide/python.md"]


def blocks(page: str) -> list[ast.Module]:
    text = (CHECKOUT / page).read_text("utf-8")
    found = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert found
    return [compile(code, page, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT) for code in found]


def calls(tree: ast.Module) -> list[tuple[ast.Call, str]]:
    """Returns the calls of functions of the package, with their names."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [(node, ast.unparse(node.func).removeprefix("precast.")) for node in found if _of_package(node.func)]


def _of_package(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) == "precast"


@pytest.mark.parametrize("page", PAGES)
def test_each_call_fits_a_function_of_the_package(page: str) -> None:
    for tree in blocks(page):
        for call, name in calls(tree):
            function = getattr(precast, name)
            names = [keyword.arg for keyword in call.keywords if keyword.arg]
            inspect.signature(function).bind(*call.args, **dict.fromkeys(names))


def test_the_guide_has_the_spec_of_the_example() -> None:
    text = (CHECKOUT / "docs/src/guide/python.md").read_text("utf-8")
    (code,) = re.findall(r"^from precast\.spec import .*?^\)$", text, re.MULTILINE | re.DOTALL)
    names: dict[str, precast.Spec] = {}
    exec(code, names)
    spec = names["spec"]
    example = precast.Spec.read(CHECKOUT / "examples/minilm/precast.toml")
    assert spec.modules[0].inputs == example.modules[0].inputs
    assert spec.modules[0].buckets == example.modules[0].buckets
    assert spec.modules[0].regions == example.modules[0].regions


def test_the_guide_names_every_error() -> None:
    text = (CHECKOUT / "docs/src/guide/python.md").read_text("utf-8")
    errors = {
        name
        for name in precast.__all__
        if inspect.isclass(one := getattr(precast, name)) and issubclass(one, Exception)
    }
    assert "BuildError" in errors
    assert {name for name in errors if f"`{name}`" not in text and f"`precast.{name}`" not in text} == set()


def test_the_guide_names_every_command() -> None:
    text = (CHECKOUT / "docs/src/guide/python.md").read_text("utf-8")
    functions = {name for name in precast.__all__ if inspect.getmodule(getattr(precast, name)) is building}
    assert len(functions) > 15
    assert {name for name in functions if f"`{name}`" not in text} == set()
