"""The package on a CUDA device, in processes that have imported torch. Skipped where there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import precast
import pytest
import torch
from conftest import HERE, build, python
from model.model import load as eager

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

IDS = torch.arange(12).view(3, 4).cuda()
MASK = torch.ones(3, 4, dtype=torch.int64).cuda()


def built(folder: Path) -> Path:
    """Builds the spec of a folder; returns its store."""
    build(folder / "precast.toml", folder / "artifacts")
    return folder / "artifacts"


@pytest.fixture(scope="module")
def cuda_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuda")
    for file in (HERE / "model").glob("*.*"):
        text = file.read_text().replace("[[module]]", '[target]\ndevice = "cuda"\n\n[[module]]', 1)
        (folder / file.name).write_text(text if file.suffix == ".toml" else file.read_text())
    return built(folder)


@pytest.fixture
def model(cuda_store: Path) -> Iterator[precast.Model]:
    with precast.load(cuda_store, "tiny", device="cuda") as model:
        yield model


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    with torch.no_grad():
        return eager().encode.cuda()(IDS, MASK)


def test_a_process_that_imported_torch_loads_and_runs(cuda_store: Path) -> None:
    code = (
        "import torch, precast\n"
        "x = torch.ones(2, 3, dtype=torch.int64, device='cuda')\n"
        f"model = precast.load({str(cuda_store)!r}, 'tiny', device='cuda')\n"
        "print(model.encode(x, x).device)\n"
    )
    for head in ("", "import torch; torch.cuda.init()\n"):
        assert python(head + code).strip() == "cuda:0"


def test_answers_are_those_of_eager(model: precast.Model, expected: torch.Tensor) -> None:
    torch.testing.assert_close(model.encode(IDS, MASK), expected)
    x, scale = torch.randn(4, 3, device="cuda"), torch.ones(1, device="cuda")
    ours, theirs = model.nested(x, (x, -x), scale), eager().nested(x, (x, -x), scale)
    torch.testing.assert_close(ours["pair"].high, theirs["pair"].high)
    session = model.session()
    one = torch.ones(4, device="cuda")
    assert [session.run("count", one)[0].item() for _ in range(3)] == [1, 2, 3]


def test_memory_passes_without_a_copy(model: precast.Model) -> None:
    given = torch.randn(4, 3, device="cuda")
    held = precast.Tensor.from_dlpack(given)
    assert held.data_ptr == given.data_ptr() == torch.from_dlpack(held).data_ptr()
    out = model.encode(precast.Tensor.from_dlpack(IDS), precast.Tensor.from_dlpack(MASK))
    assert torch.from_dlpack(out).data_ptr() == out.data_ptr


def test_arrays_and_tensors_of_the_host_are_copied_to_fit(model: precast.Model, expected: torch.Tensor) -> None:
    array = model.encode(IDS.cpu().numpy(), MASK.cpu().numpy())
    assert isinstance(array, np.ndarray)
    np.testing.assert_allclose(array, expected.cpu().numpy(), rtol=1e-4, atol=1e-5)
    assert model.encode(IDS.cpu(), MASK).device.type == "cuda"


def test_calls_run_on_the_current_stream(model: precast.Model, expected: torch.Tensor) -> None:
    for _ in range(20):
        side = torch.cuda.Stream()
        ids = torch.zeros_like(IDS)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # The copy is late: a call on another stream would read zeros.
            torch.cuda._sleep(20_000_000)
            ids.copy_(IDS)
            out = model.encode(ids, MASK)
            doubled = out * 2
        side.synchronize()
        torch.testing.assert_close(doubled, expected * 2)


def test_calls_of_an_event_loop_keep_their_stream(model: precast.Model, expected: torch.Tensor) -> None:
    async def go() -> list[torch.Tensor]:
        side = torch.cuda.Stream()
        ids = torch.zeros_like(IDS)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            ids.copy_(IDS)
            calls = [model.encode.aio(ids, MASK) for _ in range(8)]
        answers = await asyncio.gather(*calls)
        side.synchronize()
        return answers

    for out in asyncio.run(go()):
        torch.testing.assert_close(out, expected)


def test_threads_with_streams_of_their_own(model: precast.Model, expected: torch.Tensor) -> None:
    def work(_: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            return all(torch.allclose(model.encode(IDS, MASK), expected, rtol=1e-4, atol=1e-5) for _ in range(50))

    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(work, range(32)))


def test_many_calls_leave_device_memory_as_it_was(model: precast.Model) -> None:
    for _ in range(100):
        model.encode(IDS, MASK)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20_000):
        model.encode(IDS, MASK)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_weights_of_the_caller_are_read_in_place(cuda_store: Path) -> None:
    module = eager().encode.cuda()
    own = {f"encode.{name}": tensor for name, tensor in module.named_parameters()}
    model = precast.load(cuda_store, "tiny", device="cuda", weights=own)
    with torch.no_grad():
        for change in (lambda: None, lambda: module.layer.weight.mul_(2), lambda: module.layer.bias.zero_()):
            change()
            torch.testing.assert_close(model.encode(IDS, MASK), module(IDS, MASK))


def test_a_fork_after_cuda_is_refused(cuda_store: Path) -> None:
    code = (
        "import os, torch, precast\n"
        f"model = precast.load({str(cuda_store)!r}, 'tiny', device='cuda')\n"
        "x = torch.ones(2, 3, dtype=torch.int64, device='cuda')\n"
        "model.encode(x, x)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    for call in (lambda: model.encode(x, x), lambda: precast.load("
        f"{str(cuda_store)!r}, 'tiny', device='cuda')):\n"
        "        try:\n"
        "            call()\n"
        "        except precast.Error as error:\n"
        "            print('refused:', error, flush=True)\n"
        "    os._exit(3)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    said = python(code)
    assert said.count("refused:") == 2 and said.split()[-1] == "3", said


def test_a_module_is_wrapped_and_follows_its_parameters(cuda_store: Path, tmp_path: Path) -> None:
    module = eager().encode.cuda()
    wrapped = precast.maybe_compile(
        module,
        precast.CompileConfig(name="cuda-encoder", store=tmp_path / "artifacts"),
        sample_batch=(IDS, MASK),
    )
    with torch.no_grad():
        for change in (lambda: None, lambda: module.layer.weight.mul_(2)):
            change()
            torch.testing.assert_close(wrapped(IDS, MASK), module(IDS, MASK), rtol=1e-4, atol=1e-5)
    report = wrapped.precast_report()
    assert report["artifact"] >= 2 and report["original"] == 0, report


COUNTS = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = torch.nn.Linear(64, 1 << 14), torch.nn.Linear(1 << 14, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        self.seen += self.narrow(self.wide(x).relu()).sum(0)
        return self.seen.clone()

def load():
    torch.manual_seed(0)
    return Net().eval()
"""


