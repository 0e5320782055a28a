"""The engine of the backend `"precast"`: the programs of a release, bound to the module's own tensors.

A call is answered if its arguments are those of the traced call but for the values of tensors: containers of the same
types, the same keys, equal constants. Other arguments are compared with the facts of the release's contract once; the
form that they have is kept.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..capture import captured, exported
from ..capture.programs import Capture, check_build
from ..client.loading import load
from ..compare import batches
from ..errors import BadInput, BuildError, Busy, Error, NoFit
from ..spec import Compile, Gate, Module
from ..torch_private import profiling, sharding
from . import caches, parts
from .contract import Contract
from .engine import CompileFailed, Passed
from .refusal import Refused
from .traced import Traced
from .uses import Uses

if TYPE_CHECKING:
    from .._native import Model
    from ..config import CompileConfig
    from .subject import Subject

FORMS = 64
"""Forms of arguments whose answers are known; more are compared at each call."""


class Release(NamedTuple):
    """A release that holds for a region, and what it was found or built by."""

    model: str
    name: str
    contract: Contract
    built: bool
    """Whether it was built now, for this region."""
    owner: str
    """The region that it was captured for."""
    seconds: float


class Captured(NamedTuple):
    """A region that was captured for a build."""

    part: parts.Part
    contract: Contract
    code: str
    """The text of its graph."""


class ArtifactEngine:
    """Answers from a release, with the module's own tensors."""

    guarded = True
    kind = "inference"
    _LENDS: Literal["pairs", "outputs"] = "outputs"
    """What the release's CUDA graphs give without a copy."""

    def __init__(self, region: Subject, release: Release, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._region, self._release, self.contract = region, release, release.contract
        self._names = region.names
        self.sample = (args, kwargs)
        self._defaults = _defaults(region.module)
        self._forms: dict[Any, list[int] | Refused] = {}
        self._template: Any = None
        self.notes: dict[str, Any] = {"name": release.model, "release": release.name, "built": release.built}
        if region.name:
            self.notes["shares"] = release.owner
        tensors, _ = batches.flat(args, kwargs, self._names)
        self._given, self._alias = set(tensors), _aliases(list(tensors.values()))
        self._prepare(tensors)
        self._model = self._loaded(tensors)
        self._open()
        self._exact = {shapes: number for number, shapes in enumerate(self._sizes(tensors))}
        self._accept(self._form(args, kwargs, []), args, kwargs)

    def _prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes what the load needs."""

    @staticmethod
    def request(region: Subject, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the settings of a build, without those of its spec alone."""
        config = region.config
        tensors, _ = batches.flat(args, kwargs, region.names)
        fills = config.pad if not isinstance(config.pad, bool) else {}
        settings: dict[str, Any] = {
            "shapes": region.shapes or None,
            "buckets": region.points or None,
            "pad": {name: value for name, value in fills.items() if name in tensors} or None,
            "mode": config.mode,
            "dynamic": config.dynamic,
            "options": {"freezing": False, **config.options},
            "rtol": config.rtol,
            "atol": config.atol,
        }
        return settings | ({"tune": True} if config.tune else {})

    @classmethod
    def part(cls, region: Subject, args: tuple[Any, ...], kwargs: dict[str, Any], under: str) -> Captured:
        """Captures a region as the part of a build."""
        settings = cls.request(region, args, kwargs)
        source = Traced(region.net, region.own, args, kwargs, region.names, under)
        given = {name: source.tensors[name] for name in source.names}
        shapes = {name: axes for name, axes in region.shapes.items() if name in given}
        dims, points = exported.sizes_of(source.names, list(given.values()), shapes, region.points or None)
        device = check_build({**source.weights(), **given})
        pad = {name: value for name, value in (settings["pad"] or {}).items() if name in given}
        inputs = exported.inputs_of(source.names, list(given.values()), dims, pad, {})
        programs = Capture(source, list(given.values()), dims, points, settings["dynamic"]).programs()
        source.measure()
        count = sum(kind == "output" for kind, _ in source.results or ())
        nesting = {"tuple": [{"tensor": at} for at in range(count)]}
        at = parts.called(under)
        module = Module(
            at,
            method=at,
            inputs=inputs,
            buckets=exported.buckets_of(region.points or None),
            gate=gate(region.config),
            mode=settings["mode"],
            dynamic=settings["dynamic"],
            options=settings["options"],
        )
        function = captured.Function(given, dims, nesting, programs)
        contract = Contract.of(source)
        part = parts.Part(under, device, source.held(), {at: function}, [module], contract.document())
        return Captured(part, contract, source.code)

    def _open(self) -> None:
        """Takes the programs of the loaded release."""
        self._run = self._model[parts.called(self.contract.under)]
        self._inputs = tuple(self._run.inputs)

    def uses(self) -> Uses:
        """Counts the calls from now on."""
        return Uses(self._model.stats, [parts.called(self.contract.under)])

    def answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the answer, in the structure of the module's own."""
        given = self._in_order(args, kwargs)
        with refusals(), profiling.record(lambda: self._title_of(given)):
            answer = self._run(*(tensor.detach() if tensor.requires_grad else tensor for tensor in given))
        return self._nested(answer, args, kwargs)

    def title(self, module: str, bucket: str) -> str:
        """Returns the name of a call in a profile, as `precast minilm@69e8f50b forward batch=8`."""
        release = self._release.name[:8]
        model = f"{self._release.model}@{release}" if release else self._release.model
        slower = self._region.uses.slower if self._region.uses is not None else {}
        eager = "(eager)" if module in slower or (bucket or "fixed") in slower else ""
        module = module.removeprefix(f"{self.contract.under}_")
        return " ".join(filter(None, ("precast", model, self._region.name, module, bucket, eager)))

    def _title_of(self, given: Sequence[Tensor]) -> str:
        """Returns the title of a call, with the smallest bucket that covers its sizes; empty if nothing answers it."""
        region = self._region
        sizes = {
            dim: size
            for name, tensor in zip(self._inputs, given, strict=True)
            for dim, size in zip(region.shapes.get(name, ()), tensor.shape, strict=False)
            if isinstance(dim, str)
        }
        pads = bool(region.config.pad)
        covering = [
            point
            for point in region.points
            if point == sizes or (pads and all(sizes.get(dim, 0) <= size for dim, size in point.items()))
        ]
        if region.points and not covering and not region.config.dynamic:
            return ""
        bucket = named(min(covering, key=lambda point: prod(point.values()))) if covering else "dynamic"
        return self.title(self._run.name, bucket if region.points else "")

    def learn(self, answer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Takes a call of the module and its answer; all answers have its structure."""
        if self._template is None:
            self._template = (batches.mapped(answer, lambda _, tensor: tensor.new_empty(0)), isinstance(answer, Tensor))

    def _in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Returns the tensors of a call in the order of the release. Raises `Refused` for other arguments."""
        leaves: list[Tensor] = []
        form = self._form(args, kwargs, leaves)
        places = self._forms.get(form)
        if places is None:
            if caches.given(args, kwargs):
                raise Refused(*caches.GIVEN)
            places = self._accept(form, args, kwargs)
        if isinstance(places, Refused):
            raise places
        given = [leaves[place] for place in places]
        for name, tensor in zip(self._inputs, given, strict=True):
            if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
                raise Refused("inputs", f"input `{name}` is a `{type(tensor).__name__}`")
        return given

    def _form(self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Tensor]) -> Any:
        """Returns the form of arguments: containers, keys, constants, and tensors that are one object.

        Appends the tensors in order.
        """
        form: Any
        if all(type(value) is Tensor for value in args) and all(type(value) is Tensor for value in kwargs.values()):
            leaves += args
            leaves += kwargs.values()
            form = (len(args), *kwargs)
        else:
            named = [(key, _form_of(value, leaves)) for key, value in kwargs.items()]
            form = (tuple(_form_of(value, leaves) for value in args), *named)
        return (form, _aliases(leaves)) if len({*map(id, leaves)}) < len(leaves) else form

    def _accept(self, form: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int] | Refused:
        """Returns the places of the inputs among the tensors of this form, or why the programs do not take it."""
        try:
            found: list[int] | Refused = self._places(args, kwargs)
        except Refused as refused:
            found = refused
        if len(self._forms) < FORMS and not _has_objects(form):
            self._forms[form] = found
        return found

    def _places(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        tensors, _ = batches.flat(args, kwargs, self._names)
        if odd := sorted(set(self.contract.inputs) - tensors.keys()):
            raise Refused("inputs", f"input `{odd[0]}` is missing")
        if odd := sorted(tensors.keys() - self._given):
            raise Refused("inputs", f"input `{odd[0]}` is a tensor, and is none in the sample batch")
        if _aliases(list(tensors.values())) != self._alias:
            raise Refused("inputs", "other tensors among the inputs are one object than in the sample batch")
        given = self._as_sampled(args, kwargs)
        roots = {"net": self._region.net, "own": self._region.own, "args": given[0], "kwargs": given[1]}
        record = self.contract.record
        if (difference := record.differs(record.live(roots), of_inputs=True)) is not None:
            raise Refused("inputs", str(difference))
        names = list(tensors)
        return [names.index(name) for name in self._inputs]

    def _as_sampled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the arguments as the sample passes them: by position or by name, defaults left out or given."""
        positional, named = self.sample
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if len(args) > len(self._names):
            return args, kwargs
        for name in self._names[: len(positional)]:
            if name not in given:
                given[name] = self._defaults.get(name)
        ordered = [given.pop(name) for name in self._names[: len(positional)]]
        ordered += positional[len(ordered) :]  # of `*args`
        found: dict[str, Any] = {}
        for name in named:
            found[name] = given.pop(name) if name in given else self._defaults.get(name)
        for name, value in given.items():
            default = self._defaults.get(name, given)
            if not (value is default or (type(value) is type(default) and value == default)):
                found[name] = value
        return tuple(ordered), found

    def bind(self) -> None:
        """Binds the tensors that the module has now."""
        weights = self._weights()
        if (detail := sharding.unbindable(weights)) is not None:
            raise Refused("parameters", detail)
        try:
            self._model.swap(weights)
        except Error as error:
            raise Refused("parameters", error.args[0]) from None

    def check(self) -> None:
        """Waits for the calls, and raises the error of a value that was out of bounds."""
        self._model.check()

    def close(self) -> None:
        """Frees the artifacts after their last call."""
        self._model.close()

    def _loaded(self, tensors: Mapping[str, Tensor]) -> Model:
        weights = self._weights()
        device = str(next(iter([*weights.values(), *tensors.values()])).device)
        release = "@".join(filter(None, (self._release.model, self._release.name)))
        config = self._region.config
        options: dict[str, Any] = {"check": config.check, "_lend": self._LENDS, "_pad": bool(config.pad)}
        return load(config.store, release, device=device, weights=weights, **options)

    def _weights(self) -> dict[str, Tensor]:
        live = self.contract.record.live(self._region.roots(*self.sample))
        return self.contract.weights(live)

    def _nested(self, answer: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        template, single = self._template
        results = self.contract.results
        if single:
            return self._leaf(results[0], answer, args, kwargs)
        leaves = iter([one for one in results if one[0] != "value"])
        return batches.mapped(template, lambda *_: self._leaf(next(leaves), answer, args, kwargs))

    def _leaf(self, result: Any, answer: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        kind, where = result
        if kind == "output":
            return answer[where]
        if kind == "input":
            return batches.flat(args, kwargs, self._names)[0][where]
        record = self.contract.record
        found: Tensor = record.live(self._region.roots(*self.sample)).value(record.weights[where])
        return found

    def _sizes(self, tensors: Mapping[str, Tensor]) -> list[tuple[tuple[int, ...], ...]]:
        """Returns the shapes of the inputs in each bucket."""
        return [self._shapes(self._region, tensors, point) for point in self._region.points or [{}]]

    def _shapes(
        self, region: Subject, tensors: Mapping[str, Tensor], point: dict[str, int]
    ) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of the inputs in a bucket."""
        return tuple(
            tuple(
                point.get(dim, size) if isinstance(dim, str) else size
                for dim, size in zip(region.shapes.get(name, tensor.shape), tensor.shape, strict=True)
            )
            for name, tensor in ((name, tensors[name]) for name in self._inputs)
        )


def named(point: Mapping[str, int]) -> str:
    """Returns the name of a bucket, as `batch=8 seq=128`."""
    return " ".join(f"{dim}={size}" for dim, size in point.items())


class _Object:
    """The form of a value that can change, so that no answer is known for it."""


def _form_of(value: Any, leaves: list[Tensor]) -> Any:
    kind = type(value)
    if isinstance(value, Tensor):
        leaves.append(value)
        return Tensor
    if kind is list or kind is tuple:
        return (kind, *[_form_of(inner, leaves) for inner in value])
    if kind is dict:
        return (kind, *[(key, _form_of(inner, leaves)) for key, inner in value.items()])
    if (fields := batches.object_fields(value)) is not None:
        # It may have attributes and methods beside its fields: no answer is known for it.
        return (_Object, *[_form_of(getattr(value, name), leaves) for name in fields])
    # Numbers of two types are equal, and no constant of each other.
    if kind is float:
        return kind, value.hex()
    return (kind, value) if kind in _CONSTANTS or isinstance(value, (type, enum.Enum)) else _Object


_CONSTANTS = {type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format}


def _has_objects(form: Any) -> bool:
    return form is _Object or (isinstance(form, tuple) and any(map(_has_objects, form)))


def _aliases(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Returns the number of the first tensor that is the same object, for each."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(one), at) for at, one in enumerate(tensors))


@contextmanager
def refusals() -> Iterator[None]:
    """Turns the errors of a program that takes no such call into `Refused`."""
    try:
        yield
    except NoFit as error:
        raise Refused("shape", error.args[0]) from None
    except Busy as error:
        raise Refused("busy", error.args[0]) from None
    except BadInput as error:
        if error.code == "EarlierCall":
            raise Passed from error
        raise Refused("inputs", error.args[0]) from None


@contextmanager
def causes() -> Iterator[None]:
    """Names the programs that failed in the error of a build."""
    try:
        yield
    except BuildError as error:
        if not error.failures:
            raise
        raise CompileFailed("; ".join(error.failures[:3])) from error


def gate(config: CompileConfig) -> Gate | None:
    """Returns the tolerances of a build."""
    if config.rtol is None and config.atol is None:
        return None
    return Gate(rtol=config.rtol, atol=config.atol)


def build_settings(config: CompileConfig) -> dict[str, Any]:
    """Returns the settings of each build."""
    compile_ = Compile(fail_policy="raise", smoketest_steps=max(config.smoketest_steps, 1))
    remote = {"remote": config.remote, "push": config.push}
    return {"compile": compile_, "store": config.store, "progress": False, "tune": config.tune, **remote}


def _defaults(net: nn.Module) -> dict[str, Any]:
    try:
        parameters = inspect.signature(net.forward).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {each.name: each.default for each in parameters if each.default is not each.empty}
