"""Captures a module of the caller's process, and writes it as a folder from which a build can compile it.

The class of the module may be in a notebook, in `__main__` or made by a function: no other process can import it. So
torch.export captures it here. Where it can, one program has every size of a bucketed dimension from 2 on, and further
programs have size 1, because a tensor with one element in an axis broadcasts. Where the code fixes a size, each bucket
is a program of its own. Every program is compared with the module before it is written: a build only sees programs.

The module is captured in eval mode. Afterwards its modes, buffers and gradients are as before.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import inspect
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim

from .errors import BadInput, BuildError
from .replay import BUFFERS, CAPTURED, INNER, WEIGHTS, Program, Range, quiet

# torch.export captures dynamic dimensions from this size on.
_MIN = 2
# The largest difference between a program and its module, as a share of the largest value.
_NEAR = 1e-3
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

Sizes = dict[str, int]


@dataclasses.dataclass
class Call:
    """The arguments of a call: tensors by name, and how they nest among constants."""

    names: list[str]
    tensors: list[torch.Tensor]
    args: list[Any]
    kwargs: dict[str, Any]

    def arguments(self, tensors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Returns positional and keyword arguments with other tensors."""
        args = [_unflatten(item, tensors) for item in self.args]
        return args, {key: _unflatten(item, tensors) for key, item in self.kwargs.items()}


@dataclasses.dataclass
class Captured:
    """A captured module: its programs, and what a build has to know of it."""

    net: torch.nn.Module
    call: Call
    # The dimension of each axis of each input, None for a fixed size.
    dims: list[list[str | None]]
    programs: list[Program]
    # The result's nesting, as `nest` returns it.
    outputs: Any
    device: str


def unwrapped(net: torch.nn.Module) -> torch.nn.Module:
    """Returns the module itself for one that torch.compile returned."""
    return getattr(net, "_orig_mod", net)


def call_of(net: torch.nn.Module, example_inputs: Any) -> Call:
    """Returns the call with these example inputs: a tensor, a tuple of arguments, a dict of keyword arguments, or a
    tuple and a dict.

    A tensor has the name of its parameter; within a list, a tuple or a dict also its place, as `past.0`. Numbers, text,
    booleans and None are constants of the captured program.
    """
    args, kwargs = _arguments(example_inputs)
    try:
        bound = inspect.signature(net.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise BadInput(f"`{_name_of(net)}.forward` can't be called with the example inputs: {error}") from error
    parameters = inspect.signature(net.forward).parameters.values()
    positions = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    del bound
    call = Call([], [], [], {})
    for place, value in enumerate(args):
        name = positions[place] if place < len(positions) else f"args.{place}"
        call.args.append(_flatten(value, name, call))
    for name, value in kwargs.items():
        call.kwargs[name] = _flatten(value, name, call)
    if not call.tensors:
        raise BadInput("the example inputs have no tensor")
    return call


def _arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(sample, Mapping):
        return (), dict(sample)
    if isinstance(sample, tuple) and len(sample) == 2 and isinstance(sample[0], tuple) and isinstance(sample[1], dict):
        return sample
    return (tuple(sample), {}) if isinstance(sample, tuple | list) else ((sample,), {})


def _flatten(value: Any, name: str, call: Call) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dtype not in _DTYPES or value.layout != torch.strided:
            raise BadInput(f"input `{name}` is {value.dtype} {value.layout}, which no artifact takes")
        call.names.append(name)
        call.tensors.append(value.detach())
        return {"tensor": len(call.tensors) - 1}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if type(value) in (list, tuple):
        items = [_flatten(item, f"{name}.{place}", call) for place, item in enumerate(value)]
        return {type(value).__name__: items}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: _flatten(item, f"{name}.{key}", call) for key, item in value.items()}}
    raise BadInput(
        f"input `{name}` is a {type(value).__name__}, which can't be taken apart into tensors",
        hint="inputs are tensors, numbers, text and None, in lists, tuples and dicts",
    )


def _unflatten(nesting: Any, tensors: Sequence[Any]) -> Any:
    (kind, held), *_ = nesting.items()
    if kind == "tensor":
        return tensors[held]
    if kind == "value":
        return held
    if kind == "dict":
        return {key: _unflatten(item, tensors) for key, item in held.items()}
    items = [_unflatten(item, tensors) for item in held]
    return items if kind == "list" else tuple(items)


