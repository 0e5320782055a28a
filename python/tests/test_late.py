"""When the device's checks of values are read: stand-ins for CUDA's event, and for the notes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from precast import BadInput
from precast.late import Late
from torch import Tensor


class Notes:
    def __init__(self, value: int, log: list[str]) -> None:
        self.value, self.log = torch.tensor([value]), log

    def tensor(self) -> Tensor:
        return self.value

    def judge(self, notes: list[int]) -> None:
        self.log.append(f"judged {notes}")
        if notes != [0]:
            raise BadInput(f"{notes[0]} is out of bounds")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    class Event:
        def record(self, stream: Any) -> None:
            found.append("recorded")

        def synchronize(self) -> None:
            found.append("waited")

    empty_like = torch.empty_like
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch, "empty_like", lambda tensor, **_: empty_like(tensor))
    return found


def test_notes_are_read_once_and_in_order(log: list[str]) -> None:
    late = Late()
    late.add(None)
    late.settle()
    assert log == []
    late.add(Notes(0, log))  # type: ignore[arg-type]
    late.add(Notes(7, log))  # type: ignore[arg-type]
    assert log == ["recorded", "recorded"], "a call waited"
    with pytest.raises(BadInput, match="7 is out of bounds"):
        late.settle()
    late.settle()
    assert log[2:] == ["waited", "judged [0]", "waited", "judged [7]"]
