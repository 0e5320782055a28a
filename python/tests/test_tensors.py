"""Tensors of torch that pass as they are, and outputs as NumPy arrays: memory, lifetime, and what is refused."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import precast
import pytest
import torch
from conftest import python
from torch.utils._python_dispatch import TorchDispatchMode

Run = Callable[[str], str]

IDS = torch.arange(12).view(3, 4)
MASK = torch.ones(3, 4, dtype=torch.int64)
ONE = torch.ones(1)


def negated(model: precast.Model, x: torch.Tensor) -> torch.Tensor:
    """Returns the output `list.0`, which is -x."""
    return model.nested(x, (x, x), ONE)["list"][0]


def test_an_empty_list_of_numpy_has_size_0_before_it_has_a_dtype(model: precast.Model) -> None:
    with pytest.raises(precast.BadInput, match=re.escape("`ids`: axis 1 (`seq`) has size 0")):
        model.encode(np.array([[]]), np.array([[]]))


def test_an_output_is_a_tensor_as_any_other(model: precast.Model) -> None:
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            out = model.encode(IDS, MASK)
        assert type(out) is torch.Tensor and out.is_leaf and not out.requires_grad and not out._is_view()
        assert out.is_inference() == (mode is torch.inference_mode)
    out = model.encode(IDS, MASK)
    out.requires_grad_()
    (out * 2).sum().backward()
    assert torch.equal(out.grad, torch.full_like(out, 2))
    with torch.no_grad():
        kept = out.detach().clone()
        out.zero_()
        assert torch.equal(model.encode(IDS, MASK), kept)
        # Its memory is of torch's own allocator: only such memory can be resized. DLPack's is not.
        out = model.encode(IDS, MASK)
        out.resize_(1000, 8)
        out.data = torch.ones(2)
        assert out.sum() == 2
        assert model.encode(IDS, MASK).share_memory_().is_shared()


def test_outputs_outlive_the_model(store: Path) -> None:
    outs = []
    for _ in range(3):
        with precast.load(store, "tiny") as model:
            outs.append(model.encode(IDS, MASK))
            array, last = (model.encode(IDS.numpy(), MASK.numpy())[at:] for at in (0, 2))
        del model
        gc.collect()
    junk = [torch.full((3, 8), 9.0) for _ in range(1000)]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[1], outs[2]) and len(junk) == 1000
    np.testing.assert_array_equal(array, outs[0].numpy())
    array += 1
    np.testing.assert_array_equal(last, outs[0].numpy()[2:])


def test_inputs_that_are_freed_or_changed_after_they_were_taken(model: precast.Model) -> None:
    expected = model.encode(IDS, MASK)
    for _ in range(1000):
        out = model.encode(IDS.clone(), MASK.clone())
    assert torch.equal(out, expected)

    changes: dict[str, Callable[[torch.Tensor], Any]] = {
        "swap": lambda x: setattr(x, "data", torch.full((30, 40), 1_000_000)),
        "shrink": lambda x: x.resize_(0),
        "replace": lambda x: x.set_(torch.zeros(1, dtype=torch.int64)),
        "exchange": lambda x: torch.utils.swap_tensors(x, torch.zeros(7)),
    }

    async def go(change: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        ids = IDS.clone()
        answer = model.encode.aio(ids, MASK)
        change(ids)
        del ids
        return await answer

    for name, change in changes.items():
        assert torch.equal(asyncio.run(go(change)), expected), name


def test_one_tensor_in_two_threads_and_changed_by_a_third(model: precast.Model) -> None:
    ids, stop = IDS.clone(), threading.Event()
    small, large = IDS[:1].clone(), IDS.clone()
    right = [model.encode(small, MASK[:1]), model.encode(large, MASK)]
    wrong: list[str] = []

    def calls() -> None:
        while not stop.is_set():
            try:
                out = model.encode(ids, MASK)
            except precast.BadInput:
                # `ids` has one row, and `MASK` three.
                continue
            if not torch.equal(out, right[1]):
                wrong.append(str(out))

    threads = [threading.Thread(target=calls) for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(2000):
        ids.data = (small, large)[turn % 2]
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


GIVEN = {
    "tensors": "import torch\nids, x, one = torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3), torch.ones(1)\n"
    "uses = lambda: [torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in (ids, x)]\n",
    "arrays": "from numpy import ndarray, ones\n"
    "ids, x = ones((2, 3), 'int64'), ones((2, 3), 'float32')\none = x[0, :1]\n"
    "uses = lambda: [sys.getrefcount(model.encode(ids, ids).base), *map(sys.getrefcount, (x.dtype, ndarray))]\n",
}
CALLS = """
import gc, resource, sys
def work(count):
    for at in range(count):
        model.encode(ids, mask=ids)
        model.nested(x, (x, x), one)
        if at % 10 == 0:
            try:
                model.encode(ids, 3)
            except precast.BadInput:
                pass
    gc.collect()
    held = [*uses(), *map(sys.getrefcount, (ids, x, one, model, model.encode))]
    return held, len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
