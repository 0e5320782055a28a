"""The weight set: every parameter and buffer by name, tied ones once.

A file that the spec names has what a state dict has. Everything else (buffers that are not persistent, as
`position_ids`) comes from the model: a program that needs it holds it as a constant. Besides parameters and buffers,
tensors that a module keeps as plain attributes count: a captured graph may need them, and they have a name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import tensors
from .failures import one_line
from .torch_private import modules
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


def collect(model: Any, given: Collection[str] | None = None) -> Named:
    """Names every tensor of a model; the first name in the model's own order holds it, the others are aliases.

    `given` are the names that a file of weights has. Then only tensors of the file are named, by a name of the file;
    what else the model has belongs to the programs that need it.
    """
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
    for name, tensor in sorted(found.items(), key=lambda item: given is not None and item[0] not in given):
        if tensor.layout != torch.strided or not tensors.supported(tensor.dtype):
            continue
        # Tensors without elements share a null pointer; none of them is tied to another.
        key = identity(tensor) if tensor.numel() else (name,)
        holder = holders.setdefault(key, name)
        if given is not None and holder not in given:
            continue
        if holder == name:
            named.tensors[name] = tensor
        else:
            named.aliases[name] = holder
    return named


def fill(model: Any, path: Path) -> frozenset[str]:
    """Gives a model the values of a file, by name; returns the names that count from then on.

    The file has what a state dict has: parameters and persistent buffers, tied ones under any of their names. All other
    tensors keep the model's own values, and tensors of the file that the model does not have are left alone.
    """
    try:
        given = tensors.read(path)
    except (OSError, ValueError) as error:
        hint = "`weights` names one safetensors file, as `save_pretrained` or `safetensors.torch.save_model` writes it"
        raise Failure("weights", f"can't read the weights in `{path}`: {one_line(error)}", hint=hint) from error
    saved = _saved(model)
    _check_missing(saved, given, path)
    filled: dict[tuple[Any, ...], str] = {}
    for name in (name for name in saved if name in given):
        own, tensor = saved[name], given[name]
        if (own.dtype, own.shape) != (tensor.dtype, tensor.shape):
            raise Failure(
                "weights",
                f"tensor `{name}` of `{path}` is {_kind(tensor)}, the model expects {_kind(own)}",
                hint="export the file from the model that `entry` makes, or have `entry` make the model of the file",
            )
        first = filled.setdefault(identity(own), name) if own.numel() else name
        if first == name:
            own.copy_(tensor)
        elif not given[first].equal(tensor):
            raise Failure(
                "weights",
                f"`{first}` and `{name}` of `{path}` differ, and in the model they are one tensor",
                hint="export the file from the model that `entry` makes, or untie the two there",
            )
    return frozenset(saved.keys() & given.keys())


def _saved(model: Any) -> dict[str, Any]:
    """Returns the tensors that a state dict has."""
    found = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in module.named_buffers(recurse=False):
            if modules.is_persistent(module, name):
                found[f"{prefix}.{name}" if prefix else name] = tensor
    return found


def _check_missing(saved: dict[str, Any], given: dict[str, Any], path: Path) -> None:
    tied = {identity(saved[name]) for name in saved.keys() & given.keys()}
    # Only training reads how many batches a norm has seen; older files lack it.
    lacks = [
        name
        for name, own in saved.items()
        if name not in given and identity(own) not in tied and not name.endswith("num_batches_tracked")
    ]
    if not lacks:
        return
    first = lacks[0]
    count = f" and {len(lacks) - 1} more" if len(lacks) > 1 else ""
    hint = "add it to the file, or leave `weights` out: then the model's own are taken"
    known = next((name for name in given if first.endswith(f".{name}")), None)
    outer = next((name for name in given if name.endswith(f".{first}")), None)
    if known is not None:
        hint = f"the file calls it `{known}`: it is that of the submodule `{first.removesuffix(f'.{known}')}`; \
export it from the model that `entry` makes"
    elif outer is not None:
        hint = f"the file calls it `{outer}`: it is that of a larger model; export it from the one that `entry` makes"
    raise Failure("weights", f"`{path}` has no tensor `{first}`, {_kind(saved[first])} in the model{count}", hint=hint)


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
    named = opened.named()
    if opened.given is not None:
        return {"file": None, "aliases": dict(sorted(named.aliases.items()))}
    if not named.tensors:
        return {"file": None, "aliases": {}}
    path = tensors.write(out / "weights.safetensors", named.tensors)
    return {"file": str(path.resolve()), "aliases": dict(sorted(named.aliases.items()))}
