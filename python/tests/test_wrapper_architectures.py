"""`maybe_compile` on architectures of transformers; `benches/architectures.py` and the same for training have more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("name", ["t5", "llama", "resnet"])
def test_an_architecture_answers_as_eager_at_every_size(
    name: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    from benches.architectures import sweep

    store = tmp_path_factory.getbasetemp() / "architectures"
    result = sweep(name, store, quick=True)
    assert result["compiled"], result
    assert not result["wrong"], result["wrong"]
    assert result["artifact"] > 0 and set(result["reasons"]) <= {"shape"}, result


def test_an_architecture_trains_as_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    from benches.training_architectures import autograd

    result = autograd("resnet", tmp_path)
    assert result["compiled"] and result["agrees"], result
