"""A start from saved files, with no model and no compiler: `python -m benches.saved WAY FOLDER INPUTS NAME…`.

INPUTS is a file of safetensors, and the names are its tensors in the order of the module's inputs. FOLDER has the
AOTInductor package or the ONNX file that `ways.py` kept. ONNX Runtime starts without torch.
"""

import time

BEGAN = time.time()
# ruff: noqa: E402

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

Mark = Callable[[str], None]


def aoti(folder: Path, inputs: str, names: list[str], mark: Mark) -> None:
    import torch
    from safetensors.torch import load_file

    mark("import")
    loaded = torch._inductor.aoti_load_package(str(folder / "model.pt2"))
    mark("load")
    with torch.inference_mode():
        tensors = load_file(inputs)
        loaded(*(tensors[name] for name in names))


def onnxruntime(folder: Path, inputs: str, names: list[str], mark: Mark) -> None:
    import onnxruntime as ort
    from safetensors.numpy import load_file

    mark("import")
    options = ort.SessionOptions()
    options.intra_op_num_threads = int(os.environ["OMP_NUM_THREADS"])
    session = ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    mark("load")
    tensors = load_file(inputs)
    asked = (argument.name for argument in session.get_inputs())
    session.run(None, dict(zip(asked, (tensors[name] for name in names), strict=True)))


def main() -> None:
    way, folder, inputs, *names = sys.argv[1:]
    marks = {"python": BEGAN}
    start = {"aoti": aoti, "onnxruntime": onnxruntime}[way]
    start(Path(folder), inputs, names, lambda name: marks.update({name: time.time()}))
    marks["answer"] = time.time()
    print(json.dumps({"marks": marks}), flush=True)
    os._exit(0)  # what is left to tear down is no part of any figure


main()
