"""Blocks that leave a module and the random generators as they were."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..torch_private import modules as of_torch


@contextmanager
def unchanged_buffers(module: nn.Module) -> Iterator[list[str]]:
    """Runs a block and puts the buffers of a module back. The list that it yields gets the names of changed buffers."""
    before = [
        (name, buffer, of_torch.version(buffer), buffer.detach().clone()) for name, buffer in module.named_buffers()
    ]
    changed: list[str] = []
    try:
        yield changed
    finally:
        now = dict(module.named_buffers())
        for name, buffer, version, copy in before:
            if now.get(name) is not buffer or of_torch.version(buffer) != version:
                changed.append(name)
                owner, _, key = name.rpartition(".")
                of_torch.buffers(module.get_submodule(owner))[key] = buffer
                with torch.no_grad():
                    buffer.copy_(copy)


@contextmanager
def restored_buffers(module: nn.Module) -> Iterator[None]:
    """Runs a block and puts the values of the buffers of a module back."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                buffer.copy_(value)


@contextmanager
def inference(module: nn.Module) -> Iterator[None]:
    """Runs a block without gradients and with all submodules in eval mode; their flags are put back."""
    flags = [(each, each.training) for each in module.modules()]
    try:
        for each, _ in flags:
            each.training = False
        with torch.no_grad():
            yield
    finally:
        for each, training in flags:
            each.training = training


@contextmanager
def without_autocast() -> Iterator[None]:
    """Runs a block without autocast."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def unpacked() -> Any:
    """Returns a block without the caller's hooks for saved tensors.

    A checkpoint counts what a call saves, and its second call has to save as much.
    """
    return torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)


def _as_it_is(value: Any) -> Any:
    return value


def generators() -> tuple[Any, ...]:
    """Returns the states of the random generators of torch, Python and NumPy."""
    numpy = sys.modules.get("numpy")
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    return torch.get_rng_state(), cuda, random.getstate(), numpy.random.get_state() if numpy is not None else None


def restore_generators(state: tuple[Any, ...]) -> None:
    """Puts the states of the random generators back."""
    cpu, cuda, python, numpy = state
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)
    random.setstate(python)
    if numpy is not None:
        sys.modules["numpy"].random.set_state(numpy)


@contextmanager
def restored_generators() -> Iterator[None]:
    """Runs a block and puts the random generators back to their states before it."""
    state = generators()
    try:
        yield
    finally:
        restore_generators(state)
