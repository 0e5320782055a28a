"""`ShapeStabilizer`: buckets, padding, marks, crops and counters."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from precast.wrapper.stabilizer import ShapeStabilizer
from torch import Tensor, nn

BUCKETS = {"batch": [1, 4], "seq": [8, 16]}
SHAPES = {"ids": ["batch", "seq"], "mask": ["batch", "seq"]}


class Encoder(nn.Module):
    """Pools over the tokens that the mask has; padded tokens change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Any]:
        tokens = self.embedding(ids) * mask[..., None]
        return {"tokens": tokens, "pooled": (tokens.sum(1) / mask.sum(1, keepdim=True).clamp(min=1),)}


OUTPUTS = {"tokens": ["batch", "seq", None], "pooled[0]": ["batch", None]}


def batch(rows: int, tokens: int) -> dict[str, Tensor]:
    return {"ids": torch.randint(1, 50, (rows, tokens)), "mask": torch.ones(rows, tokens, dtype=torch.int64)}


def test_answers_are_those_without_padding() -> None:
    stabilizer = ShapeStabilizer(BUCKETS, SHAPES, pad={"ids": 7}, outputs=OUTPUTS)
    net = Encoder().eval()
    for rows, tokens in [(1, 8), (1, 3), (2, 8), (3, 13), (4, 16)]:
        given = batch(rows, tokens)
        stable = stabilizer.stabilize(given)
        assert all(stable.batch["ids"].shape[axis] in BUCKETS[dim] for axis, dim in enumerate(BUCKETS))
        answer, expected = stable.crop(net(**stable.batch)), net(**given)
        assert torch.allclose(answer["tokens"], expected["tokens"])
        assert torch.allclose(answer["pooled"][0], expected["pooled"][0])


def test_padding_has_its_value_and_a_mask() -> None:
    stable = ShapeStabilizer(BUCKETS, SHAPES, pad={"ids": 7}).stabilize(batch(3, 5))
    assert stable.sizes == {"batch": 3, "seq": 5} and stable.bucket == {"batch": 4, "seq": 8} and stable.padded
    assert (stable.batch["ids"][3:] == 7).all() and (stable.batch["ids"][:, 5:] == 7).all()
    assert (stable.batch["mask"][:, 5:] == 0).all()
    assert stable.masks["seq"].tolist() == [True] * 5 + [False] * 3
    assert stable.masks["batch"].tolist() == [True] * 3 + [False]


def test_the_form_of_a_batch_stays() -> None:
    Pair = namedtuple("Pair", ["ids", "mask"])
    stabilizer = ShapeStabilizer(BUCKETS, SHAPES)
    ids, mask = batch(2, 5).values()
    for given in [(ids, mask), [ids, mask], Pair(ids, mask)]:
        made = stabilizer.stabilize(given).batch
        assert type(made) is type(given) and made[0].shape == made[1].shape == (4, 8)
    assert stabilizer.stabilize(ids).batch.shape == (4, 8)
    extra = {**batch(2, 5), "labels": torch.ones(3), "flag": True}
    made = stabilizer.stabilize(extra).batch
    assert made["labels"] is extra["labels"] and made["flag"] is True


def test_a_batch_of_a_bucket_or_that_none_covers_is_not_copied() -> None:
    stabilizer = ShapeStabilizer(BUCKETS, SHAPES)
    for sizes in ((2, 17), (4, 16)):
        given = batch(*sizes)
        stable = stabilizer.stabilize(given)
        assert not stable.padded and stable.batch["ids"] is given["ids"]
    assert stabilizer.stats()["not covered"] == 1
    answer = {"x": torch.ones(4, 16)}
    assert stable.crop(answer) is answer


def test_recompiles_are_counted() -> None:
    stabilizer = ShapeStabilizer(BUCKETS, SHAPES)
    for tokens in range(1, 17):
        stabilizer.stabilize(batch(2, tokens))
    assert stabilizer.stats() == {"calls": 16, "padded": 16, "not covered": 0, "shapes": 16, "recompiles": 1}


@pytest.mark.parametrize(
    ("stabilizer", "dynamic", "recompiles"),
    [
        (ShapeStabilizer(BUCKETS, SHAPES), False, 1),
        (ShapeStabilizer({"batch": [4]}, SHAPES, dynamic={"seq": (2, 16)}), None, 0),  # marked as dynamic
    ],
)
def test_torch_compile_sees_as_many_shapes(stabilizer: ShapeStabilizer, dynamic: bool | None, recompiles: int) -> None:
    compiles: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiles.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(Encoder().eval(), backend=backend, dynamic=dynamic)
    with torch.no_grad():
        for tokens in (3, 5, 8, 9, 12, 16):
            given = batch(2, tokens)
            compiled(**stabilizer.stabilize(given).batch)
    assert len(compiles) - 1 == stabilizer.stats()["recompiles"] == recompiles
    assert not hasattr(given["ids"], "_dynamo_dynamic_indices"), "the caller's tensor has no marks"


def test_a_crop_needs_the_dimensions_of_the_outputs() -> None:
    stable = ShapeStabilizer(BUCKETS, SHAPES).stabilize(batch(3, 5))
    output = torch.ones(4, 8, 2)
    with pytest.raises(ValueError, match="pass `outputs`"):
        stable.crop(output)
    assert stable.crop(output, ["batch", "seq", None]).shape == (3, 5, 2)
    assert stable.crop((output, [output]), ["batch"])[1][0].shape == (3, 8, 2)
    with pytest.raises(ValueError, match="no `seq` at axis 2"):
        stable.crop(output, ["batch", None, "seq"])
    with pytest.raises(ValueError, match="no dimensions for `b`"):
        stable.crop({"a": output, "b": output}, {"a": ["batch"]})


@pytest.mark.parametrize(
    ("buckets", "more", "given", "message"),
    [
        (BUCKETS, {}, {"ids": torch.ones(2, 3), "mask": torch.ones(2, 4)}, "`seq` is 3 in input `ids` and 4 in input"),
        (BUCKETS, {}, {"ids": torch.ones(2)}, "input `ids` has 1 axes, and `shapes` has 2"),
        ({"batch": [1], "time": [2]}, {}, None, "no dimension `time`"),
        ({"batch": []}, {}, None, "not a list of sizes"),
        ({"batch": [0]}, {}, None, "not a list of sizes"),
        (BUCKETS, {"pad": {"image": 0}}, None, "`pad` has a value for `image`"),
    ],
)
def test_buckets_and_batches_that_contradict_are_refused(buckets: Any, more: Any, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShapeStabilizer(buckets, SHAPES, **more).stabilize(given)