def nest(result: Any, tensors: list[Any], name: str = "") -> Any:
    """Returns the nesting of a result as JSON, and appends its tensors in order.

    A named tuple, a dataclass and a class derived from dict keep their name and their fields.
    """

    def items(pairs: Any) -> dict[str, Any]:
        return {str(key): nest(item, tensors, f"{name}.{key}" if name else str(key)) for key, item in pairs}

    if isinstance(result, torch.Tensor):
        tensors.append(result)
        return {"tensor": len(tensors) - 1}
    if result is None or isinstance(result, bool | int | float | str):
        return {"value": result}
    kind = type(result).__name__
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return {"namedtuple": kind, "fields": items(zip(result._fields, result, strict=True))}
    if isinstance(result, list | tuple):
        return {
            "list" if isinstance(result, list) else "tuple": [*items(enumerate(result)).values()],
        }
    if isinstance(result, Mapping):
        plain = type(result) in (dict, collections.OrderedDict) or not all(str(key).isidentifier() for key in result)
        return {"dict": items(result.items())} if plain else {"class": kind, "fields": items(result.items())}
    if dataclasses.is_dataclass(result):
        fields = [field.name for field in dataclasses.fields(result)]
        return {"class": kind, "fields": items((field, getattr(result, field)) for field in fields)}
    where = f"`{name}` of its result" if name else "its result"
    hint = "return tensors, in lists, tuples, dicts and dataclasses; a transformers model with `config.use_cache = False`"
    if isinstance(result, torch.SymInt | torch.SymFloat | torch.SymBool):
        kind, hint = "size of an input", "return tensors; the caller knows the sizes of its inputs"
    raise BuildError(f"{where} is a {kind}, which no artifact returns", hint=hint)


class _Flat(torch.nn.Module):
    """Calls a module with tensors in order, and returns the tensors of its result in order."""

    def __init__(self, net: torch.nn.Module, call: Call) -> None:
        super().__init__()
        self.m = net
        self.call = call
        self.outputs: Any = None

    def forward(self, *tensors: Any) -> tuple[Any, ...]:
        args, kwargs = self.call.arguments(tensors)
        found: list[Any] = []
        self.outputs = nest(self.m(*args, **kwargs), found)
        return tuple(found)


@contextlib.contextmanager
def undisturbed(net: torch.nn.Module) -> Iterator[None]:
    """Puts a module into eval mode; restores the modes and buffers of it and its submodules at the end."""
    modes = [(module, module.training) for module in net.modules()]
    buffers = [(module, name, buffer) for module in net.modules() for name, buffer in module.named_buffers(recurse=False)]
    values = [None if buffer is None else buffer.detach().clone() for _, _, buffer in buffers]
    versions = [None if buffer is None or buffer.is_inference() else buffer._version for _, _, buffer in buffers]
    for module, _ in modes:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for (module, name, buffer), value, version in zip(buffers, values, versions, strict=True):
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)
            if value is not None and (version is None or buffer._version != version):
                with torch.no_grad():
                    buffer.copy_(value)


def capture(net: torch.nn.Module, call: Call, dims: list[list[str | None]], points: list[Sizes]) -> Captured:
    """Captures a module at these sizes of its bucketed dimensions, and where it can at all others.

    Raises `BuildError` with the module's line if it can't be captured at one of them.
    """
    if isinstance(net, torch.jit.ScriptModule):
        raise BuildError("a TorchScript module can't be captured", hint="give the torch.nn.Module that it was made from")
    device = device_of(net, call)
    with undisturbed(net):
        capturing = _Capturing(net, call, dims, points)
        programs = capturing.programs()
    return Captured(net, call, dims, programs, capturing.flat.outputs, device)


def device_of(net: torch.nn.Module, call: Call) -> str:
    """Returns the device that a module and its inputs are on, `cpu` or `cuda`; refuses several devices."""
    found = {tensor.device for _, tensor in [*net.named_parameters(), *net.named_buffers()]}
    inputs = {tensor.device for tensor in call.tensors}
    kinds = {device.type for device in found | inputs}
    if "meta" in kinds:
        raise BuildError("the module has tensors without data: they are on the meta device", hint="load its weights first")
    if len(found | inputs) > 1 or not kinds <= {"cpu", "cuda"}:
        names = ", ".join(sorted(map(str, found | inputs)))
        raise BadInput(f"the module and its example inputs are on {names}", hint="move both to one device")
    return kinds.pop()


