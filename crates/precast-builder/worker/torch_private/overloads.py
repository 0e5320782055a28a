"""Operators: overloads, their schemas and names, and where their kernels come from.

Private: `torch._ops.OpOverload`, `OpOverloadPacket`, `HigherOrderOperator`; `_schema` and `_overloadname` of an
overload. Without them: operators of a graph look like Python functions, and no segment has a canonical text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch


def is_overload(target: Any) -> bool:
    """Returns whether a node calls an operator, and not a Python function."""
    return isinstance(target, torch._ops.OpOverload)


def is_higher_order(target: Any) -> bool:
    """Returns whether a node calls an operator that takes graphs, as `torch.cond`."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def overload_of(target: Any) -> Any:
    """Returns the overload that a node calls, the default one of an operator without; None for anything else."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return getattr(target, "default", None)
    return target if is_overload(target) else None


def name_of(target: Any) -> str:
    """Returns an operator's name without namespace and overload, as `embedding`; a function's own name."""
    return getattr(getattr(target, "overloadpacket", target), "__name__", "")


def qualified_name(overload: Any) -> str:
    """Returns the name under which an operator is registered, as `aten::embedding`."""
    return overload._schema.name


def full_name(overload: Any) -> str:
    """Returns name and overload as the dispatcher has them, as `aten::add.Tensor`, `aten::relu`.

    Private: `_schema.overload_name`, which is empty for the default overload. Without it: eager can't be encoded.
    """
    schema = overload._schema
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name


def returned(overload: Any) -> list[Any]:
    """Returns the results of the schema: name and type of each."""
    return overload._schema.returns


def fixed_length(argument: Any) -> int | None:
    """Returns the length of a list in a schema, as 2 of `int[2]`, if one number may replace the list; else None.

    Private: `Argument.N`. Without it: eager refuses operators that were called with one number for a list.
    """
    return argument.N


def schema(overload: Any) -> str:
    """Returns the schema as text."""
    return str(overload._schema)


def arguments(overload: Any) -> list[Any]:
    """Returns the arguments of the schema: name, type and default value of each."""
    return overload._schema.arguments


def argument(node: Any, name: str) -> Any:
    """Returns an argument of an operation, by position or by name; None if it has no argument of this name."""
    for place, one in enumerate(arguments(node.target)):
        if one.name == name:
            passed = node.args[place] if place < len(node.args) else node.kwargs.get(name)
            return one.default_value if passed is None else passed
    return None


def is_elementwise(overload: Any) -> bool:
    """Returns whether each element of the result follows from the elements at its position."""
    return torch.Tag.pointwise in overload.tags


def is_mutable(overload: Any) -> bool:
    """Returns whether an operator writes into one of its arguments."""
    return overload._schema.is_mutable


def is_random(node: Any) -> bool:
    """Returns whether an operation draws random numbers. Attention does so for dropout."""
    if not is_overload(node.target) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    takes = any(one.name == "dropout_p" for one in node.target._schema.arguments)
    return not takes or (argument(node, "dropout_p") or 0.0) != 0.0


def writes_into(tensor: Any) -> int:
    """Returns the number of writes into a tensor so far.

    Private: `torch.Tensor._version`. Without it: buffers that a module writes into are found by a capture more.
    """
    return int(tensor._version)


def returns_view(overload: Any) -> bool:
    """Returns whether a result of an operator may share memory with an argument."""
    return any(result.alias_info is not None for result in overload._schema.returns)


def has_native_kernel(name: str, device: str) -> bool:
    """Returns whether an operator has a kernel for a device that was registered from C++.

    Private: the text of `torch._C._dispatch_dump`, which says where each kernel was registered. Without it: every
    custom operator counts as Python.
    """
    keys = {device.upper(), "CompositeExplicitAutograd[alias]", "CompositeImplicitAutograd[alias]"}
    keys.add("CompositeExplicitAutogradNonFunctional[alias]")
    for line in torch._C._dispatch_dump(name).splitlines():
        key, _, rest = line.partition(": registered at ")
        if key in keys and rest and not re.match(r"\S+\.py:\d+", rest):
            return True
    return False


def called(value: Any) -> str | None:
    """Returns the qualified name of an operator that Python code calls; None for anything else.

    Private: `OpOverloadPacket._qualified_op_name`, `CustomOpDef._qualname`. Without them: `check` sees no operator.
    """
    if is_overload(value):
        return qualified_name(value)
    if isinstance(value, torch._ops.OpOverloadPacket):
        return value._qualified_op_name
    return value._qualname if type(value).__name__ == "CustomOpDef" else None


def has_fake_kernel(name: str) -> bool:
    """Returns whether torch knows the layout of an operator's results without running it.

    Private: `_dispatch_has_kernel_for_dispatch_key` and the registry of fake kernels. Without them: every operator is
    reported as lacking one.
    """
    from torch._library.simple_registry import singleton

    keys = ("Meta", "CompositeImplicitAutograd")
    if any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys):
        return True
    return singleton.find(name).fake_impl.kernel is not None


def python_body(name: str, device: str) -> Callable[..., Any] | None:
    """Returns the Python function of an operator made by `torch.library.custom_op`; None for any other operator.

    Private: `torch._library.custom_ops.OPDEFS`, `CustomOpDef._backend_fns`. Without them: operators whose kernels are
    Python are refused, and not traced.
    """
    from torch._library.custom_ops import OPDEFS

    defined = OPDEFS.get(name)
    if defined is None:
        return None
    bodies = defined._backend_fns
    return bodies.get(device) or bodies.get(None)
