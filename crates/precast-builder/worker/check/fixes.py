"""Fixes of findings, in the user's own names.

A fix is a sentence. Lines of code follow it only if the module computes the same with them: every output, and every
tensor that it changes. They replace the statement, except lines whose comment names another place. A statement that no
rule matches has only the sentence.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from typing import Any

from .finding import Fix
from .sources import Place

LOOP = (
    "compile one step, and let the caller loop and stop: of a decoder one token, with the cache as inputs and outputs. "
    "Or run a fixed number of steps, and let `torch.where` keep what is finished"
)
TRAINING = Fix("train in Python, outside of forward; new weights need no new compile: name their file in the spec")
_BRANCH = "compute both sides and choose with `torch.where`, if both have one shape"
# Calls that return a tensor of booleans. Calls that return a Python value: no tensor can replace it.
_BOOLEAN = {"any", "all", "isnan", "isinf", "isfinite", "isclose", "eq", "ne", "gt", "ge", "lt", "le"}
_PYTHON = {"tolist", "equal", "allclose", "is_nonzero"}
# Arguments of these are sizes.
_SIZED = {"range", "zeros", "ones", "empty", "full", "arange", "view", "reshape", "expand", "repeat", "narrow", "split"}


def branch(place: Place | None, rank: int | None = None) -> Fix:
    """Returns the fix of a branch on a tensor's values; `rank` is that of the tensor."""
    statement = place.statement if place is not None else None
    if place is None or statement is None:
        return Fix(_BRANCH)
    if isinstance(statement, ast.While) or _leaves_loop(place) or generates(statement):
        return Fix(LOOP)
    if isinstance(statement, ast.If):
        return Fix(_BRANCH, _where(place, statement) if not rank else [])
    if isinstance(statement, ast.For):
        return Fix("run a fixed number of steps, and let `torch.where` keep what is finished as it is")
    if isinstance(statement, ast.Assert):
        return Fix("leave the check to the caller: a compiled module checks shapes and dtypes itself", ["pass"])
    changed = replace(statement, _conditional) if not rank else []
    if changed:
        return Fix("choose with `torch.where`", changed)
    return Fix("keep it a tensor: `torch.where` chooses, `torch.logical_and`, `_or` and `_not` combine")


def generates(statement: ast.stmt | None) -> bool:
    """Returns whether a statement calls a `generate`."""
    nodes = ast.walk(_header(statement)) if statement is not None else ()
    return any(isinstance(one, ast.Call) and called(one) == "generate" for one in nodes)


def _leaves_loop(place: Place) -> bool:
    """Returns whether a branch ends a loop that it is in."""
    statement = place.statement
    if not isinstance(statement, ast.If):
        return False
    around = (one for one in place.file.around(statement) if isinstance(one, ast.For | ast.While | ast.FunctionDef))
    ends = any(isinstance(one, ast.Break | ast.Return) for one in ast.walk(statement))
    return ends and not isinstance(next(around, None), ast.FunctionDef | None)


def _conditional(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.BinOp):
        sides = [_chosen(one) for one in (node.left, node.right)]
        if any(sides):
            return ast.BinOp(sides[0] or node.left, node.op, sides[1] or node.right)
    if isinstance(node, ast.Assign | ast.Return) and node.value is not None and (value := _chosen(node.value)):
        return ast.Return(value) if isinstance(node, ast.Return) else ast.Assign(node.targets, value, lineno=1)
    return None


def _chosen(node: ast.expr) -> ast.expr | None:
    """Returns a conditional expression as a call of `torch.where`."""
    if isinstance(node, ast.IfExp) and _is_tensor(node.body) and _is_tensor(node.orelse):
        test = _boolean(node.test)
        return None if test is None else _call("torch.where", test, node.body, node.orelse)
    return None


