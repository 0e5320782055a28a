"""What the package's tests share: one store with small artifacts, built once for each run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import precast
import pytest

HERE = Path(__file__).parent


def command() -> str:
    """The command of the environment, or that of PRECAST_COMMAND."""
    return os.environ.get("PRECAST_COMMAND") or str(Path(sys.executable).parent / "precast")


def folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """Returns a folder for a store; in PRECAST_TEST_STORE, if it is set, so that it is kept between runs."""
    kept = os.environ.get("PRECAST_TEST_STORE")
    return Path(kept) / name if kept else factory.mktemp(name)


def gradients(module: Any) -> dict[str, Any]:
    return {name: one.grad for name, one in module.named_parameters()}


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Calls a function with each number in a thread of its own, all at once; returns what they returned."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def python(code: str, *arguments: Any, timeout: float = 300, **environment: str) -> str:
    """Runs code in another Python, which finds the modules of these tests; returns what it printed."""
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: left out by `make test`; `make test-long` runs it")


def build(spec: Path, store: Path) -> None:
    environment = {**os.environ, "PRECAST_PYTHON": sys.executable}
    subprocess.run([command(), "build", "-f", spec, "--store", store, "-q"], env=environment, check=True, timeout=600)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the model `tiny` of `model/`."""
    store = folder(tmp_path_factory, "store") / "artifacts"
    build(HERE / "model/precast.toml", store)
    return store


@pytest.fixture(scope="session")
def chats(store: Path) -> Path:
    """The store with the model `chat` in it, whose sessions begin with a call of `start`."""
    build(HERE / "model/chat.toml", store)
    return store


@pytest.fixture(scope="session")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the pair of a block of `blocks_net`."""
    import torch
    from blocks_net import config, net

    store = folder(tmp_path_factory, "blocks")
    module = precast.maybe_compile(net(), config(store), None, torch.ones(2, 4))
    module(torch.ones(2, 4)).sum().backward()
    assert module.precast_report()["artifact"] == 3, module.precast_report()
    return store


@pytest.fixture(autouse=True)
def no_remote(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks a remote that it does not name."""
    monkeypatch.delenv("PRECAST_REMOTE", raising=False)


@pytest.fixture
def no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError("this test builds nothing")

    monkeypatch.setattr("precast.wrapper.parts.build", refused)


@pytest.fixture
def model(store: Path) -> Iterator[precast.Model]:
    with precast.load(store, "tiny") as model:
        yield model


@pytest.fixture
def in_process(store: Path) -> Callable[[str], str]:
    """Runs code in another Python, with `store` and `model` in its names; returns what it printed."""
    head = f"import precast\nstore = {str(store)!r}\nmodel = precast.load(store, 'tiny')\n"
    return lambda code: python(head + code, timeout=120)