class _Capturing:
    """The captures of one module."""

    def __init__(
        self, net: torch.nn.Module, call: Call, dims: list[list[str | None]], points: list[Sizes]
    ) -> None:
        self.net, self.call, self.dims, self.points = net, call, dims, points
        self.flat = _Flat(net, call)
        # The sizes of dynamic captures: the largest of each dimension.
        self.largest = {dim: max(point[dim] for point in points) for dim in points[0]} if points else {}

    def programs(self) -> list[Program]:
        """Returns programs for all points: dynamic ones where they agree with the module, else one for each point."""
        found = [one for one in self._dynamic() if all(self._agrees(one, sizes) for sizes in self._within(one))]
        for sizes in self.points or [{}]:
            if any(one.takes(sizes) for one in found):
                continue
            one = Program(self._export(sizes), {dim: (size, size) for dim, size in sizes.items()})
            if not self._agrees(one, sizes):
                raise BuildError(
                    f"`{_name_of(self.net)}` gives other answers than its captured graph{_at(sizes)}",
                    hint="keep what changes between calls in a registered buffer, and make random values an input",
                )
            found.append(one)
        return found

    def _dynamic(self) -> Iterator[Program]:
        """Yields a program for all sizes, and one for each set of dimensions at size 1."""
        whole = self._with_any_size({})
        if whole is None:
            return
        yield whole
        free = [dim for dim, (low, high) in whole.sizes.items() if low != high]
        for count in range(1, len(free) + 1):
            for ones in itertools.combinations(free, count):
                one = self._with_any_size(dict.fromkeys(ones, 1))
                if one is not None:
                    yield one

    def _with_any_size(self, fixed: Sizes) -> Program | None:
        """Returns a program with these sizes and any sizes of the other dimensions; None if the code fixes all."""
        free = [dim for dim, size in self.largest.items() if size >= _MIN and dim not in fixed]
        if not free and not fixed:
            return None
        sizes = _distinct({**self.largest, **fixed}, free)
        try:
            exported = self._export(sizes, free)
        except BuildError:
            return None
        ranges: Range = {dim: (size, size) for dim, size in sizes.items()}
        bounds = {str(symbol): bound for symbol, bound in exported.range_constraints.items()}
        placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
        for node, dims in zip(placeholders[-len(self.dims) :], self.dims, strict=True):
            for size, dim in zip(node.meta["val"].shape, dims, strict=True):
                if dim not in free:
                    continue
                low, high = sizes[dim], sizes[dim]
                if isinstance(size, torch.SymInt) and str(size) in bounds:
                    bound = bounds[str(size)]
                    low = max(_MIN, int(bound.lower))
                    high = None if "oo" in str(bound.upper) else int(bound.upper)
                before = ranges[dim] if ranges[dim] != (sizes[dim], sizes[dim]) else (0, None)
                least = min((end for end in (before[1], high) if end is not None), default=None)
                ranges[dim] = (max(before[0], low), least)
        return Program(exported, ranges)

    def _within(self, program: Program) -> list[Sizes]:
        """Returns sizes at which a program is compared with the module: buckets, and its smallest sizes."""
        smallest = {dim: low for dim, (low, _) in program.sizes.items()}
        found = [sizes for sizes in self.points if program.takes(sizes)]
        found += [{**self.largest, **_ones(program), dim: low} for dim, low in smallest.items()]
        found.append(smallest)
        unique = {tuple(sorted(sizes.items())): sizes for sizes in found if program.takes(sizes)}
        return list(unique.values())

    def _export(self, sizes: Sizes, free: Sequence[str] = ()) -> torch.export.ExportedProgram:
        """Returns the program at these sizes, with some dimensions free; raises `BuildError`."""
        inputs = self._inputs(sizes)
        shapes = None
        if free:
            axes = [{axis: Dim.AUTO for axis, dim in enumerate(dims) if dim in free} for dims in self.dims]
            shapes = {"tensors": tuple(axes)}
        first: Exception | None = None
        # Not strictly first, as a build captures.
        for strict in (False, True) if not free else (False,):
            try:
                with quiet():
                    return _functional(torch.export.export(self.flat, inputs, dynamic_shapes=shapes, strict=strict))
            except BuildError:
                raise
            except Exception as error:
                first = first or error
        assert first is not None
        raise _not_captured(self.net, first, sizes) from first

    def _inputs(self, sizes: Sizes) -> tuple[Any, ...]:
        return tuple(
            resized(tensor, {axis: sizes[dim] for axis, dim in enumerate(dims) if dim is not None})
            for tensor, dims in zip(self.call.tensors, self.dims, strict=True)
        )

    def _agrees(self, program: Program, sizes: Sizes) -> bool:
        """Returns whether a program and the module give the same answers, both without one included."""
        inputs = self._inputs(sizes)
        state = {name: tensor.clone() for name, tensor in self.net.named_buffers(remove_duplicate=False)}
        held = dict(self.net.named_parameters(remove_duplicate=False)) | state
        random = {"devices": [inputs[0].device] if inputs[0].is_cuda else []}
        try:
            with torch.random.fork_rng(**random), undisturbed(self.net):
                torch.manual_seed(0)
                wanted = self.flat(*[tensor.clone() for tensor in inputs])
        except BuildError:
            raise
        except Exception as error:
            if sizes in self.points or not self.points:
                raise _not_captured(self.net, error, sizes) from error
            return False
        attributes = _Attributes(self.net, held)
        try:
            with torch.random.fork_rng(**random):
                torch.manual_seed(0)
                given = program.run(attributes, [tensor.clone() for tensor in inputs])
        except Exception:
            return False
        return _same(given, list(wanted))