def _where(place: Place, statement: ast.If) -> list[str]:
    """Returns the two sides of a branch as straight code, where both only assign names, or both return."""
    body, other = statement.body, statement.orelse
    test = _boolean(statement.test)
    if test is None or place.source.startswith("elif"):
        return []
    if len(body) == 1 and isinstance(body[0], ast.Return):
        last = other[0] if len(other) == 1 else place.following if not other else None
        if isinstance(last, ast.Return) and _is_tensor(body[0].value) and _is_tensor(last.value):
            return [f"return {unparsed(_call('torch.where', test, body[0].value, last.value))}"]
        return []
    yes, no = _assigned(body), _assigned(other)
    if yes is None or no is None:
        return []
    earlier = _earlier(place)
    # A name without an earlier value that only one side sets is local to that side.
    chosen = [name for name in {**yes, **no} if (name in yes and name in no) or name in earlier]
    kept = {name: value for side in (yes, no) for name, value in side.items() if name not in chosen}
    if not chosen or any(_reads(value) & set(chosen) for value in kept.values()):
        return []
    sides = [(name, side[name]) for side in (yes, no) for name in chosen if name in side]
    if other and any(_reads(value) & (set(chosen) - {name}) for name, value in sides):
        return []
    if not all(_is_tensor(value) for _, value in sides):
        return []
    head, test_name = [], ast.unparse(test)
    if len(chosen) > 1 and _reads(test) & set(chosen):
        test_name = _unused("chosen", place)
        head = [f"{test_name} = {ast.unparse(test)}"]
    selected = []
    for name in chosen:
        value = yes.get(name, ast.Name(name)), no.get(name, ast.Name(name))
        selected.append(f"{name} = {unparsed(_call('torch.where', ast.Name(test_name), *value))}")
    return [*head, *(f"{name} = {unparsed(value)}" for name, value in kept.items()), *selected]


def _assigned(body: list[ast.stmt]) -> dict[str, ast.expr] | None:
    """Returns name -> value of a block that only assigns names, none for any other block."""
    found: dict[str, ast.expr] = {}
    for one in body:
        target = one.targets[0] if isinstance(one, ast.Assign) and len(one.targets) == 1 else None
        if not isinstance(target, ast.Name) or target.id in found or _writes(one):
            return None
        found[target.id] = one.value  # type: ignore[union-attr]
    return found


def _is_tensor(node: ast.expr | None) -> bool:
    """Returns whether an expression may be a side of `torch.where`."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    known = (ast.Tuple, ast.List, ast.Dict, ast.Set, ast.Lambda, ast.JoinedStr, ast.ListComp, ast.DictComp, ast.IfExp)
    return node is not None and not isinstance(node, known) and not _writes(node)


def _writes(node: ast.AST) -> bool:
    """Returns whether a call in it may change a tensor in place."""
    calls = (one for one in ast.walk(node) if isinstance(one, ast.Call))
    return any(called(one).endswith("_") and not called(one).endswith("__") for one in calls)


def _boolean(test: ast.expr) -> ast.expr | None:
    """Returns a condition as a tensor of booleans; none if it can't be one."""
    if isinstance(test, ast.Call) and ast.unparse(test.func) == "bool" and len(test.args) == 1:
        return _boolean(test.args[0])
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _boolean(test.operand)
        return None if inner is None else ast.Compare(inner, [ast.Eq()], [ast.Constant(0)])
    if isinstance(test, ast.BoolOp):
        found = [_boolean(one) for one in test.values]
        return None if None in found else _merged(found, ast.BitAnd() if isinstance(test.op, ast.And) else ast.BitOr())
    calls = [one for one in ast.walk(test) if isinstance(one, ast.Call)]
    if any(called(one) in _PYTHON or ast.unparse(one.func) in ("int", "round", "complex") for one in calls):
        return None
    value = ast.parse("\n".join(replace(ast.Expr(test), _unread)) or ast.unparse(test), mode="eval").body
    if isinstance(value, ast.Compare):
        if any(isinstance(one, ast.In | ast.NotIn | ast.Is | ast.IsNot) for one in value.ops):
            return None
        sides = [value.left, *value.comparators]
        pairs = zip(sides, value.ops, sides[1:], strict=False)
        return _merged([ast.Compare(left, [op], [right]) for left, op, right in pairs], ast.BitAnd())
    if isinstance(value, ast.Call) and called(value) in _BOOLEAN:
        return value
    return ast.Compare(value, [ast.NotEq()], [ast.Constant(0)])


def _merged(values: list[Any], op: ast.operator) -> ast.expr:
    merged = values[0]
    for value in values[1:]:
        merged = ast.BinOp(merged, op, value)
    return merged


