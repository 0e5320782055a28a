"""The commands as functions, with the real command: one build of a small module, and all that looks at it."""

from __future__ import annotations

import copy
import inspect
import io
import json
import pickle
import re
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import numpy
import precast
import pytest
from precast.client import building, command, objects, progress
from precast.spec import Buckets, Input, Module, Spec
from safetensors.numpy import save_file

CHECKOUT = Path(__file__).resolve().parents[2]

MODEL = """
    import torch
    from torch import nn

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x).relu()

        def branch(self, x):
            if x.sum() > 0:
                return x
            return -x

    def load():
        return Small().eval()
"""


def module(name: str = "forward", **fields: Any) -> Module:
    return Module(name, inputs={"x": Input("float32", ["batch", 4], pad=0.0)}, buckets=Buckets(batch=[2]), **fields)


class Project:
    """A folder with a model, its spec and its store."""

    def __init__(self, folder: Path) -> None:
        (folder / "model.py").write_text(textwrap.dedent(MODEL), "utf-8")
        self.store = folder / "artifacts"
        self.spec = Spec("small", "model:load", [module()], folder=folder)
        self.file = folder / "precast.toml"
        self.spec.write(self.file)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def built(project: Project) -> objects.BuildResult:
    """The only compile of these tests."""
    return precast.build(project.spec, store=project.store, progress=False)


def test_a_build_publishes_a_release(built: objects.BuildResult, project: Project) -> None:
    assert {row.program: row.state for row in built.programs} == {"forward batch=2": "built", "forward eager": "built"}
    assert built.compiled == 1
    assert built.published
    assert built.release is not None and built.release.seq == 1
    assert not built.failed
    assert repr(built).startswith("built 2 programs, 1 artifact compiled (")
    assert "published release 1" in repr(built)
    assert "forward batch=2" in built._repr_html_()
    assert sorted(file.name for file in project.file.parent.glob("*.toml")) == ["precast.toml"]
    again = precast.build(project.file, store=str(project.store), progress=False)
    assert again.compiled == 0 and not again.published
    assert repr(again).startswith("fresh: 2 of 2 programs are in the store (")


def test_each_command_returns_what_it_found(built: objects.BuildResult, project: Project, tmp_path: Path) -> None:
    store = project.store
    programs = precast.ls(store=store).programs
    assert [(row.model, row.bucket, row.state) for row in programs] == [
        ("small", "batch=2", "live"),
        ("small", "eager", "live"),
    ]
    assert len(precast.ls("nothing*", store=store).programs) == 0
    assert [row.bucket for row in precast.ls(bucket="batch*", store=store).programs] == ["batch=2"]
    assert precast.ls(artifacts=True, store=store).artifacts
    assert precast.ls(objects=True, store=store).objects
    assert precast.show("forward batch=2", store=store).id == programs[0].id
    (why,) = precast.why("forward batch=2", store=store).why
    assert why.reasons[0].reason == "never-built"
    assert precast.diff("small@1", "small", store=store).same == 2
    assert [group.name for group in precast.du("module", store=store).groups] == ["small forward"]
    assert precast.verify(store=store).defects == []
    (release,) = precast.releases(store=store).releases
    assert (release.model, release.seq) == ("small", 1)
    assert any(file.name == "libtorch_cpu.so" for file in precast.deps("small", store=store).files)
    assert precast.gc(dry_run=True, store=store).dry_run
    plan = precast.plan(project.spec, store=store, settings={"options": {"freezing": False}}, only="forward eager")
    assert (plan.missing, [row.bucket for row in plan.programs]) == (1, ["eager"])
    assert [(one.reason, one.name) for one in plan.programs[0].why] == [("option-changed", "freezing")]
    assert [model.model for model in precast.report(tmp_path / "report.html", store=store).models] == ["small"]
    assert "<html" in (tmp_path / "report.html").read_text("utf-8").lower()
    diagnosis = precast.doctor(store=store)
    assert diagnosis.can_build and "torch" in {check.name for check in diagnosis.checks}
    bench = precast.bench("forward", store=store, seconds=0.1)
    assert bench.module == "forward" and bench.buckets
    precast.export(tmp_path / "host", "small", dry_run=True, store=store)
    assert not (tmp_path / "host").exists()
    save_file({"w": numpy.zeros((2, 3), "float32")}, tmp_path / "-w.safetensors")
    assert "-w.safetensors" in json.dumps(precast.inspect(tmp_path / "-w.safetensors").json)
    with pytest.raises(precast.BuildError, match=r"counts\.json"):
        precast.stats(tmp_path / "counts.json")


