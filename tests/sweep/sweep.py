"""`init`, `build` and `run` for architectures with random weights, without an edit of the spec: as eager at every size?

    .venv/bin/python tests/sweep/sweep.py --precast target/debug/precast [NAME …]

Without names it takes all that this Python has the packages of, and says which it leaves out. Each is built in a folder
of its own, which is removed. Exit code 1 if one disagrees.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

HEAD = """
import os
os.environ["HF_HUB_OFFLINE"] = "1"
import torch
torch.manual_seed(0)
"""
TRANSFORMER = (
    HEAD
    + """
import transformers

class Model(torch.nn.Module):
    def __init__(self, model, options):
        super().__init__()
        self.model, self.options = model, options

    def forward(self, {given}):
        return self.model({given}, **self.options).last_hidden_state

def load():
    config = transformers.{name}Config(**{config!r})
    model = transformers.{kind}(config)
    return Model(model, {options!r}).eval()
"""
)
VISION = (
    HEAD
    + """
import {package}

def load():
    model = {call}
    # Some heads start at zero, and then every answer is zero.
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    return model.eval()
"""
)
SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "vocab_size": 100,
}
WIDE = {**SMALL, "max_position_embeddings": 64}
FEW_HEADS = {**WIDE, "num_key_value_heads": 2}
NO_CACHE = {"use_cache": False}
WORDS = "input_ids=int64[batch,seq]"
PICTURE = "pixel_values=float32[batch,3,32,32]"


def transformer(
    name: str, config: dict[str, Any], given: str = WORDS, kind: str | None = None, **options: Any
) -> tuple[str, str, str]:
    argument = given.partition("=")[0]
    values = {"name": name, "config": config, "kind": kind or f"{name}Model", "given": argument, "options": options}
    text = TRANSFORMER
    for key, value in values.items():
        text = text.replace(f"{{{key}!r}}", repr(value)).replace(f"{{{key}}}", str(value))
    return "transformers", text, given


def vision(package: str, call: str, size: int = 64) -> tuple[str, str, str]:
    return package, VISION.format(package=package, call=call), f"x=float32[batch,3,{size},{size}]"


def torchvision(name: str, **options: Any) -> tuple[str, str, str]:
    return vision("torchvision", f"torchvision.models.{name}(weights=None, **{options!r})")


def timm(name: str, **options: Any) -> tuple[str, str, str]:
    return vision("timm", f"timm.create_model({name!r}, pretrained=False, **{options!r})")


# At the sizes that `init` tries, its last image is one pixel, so that a capture there holds for small images only.
STRIDES = (
    HEAD
    + """
def load():
    layers = [torch.nn.Conv2d(3 if at == 0 else 8, 8, 3, stride=2, padding=1) for at in range(5)]
    return torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(1)).eval()
"""
)

VIT = {key: value for key, value in SMALL.items() if key != "vocab_size"} | {"image_size": 32, "patch_size": 8}
# Name -> the package it needs, the entry's file, its input.
ARCHITECTURES = {
    "bert": transformer("Bert", WIDE),
    "roberta": transformer("Roberta", {**WIDE, "pad_token_id": 1}),
    "distilbert": transformer(
        "DistilBert", {"dim": 32, "n_heads": 4, "hidden_dim": 64, "n_layers": 3, "vocab_size": 100}
    ),
    "electra": transformer("Electra", {**WIDE, "embedding_size": 32}),
    "albert": transformer("Albert", {**WIDE, "embedding_size": 16}),
    "gpt2": transformer(
        "GPT2", {"n_embd": 32, "n_head": 4, "n_layer": 3, "vocab_size": 100, "n_positions": 64}, **NO_CACHE
    ),
    "llama": transformer("Llama", FEW_HEADS, **NO_CACHE),
    "mistral": transformer("Mistral", FEW_HEADS, **NO_CACHE),
    "qwen2": transformer("Qwen2", FEW_HEADS, **NO_CACHE),
    "opt": transformer("OPT", {**WIDE, "ffn_dim": 64, "word_embed_proj_dim": 32}, **NO_CACHE),
    "t5": transformer(
        "T5",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4, "vocab_size": 100},
        kind="T5EncoderModel",
    ),
    "vit": transformer("ViT", VIT, PICTURE),
    "strides": ("torch", STRIDES, "input=float32[batch,3,height,width]"),
    "resnet18": torchvision("resnet18"),
    "mobilenet": torchvision("mobilenet_v3_small"),
    "squeezenet": torchvision("squeezenet1_1"),
    "shufflenet": torchvision("shufflenet_v2_x0_5"),
    "convnext": timm("convnext_atto"),
    "efficientnet": timm("efficientnet_lite0"),
    "regnet": timm("regnetx_002"),
    "mixer": vision("timm", "timm.create_model('mixer_s32_224', pretrained=False, img_size=64)"),
}


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    # One store for all: its first build compiles the shim.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "PRECAST_STORE": str(folder.parent / "store")}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)


def sweep(name: str, precast: str, root: Path) -> tuple[str | None, float]:
    """Returns the failure of an architecture, if any, and the error of its answer against eager."""
    _, text, given = ARCHITECTURES[name]
    with tempfile.TemporaryDirectory(dir=root) as made:
        folder = Path(made)
        (folder / "model.py").write_text(text)
        python = ["--python", sys.executable]
        for args in (["init", "model:load", "--input", given, *python], ["build", "-q", *python]):
            done = run([precast, *args], folder)
            if done.returncode != 0:
                return f"`{args[0]}` ends with {done.returncode}: {done.stderr[-2000:]}", 0.0
        spec = tomllib.loads((folder / "precast.toml").read_text())
        asked = points(given, spec["module"][0]["buckets"])
        command = [precast, "run", "forward", "--model", spec["model"]["name"]]
        (folder / "points.json").write_text(json.dumps([value(given, sizes) for sizes in asked]))
        (folder / "eager.py").write_text(EAGER)
        done = run([sys.executable, "eager.py", given.partition("=")[0]], folder)
        if done.returncode != 0:
            return f"eager fails: {done.stderr[-2000:]}", 0.0
        problems, worst = [], 0.0
        for at, sizes in enumerate(asked):
            wrong, error = compare(at, folder, [*command, *(["--compiled"] if at == 0 else [])])
            worst = max(worst, error)
            if wrong is not None:
                problems.append(f"{sizes}: {wrong}")
        return ("; ".join(problems) or None), worst


EAGER = """
import json, sys, torch, safetensors.torch
import model

