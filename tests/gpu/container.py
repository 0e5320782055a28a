"""Makes a container of an artifact in a Python that has imported torch, and runs it.

    python3 tests/gpu/container.py [cuda|cpu]

The artifact, and for CUDA the shim, are compiled here by the compiler that the environment names (`CXX`). If the
artifact has a C++ library inside and exports it, the container's constructor fails or crashes.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tests.worker.support import Quiet, part, spec  # noqa: E402

MODEL = "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x): return (x @ x.t()).relu() + 1\n"


def artifact(folder: Path, device: str) -> str:
    """Returns the path of an artifact without weights."""
    (folder / "container_model.py").write_text(MODEL)
    opened = part("model.entry").open_model(folder, "container_model:Model", device)
    inputs = [spec("x", "float32", [4, 8])]
    module = {"name": "m", "path": "", "method": "forward", "regions": [], "inputs": inputs}
    captured = part("capture").capture(opened, module, {}, folder, Quiet())
    request = {"device": device, "isa": "native", "mode": "default", "options": {}}
    request["file"] = captured["segments"][0]["file"]
    return part("compiler").compile_segment(request, folder, Quiet())["library"]


def shims(folder: Path, device: str) -> list[str]:
    """Returns the paths of the shim's objects."""
    sources = {path.name: path.read_text() for path in (ROOT / "crates/precast-shim/cpp").iterdir()}
    made = part("torch_private.cpp_shim").compile_shim(sources, device, folder, lambda phase: None)
    return [made[name] for name in ("file", "cuda") if made[name]]


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def exports(path: str) -> list[str]:
    """Returns the C++ library's own symbols that an object exports: strong definitions in its namespaces."""
    words = [line.split() for line in output("readelf", "-W", "--dyn-syms", path).splitlines()]
    defined = [word[7] for word in words if len(word) > 7 and word[4] == "GLOBAL" and word[6] != "UND"]
    own = ("_ZSt", "_ZNSt", "_ZNKSt", "_ZTVSt", "_ZN10__cxxabiv1", "__cxa_", "_Zn")
    return [name for name in defined if name.startswith(own)]


def run(path: str, device: str) -> None:
    """Makes a container, runs it and compares the answer with eager."""
    code = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    container = ctypes.c_void_p()

    def call(name: str, *arguments: Any) -> None:
        assert getattr(code, f"AOTInductorModelContainer{name}")(*arguments) == 0, name

    call("CreateWithDevice", ctypes.byref(container), ctypes.c_size_t(1), device.encode(), None)
    x = torch.randn(4, 8, device=device)
    handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors([x])
    make, view, value = ctypes.pythonapi.PyCapsule_New, ctypes.pythonapi.PyCapsule_GetPointer, ctypes.c_void_p
    view.restype, view.argtypes = value, (ctypes.py_object, ctypes.c_char_p)
    make.restype, make.argtypes = ctypes.py_object, (value, ctypes.c_char_p, value)
    inputs, outputs = (value * 1)(view(handles[0], None)), (value * 1)()
    stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else None
    call("Run", container, inputs, ctypes.c_size_t(1), outputs, ctypes.c_size_t(1), value(stream), None)
    [answer] = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs([make(outputs[0], None, None)])
    torch.testing.assert_close(answer, (x @ x.t()).relu() + 1)


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = artifact(folder, device)
        for made in [path, *(shims(folder, device) if device == "cuda" else [])]:
            inside = "libstdc++.so" not in output("readelf", "-d", made)
            found = exports(made)
            where = "inside" if inside else "shared"
            print(f"{Path(made).name}: C++ library {where}, {len(found)} of its symbols exported", flush=True)
            assert not found, found[:3]
        run(path, device)
    compiler = os.environ.get("CXX", "g++")
    print(f"torch {torch.__version__}, CXX {compiler}: the container of {device} runs in this process")


if __name__ == "__main__":
    main()