work(1000)
(before, objects, memory), (after, more, later) = work(1000), work(10_000)
assert before == after, (before, after)
assert more - objects < 100 and later - memory < 200, (objects, more, memory, later)
print('torch' in sys.modules)
"""


@pytest.mark.parametrize("given", GIVEN)
def test_20000_calls_keep_nothing(in_process: Run, given: str) -> None:
    said = in_process(GIVEN[given] + CALLS)
    assert said.strip() == str(given == "tensors")


def test_tensors_that_pass_another_way_give_the_same_answer(model: precast.Model) -> None:
    expected = model.encode(IDS, MASK)
    with torch.inference_mode():
        inference = IDS.clone()
    lazy = torch._lazy_clone(IDS)
    odd = torch.frombuffer(bytearray(1) + bytearray(IDS.numpy().tobytes()), dtype=torch.int64, offset=1).view(3, 4)
    shared = IDS.clone().share_memory_()
    assert odd.data_ptr() % 8
    for ids in (inference, lazy, odd, shared, torch.nn.Parameter(IDS, requires_grad=False)):
        assert torch.equal(model.encode(ids, MASK), expected)
    assert torch.equal(lazy, IDS)

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    with Mode():
        out = model.encode(IDS, MASK)
    assert torch.equal(out, expected)


def test_tensors_that_are_not_their_memory_are_refused(model: precast.Model) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.ones(2, 3)
    emptied = torch.ones(2, 3)
    emptied.untyped_storage().resize_(0)
    with FakeTensorMode() as fake:
        unreal = fake.from_tensor(x)
    refused = {
        "sparse": x.to_sparse(),
        "compressed": x.to_sparse_csr(),
        "oneDNN": x.to_mkldnn(),
        "nested": torch.nested.nested_tensor([torch.ones(3), torch.ones(3)]),
        "quantised": torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "meta": x.to("meta"),
        "complex": torch.complex(x, x),
        "conjugated": torch.complex(x, x).conj(),
        "of another class": x.as_subclass(type("Own", (torch.Tensor,), {})).to("meta"),
        "without its memory": emptied,
        "fake": unreal,
        "functional": torch._to_functional_tensor(x),
        "not there": torch._efficientzerotensor((2, 3)),
    }
    for name, tensor in refused.items():
        with pytest.raises(precast.BadInput) as caught:
            print(name, negated(model, tensor))
        assert "`x`" in str(caught.value), (name, str(caught.value))

    def call(x: torch.Tensor) -> torch.Tensor:
        return negated(model, x)

    with pytest.raises(precast.BadInput):
        torch.func.vmap(call)(torch.ones(2, 2, 3))
    with pytest.raises(precast.BadInput):
        torch.func.grad(lambda x: call(x).sum())(x)
    with pytest.raises(precast.BadInput):
        torch.func.functionalize(call)(x)


def test_a_torch_whose_objects_are_others_passes_tensors_by_dlpack(store: Path) -> None:
    code = (
        "import precast, torch\n"
        "torch.Tensor._cdata = property(lambda self: 4096)\n"
        f"model = precast.load({str(store)!r}, 'tiny')\n"
        "ids = torch.ones(2, 3, dtype=torch.int64)\n"
        "out = model.encode(ids, ids)\n"
        "assert type(out) is torch.Tensor and out.shape == (2, 8)\n"
        "try:\n"
        "    out.resize_(1000, 8)\n"
        "except RuntimeError as error:\n"
        "    print('not resizable' in str(error))\n"
    )
    assert python(code) == "True\n"


def test_arrays_and_tensors_over_one_memory(model: precast.Model) -> None:
    ids = IDS.clone()
    array = ids.numpy()
    before = model.encode(ids, MASK)
    array[:] = 7
    after = model.encode(ids, MASK)
    assert not torch.equal(before, after)
    np.testing.assert_array_equal(model.encode(array, MASK.numpy()), after.numpy())


@pytest.mark.parametrize("name", "bool uint8 int8 int16 int32 int64 float16 float32 float64".split())
def test_an_array_is_over_the_memory_of_its_tensor(name: str) -> None:
    whole = torch.arange(24).view(4, 6).to(getattr(torch, name))
    parts = {
        "whole": whole,
        "strided": whole[1:, ::2],
        "transposed": whole.T,
        "repeated": whole[:1].expand(3, 6),
        "one number": whole[2, 3],
        "empty": whole[:0],
        "without columns": whole[:, 6:],
    }
    for name, part in parts.items():
        array, expected = precast.Tensor.from_dlpack(part).numpy(), part.numpy()
        assert type(array) is np.ndarray and array.dtype == expected.dtype and array.shape == expected.shape, name
        assert array.flags.writeable and array.flags.aligned, name
        np.testing.assert_array_equal(array, expected)
        if part.numel():
            assert array.ctypes.data == part.data_ptr() and array.strides == expected.strides, name
            assert array.flags.c_contiguous == expected.flags.c_contiguous and not array.flags.owndata, name
    array = precast.Tensor.from_dlpack(whole).numpy()
    array[3, 5] = 0
    assert whole[3, 5] == 0


def test_a_tensor_of_bfloat16_is_no_array() -> None:
    given = precast.Tensor.from_dlpack(torch.ones(2, dtype=torch.bfloat16)).numpy()
    assert type(given) is precast.Tensor and given.dtype == "bfloat16"


def test_no_library_takes_the_memory_from_the_owner_of_an_array(model: precast.Model) -> None:
    out = model.encode(IDS.numpy(), MASK.numpy())
    assert "precast_array" in repr(out.base)
    with pytest.raises((RuntimeError, ValueError)):
        torch.from_dlpack(out.base)


def test_without_numpys_table_of_functions_arrays_are_made_by_dlpack(in_process: Run) -> None:
    in_process(
        "import numpy\n"
        "core = getattr(numpy, '_core', None) or numpy.core\n"
        "core.multiarray._ARRAY_API = None\n"
        "ids = numpy.ones((2, 3), 'int64')\n"
        "out = model.encode(ids, ids)\n"
        "assert type(out) is numpy.ndarray and out.shape == (2, 8) and 'precast_array' not in repr(out.base)\n"
        "assert (out[0] == out[1]).all() and out.any()\n"
    )
