"""Leaks of padding in the graph: operators that are wrong for some values only, and harmless ones."""

from __future__ import annotations

import itertools
import re
from typing import Any

from .support import Project, Quiet, part, spec

# Inputs, all padded with 0: float32 `x` [3, n, 4]; `mask` of 0 and 1, `ids` in 0..30, and boolean `keep`, [3, n] each.
MODEL = """
import math
import torch
from torch.nn import functional as F

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(30, 4)
        self.linear = torch.nn.Linear(4, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.conv = torch.nn.Conv1d(4, 4, 3, padding=1)
        self.valid = torch.nn.Conv1d(4, 4, 3)
        self.point = torch.nn.Conv1d(4, 4, 1)
        self.up = torch.nn.ConvTranspose1d(4, 4, 3)
        self.gru = torch.nn.GRU(4, 4, batch_first=True)
        self.both = torch.nn.GRU(4, 4, batch_first=True, bidirectional=True)
        self.register_buffer("causal", torch.ones(16, 16).tril().bool())

    def forward(self, x, mask, ids, keep):
        mask, found = mask.float(), []
        {body}
        return found

def load():
    torch.manual_seed(0)
    return Model()
"""
SCORES = "s = self.linear(x) @ self.linear(x).transpose(1, 2)\n        "

# Bodies of `forward`. The padding of `n` gets into a valid result for some values.
WRONG = [
    "return x.amax(1)",
    "return x.max(1).values",
    "return x.argmax(1)",
    "return x.amin(1)",
    "return x.mul(mask[:, :, None]).amax(1)",
    "return F.relu(x).amin(1)",
    "return x.masked_fill(~keep[:, :, None], -100.0).amax(1)",
    "return x.sort(1).values[:, 0]",
    "return x.sort(1, descending=True).values[:, 0]",
    "return x.topk(1, 1).values",
    "return x.kthvalue(1, 1).values",
    "return x.median(1).values",
    "return x.mean(1)",
    "return x.var(1)",
    "return (x.mean(1) > 100).float()",
    "return (x.sigmoid().sum(1) > 100).float()",
    "return (self.linear(x).sum(1) > 1e6).float()",
    "return x.add(2).prod(1)",
    "return x.softmax(1)",
    "return x.log_softmax(1)",
    "return x.logsumexp(1)",
    "return (x > -50).any(1)",
    "return (x.abs() > 1e-6).all(1)",
    "return (x <= 0).float().sum(1).clamp(max=1)",
    "return x[:, -1]",
    "return x[:, -2:].amax(1)",
    "return x.roll(1, 1)",
    "return x.add(1).flip(1).cumsum(1).flip(1)",
    "return x.flip(1).cummax(1).values.flip(1)",
    "return self.conv(self.conv(x.transpose(1, 2)))",
    "return self.conv(x.add(1).transpose(1, 2))",
    "return self.up(self.linear(x).transpose(1, 2))",
    "return F.max_pool1d(x.transpose(1, 2), 3, 1, 1)",
    "return F.avg_pool1d(self.linear(x).transpose(1, 2), 3, 1, 1)",
    "return F.adaptive_avg_pool1d(x.transpose(1, 2), 1)",
    "return F.adaptive_max_pool1d(x.transpose(1, 2), 1)",
    "return F.interpolate(x.transpose(1, 2), scale_factor=2, mode='linear')",
    "return F.pad(x, (0, 0, 0, 1), value=5.0)",
    "return F.pad(x.transpose(1, 2), (1, 1), mode='replicate')",
    "return F.group_norm(x.transpose(1, 2), 2)",
    "return F.instance_norm(x.transpose(1, 2))",
    "return F.normalize(self.linear(x), dim=1)",
    "return F.cosine_similarity(self.linear(x), self.linear(x) + 1, dim=1)",
    "return self.gru(x)[1]",
    "return self.both(x)[0]",
    "return F.scaled_dot_product_attention(x, x, x)",
    SCORES + "return s.softmax(-1) @ x",
    SCORES + "return (s + (1 - mask[:, None, :]) * -5.0).softmax(-1) @ x",
    SCORES + "return (s - 10000.0).softmax(-1) @ x",
    SCORES + "return torch.where(s > 0, s, -math.inf).softmax(-1) @ x",
    "return self.embed(ids).sum(1)",
    "return self.embed(ids).amax(1)",
    "return torch.zeros(3, 30).scatter(1, ids, 1.0)",
    "return torch.zeros(3, 30).scatter_add(1, ids, torch.ones_like(mask))",
    "return torch.einsum('bnh,bnk->bhk', self.linear(x), self.linear(x))",
    "return self.linear(x).transpose(1, 2) @ self.linear(x)",
    "return F.mse_loss(x, x.sigmoid())",
    "return torch.linalg.vector_norm(x - 1, dim=1)",
    "return torch.fft.rfft(x, dim=1).abs()",
    "return x.view(3, -1).amax(1)",
    "return torch.cat([x, x + 1], 1).amax(1)",
]

