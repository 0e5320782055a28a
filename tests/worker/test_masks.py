"""The boolean masks of several attentions are made into numbers once each."""

from __future__ import annotations

from .support import Project

LAYERS = """
import torch

class Layer(torch.nn.Module):
    def forward(self, x, mask):
        heads = x.view(*x.shape[:2], 2, 8).transpose(1, 2)
        made = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask[:, :, :, :5])
        return made.transpose(1, 2).reshape(x.shape)

class Model(torch.nn.Module):
    def __init__(self, layers, alternates=False):
        super().__init__()
        self.alternates = alternates
        self.layers = torch.nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x, real):
        mask = real[:, None, None, :] & torch.ones(5, 5, dtype=torch.bool).tril()
        near = mask & torch.ones(5, 5, dtype=torch.bool).triu(-2)
        for index, layer in enumerate(self.layers):
            x = layer(x, near if self.alternates and index % 2 else mask)
        return x

def load():
    return Model(3)

def single():
    return Model(1)

def alternating():
    return Model(3, alternates=True)

def half():
    return Model(3).half()
"""


class MasksTest(Project):
    def captured(self, entry: str, dtype: str) -> list[dict]:
        inputs = [("x", dtype, [2, 5, 16]), ("real", "bool", [2, 5])]
        return self.checked(self.open(LAYERS, entry), inputs=inputs, regions=["layers.*"])["segments"]

    def test_layers_take_the_numbers_and_one_segment_makes_them(self) -> None:
        for entry, dtype in (("load", "float32"), ("half", "float16")):
            glue, layer = self.captured(entry, dtype)
            self.assertEqual([made["dtype"] for made in layer["inputs"]], [dtype, dtype])
            self.assertEqual([made["shape"] for made in glue["outputs"]], [[2, 1, 5, 5]])
            self.assertIn("aten.where", glue["graph"])
            self.assertNotIn("aten.where", layer["graph"])

    def test_layers_of_different_masks_stay_one_segment(self) -> None:
        glue, layer = self.captured("alternating", "float32")
        self.assertEqual([made["dtype"] for made in layer["inputs"]], ["float32", "float32"])
        self.assertEqual(len(glue["outputs"]), 2)

    def test_a_mask_of_one_attention_is_left_to_the_compiler(self) -> None:
        for segment in self.captured("single", "float32"):
            self.assertNotIn("aten.where", segment["graph"])
