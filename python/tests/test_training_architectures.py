"""Training steps of an architecture of transformers; `benches/training_architectures.py`, by hand, has ten."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.long
def test_an_architecture_trains_as_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    from benches.training_architectures import autograd

    result = autograd("resnet", tmp_path)
    assert result["compiled"] and result["agrees"], result
