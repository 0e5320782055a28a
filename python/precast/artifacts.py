"""The engine of the backend `"precast"`: a release from the store, bound to the module's own tensors."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import batches, exported, parts, sharding
from .capture import held_under
from .engine import CompileFailed, Refused
from .errors import BadInput, BuildError, Busy, Error, LoadError, NoFit, NotFound
from .guard import constants
from .loading import load
from .spec import Compile, Gate

if TYPE_CHECKING:
    from ._native import Model
    from .config import CompileConfig
    from .parts import Part
    from .region import Region

_MISSING = object()


class ArtifactEngine:
    """Answers from the release with the digest of the module and the settings; builds it if the store lacks it."""

    guarded = True
    _LENDS = False
    """Whether the release's CUDA graphs give their outputs without a copy."""

    def __init__(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        config, self._net = region.config, region.bare()
        self._region, self._names = region, region.names
        self._pads = bool(config.pad)
        tensors, others = batches.flat(args, kwargs, self._names)
        self._defaults = _defaults(self._net)
        self._others = self._given(others)
        shared = region.shared
        # The names of tensors in the release are those of this module.
        self._held = held_under(self._net, shared.part if shared is not None else "")
        self._prepare(args, kwargs)
        self._model = self._obtained(args, kwargs, tensors)
        self._tied = _tied(self._weights())
        self._fixed = {name: tensor.detach().clone() for name, tensor in constants(self._net)}
        self._places: dict[tuple[Any, ...], list[int]] = {}
        self._template: Any = _MISSING
        self._open()
        self._exact = {shapes: number for number, shapes in enumerate(self._sizes(tensors))}

    def _obtained(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: dict[str, Tensor]) -> Model:
        """Returns the named release, the one that equal regions share, or the one with the digest of the module.

        The last is built if there is none.
        """
        config, shared = self._region.config, self._region.shared
        if config.release is not None:
            self.notes: dict[str, Any] = {"release": config.release, "built": False}
            return self._loaded(config.store, config.release, tensors)
        if shared is not None:
            self.notes = {"name": shared.name, "release": shared.digest, "built": shared.built, "shares": shared.owner}
            return self._loaded(config.store, f"{shared.name}@{shared.digest}", tensors)
        settings = self._settings(self._region, args, kwargs)
        digest = exported.digest(self._net, (args, kwargs), **settings, **self._distinguished(self._region))
        name = self._release_name(config.name or type(self._net).__name__)
        self.notes = {"name": name, "release": digest, "built": False}
        model = self._found(config.store, f"{name}@{digest}", tensors)
        if model is None:
            self._build(args, kwargs, config, name=name, release=digest, **settings)
            self.notes["built"] = True
            model = self._loaded(config.store, f"{name}@{digest}", tensors)
        return model

    def _release_name(self, name: str) -> str:
        return f"{name}.{self._region.name}" if self._region.name else name

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Takes the inputs of the sample, before the digest."""

    @staticmethod
    def _settings(region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the settings of a build."""
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
        }
        if config.rtol is not None or config.atol is not None:
            settings["gate"] = Gate(rtol=config.rtol, atol=config.atol)
        return settings

    @staticmethod
    def _distinguished(region: Any) -> dict[str, Any]:
        """Returns further values that the digest covers."""
        return {}

    @classmethod
    def request(cls, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns all values that the digest of a region covers beside its module and its inputs."""
        return {**cls._settings(region, args, kwargs), **cls._distinguished(region)}

    @classmethod
    def part(cls, region: Region, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Part:
        """Captures a region as the part of a build."""
        return parts.of_call(name, region.bare(), (args, kwargs), **cls._settings(region, args, kwargs))

    def _open(self) -> None:
        """Takes the programs of the loaded release."""
        shared = self._region.shared
        self._run = self._model["forward" if shared is None else parts.called(shared.part)]
        self._inputs = tuple(self._run.inputs)

    def answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the answer, in the structure of the module's own."""
        given = self._in_order(args, kwargs)
        if not self._pads and tuple(tuple(tensor.shape) for tensor in given) not in self._exact:
            raise Refused("shape", f"no bucket has exactly {[list(each.shape) for each in given]}, and `pad` is false")
        with refusals():
            answer = self._run(*(tensor.detach() if tensor.requires_grad else tensor for tensor in given))
        return self._nested(answer)

    def learn(self, answer: Any) -> None:
        """Takes an answer of the module; all answers have its structure."""
        if self._template is _MISSING:
            self._template = batches.mapped(answer, lambda _, tensor: tensor.new_empty(0))

    def _in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Returns the tensors of a call in the order of the release. Raises `Refused` for other inputs."""
        values, form = (*args, *kwargs.values()), (len(args), *kwargs)
        plain = all(type(value) is Tensor for value in values)
        places = self._places.get(form) if plain else None
        if places is not None:
            given = [values[place] for place in places]
        else:
            tensors, others = batches.flat(args, kwargs, self._names)
            if tensors.keys() != set(self._inputs) or self._given(others) != self._others:
                raise Refused("inputs", self._other_inputs(tensors, others))
            given = [tensors[name] for name in self._inputs]
            if plain:
                names = list(tensors)
                self._places[form] = [names.index(name) for name in self._inputs]
            for name, tensor in zip(self._inputs, given, strict=True):
                if type(tensor) not in (Tensor, nn.Parameter):
                    raise Refused("inputs", f"input `{name}` is a `{type(tensor).__name__}`")
        return given

    def bind(self) -> None:
        """Binds the tensors that the module has now."""
        for name, tensor in constants(self._net):
            if not torch.equal(tensor, self._fixed.get(name, tensor.new_empty(0))):
                raise Refused("parameters", f"`{name}` has other values than in the build, and is no parameter")
        weights = self._weights()
        if (detail := sharding.unbindable(weights)) is not None:
            raise Refused("parameters", detail)
        now = _tied(weights)
        for name, first in self._tied.items():
            if now.get(name) != now.get(first):
                raise Refused("parameters", f"`{name}` and `{first}` were one tensor in the build, and are two now")
        try:
            self._model.swap(weights)
        except Error as error:
            raise Refused("parameters", error.args[0]) from None

    def close(self) -> None:
        """Frees the artifacts after their last call."""
        self._model.close()

    def _build(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], config: CompileConfig, *, name: str, **settings: Any
    ) -> None:
        """Builds the release. Its programs are all there, or `CompileFailed` names the causes."""
        with causes():
            exported.build(self._net, (args, kwargs), name=name, **build_settings(config), **settings)

    def _found(self, store: str | Path, release: str, tensors: dict[str, Tensor]) -> Model | None:
        """Returns the release, or `None` if the store lacks it, or has none for this host."""
        try:
            return self._loaded(store, release, tensors)
        except (NotFound, LoadError):
            return None

    def _loaded(self, store: str | Path, release: str, tensors: dict[str, Tensor]) -> Model:
        device = str(device_of_load(self._net, tensors))
        return load(store, release, device=device, weights=self._weights(), _lend=self._LENDS)

    def _weights(self) -> dict[str, Tensor]:
        return exported.parameters(self._held)

    def _given(self, others: dict[str, Any]) -> dict[str, tuple[type, Any]]:
        """Returns the other values of a call, with their types. Values equal to a parameter's default are left out."""
        return {
            name: (type(value), value)
            for name, value in others.items()
            if not (type(self._defaults.get(name, _MISSING)) is type(value) and self._defaults[name] == value)
        }

    def _nested(self, answer: Any) -> Any:
        if isinstance(self._template, Tensor) and isinstance(answer, Tensor):
            return answer
        found = iter(batches.tensors(answer))
        return batches.mapped(self._template, lambda *_: next(found))

    def _sizes(self, tensors: dict[str, Tensor]) -> list[tuple[tuple[int, ...], ...]]:
        """Returns the shapes of the inputs in each bucket."""
        return [self._shapes(self._region, tensors, point) for point in self._region.points or [{}]]

    def _shapes(self, region: Region, tensors: dict[str, Tensor], point: dict[str, int]) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of the inputs in a bucket."""
        return tuple(
            tuple(
                point.get(dim, size) if isinstance(dim, str) else size
                for dim, size in zip(region.shapes.get(name, tensor.shape), tensor.shape, strict=True)
            )
            for name, tensor in ((name, tensors[name]) for name in self._inputs)
        )

    def _other_inputs(self, tensors: dict[str, Tensor], others: dict[str, Any]) -> str:
        if odd := sorted(tensors.keys() ^ set(self._inputs)):
            return f"input `{odd[0]}` is {'new' if odd[0] in tensors else 'missing'}"
        given = self._given(others)
        odd = sorted(key for key in given.keys() | self._others.keys() if given.get(key) != self._others.get(key))
        was = self._others.get(odd[0], (None, "left out"))[1]
        return f"`{odd[0]}` is {given.get(odd[0], (None, 'left out'))[1]!r}, and was {was!r} in the sample batch"


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


def build_settings(config: CompileConfig) -> dict[str, Any]:
    """Returns the settings of each build."""
    compile_ = Compile(fail_policy="raise", smoketest_steps=max(config.smoketest_steps, 1))
    return {"compile": compile_, "store": config.store, "progress": False}


def _tied(weights: dict[str, Tensor]) -> dict[str, str]:
    """Returns for each name the first name with the same memory."""
    first: dict[Any, str] = {}
    return {
        name: first.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), name)
        for name, tensor in weights.items()
        if tensor.numel()
    }


def _defaults(net: nn.Module) -> dict[str, Any]:
    try:
        parameters = inspect.signature(net.forward).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def device_of_load(net: nn.Module, tensors: dict[str, Tensor]) -> torch.device:
    """Returns the device of a module and its inputs."""
    first = next(iter([*net.parameters(), *net.buffers(), *tensors.values()]))
    return first.device