# The padding never gets into a valid result.
HARMLESS = [
    "return self.norm(self.linear(x)).relu()",
    "return x.sum(1)",
    "return (x * 3).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)",
    "return (self.linear(x) * mask[:, :, None]).sum(1)",
    "return F.relu(x).amax(1)",
    "return ids.amax(1)",
    "return x.masked_fill(~keep[:, :, None], -math.inf).amax(1)",
    "return x.masked_fill(~keep[:, :, None], torch.finfo(x.dtype).min).max(1).values",
    "return x.masked_fill(mask[:, :, None] == 0, math.inf).sort(1).values",
    "return x.masked_fill(mask[:, :, None] == 0, 1.0).prod(1)",
    "return ((x > 100) & keep[:, :, None]).any(1)",
    "return x.cumsum(1), x.cummax(1).values",
    "return x.flip(1).cumsum(1).flip(1)",
    "return self.conv(x.transpose(1, 2))",
    "return self.valid(self.valid(x.add(1).transpose(1, 2)))",
    "return self.point(self.linear(x).transpose(1, 2))",
    "return self.gru(x)[0]",
    "return self.linear(x)[:, 0]",
    "return self.linear(x)[:, :-1]",
    "y = torch.cat([x[:, :1] * 0 + 1, self.linear(x)], 1)\n        return y[:, -x.shape[1] :]",
    "return F.scaled_dot_product_attention(x, x, x, is_causal=True)",
    "return F.scaled_dot_product_attention(x, x, x, attn_mask=keep[:, None, :])",
    "n = x.shape[1]\n        return F.scaled_dot_product_attention(x, x, x, attn_mask=self.causal[:n, :n])",
    SCORES + "return (s + (1 - mask[:, None, :]) * -10000.0).softmax(-1) @ x",
    SCORES + "return (s / 2 + (1 - mask[:, None, :]) * torch.finfo(s.dtype).min).softmax(-1) @ x",
    SCORES + "return s.masked_fill(~keep[:, None, :], -math.inf).softmax(-1) @ x",
    SCORES + "return s.masked_fill(torch.ones_like(s).triu(1).bool(), -math.inf).softmax(-1) @ x",
    SCORES + "n = x.shape[1]\n        at = torch.arange(n)\n        "
    "both = (at[None, :] <= at[:, None])[None] & keep[:, None, :]\n        "
    "return s.masked_fill(~both, -10000.0).softmax(-1) @ x",
    SCORES + "return s.masked_fill(~keep[:, None, :], -math.inf).logsumexp(-1)",
    "h = self.linear(x).view(3, -1, 2, 2).transpose(1, 2)\n        a = h @ h.transpose(-1, -2) / 2\n        "
    "a = a.masked_fill(mask[:, None, None, :] == 0, -1e9).softmax(-1)\n        "
    "return (a @ h).transpose(1, 2).reshape(3, -1, 4)",
    "return torch.einsum('bnh,bnk->bhk', self.linear(x) * mask[:, :, None], self.linear(x))",
    "n = x.shape[1]\n        w = torch.ones(n, n).tril()\n        return (w / w.sum(1, keepdim=True)) @ x",
    "return (self.linear(x) * mask[:, :, None]).view(3, -1).sum(1)",
    "y, both = torch.cat([x, x * 2], 1), torch.cat([keep, keep], 1)[:, :, None]\n        "
    "return y.masked_fill(~both, -math.inf).amax(1)",
    "return torch.zeros(3, 30).scatter_add(1, ids, mask)",
    "return F.pad(x, (0, 0, 1, 1)).sum(1)",
]

