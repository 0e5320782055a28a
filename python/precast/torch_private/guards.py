"""Guards of Dynamo as places and facts of `precast.record`.

A guard says what a trace has read: at which place, and what about the value there. A place is a path from a root: the
module, an argument, or a module of Python. `path` reads it from Dynamo's `Source`:

| source | step |
|---|---|
| attribute, also of a cell, a function, a class | `attr` |
| item of a list, a tuple or a dictionary | `item` |
| key of a dictionary by its number, and the value of that key | `key`, `at` |
| class of an object, and the dictionary of a class | `type`, `members` |

`read` turns the kind of a guard into the kinds of facts. Kinds of the modes of torch are left out: `modes` has them.

Private: `GuardFilterEntry.orig_guard`, the classes of `torch._dynamo.source` by their names and fields, and the kinds
of guards. Without them: no module in hand can be compiled; a new class or kind is an error that names it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import Any

from ..record.facts import Guarded
from ..record.places import Path

TRACED: dict[str, Any] = {}
"""The global variables of `tracing`, which puts them here: Dynamo adds the modules that it meets to them."""


class Unsupported(Exception):
    """A value that is read at a place which no later process can find."""


_SAME = (
    "NNModuleSource",
    "UnspecializedNNModuleSource",
    "UnspecializedBuiltinNNModuleSource",
    "FSDPNNModuleSource",
    "OptimizerSource",
    "SkipGuardSource",
    "NumpyTensorSource",
    "FloatTensorSource",
)
"""Sources of the value that their base has."""

# Kinds of guards that one fact expresses.
_FACTS = {
    "TYPE_MATCH": "type",
    "SEQUENCE_LENGTH": "length",
    "DICT_KEYS_MATCH": "keys",
    "MAPPING_KEYS_CHECK": "keys",
    "CONSTANT_MATCH": "value",
    "EQUALS_MATCH": "value",
    "BOOL_MATCH": "value",
    "NONE_MATCH": "value",
    "CLOSURE_MATCH": "function",
    "FUNCTION_MATCH": "identity",
    "BUILTIN_MATCH": "identity",
    "CLASS_MATCH": "identity",
    "MODULE_MATCH": "identity",
    "ID_MATCH": "identity",
    "NN_MODULE": "type",
    "TENSOR_MATCH": "tensor",
    "EMPTY_NN_MODULE_HOOKS_DICT": "length",
}
# The modes of torch, and what says nothing of a value.
_OF_MODES = {
    "GRAD_MODE",
    "DETERMINISTIC_ALGORITHMS",
    "GLOBAL_STATE",
    "TORCH_FUNCTION_STATE",
    "DEFAULT_DEVICE",
    "AUTOGRAD_SAVED_TENSORS_HOOKS",
    "FSDP_TRAINING_STATE",
    "DUAL_LEVEL",
    "FUNCTORCH_STACK_MATCH",
    "WEAKREF_ALIVE",
    "NOT_NONE_MATCH",
    "SHAPE_ENV",
}
_FLAGS_OF_HOOKS = ("_with_kwargs", "_always_called")
"""Ends of names of tables that have entries only where the table of the hooks has some."""


def read(entries: Iterable[Any], gradients: bool) -> list[Guarded]:
    """Returns the facts of the guards of a trace; without gradients, not those about hooks of the backward call."""
    found: dict[Guarded, None] = {}
    for entry in entries:
        for one in _facts(entry, gradients):
            if not _of_the_tracer(one.path):
                found[one] = None
    return list(found)


def _facts(entry: Any, gradients: bool) -> Iterable[Guarded]:
    kind, guard = entry.guard_type, entry.orig_guard
    if kind in _OF_MODES:
        return
    source, given = guard.originating_source, _given(guard)
    if kind == "HASATTR":
        while type(source).__name__ in _SAME:
            source = source.base
        if type(source).__name__ != "CodeSource":  # every function has one
            yield Guarded(path(source.base), "has", source.member)
        return
    place = path(source)
    if place[0] == ("module", "torch.backends.mha"):  # `tracing` switches the fast path off
        return
    match kind:
        case "EMPTY_NN_MODULE_HOOKS_DICT" if str(place[-1][1]).endswith(_FLAGS_OF_HOOKS):
            return
        case "EMPTY_NN_MODULE_HOOKS_DICT" if str(place[-1][1]).startswith("_backward") and not gradients:
            return
        case "NOT_PRESENT_IN_GENERIC_DICT":
            yield Guarded(place, "own", given["attr"])
        case "DICT_CONTAINS" | "SET_CONTAINS":
            yield Guarded(place, "contains", given["key"])
        case "DUPLICATE_INPUT":
            yield Guarded(place, "same", path(given["source_b"]))
        case _ if kind in _FACTS:
            yield Guarded(place, _FACTS[kind])
        case _:
            raise Unsupported(f"a guard of the kind {kind} on `{entry.name}`")


def _of_the_tracer(place: Path) -> bool:
    """Returns whether a place is in the tracer's own code, which stands for builtins as `any`: no start imports it."""
    kind, name = place[0]
    return kind == "module" and name.startswith("torch._dynamo.")


