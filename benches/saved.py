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
from pathlib import Path
from typing import Any


def session(file: Path, provider: str) -> Any:
    """Returns a session of ONNX Runtime."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = int(os.environ["OMP_NUM_THREADS"])
    options.inter_op_num_threads = 1
    return ort.InferenceSession(file, options, providers=[provider])


def main(way: str, folder: str, inputs: str, *names: str) -> None:
    marks = {"python": BEGAN}
    if way == "aoti":
        import torch
        from safetensors.torch import load_file

        marks["import"] = time.time()
        loaded = torch._inductor.aoti_load_package(f"{folder}/model.pt2")
        marks["load"] = time.time()
        with torch.inference_mode():
            tensors = load_file(inputs)
            loaded(*(tensors[name] for name in names))
    else:
        import onnxruntime  # noqa: F401
        from safetensors.numpy import load_file

        marks["import"] = time.time()
        loaded = session(Path(folder) / "model.onnx", "CPUExecutionProvider")
        marks["load"] = time.time()
        tensors = load_file(inputs)
        asked = (argument.name for argument in loaded.get_inputs())
        loaded.run(None, dict(zip(asked, (tensors[name] for name in names), strict=True)))
    marks["answer"] = time.time()
    print(json.dumps({"marks": marks}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # what is left to tear down is no part of any figure