def test_what_a_store_lacks_is_not_found(built: objects.BuildResult, project: Project) -> None:
    with pytest.raises(precast.NotFound) as raised:
        precast.show("nothing", store=project.store)
    assert "`precast ls` lists programs" in raised.value.hint
    with pytest.raises(precast.NotFound):
        precast.rollback("nothing", store=project.store)
    with pytest.raises(precast.Error, match="small"):
        precast.rollback("small", to=7, store=project.store)
    # No option, though it begins like one.
    with pytest.raises(precast.NotFound, match="--all"):
        precast.show("--all", store=project.store)


def test_a_failed_build_raises_with_its_result_and_a_check_returns_it(
    built: objects.BuildResult, project: Project
) -> None:
    spec = Spec("small", "model:load", [module("branch", method="branch")], folder=project.spec.folder)
    with pytest.raises(precast.BuildError, match="nothing answers `branch`") as raised:
        precast.build(spec, store=project.store, progress=False)
    result = raised.value.result
    assert raised.value.code == "1"
    assert result.failed[0].program == "branch batch=2"
    assert "model.py:15: can't capture module `branch`" in repr(result)
    assert result.findings[0].findings[0].category == "control-flow"
    assert precast.ls(state="failed", store=project.store).programs[0].module == "branch"
    check = precast.check(spec)
    finding = next(row for row in check.findings if row.category == "control-flow")
    assert check.failed and finding.location == "model.py:15" and "torch.where" in finding.fix
    assert "control-flow" in repr(check) and "control-flow" in check._repr_html_()


def test_a_new_spec_is_written_and_read(project: Project, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(textwrap.dedent(MODEL), "utf-8")
    file = tmp_path / "precast.toml"
    new = precast.init("model:load", input=["x=float32[batch,4]"], file=file)
    assert new.text == file.read_text("utf-8")
    assert Spec.read(file).modules[0].inputs == {"x": Input("float32", ["batch", 4], pad=0.0)}
    with pytest.raises(precast.BuildError, match=r"precast\.toml"):
        precast.init("model:load", input=["x=float32[batch,4]"], file=file)


EVENTS: list[dict[str, Any]] = [
    {"event": "planned", "programs": 3, "missing": 2},
    {"event": "worker", "worker": 0, "python": "3.11", "torch": "2.11", "seconds": 3.0},
    {"event": "begin", "worker": 0, "job": "compile", "what": "encode batch=8"},
    {"event": "left", "seconds": 61.0},
    {"event": "end", "worker": 0, "job": "compile", "what": "encode batch=8", "seconds": 3.0},
    {"event": "published", "module": "encode", "bucket": "batch=8", "id": "0", "slower": False},
    {"event": "failed", "module": "encode", "bucket": "eager", "id": "0", "message": "no", "location": None},
]


def test_progress_on_a_terminal_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "100")
    shown = progress.progress()
    for event in EVENTS:
        shown.event(event)
    shown.close()
    lines = terminal.getvalue().split("\r\x1b[K")
    assert "Building [                    ] 0/2 programs" in lines
    assert "Building [                    ] 0/2 programs · compile encode batch=8" in lines
    assert any(line.startswith("Building [==========          ] 1/2 programs, about 1 min") for line in lines)
    assert "failed: encode eager: no\n" in lines
    assert lines[-1] == ""
    assert max(map(len, lines)) < 100