def _unread(node: ast.AST) -> ast.AST | None:
    """Returns the tensor of an expression that reads its value unchanged."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "item":
        return node.func.value
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "float" and len(node.args) == 1:
        return _unread(node.args[0]) or node.args[0]
    return None


def read(place: Place, facts: dict[str, Any]) -> Fix:
    """Returns the fix of a value that is read into Python."""
    if generates(place.statement):
        return Fix(LOOP)
    if is_size(place):
        text = "keep the largest size, and leave out the rest with a mask, as `torch.arange(n) < count`"
        return Fix(f"{text}; or let the caller cut, and take the size from an input's shape")
    text, statement = "keep it a tensor in place of a number", place.statement
    reads = [node for node in ast.walk(statement) if _is_read(node)] if statement is not None else []
    inner = {node for outer in reads for node in ast.walk(outer) if node is not outer}
    if facts.get("rank") != 0 or facts.get("dtype") not in ("float32", "int64") or isinstance(statement, ast.Expr):
        return Fix(text)
    if len([node for node in reads if node not in inner]) != 1:
        return Fix(text)
    floating = facts["dtype"] == "float32"

    def change(node: ast.AST) -> ast.AST | None:
        if not isinstance(node, ast.Call) or not _is_read(node):
            return None
        if called(node) == "item":
            return node.func.value  # type: ignore[attr-defined]
        held, to = _unread(node.args[0]) or node.args[0], {"int": "long", "float": "float"}[called(node)]
        same = floating == (to == "float")
        return held if same else ast.Call(ast.Attribute(held, to), [], [])

    return Fix(text, replace(statement, change))


def _is_read(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or node.keywords:
        return False
    if isinstance(node.func, ast.Attribute):
        return node.func.attr == "item" and not node.args
    return ast.unparse(node.func) in ("int", "float") and len(node.args) == 1


def is_size(place: Place) -> bool:
    """Returns whether the value that a statement reads becomes a size: of a slice, of a shape, of a range."""
    statement, function = place.statement, place.definition
    if statement is None or function is None:
        return False
    names: set[str] = set()
    if isinstance(statement, ast.Assign):
        targets = [one for target in statement.targets for one in ast.walk(target)]
        names = {one.id for one in targets if isinstance(one, ast.Name)}

    def sized(node: ast.AST) -> Iterator[ast.AST]:
        if isinstance(node, ast.Slice):
            yield from (one for bound in (node.lower, node.upper) if bound is not None for one in ast.walk(bound))
        elif isinstance(node, ast.Call) and called(node) in _SIZED:
            yield from (one for value in node.args for one in ast.walk(value))

    if any(_is_read(one) for node in ast.walk(_header(statement)) for one in sized(node)):
        return True
    later = (node for node in ast.walk(function) if getattr(node, "lineno", 0) > place.line)
    return any(isinstance(one, ast.Name) and one.id in names for node in later for one in sized(node))


def masked(place: Place, facts: dict[str, Any]) -> Fix:
    """Returns the fix of a boolean mask as an index, or of another size that follows from values."""
    statement = place.statement
    text = "keep the size: compute at every position, and let a mask choose with `torch.where`"
    rank, by, value = facts.get("rank") or 0, facts.get("mask"), facts.get("value")
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript):
        target = statement.targets[0]
        name, mask, new = (ast.unparse(one) for one in (target.value, target.slice, statement.value))
        if not isinstance(target.value, ast.Name) or isinstance(target.slice, ast.Tuple | ast.Slice) or by is None:
            return Fix(text)
        if value in (None, 0):
            return Fix("fill with the mask", [f"{name}.masked_fill_({_wide(mask, rank - by)}, {new})"])
        if value <= rank - by:
            chosen = f"{name}.copy_(torch.where({_wide(mask, rank - by)}, {new}, {name}))"
            return Fix("choose with `torch.where`", [chosen])
        values, rows = _unused("values", place), _unused("rows", place)
        lines = [
            f"{values} = {new}",
            f"{rows} = ({_operand(mask)}.flatten().cumsum(0) - 1).clamp(0, {values}.shape[0] - 1)",
            f"{name}.copy_(torch.where({_wide(mask, rank - by)}, {values}[{rows}].view_as({name}), {name}))",
        ]
        return Fix("number the places of the mask with `cumsum`, and choose with `torch.where`", lines)
    if by is None:
        return Fix(text)
    text = "keep every row and make the others zero: sums stay as they were, a mean divides by `mask.sum()`"

    def change(node: ast.AST) -> ast.AST | None:
        of = node.func if isinstance(node, ast.Call) and not node.args and not node.keywords else None
        if not isinstance(of, ast.Attribute) or of.attr != "sum" or not isinstance(of.value, ast.Subscript):
            return None
        if not isinstance(of.value.slice, ast.Name | ast.Compare):
            return None
        mask = _wide(ast.unparse(of.value.slice), rank - by)
        rows = _call("torch.where", ast.Name(mask), of.value.value, ast.Constant(0))
        return ast.Call(ast.Attribute(rows, "sum"), [], [])

    return Fix(text, replace(statement, change))


def _wide(mask: str, missing: int) -> str:
    return f"{_operand(mask)}[{', '.join(['...'] + ['None'] * missing)}]" if missing > 0 else mask


def _operand(text: str) -> str:
    """Returns an expression as something that an index or an attribute may follow."""
    node = ast.parse(text, mode="eval").body
    return text if isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript) else f"({text})"


def stored(place: Place, node: ast.Attribute, taken: bool) -> Fix:
    """Returns the fix of an object's answer: a value of the module. `taken`: whether the name is in use."""
    base = ast.unparse(node.value)
    text = "read it once, when the module is made, and keep the value"
    parent = place.file.parents.get(node)
    if not base.startswith("self.") or (isinstance(parent, ast.Call) and parent.func is node):
        return Fix(text)
    name = f"self.{base.rpartition('.')[2]}_{node.attr}" if taken else f"self.{node.attr}"
    change = replace(place.statement, lambda one: ast.Name(name) if ast.unparse(one) == ast.unparse(node) else None)
    return Fix(text, [f"{name} = {base}.{node.attr}  # last in `__init__`", *change])


