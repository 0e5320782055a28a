"""Checks in generated C++: a failed one is noted for the caller, instead of ending the process.

Inductor checks every index that it can't prove to be in bounds, with `AOTI_TORCH_CHECK` before the load: as a rule in a
loop that several threads share, where an exception ends the process. Here a failed check stores its text in a variable
loop that several threads share, where an exception ends the process. Here a failed check stores its text in a variable
of the calling thread, and the kernel continues with an index in bounds. After the artifact has run, the runtime reads
that text (`precast_take_failed_check`): the call then ends with an error, and its results are dropped. Callers on other
threads have separate variables.

| value | inductor | here |
|---|---|---|
| an index out of bounds | throws, or aborts in a parallel loop | noted; the nearest row is read |
| `torch._assert_async` and the like | throws, or aborts | noted |
| an integer divided by zero | SIGFPE ends the process | noted; divided by one |
| the lowest integer divided by -1 | SIGFPE | wraps around, as in eager |

Checks outside of kernels (`torch._check` on sizes) throw on the calling thread, and the runtime catches them.

Private: everything of `torch._inductor` that is named here, and the C++ that it generates. Without it: values out of
bounds end the process.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from .patches import replaced

# Inductor's names for quotients and remainders of integers.
_QUOTIENTS = {"floordiv", "truncdiv", "div_floor", "div_trunc"}
_REMAINDERS = {"mod", "remainder", "fmod"}

_INCLUDE = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
# Weak: an artifact may have several files of kernels.
_PRELUDE = """\
extern "C" {
__attribute__((weak, visibility("default"))) thread_local const char* precast_failed_check = nullptr;
__attribute__((weak, visibility("default"))) const char* precast_take_failed_check() {
    const char* text = precast_failed_check;
    precast_failed_check = nullptr;
    return text;
}
}
#define PRECAST_CHECK(cond, text)                                                                         \\
    do {                                                                                                  \\
        if (!(cond)) __atomic_store_n(precast_noted, static_cast<const char*>(text), __ATOMIC_RELAXED); \\
    } while (0)
