"""What to write instead, on the user's own line where that can be.

A fix is shown as whole statements in the user's names. Where the statement has a form that no rule here knows, the
fix is a sentence alone.
"""

from __future__ import annotations

import ast
from typing import Any

from .finding import Fix

_READS = {"item", "tolist"}


def branch(statement: ast.stmt | None, following: ast.stmt | None = None) -> Fix:
    """Returns the fix of a branch on a tensor's values."""
    if isinstance(statement, ast.If):
        if lines := _where(statement, following):
            return Fix("compute both sides and choose with `torch.where`", lines)
        return Fix("compute both sides and choose with `torch.where`, or use `torch.cond`")
    if isinstance(statement, ast.While | ast.For):
        return Fix("run a fixed number of steps, and let `torch.where` keep what is finished as it is")
    if isinstance(statement, ast.Assert):
        return Fix("leave the check to the caller: a compiled module checks shapes and dtypes itself", ["pass"])
    changed = _replace(statement, _conditional)
    if changed:
        return Fix("choose with `torch.where`", changed)
    return Fix("keep it a tensor: `torch.where` chooses, `torch.logical_and`, `_or` and `_not` combine")


def _conditional(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.IfExp):
        return _call("torch.where", _tensor(node.test), node.body, node.orelse)
    return None


def _where(statement: ast.If, following: ast.stmt | None) -> list[str]:
    """Returns the two sides of a branch as straight code, where both only assign names, or both return."""
    body, other = statement.body, statement.orelse
    test = _tensor(statement.test)
    if len(body) == 1 and isinstance(body[0], ast.Return):
        last = other[0] if len(other) == 1 else following if not other else None
        if isinstance(last, ast.Return) and body[0].value is not None and last.value is not None:
            return [f"return {_text(_call('torch.where', test, body[0].value, last.value))}"]
        return []
    yes, no = _assigned(body), _assigned(other)
    if yes is None or no is None:
        return []
    # A name of one side alone is that side's own, unless there is no other side: then it had a value before.
    chosen = [name for name in yes if name in no] if other else list(yes)
    if not chosen:
        return []
    kept = [_line(name, value) for side in (yes, no) for name, value in side.items() if name not in chosen]
    test_name = ast.unparse(test)
    touched = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    head = []
    if len(chosen) > 1 and touched & set(chosen):
        head, test_name = [f"chosen = {test_name}"], "chosen"
    made = []
    for name in chosen:
        value = no.get(name, ast.Name(name))
        made.append(f"{name} = {_text(_call('torch.where', ast.Name(test_name), yes[name], value))}")
    return [*head, *kept, *made]


def _assigned(body: list[ast.stmt]) -> dict[str, ast.expr] | None:
    """Returns name -> value of a block that only assigns names, none for any other block."""
    found: dict[str, ast.expr] = {}
    for one in body:
        if isinstance(one, ast.Assign) and len(one.targets) == 1:
            target, value = one.targets[0], one.value
        elif isinstance(one, ast.AugAssign):
            target, value = one.target, ast.BinOp(ast.Name(ast.unparse(one.target)), one.op, one.value)
        else:
            return None
        name = ast.unparse(target)
        if not isinstance(target, ast.Name) or name in found:
            return None
        found[name] = value
    return found


def _tensor(test: ast.expr) -> ast.expr:
    """Returns a condition without what made it a Python value."""
    if isinstance(test, ast.Call):
        if isinstance(test.func, ast.Name) and test.func.id == "bool" and len(test.args) == 1:
            return _tensor(test.args[0])
        if isinstance(test.func, ast.Attribute) and test.func.attr == "item" and not test.args:
            return _tensor(test.func.value)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return ast.UnaryOp(ast.Invert(), _tensor(test.operand))
    if isinstance(test, ast.Compare):
        return ast.Compare(_tensor(test.left), test.ops, [_tensor(one) for one in test.comparators])
    if isinstance(test, ast.BoolOp):
        name = "torch.logical_and" if isinstance(test.op, ast.And) else "torch.logical_or"
        made = _tensor(test.values[0])
        for value in test.values[1:]:
            made = _call(name, made, _tensor(value))
        return made
    return test


