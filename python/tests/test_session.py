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
            tokens.append(greedy(net(ids, at, torch.ones(1))))
            ids, at = torch.tensor([tokens[-1:]]), at[-1:] + 1
    return tokens


def test_a_module_fills_the_states_of_a_session(chats: Path, tmp_path: Path) -> None:
    model = precast.load(chats, "chat")
    prompt, answers = [3, 14, 15], []
    for seed in (1, 2):
        style = torch.randn(1, 8, generator=torch.Generator().manual_seed(seed))
        session = model.session()
        for call in (lambda s: s.prefill(prompt, 1.0), lambda s: s.decode(1, 1.0), lambda s: s.fork().decode(1, 1.0)):
            with pytest.raises(precast.BadInput, match="`mood`: it has no value yet: module `start` fills it"):
                call(session)
        assert session.position == 0
        session.run("start", style)
        tokens = [greedy(session.prefill(prompt, warmth=torch.ones(1)))]
        while len(tokens) < 8:
            tokens.append(greedy(session.decode(tokens[-1], warmth=1)))
        assert tokens == by_eager(eager(), style, prompt, 8)
        answers.append(tokens)
        # Copies and files have the value; a session that begins again has none.
        session.save(tmp_path / "chat")
        expected = session.fork().decode(tokens[-1], 1.0)
        assert torch.equal(session.decode(tokens[-1], warmth=1), expected)
        session.reset()
        with pytest.raises(precast.BadInput, match="no value yet"):
            session.decode(1, 1.0)
        session.load(tmp_path / "chat")
        assert torch.equal(session.decode(tokens[-1], warmth=1), expected)
        # A value of the caller's.
        session.reset()
        session.run("start", style * 0)
        session.close()
    assert answers[0] != answers[1]


def test_inputs_beside_tokens_are_numbers_or_tensors_by_place_or_name(chats: Path) -> None:
    session = precast.load(chats, "chat").session()
    session.run("start", torch.zeros(1, 8))
    once = session.fork().prefill([1, 2], 1.0)
    # The spec has a default.
    assert torch.equal(session.fork().prefill([1, 2]), once)
    for given in ({"warmth": 2}, {"warmth": torch.full((1,), 2.0)}, {"warmth": torch.full((1,), 2.0).numpy()}):
        assert torch.equal(session.fork().prefill([1, 2], **given), once * 2)
    wrong = (
        ((), {}, "`decode` lacks `warmth`"),
        ((1.0, 2.0), {}, "`decode` got 2 inputs beside tokens"),
        ((1.0,), {"warmth": 1.0}, "`warmth` of `decode` is given twice"),
        ((), {"cold": 1.0}, "`cold` of `decode` is none of its inputs"),
        ((), {"warmth": torch.ones(2)}, "warmth"),
    )
    for args, kwargs, message in wrong:
        with pytest.raises(precast.BadInput, match=message) as raised:
            session.decode(1, *args, **kwargs)
    with pytest.raises(precast.BadInput) as raised:
        session.decode(1)
    assert raised.value.hint == "beside tokens it takes `warmth`"
    assert session.position == 0


def test_a_refused_prompt_changes_nothing(chats: Path) -> None:
    session = precast.load(chats, "chat").session()
    session.run("start", torch.zeros(1, 8))
    session.prefill([7], 1.0)
    before = session.state("seen")
    # Calls of two tokens and of one, and more than the context has.
    for prompt in ([1, 2, 50], [1, 2, 3, -1], [1, 50, 3], [1] * 16):
        with pytest.raises(precast.BadInput, match=r"expected values from 0 to|the context is full"):
            session.prefill(prompt, 1.0)
        assert session.position == 1
        assert torch.equal(session.state("seen"), before)


def test_a_call_without_a_session_says_how_to_get_one(chats: Path) -> None:
    model = precast.load(chats, "chat")
    for call in (
        lambda: model.decode(5),
        lambda: model.prefill([1, 2]),
        lambda: model.decode(torch.zeros(1, 1).long()),
    ):
        with pytest.raises(
            precast.BadInput, match="keeps states from call to call, and was called without a session"
        ) as raised:
            call()
        assert raised.value.hint.startswith("open a session of the model, and run the module in it")
