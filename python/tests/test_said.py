"""What `maybe_compile` says: warnings without a logger, the rung that answered, the padding."""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import fake_engine as fakes
import precast
import pytest
import torch
from fake_engine import SEEDS, fake_engine  # noqa: F401
from precast import CompileConfig, PrecastWarning, maybe_compile
from precast.client.progress import Told
from precast.config import REFUSED
from precast.wrapper.uses import padding, proposal
from torch import Tensor, nn


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.right(self.left(x).tanh()))


def unlogged(seeds: dict[str, Any] | None = None, **settings: Any) -> Any:
    """Returns a wrapper without a logger, on the fake engine."""
    name = f"model{len(SEEDS)}"
    SEEDS[name] = seeds if seeds is not None else {}
    return maybe_compile(Pair().eval(), CompileConfig(name=name, **settings), None, torch.ones(2, 4))


def said(found: Any) -> list[str]:
    return [str(one.message) for one in found if issubclass(one.category, PrecastWarning)]


def test_a_fallback_is_warned_of_once_at_the_line_of_the_call(fake_engine: None) -> None:  # noqa: F811
    module = unlogged()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            module(torch.ones(2, 4))
            with torch.no_grad():
                module(torch.ones(2, 4))
                module.train()(torch.ones(2, 4))
                module.eval()
    texts = said(found)
    assert [text.split(":")[1].strip() for text in texts] == [
        "the module answers itself (gradients)",
        "the module answers itself (training)",
    ]
    assert "torch.no_grad()" in texts[0] and "`drop` is in another mode" in texts[1]
    assert {one.filename for one in found} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # raises nothing in a call
        assert unlogged()(torch.ones(2, 4)).shape == (2, 4)


def test_nothing_is_warned_of_with_a_logger_and_of_what_the_caller_asked_for(fake_engine: None) -> None:  # noqa: F811
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module, _, records = fakes.wrapped(Pair().eval())
        module(torch.ones(2, 4))
        assert any("gradients" in one.getMessage() for one in records.records)
        module = unlogged(enabled=False)
        module(torch.ones(2, 4))
        module = unlogged()
        module.precast_close()
        module(torch.ones(2, 4))


def test_a_failure_is_warned_of_with_its_cause_and_hint(fake_engine: None) -> None:  # noqa: F811
    failure = precast.BuildError("net.py:3: it branches", hint="use `torch.where`")
    with pytest.warns(PrecastWarning) as found:
        module = unlogged({"open": failure})
        module(torch.ones(2, 4))
    assert said(found) == [
        "precast: the module is not compiled, and answers itself: BuildError: net.py:3: it branches\n"
        "  hint: use `torch.where`"
    ]
    with pytest.warns(PrecastWarning) as found:
        unlogged({"open": failure}, allowlist=["left", "right"])
    assert len(said(found)) == 1, "one warning for both regions"


def test_eager_in_place_of_a_slower_artifact_is_said_everywhere(
    fake_engine: None,  # noqa: F811
) -> None:
    slower = {"module": "forward", "bucket": "fixed", "sizes": {"rows": 2}, "times": 1.4567}
    with pytest.warns(PrecastWarning, match="the module is slower than eager by 1.46 times: eager answers"):
        module = unlogged({"slower": [slower]})
    with torch.no_grad():
        module(torch.ones(2, 4)), module(torch.ones(2, 4))
    module(torch.ones(2, 4))
    report = module.precast_report()
    assert (report["artifact"], report["eager"], report["original"]) == (0, 2, 1)
    assert report["rungs"] == {"eager: slower": 2, "original: gradients": 1}
    assert report["regions"][""]["answers"] == "eager: slower"
    assert report["regions"][""]["attempt"]["slower"] == {"fixed": 1.46}
    module.precast_close()
    assert module.precast_report()["eager"] == 2
    _, _, records = fakes.wrapped(Pair().eval(), {"slower": [slower]})
    assert "the module is slower than eager by 1.46 times: eager answers" in records.records[-1].getMessage()


