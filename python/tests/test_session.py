"""Sessions: states from call to call, and modules that fill them."""

from __future__ import annotations

from pathlib import Path

import precast
import pytest
import torch
from model.model import Chat
from model.model import chat as eager


def greedy(logits: torch.Tensor) -> int:
    return int(logits[0, -1].argmax())


def by_eager(net: Chat, style: torch.Tensor, prompt: list[int], count: int) -> list[int]:
    """Returns the tokens that the module itself generates."""
    with torch.no_grad():
        net.mood.copy_(net.start(style)["mood"])
        ids, at, tokens = torch.tensor([prompt]), torch.arange(len(prompt)), []
        while len(tokens) < count:
            tokens.append(greedy(net(ids, at)))
            ids, at = torch.tensor([tokens[-1:]]), at[-1:] + 1
    return tokens


def test_a_module_fills_the_states_of_a_session(chats: Path, tmp_path: Path) -> None:
    model = precast.load(chats, "chat")
    prompt, answers = [3, 14, 15], []
    for seed in (1, 2):
        style = torch.randn(1, 8, generator=torch.Generator().manual_seed(seed))
        session = model.session()
        for call in (lambda s: s.prefill(prompt), lambda s: s.decode(1), lambda s: s.fork().decode(1)):
            with pytest.raises(precast.BadInput, match="`mood`: it has no value yet: module `start` fills it"):
                call(session)
        assert session.position == 0
        session.run("start", style)
        tokens = [greedy(session.prefill(prompt))]
        while len(tokens) < 8:
            tokens.append(greedy(session.decode(tokens[-1])))
        assert tokens == by_eager(eager(), style, prompt, 8)
        answers.append(tokens)
        # Copies and files have the value; a session that begins again has none.
        session.save(tmp_path / "chat")
        expected = session.fork().decode(tokens[-1])
        assert torch.equal(session.decode(tokens[-1]), expected)
        session.reset()
        with pytest.raises(precast.BadInput, match="no value yet"):
            session.decode(1)
        session.load(tmp_path / "chat")
        assert torch.equal(session.decode(tokens[-1]), expected)
        # A value of the caller's.
        session.reset()
        session.run("start", style * 0)
        session.close()
    assert answers[0] != answers[1]
