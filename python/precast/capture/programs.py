"""Captures a module of the caller's process as programs of torch.export, for ranges of the sizes of its inputs.

Where the code allows it, one program takes every size of a bucketed dimension from 2 on; further programs are for
size 1, because a tensor with one element in an axis broadcasts. Where the code fixes a size, each bucket of it has
programs of its own. Conditions on sizes that a capture decided on are conditions of its program.

Every program is compared with the module, at each bucket and at its smallest sizes: a build only sees programs.

The module is captured in eval mode. Afterwards its modes, buffers and gradients are as before.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from ..compare.undisturbed import without_autocast
from ..errors import BadInput, BuildError
from ..torch_private import modules as of_torch
from ..torch_private.sizes import depends_on_values
from .nesting import Call, nest
from .replay import Program, Sizes, quiet

# torch.export captures dynamic dimensions from this size on.
_MIN = 2
# The largest difference between a program and its module, as a share of the largest value.
_NEAR = 1e-3
_NOT_IT = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<frozen", "<string")
_BRANCH = "a branch, a loop or a size depends on values of a tensor: use `torch.where` or `torch.cond`"
_SIZE = "compute at the largest size with a mask, or take the size from an input's shape"


class Source(Protocol):
    """A function of tensors that is captured: of a module that is called as it is (`Plain`), or traced (`traced`)."""

    net: torch.nn.Module
    method: str

    @property
    def names(self) -> list[str]:
        """The names of the tensors."""

    def at(self, inputs: Sequence[Tensor], free: Sequence[Sequence[int]]) -> Flat:
        """Returns the function for inputs of these sizes. Axes in `free` may have other sizes too."""

    def weights(self) -> dict[str, Tensor]:
        """Returns the tensors that programs read, by name."""

    def eager(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Returns what the module itself returns."""

    def near(self, given: Sequence[Tensor], wanted: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
        """Returns whether a program's results are the module's, but for rounding."""


class Flat(torch.nn.Module):
    """A function of tensors in order, which returns tensors in order. Its submodule `m` has the weights."""

    conditions: Sequence[str] = ()
    """Conditions on sizes, as expressions over `L["tensors"]`."""

    def fixed(self, input: int, axis: int) -> bool:
        """Returns whether the function is for one size of an axis."""
        return False


class Capture:
    """The capture of a function at the sizes in `points`, and where it can at all others.

    `dims` has the bucketed dimension of each axis of each input, None for a fixed size. With `dynamic`, as a spec has
    it, other sizes than those of buckets are wanted: of a dimension whose only bucket has size 1, too.
    """

    def __init__(
        self,
        source: Source,
        tensors: Sequence[Tensor],
        dims: list[list[str | None]],
        points: list[Sizes],
        dynamic: Any = None,
    ) -> None:
        self.source, self.tensors, self.dims, self.points = source, list(tensors), dims, points
        self.largest = {dim: max(point[dim] for point in points) for dim in points[0]}
        for dim in self.largest if dynamic is True else dynamic or ():
            self.largest[dim] = max(self.largest[dim], _MIN)

    def programs(self) -> list[Program]:
        """Returns programs for all points; raises `BuildError` if the module can't be captured at one of them."""
        with undisturbed(self.source.net):
            found = [one for one in self._dynamic() if all(self._agrees(one, sizes) for sizes in self._within(one))]
            for sizes in self.points:
                if any(self._takes(one, sizes) for one in found):
                    continue
                exported = self._export(sizes)[1]
                one = Program(exported, {dim: (size, size) for dim, size in sizes.items()}, [])
                if not self._agrees(one, sizes):
                    raise BuildError(
                        f"{named(self.source)} gives other answers than its captured graph{_at(sizes)}",
                        hint="keep what changes between calls in a registered buffer; take random values as an input",
                    )
                found.append(one)
        return found

    def _dynamic(self) -> Iterator[Program]:
        """Yields programs for ranges of sizes: for any, and for each set of dimensions at size 1."""
        for base in (_distinct(self.largest), self.largest):
            whole = self._any_size(base, {})
            if whole is not None:
                break
        else:
            return
        stuck = [dim for dim, (low, high) in whole.sizes.items() if low == high]
        free = [dim for dim in self.largest if dim not in stuck]
        for sizes in itertools.product(*(sorted({point[dim] for point in self.points}) for dim in stuck)):
            fixed = dict(zip(stuck, sizes, strict=True))
            for count in range(len(free) + 1):
                for ones in itertools.combinations(free, count):
                    at = {**fixed, **dict.fromkeys(ones, 1)}
                    one = self._any_size({**base, **at}, at) if at else whole
                    if one is not None:
                        yield one

    def _any_size(self, sizes: Sizes, fixed: Sizes) -> Program | None:
        """Returns a program for any sizes of the dimensions that are not fixed; None if it can't be captured."""
        free = [dim for dim, size in sizes.items() if size >= _MIN and dim not in fixed]
        if not free and not fixed:
            return None
        try:
            flat, exported = self._export(sizes, free)
        except BuildError:
            return None
        guards = of_torch.conditions(exported)
        if guards is None:  # each bucket is captured alone
            return None
        bounds = {str(symbol): bound for symbol, bound in exported.range_constraints.items()}
        ends: dict[str, list[tuple[int, int | None]]] = {dim: [(_MIN, None)] for dim in free}
        placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
        for input_, (node, dims) in enumerate(zip(placeholders[-len(self.dims) :], self.dims, strict=True)):
            for axis, (size, dim) in enumerate(zip(node.meta["val"].shape, dims, strict=True)):
                if dim in free and flat.fixed(input_, axis):
                    ends[dim].append((sizes[dim], sizes[dim]))
                elif dim in free:
                    bound = bounds.get(str(size))
                    # A number, or a multiple of another size, is fixed.
                    ends[dim].append((sizes[dim], sizes[dim]) if bound is None else _ends(bound))
        ranges = {dim: _narrowest(ends.get(dim, [(size, size)])) for dim, size in sizes.items()}
        with without_autocast():
            exported = tidied(exported)
        return Program(exported, ranges, [*guards, *flat.conditions])

    def _within(self, program: Program) -> list[Sizes]:
        """Returns the sizes at which a program is compared with the module."""
        smallest = {dim: low for dim, (low, _) in program.sizes.items()}
        ones = {dim: low for dim, (low, high) in program.sizes.items() if low == high}
        found = [*self.points, smallest, *({**self.largest, **ones, dim: low} for dim, low in smallest.items())]
        unique = {tuple(sorted(sizes.items())): sizes for sizes in found if self._takes(program, sizes)}
        return list(unique.values())

    def _takes(self, program: Program, sizes: Sizes) -> bool:
        return program.takes(sizes, self._inputs(sizes))

    def _export(self, sizes: Sizes, free: Sequence[str] = ()) -> tuple[Flat, ExportedProgram]:
        """Returns the function and its program at these sizes, with some dimensions free."""
        inputs, shapes = self._inputs(sizes), None
        axes = [[at for at, dim in enumerate(dims) if dim in free] for dims in self.dims]
        flat = self.source.at(inputs, axes)
        if free:
            kept = [[at for at in some if not flat.fixed(number, at)] for number, some in enumerate(axes)]
            shapes = {"tensors": tuple(dict.fromkeys(some, Dim.AUTO) for some in kept)}
        first: Exception | None = None
        # Not strictly first, as a build captures.
        for strict in (False,) if free else (False, True):
            try:
                with quiet(), without_autocast():
                    program = torch.export.export(flat, inputs, dynamic_shapes=shapes, strict=strict)
                self._check_sizes(program, sizes)
                return flat, program if free else tidied(program)
            except BuildError:
                raise
            except Exception as error:
                first = first or error
        assert first is not None
        raise failure(self.source, first, sizes) from None

    def _check_sizes(self, program: ExportedProgram, sizes: Sizes) -> None:
        """Refuses a program with a tensor whose size depends on values, as a build does."""
        for node in program.graph.nodes:
            if node.op != "output" and depends_on_values(node.meta.get("val")):
                what = f"{named(self.source)} can't be captured{_at(sizes)}: a size depends on values of a tensor"
                place = _line(node.meta.get("stack_trace") or "")
                raise BuildError(f"{place}: {what}" if place else what, hint=_SIZE)

    def _inputs(self, sizes: Sizes) -> tuple[Tensor, ...]:
        """Returns the example inputs at other sizes."""
        return tuple(
            resized(tensor, {axis: sizes[dim] for axis, dim in enumerate(dims) if dim is not None})
            for tensor, dims in zip(self.tensors, self.dims, strict=True)
        )

    def _agrees(self, program: Program, sizes: Sizes) -> bool:
        """Returns whether a program and the module give the same answer."""
        inputs = self._inputs(sizes)
        buffers = {id(one) for one in self.source.net.buffers()}
        held = {name: one.clone() if id(one) in buffers else one for name, one in self.source.weights().items()}
        with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
            answers = []
            try:
                # A module that keeps state in Python gives another answer to the second call.
                for _ in range(2 if sizes == self.points[0] else 1):
                    torch.manual_seed(0)
                    with undisturbed(self.source.net):
                        answers.append(self.source.eager([tensor.clone() for tensor in inputs]))
            except Exception as error:
                if sizes in self.points:
                    raise failure(self.source, error, sizes) from error
                return False
            torch.manual_seed(0)
            try:
                with without_autocast():
                    given = program.run(held.__getitem__, [tensor.clone() for tensor in inputs])
            except Exception:  # an operator refuses sizes that the capture allows
                return False
        same = all(len(given) == len(wanted) for wanted in answers)
        return same and all(self.source.near(given, wanted, inputs) for wanted in answers)


class Plain:
    """A method of a module, called as it is."""

    def __init__(self, net: torch.nn.Module, method: str, call: Call) -> None:
        self.net, self.method, self.call, self.names = net, method, call, call.names
        self.flat = _Called(net, method, call)

    def at(self, inputs: Sequence[Tensor], free: Sequence[Sequence[int]]) -> Flat:
        """Returns the method as a function of tensors."""
        return self.flat

    def weights(self) -> dict[str, Tensor]:
        """Returns the parameters and buffers."""
        own = [self.net.named_parameters(remove_duplicate=False), self.net.named_buffers(remove_duplicate=False)]
        return dict(itertools.chain.from_iterable(own))

    def eager(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Returns what the method returns."""
        return list(self.flat(*inputs))

    def near(self, given: Sequence[Tensor], wanted: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
        """Returns whether all results are near to the module's, as a share of their largest value."""
        return all(map(near, given, wanted))


class _Called(Flat):
    """Calls a method of a module with tensors in order, and returns the tensors of its result in order."""

    def __init__(self, net: torch.nn.Module, method: str, call: Call) -> None:
        super().__init__()
        self.m, self.method, self.call = net, method, call
        self.outputs: Any = None

    def forward(self, *tensors: Any) -> tuple[Any, ...]:
        args, kwargs = self.call.arguments(tensors)
        # `forward` is called through `__call__`, so that hooks run.
        function = self.m if self.method == "forward" else getattr(self.m, self.method)
        found: list[Any] = []
        with _written_in_place(self.m):
            self.outputs = nest(function(*args, **kwargs), found)
        if not found:
            raise BuildError("the module returns no tensor")
        return tuple(found)


@contextlib.contextmanager
def _written_in_place(net: torch.nn.Module) -> Iterator[None]:
    """Copies a tensor that replaces a buffer meanwhile into the buffer, as a program would write it."""
    places = _buffers(net)
    before = [getattr(*place) for place in places]
    yield
    for place, buffer in zip(places, before, strict=True):
        if getattr(*place) is not buffer:
            buffer.copy_(getattr(*place))
            setattr(*place, buffer)


def _buffers(net: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    """Returns the submodule and the name of each buffer."""
    return [(module, name) for module in net.modules() for name, _ in module.named_buffers(recurse=False)]


@contextlib.contextmanager
def undisturbed(net: torch.nn.Module) -> Iterator[None]:
    """Puts a module into eval mode, without gradients and inference mode; restores modes and buffers at the end."""
    modes = [(module, module.training) for module in net.modules()]
    places = _buffers(net)
    buffers = [getattr(*place) for place in places]
    with torch.inference_mode(False), torch.no_grad():
        values = [buffer.clone() for buffer in buffers]
        for module, _ in modes:
            module.training = False
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for place, buffer, value in zip(places, buffers, values, strict=True):
                if getattr(*place) is not buffer:
                    setattr(*place, buffer)
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def device_of(tensors: Mapping[str, Tensor]) -> str:
    """Returns the kind of the device that a module and its inputs are on, `cpu` or `cuda`; refuses others, and several.

    A release is for a kind of device: one that was built on the first GPU is loaded on any of them.
    """
    found = {tensor.device for tensor in tensors.values()}
    names = ", ".join(sorted(map(str, found)))
    if any(device.type == "meta" for device in found):
        raise BadInput(
            "the module has tensors without data: they are on the meta device", hint="load its weights first"
        )
    if len(found) > 1:
        raise BadInput(f"the module and its example inputs are on {names}", hint="move them to one device")
    device = found.pop()
    if device.type not in ("cpu", "cuda"):
        raise BadInput(f"the module is on {names}", hint="a build is for `cpu` or `cuda`")
    return device.type


def check_build(tensors: Mapping[str, Tensor]) -> str:
    """Returns the kind of the device that a build is for; refuses a GPU that is not the first."""
    kind = device_of(tensors)
    at = next(iter(tensors.values())).device
    if (at.index or 0) != 0:
        raise BadInput(
            f"the module is on {at}, and the store has no release for it: a build is on cuda:0",
            hint="build in a process whose module is on `cuda:0` first, as rank 0, or set `CUDA_VISIBLE_DEVICES`",
        )
    return kind


def resized(tensor: torch.Tensor, sizes: dict[int, int]) -> torch.Tensor:
    """Returns a tensor with other sizes of some axes: its values repeated, or the first of them."""
    for axis, size in sizes.items():
        if tensor.shape[axis] != size:
            tensor = tensor.index_select(axis, torch.arange(size, device=tensor.device) % tensor.shape[axis])
    return tensor.clone(memory_format=torch.contiguous_format)


def _distinct(sizes: Sizes) -> Sizes:
    """Returns sizes near these, a different one for each dimension: code that needs equal sizes shows."""
    found: Sizes = {}
    for dim, size in sorted(sizes.items(), key=lambda item: item[1]):
        near = [size, *(size + step for at in range(1, len(sizes) + 1) for step in (-at, at))]
        found[dim] = next(one for one in near if one == size < _MIN or (one >= _MIN and one not in found.values()))
    return {dim: found[dim] for dim in sizes}


def _ends(bound: Any) -> tuple[int, int | None]:
    """Returns the smallest and the largest size of a range of torch.export, None for no largest one."""
    return int(bound.lower), None if "oo" in str(bound.upper) else int(bound.upper)


def _narrowest(ends: list[tuple[int, int | None]]) -> tuple[int, int | None]:
    """Returns the sizes that are in all of these ranges."""
    return max(low for low, _ in ends), min((high for _, high in ends if high is not None), default=None)


def near(given: Tensor, wanted: Tensor) -> bool:
    """Returns whether a result is near to the module's, as a share of the largest value."""
    if (given.shape, given.dtype) != (wanted.shape, wanted.dtype):
        return False
    if not given.is_floating_point():
        return torch.equal(given, wanted)
    given, wanted = given.double(), wanted.double()
    largest = wanted.nan_to_num(0, 0, 0).abs().max().item() if wanted.numel() else 0
    return torch.allclose(given, wanted, rtol=0, atol=_NEAR * largest, equal_nan=True)


def tidied(program: ExportedProgram) -> ExportedProgram:
    """Returns a program without writes and scopes, as a build captures it, and without lines of source code."""

    def writes(node: torch.fx.Node) -> bool:
        scopes = ("wrap_with_autocast", "wrap_with_set_grad_enabled")
        return of_torch.writes(node.target) or str(node.target) in scopes

    bodies = [one for one in program.graph_module.modules() if isinstance(one, torch.fx.GraphModule)]
    if any(writes(node) for node in program.graph.nodes):
        for body in bodies:
            # The dtypes that these assert are those of a trace without the casts of a scope.
            for node in body.graph.find_nodes(
                op="call_function", target=torch.ops.aten._assert_tensor_metadata.default
            ):
                body.graph.erase_node(node)
            body.recompile()
            if body is not program.graph_module:
                # An interpreter passes on the submodule that an operation is in.
                body.forward = torch.fx.Interpreter(body).run
        with quiet():
            program = program.run_decompositions({})
    for body in program.graph_module.modules():
        for node in body.graph.nodes if isinstance(body, torch.fx.GraphModule) else ():
            # A build hashes the file of the program: a moved line must not change it.
            for key in ("stack_trace", "from_node"):
                node.meta.pop(key, None)
    program.example_inputs = None
    return program


def failure(source: Source, error: Exception, sizes: Sizes | None = None) -> BuildError:
    """Returns the error of a capture, with the line of the module's code and a hint.

    It is raised `from None`: torch's own frames, hundreds of lines, are in its `__context__`.
    """
    if isinstance(error, BuildError):
        return error
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = f"{named(source)} can't be captured{_at(sizes or {})}: {': '.join([type(error).__name__, *lines[:1]])}"
    place = _place(error)
    by_values = "data-dependent" in str(error) or "DataDependent" in type(error).__name__
    hint = _SIZE if type(error).__name__ == "DynamicOutputShapeException" else _BRANCH if by_values else ""
    return BuildError(f"{place}: {message}" if place else message, hint=hint)


def named(source: Source) -> str:
    """Returns the name of a function, for people."""
    return f"`{type(source.net).__name__}.{source.method}`"


def _place(error: BaseException) -> str | None:
    """Returns the innermost `file:line` of the module's code in the traceback of an exception or of its causes."""
    one: BaseException | None = error
    while one is not None:
        frames = [frame for frame in traceback.extract_tb(one.__traceback__) if not frame.filename.startswith(_NOT_IT)]
        if frames:
            return f"{frames[-1].filename}:{frames[-1].lineno}"
        one = one.__cause__ or one.__context__
    # An interpreter of a traced graph adds the lines that an operation is from.
    return _line(str(error))


def _line(trace: str) -> str | None:
    """Returns the innermost `file:line` of the module's code in the text of a traceback."""
    frames = [frame for frame in re.findall(r'File "(.+?)", line (\d+)', trace) if not frame[0].startswith(_NOT_IT)]
    return ":".join(frames[-1]) if frames else None


def _at(sizes: Sizes) -> str:
    return " at " + " ".join(f"{dim}={size}" for dim, size in sizes.items()) if sizes else ""
