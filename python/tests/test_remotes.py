"""A release of a remote: pushed, pulled into a store of the user's, and loaded from there."""

from __future__ import annotations

import shutil
from pathlib import Path

import precast
import pytest
from precast.client import building
from precast.client.building import gc


def test_a_release_is_loaded_from_a_remote_and_from_an_earlier_pull_without_it(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    remote = f"file://{tmp_path}/there"
    planned = precast.push("tiny", remote, dry_run=True, store=store)
    assert planned["releases"][0]["to"] is None and not (tmp_path / "there").exists()
    pushed = precast.push("tiny", remote, store=store)["releases"][0]
    assert pushed["to"] == 1 and pushed["published"]
    with pytest.raises(precast.NotFound, match="no release of `nothing`"):
        precast.load(remote, "nothing")
    collected = []
    monkeypatch.setattr(building, "gc", lambda **options: collected.append(gc(**options)))
    for _ in range(2):
        assert precast.load(remote, "tiny").modules == precast.load(store, "tiny").modules
    # Once a release came: what is older than three releases goes.
    assert [one["dry_run"] for one in collected] == [False]
    again = precast.pull(remote, "tiny", store=tmp_path / "third", dry_run=True)["releases"][0]
    assert again["plan"]["moves"] > 0
    # A name, and a lock.
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    precast.add_remote("prod", remote)
    assert precast.remotes()["remotes"][0]["url"] == remote
    assert precast.load("prod", "tiny").modules == precast.load(store, "tiny").modules
    monkeypatch.chdir(tmp_path)
    precast.pull("prod", "tiny", lock=True, store=tmp_path / "fourth")
    locked = precast.pull(locked=True, store=tmp_path / "fifth")["releases"][0]
    assert locked["identity"] == pushed["identity"]
    assert not precast.verify(store="prod")["flaws"]
    precast.remove_remote("prod")
    with pytest.raises(precast.Error):
        precast.load("prod", "tiny")
    # The remote is gone.
    shutil.rmtree(tmp_path / "there")
    with pytest.warns(precast.PrecastWarning, match="answered by an earlier pull"):
        precast.load(remote, "tiny")
    with pytest.raises(precast.BuildError, match="is no remote"):
        precast.load(f"file://{tmp_path}/elsewhere", "tiny")
