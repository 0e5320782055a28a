"""Models without faults: nothing above `low` is found, and their sizes are free."""

from __future__ import annotations

from .support import HEAD, Checks

MODELS = """
class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        return F.normalize(self.head(self.drop(F.adaptive_avg_pool2d(x, 1).flatten(1))), dim=-1)

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.skip = True

    def forward(self, x):
        for block in self.blocks:
            y = torch.relu(block(x))
            x = x + y if self.skip else y
        return x

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x, mask):
        b, t, w = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 2, w // 2).permute(2, 0, 3, 1, 4).unbind(0)
        bias = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, float("-inf"))[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(y.transpose(1, 2).reshape(b, t, w))

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.GRU(4, 4, batch_first=True)

    def forward(self, x):
        y, last = self.lstm(x)
        return {"y": y, "last": last}

class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(10, 4), nn.Embedding(64, 4)
        self.register_buffer("positions", torch.arange(64))

    def forward(self, ids):
        return self.words(ids) + self.places(self.positions[: ids.shape[1]])

class Config:
    def __init__(self):
        self.scale, self.layers = 2.0, 3

class Configured(nn.Module):
    def __init__(self):
        super().__init__()
        self.config, self.linear = Config(), nn.Linear(4, 4)

    def forward(self, x):
        outputs = []
        for _ in range(self.config.layers):
            x = self.linear(x) * self.config.scale
            outputs.append(x)
        return torch.stack(outputs)

class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, mask=None):
        x = self.linear(x)
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0.0)
        return x

class Cast(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4).to(torch.bfloat16)

    def forward(self, x):
        y = self.linear(x.to(torch.bfloat16)).float()
        top = torch.topk(y, 2, dim=-1)
        return torch.where(y > top.values[..., -1:], y, torch.zeros_like(y)), top.indices
"""

X = ("x", "float32", ["batch", 4])
SEQ = ("x", "float32", ["batch", "seq", 4])
MASK = ("mask", "bool", ["batch", "seq"])
CLEAN = {
    "Convolutions": [("x", "float32", ["batch", 3, 8, 8])],
    "Residual": [X],
    "Attention": [SEQ, MASK],
    "Recurrent": [("x", "float32", ["batch", 6, 4])],
    "Embedding": [("ids", "int64", ["batch", "seq"])],
    "Configured": [X],
    "Optional": [SEQ, MASK],
    "Cast": [X],
}
SIZES = {"batch": 3, "seq": 5}


class Clean(Checks):
    def test_nothing_above_low(self) -> None:
        for name, inputs in CLEAN.items():
            with self.subTest(name):
                opened = self.open(f"{HEAD}{MODELS}\ndef load():\n    return {name}().eval()\n")
                dims = [[one if isinstance(one, str) else None for one in shape] for _, _, shape in inputs]
                given = [
                    (field, dtype, [SIZES.get(one, one) for one in shape], dim)
                    for (field, dtype, shape), dim in zip(inputs, dims, strict=True)
                ]
                used = {one for dim in dims for one in dim if one}
                answer = self.check(opened, given, sizes={dim: SIZES[dim] for dim in used})
                self.assertEqual([one for one in answer["findings"] if one["severity"] != "low"], [])
                self.assertTrue(answer["captured"])
                self.assertEqual(set(answer["dynamic"]), used)
                self.assertTrue(all(answer["dynamic"].values()), answer["dynamic"])
                self.assertEqual(answer["artifacts"], 1)
