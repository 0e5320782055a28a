"""Fixes of computations with numpy: the equal function of torch."""

from __future__ import annotations

import ast

from .finding import Fix
from .fixes import called, replace, unparsed
from .sources import Place

# Functions with one meaning in both, for floating tensors.
_SAME = set(
    "abs absolute arctan ceil clip concatenate cos cosh exp expm1 floor isfinite isinf isnan log log10 log1p".split()
)
_SAME |= set("log2 matmul maximum minimum mean prod round sign sin sinh sqrt square stack sum tan tanh where".split())
_SAME |= set("argmax argmin argsort cumsum".split())
# Functions with another name in torch: the name, and an attribute of its result.
_NAMES = {"sort": ("sort", ".values"), "max": ("amax", ""), "min": ("amin", "")}
_NAMES |= {"amax": ("amax", ""), "amin": ("amin", "")}
_NAMES |= {"std": ("std", ""), "var": ("var", "")} | {name: (name, "") for name in _SAME}
_WRAPPERS = {"from_numpy", "as_tensor", "tensor"}


def instead(place: Place, node: ast.Call | None = None, constant: bool = False, floating: bool = True) -> Fix:
    """Returns the fix of a computation with numpy: of a call, or of a statement that gives a tensor to numpy."""
    if constant:
        return Fix("compute it once, in `__init__`, and keep the number")
    statement = place.statement
    inside = ast.walk(statement) if node is None and statement is not None else [node]
    calls = [one for one in inside if isinstance(one, ast.Call) and is_numpy(one)]
    shown = next((unparsed(call) for one in calls if (call := _torch(one, [ast.Name("…")]))), None)
    text = f"compute it with torch, by `{shown}`" if shown else "compute it with torch"
    return Fix(text, _lines(statement) if floating else [])


def _lines(statement: ast.stmt | None) -> list[str]:
    """Returns a statement without numpy. A statement with an array as its result has no such form."""
    wrapped = False

    def change(node: ast.AST) -> ast.AST | None:
        nonlocal wrapped
        if not isinstance(node, ast.Call):
            return None
        wrapper = called(node) in _WRAPPERS and ast.unparse(node.func).startswith("torch.")
        if wrapper and not node.keywords and len(node.args) == 1:
            wrapped = True
            return change(node.args[0]) or node.args[0]
        if called(node) == "numpy" and isinstance(node.func, ast.Attribute):
            return node.func.value
        return _torch(node, node.args) if is_numpy(node) else None

    lines = replace(statement, change)
    left = [one for one in ast.walk(ast.parse("\n".join(lines))) if isinstance(one, ast.Call)]
    done = wrapped and not any(is_numpy(one) or called(one) == "numpy" for one in left)
    return lines if done else []


def is_numpy(node: ast.Call) -> bool:
    """Returns whether a call is of a function of numpy."""
    return isinstance(node.func, ast.Attribute) and ast.unparse(node.func).partition(".")[0] in ("np", "numpy")


def _torch(node: ast.Call, args: list[ast.expr]) -> ast.expr | None:
    """Returns the call of torch that is equal to a call of numpy."""
    name, plain = called(node), ast.unparse(node.func).count(".") == 1
    if name not in _NAMES or not plain or any(one.arg not in ("axis", "keepdims") for one in node.keywords):
        return None
    torch, after = _NAMES[name]
    if name in ("where", "clip") and len(node.args) != 3:
        return None
    keywords = list(node.keywords)
    if name in ("std", "var"):
        keywords.append(ast.keyword("correction", ast.Constant(0)))
    call: ast.expr = ast.Call(ast.parse(f"torch.{torch}", mode="eval").body, args, keywords)
    return ast.Attribute(call, after[1:]) if after else call
