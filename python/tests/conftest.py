"""What the package's tests share: one store with small artifacts, built once for each run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import precast
import pytest

HERE = Path(__file__).parent


def command() -> str:
    """The command of the environment, or that of PRECAST_COMMAND."""
    return os.environ.get("PRECAST_COMMAND") or str(Path(sys.executable).parent / "precast")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marks."""
    config.addinivalue_line("markers", "long: left out by `make test`; `make test-long` runs it")


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the model `tiny` of `model/`. PRECAST_TEST_STORE names one that is kept between runs."""
    kept = os.environ.get("PRECAST_TEST_STORE")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("store") / "artifacts"
    _build("precast.toml", folder)
    return folder


@pytest.fixture(scope="session")
def chats(store: Path) -> Path:
    """The store with the model `chat` in it, whose sessions begin with a call of `start`."""
    _build("chat.toml", store)
    return store


@pytest.fixture(scope="session")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the pair of a block of `blocks_net`."""
    import torch
    from blocks_net import config, net

    kept = os.environ.get("PRECAST_TEST_STORE")
    store = Path(kept) / "blocks" if kept else tmp_path_factory.mktemp("blocks")
    module = precast.maybe_compile(net(), config(store), None, torch.ones(2, 4))
    module(torch.ones(2, 4)).sum().backward()
    assert module.precast_report()["artifact"] == 3, module.precast_report()
    return store


def _build(spec: str, store: Path) -> None:
    environment = {**os.environ, "PRECAST_PYTHON": sys.executable}
    build = [command(), "build", "-f", HERE / "model" / spec, "--store", store, "-q"]
    subprocess.run(build, env=environment, check=True, timeout=600)


@pytest.fixture
def model(store: Path) -> Iterator[precast.Model]:
    with precast.load(store, "tiny") as model:
        yield model


@pytest.fixture
def in_process(store: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs code in another Python, with `store` and `model` in its names. A signal fails the test."""

    def run(code: str, *, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        head = f"import precast\nstore = {str(store)!r}\nmodel = precast.load(store, 'tiny')\n"
        done = subprocess.run([sys.executable, "-c", head + code], capture_output=True, text=True, timeout=timeout)
        assert done.returncode >= 0, f"signal {-done.returncode}:\n{done.stderr}"
        return done

    return run