def conditions(entries: Iterable[Any]) -> list[str]:
    """Returns the conditions on sizes, after the trace."""
    of_shapes = [entry.orig_guard for entry in entries if entry.guard_type == "SHAPE_ENV"]
    return [code for guard in of_shapes for code in guard.code_list or []]


def _given(guard: Any) -> dict[str, Any]:
    """Returns the further arguments of a guard."""
    found: dict[str, Any] = {}
    function = guard.create_fn
    while isinstance(function, functools.partial):
        found = {**function.keywords, **found}
        function = function.func
    return found


def path(source: Any) -> Path:
    """Returns the path to the value of a source. Raises `Unsupported`."""
    kind = type(source).__name__
    if kind in _SAME:
        return path(source.base)
    match kind:
        case "LocalSource":
            return ((source.local_name, None),)
        case "GlobalSource":
            return (_global(source.global_name),)
        case "ImportSource":
            return (("module", source.module_name),)
        case "AttrSource" | "CellContentsSource" | "ParamBufferSource" | "UnspecializedParamBufferSource":
            return (*path(source.base), ("attr", source.member))
        case "GenericAttrSource" | "GradSource":
            return (*path(source.base), ("attr", source.member))
        case "CodeSource":
            return (*path(source.base), ("attr", "__code__"))
        case "ClosureSource":
            return (*path(source.base), ("attr", "__closure__"))
        case "TypeMROSource":
            return (*path(source.base), ("attr", "__mro__"))
        case "DefaultsSource":
            return (*path(source.base), ("attr", source.field), ("item", source.idx_key))
        case "GetItemSource" | "ListGetItemSource" if not source.index_is_slice:
            return (*path(source.base), ("item", source.index))
        case "DictGetItemSource" | "DictSubclassGetItemSource":
            by_number = type(source.index).__name__ == "ConstDictKeySource"
            return (*path(source.base), ("at", source.index.index) if by_number else ("item", source.index))
        case "ConstDictKeySource":
            return (*path(source.base), ("key", source.index))
        case "TensorPropertySource" if source.prop.name == "SIZE":
            return (*path(source.base), ("size", source.idx))
        case "TypeSource":
            return (*path(source.base), ("type", None))
        case "TypeDictSource":
            return (*path(source.base), ("members", None))
        case "NamedTupleFieldsSource":
            return (*path(source.base), ("attr", "_fields"))
        case "DataclassFieldsSource":
            return (*path(source.base), ("attr", "__dataclass_fields__"))
    raise Unsupported(f"the value `{_name(source)}` ({kind})")


def _global(name: str) -> tuple[str, Any]:
    """Returns the root of a global variable of the traced code."""
    value = TRACED.get(name)
    if isinstance(value, types.ModuleType):
        return "module", value.__name__
    if name.startswith("__builtins_dict__"):
        return "builtins", None
    raise Unsupported(f"a value that a global variable of the trace holds ({type(value).__name__})")


def _name(source: Any) -> str:
    try:
        return str(source.name)
    except Exception:
        return type(source).__name__
