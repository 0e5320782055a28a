"""The models, and their `precast.toml`."""

import importlib
import sys
import tomllib
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Sizes = dict[str, int]


@dataclass(frozen=True)
class Case:
    """A module of a model. `sizes` are the buckets that are measured: all of the spec's, unless named here."""

    name: str
    folder: str
    module: str
    sizes: tuple[tuple[int, ...], ...] | None = None
    freezing: tuple[str, ...] = ()
    """Devices on which peers that can get inductor's `freezing`. It folds batch norms, and on a CPU packs filters and
    matrices; small ones it makes slower."""
    stem: str = "precast"
    """The name of its specs, before `.toml` and `.cuda.toml`."""

    def spec(self, device: str) -> Path:
        return ROOT / self.folder / (f"{self.stem}.cuda.toml" if device == "cuda" else f"{self.stem}.toml")

    def read(self, device: str) -> "Spec":
        return Spec(self.spec(device), self.module)

    def peer(self, way: str, device: str) -> list[str]:
        """Returns the arguments of `peer.py` for one way."""
        frozen = device in self.freezing and way in ("compile", "reduce-overhead", "max-autotune", "aoti")
        freezing = ["--freezing"] if frozen else []
        return [way, str(self.spec(device)), self.module, "--device", device, *freezing]

    def measured(self, device: str) -> list[Sizes]:
        """Returns the buckets that are measured, smallest first."""
        buckets = self.read(device).buckets
        return [sizes for sizes in buckets if self.sizes is None or tuple(sizes.values()) in self.sizes]


CASES = {
    case.name: case
    for case in (
        Case("mlp", "benches/models/mlp", "forward"),
        Case("minilm", "examples/minilm", "encode", sizes=((1, 32), (8, 128)), freezing=("cpu",)),
        Case("block", "examples/blocks", "forward", stem="one"),
        Case("blocks", "examples/blocks", "forward", sizes=((1, 32), (4, 128), (1, 64), (8, 512))),
        Case("resnet", "benches/models/resnet", "classify", freezing=("cpu", "cuda")),
        Case("llama", "benches/models/llama", "prefill", freezing=("cpu",)),
        Case("vlm", "examples/vlm", "answer"),
    )
}


class Spec:
    """One module of a spec, by its name or place; of variants with one name, the first."""

    def __init__(self, file: Path, module: str | int) -> None:
        self.file = file
        spec = tomllib.loads(file.read_text())
        self.model: str = spec["model"]["name"]
        self.entry: str = spec["model"]["entry"]
        self.device: str = spec.get("target", {}).get("device", "cpu")
        found = (each for at, each in enumerate(spec["module"]) if module in (at, each["name"]))
        self.module: dict[str, Any] = next(found)
        self.inputs: dict[str, dict[str, Any]] = self.module["inputs"]

    @staticmethod
    def all(file: Path) -> "list[Spec]":
        """Returns all modules of a spec."""
        return [Spec(file, at) for at in range(len(tomllib.loads(file.read_text())["module"]))]

    @property
    def buckets(self) -> list[Sizes]:
        """Returns the points of its `[module.buckets]`, smallest first; a module without any has one, without sizes."""
        table = self.module.get("buckets", {})
        points = table.get("points") or [dict(zip(table, sizes, strict=True)) for sizes in product(*table.values())]
        return sorted(points, key=lambda sizes: list(sizes.values()))

    def load(self) -> Any:
        """Returns the submodule that the spec names, on the CPU. Imports the model's file."""
        sys.path.insert(0, str(self.file.parent))
        name, _, entry = self.entry.partition(":")
        model = getattr(importlib.import_module(name), entry)()
        path = self.module.get("path", "")
        return model.get_submodule(path) if path else model

    def tensors(self, sizes: Sizes, device: str) -> list[Any]:
        """Returns inputs of these sizes, the same for every caller."""
        import torch

        random = torch.Generator().manual_seed(0)
        made = []
        for spec in self.inputs.values():
            shape = [sizes[size] if isinstance(size, str) else size for size in spec["shape"]]
            dtype = getattr(torch, spec["dtype"])
            if dtype.is_floating_point:
                tensor = torch.randn(shape, generator=random).to(dtype)
            elif dtype is torch.bool:
                tensor = torch.ones(shape, dtype=dtype)
            else:
                low, high = spec.get("range", [0, 1])
                tensor = torch.randint(low, max(high, low + 1), shape, generator=random, dtype=dtype)
            made.append(tensor.to(device))
        return made


def label(sizes: Sizes) -> str:
    return " ".join(f"{name}={size}" for name, size in sorted(sizes.items()))