def test_padding_is_reported_and_warned_of_once(fake_engine: None) -> None:  # noqa: F811
    module = unlogged({"bucket": {"rows": 32}})
    with torch.no_grad():
        for _ in range(49):
            module(torch.ones(2, 4))
        assert module.precast_report()["padding"] == {
            "share": 0.938,
            "dims": {"rows": {"given": 98, "run": 1568, "share": 0.938}},
        }
        with pytest.warns(PrecastWarning) as found:
            for _ in range(200):
                module(torch.ones(2, 4))
    (text,) = said(found)
    assert text.startswith("precast: 94% of what the module runs is padding, in 50 calls (`rows` 94%)"), text
    assert "`buckets={'rows': [2]}`" in text and "precast check --sizes" in text


def test_buckets_are_proposed_with_the_least_padding() -> None:
    def rows(sizes: dict[int, int]) -> Any:
        return {((("n", size),), (("n", 64),), False): count for size, count in sizes.items()}

    assert proposal(rows({3: 1})) == {"n": [3]}
    assert proposal(rows({1: 100, 2: 100, 30: 10, 31: 10, 64: 1})) == {"n": [1, 2, 31, 64]}
    many = proposal(rows({size: 1 for size in range(1, 129)}))["n"]
    assert many == [32, 64, 96, 128]
    assert padding(rows({16: 3}))["share"] == 0.75
    assert padding({((), None, False): 3}) == {}


BUILD = """
import sys, torch, precast
from torch import nn
net = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval()
config = precast.CompileConfig(name="net", store=sys.argv[1], buckets={"n": [2, 4]}, shapes={"input": ["n", 4]})
module = precast.maybe_compile(net, config, None, torch.ones(2, 4))
with torch.no_grad():
    module(torch.ones(3, 4)), module(torch.ones(2, 4))
print(module.precast_report()["padding"], module.precast_report()["original"])
"""


