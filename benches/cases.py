"""The models, and their `precast.toml`."""

import tomllib
from collections.abc import Iterator
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
    """Devices on which peers that can get inductor's `freezing`. It folds batch norms, and on a CPU packs filters and
    matrices; small ones it makes slower."""
    freezing: tuple[str, ...] = ()
    stem: str = "precast"
    """The name of its specs, before `.toml` and `.cuda.toml`."""

    def spec(self, device: str) -> Path:
        return ROOT / self.folder / (f"{self.stem}.cuda.toml" if device == "cuda" else f"{self.stem}.toml")

    def read(self, device: str) -> "Spec":
        return Spec(self.spec(device), self.module)

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
    """One module of a spec; of variants with one name, the first."""

    def __init__(self, file: Path, module: str) -> None:
        self.file = file
        spec = tomllib.loads(file.read_text())
        self.model: str = spec["model"]["name"]
        self.entry: str = spec["model"]["entry"]
        self.module: dict[str, Any] = next(m for m in spec["module"] if m["name"] == module)
        self.inputs: dict[str, dict[str, Any]] = self.module["inputs"]

    @property
    def buckets(self) -> list[Sizes]:
        return sorted(buckets(self.module["buckets"]), key=lambda sizes: list(sizes.values()))

    def load(self) -> Any:
        """Returns the submodule that the spec names, on the CPU. Imports the model's file."""
        import importlib
        import sys

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


def buckets(table: dict[str, Any]) -> Iterator[Sizes]:
    """Returns the points of a `[module.buckets]` table."""
    if "points" in table:
        yield from table["points"]
    else:
        for values in product(*table.values()):
            yield dict(zip(table, values, strict=True))


def label(sizes: Sizes) -> str:
    return " ".join(f"{name}={size}" for name, size in sorted(sizes.items()))


def variant(case: Case, device: str, folder: Path, name: str, points: list[Sizes]) -> Path:
    """Copies a case's spec into `folder` under another model name and with other buckets; returns the new file."""
    spec = case.spec(device)
    folder.mkdir(parents=True, exist_ok=True)
    for file in spec.parent.glob("*.py"):
        (folder / file.name).write_text(file.read_text())
    if (weights := spec.parent / "weights").is_dir() and not (folder / "weights").exists():
        (folder / "weights").symlink_to(weights)
    lines, inside = [], False
    for line in spec.read_text().splitlines():
        if line.startswith("["):
            inside = line.startswith("[module.buckets]")
            if inside:
                rows = ", ".join(
                    "{ " + ", ".join(f"{dim} = {size}" for dim, size in sizes.items()) + " }" for sizes in points
                )
                lines += [line, f"points = [{rows}]"]
                continue
        if not inside:
            lines.append(f'name = "{name}"' if line.startswith("name") and lines[-1] == "[model]" else line)
    file = folder / spec.name
    file.write_text("\n".join(lines) + "\n")
    return file
