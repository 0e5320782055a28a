"""A module in hand as functions of tensors, by traces of its calls, with the record of what these have read.

```text
module, arguments ──▶ trace ──▶ graph ────▶ Graph: a module with the tensors that the graph reads, under names
                        └─────▶ record      places of these tensors, facts, results
```

A tensor that the graph reads is an input, if it is in an argument; else it is a weight, bound by pointer: a parameter,
a buffer, an attribute, a global variable. Its name is that of a `state_dict`, or `constants.NUMBER` where it has none.

A leaf of the answer is a result of the graph, a tensor that was given or read, or a value that is the same in each
call.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..capture import captured
from ..capture.programs import Flat, named, near, undisturbed
from ..compare import batches
from ..compare.truth import Shares, Truth, in_half
from ..compare.undisturbed import generators, restored_buffers
from ..errors import BadInput, BuildError
from ..record import places, values
from ..record.facts import Guarded
from ..record.places import Path
from ..record.record import Record, Untold
from ..torch_private import guards, tracing
from ..torch_private import modules as of_torch
from .caches import CacheReturned, is_cache

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_TABLES = ("_parameters", "_buffers")


@dataclass
class Weight:
    """A tensor of the module that programs read."""

    tensor: Tensor
    node: int
    """Its place in the record."""


class Traced:
    """A module that is traced at several sizes, as a source of a `capture`, and the record of all traces."""

    method = "forward"

    def __init__(
        self,
        net: nn.Module,
        own: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        positional: Sequence[str],
        under: str = "",
    ) -> None:
        """`own` is the `forward` that was set on the module, if there is one. `positional` are the names of positional
        arguments; the names of tensors in programs begin with `under`."""
        self.net, self.own, self.given, self._positional, self.under = net, own, (args, dict(kwargs)), positional, under
        self.record = Record()
        self.tensors: dict[str, Tensor] = batches.flat(args, kwargs, positional)[0]
        self.read: dict[str, Weight] = {}
        self.results: list[Any] | None = None
        self.shares: Shares = {}
        self._names: list[str] | None = None
        self._by_node: dict[int, str] = {}
        self._first: Graph | None = None
        self._written: list[tuple[dict[Any, Any], Any, Any]] = []

    @property
    def names(self) -> list[str]:
        """The names of the tensors among the arguments that a call reads."""
        if self._names is None:
            self._first = self._traced(self.tensors, {})
        assert self._names is not None
        return self._names

    def at(self, inputs: Sequence[Tensor], free: Sequence[Sequence[int]]) -> Graph:
        """Traces a call with these tensors in place of the sample's. Raises `BuildError`."""
        tensors = self.tensors | dict(zip(self.names, inputs, strict=True))
        if self._first is not None and not any(free) and _alike(tensors, self.tensors):
            return self._first
        return self._traced(tensors, dict(zip(self.names, free, strict=True)))

    def weights(self) -> dict[str, Tensor]:
        """Returns the tensors that programs read, by name."""
        return {prefixed(self.under, name): one.tensor for name, one in self.read.items()}

    def eager(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Returns the results of the module itself that programs return."""
        args, kwargs = self._call(inputs)
        answer = tracing.forward(self.net, self.own, args, kwargs)
        for held, key, value in self._written:
            if held.get(key) != value:
                raise BuildError(f"{named(self)} writes `{key}` in each call, by the sizes of its inputs")
        return self._outputs(answer)

    def near(self, given: Sequence[Tensor], wanted: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
        """Returns whether a program's results are the module's, but for rounding."""
        if all(map(near, given, wanted)):
            return True
        if any((one.shape, one.dtype) != (other.shape, other.dtype) for one, other in zip(given, wanted, strict=True)):
            return False

        def step(*args: Any, **kwargs: Any) -> dict[str, Tensor | None]:
            return _numbered(self._outputs(tracing.forward(self.net, self.own, args, kwargs)))

        args, kwargs = self._call(inputs)
        truth = Truth(self.net, step, args, kwargs, generators(), _numbered(wanted))
        return all(
            torch.equal(one, other) if not one.is_floating_point() else truth.judge(f"output {at}", one) is None
            for at, (one, other) in enumerate(zip(given, wanted, strict=True))
        )

    def measure(self) -> None:
        """Measures how far eager is from the truth, for a module in half precision."""
        args, kwargs = self.given
        if not in_half(self.net, self.given):
            return

        def step(*args: Any, **kwargs: Any) -> dict[str, Tensor | None]:
            return batches.named({"output": tracing.forward(self.net, self.own, args, kwargs)})

        with undisturbed(self.net):
            state = generators()
            truth = Truth(self.net, step, args, kwargs, state, step(*args, **kwargs))
            truth.measure()
        self.shares = truth.shares

    def held(self) -> dict[str, captured.Held]:
        """Returns the tensors that programs read, as a build takes them."""
        parameter = nn.Parameter
        return {
            name: captured.Held(one, "parameter" if isinstance(one, parameter) else "buffer")
            for name, one in self.weights().items()
        }

    @property
    def code(self) -> str:
        """The text of the graph of the sample."""
        return self._first.code if self._first is not None else ""

    def _call(self, inputs: Sequence[Tensor]) -> Arguments:
        tensors = self.tensors | dict(zip(self.names, inputs, strict=True))
        return batches.replaced(*self.given, self._positional, tensors)

    def _outputs(self, answer: Any) -> list[Tensor]:
        """Returns the tensors of an answer that programs return, in their order."""
        assert self.results is not None
        found: dict[int, Tensor] = {}
        for (_, leaf), (kind, where) in zip(batches.leaves(answer), self.results, strict=True):
            if kind == "output":
                found[where] = leaf
        return [found[at] for at in range(len(found))]

    def _traced(self, tensors: Mapping[str, Tensor], free: Mapping[str, Sequence[int]]) -> Graph:
        args, kwargs = batches.replaced(*self.given, self._positional, tensors)
        roots = {"net": self.net, "own": self.own, "args": args, "kwargs": kwargs}

        def keep(guarded: list[Guarded], codes: list[types.CodeType]) -> None:
            self.record.add(guarded, codes, roots)

        axes = [(tensors[name], axis) for name, some in free.items() for axis in some]
        try:
            with restored_buffers(self.net):
                trace = tracing.trace(self.net, self.own, args, kwargs, keep, axes)
            difference = self.record.differs(self.record.live(roots))
            if difference is not None:
                raise BuildError(f"{named(self)} changes in a call what it has read: {difference}")
            self._written.extend(
                (one.held, key, value) for one in trace.written for key, value in one.changes().items()
            )
            return self._graph(trace, roots, tensors, free)
        except tracing.NotTraced as error:
            message = f"{named(self)} can't be captured: {error}"
            raise BuildError(f"{error.place}: {message}" if error.place else message, hint=_hint(error)) from None
        except (guards.Unsupported, Untold) as error:
            raise BuildError(f"{named(self)} reads what a call can't check: {error}") from error

    def _graph(
        self,
        trace: tracing.Trace,
        roots: dict[str, Any],
        tensors: Mapping[str, Tensor],
        free: Mapping[str, Sequence[int]],
    ) -> Graph:
        by_path = {path: name for name, path in self._paths(roots).items()}
        sources: list[tuple[str, Any]] = []
        named: dict[int, tuple[str, str]] = {}
        live = self.record.live(roots)
        for _, path in trace.inputs:
            if path[-1][0] == "size":
                name = by_path.get(path[:-1])
                if name is None:
                    raise BuildError(f"the size of `{places.shown(path[:-1])}`, which is no input, is not fixed")
                sources.append(("size", (name, path[-1][1])))
            elif path[0][0] not in ("args", "kwargs"):
                at = self.record.node(path)
                name = self._weight(at, path, live.grow().value(at))
                sources.append(("weight", name))
                named[id(self.read[name].tensor)] = ("weight", name)
            elif path in by_path:
                sources.append(("input", by_path[path]))
            else:
                containers = "lists, tuples, dicts and dataclasses"
                raise BadInput(f"`{places.shown(path)}` is a tensor in an object: inputs are tensors, in {containers}")
        for name, tensor in tensors.items():
            named.setdefault(id(tensor), ("input", name))
        used = [name for name in by_path.values() if ("input", name) in sources or _sized(sources, name)]
        if self._names is None:
            self._names = used
        elif missing := set(used) - set(self._names):
            raise BuildError(f"`{min(missing)}` is read at some sizes only")
        outputs, results = self._results(trace, named)
        if self.results is None:
            self.results = results
        elif results != self.results:
            raise BuildError(
                f"a result that is no tensor follows the sizes: {_values(results)} at these, {_values(self.results)} "
                "at others; return a tensor, or give the module one size"
            )
        symbolic = {
            (name, axis)
            for name, some in free.items()
            for axis in some
            if isinstance(_size(trace, sources, name, axis), torch.SymInt)
        }
        conditions = [_condition(one, self._paths(roots), self._names) for one in trace.conditions]
        return Graph(trace.graph, sources, outputs, self, symbolic, [one for one in conditions if one])

    def _paths(self, roots: dict[str, Any]) -> dict[str, Path]:
        """Returns the path of each tensor among the arguments, by its name."""
        found: dict[str, Path] = {}

        def walk(name: str, value: Any, path: Path) -> None:
            if isinstance(value, Tensor):
                found[name] = path
            else:
                for key, step, inner in batches.parts(value) or ():
                    walk(f"{name}.{key}", inner, (*path, step))

        for at, value in enumerate(roots["args"]):
            name = self._positional[at] if at < len(self._positional) else f"args.{at}"
            walk(name, value, (("args", None), ("item", at)))
        for name, value in roots["kwargs"].items():
            walk(name, value, (("kwargs", None), ("item", name)))
        return found

    def _weight(self, node: int, path: Path, value: Any) -> str:
        """Returns the name of a tensor that is read."""
        if node in self._by_node:
            return self._by_node[node]
        if not isinstance(value, Tensor):
            raise BuildError(
                f"`{places.shown(path)}` is a `{type(value).__name__}`, which a program would have inside",
                hint="register it as a buffer",
            )
        known = next((name for name, one in self.read.items() if one.tensor is value), None)
        name = known or _registered(path) or f"constants.{len(self.read)}"
        self._by_node[node] = name
        if known is None:
            self.read[name] = Weight(value, node)
            self.record.weights[name] = node
        return name

    def _results(self, trace: tracing.Trace, named: dict[int, tuple[str, str]]) -> tuple[list[int], list[Any]]:
        """Returns the numbers of the graph's results, and what each leaf of the answer is."""
        numbers = {id(one): at for at, one in reversed(list(enumerate(trace.results))) if isinstance(one, Tensor)}
        outputs: dict[int, int] = {}
        leaves: list[Any] = []
        for path, leaf in batches.leaves(trace.answer):
            where = f"`{path}` of its result" if path else "its result"
            if not isinstance(leaf, Tensor):
                if is_cache(leaf):
                    raise CacheReturned
                try:
                    leaves.append(["value", values.encoded(leaf)])
                except values.Unknown:
                    raise BuildError(
                        f"{where} is a {type(leaf).__name__}, which no artifact returns",
                        hint="return tensors, in lists, tuples, dicts and dataclasses",
                    ) from None
            elif id(leaf) in numbers:
                leaves.append(["output", outputs.setdefault(numbers[id(leaf)], len(outputs))])
            elif id(leaf) in named:
                leaves.append(list(named[id(leaf)]))
            else:
                raise BuildError(f"{where} is made after the graph has run")
        if any(
            isinstance(node, fx.Node) and isinstance(node.meta.get("example_value"), torch.SymInt)
            for node in _returned(trace)
        ):
            raise BuildError(
                "its result has a number that follows the sizes of the inputs, which no artifact returns",
                hint="leave it out: the caller knows these sizes",
            )
        if not outputs:
            raise BuildError("the module returns no tensor of its own")
        return list(outputs), leaves


class Graph(Flat):
    """A traced graph: tensors in order go in, the results that the answer has come out.

    Its submodule `m` has the tensors that the graph reads, under their names.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        sources: Sequence[tuple[str, Any]],
        outputs: Sequence[int],
        traced: Traced,
        symbolic: set[tuple[str, int]],
        conditions: Sequence[str],
    ) -> None:
        super().__init__()
        # In a tuple: it is no submodule.
        self._graph = (graph, list(sources), list(outputs), list(traced.names))
        self._under, self._symbolic, self.conditions = traced.under, symbolic, list(conditions)
        # torch.export has the casts of an autocast that is entered in the graph; AOTAutograd also those of one outside.
        on = () if torch.is_grad_enabled() else filter(torch.is_autocast_enabled, ("cpu", "cuda"))
        self._autocast = [(one, torch.get_autocast_dtype(one)) for one in on]
        self.m = nn.Module()
        for name, tensor in traced.weights().items():
            register(self.m, name, tensor)

    def fixed(self, input: int, axis: int) -> bool:
        """Returns whether the graph is for one size of an axis."""
        return (self._graph[3][input], axis) not in self._symbolic

    def forward(self, *tensors: Any) -> tuple[Any, ...]:
        """Runs the graph."""
        graph, sources, outputs, names = self._graph
        given = dict(zip(names, tensors, strict=True))
        inputs: list[Any] = []
        for kind, where in sources:
            if kind == "input":
                inputs.append(given[where])
            elif kind == "size":
                inputs.append(given[where[0]].shape[where[1]])
            else:
                owner, _, leaf = prefixed(self._under, where).rpartition(".")
                inputs.append(getattr(self.m.get_submodule(owner), leaf))
        with fx.traceback.preserve_node_meta(), ExitStack() as stack:
            for device, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype))
            results = fx.Interpreter(graph).run(*inputs)
        return tuple(results[at] for at in outputs)

    @property
    def code(self) -> str:
        """The text of the graph."""
        return str(self._graph[0].code)


def prefixed(under: str, name: str) -> str:
    """Returns the name of a tensor in a release of several regions."""
    return f"{under}.{name}" if under else name


def register(holder: nn.Module, name: str, tensor: Tensor) -> None:
    """Puts a tensor into a tree of modules, under its name."""
    *path, leaf = name.split(".")
    for part in path:
        table = of_torch.submodules(holder)
        if part not in table:
            holder.add_module(part, nn.Module())
        inside = table[part]
        assert inside is not None
        holder = inside
    if isinstance(tensor, nn.Parameter):
        holder.register_parameter(leaf, tensor)
    else:
        holder.register_buffer(leaf, tensor)


def _registered(path: Path) -> str | None:
    """Returns the name of a parameter or a buffer in a state dict."""
    found: list[str] = []
    steps = list(path[1:])
    while len(steps) >= 2 and steps[0] == ("attr", "_modules") and steps[1][0] == "item":
        found.append(str(steps[1][1]))
        steps = steps[2:]
    if path[0][0] == "net" and len(steps) == 2 and steps[0][0] == "attr" and steps[0][1] in _TABLES:
        return ".".join([*found, str(steps[1][1])])
    return None


def _returned(trace: tracing.Trace) -> list[Any]:
    (output,) = trace.graph.graph.find_nodes(op="output")
    return list(output.args[0])


def _values(results: Sequence[Any]) -> str:
    """Returns the results that are no outputs, as text."""
    values = [one for kind, one in results if kind == "value"]
    values = [float.fromhex(one[1]) if isinstance(one, list) and one[0] == "float" else one for one in values]
    return ", ".join(map(str, values))


def _sized(sources: Sequence[tuple[str, Any]], name: str) -> bool:
    return any(kind == "size" and where[0] == name for kind, where in sources)


def _size(trace: tracing.Trace, sources: Sequence[tuple[str, Any]], name: str, axis: int) -> Any:
    """Returns a size of an input as the trace has it: a number, or a symbol."""
    for (node, _), source in zip(trace.inputs, sources, strict=True):
        if source == ("input", name):
            return node.meta["example_value"].shape[axis]
    return 0


def _condition(code: str, paths: Mapping[str, Path], inputs: Sequence[str]) -> str:
    """Returns a condition of a trace as one of a program, over `L["tensors"]`; empty for one that always holds."""
    for name, path in sorted(paths.items(), key=lambda one: -len(one[1])):
        place = f"L['{path[0][0]}']" + "".join(f"[{arg!r}]" for _, arg in path[1:])
        if name in inputs:
            code = code.replace(place, f'L["tensors"][{inputs.index(name)}]')
    return code if 'L["tensors"]' in code and "L['" not in code else ""


def _alike(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    pairs = [(some[name], others[name]) for name in some]
    return all(one.shape == other.shape and one.requires_grad == other.requires_grad for one, other in pairs)


def _numbered(tensors: Sequence[Tensor]) -> dict[str, Tensor | None]:
    return {f"output {at}": one for at, one in enumerate(tensors)}


def _hint(error: Exception) -> str:
    by_values = "data-dependent" in str(error).lower()
    return (
        "a branch, a loop or a size depends on values of a tensor: use `torch.where` or `torch.cond`"
        if by_values
        else ""
    )
