"""The weight set: every parameter and buffer by name, tied ones once.

A file of weights in the spec has the contents of a state dict. Other tensors (buffers that are not persistent, such as
`position_ids`) come from the model: a program that needs one has it as a constant. Tensors that are plain attributes of
a module count too: a captured graph may read them, and they have names.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import globs, tensors, valueless
from .failures import one_line
from .torch_private import fake, modules
from .wire import Failure

# The number of values of each tensor that the fingerprint covers.
_FINGERPRINT_VALUES = 256
# Globs that a hint names, before those of numbered parts become one.
_GLOBS = 4


@dataclass
class Named:
    """The model's tensors by name, and further names of the same tensors."""

    tensors: dict[str, Any]
    aliases: dict[str, str]

    def name_of(self, name: str) -> str:
        """Returns the name that a tensor has in the weight set."""
        return self.aliases.get(name, name)

    def find(self, tensor: Any) -> str | None:
        """Returns the name of the tensor with this memory and layout."""
        wanted = identity(tensor)
        return next((name for name, held in self.tensors.items() if identity(held) == wanted), None)


def identity(tensor: Any) -> tuple[Any, ...]:
    """Returns a value that is equal for two names of one tensor."""
    # Tensors without values have no address.
    place = (fake.storage(tensor), tensor.storage_offset()) if tensor.is_meta else tensor.data_ptr()
    return (place, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)


def collect(model: Any, from_file: Collection[str] | None = None, unsaved: Sequence[str] = ()) -> Named:
    """Names every tensor of a model. Of several names, the first in the model's order counts; the others are aliases.

    `from_file` are the names in a file of weights. Then only tensors of the file are named, by a name of the file.
    `unsaved` are globs of buffers that are left out.
    """
    found: dict[str, Any] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        found[name] = tensor
    for name, tensor in model.named_buffers(remove_duplicate=False):
        if not any(globs.matches(glob, name) for glob in unsaved):
            found[name] = tensor
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.layout == torch.strided and tensors.supported(value.dtype):
                found.setdefault(f"{prefix}.{key}" if prefix else key, value)
    named = Named({}, {})
    holders: dict[tuple[Any, ...], str] = {}
    for name, tensor in sorted(found.items(), key=lambda item: from_file is not None and item[0] not in from_file):
        if tensor.layout != torch.strided or not tensors.supported(tensor.dtype):
            continue
        # Tensors without elements share a null pointer; none of them is tied to another.
        key = identity(tensor) if tensor.numel() else (name,)
        holder = holders.setdefault(key, name)
        if from_file is not None and holder not in from_file:
            continue
        if holder == name:
            named.tensors[name] = tensor
        else:
            named.aliases[name] = holder
    return named


@dataclass
class Files:
    """Files that together are a weight set, under the name that errors give it."""

    paths: Sequence[Path]
    name: Path
    # Tensors that the model may lack.
    unused: Collection[str] = ()
    maps: list[mmap.mmap] = field(default_factory=list)

    def read(self) -> dict[str, Any]:
        """Maps the files; returns their tensors."""
        given: dict[str, Any] = {}
        for path in self.paths:
            given |= tensors.read(path, self.maps)
        return given

    def release(self) -> None:
        """Gives back the memory of the mapped files: the next access reads them again, with the values of the files."""
        for one in self.maps:
            one.madvise(mmap.MADV_DONTNEED)


def fill(model: Any, files: Files) -> frozenset[str]:
    """Gives a model the values of files, by name; returns the names of the tensors that the files have.

    A parameter without values gets a tensor over the mapped file; other values are copied into the model's tensors.

    The files have parameters and persistent buffers, as a state dict, tied ones under any of their names. All other
    tensors keep the model's values. The files have no tensors that the model lacks, except the unused ones.
    """
    path, unused = files.name, files.unused
    try:
        given = files.read()
    except (OSError, ValueError) as error:
        hint = "`weights` names safetensors, as `save_pretrained` or `safetensors.torch.save_model` writes them"
        raise Failure("weights", f"can't read the weights in `{path}`: {one_line(error)}", hint=hint) from error
    saved = _saved(model)
    _check_missing(saved, given, path)
    filled: dict[tuple[Any, ...], str] = {}
    keys = {name: identity(own) if own.numel() else (name,) for name, own in saved.items()}
    for name in (name for name in saved if name in given):
        own, tensor = saved[name], given[name]
        if (own.dtype, own.shape) != (tensor.dtype, tensor.shape):
            raise Failure(
                "weights",
                f"tensor `{name}` of `{path}` is {_kind(tensor)}, the model expects {_kind(own)}",
                hint="export the file from the model that `entry` makes, or have `entry` make the model of the file",
            )
        first = filled.setdefault(keys[name], name)
        if first == name:
            if not own.is_meta:
                own.copy_(tensor)
        elif not given[first].equal(tensor):
            raise Failure(
                "weights",
                f"`{first}` and `{name}` of `{path}` differ, and in the model they are one tensor",
                hint="export the file from the model that `entry` makes, or untie the two there",
            )
    for name, own in saved.items():
        if own.is_meta and keys[name] in filled:
            # The value of a tied tensor may have another of its names.
            valueless.give(own, given[filled[keys[name]]])
    _check_unused(model, {name: held for name, held in given.items() if name not in saved and name not in unused}, path)
    return frozenset(saved.keys() & given.keys())


