"""A release of pairs that `precast build` made of a spec, in the place of one that a module in hand would have.

The spec's build has no contract for the module in hand. So the first process traces one call of the module, without a
capture or a build, and keeps the contract in the store; a later one finds it there.

```text
cache/contracts/3f9c….json      the contract of one release and one form of calls
```

The file is a cache: it is read only if no other user can have written it, and may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..capture import captured, pairs
from ..compare import batches
from ..compare.rounding import readable, write
from ..torch_private import modules as of_torch
from . import contract
from .artifacts import Release
from .autograd import PairEngine
from .contract import Contract
from .regions import resized
from .traced import Traced

if TYPE_CHECKING:
    from .subject import Arguments, Subject


def of(region: Subject, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Release:
    """Returns the named release of a region, with the contract of this call."""
    named = region.config.release
    assert named is not None
    model, _, name = named.partition("@")
    shapes = [(key, str(one.dtype), one.dim()) for key, one in batches.flat(args, kwargs, region.names)[0].items()]
    key = contract.key([named, shapes, region.captured])
    path = Path(region.config.store) / "cache" / "contracts" / f"{key}.json"
    found = None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = Contract.read(readable(path))
    if found is None or found.record.differs(found.record.live(region.roots(args, kwargs))) is not None:
        source = Traced(region.net, region.own, args, kwargs, region.names)
        assert source.names is not None
        found = Contract.of(source)
        with contextlib.suppress(OSError):
            write(path, json.dumps(found.document()))
    return Release(model, name, found, False, region.name, 0.0)


class ReleasedPairs(PairEngine):
    """Answers by the pairs of a spec's release."""

    def _open(self) -> None:
        self.notes["release"] = self._region.config.release
        own = self._weights()
        named = pairs.found(self._model)
        self._take([(self._model[one], self._model[other]) for one, other in named], own)
        # The spec returns each tensor of the answer.
        count = iter(range(len(self.contract.results)))
        self.contract.results = [one if one[0] == "value" else ["output", next(count)] for one in self.contract.results]
        self.contract.inputs = list(self._inputs)

    def _weights(self) -> dict[str, Tensor]:
        # A build of a spec has the tensors without a place in the state dict as weights, too.
        return {name: tensor.detach() for name, tensor, _ in captured.tensors_of(self._region.module)}

    def tables(self) -> dict[str, tuple[dict[str, Any], str]]:
        """Returns the table of the module that has each tensor, and its name there."""
        found: dict[str, tuple[dict[str, Any], str]] = {}
        for path, module in self._region.module.named_modules(remove_duplicate=False):
            tables: tuple[dict[str, Any], ...] = (vars(module), of_torch.buffers(module), of_torch.parameters(module))
            for table in tables:
                found |= {f"{path}.{key}" if path else key: (table, key) for key in table}
        return found

    def _sizes(self, tensors: Any) -> list[tuple[tuple[int, ...], ...]]:
        shapes = [pair.forward.shapes for pair in self._pairs]
        return [tuple(tuple(one[name]) for name in self._inputs) for one in shapes]

    def at_bucket(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Returns the arguments at the sizes of the last bucket, if no bucket has theirs."""
        tensors, _ = batches.flat(args, kwargs, self._names)
        if tensors.keys() != set(self._inputs) or (
            tuple(tuple(tensors[name].shape) for name in self._inputs) in self._exact
        ):
            return args, kwargs
        last = dict(zip(self._inputs, list(self._exact)[-1], strict=True))
        if any(len(shape) != tensors[name].dim() for name, shape in last.items()):
            return args, kwargs
        dims = {name: [f"{name}.{axis}" for axis in range(len(shape))] for name, shape in last.items()}
        sizes = {dim: size for name, shape in last.items() for dim, size in zip(dims[name], shape, strict=True)}
        return resized((args, kwargs), dims, self._names, sizes)