def printed(statement: ast.stmt | None) -> Fix:
    """Returns the fix of a `print` or a log."""
    text = "say it outside of forward, or only when the module runs in eager"
    if isinstance(statement, ast.Expr):
        return Fix(text, ["if not torch.compiler.is_compiling():", f"    {ast.unparse(statement)}"])
    return Fix(text)


def in_place(held: str, method: ast.FunctionDef | None, written: list[str]) -> Fix:
    """Returns the fix of a write into a tensor that is not the call's own.

    `method` is the captured method, `written` has the names of the inputs that change.
    """
    if not held.startswith("the input"):
        return Fix("return the new value as an output, and take the old one as an input: the caller keeps it")
    text = "name it under `[module.state]`, so that a session keeps it; or write into a copy and return it"
    return Fix(text, [] if method is None else _copied(method, written))


def _copied(method: ast.FunctionDef, written: list[str]) -> list[str]:
    """Returns a method's first line and its returns, with copies of inputs; none if copies may not be enough."""
    arguments = method.args
    parameters = {one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    own = [node for node in ast.walk(method) if not isinstance(node, ast.FunctionDef) or node is method]
    if not set(written) <= parameters or any(isinstance(one, ast.Yield | ast.YieldFrom) for one in own):
        return []
    if any(isinstance(one, ast.FunctionDef | ast.Lambda) for one in ast.walk(method) if one is not method):
        return []
    changed = {id(one.target) for one in own if isinstance(one, ast.AugAssign)}
    stores = [one for one in own if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load)]
    rebound = {one.id for one in stores if id(one) not in changed}
    kept = {name: f"new_{name}" if name in rebound else name for name in written}
    lines = [
        f"{f'{new} = ' if new != name else ''}{name} = {name}.clone()  # first in `{method.name}`"
        for name, new in kept.items()
    ]
    returns = [one for one in own if isinstance(one, ast.Return)]
    if returns and not _ends(method.body):
        return []
    for one in returns or [ast.Return(None)]:
        nothing = one.value is None or (isinstance(one.value, ast.Constant) and one.value.value is None)
        values = [] if nothing else list(one.value.elts) if isinstance(one.value, ast.Tuple) else [one.value]
        there = {value.id for value in values if isinstance(value, ast.Name)}
        values += [ast.Name(new) for new in kept.values() if new not in there]
        text = f"return {', '.join(unparsed(value) for value in values)}"
        lines.append(text if returns else f"{text}  # last in `{method.name}`")
    return lines


def _ends(body: list[ast.stmt]) -> bool:
    """Returns whether a block never ends without a `return` or a `raise`."""
    last = body[-1]
    if isinstance(last, ast.If):
        return _ends(last.body) and bool(last.orelse) and _ends(last.orelse)
    return _ends(last.body) if isinstance(last, ast.With) else isinstance(last, ast.Return | ast.Raise)


