"""Weight sets: alignment, order, ties, determinism."""

from __future__ import annotations

import json

from .support import Project, model, part

TIED = model(
    "return x",
    """\
self.embed = torch.nn.Embedding(8, 4)
self.head = torch.nn.Linear(4, 8, bias=False)
self.head.weight = self.embed.weight
self.norm = torch.nn.LayerNorm(3)
self.register_buffer("positions", torch.arange(5), persistent=False)
self.register_buffer("empty", torch.empty(0))
self.register_buffer("empty2", torch.empty(0))
self.table = torch.ones(2, dtype=torch.bool)""",
)


class WeightsTest(Project):
    def test_every_tensor_once_aligned_without_holes(self) -> None:
        opened = self.open(TIED)
        answer = part("weights").write(opened, self.out)
        self.assertEqual(answer["aliases"], {"head.weight": "embed.weight"})
        data = (self.out / "weights.safetensors").read_bytes()
        part("weights").write(self.open(TIED), self.out)
        self.assertEqual(data, (self.out / "weights.safetensors").read_bytes(), "other bytes every time")
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        self.assertEqual((8 + length) % 64, 0)
        self.assertEqual(
            set(header), {"embed.weight", "norm.weight", "norm.bias", "positions", "empty", "empty2", "table"}
        )
        end = 0
        for entry in header.values():
            begin, stop = entry["data_offsets"]
            self.assertEqual(begin, end)
            end = stop
        self.assertEqual(8 + length + end, len(data))
        held = part("tensors").read(self.out / "weights.safetensors")
        self.assertEqual(held["positions"].tolist(), [0, 1, 2, 3, 4])
        self.assertTrue(bool((held["embed.weight"] == opened.model.embed.weight).all()))
        self.assertEqual(str(held["table"].dtype), "torch.bool")

    def test_a_model_without_tensors_has_no_file_and_a_tensor_without_data_is_named(self) -> None:
        text = "import torch\n\ndef load():\n    return torch.nn."
        opened = self.open(f"{text}ReLU()\n")
        self.assertEqual(part("weights").write(opened, self.out), {"file": None, "aliases": {}})
        failure = self.fails("entry_call", self.open, f"{text}Linear(2, 2, device='meta')\n")
        self.assertIn("`weight`", failure.message)

    def test_every_tensor_of_any_file_is_aligned_to_its_elements(self) -> None:
        import torch
        from safetensors.torch import load_file

        tensors, path = part("tensors"), self.out / "any.safetensors"
        dtypes = [getattr(torch, name) for name in tensors.DTYPES]
        generator = torch.Generator().manual_seed(0)
        for _ in range(50):
            given = {
                name: torch.randint(0, 2, (int(rows), int(columns)), generator=generator).to(dtypes[int(kind) % 10])
                for name in ["b", "a", "weight", 'é"', "a.b", "Z", "0", "zz"]
                for rows, columns, kind in [torch.randint(0, 33, (3,), generator=generator)]
            }
            tensors.write(path, given)
            data = path.read_bytes()
            length = int.from_bytes(data[:8], "little")
            for name, entry in json.loads(data[8 : 8 + length]).items():
                begin, end = entry["data_offsets"]
                aligned = 64 if (end - begin) % 64 == 0 else given[name].element_size()
                self.assertEqual((8 + length + begin) % aligned, 0, name)
            held = load_file(path)
            self.assertEqual(held.keys(), given.keys())
            for name, tensor in given.items():
                self.assertTrue(torch.equal(held[name], tensor) and held[name].dtype == tensor.dtype, name)