def read(statement: ast.stmt | None) -> Fix:
    """Returns the fix of a value that is read into Python."""
    text = "keep it a tensor in place of a number"
    return Fix(text, _replace(statement, _unread))


def _unread(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Call) and not node.keywords:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "item" and not node.args:
            return node.func.value
        if isinstance(node.func, ast.Name) and node.func.id in ("int", "float") and len(node.args) == 1:
            inner = node.args[0]
            return _unread(inner) or inner
    return None


def masked(statement: ast.stmt | None, facts: dict[str, Any]) -> Fix:
    """Returns the fix of a boolean mask as an index, or of another size that follows from values."""
    text = "keep the size: compute at every position, and let a mask choose with `torch.where`"
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript):
        target = statement.targets[0]
        name, mask, value = (ast.unparse(one) for one in (target.value, target.slice, statement.value))
        if not isinstance(target.value, ast.Name) or isinstance(target.slice, ast.Tuple | ast.Slice):
            return Fix(text)
        if facts.get("value") in (None, 0):
            return Fix("fill with the mask", [f"{name} = {name}.masked_fill({_wide(mask, facts)}, {value})"])
        lines = [
            f"values = {value}",
            f"rows = ({_operand(mask)}.flatten().cumsum(0) - 1).clamp(0, values.shape[0] - 1)",
            f"{name} = torch.where({_wide(mask, facts)}, values[rows].view_as({name}), {name})",
        ]
        return Fix("number the places of the mask with `cumsum`, and choose with `torch.where`", lines)
    changed = _replace(statement, lambda node: _filled(node, facts)) if facts.get("mask") is not None else []
    if changed:
        text = "keep every row and make the others zero: sums stay as they were, a mean divides by `mask.sum()`"
        return Fix(text, changed)
    return Fix(text)


def _wide(mask: str, facts: dict[str, Any]) -> str:
    missing = (facts.get("rank") or 0) - (facts.get("mask") or 0)
    return f"{_operand(mask)}[{', '.join(['...'] + ['None'] * missing)}]" if missing > 0 else mask


def _operand(text: str) -> str:
    """Returns an expression as something that an index or an attribute may follow."""
    node = ast.parse(text, mode="eval").body
    return text if isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript) else f"({text})"


def _filled(node: ast.AST, facts: dict[str, Any]) -> ast.AST | None:
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and isinstance(node.slice, ast.Name):
        mask = ast.Name(_wide(f"~{node.slice.id}", facts))
        return ast.Call(ast.Attribute(node.value, "masked_fill"), [mask, ast.Constant(0)], [])
    return None


def stored(node: ast.Attribute) -> Fix:
    """Returns the fix of what is read from an object: a number kept by the module."""
    base = ast.unparse(node.value)
    return Fix(
        "read it once, when the module is made, and keep the value",
        [f"self.{node.attr} = {base}.{node.attr}  # in __init__", f"self.{node.attr}  # in forward"],
    )


def quiet(statement: ast.stmt | None) -> Fix:
    """Returns the fix of what is printed."""
    text = "say it outside of forward, or only when the module runs in eager"
    if isinstance(statement, ast.Expr):
        return Fix(text, ["if not torch.compiler.is_compiling():", f"    {ast.unparse(statement)}"])
    return Fix(text)


def torch_instead(statement: ast.stmt | None, names: set[str]) -> Fix:
    """Returns the fix of a computation with numpy: torch's function of the same name."""
    import torch

    def change(node: ast.AST) -> ast.AST | None:
        if not isinstance(node, ast.Call):
            return None
        func = node.func
        if isinstance(func, ast.Attribute) and func.attr == "numpy":
            return func.value
        known = isinstance(func, ast.Attribute) and ast.unparse(func).partition(".")[0] in names
        if known and hasattr(torch, func.attr):
            return ast.Call(ast.Attribute(ast.Name("torch"), func.attr), node.args, node.keywords)
        if known and func.attr in ("array", "asarray") and node.args:
            return node.args[0]
        return None

    return Fix("compute it with torch", _replace(statement, change))