def repeated(statement: ast.stmt | None, facts: dict[str, Any]) -> Fix:
    """Returns the fix of `expand`: a copy with its own strides."""
    shape, count = facts["shape"], len([1 for node in ast.walk(statement) if _is_expand(node)]) if statement else 0

    def change(node: ast.AST) -> ast.AST | None:
        if not isinstance(node, ast.Call) or not _is_expand(node) or id(node) in done:
            return None
        plain = not node.keywords and not any(isinstance(one, ast.Starred) for one in node.args)
        missing = len(node.args) - len(shape)
        # A parameter has one shape, an input may have its other sizes too.
        if count == 1 and plain and missing >= 0 and str(facts.get("held")).startswith("the parameter"):
            pairs = zip(node.args, (1,) * missing + shape, strict=True)
            sizes = [one if old == 1 and ast.unparse(one) != "-1" else ast.Constant(1) for one, old in pairs]
            return ast.Call(ast.Attribute(node.func.value, "repeat"), sizes, [])  # type: ignore[attr-defined]
        done.add(id(node))
        memory = ast.keyword("memory_format", ast.parse("torch.contiguous_format", mode="eval").body)
        return ast.Call(ast.Attribute(node, "clone"), [], [memory])

    done: set[int] = set()
    return Fix("a copy has strides that do not depend on the size", replace(statement, change))


def _is_expand(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "expand"


def dropout() -> Fix:
    """Returns the fix of dropout that is always on."""
    return Fix("if it is for training alone, switch it off in eval mode: `training=self.training`. Else draw outside")


def flag(statement: ast.stmt | None) -> Fix:
    """Returns the fix of a flag that follows from sizes."""

    def change(node: ast.AST) -> ast.AST | None:
        if isinstance(node, ast.keyword) and node.arg and not isinstance(node.value, ast.Constant):
            if node.arg.startswith(("is_", "use_", "has_")) or node.arg in ("causal", "training"):
                return ast.keyword(node.arg, _call("bool", node.value))
        return None

    text = "`bool` decides it once for the whole range; or give it to `__init__` as a constant"
    return Fix(text, replace(statement, change))


def evaluated(function: ast.stmt | None) -> Fix:
    """Returns the fix of an entry that returns a model in training mode."""
    returns = [one for one in ast.walk(function) if isinstance(one, ast.Return)] if function is not None else []
    lines = []
    if len(returns) == 1 and isinstance(returns[0].value, ast.Name | ast.Call):
        lines = [f"return {unparsed(returns[0].value)}.eval()"]
    return Fix("return it in eval mode", lines)


def _earlier(place: Place) -> set[str]:
    """Returns the names that may have a value before a statement."""
    function = place.definition
    if function is None:
        return set()
    names = {one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)}
    stores = (one for one in ast.walk(function) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))
    return names | {one.id for one in stores if one.lineno < place.line}


def _unused(name: str, place: Place) -> str:
    """Returns a name that the function around a line does not use."""
    nodes = list(ast.walk(place.definition)) if place.definition is not None else []
    named = [one for one in nodes if isinstance(one, ast.Name | ast.arg)]
    known = {one.id if isinstance(one, ast.Name) else one.arg for one in named}
    while name in known:
        name = f"{name}_"
    return name


def _reads(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def called(node: ast.Call) -> str:
    """Returns the last name of a call: `item` for `x.sum().item()`."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def replace(statement: ast.stmt | None, change: Any) -> list[str]:
    """Returns the statement with changed expressions; none if nothing changes."""
    if statement is None or isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return []
    changed = ast.parse(ast.unparse(_header(statement))).body[0]
    done = False

    class Change(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            nonlocal done
            new = change(node)
            if new is not None:
                done = True
                # The new expression may hold another match.
                return new if isinstance(new, ast.keyword) else self.generic_visit(new)
            return self.generic_visit(node)

    changed = Change().visit(changed)
    return unparsed(changed).splitlines() if done else []


def _header(statement: ast.stmt) -> ast.stmt:
    """Returns a compound statement with an empty block."""
    if not isinstance(statement, ast.If | ast.While | ast.For | ast.With):
        return statement
    short = copy.copy(statement)
    short.body, short.orelse = [ast.Expr(ast.Constant(...))], []  # type: ignore[union-attr]
    return short


def _call(name: str, *args: ast.expr) -> ast.expr:
    return ast.Call(ast.parse(name, mode="eval").body, list(args), [])


def unparsed(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node))
