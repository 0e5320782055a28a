"""Loading and calling: tensors in and out, nested values, sizes, and what is printed."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import precast
import pytest
import torch
from conftest import python
from model.model import load as eager

Run = Callable[[str], str]

IDS = torch.arange(12).view(3, 4)
MASK = torch.ones(3, 4, dtype=torch.int64)


def test_importing_the_package_imports_no_torch_and_takes_little_time() -> None:
    code = "import sys, precast; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert python(code).split() == ["False", "False"]


def test_tensors_of_torch_and_arrays_of_numpy_give_the_same_answers(model: precast.Model) -> None:
    ours = model.encode(IDS, MASK)
    assert isinstance(ours, torch.Tensor)
    with torch.no_grad():
        torch.testing.assert_close(ours, eager().encode(IDS, MASK))
    array = model.encode(IDS.numpy(), MASK.numpy())
    assert isinstance(array, np.ndarray)
    np.testing.assert_array_equal(array, ours.numpy())
    # A tensor of torch decides.
    assert isinstance(model.encode(IDS.numpy(), mask=MASK), torch.Tensor)
    # Classes derived from those of the libraries.
    derived = IDS.numpy().view(np.recarray), MASK.as_subclass(torch.nn.Parameter)
    np.testing.assert_array_equal(model.encode(derived[0], MASK.numpy()), array)
    assert torch.equal(model.encode(IDS, derived[1]), ours)
    frozen = IDS.numpy()
    frozen.flags.writeable = False
    np.testing.assert_array_equal(model.encode(frozen, MASK.numpy()), array)


def test_arrays_of_numpy_in_a_process_without_torch(in_process: Run) -> None:
    in_process(
        "import sys, numpy\n"
        "ids = numpy.arange(12).reshape(3, 4)\n"
        "one, other = model.encode(ids, numpy.ones_like(ids)), model.encode(mask=numpy.ones_like(ids), ids=ids)\n"
        "assert (one == other).all() and 'torch' not in sys.modules\n"
        "import torch\n"
        "mine = model.encode(torch.from_numpy(ids), torch.ones(3, 4, dtype=torch.int64))\n"
        "assert type(mine) is torch.Tensor and (mine.numpy() == one).all()\n"
    )


def test_names_and_order_of_inputs(model: precast.Model) -> None:
    expected = model.encode(IDS, MASK)
    assert torch.equal(model.encode(mask=MASK, ids=IDS), expected)
    assert torch.equal(model.encode(IDS, mask=MASK), expected)
    assert torch.equal(model.run("encode", IDS, MASK), expected)
    assert torch.equal(model["encode"](IDS, MASK), expected)


def test_memory_passes_both_ways_without_a_copy(model: precast.Model) -> None:
    given = torch.arange(6.0).view(2, 3)
    held = precast.Tensor.from_dlpack(given)
    assert held.data_ptr == given.data_ptr()
    assert np.from_dlpack(held).ctypes.data == torch.from_dlpack(held).data_ptr() == given.data_ptr()
    assert precast.Tensor.from_dlpack(given.numpy()).data_ptr == given.data_ptr()
    # The memory lives as long as its last user.
    array = np.from_dlpack(precast.Tensor.from_dlpack(torch.full((1000,), 7.0)))
    assert array.sum() == 7000
    # An output of a library that is not known is such a tensor, too.
    out = model.encode(precast.Tensor.from_dlpack(IDS), precast.Tensor.from_dlpack(MASK))
    assert isinstance(out, precast.Tensor)
    assert torch.from_dlpack(out).data_ptr() == out.data_ptr
    assert out.numpy().ctypes.data == out.data_ptr


def test_nested_values_come_back_as_the_module_nests_them(model: precast.Model) -> None:
    x, scale = torch.randn(2, 3), torch.tensor([3.0])
    pair = (x + 1, x - 1)
    ours = model.nested(x, pair, scale)
    expected = eager().nested(x, pair, scale)
    assert list(ours) == list(expected)
    torch.testing.assert_close(ours["sum"], expected["sum"])
    assert ours["none"] is None
    assert isinstance(ours["list"], list)
    torch.testing.assert_close(ours["pair"].high, expected["pair"].high)
    assert ours["pair"][1] is ours["pair"].high
    assert ours["pair"].kind == "Pair"
    named = model.nested(scale=scale, pair=list(pair), x=x)
    torch.testing.assert_close(named["pair"].low, expected["pair"].low)
    with pytest.raises(AttributeError, match=r"the output `Pair` has no field `middle`; it has low, high"):
        _ = ours["pair"].middle


def test_a_pending_negation_is_part_of_the_value(model: precast.Model) -> None:
    x = torch.complex(torch.randn(4, 3), torch.randn(4, 3)).conj().imag
    assert x.is_neg()
    assert torch.equal(model.nested(x, (x, x), torch.ones(1))["list"][0], -x)


def test_a_tensor_with_a_gradient_is_taken_where_no_gradient_is_wanted(model: precast.Model) -> None:
    x, one = torch.nn.Parameter(torch.randn(4, 3)), torch.ones(1)
    with torch.no_grad():
        assert torch.equal(model.nested(x, (x, x), one)["list"][0], -x)
        assert torch.equal(model.nested(x.clone().requires_grad_(), (x, x), one)["list"][0], -x)
    with pytest.raises(precast.BadInput, match="the answer of an artifact has none"):
        model.nested(x, (x, x), one)


def test_strides_are_copied_to_fit_unless_that_is_refused(store: Path, model: precast.Model) -> None:
    ids = torch.arange(12).view(4, 3).t()
    assert torch.equal(model.encode(ids, MASK), model.encode(ids.contiguous(), MASK))
    strict = precast.load(store, "tiny", copy=False)
    with pytest.raises(precast.BadInput, match="`ids`"):
        strict.encode(ids, MASK)
    row = torch.arange(4).expand(3, 4)  # a kernel that trusts its sizes reads beyond the memory
    assert torch.equal(model.encode(row, MASK), model.encode(row.contiguous(), MASK))


def test_a_repr_shows_modules_and_buckets(model: precast.Model) -> None:
    assert repr(model) == (
        "<precast.Model tiny\n"
        "  count(x) [fixed]\n"
        "  encode(ids, mask) [batch=4 seq=8; any size within bounds]\n"
        "  nested(x, pair, scale) [batch=4; any size within bounds]>"
    )
    assert model.encode.inputs == ["ids", "mask"]
    assert model.nested.inputs == ["x", "pair.0", "pair.1", "scale"]
    assert model.nested.outputs == ["sum", "pair.low", "pair.high", "list.0"]
    assert model.encode.buckets == [{"batch": 4, "seq": 8}]
    assert model.modules == ["count", "encode", "nested"]
    assert {"encode", "stats", "close"} <= set(dir(model))


def test_counters(model: precast.Model) -> None:
    model.encode(IDS, MASK)
    stats = model.stats()
    row = next(row for row in stats["modules"] if row["module"] == "encode")
    assert [bucket["padded"] for bucket in row["buckets"] if bucket["runner"] == "artifact"] == [1]
    assert stats["devices"][0]["answered"] == 1


def test_errors_are_a_hierarchy_with_hints(store: Path, model: precast.Model) -> None:
    endless: list[Any] = [IDS]
    endless.append(endless)
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    cases = [
        *[
            (lambda call=call, value=value: call(value), precast.BadInput, "nests deeper than 64 levels")
            for value in (endless, loop, {"0": endless})
            for call in (lambda x: model.encode(x, MASK), lambda x: model.nested(IDS, pair=x, scale=IDS))
        ],
        (lambda: model.encode(IDS), precast.BadInput, "takes 2 inputs"),
        (lambda: model.encode(IDS.float(), MASK), precast.BadInput, "expected dtype int64, got float32"),
        *[
            (lambda value=value: model.encode(IDS * 0 + value, MASK), precast.BadInput, "expected values from 0 to 49")
            for value in (50, -1, 2**62)
        ],
        (lambda: model.encode(IDS, 3), precast.BadInput, "`mask` is no tensor but a int"),
        (lambda: model.encode(IDS, object()), precast.BadInput, "`mask` is no tensor but a object"),
        (lambda: model.encode(IDS, MASK, MASK, MASK), precast.BadInput, "takes 2 inputs"),
        (lambda: model.encode(IDS, MASK, x=MASK), precast.BadInput, "no variant with the inputs"),
        (lambda: model.encode(IDS, ids=IDS), precast.BadInput, "no variant with the inputs"),
        (lambda: model.encode(IDS, x=MASK), precast.BadInput, "no variant with the inputs"),
        (lambda: model.encode(ids=IDS, mask=3), precast.BadInput, "`mask` is no tensor but a int"),
        (lambda: model.encode(IDS.to_sparse(), MASK), precast.BadInput, "`ids` can't be used"),
        (lambda: model.encode(torch.empty(3, 4, dtype=torch.int64, device="meta"), MASK), precast.BadInput, "`ids`"),
        (lambda: model.nested(torch.ones(2, 3, requires_grad=True), (), ()), precast.BadInput, "requires a gradient"),
        (lambda: model["nope"], precast.NotFound, "no module `nope`"),
        (lambda: precast.load(store, "none"), precast.NotFound, "there is no model `none`"),
        (lambda: precast.load(store, "tiny@99"), precast.NotFound, "99"),
        (lambda: precast.load(store / "none", "tiny"), precast.NotFound, "is not a store"),
        (lambda: precast.load(store, "tiny", device="tpu"), precast.BadInput, "`tpu` is no device"),
        (lambda: precast.load(store, "tiny", wait=-1), precast.BadInput, "wait"),
        (lambda: precast.load(store, "tiny", loading="never"), precast.BadInput, "loading"),
        (lambda: precast.load(store, "tiny", graphs="some"), precast.BadInput, "graphs"),
    ]
    for call, kind, text in cases:
        with pytest.raises(kind) as caught:
            call()
        assert text in str(caught.value), str(caught.value)
        assert isinstance(caught.value, precast.Error)
        assert caught.value.hint, str(caught.value)
        assert "\n#" not in str(caught.value) and "frame" not in str(caught.value)
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), str(again), again.hint) == (kind, str(caught.value), caught.value.hint)
    with pytest.raises(AttributeError, match="it has count, encode, nested"):
        _ = model.nope
    if not torch.cuda.is_available():
        with pytest.raises(precast.LoadError, match="cuda"):
            precast.load(store, "tiny", device="cuda")


def test_sizes_of_zero_and_hostile_shapes_are_answered_or_refused(model: precast.Model) -> None:
    for shape in ((0, 3), (2, 0), (2, 3, 1), (6,), ()):
        ids = torch.zeros(shape, dtype=torch.int64)
        try:
            assert model.encode(ids, ids).shape == (shape[0], 8)
        except precast.BadInput:
            continue


def test_a_closed_model_answers_nothing(store: Path) -> None:
    model = precast.load(store, "tiny")
    encode = model.encode
    with model:
        assert model.encode(IDS, MASK).shape == (3, 8)
    assert repr(model) == "<precast.Model tiny, closed>"
    for call in (lambda: model.encode(IDS, MASK), lambda: encode(IDS, MASK), model.stats, model.session):
        with pytest.raises(precast.CallFailed, match="is closed"):
            call()
    model.close()
    # A module holds its model.
    assert precast.load(store, "tiny").encode(IDS, MASK).shape == (3, 8)


def test_a_copy_is_the_model_and_a_pickle_loads_it_again(store: Path, model: precast.Model) -> None:
    assert copy.copy(model) is model and copy.deepcopy(model) is model
    again = pickle.loads(pickle.dumps(model))
    assert again is not model
    assert torch.equal(again.encode(IDS, MASK), model.encode(IDS, MASK))


def test_spans_and_events_are_records_of_logging(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="precast"):
        precast.load(store, "tiny").close()
    assert any(record.name == "precast" and "weights" in record.message for record in caplog.records)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="precast"):
        precast.load(store, "tiny").close()
    assert not caplog.records


def test_a_session_keeps_states(model: precast.Model, tmp_path: Path) -> None:
    one = torch.ones(4)
    with pytest.raises(precast.BadInput, match="without a session"):
        model.count(one)
    first, second = model.session(), model.session()
    assert first.run("count", one).tolist() == [1] * 4
    assert first.run("count", x=one).tolist() == [2] * 4
    assert second.run("count", one).tolist() == [1] * 4
    fork = first.fork()
    assert fork.run("count", one).tolist() == [3] * 4
    assert first.state("count.total").tolist() == [2] * 4
    first.save(tmp_path / "state.safetensors")
    first.reset()
    assert first.run("count", one).tolist() == [1] * 4
    first.load(tmp_path / "state.safetensors")
    assert first.run("count", one).tolist() == [3] * 4
    assert (first.bytes, model.session_bytes) == (16, 16)
    with pytest.raises(precast.Error):
        first.seek(5)
    with pytest.raises(TypeError, match="can't be pickled"):
        pickle.dumps(first)
    with second:
        pass
    with pytest.raises(precast.CallFailed, match="the session is closed"):
        second.run("count", one)


def test_models_of_one_store_share_their_weights(in_process: Run) -> None:
    code = (
        "import torch\n"
        "ids = torch.ones(2, 3, dtype=torch.int64)\n"
        "def maps():\n"
        "    return sum(str(store) in line for line in open('/proc/self/maps'))\n"
        "counts = [maps()]\n"
        "others = [precast.load(path, 'tiny', instances=2) for path in (store, store + '/')]\n"
        "counts.append(maps())\n"
        "answers = [each.encode(ids, ids) for each in (model, *others)]\n"
        "assert all(torch.equal(answers[0], each) for each in answers)\n"
        "model.close(); others.pop().close()\n"
        "counts.append(maps())\n"
        "others.pop().close()\n"
        "print(*counts, maps())\n"
    )
    said = in_process(code)
    one, three, last, none = map(int, said.split())
    assert one == three == last > none == 0, said


def test_weights_of_the_caller_are_read_in_place(store: Path) -> None:
    module = eager().encode
    own = {f"encode.{name}": tensor for name, tensor in module.named_parameters()}
    model = precast.load(store, "tiny", weights=own)
    for change in (lambda: None, lambda: module.layer.weight.mul_(2), lambda: module.table.weight.zero_()):
        with torch.no_grad():
            change()
            torch.testing.assert_close(model.encode(IDS, MASK), module(IDS, MASK))
    other = eager().encode
    model.swap({f"encode.{name}": tensor for name, tensor in other.named_parameters()})
    with torch.no_grad():
        torch.testing.assert_close(model.encode(IDS, MASK), other(IDS, MASK))
        # Weights that do not fit change nothing.
        wrong = {f"encode.{name}": tensor for name, tensor in other.named_parameters()}
        with pytest.raises(precast.LoadError, match=r"encode\.layer\.weight"):
            model.swap({**wrong, "encode.layer.weight": torch.zeros(8, 9)})
        torch.testing.assert_close(model.encode(IDS, MASK), other(IDS, MASK))
    model.swap("tiny")
    assert torch.equal(model.encode(IDS, MASK), precast.load(store, "tiny").encode(IDS, MASK))
    assert model.weights is not None
    with pytest.raises(TypeError, match="can't be pickled"):
        pickle.dumps(model)
    del own["encode.layer.bias"]
    with pytest.raises(precast.LoadError, match=r"encode\.layer\.bias"):
        precast.load(store, "tiny", weights=own)
