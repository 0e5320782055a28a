"""The ways to run a model from Python that Precast is compared with: each makes a callable of a module for a bucket.

They get their best settings: inference mode, the same inputs on the device already, `dynamic=False` (a bucket is a
static shape), frozen weights where that pays, and bound inputs and outputs with ONNX Runtime.

AOTInductor and ONNX Runtime leave their files in the given folder: a start from it needs no model
(`saved.py`).
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import saved

Call = Callable[[], Any]
Prepare = Callable[[list[torch.Tensor], Path], Call]
"""Makes the call for one bucket's inputs, with a folder for files. The work may be left to the first call."""


def eager(module: torch.nn.Module, _: bool) -> Prepare:
    return lambda inputs, _: lambda: module(*inputs)


def _compiled(mode: str | None) -> Callable[[torch.nn.Module, bool], Prepare]:
    def way(module: torch.nn.Module, freezing: bool) -> Prepare:
        import torch._dynamo.config
        import torch._inductor.config

        # On the CPU the templates of max-autotune, and packed weights, need constant weights.
        cpu = next(module.parameters()).device.type == "cpu"
        torch._inductor.config.freezing = freezing or (mode == "max-autotune" and cpu)
        # One bucket is one entry of the cache; more of them than the default limit is no error here.
        torch._dynamo.config.recompile_limit = 64
        compiled = torch.compile(module, mode=mode, dynamic=False)
        return lambda inputs, _: lambda: compiled(*inputs)

    return way


def aoti(module: torch.nn.Module, freezing: bool) -> Prepare:
    """AOTInductor called from Python, with the package loader."""
    if next(module.parameters()).device.type == "cuda":
        raise NotImplementedError("torch 2.11's aoti_load_package ends with a segmentation fault for CUDA artifacts")

    def prepare(inputs: list[torch.Tensor], folder: Path) -> Call:
        with torch.no_grad():
            program = torch.export.export(module, tuple(inputs))
            options = {"freezing": freezing}
            package = str(folder / "model.pt2")
            torch._inductor.aoti_compile_and_package(program, package_path=package, inductor_configs=options)
            loaded = torch._inductor.aoti_load_package(package)
        return lambda: loaded(*inputs)

    return prepare


def onnxruntime(module: torch.nn.Module, _: bool) -> Prepare:
    """ONNX Runtime, with inputs and outputs bound, by each thread for itself."""
    import onnxruntime as ort

    device = next(module.parameters()).device.type
    provider = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}[device]
    if provider not in ort.get_available_providers():
        raise NotImplementedError(f"onnxruntime {ort.__version__} has no {provider}: {ort.get_available_providers()}")

    def prepare(inputs: list[torch.Tensor], folder: Path) -> Call:
        with torch.no_grad():
            file = folder / "model.onnx"
            torch.onnx.export(module, tuple(inputs), file, dynamo=True, verbose=False)
            session = saved.session(file, provider)
        if provider not in session.get_providers():
            raise NotImplementedError(f"{provider} does not load: onnxruntime fell back to {session.get_providers()}")
        held = [tensor.contiguous() for tensor in inputs]
        run = ort.RunOptions()
        if device == "cuda":
            run.add_run_config_entry("disable_synchronize_execution_providers", "1")
        bound = threading.local()

        def bind() -> Any:
            binding = session.io_binding()
            for argument, tensor in zip(session.get_inputs(), held, strict=True):
                kind = BFLOAT16 if tensor.dtype is torch.bfloat16 else tensor.cpu().numpy().dtype
                binding.bind_input(argument.name, device, 0, kind, tuple(tensor.shape), tensor.data_ptr())
            for output in session.get_outputs():
                binding.bind_output(output.name, device)
            bound.binding = binding
            return binding

        def call() -> Any:
            binding = getattr(bound, "binding", None) or bind()
            session.run_with_iobinding(binding, run)
            return binding

        return call

    return prepare


BFLOAT16 = 16  # onnx.TensorProto.BFLOAT16

WAYS: dict[str, Callable[[torch.nn.Module, bool], Prepare]] = {
    "eager": eager,
    "compile": _compiled(None),
    "reduce-overhead": _compiled("reduce-overhead"),
    "max-autotune": _compiled("max-autotune"),
    "aoti": aoti,
    "onnxruntime": onnxruntime,
}
