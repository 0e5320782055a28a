"""Threads, event loops, forks, the end of the process, and memory over many calls."""

from __future__ import annotations

import asyncio
import gc
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import precast
import pytest
import torch

Run = Callable[..., subprocess.CompletedProcess[str]]


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (1 + seed % 4, 1 + seed % 8)
    return torch.randint(0, 50, shape, generator=generator), torch.ones(shape, dtype=torch.int64)


def test_32_threads_get_their_own_answers(model: precast.Model) -> None:
    expected = [model.encode(*batch(seed)) for seed in range(64)]

    def work(thread: int) -> bool:
        seeds = [(thread * 7 + call) % 64 for call in range(100)]
        return all(torch.equal(model.encode(*batch(seed)), expected[seed]) for seed in seeds)

    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(work, range(32)))


def test_the_gil_is_released_during_a_call(model: precast.Model) -> None:
    # One thread is inside calls all the time; the others must get their turns.
    stop, turns = threading.Event(), 0

    def calls() -> None:
        while not stop.is_set():
            model.encode(*batch(3))

    thread = threading.Thread(target=calls)
    thread.start()
    for _ in range(1000):
        turns += 1
    stop.set()
    thread.join(30)
    assert not thread.is_alive() and turns == 1000


def test_calls_of_an_event_loop(model: precast.Model) -> None:
    expected = [model.encode(*batch(seed)) for seed in range(32)]

    async def go() -> list[torch.Tensor]:
        return await asyncio.gather(*(model.encode.aio(*batch(seed)) for seed in range(32)))

    answers = asyncio.run(go())
    assert all(torch.equal(a, b) for a, b in zip(answers, expected, strict=True))

    async def refused() -> None:
        with pytest.raises(precast.BadInput, match="expected dtype int64"):
            await model.encode.aio(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.int64))
        task = asyncio.ensure_future(model.encode.aio(*batch(1)))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert torch.equal(await model.encode.aio(*batch(5)), expected[5])

    asyncio.run(refused())


def test_many_calls_leave_memory_and_reference_counts_as_they_were(model: precast.Model) -> None:
    ids, mask = batch(3)

    def calls(count: int) -> None:
        for _ in range(count):
            model.encode(ids, mask=mask)

    def refused(count: int) -> None:
        for _ in range(count):
            with pytest.raises(precast.BadInput):
                model.encode(ids, 3)

    calls(5000)
    refused(500)
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counts = [sys.getrefcount(each) for each in (ids, mask, model, model.encode)]
    calls(20_000)
    refused(1000)
    gc.collect()
    assert [sys.getrefcount(each) for each in (ids, mask, model, model.encode)] == counts
    # KiB. A leak of one structure for each call would be ten times as much.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 800


def test_a_session_is_used_by_one_thread_at_a_time(model: precast.Model) -> None:
    session, one = model.session(), torch.ones(4)
    refused = []

    def work() -> int:
        done = 0
        for _ in range(300):
            try:
                session.run("count", one)
                done += 1
            except precast.Busy:
                refused.append(1)
        return done

    with ThreadPoolExecutor(8) as pool:
        done = sum(pool.map(lambda _: work(), range(8)))
    assert session.state("count.total").tolist() == [done] * 4
    assert done + len(refused) == 2400


def test_a_fork_refuses_the_models_of_its_parent(in_process: Run) -> None:
    done = in_process(
        "import os, torch\n"
        "ids = torch.ones(2, 3, dtype=torch.int64)\n"
        "model.encode(ids, ids)\n"
        "session = model.session()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    for call in (lambda: model.encode(ids, ids), lambda: session.run('count', torch.ones(4))):\n"
        "        try:\n"
        "            call()\n"
        "        except precast.CallFailed as error:\n"
        "            print(error)\n"
        "    import sys; sys.stdout.flush(); os._exit(3)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), model.encode(ids, ids).shape)\n"
    )
    assert done.stdout.count("was loaded before a fork") == 2, done.stdout + done.stderr
    assert "3 torch.Size([2, 8])" in done.stdout


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)", "import sys; sys.exit(0)"])
def test_the_process_ends_clean_in_mid_call(in_process: Run, end: str) -> None:
    code = (
        "import threading, time, torch\n"
        "ids = torch.ones(4, 8, dtype=torch.int64)\n"
        "def calls():\n"
        "    while True:\n"
        "        try:\n"
        "            model.encode(ids, ids)\n"
        "        except precast.CallFailed:\n"
        "            return\n"
        "for _ in range(8):\n"
        "    threading.Thread(target=calls, daemon=True).start()\n"
        "time.sleep(0.2)\n" + end
    )
    for _ in range(2):
        done = in_process(code)
        assert done.returncode == 0, done.stderr
        assert "Fatal" not in done.stderr