INPUTS: list[tuple[Any, ...]] = [
    ("x", "float32", [3, 8, 4], [None, "n", None]),
    ("mask", "int64", [3, 8], [None, "n"]),
    ("ids", "int64", [3, 8], [None, "n"]),
    ("keep", "bool", [3, 8], [None, "n"]),
]


SIZES = {"n": 8}


def source(bodies: list[str]) -> tuple[str, list[range]]:
    """Returns a model that runs all bodies, and the lines of each."""
    changed = [re.sub(r"return (.*)", r"found.append((\1))", body) for body in bodies]
    text = MODEL.format(body="\n        ".join(changed))
    first = text[: text.index("found = ")].count("\n") + 2
    ends = list(itertools.accumulate((body.count("\n") + 1 for body in changed), initial=first))
    return text, [range(*pair) for pair in itertools.pairwise(ends)]


class LeaksTest(Project):
    def request(self) -> list[dict[str, Any]]:
        inputs = [spec(*one) for one in INPUTS]
        inputs[1]["range"], inputs[2]["range"], inputs[3]["pad"] = [0, 2], [0, 30], False
        return inputs

    def leaks(self, text: str) -> list[Any]:
        opened, inputs = self.open(text), self.request()
        module = {"name": "m", "path": "", "method": "forward", "regions": [], "inputs": inputs}
        traced = part("capture").trace(opened, module, SIZES, Quiet())
        return part("sizes.padding_graph").leaks(traced.graph, inputs, SIZES, traced.ranges)

    def test_what_is_wrong_for_some_values_is_found(self) -> None:
        self.assertGreaterEqual(len(WRONG), 30)
        text, places = source(WRONG)
        found = {int(leak.location(self.root).rpartition(":")[2]) for leak in self.leaks(text)}
        for body, lines in zip(WRONG, places, strict=True):
            self.assertTrue(found & set(lines), f"no leak was found: {body}")

    def test_what_is_harmless_is_padded(self) -> None:
        self.assertGreaterEqual(len(HARMLESS), 10)
        # Two convolutions need five positions: a module with them does not run at small sizes.
        (long,) = (body for body in HARMLESS if "self.valid(self.valid(" in body)
        for bodies in ([body for body in HARMLESS if body != long], [long]):
            captured = self.capture(self.open(source(bodies)[0]), specs=self.request(), sizes=SIZES)
            self.assertEqual(captured["exact"], {})
            skipped = [point for point in captured["receipt"]["padding"]["points"] if "skipped" in point]
            self.assertEqual(bool(skipped), bodies == [long], skipped)

    def test_a_leak_says_what_is_read_and_where(self) -> None:
        (leak,) = self.leaks(source(["y = x * 2\n        return y.amax(1)"])[0])
        self.assertRegex(
            leak.reason(self.root),
            r"^`amax` reads the padding of `n`, which holds 0 and not -inf \(project_\d+\.py:23\)$",
        )
        self.assertEqual(leak.fix, "fill it with -inf before, by a mask that is an input")
        (leak,) = self.leaks(source(["return self.linear(x).mean(1)"])[0])
        self.assertEqual(leak.why, "`mean` reads the padding of `n`, which holds computed values")