def in_place(statement: ast.stmt | None, held: str) -> Fix:
    """Returns the fix of a write into a tensor that is not the call's own."""
    import torch

    if held != "an input":
        return Fix("return the new value as an output, and take the old one as an input: a session can keep it")
    text = "make a new tensor"
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        name = statement.target.id
        return Fix(text, [_line(name, ast.BinOp(ast.Name(name), statement.op, statement.value))])
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript):
        name = ast.unparse(statement.targets[0].value)
        return Fix("write into a copy", [f"{name} = {name}.clone()", ast.unparse(statement)])

    def change(node: ast.AST) -> ast.AST | None:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            plain = node.func.attr.removesuffix("_")
            if plain != node.func.attr and hasattr(torch.Tensor, plain):
                return ast.Call(ast.Attribute(node.func.value, plain), node.args, node.keywords)
        return None

    lines = _replace(statement, change)
    if lines and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        target = statement.value.func.value if isinstance(statement.value.func, ast.Attribute) else None
        if isinstance(target, ast.Name):
            lines = [f"{target.id} = {lines[0]}"]
    return Fix(text, lines)


def repeated(statement: ast.stmt | None) -> Fix:
    """Returns the fix of `expand`: a copy with strides of its own."""

    def change(node: ast.AST) -> ast.AST | None:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "expand":
            sizes = [ast.Constant(1) if ast.unparse(one) == "-1" else one for one in node.args]
            return ast.Call(ast.Attribute(node.func.value, "repeat"), sizes, [])
        return None

    return Fix("`repeat` makes a copy whose strides do not depend on it", _replace(statement, change))


def dropout(statement: ast.stmt | None) -> Fix:
    """Returns the fix of dropout that is always on."""

    def change(node: ast.AST) -> ast.AST | None:
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2].endswith("dropout"):
            if len(node.args) > 2:
                return None
            kept = [one for one in node.keywords if one.arg != "training"]
            value = ast.Attribute(ast.Name("self"), "training")
            return ast.Call(node.func, node.args, [*kept, ast.keyword("training", value)])
        return None

    return Fix("switch it off in eval mode", _replace(statement, change))


def flag(statement: ast.stmt | None) -> Fix:
    """Returns the fix of a flag that follows from sizes."""

    def change(node: ast.AST) -> ast.AST | None:
        if isinstance(node, ast.keyword) and node.arg and not isinstance(node.value, ast.Constant):
            if node.arg.startswith(("is_", "use_", "has_")) or node.arg in ("causal", "training"):
                return ast.keyword(node.arg, _call("bool", node.value))
        return None

    text = "`bool` decides it once for the whole range; or give it to `__init__` as a constant"
    return Fix(text, _replace(statement, change))


def _replace(statement: ast.stmt | None, change: Any) -> list[str]:
    """Returns the statement with its expressions changed, none where nothing does."""
    if statement is None or isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return []
    copy = ast.parse(ast.unparse(_header(statement))).body[0]
    done = False

    class Change(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            nonlocal done
            made = change(node)
            if made is not None:
                done = True
                # What was put in its place may hold another one.
                return made if isinstance(made, ast.keyword) else self.generic_visit(made)
            return self.generic_visit(node)

    copy = Change().visit(copy)
    return _text(copy).splitlines() if done else []


def _header(statement: ast.stmt) -> ast.stmt:
    """Returns a compound statement with an empty block."""
    if isinstance(statement, ast.If):
        return ast.If(statement.test, [ast.Expr(ast.Constant(...))], [])
    if isinstance(statement, ast.While):
        return ast.While(statement.test, [ast.Expr(ast.Constant(...))], [])
    if isinstance(statement, ast.For):
        return ast.For(statement.target, statement.iter, [ast.Expr(ast.Constant(...))], [], lineno=1)
    if isinstance(statement, ast.With):
        return ast.With(statement.items, [ast.Expr(ast.Constant(...))], lineno=1)
    return statement


def _call(name: str, *args: ast.expr) -> ast.expr:
    return ast.Call(ast.parse(name, mode="eval").body, list(args), [])


def _line(name: str, value: ast.expr) -> str:
    return f"{name} = {_text(value)}"


def _text(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node))