"""
# The threads of a parallel region store into the variable of the thread that called the kernel.
_FIRST_LINE = "    const char** const precast_noted = &precast_failed_check;\n"


def note_in(text: str) -> str:
    """Returns the source of kernels with checks that are noted; a source without checks is returned unchanged.

    Private: a kernel is a function that begins with `extern "C"` and ends with a brace at the start of a line.
    Functions that a template puts before it check the sizes that it was generated for: those checks stay.
    """
    # Inductor compiles a file again when the same kernels come again.
    if "AOTI_TORCH_CHECK(" not in text or _INCLUDE not in text or _PRELUDE in text:
        return text
    changed = re.sub(r'^extern "C".*?^\{\n(?P<body>.*?)^\}$', _noting, text, flags=re.MULTILINE | re.DOTALL)
    return changed.replace(_INCLUDE, _INCLUDE + _PRELUDE, 1) if changed != text else text


def _noting(kernel: re.Match[str]) -> str:
    whole, body = kernel.group(0), kernel.group("body")
    if "AOTI_TORCH_CHECK(" not in body:
        return whole
    start = kernel.start("body") - kernel.start(0)
    noted = _FIRST_LINE + body.replace("AOTI_TORCH_CHECK(", "PRECAST_CHECK(")
    return whole[:start] + noted + whole[start + len(body) :]


def noted(operators_of: Callable[[Any], set[str]]) -> AbstractContextManager[None]:
    """Makes kernels safe for the time of one compile, also where a check fails.

    `operators_of` returns the operators of a graph node that take an index, for messages.

    Private: `CSEProxy`, through which every operation of a kernel goes; `IndexPropagation`; the checks that `CppKernel`
    and `CppVecKernel` write.
    """
    from torch._inductor import index_propagation
    from torch._inductor.codegen import common, cpp

    propagation = index_propagation.IndexPropagation
    places: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (common.CSEProxy, "indirect_indexing", _clamped),
        (common.CSEProxy, "_default", _divided),
        (propagation, "indirect_indexing", _clamped_expression),
        (cpp.CppKernel, "device_assert_async", lambda _: _assert),
        (cpp.CppKernel, "indirect_assert", lambda original: _named(original, operators_of)),
        (cpp.CppVecKernel, "indirect_assert", lambda original: _named(original, operators_of)),
    ]
    return replaced(*((owner, name, wrap(getattr(owner, name))) for owner, name, wrap in places))


def _is_cpp(kernel: Any) -> bool:
    from torch._inductor.codegen import cpp

    return isinstance(kernel, cpp.CppKernel)


def _bare(value: Any) -> Any:
    """Returns the kernel's variable of an operation's result."""
    return getattr(value, "value", value)


def _clamped(original: Any) -> Any:
    def indirect_indexing(self: Any, var: Any, size: Any, check: bool = True, wrap_neg: bool = True) -> Any:
        import sympy
        from torch._inductor.utils import generate_assert
        from torch._inductor.virtualized import ops

        symbol = original(self, var, size, check, wrap_neg)
        if not _is_cpp(self.kernel) or not generate_assert(check):
            return symbol
        index = self.kernel.cse.varname_map[str(symbol)]
        size = sympy.sympify(size)
        low = index.bounds.lower >= 0
        if low and size.is_number and index.bounds.upper < size:
            return symbol
        dtype = index.dtype or torch.int64
        index = ops.minimum(index, ops.index_expr(size - 1, dtype))
        index = _bare(index if low else ops.maximum(index, ops.constant(0, dtype)))
        return self.parent_handler.indirect_indexing(index, size, False)

    return indirect_indexing


def _clamped_expression(original: Any) -> Any:
    def indirect_indexing(self: Any, index: Any, size: Any, check: bool = True, wrap_neg: bool = True) -> Any:
        import sympy
        from torch._inductor.utils import generate_assert
        from torch._inductor.virtualized import V
        from torch.utils._sympy.functions import Max, Min

        found = original(self, index, size, check, wrap_neg)
        symbolic = getattr(index, "is_symbolic", False)
        if not symbolic or not generate_assert(check) or V.graph.device_types - {"cpu"}:
            return found
        found = sympy.sympify(found)
        if not self.statically_true(found < size):
            found = Min(found, size - 1)
        if not self.statically_true(0 <= found):
            found = Max(found, 0)
        return found

    return indirect_indexing


def _divided(original: Any) -> Any:
    def default(self: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (name in _QUOTIENTS or name in _REMAINDERS) and len(args) == 2 and _is_cpp(self.kernel):
            args = _safe_division(self, name, *args)
        return original(self, name, args, kwargs)

    return default


def _safe_division(proxy: Any, name: str, a: Any, b: Any) -> tuple[Any, Any]:
    """Writes a check of the divisor; returns operands whose division is defined."""
    from torch._inductor.virtualized import ops

    dtype = getattr(b, "dtype", None)
    if dtype is None or dtype.is_floating_point or getattr(a, "dtype", None) != dtype:
        return a, b
    low, high = b.bounds.lower, b.bounds.upper
    if low > 0 or high < -1:
        return a, b
    zero, one = ops.constant(0, dtype), ops.constant(1, dtype)
    if high >= 0:
        _note(proxy.kernel, _bare(ops.ne(b, zero)), "an integer is divided by zero")
    if low < 0:
        minus = ops.eq(b, ops.constant(-1, dtype))
        if name in _QUOTIENTS:
            a = _bare(ops.where(minus, ops.sub(zero, a), a))
        b = _bare(ops.where(minus, one, b))
    return a, _bare(ops.where(ops.eq(b, zero), one, b))


def _assert(kernel: Any, cond: Any, msg: str) -> None:
    _note(kernel, cond, msg)


def _note(kernel: Any, cond: Any, text: str) -> None:
    """Writes a check into a kernel. All lanes of a vector that hold elements must pass it."""
    holds = f"({cond})"
    if getattr(cond, "is_vec", False):
        mask = kernel._load_mask
        kind = f"decltype({cond})"
        if mask is not None and mask.is_vec:
            holds = f"({holds} | ~({mask}))"
        elif mask is not None:
            holds = f"({holds} | ~({kind}::from({mask})))"
        if kernel.tail_size:
            from torch._inductor.codegen.cpp_utils import cexpr_index

            holds = f"{kind}::set({kind}::from(1), {holds}, {cexpr_index(kernel.tail_size)})"
        holds = f"({holds}).all_masked()"
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
    kernel.cse.generate(kernel.compute, f'AOTI_TORCH_CHECK({holds}, "{text}")', assignment=False)


def _named(original: Any, operators_of: Callable[[Any], set[str]]) -> Any:
    """Has checks of indices name bounds and operators, and no variables of the generated code."""

    def indirect_assert(self: Any, var: Any, lower: Any, upper: Any, mask: Any = None) -> str:
        line = original(self, var, lower, upper, mask)
        numbers = f"{lower or ''}..{re.sub(r'L$', '', str(upper)) if upper else ''}"
        of = _operators(self, operators_of)
        return re.sub(r'"index out of bounds: .*"', f'"index in {numbers}{of}"', line, count=1)

    return indirect_assert


def _operators(kernel: Any, operators_of: Callable[[Any], set[str]]) -> str:
    """Returns the operators with an index that the current operation of a kernel comes from."""
    node = getattr(getattr(kernel, "current_node", None), "node", None)
    try:
        names = {name for origin in getattr(node, "origins", ()) or () for name in operators_of(origin)}
    except Exception:  # a node of the compiler may lack these attributes, and they are for a message only
        return ""
    return f" of {', '.join(sorted(names))}" if names else ""
