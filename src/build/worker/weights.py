"""The weight set: every parameter and buffer by name, tied ones once.

Besides parameters and buffers (those that a state dict leaves out too), tensors that a module keeps as plain attributes
count: a captured graph may need them, and they have a name.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import tensors
from .failures import one_line
from .wire import Failure

# How many values of each tensor.
_TELLING = 256


@dataclass
class Named:
    """The model's tensors by name, and names that mean the same tensor."""

    tensors: dict[str, Any]
    aliases: dict[str, str]

    def name_of(self, name: str) -> str:
        """Returns the name under which the weight set holds a tensor."""
        return self.aliases.get(name, name)

    def find(self, tensor: Any) -> str | None:
        """Returns the name of the tensor with this memory and layout."""
        wanted = identity(tensor)
        return next((name for name, held in self.tensors.items() if identity(held) == wanted), None)


def identity(tensor: Any) -> tuple[Any, ...]:
    """Returns what two names of one tensor have in common."""
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)


def collect(model: Any) -> Named:
    """Names every tensor of a model; the first name in the model's own order holds it, the others are aliases."""
    import torch

    found: dict[str, Any] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        found[name] = tensor
    for name, tensor in model.named_buffers(remove_duplicate=False):
        found[name] = tensor
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.layout == torch.strided and tensors.supported(value.dtype):
                found.setdefault(f"{prefix}.{key}" if prefix else key, value)
    named = Named({}, {})
    holders: dict[tuple[Any, ...], str] = {}
    for name, tensor in found.items():
        if tensor.layout != torch.strided or not tensors.supported(tensor.dtype):
            continue
        # Tensors without elements share a null pointer; none of them is tied to another.
        key = identity(tensor) if tensor.numel() else (name,)
        holder = holders.setdefault(key, name)
        if holder == name:
            named.tensors[name] = tensor
        else:
            named.aliases[name] = holder
    return named


def size(model: Any) -> int:
    """Returns the bytes of a model's weights; those of tied ones count once."""
    return sum(tensor.nbytes for tensor in collect(model).tensors.values())


def fill(model: Any, path: Path) -> None:
    """Gives a model the values of a file, by name. Tensors of the file that the model does not have are left alone."""
    named = collect(model)
    try:
        given = tensors.read(path)
    except (OSError, ValueError, KeyError) as error:
        raise Failure("weights", f"can't read `{path}`: {type(error).__name__}: {one_line(error)}") from error
    told = {named.name_of(name) for name in given}
    for name, _ in model.named_parameters():
        if name not in told:
            hint = 'name the model\'s own weights with `weights = "auto"`, or add it to the file'
            raise Failure("weights", f"`{path.name}` has no tensor `{name}`, a parameter of the model", hint=hint)
    for name, tensor in given.items():
        own = named.tensors.get(named.name_of(name))
        if own is None:
            continue
        if (own.dtype, own.shape) != (tensor.dtype, tensor.shape):
            raise Failure(
                "weights",
                f"tensor `{name}` of `{path.name}` is {_kind(tensor)}, that of the model {_kind(own)}",
                hint="export the file from the model that `entry` makes",
            )
        own.copy_(tensor)


def _kind(tensor: Any) -> str:
    return f"{tensors.dtype_name(tensor.dtype)} {list(tensor.shape)}"


def fingerprint(model: Any) -> str:
    """Returns what tells a model's weights from others that were drawn or read elsewhere: the first values of each."""
    digest = hashlib.sha256()
    for name, tensor in sorted(collect(model).tensors.items()):
        first = tensor.detach().reshape(-1)[:_TELLING]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensors.digest(first)}\n".encode())
    return digest.hexdigest()


def write(opened: Any, out: Path) -> dict[str, Any]:
    """Writes the weight set, unless it is a file already; returns the protocol's `Weights`."""
    named = collect(opened.model)
    if opened.filled:
        return {"file": None, "aliases": dict(sorted(named.aliases.items()))}
    if not named.tensors:
        return {"file": None, "aliases": {}}
    path = tensors.write(out / "weights.safetensors", named.tensors)
    return {"file": str(path.resolve()), "aliases": dict(sorted(named.aliases.items()))}
