"""The operations of a call in canonical text: equal texts have equal graphs.

A call runs once with real tensors, in the modes of a capture, and each operation below autograd is a line: its
overload, its arguments, its results. Of a call with gradients the backward operations follow. A tensor is its memory,
by number in order of appearance, with dtype, shape, strides and device. So the text has tied tensors and writes in
place, and everything that an attribute, a flag, a closure or a constant changes in the computation.

A tensor that is no parameter, buffer, input or result is a constant, and its values count.

Private: `TorchDispatchMode` and its `_should_skip_dynamo`, `_compiling_state_context` as in a capture, and the
`_cdata` of a storage. Without them equal regions are compiled one by one.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch._export.utils import _compiling_state_context
from torch.utils._python_dispatch import TorchDispatchMode

from . import batches


class Unknown(Exception):
    """A call with a value that has no canonical text."""


def text(net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], gradients: bool) -> str:
    """Returns the text of a call, with gradients of the inputs and parameters that require some."""
    recorder = _Recorder()
    for name, tensor in [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]:
        recorder.lines.append(f"{name} {recorder.known(tensor)} {tensor.requires_grad}")
    inputs: list[Tensor] = []

    def given(name: str, tensor: Tensor) -> Tensor:
        recorder.lines.append(f"input {name} {recorder.known(tensor)} {tensor.requires_grad}")
        inputs.append(tensor)
        return tensor

    batches.mapped((args, kwargs), given)
    with _compiling_state_context():
        with recorder:
            answer = net._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        recorder.lines.append(batches.kinds(answer))
        for path, value in batches.leaves(answer):
            of = f" {value.requires_grad}" if isinstance(value, Tensor) else ""
            recorder.lines.append(f"answer {path} {recorder.value(value)}{of}")
        found = [one for one in batches.tensors(answer) if one.requires_grad]
        wanted = [one for one in (*inputs, *net.parameters()) if one.requires_grad]
        if gradients and found and wanted:
            tangents = [torch.ones_like(one) for one in found]
            for one in tangents:
                recorder.known(one)
            with recorder:
                got = torch.autograd.grad(found, wanted, tangents, allow_unused=True)
            recorder.lines += [f"gradient {recorder.value(one)}" for one in got]
    return "\n".join(recorder.lines)


class _Recorder(TorchDispatchMode):
    """Writes a line for each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._numbers: dict[int, int] = {}
        # Memory that is freed could be another tensor's.
        self._kept: list[Any] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no call here is compiled, and torch's compiler takes a second to import

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [self.value(one) for one in args]
        given += [f"{key}={self.value(one)}" for key, one in sorted((kwargs or {}).items())]
        result = func(*args, **(kwargs or {}))
        self._know(result)
        self.lines.append(f"{func}({', '.join(given)}) -> {self.value(result)}")
        return result

    def _know(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self.known(value)
        elif isinstance(value, list | tuple):
            for one in value:
                self._know(one)

    def known(self, tensor: Tensor) -> str:
        """Returns the text of a tensor whose values do not count."""
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.layout != torch.strided:
            raise Unknown(f"a tensor is a `{type(tensor).__name__}`, and {tensor.layout}")
        storage = tensor.untyped_storage()
        number = self._numbers.setdefault(storage._cdata, len(self._numbers))
        self._kept.append(tensor)
        flags = f"{'c' if tensor.is_conj() else ''}{'n' if tensor.is_neg() else ''}"
        place = f"{list(tensor.shape)}{list(tensor.stride())}+{tensor.storage_offset()}"
        return f"%{number} {tensor.dtype}{place}{tensor.device.type}{flags}"

    def value(self, value: Any) -> str:
        """Returns the text of an argument or a result."""
        if isinstance(value, Tensor):
            constant = value.untyped_storage()._cdata not in self._numbers
            return self.known(value) + (f" {_digest(value)}" if constant else "")
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self.value, value))}]"
        if isinstance(value, torch.device):
            return f"device {value.type}"
        if isinstance(value, float):
            return f"float {value.hex()}"
        if value is None or isinstance(value, bool | int | str | complex | torch.dtype | torch.layout):
            return repr(value)
        if isinstance(value, torch.memory_format):
            return str(value)
        raise Unknown(f"a value is a `{type(value).__name__}`")


def _digest(tensor: Tensor) -> str:
    plain = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return hashlib.sha256(bytes(plain.untyped_storage())).hexdigest()
