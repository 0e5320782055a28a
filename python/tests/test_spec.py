"""The spec as dataclasses: every spec of the checkout, read and written."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest
from precast.errors import BadInput
from precast.spec import Allow, Buckets, Compile, Gate, Input, Module, Spec, State, Train

CHECKOUT = Path(__file__).resolve().parents[2]

# Every key of the spec. Keys that exclude each other are in two modules.
EVERY_KEY = Spec(
    name="every",
    entry="model:load",
    weights=Path("weights.safetensors"),
    unused_weights=["head.**"],
    samples="model:samples",
    context=2048,
    assets={"vocabulary": "vocab.txt"},
    device="cpu",
    isa="x86-64-v3",
    compile=Compile(
        enabled=True,
        backend="inductor",
        mode="default",
        dynamic={"seq": {"min": 2, "max": 512}},
        options={"freezing": False, "cpp.simdlen": 1, "triton": {"cudagraphs": False}, "attention": "split"},
        passes=["passes:fuse"],
        allowlist=["*"],
        blocklist=["head.**"],
        fullgraph=True,
        healthcheck=True,
        smoketest_steps=3,
        fail_policy="fallback_eager",
    ),
    modules=[
        Module(
            "encode",
            path="",
            method="forward",
            regions=["layers.*"],
            inputs={
                "ids": Input("int64", ["batch", "seq"], pad=0, range=(0, 30522)),
                "at": Input("int64", ("seq",), pad=0, range=[0, "context"]),
                "mask": Input("bool", ["batch", 3], pad=False),
                "heat": Input("float32", [1], default=0.5),
            },
            state={"blocks.*.k": State([1, 4, "context", 8], first="own"), "hidden": "zeros"},
            buckets=Buckets(batch=[1, 8], seq=[32], context=[64]),
            gate=Gate(rtol=1e-4, atol=1e-05),
            padding="trusted",
            mode="max-autotune",
            dynamic=True,
        ),
        Module("pool", buckets=Buckets(points=[{"batch": 1, "seq": 512}])),
        Module(
            "train",
            kind="step",
            inputs={"x": Input("float32", [8, 4])},
            train=Train("adamw", loss="loss", clip=1.0, accumulate=True, autocast="bfloat16", weight_decay=0.1),
        ),
    ],
    allow=[Allow("print", "only while this is new", function="Encoder.forward")],
)


def specs() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.toml"], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    files = (CHECKOUT / name for name in listed.stdout.split())
    return [file for file in files if "[[module]]" in file.read_text("utf-8")]


@pytest.mark.parametrize("file", specs(), ids=lambda file: str(file.relative_to(CHECKOUT)))
def test_a_spec_of_the_checkout_is_the_same_after_a_round_trip(file: Path) -> None:
    spec = Spec.read(file)
    assert tomllib.loads(spec.toml()) == tomllib.loads(file.read_text("utf-8"))
    assert Spec.parse(spec.toml()) == spec
    assert spec.folder == file.parent and len(specs()) > 10


def test_every_key_of_the_documentation_is_a_field() -> None:
    page = (CHECKOUT / "docs/src/reference/spec.md").read_text("utf-8")
    tables = page.split("## A spec with everything")[0].split("\n## ")[1:]
    rows = (line.split("`")[1] for table in tables for line in table.splitlines() if line.startswith("| `"))
    documented = {row.strip("[]").removeprefix("module.") for row in rows}
    written = EVERY_KEY.toml()
    missing = {key for key in documented if f"{key} =" not in written and f"{key}]" not in written}
    # Lists of tables are named after their keys.
    assert missing == set()


def test_a_spec_with_every_key_is_the_same_after_a_round_trip(tmp_path: Path) -> None:
    EVERY_KEY.write(tmp_path / "precast.toml")
    again = Spec.read(tmp_path / "precast.toml")
    assert again.toml() == EVERY_KEY.toml() and again.folder == tmp_path
    assert again.modules[0].inputs is not None and again.modules[0].inputs["at"].range == [0, "context"]
    assert again.modules[1].buckets == Buckets(points=[{"batch": 1, "seq": 512}])
    assert again.compile.options == EVERY_KEY.compile.options


@pytest.mark.parametrize("name", ["plain", 'a "quoted" one', "tab\tand\nline", "\x7f\x00", "ünï ✓ 𝄞", "back\\slash"])
def test_text_of_any_kind_survives(name: str) -> None:
    spec = Spec(name=name, entry="m:f", modules=[Module("x", inputs={name: Input("int64", [1])})])
    assert Spec.parse(spec.toml()) == spec


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        (("entry =", "entri ="), "unknown key `entri` in [model]", "did you mean `entry`?"),
        (('device = "cpu"', 'gpu = "cpu"'), "unknown key `gpu` in [target]", "known are `device`, `isa`"),
        (("regions =", "region ="), "unknown key `region` in [[module]] `encode`", "did you mean `regions`?"),
        (('shape = ["batch", 3]', "shap = []"), "unknown key `shap` in input `mask`", "did you mean `shape`?"),
        (("rtol =", "rtoll ="), "unknown key `rtoll` in [module.gate]", "did you mean `rtol`?"),
        (("fullgraph =", "whole ="), "unknown key `whole` in [compile]", "known are `enabled`"),
        (('reason = "only', 'because = "only'), "unknown key `because` in [[check.allow]]", "known are `finding`"),
        (("[model]", "[models]"), "unknown key `models` in the spec", "did you mean `model`?"),
        (("schema = 1", "schema = 2"), "unknown schema 2", "schema = 1"),
        (("[model]", "[model"), "invalid TOML", ""),
        (('finding = "print"\n', ""), "missing key `finding` in [[check.allow]]", ""),
    ],
)
def test_a_wrong_key_is_refused_by_name(change: tuple[str, str], message: str, hint: str) -> None:
    old, new = change
    text = EVERY_KEY.toml()
    assert old in text
    with pytest.raises(BadInput) as raised:
        Spec.parse(text.replace(old, new, 1))
    assert message in str(raised.value)
    assert hint in raised.value.hint


def test_a_value_that_toml_lacks_is_refused() -> None:
    spec = Spec("x", "m:f", [Module("x", options={"cpp.threads": object()})])
    with pytest.raises(BadInput, match="no value of type object"):
        spec.toml()
