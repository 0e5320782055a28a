"""Modules that ask something of their inputs' values: indices as they are given and computed, divisors, assertions."""

from __future__ import annotations

import torch

ROWS = 50


class Values(torch.nn.Module):
    """Large enough for loops that several threads share."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(ROWS, 32)
        self.places = torch.nn.Embedding(20, 32)
        self.norm = torch.nn.LayerNorm(32)

    def lookup(self, ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Takes ids of rows, and places that begin behind two rows for padding."""
        return self.norm(self.table(ids) + self.places(at + 2))

    def counted(self, ids: torch.Tensor) -> torch.Tensor:
        """Takes negative ids too, which count from the end."""
        return self.norm(self.table.weight[ids])

    def computed(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Makes indices of floats, and uses them in every way that has a code of its own."""
        ids = ((x + 6) * 3).to(torch.int64)
        rows = self.norm(self.table(ids))
        counted = self.table.weight[ids].sum(1)
        first = torch.index_select(self.table.weight, 0, ids[0, :1])
        padded = torch.cat([rows, self.table.weight[ids[:, :4]]], 1)
        chosen = torch.gather(self.table.weight, 0, ids[:, :32])
        added = torch.zeros(ROWS, 32).index_add(0, ids[0], rows[0])
        return rows, counted, first, padded, chosen, added

    def divided(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Divides integers by `b - 5`."""
        b = b - 5
        small = (a.to(torch.int32) // b.to(torch.int32)).to(torch.int64)
        return a // b, a % b, torch.div(a, b, rounding_mode="trunc"), small

    def asserted(self, x: torch.Tensor) -> torch.Tensor:
        """Refuses numbers that are not above -100."""
        torch.ops.aten._assert_async.msg((x > -100).all(), "x must be above -100")
        return x * 2 + 1


def load() -> Values:
    """Returns the model."""
    torch.manual_seed(3)
    return Values()