loaded = model.load()
torch.manual_seed(1)
for at, expression in enumerate(json.load(open("points.json"))):
    x = eval(expression)
    safetensors.torch.save_file({sys.argv[1]: x}, f"in.{at}.safetensors")
    with torch.no_grad():
        safetensors.torch.save_file({"output": loaded(x).contiguous()}, f"eager.{at}.safetensors")
"""


def points(given: str, buckets: dict[str, list[int]]) -> list[dict[str, int]]:
    """Returns sizes to ask for: a bucket, then one, between buckets and above the largest.

    Each dimension has them alone, and all of them together.
    """
    dims = [dim for dim in given.partition("[")[2].rstrip("]").split(",") if not dim.isdigit()]
    largest = {dim: max(buckets[dim]) for dim in dims}
    ends = {dim: (1, max(largest[dim] * 2 // 3, 1), largest[dim] + 5) for dim in dims}
    found = [largest] + [{**largest, dim: size} for dim in dims for size in ends[dim]]
    found += [{dim: ends[dim][place] for dim in dims} for place in range(3)]
    if len(dims) > 1:
        found += [{**{dim: ends[dim][2] for dim in dims}, dim: 1} for dim in dims]
    return [point for at, point in enumerate(found) if point not in found[:at]]


def compare(at: int, folder: Path, command: list[str]) -> tuple[str | None, float]:
    """Runs one request; returns the failure, if any, and the error of the answer against eager."""
    import safetensors.torch
    import torch

    inputs, outputs = folder / f"in.{at}.safetensors", folder / "out.safetensors"
    done = run([*command, "--inputs", str(inputs), "--outputs", str(outputs), "--format", "json"], folder)
    if done.returncode != 0:
        return f"`run` ends with {done.returncode}: {done.stderr[-2000:]}", 0.0
    (answer,) = safetensors.torch.load_file(outputs).values()
    expected = safetensors.torch.load_file(folder / f"eager.{at}.safetensors")["output"]
    if answer.shape != expected.shape:
        return f"it answers {list(answer.shape)}, eager {list(expected.shape)}", 0.0
    if not expected.any():
        return "eager answers nothing but zeros: no comparison means anything", 0.0
    error = float((answer - expected).abs().max() / expected.abs().max())
    return (None if torch.isfinite(answer).all() and error <= 1e-4 else "it differs from eager"), error


def value(given: str, sizes: dict[str, int]) -> str:
    """Returns the expression of an input at these sizes."""
    dtype, _, axes = given.partition("=")[2].rstrip("]").partition("[")
    shape = [sizes[axis] if axis in sizes else int(axis) for axis in axes.split(",")]
    return f"torch.randint(3, 100, {shape})" if dtype == "int64" else f"torch.randn({shape})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precast", type=Path, required=True)
    parser.add_argument("names", nargs="*", metavar="NAME")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in ARCHITECTURES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(ARCHITECTURES)}")
    failed = 0
    root = tempfile.TemporaryDirectory()
    for name in args.names or ARCHITECTURES:
        package = ARCHITECTURES[name][0]
        if importlib.util.find_spec(package) is None:
            print(f"{name}: left out, there is no {package} here", flush=True)
            failed += bool(args.names)
            continue
        started = time.perf_counter()
        wrong, error = sweep(name, str(args.precast.resolve()), Path(root.name))
        failed += wrong is not None
        result = {"name": name, "wrong": wrong, "error": error, "seconds": round(time.perf_counter() - started, 1)}
        print(json.dumps(result), flush=True)
    root.cleanup()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