class _Attributes:
    """Tensors of a module by name: given ones, else its own."""

    def __init__(self, net: torch.nn.Module, held: dict[str, torch.Tensor]) -> None:
        self.net, self.held = net, held

    def __call__(self, name: str) -> torch.Tensor:
        return self.held[name]


def _ones(program: Program) -> Sizes:
    return {dim: low for dim, (low, high) in program.sizes.items() if low == high}


def _distinct(sizes: Sizes, free: Sequence[str]) -> Sizes:
    """Returns sizes with another one for each free dimension: equal sizes hide that the code needs them equal."""
    found = dict(sizes)
    taken = {size for dim, size in sizes.items() if dim not in free}
    for dim in sorted(free, key=lambda dim: sizes[dim]):
        nearby = (size for step in range(len(sizes) + 1) for size in (sizes[dim] - step, sizes[dim] + step))
        found[dim] = next((size for size in nearby if size >= _MIN and size not in taken), sizes[dim])
        taken.add(found[dim])
    return found


def resized(tensor: torch.Tensor, sizes: dict[int, int]) -> torch.Tensor:
    """Returns a tensor with other sizes of some axes: its values repeated, or the first of them."""
    for axis, size in sizes.items():
        if tensor.shape[axis] != size:
            places = torch.arange(size, device=tensor.device) % max(tensor.shape[axis], 1)
            tensor = tensor.index_select(axis, places)
    return tensor.contiguous()


def _same(given: list[Any], wanted: list[Any]) -> bool:
    if [one.shape for one in given] != [one.shape for one in wanted]:
        return False
    for one, other in zip(given, wanted, strict=True):
        if one.dtype != other.dtype:
            return False
        if not one.is_floating_point():
            if not torch.equal(one, other):
                return False
            continue
        one, other = one.float(), other.float()
        largest = other.nan_to_num(0, 0, 0).abs().max().item() if other.numel() else 0
        if not torch.allclose(one, other, rtol=0, atol=_NEAR * largest, equal_nan=True):
            return False
    return True


