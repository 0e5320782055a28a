"""When the device's checks of values are read in training: a stand-in for the notes."""

from __future__ import annotations

import pytest
from precast import BadInput
from precast.wrapper.deferred import DeferredChecks


class Notes:
    def __init__(self, value: int, log: list[int]) -> None:
        self.value, self.log = value, log

    def check(self) -> None:
        self.log.append(self.value)
        if self.value:
            raise BadInput(f"{self.value} is out of bounds")


def test_notes_are_read_once_and_in_order() -> None:
    checks, log = DeferredChecks(), list[int]()
    checks.add(None)
    checks.settle()
    checks.add(Notes(0, log))  # type: ignore[arg-type]
    checks.add(Notes(7, log))  # type: ignore[arg-type]
    checks.add(Notes(0, log))  # type: ignore[arg-type]
    assert log == [], "a call waited"
    with pytest.raises(BadInput, match="7 is out of bounds"):
        checks.settle()
    checks.settle()
    assert log == [0, 7, 0]