def test_progress_in_a_notebook_is_one_display(monkeypatch: pytest.MonkeyPatch) -> None:
    shown_texts: list[str] = []

    class ZMQInteractiveShell:
        """The shell of a kernel."""

    class Handle:
        def update(self, shown: object) -> None:
            shown_texts.append(repr(shown))

    ipython, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    monkeypatch.setattr(ipython, "get_ipython", ZMQInteractiveShell, raising=False)
    monkeypatch.setattr(display, "display", lambda shown, display_id: Handle(), raising=False)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    shown = progress.progress()
    for event in EVENTS:
        shown.event(event)
    assert shown_texts[1] == "Building [                    ] 0/2 programs · compile encode batch=8"
    assert shown_texts[-1].startswith("failed: encode eager: no\nBuilding [====================] 2/2 programs")
    shown.close()
    assert shown_texts[-1] == "failed: encode eager: no\n"


def test_progress_elsewhere_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    shown = progress.progress()
    for event in EVENTS:
        shown.event(event)
    shown.close()
    assert capsys.readouterr().err.splitlines() == [
        "plan: 2 of 3 programs are missing",
        "published: encode batch=8",
        "failed: encode eager: no",
    ]


def test_fields_are_attributes_and_are_printed() -> None:
    rows = [{"id": "f" * 64, "bytes": 797_123}]
    document = objects.Document({"schema": 1, "name": "a", "raise": True, "rows": rows, "no": []})
    assert document.name == "a" and document["raise"] is True and document.rows[0].bytes == 797_123
    assert document.no == [] and "rows" in dir(document) and "rows" in document
    with pytest.raises(AttributeError, match="Document has no field `nothing`"):
        _ = document.nothing
    assert copy.deepcopy(document) == document and pickle.loads(pickle.dumps(document)) == document
    assert repr(document) == "Document(name=a, raise=yes)\nrows:\nid            bytes\nffffffffffff  797 kB"
    assert repr(document.no) == "[]"
    assert "<td style='text-align:left'>797 kB</td>" in document._repr_html_()
    document = objects.Document({"name": "<b>", "rows": [{"<i>": "<script>"}]})
    assert "<b>" not in document._repr_html_().replace("<b>rows</b>", "") and "<script>" not in document._repr_html_()
    table = objects.Table([{"number": number} for number in range(100)])
    assert repr(table).splitlines()[-1] == "… 40 more" and "… 40 more" in table._repr_html_()


DOCUMENTS = {
    "build": objects.BuildResult,
    "plan": objects.Plan,
    "check": objects.CheckResult,
    "init": objects.NewSpec,
    "doctor": objects.Diagnosis,
    "why": objects.Why,
    "du": objects.DiskUsage,
    "gc": objects.Collection,
    "report": objects.Report,
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_fields_of_a_class_are_those_of_its_schema(name: str) -> None:
    schema = json.loads((CHECKOUT / f"docs/schema/{name}.json").read_text("utf-8"))
    if name == "build":
        schema = schema["$defs"]["Last"]["oneOf"][0]
    assert set(DOCUMENTS[name].__annotations__) == set(schema["properties"]) - {"schema", "event"}


# Options with another name as a parameter, and options without a parameter: `dry-run` of `build` is `plan`.
OTHER_NAMES = {"set": "settings", "file": "spec"}
LACKING = {"build": {"dry-run"}, "ls": {"ids"}}
OF_ALL = {"format", "color", "quiet", "verbose", "help", "version"}


@pytest.mark.parametrize(
    "name", ["build", "plan", "check", "ls", "show", "log", "why", "diff", "du", "verify", "report", "doctor", "gc"]
)
def test_every_option_of_a_command_is_a_parameter(name: str) -> None:
    run = subprocess.run([command.find(), name, "--help"], capture_output=True, text=True, check=True)
    options = set(re.findall(r"^ +(?:-\w, |    )--([a-z-]+)", run.stdout, re.MULTILINE))
    assert len(options) > len(OF_ALL)
    expected = {
        OTHER_NAMES.get(option, option.replace("-", "_")) for option in options - OF_ALL - LACKING.get(name, set())
    }
    function = building.build_spec if name == "build" else getattr(building, name)
    assert expected - set(inspect.signature(function).parameters) == set()


def test_the_functions_are_names_of_the_package() -> None:
    functions = {name for name, value in vars(building).items() if inspect.isfunction(value) and name[0] != "_"}
    own = {name for name in functions if getattr(building, name).__module__ == building.__name__}
    assert own - {"build_spec"} == {name for name in own if getattr(precast, name, None) is getattr(building, name)}