def test_a_build_is_announced_and_a_later_start_is_not(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(BUILD)
    first, second = (
        subprocess.run([sys.executable, script, tmp_path / "store"], capture_output=True, text=True, timeout=300)
        for _ in range(2)
    )
    for done in (first, second):
        padded = "{'share': 0.167, 'dims': {'n': {'given': 5, 'run': 6, 'share': 0.167}}} 0"
        assert done.stdout.strip() == padded, done.stderr
    line = "main.py:6: PrecastWarning: precast: `net` is being built: 2 programs; a later start takes under a second"
    assert line in first.stderr and len(first.stderr.splitlines()) < 8, first.stderr
    assert "is being built" not in second.stderr


def test_a_build_shows_a_bar_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for terminal in (True, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        programs: list[int] = []
        told = Told(programs.append)
        told.event({"event": "planned", "programs": 3, "missing": 2})
        told.event({"event": "published", "module": "forward", "bucket": "n=2"})
        told.close()
        assert programs == [2]
        shown.append(capsys.readouterr().err)
    assert "1/2 programs" in shown[0] and shown[1] == ""


def test_options_that_can_not_work_are_refused_when_the_config_is_made() -> None:
    with pytest.raises(ValueError, match="`options` has `freezing`: artifacts read the module's own weights"):
        CompileConfig(options={"freezing": True})
    with pytest.raises(ValueError, match=r"`triton\.cudagraphs`, which can't be set: the runtime captures graphs"):
        CompileConfig(options={"max_autotune": True, "triton.cudagraphs": True})
    with pytest.raises(ValueError, match="cpp_wrapper"):
        CompileConfig().declared({"options": {"cpp_wrapper": True}})
    with pytest.raises(ValueError, match=r"triton\.cudagraphs"):
        CompileConfig(options={"triton": {"cudagraphs": True}})
    assert CompileConfig(backend="inductor", options={"triton.cudagraphs": True}).options
    assert CompileConfig(options={"freezing": False, "max_autotune": True}).options
    # The same names as a build refuses.
    worker = Path(__file__).parents[2] / "crates/precast-builder/worker/compiler.py"
    tree = ast.parse(worker.read_text("utf-8"))
    tables = {one.targets[0].id: one.value for one in tree.body if isinstance(one, ast.Assign)}
    keys = {key.value for name in ("_FIXED", "_REFUSED") for key in tables[name].keys if key is not None}
    assert keys == set(REFUSED)


REFUSED_NETS = """
import logging, sys, torch, traceback, precast
from torch import nn

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU()) for _ in range(60)))

    def forward(self, x):
        x = self.layers(x)
        return x if x.sum() > 0 else -x

class Sizes(Branches):
    def forward(self, x):
        x = self.layers(x)
        return x.flatten()[x.flatten() > 0]

net, sizes = globals()[sys.argv[2]](), {"buckets": {"n": [2, 4]}, "shapes": {"x": ["n", 4]}}

def wrap(kind="inference", logger=None):
    config = precast.CompileConfig(store=sys.argv[1], kind=kind, **sizes)
    precast.maybe_compile(net.train(kind == "autograd"), config, logger, torch.randn(2, 4))

for way, call in {
    "inference": wrap,
    "autograd": lambda: wrap("autograd"),
    "build": lambda: precast.build(net, torch.randn(2, 4), name="x", store=sys.argv[1], **sizes),
    "logger": lambda: wrap(logger=logging.basicConfig() or logging.getLogger("mine")),
}.items():
    print("--- " + way, flush=True)
    try:
        call()
    except precast.BuildError:
        traceback.print_exc()
    sys.stderr.flush()
"""


@pytest.mark.parametrize(("net", "line"), [("Branches", 12), pytest.param("Sizes", 17, marks=pytest.mark.long)])
def test_a_refused_capture_is_said_in_a_few_lines(tmp_path: Path, net: str, line: int) -> None:
    script = tmp_path / "net.py"
    script.write_text(REFUSED_NETS)
    command, both = [sys.executable, script, tmp_path / "store", net], subprocess.PIPE
    done = subprocess.run(command, stdout=both, stderr=subprocess.STDOUT, text=True, timeout=300)
    ways = done.stdout.split("--- ")[1:]
    assert len(ways) == 4, done.stdout
    for said in ways:
        assert f"net.py:{line}: `{net}.forward` can't be captured" in said and "hint: " in said, said[-2000:]
        assert len(said.splitlines()) < 30, said


@pytest.mark.long
def test_a_profile_names_artifacts_by_release_and_bucket(tmp_path: Path) -> None:
    def names(call: Any) -> list[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            call()
        return [event.name for event in profile.events() if event.name.startswith("precast ")]

    config = CompileConfig(name="net", store=tmp_path, buckets={"n": [2, 4]}, shapes={"x": ["n", 4]})
    module = maybe_compile(Pair().eval(), config, None, torch.ones(2, 4))
    attempt = module.precast_report()["regions"][""]["attempt"]
    said = [
        f"precast net@{attempt['release'][:8]} forward n={size}{' (eager)' if f'n={size}' in attempt['slower'] else ''}"
        for size in (2, 4)
    ]
    with torch.no_grad():
        assert names(lambda: (module(torch.ones(1, 4)), module(torch.ones(4, 4)))) == said
        assert names(lambda: module(torch.ones(5, 4))) == []

    config = CompileConfig(name="pair", store=tmp_path, kind="autograd", prefer="artifact")
    module = maybe_compile(Pair().train(), config, None, torch.ones(2, 4))
    found = names(lambda: module(torch.ones(2, 4)).sum().backward())
    assert [one.split()[2] for one in found] == ["forward", "backward"], found
    assert all(one.startswith("precast pair.training@") for one in found)