def test_a_session_with_a_graph_holds_the_memory_of_one_graph(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(COUNTS)
    (tmp_path / "precast.toml").write_text(
        """schema = 1
[model]
name = "counts"
entry = "net:load"
[target]
device = "cuda"
[compile]
mode = "reduce-overhead"
[[module]]
name = "net"
inputs.x = { dtype = "float32", shape = [1024, 64] }
"""
    )
    store = built(tmp_path)
    x = torch.ones(1024, 64, device="cuda")

    def pools() -> dict[tuple[int, int], int]:
        held: dict[tuple[int, int], int] = {}
        for segment in torch.cuda.memory_snapshot():
            pool = segment["segment_pool_id"]
            held[pool] = held.get(pool, 0) + segment["total_size"]
        return {pool: size for pool, size in held.items() if pool != (0, 0)}

    torch.cuda.empty_cache()
    before = pools()
    with precast.load(store, "counts", device="cuda") as model:
        session = model.session()
        first = session.run("net", x)
        assert torch.equal(session.run("net", x), first * 2)
        # Its hidden values take 64 MiB. A first graph in a process brings the workspace of its products.
        new = {pool: size >> 20 for pool, size in pools().items() if pool not in before}
        assert sum(size >= 64 for size in new.values()) == 1, new
        session.close()
