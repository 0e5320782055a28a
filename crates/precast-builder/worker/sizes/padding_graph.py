"""Finds operators that read the padding of a bucketed dimension, in the captured graph.

The samples of `padding` are some values of many: a maximum over zeros as padding is wrong only where all valid values
are negative. This walk needs no values. It goes through the graph once for each bucketed dimension, and keeps for each
tensor the axes that carry the dimension, and the content of their padded part.

Content of a padded part, from the most to the least specific:

| content | meaning | example |
|---|---|---|
| `constant` | one known number | an input: its `pad`; a mask of zeros; their products |
| `far` | any number plus a huge constant | scores with `finfo.min` added where the mask is zero |
| `other` | a known operator computed it, and it is no constant | `linear` of anything: the bias is there |
| `unknown` | not known to the walk | the result of an operator that the table does not have |

An axis may carry the dimension and others: `view` merges axes and splits them again. So a mark has the number of
positions outside (`before`) and inside (`after`) of the dimension within the axis. If two axes of a tensor carry the
dimension (attention scores), the content of one holds for the valid positions of the other. So a causal mask, which is
constant above the diagonal, masks the padded keys of each valid query.

Constants of the graph are evaluated where they meet a marked axis.

`padding_rules` and `padding_moves` have the operators. An operator over a padded axis is a `Leak` where the padding
changes a valid result: its content is known and is not the identity of the operator. With `unknown` content there is no
leak: the samples decide. Not found: a size of the bucket as a number in the code (`x.sum(1) / x.shape[1]`), which every
sample shows.
"""

from __future__ import annotations

from typing import Any

from ..graph.flat import Flat
from .padding_rules import apply
from .padding_walk import Leak, Walk


def leaks(flat: Flat, specs: list[dict[str, Any]], sizes: dict[str, int], ranges: list[Any]) -> list[Leak]:
    """Returns the leaks of each bucketed dimension; `ranges` are the bounds of each input's values."""
    found = []
    for dim, size in sizes.items():
        if size > 1:
            found += Walk(flat, specs, dim, size, ranges).run(apply)
    return found
