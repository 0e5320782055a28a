"""`maybe_compile` beside `torch.compile` and eager, in one process: one row for each architecture.

    python benches/wrapper.py [NAME …] [--device cuda] [--dtype bfloat16] [--batch 1 16] [--out FILE] [--processes N]

Architectures of transformers and torchvision at their usual sizes, with random weights; and two of torch itself. The
builds come first, in processes of their own, then a fresh process for each architecture, which is a later process of a
user: it starts from the release. On a GPU both compilers have `mode="reduce-overhead"`. With LAYERS=2 in the
environment models of transformers have two layers, which is quick to build and says who answers.

| | |
|---|---|
| start | seconds from the module in hand to the first answer, at all batch sizes; without the imports |
| single | a call, and a wait for the device: a request that is served |
| pipelined | many calls, and one wait: the device is never idle, if the host is quick enough |
| host | the time until a call returns, on a GPU, while the device is behind by a few calls at most |
| far | distance from the module in float32, by norm, as a share |

All times are medians over rounds, in which the contenders take turns; eager takes part in the first. `ratio` is the
time of the peer over ours, round by round: above 1 we are quicker. A row says who answered: `artifact`, or the reason
for which the original did.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROUNDS = 5
LAYERS = int(os.environ.get("LAYERS", "0"))

Made = tuple[Any, dict[str, tuple[Any, ...]]]
Make = Callable[[], Made]


def _model(config: str, kind: str, shapes: dict[str, tuple[Any, ...]], part: str = "", **settings: Any) -> Make:
    """A model of transformers, or a part of one."""

    def make() -> Made:
        import transformers

        made = getattr(transformers, config)(**settings)
        for layers in ("num_hidden_layers", "num_layers", "n_layer", "encoder_layers") if LAYERS else ():
            if isinstance(getattr(made, layers, None), int):
                setattr(made, layers, LAYERS)
        net = getattr(transformers, kind)(made)
        return (getattr(net, part)() if part else net), shapes

    return make


def _text(config: str, kind: str, *, tokens: int = 128, mask: bool = False, **settings: Any) -> Make:
    """A model that reads tokens."""
    names = ("input_ids", "attention_mask") if mask else ("input_ids",)
    return _model(config, kind, {name: ("batch", tokens) for name in names}, **settings)


def _picture(config: str, kind: str) -> Make:
    """A model that reads pictures."""
    return _model(config, kind, {"pixel_values": ("batch", 3, 224, 224)})


def _vision(name: str) -> Make:
    """A model of torchvision."""

    def make() -> Made:
        import torchvision

        return getattr(torchvision.models, name)(), {"x": ("batch", 3, 224, 224)}

    return make


def _encoder() -> Made:
    import torch

    layer = torch.nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, activation="gelu")
    return torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), {"src": ("batch", 128, 768)}


_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_LLAMA = {"num_hidden_layers": 8, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
_LLAMA |= {"num_key_value_heads": 4, "use_cache": False, "vocab_size": 32000}

ARCHITECTURES: dict[str, Make] = {
    "bert": _text("BertConfig", "BertModel", mask=True),
    "roberta": _text("RobertaConfig", "RobertaModel", mask=True),
    "distilbert": _text("DistilBertConfig", "DistilBertModel", mask=True),
    "albert": _text("AlbertConfig", "AlbertModel", **_BASE),
    "electra": _text("ElectraConfig", "ElectraForSequenceClassification", mask=True),
    "mpnet": _text("MPNetConfig", "MPNetModel", mask=True),
    "modernbert": _text("ModernBertConfig", "ModernBertModel", mask=True),
    "deberta": _text("DebertaV2Config", "DebertaV2Model", **_BASE),
    "xlnet": _text("XLNetConfig", "XLNetModel", n_layer=6, d_model=768, n_head=12, d_inner=3072),
    "gpt2": _text("GPT2Config", "GPT2LMHeadModel", use_cache=False),
    "opt": _text("OPTConfig", "OPTForCausalLM", use_cache=False),
    "neox": _text("GPTNeoXConfig", "GPTNeoXForCausalLM", **_BASE, use_cache=False),
    "llama": _text("LlamaConfig", "LlamaForCausalLM", **_LLAMA),
    "qwen2": _text("Qwen2Config", "Qwen2ForCausalLM", **_LLAMA),
    "qwen3": _text("Qwen3Config", "Qwen3ForCausalLM", **_LLAMA, head_dim=64),
    "gemma": _text("GemmaConfig", "GemmaForCausalLM", **_LLAMA, head_dim=64),
    "phi": _text("PhiConfig", "PhiForCausalLM", **{**_LLAMA, "num_key_value_heads": 16}),
    "mistral": _text("MistralConfig", "MistralForCausalLM", **_LLAMA),
    "bloom": _text(
        "BloomConfig", "BloomForCausalLM", hidden_size=768, n_layer=8, n_head=12, use_cache=False, vocab_size=50000
    ),
    "t5": _text("T5Config", "T5EncoderModel"),
    "siglip-text": _text("SiglipTextConfig", "SiglipTextModel", tokens=64),
    "clip-text": _text("CLIPTextConfig", "CLIPTextModel", tokens=77),
    "transformer-encoder": _encoder,
    "resnet18": _vision("resnet18"),
    "resnet50": _vision("resnet50"),
    "mobilenet": _vision("mobilenet_v3_large"),
    "efficientnet": _vision("efficientnet_b0"),
    "convnext": _vision("convnext_tiny"),
    "densenet": _vision("densenet121"),
    "regnet": _vision("regnet_y_1_6gf"),
    "vit": _vision("vit_b_16"),
    "swin": _vision("swin_t"),
    "maxvit": _vision("maxvit_t"),
    "deit": _picture("DeiTConfig", "DeiTModel"),
    "dinov2": _picture("Dinov2Config", "Dinov2Model"),
    "beit": _picture("BeitConfig", "BeitModel"),
    "siglip": _picture("SiglipVisionConfig", "SiglipVisionModel"),
    "clip": _picture("CLIPVisionConfig", "CLIPVisionModel"),
    "segformer": _picture("SegformerConfig", "SegformerModel"),
    "whisper": _model("WhisperConfig", "WhisperModel", {"input_features": ("batch", 80, 3000)}, "get_encoder"),
    "wav2vec2": _model("Wav2Vec2Config", "Wav2Vec2Model", {"input_values": ("batch", 16000)}),
    "hubert": _model("HubertConfig", "HubertModel", {"input_values": ("batch", 16000)}),
}


class Case:
    """An architecture on a device."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        import torch

        torch.manual_seed(0)
        self.name, self.device, self.options = name, options.device, options
        self.dtype = getattr(torch, options.dtype)
        net, self.shapes = ARCHITECTURES[name]()
        self.net = net.eval().to(self.device, self.dtype)

    def inputs(self, batch: int) -> dict[str, Any]:
        """Returns random inputs."""
        import torch

        made = {}
        for name, axes in self.shapes.items():
            shape = [batch if axis == "batch" else axis for axis in axes]
            if name == "attention_mask":
                made[name] = torch.ones(shape, dtype=torch.int64, device=self.device)
                made[name][0, -3:] = 0
            elif name == "input_ids":
                made[name] = torch.randint(3, 1000, shape, device=self.device)
            else:
                made[name] = torch.randn(shape, device=self.device, dtype=self.dtype)
        return made

    def wrapped(self) -> Any:
        """Returns the module with artifacts: from the store, if they are there."""
        import precast

        config = precast.CompileConfig(
            name=f"{self.name}-{self.options.dtype}",
            store=self.options.store,
            mode=self.mode,
            buckets={"batch": self.options.batch},
            shapes={name: list(axes) for name, axes in self.shapes.items()},
        )
        return precast.maybe_compile(self.net, config, None, self.inputs(max(self.options.batch)))

    @property
    def mode(self) -> str:
        """The mode of both compilers."""
        return "default" if self.device == "cpu" else "reduce-overhead"

    def peer(self) -> Any:
        """Returns the module behind `torch.compile`."""
        import torch

        return torch.compile(self.net, mode=self.mode, dynamic=False)