def _saved(model: Any) -> dict[str, Any]:
    """Returns the tensors of the model's state dict."""
    found = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in module.named_buffers(recurse=False):
            if modules.is_persistent(module, name):
                found[f"{prefix}.{name}" if prefix else name] = tensor
    return found


def _check_missing(saved: dict[str, Any], given: dict[str, Any], path: Path) -> None:
    tied = {identity(saved[name]) for name in saved.keys() & given.keys()}
    # `num_batches_tracked` is for training, and older files lack it.
    missing = [
        name
        for name, own in saved.items()
        if name not in given and identity(own) not in tied and not name.endswith("num_batches_tracked")
    ]
    if not missing:
        return
    first = missing[0]
    count = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    hint = "add it to the file, or leave `weights` out: then the model's own are taken"
    known = next((name for name in given if first.endswith(f".{name}")), None)
    outer = next((name for name in given if name.endswith(f".{first}")), None)
    if known is not None:
        hint = f"the file calls it `{known}`: it is that of the submodule `{first.removesuffix(f'.{known}')}`; \
export it from the model that `entry` makes"
    elif outer is not None:
        hint = f"the file calls it `{outer}`: it is that of a larger model; export it from the one that `entry` makes"
    raise Failure("weights", f"`{path}` has no tensor `{first}`, {_kind(saved[first])} in the model{count}", hint=hint)


def _check_unused(model: Any, given: dict[str, Any], path: Path) -> None:
    """Refuses tensors that no state dict of the model has. Buffers that are not persistent may be there as they are."""
    own = collect(model)

    def same(name: str, tensor: Any) -> bool:
        held = own.tensors.get(own.name_of(name))
        return held is not None and held.dtype == tensor.dtype and held.equal(tensor)

    lacks = [name for name, tensor in given.items() if not same(name, tensor)]
    if not lacks:
        return
    held = own.tensors.keys() | own.aliases.keys()
    globs = dict.fromkeys(_outside(name, held) for name in lacks)
    if len(globs) > _GLOBS:
        globs = dict.fromkeys(re.sub(r"\b\d+\b", "*", glob) for glob in globs)
    count = f" and {len(lacks) - 1} more" if len(lacks) > 1 else ""
    message = f"`{path}` has tensor `{lacks[0]}`, {_kind(given[lacks[0]])}{count}: the model has none of that name"
    hint = f"""export the file from the model that `entry` makes, or have `entry` make the model of the file; or allow \
unused tensors in [model]: `unused_weights = {json.dumps(list(globs))}`"""
    raise Failure("weights", message, hint=hint)


def _outside(name: str, held: Collection[str]) -> str:
    """Returns a glob of the largest part around a tensor that the model has nothing of."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        prefix = ".".join(parts[:count])
        if not any(other.startswith(f"{prefix}.") for other in held):
            return f"{prefix}.**"
    return name


def _kind(tensor: Any) -> str:
    return f"{tensors.dtype_name(tensor.dtype)} {list(tensor.shape)}"


def fingerprint(model: Any) -> str:
    """Returns a digest of the first values of each tensor. Workers compare it: an entry may draw random weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(collect(model).tensors.items()):
        first = tensor.detach().reshape(-1)[:_FINGERPRINT_VALUES]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensors.digest(first)}\n".encode())
    return digest.hexdigest()


def write(opened: Any, out: Path) -> dict[str, Any]:
    """Writes the weight set, unless it came from a file; returns the protocol's `SavedWeights`."""
    named = opened.named()
    if opened.from_file is not None:
        return {"file": None, "aliases": dict(sorted(named.aliases.items()))}
    if not named.tensors:
        return {"file": None, "aliases": {}}
    path = tensors.write(out / "weights.safetensors", named.tensors)
    return {"file": str(path.resolve()), "aliases": dict(sorted(named.aliases.items()))}
