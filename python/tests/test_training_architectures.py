"""Training steps of two architectures of transformers; `benches/training_architectures.py` has ten."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("name", ["vit", "resnet"])
def test_an_architecture_trains_as_eager(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    from benches.training_architectures import autograd

    result = autograd(name, tmp_path)
    assert result["compiled"] and result["agrees"], result