def _first(answer: Any) -> Any:
    import torch

    if isinstance(answer, torch.Tensor):
        return answer
    values = answer.values() if hasattr(answer, "values") else answer
    return next(one for one in values if isinstance(one, torch.Tensor))


def _wait(device: str) -> None:
    if device != "cpu":
        import torch

        torch.cuda.synchronize()


def _measured(call: Callable[[], Any], device: str, seconds: float) -> dict[str, float]:
    """Returns the milliseconds of a call."""
    begin = time.perf_counter()
    call()
    _wait(device)
    each = max(time.perf_counter() - begin, 1e-5)
    count = max(5, min(100, int(seconds / each)))
    singles = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        _wait(device)
        singles.append(time.perf_counter() - begin)
    if device == "cpu":
        return {"single": median(singles) * 1e3}
    begin = time.perf_counter()
    for _ in range(count):
        call()
    _wait(device)
    pipelined = (time.perf_counter() - begin) / count
    host = []
    for _ in range(max(2, count // 5)):
        for _ in range(5):
            begin = time.perf_counter()
            call()
            host.append(time.perf_counter() - begin)
        _wait(device)
    return {"single": median(singles) * 1e3, "pipelined": pipelined * 1e3, "host": median(host) * 1e3}


def _kernels(call: Callable[[], Any]) -> list[tuple[str, int, float]]:
    """Returns the kernels of a call, with their number and microseconds, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        _wait("cuda")
    count: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for event in profiled.events():
        if event.device_type.name == "CUDA":
            count[event.name[:90]] += 1
            total[event.name[:90]] += event.device_time
    return [(name, count[name], round(took, 1)) for name, took in total.most_common()]


def row(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one architecture, in this process."""
    import torch

    case = Case(name, options)
    made: dict[str, Any] = {"name": name, "dtype": options.dtype, "batches": {}}
    with torch.no_grad():
        given = {batch: case.inputs(batch) for batch in options.batch}
        _wait(case.device)
        begin = time.perf_counter()
        ours = case.wrapped()
        for inputs in given.values():
            ours(**inputs)
        _wait(case.device)
        made["start"] = time.perf_counter() - begin
        report = ours.precast_report()
        made["artifact"], made["reasons"] = report["artifact"], report["reasons"]
        made["built"] = [one["attempt"].get("built") for one in report["regions"].values() if one.get("attempt")]
        if not report["artifact"]:
            made["why"] = [one["attempt"]["exception"] for one in report["regions"].values() if one.get("attempt")]
            return made
        if options.start and options.builds:
            return made
        begin = time.perf_counter()
        peer = case.peer()
        for inputs in given.values():
            for _ in range(3):
                peer(**inputs)
        _wait(case.device)
        made["peer_start"] = time.perf_counter() - begin
        if options.start:  # both compilers have filled their caches
            return made
        truth = copy.deepcopy(case.net).float() if options.dtype != "float32" else None
        for batch, inputs in given.items():
            calls = {"ours": ours, "peer": peer, "eager": case.net}
            found: dict[str, Any] = {}
            if truth is not None:
                wide = {key: one.float() if one.is_floating_point() else one for key, one in inputs.items()}
                exact = _first(truth(**wide)).double()
                found["far"] = {
                    key: float((_first(call(**inputs)).double() - exact).norm() / exact.norm())
                    for key, call in calls.items()
                }
            rounds: dict[str, list[dict[str, float]]] = {key: [] for key in calls}
            for number in range(ROUNDS):
                order = list(calls.items())
                for key, call in order[number % 3 :] + order[: number % 3]:
                    if key == "eager" and number:  # the slowest, and no contender
                        continue
                    rounds[key].append(_measured(functools.partial(call, **inputs), case.device, options.seconds))
            for kind in rounds["ours"][0]:
                found[kind] = {key: round(median(one[kind] for one in taken), 4) for key, taken in rounds.items()}
                for other in ("peer", "eager"):
                    ratios = [b[kind] / a[kind] for a, b in zip(rounds["ours"], rounds[other], strict=False)]
                    found[kind][f"ratio_{other}"] = round(median(ratios), 3)
            if options.kernels:
                found["kernels"] = {
                    key: _kernels(functools.partial(call, **inputs)) for key, call in list(calls.items())[:2]
                }
            made["batches"][str(batch)] = found
        made["answers"] = ours.precast_report()["artifact"]
    return made


def _child(name: str, options: list[str], log: Path) -> str | None:
    """Runs one architecture in a process of its own; returns the last line that it prints."""
    command = [sys.executable, __file__, name, "--row", *options]
    with log.open("w") as file:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=file, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    return lines[-1] if done.returncode == 0 and lines else None


def main() -> None:
    """Builds, measures and prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="architectures; all without")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--store", default="wrapper-store")
    parser.add_argument("--out", help="a JSON file for the rows")
    parser.add_argument("--logs", default="wrapper-logs")
    parser.add_argument("--processes", type=int, default=1, help="builds at a time")
    parser.add_argument("--seconds", type=float, default=0.15, help="of each measurement in a round")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no row is begun")
    parser.add_argument("--kernels", action="store_true", help="list the kernels of a call on a GPU")
    parser.add_argument("--builds", action="store_true", help="only build, and say who answers")
    parser.add_argument("--row", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--start", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    begun = time.monotonic()
    names = options.names or list(ARCHITECTURES)
    if options.row:
        print(json.dumps(row(names[0], options)))
        return
    kept = [
        "--device",
        options.device,
        "--dtype",
        options.dtype,
        "--store",
        options.store,
        "--seconds",
        str(options.seconds),
    ]
    kept += ["--batch", *map(str, options.batch), *(["--kernels"] if options.kernels else [])]
    kept += ["--builds"] if options.builds else []
    logs = Path(options.logs)
    logs.mkdir(exist_ok=True)

    def build(name: str) -> dict[str, Any]:
        first = json.loads(_child(name, [*kept, "--start"], logs / f"{name}.build") or "{}")
        who = f"{first.get('artifact', 0)} calls by artifacts, built in {first.get('start', 0):.0f} s"
        print(f"{name:20} {options.dtype} {who} {first.get('why') or first.get('reasons') or ''}", file=sys.stderr)
        return first

    with ThreadPoolExecutor(options.processes) as pool:
        built = dict(zip(names, pool.map(build, names), strict=True))
    print(f"built in {time.monotonic() - begun:.0f} s", file=sys.stderr)
    rows = []
    if options.builds:
        return
    for name in names:
        first = built[name]
        if time.monotonic() - begun > options.limit:
            break
        last = _child(name, kept, logs / f"{name}.row") if first.get("artifact") else None
        made = json.loads(last) if last else {"name": name, "failed": True, **first}
        made["build"], made["peer_build"] = first.get("start"), first.get("peer_start")
        rows.append(made)
        for batch, found in made.get("batches", {}).items():
            kinds = [kind for kind in ("single", "pipelined", "host") if kind in found]
            ratios = "  ".join(
                f"{kind} {found[kind]['ours']:.3f} ms, {found[kind]['ratio_peer']:.2f}" for kind in kinds
            )
            print(f"{name:20} {batch:>3}  {ratios}", file=sys.stderr)
        if "batches" not in made or not made["batches"]:
            print(f"{name:20} {made.get('why') or made.get('reasons') or 'no row'}", file=sys.stderr)
        if options.out:
            _write(Path(options.out), rows, options)


def _write(path: Path, rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    import platform
    from importlib import metadata

    import torch

    gpu = torch.cuda.get_device_name() if options.device != "cpu" else None
    names = ("torch", "transformers", "torchvision", "precast")
    known = {each.metadata["Name"] for each in metadata.distributions()}
    versions = {name: metadata.version(name) for name in names if name in known}
    machine = {"gpu": gpu, "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(), **versions}
    document = {"date": date.today().isoformat(), "command": " ".join(sys.argv), "machine": machine, "rows": rows}
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
