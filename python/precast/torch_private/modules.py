"""Modules, tensors and captured programs beyond their public interface.

Private: `_parameters`, `_buffers`, `_modules`, `_non_persistent_buffers_set`, `_call_impl`, `_compiled_call_impl` of a
module; `_version` and the hooks of a tensor; `_foreach_copy_`; `_torchdynamo_disable` of a function; `_schema` of an
operator, and its class; `_guards_code` of a captured program; `mark_dynamic`. Without them: no module in hand can be
compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

PRIMITIVES = "torch._inductor.inductor_prims"
"""The module that registers the operators which Inductor's decompositions call."""


def parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Returns a module's own table of parameters."""
    return module._parameters


def buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Returns a module's own table of buffers."""
    return module._buffers


def submodules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Returns a module's own table of submodules."""
    return module._modules


def unsaved(module: nn.Module) -> set[str]:
    """Returns the names of a module's own buffers that are no part of its state dict."""
    return module._non_persistent_buffers_set


def original(module: Any, other: Any = None) -> Any:
    """Returns the module that `torch.compile` or `maybe_compile` wrapped; `other` for one that neither returned."""
    return getattr(module, "_orig_mod", other)


def call(module: nn.Module) -> Callable[..., Any]:
    """Returns the call of a module with its hooks, past compiled code."""
    return module._call_impl  # type: ignore[no-any-return]


def enter(module: nn.Module, compiled: Callable[..., Any] | None) -> None:
    """Lets calls of a module go to compiled code; None: to the module again."""
    module._compiled_call_impl = compiled


def version(tensor: Tensor) -> int:
    """Returns the number of writes into a tensor; -1 for one that counts none."""
    return -1 if tensor.is_inference() else tensor._version


def has_hooks(tensor: Tensor) -> bool:
    """Returns whether a tensor has hooks of its gradient."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def write(tensors: list[Tensor], values: list[Tensor]) -> None:
    """Writes values into tensors, with one kernel where that can be."""
    torch._foreach_copy_(tensors, values)


def is_disabled(function: Any) -> bool:
    """Returns whether `torch.compiler.disable` marks a function."""
    return bool(getattr(function, "_torchdynamo_disable", False))


def is_operator(target: Any) -> bool:
    """Returns whether the target of a node is an operator of torch's registry."""
    return isinstance(target, torch._ops.OpOverload)


def writes(target: Any) -> bool:
    """Returns whether an operator writes into its arguments."""
    schema = getattr(target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def conditions(exported: Any) -> list[str] | None:
    """Returns the conditions of a captured program on its sizes, if torch tells."""
    return getattr(exported, "_guards_code", None)


def marked_dynamic(value: Tensor, axis: int, low: int | None, high: int | None) -> Tensor:
    """Returns a view of a tensor with an axis that `torch.compile` takes as dynamic."""
    import torch._dynamo

    value = value.view_as(value)
    torch._dynamo.mark_dynamic(value, axis, min=low, max=high)
    return value
