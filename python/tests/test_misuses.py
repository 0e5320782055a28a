"""Misuses that crash or mislead in other libraries of compiled PyTorch. Here each is an exception, or an answer."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import precast
import pytest
import torch
from model.model import load as eager

Run = Callable[..., subprocess.CompletedProcess[str]]

ONES = torch.ones(2, 3, dtype=torch.int64)


def test_calls_under_asyncio(model: precast.Model) -> None:
    """executorch 20043: a crash."""

    async def go() -> list[torch.Tensor]:
        await asyncio.sleep(0)
        return await asyncio.gather(*(model.encode.aio(ONES, ONES) for _ in range(50)))

    assert len(asyncio.run(go())) == 50


def test_a_release_after_save_and_load(store: Path, tmp_path: Path, in_process: Run) -> None:
    """pytorch 166415: wrong numbers or a crash of a package that was saved and loaded again."""
    shutil.copytree(store, tmp_path / "copy")
    expected = precast.load(store, "tiny").encode(ONES, ONES)
    done = in_process(
        f"import torch\nmodel = precast.load({str(tmp_path / 'copy')!r}, 'tiny')\n"
        "ids = torch.ones(2, 3, dtype=torch.int64)\nprint(model.encode(ids, ids).tolist())"
    )
    torch.testing.assert_close(torch.tensor(eval(done.stdout)), expected)


def test_a_module_without_constants(model: precast.Model) -> None:
    """TensorRT 3879: a crash."""
    x = torch.ones(4, 3)
    assert model.nested(x, (x, x), torch.ones(1))["sum"].sum() == 24


def test_devices_that_are_mixed_or_missing(store: Path, model: precast.Model) -> None:
    """pytorch 190000 and 186943: a crash for CPU and CUDA mixed, and for a CUDA package where there is no GPU."""
    with pytest.raises(precast.BadInput):
        model.encode(ONES, ONES.to("meta"))
    if torch.cuda.is_available():
        assert model.encode(ONES.cuda(), ONES).device.type == "cpu"
    else:
        with pytest.raises(precast.LoadError, match="cuda"):
            precast.load(store, "tiny", device="cuda")


def test_a_load_takes_no_compile(store: Path) -> None:
    """pytorch 194163: a package that takes nine seconds to load. This one takes milliseconds; the limit is wide."""

    def load() -> float:
        begun = time.perf_counter()
        precast.load(store, "tiny").close()
        return time.perf_counter() - begun

    assert min(load() for _ in range(3)) < 1


def test_loading_again_and_again_frees_what_it_took(store: Path, in_process: Run) -> None:
    """pytorch 158614 and 167630: leaks of loaded models."""
    done = in_process(
        "import gc, resource\n"
        "def load():\n"
        "    for _ in range(100):\n"
        "        precast.load(store, 'tiny').close()\n"
        "    gc.collect()\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "load(); before = load(); print(load() - before)\n"
    )
    assert int(done.stdout) < 4096, done.stdout + done.stderr


def test_files_tell_what_they_are(store: Path) -> None:
    """Artifacts that nobody can tell apart: the release names its modules, buckets, torch and device."""
    text = repr(precast.load(store, "tiny").encode)
    assert "encode(ids, mask)" in text and "batch=4 seq=8" in text


def test_a_damaged_store(store: Path, tmp_path: Path) -> None:
    """A changed object is refused before any of its code runs."""
    broken = tmp_path / "broken"
    shutil.copytree(store, broken)
    for file in (broken / "objects").rglob("*"):
        if file.is_file():
            file.chmod(0o644)
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 0xFF
            file.write_bytes(data)
    shutil.rmtree(broken / "ready", ignore_errors=True)
    with pytest.raises(precast.Error):
        precast.load(broken, "tiny")


def test_values_out_of_bounds(model: precast.Model) -> None:
    """An index beyond a table reads foreign memory elsewhere."""
    for value in (50, -1, 2**62):
        with pytest.raises(precast.BadInput, match="expected values from 0 to 49"):
            model.encode(torch.full((2, 3), value), ONES)


def test_sizes_of_zero_and_hostile_shapes(model: precast.Model) -> None:
    for shape in ((0, 3), (2, 0), (2, 3, 1), (6,), ()):
        ids = torch.zeros(shape, dtype=torch.int64)
        try:
            out = model.encode(ids, ids)
        except precast.BadInput:
            continue
        assert out.shape == (shape[0], 8)


def test_arguments_that_contain_themselves(model: precast.Model) -> None:
    """Nesting without an end: the stack of the thread overflows where nobody counts."""
    endless: list[Any] = [ONES]
    endless.append(endless)
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    for value in (endless, loop, {"0": endless}):
        with pytest.raises(precast.BadInput, match="nests deeper than 64 levels"):
            model.encode(value, ONES)
        with pytest.raises(precast.BadInput, match="nests deeper than 64 levels"):
            model.nested(ONES, pair=value, scale=ONES)


def test_an_expanded_input_of_one_row(model: precast.Model) -> None:
    """Strides of zero: a kernel that trusts its sizes reads beyond the memory."""
    ids = torch.arange(3).expand(2, 3)
    assert torch.equal(model.encode(ids, ONES), model.encode(ids.contiguous(), ONES))


def adapters(seed: int) -> torch.Tensor:
    """Returns the difference that a LoRA adapter of rank 2 makes to the weight of `encode.layer`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 2, generator=generator) @ torch.randn(2, 8, generator=generator)


def test_a_merged_adapter_is_seen_and_adapters_are_swapped(store: Path) -> None:
    """diffusers-torchao 42: LoRA weights that compiled code does not see, or that need a compile."""
    module = eager().encode
    own = {f"encode.{name}": tensor for name, tensor in module.named_parameters()}
    base = module.layer.weight.detach().clone()

    def agrees(model: precast.Model) -> None:
        torch.testing.assert_close(model.encode(ONES, ONES), module(ONES, ONES))

    with torch.no_grad(), precast.load(store, "tiny", weights=own) as merged:
        for change in (0.5 * adapters(1), -0.5 * adapters(1), 2.0 * adapters(2)):
            module.layer.weight.add_(change)
            agrees(merged)
    with torch.no_grad(), precast.load(store, "tiny") as model:
        module.layer.weight.copy_(base)
        before = model.encode(ONES, ONES)
        for seed in (1, 2, 1):
            module.layer.weight.copy_(base + adapters(seed))
            model.swap({**own, "encode.layer.weight": base + adapters(seed)})
            agrees(model)
        # An adapter of another model changes nothing.
        with pytest.raises(precast.LoadError, match=r"encode\.layer\.weight"):
            model.swap({**own, "encode.layer.weight": torch.zeros(8, 9)})
        agrees(model)
        model.swap("tiny")
        assert torch.equal(model.encode(ONES, ONES), before)


@torch.library.custom_op("misuses::by_numpy", mutates_args=())
def by_numpy(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() * 2)


@by_numpy.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Custom(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return by_numpy(x) + 1


def test_a_custom_operator_that_no_package_can_hold(tmp_path: Path) -> None:
    """pytorch 134581: a package that lacks the operators that it calls. Here the build names the operator."""
    message = "no operator `misuses::by_numpy` in a worker: `imports` names the modules that register operators"
    with pytest.raises(precast.BuildError, match=message):
        precast.build(Custom(), torch.ones(3), name="custom", store=tmp_path / "store", progress=False)
