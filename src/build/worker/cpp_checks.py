"""Checks in generated C++ that are noted, and not thrown from inside of an OpenMP region, which would end the process.

Inductor checks every index that it can't prove, with `AOTI_TORCH_CHECK` before the load: as a rule in a loop that
several threads share. Here a check that fails leaves its text in a variable of the calling thread, and the kernel goes
on with an index that is in bounds. When the artifact has run, the runtime asks it for that text
(`precast_take_failed_check`): the call then ends with an error, and its numbers are dropped. Other callers of the same
shared object, on other threads, have a variable of their own.

| value | inductor | here |
|---|---|---|
| an index beyond its table | throws, or aborts in a parallel loop | noted; the nearest row is read |
| `torch._assert_async` and its like | throws, or aborts | noted |
| an integer divided by zero | SIGFPE ends the process | noted; divided by one |
| the least integer divided by -1 | SIGFPE | what eager gives where it gives anything: wraps around |

Checks in the code around kernels (`torch._check` on sizes) throw on the calling thread; the runtime catches them.

Written against torch 2.11, as `cpp_private`. Each place says what breaks if it moves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import bounds

# Inductor's names for quotients and remainders of integers.
_QUOTIENTS = {"floordiv", "truncdiv", "div_floor", "div_trunc"}
_REMAINDERS = {"mod", "remainder", "fmod"}

_INCLUDE = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
# Weak, as an artifact may have several files of kernels.
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
# The threads of a parallel region note what fails with the thread that called the kernel.
_FIRST_LINE = "    const char** const precast_noted = &precast_failed_check;\n"


def note_in(text: str) -> str:
    """Returns the source of kernels with checks that are noted; sources without checks are left as they are.

    A kernel is a function that begins with `extern "C"`, and ends with a brace at the start of a line. Functions that a
    template puts before it check what it was made for: these checks stay as they are.

    Breaks if: kernels no longer look so; a test of values out of bounds then ends its process.
    """
    # Inductor compiles a file again where the same kernels come again.
    if "AOTI_TORCH_CHECK(" not in text or _INCLUDE not in text or _PRELUDE in text:
        return text
    made = re.sub(r'^extern "C".*?^\{\n(?P<body>.*?)^\}$', _noting, text, flags=re.MULTILINE | re.DOTALL)
    return made.replace(_INCLUDE, _INCLUDE + _PRELUDE, 1) if made != text else text


def _noting(kernel: re.Match[str]) -> str:
    whole, body = kernel.group(0), kernel.group("body")
    if "AOTI_TORCH_CHECK(" not in body:
        return whole
    start = kernel.start("body") - kernel.start(0)
    noted = _FIRST_LINE + body.replace("AOTI_TORCH_CHECK(", "PRECAST_CHECK(")
    return whole[:start] + noted + whole[start + len(body) :]


@contextmanager
def noted() -> Iterator[None]:
    """Makes inductor's C++ safe whatever its checks find, for the time of one compile.

    Breaks if: `CSEProxy` no longer sees every operation of a kernel, or `CppKernel` writes its checks elsewhere.
    """
    from torch._inductor import index_propagation
    from torch._inductor.codegen import common, cpp

    propagation = index_propagation.IndexPropagation
    places = [
        (common.CSEProxy, "indirect_indexing", _clamped),
        (common.CSEProxy, "_default", _divided),
        (propagation, "indirect_indexing", _clamped_expression),
        (cpp.CppKernel, "device_assert_async", lambda _: _assert),
        (cpp.CppKernel, "indirect_assert", _told),
        (cpp.CppVecKernel, "indirect_assert", _told),
    ]
    # None: it is inherited.
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in places]
    made = [(owner, name, make(getattr(owner, name))) for owner, name, make in places]
    try:
        for owner, name, function in made:
            setattr(owner, name, function)
        yield
    finally:
        for owner, name, original in before:
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _is_cpp(kernel: Any) -> bool:
    from torch._inductor.codegen import cpp

    return isinstance(kernel, cpp.CppKernel)


def _bare(value: Any) -> Any:
    """Returns the kernel's variable of what an operation returned."""
    return getattr(value, "value", value)


def _clamped(original: Any) -> Any:
    def indirect_indexing(self: Any, var: Any, size: Any, check: bool = True, wrap_neg: bool = True) -> Any:
        import sympy
        import torch
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
    """Notes a divisor of zero, and returns what can be divided."""
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
    """Writes a check into a kernel; of a vector all lanes that hold elements must pass it."""
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


def _told(original: Any) -> Any:
    """Has checks of indices say what they are of, in words that do not hang on the generated code."""

    def indirect_assert(self: Any, var: Any, lower: Any, upper: Any, mask: Any = None) -> str:
        line = original(self, var, lower, upper, mask)
        numbers = f"{lower or ''}..{re.sub(r'L$', '', str(upper)) if upper else ''}"
        return re.sub(r'"index out of bounds: .*"', f'"index in {numbers}{_operator(self)}"', line, count=1)

    return indirect_assert


def _operator(kernel: Any) -> str:
    """Returns the operators that a kernel's present operation comes from, as far as they take an index."""
    node = getattr(getattr(kernel, "current_node", None), "node", None)
    try:
        names = {use.name for origin in getattr(node, "origins", ()) or () for use in bounds.uses_of(origin)}
    except Exception:  # nodes of the compiler may say less of themselves, and it is for a message only
        return ""
    return f" of {', '.join(sorted(names))}" if names else ""