def _functional(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns a program without writes and scopes, as a build would make it, and without lines of source code."""
    scopes = ("wrap_with_autocast", "wrap_with_set_grad_enabled")

    def writes(node: torch.fx.Node) -> bool:
        schema = getattr(node.target, "_schema", None)
        return bool(schema is not None and schema.is_mutable) or getattr(node.target, "__name__", "") in scopes

    if any(writes(node) for node in program.graph.nodes):
        for module in program.graph_module.modules():
            if module is not program.graph_module and isinstance(module, torch.fx.GraphModule):
                # The body of a scope: an interpreter passes on the submodule that an operation is in.
                module.forward = torch.fx.Interpreter(module).run
        program = program.run_decompositions({})
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            # The file of the program is in the build's keys: a moved line must not change it.
            for key in ("stack_trace", "from_node"):
                node.meta.pop(key, None)
    program.example_inputs = None
    return program


def _not_captured(net: torch.nn.Module, error: Exception, sizes: Sizes) -> BuildError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = f"`{_name_of(net)}` can't be captured{_at(sizes)}: {type(error).__name__}: {lines[0] if lines else ''}"
    place = _place(error)
    hint = ""
    if "data-dependent" in str(error) or "GuardOnDataDependent" in type(error).__name__:
        hint = "a branch or a loop depends on values of a tensor: use `torch.where` or `torch.cond`"
    return BuildError(f"{place}: {message}" if place else message, hint=hint)


def _place(error: BaseException) -> str | None:
    """Returns the innermost `file:line` outside of torch in the traceback of an exception or of its causes."""
    import traceback

    inner = str(Path(torch.__file__).parent)
    own = str(Path(__file__).parent)
    one: BaseException | None = error
    while one is not None:
        frames = [frame for frame in traceback.extract_tb(one.__traceback__) if frame.filename[:1] not in ("<", "")]
        frames = [frame for frame in frames if not frame.filename.startswith((inner, own))]
        if frames and any(frame.name == "forward" for frame in frames):
            return f"{frames[-1].filename}:{frames[-1].lineno}"
        one = one.__cause__ or one.__context__
    return None


def _at(sizes: Sizes) -> str:
    return " at " + " ".join(f"{dim}={size}" for dim, size in sizes.items()) if sizes else ""


def _name_of(net: torch.nn.Module) -> str:
    return type(net).__name__


def tensors_of(net: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Yields name, tensor and kind (`parameter`, `buffer`, `constant`) of parameters and buffers; tied ones again.

    A constant is a buffer that is not persistent: no state dict has it, so a build keeps its values in the programs.
    """
    for name, parameter in net.named_parameters(remove_duplicate=False):
        yield name, parameter, "parameter"
    saved = set(net.state_dict(keep_vars=True))
    for name, buffer in net.named_buffers(remove_duplicate=False):
        yield name, buffer, "buffer" if name in saved else "constant"


def save(captured: Captured, folder: Path, imports: Sequence[str] = ()) -> None:
    """Writes a captured module into a folder, for `replay.load`."""
    folder.mkdir(parents=True, exist_ok=True)
    own: dict[str, torch.Tensor] = {}
    described: dict[str, Any] = {}
    first: dict[int, str] = {}
    for name, tensor, kind in tensors_of(captured.net):
        if tensor.dtype not in _DTYPES:
            raise BuildError(f"`{name}` is {tensor.dtype}, which no weight set can hold")
        described[name] = {"kind": kind, "dtype": _dtype(tensor), "shape": list(tensor.shape)}
        if id(tensor) in first:
            described[name]["same"] = first[id(tensor)]
            continue
        first[id(tensor)] = name
        own[name] = tensor
    persistent = {name: tensor for name, tensor in own.items() if described[name]["kind"] != "constant"}
    write_safetensors(folder / WEIGHTS, persistent)
    torch.save({name: tensor.detach().cpu() for name, tensor in own.items() if name not in persistent}, folder / BUFFERS)
    programs = []
    for number, program in enumerate(captured.programs):
        file = f"program{number}.pt2"
        with quiet():
            torch.export.save(_without_weights(program.exported), folder / file)
        programs.append({"file": file, "sizes": program.sizes})
    inputs = zip(captured.call.names, captured.call.tensors, captured.dims, strict=True)
    document = {
        "schema": 1,
        "imports": list(imports),
        "modules": [name for name, _ in captured.net.named_modules(remove_duplicate=False) if name],
        "inputs": [
            {
                "name": name,
                "dtype": _dtype(tensor),
                "shape": [size if dim is None else dim for size, dim in zip(tensor.shape, dims, strict=True)],
            }
            for name, tensor, dims in inputs
        ],
        "outputs": captured.outputs,
        "tensors": described,
        "programs": programs,
    }
    (folder / CAPTURED).write_text(json.dumps(document, indent=1))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _without_weights(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns a program with tensors without data in the place of the module's parameters and buffers."""

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return torch.nn.Parameter(made, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else made

    targets = {spec.target for spec in program.graph_signature.input_specs if spec.kind.name == "BUFFER"}
    for held in (program.state_dict, program.constants):
        for name, tensor in held.items():
            if held is program.state_dict or name in targets:
                held[name] = empty(tensor)
    return program


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes tensors as a safetensors file, one after the other: the copies of a GPU's tensors are never all there."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        shape, ends = list(tensor.shape), [offset, offset + size]
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": shape, "data_offsets": ends}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            plain = tensor.detach().cpu().contiguous()
            size = plain.numel() * plain.element_size()
            if size:
                file.write((ctypes.c_char * size).from_address(plain.data_ptr()))
