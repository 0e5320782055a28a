"""Threads, event loops, forks, the end of the process, and memory over many calls."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import precast
import pytest
import torch

Run = Callable[[str], str]


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (1 + seed % 4, 1 + seed % 8)
    return torch.randint(0, 50, shape, generator=generator), torch.ones(shape, dtype=torch.int64)


def test_32_threads_get_their_own_answers(model: precast.Model) -> None:
    expected = [model.encode(*batch(seed)) for seed in range(64)]

    def work(thread: int) -> bool:
        def answer(seed: int) -> torch.Tensor:
            ids, mask = batch(seed)
            return model.encode(ids, mask) if thread % 2 else torch.from_numpy(model.encode(ids.numpy(), mask.numpy()))

        seeds = [(thread * 7 + call) % 64 for call in range(100)]
        return all(torch.equal(answer(seed), expected[seed]) for seed in seeds)

    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(work, range(32)))


def test_the_gil_is_released_during_a_call(model: precast.Model) -> None:
    given = [each.numpy() for each in batch(3)]
    stop, interval = threading.Event(), sys.getswitchinterval()

    def calls() -> bool:
        end = time.monotonic() + 20
        while not stop.is_set() and time.monotonic() < end:
            model.encode(*given)
        return stop.is_set()

    # No thread is asked to release it: this one continues only if a call does.
    sys.setswitchinterval(1000)
    try:
        with ThreadPoolExecutor(1) as pool:
            working = pool.submit(calls)
            time.sleep(0.1)
            stop.set()
            assert working.result(), "no other thread had a turn before the last call"
    finally:
        sys.setswitchinterval(interval)


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


def test_loading_again_and_again_frees_what_it_took(in_process: Run) -> None:
    said = in_process(
        "import gc, resource, time\n"
        "def load():\n"
        "    for _ in range(100):\n"
        "        precast.load(store, 'tiny').close()\n"
        "    gc.collect()\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "load(); before = load(); begun = time.perf_counter()\n"
        "print(load() - before, time.perf_counter() - begun)\n"
    )
    kilobytes, seconds = said.split()
    assert int(kilobytes) < 4096 and float(seconds) < 100, said  # no load compiles


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
    said = in_process(
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
    assert said.count("was loaded before a fork") == 2, said
    assert "3 torch.Size([2, 8])" in said
