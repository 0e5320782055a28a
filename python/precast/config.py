"""Settings of `precast.maybe_compile`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
KINDS = ("inference", "autograd")
PREFER = ("fastest", "artifact")
FAIL_POLICIES = ("fallback_eager", "raise")
DECLARED = ("enabled", "backend", "mode", "dynamic", "fullgraph", "options", "healthcheck", "smoketest_steps")
"""The settings that a submodule may declare with `get_torch_compile_config`."""

_DECIDED = "it decides what an artifact is"
_OF_WEIGHTS = "weights are no part of an artifact"
REFUSED = {
    "always_keep_tensor_constants": _DECIDED,
    "aot_inductor.cross_target_platform": "an artifact runs on the machine that it is built for",
    "aot_inductor.dynamic_linkage": "an artifact is a shared object",
    "aot_inductor.embed_kernel_binary": _DECIDED,
    "aot_inductor.force_mmap_weights": _OF_WEIGHTS,
    "aot_inductor.metadata": "it is written by the compiler",
    "aot_inductor.output_path": "the store decides where an artifact lies",
    "aot_inductor.package": _DECIDED,
    "aot_inductor.package_constants_in_so": _DECIDED,
    "aot_inductor.package_constants_on_disk_format": _OF_WEIGHTS,
    "aot_inductor.package_cpp_only": "an artifact is a shared object",
    "aot_inductor.use_runtime_constant_folding": _DECIDED,
    "cpp_wrapper": "an artifact is C++ already",
    "fx_graph_cache": _DECIDED,
    "fx_wrapper": "an artifact is C++ already",
    "triton.cudagraphs": "the runtime captures graphs: set `mode`",
}
"""Inductor's options that a build refuses, and why."""


@dataclass(frozen=True)
class CompileConfig:
    """The settings of a module's compilation, and the policy for failures.

    A wrong value raises `ValueError` here, so that `maybe_compile` has only valid settings.
    """

    enabled: bool = True
    """`False`: the module itself answers every call."""
    backend: str = "precast"
    """`"precast"`: artifacts from the store. `"eager"`: the module itself. Any other name is one of
    `torch.compile(backend=…)`, as `"inductor"`."""
    kind: str = "inference"
    """`"inference"`: artifacts answer in eval mode without gradients. `"autograd"`: also in training mode and with
    gradients, by a forward and a backward program. Only for `backend = "precast"`."""
    mode: str = "default"
    """One of `MODES`. The second and the third run as CUDA graphs on a GPU."""
    tune: bool = False
    """`True`: a build tries several option sets and graph passes for every program, and keeps the fastest, as
    `precast build --tune`: it takes several times as long."""
    dynamic: bool | Mapping[str, Any] | None = None
    """`True`, or `{"seq": {"min": 2, "max": 512}}`: one more artifact, for every size. `None` is `False`; a backend of
    torch then makes a dimension dynamic at its second size."""
    fullgraph: bool = True
    """For backends of torch: `True` refuses graph breaks. Artifacts always hold the whole graph of a module."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Inductor's options by their own names."""
    allowlist: Sequence[str] = ("*",)
    """Patterns of submodule names, as `"encoder.layer.*"` (`fnmatch`). The module itself has the name `""`."""
    blocklist: Sequence[str] = ()
    """Patterns of submodule names that are not compiled; stronger than the allowlist."""
    healthcheck: bool = True
    """`False`: no comparison with eager before the first call."""
    smoketest_steps: int = 3
    """Calls of the comparison with eager."""
    fail_policy: str = "fallback_eager"
    """`"fallback_eager"`: failures are logged, and the module itself answers. `"raise"`: failures are raised."""
    prefer: str = "fastest"
    """`"fastest"`: the original answers training calls if the pair is slower. `"artifact"`: the pair answers."""
    buckets: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Sizes of each bucketed dimension: `{"batch": [1, 8], "seq": [32, 128]}`. Empty: the sizes of the sample batch."""
    shapes: Mapping[str, Sequence[str | int]] = field(default_factory=dict)
    """The dimensions of each bucketed input: `{"input_ids": ["batch", "seq"]}`."""
    pad: bool | Mapping[str, float] = True
    """Whether a call is padded to the next bucket. A mapping has the value for each input; the others get 0. `False`
    with `dynamic`: a bucket answers calls of exactly its sizes, and the dynamic artifact all others."""
    check: Literal["late", "now"] = "late"
    """`"late"`: values on a GPU are checked without a wait, and a value out of bounds is raised by a later call; what
    follows from it is NaN. `"now"`: each call waits for the device."""
    release: str | None = None
    """A release that `precast build` made of a module of kind `autograd`, as `"encoder@3"`, or `"encoder"` for the
    newest: nothing is captured or built. It has its own sizes and settings."""
    name: str | None = None
    """The name of the release. A second process with the same name and the same sources starts without a build."""
    store: str | Path = "artifacts"
    """The folder of the store."""
    remote: str | None = None
    """A remote as for `precast pull`, to look for releases and artifacts before a build; else `PRECAST_REMOTE`."""
    push: bool = False
    """`True`: what was built is pushed to the remote. Of several processes that lack one artifact, one compiles it."""
    rtol: float | None = None
    """Relative tolerance of the comparison with eager. `None`: by dtype."""
    atol: float | None = None
    """Absolute tolerance of the comparison with eager. `None`: by dtype."""

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, MODES)
        _one_of("kind", self.kind, KINDS)
        _one_of("fail_policy", self.fail_policy, FAIL_POLICIES)
        _one_of("prefer", self.prefer, PREFER)
        _one_of("check", self.check, ("late", "now"))
        if not isinstance(self.backend, str) or not self.backend:
            raise ValueError(f"`backend` is {self.backend!r}, not the name of a backend")
        if not isinstance(self.smoketest_steps, int) or self.smoketest_steps < 0:
            raise ValueError(f"`smoketest_steps` is {self.smoketest_steps!r}, not a number of calls")
        for key in ("allowlist", "blocklist"):
            patterns = getattr(self, key)
            if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
                raise ValueError(f"`{key}` is {patterns!r}, not a list of patterns")
        for dim, sizes in self.buckets.items():
            if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
                raise ValueError(f"`buckets` has {sizes!r} for `{dim}`, not a list of sizes")
        for name, axes in self.shapes.items():
            if unknown := [axis for axis in axes if isinstance(axis, str) and axis not in self.buckets]:
                raise ValueError(f"`shapes` names `{unknown[0]}` for `{name}`, which `buckets` has no sizes for")
        if not isinstance(self.pad, bool):
            for name in self.pad:
                if name not in self.shapes:
                    raise ValueError(f"`pad` has a value for `{name}`, which `shapes` has not")
        if self.backend == "precast":
            self._check_options()
        elif self.tune:
            raise ValueError(f'`tune` is given with `backend = "{self.backend}"`: only "precast" tries option sets')
        if self.push and not (self.remote or os.environ.get("PRECAST_REMOTE")):
            raise ValueError("`push` is given without `remote`, which names the place")
        if self.release is not None:
            self._check_release()
        used = {axis for axes in self.shapes.values() for axis in axes}
        if unused := [dim for dim in self.buckets if dim not in used]:
            raise ValueError(f"`buckets` has `{unused[0]}`, which `shapes` names for no input")

    def _check_options(self) -> None:
        if self.options.get("freezing"):
            why = "artifacts read the module's own weights, and freezing would fold their values into the code"
            raise ValueError(f"`options` has `freezing`: {why}. `precast.build` builds a release with frozen weights")
        for name in _flat(self.options):
            if name in REFUSED:
                raise ValueError(f"`options` has `{name}`, which can't be set: {REFUSED[name]}")

    def _check_release(self) -> None:
        if self.kind != "autograd" or self.backend != "precast":
            raise ValueError(
                '`release` is for `kind = "autograd"` and `backend = "precast"`; `load` takes other releases'
            )
        for key in ("buckets", "shapes", "name", "options", "tune"):
            if getattr(self, key):
                raise ValueError(f"`{key}` is given with `release`, which has its own: it belongs into the spec")
        if tuple(self.allowlist) != ("*",):
            raise ValueError("`allowlist` is given with `release`, which is of the whole module: wrap the submodule")

    def declared(self, settings: Mapping[str, Any]) -> CompileConfig:
        """Returns these settings with the declarations of a submodule in their place; `options` are merged."""
        if unknown := [key for key in settings if key not in DECLARED]:
            known = ", ".join(DECLARED)
            raise ValueError(f"`get_torch_compile_config` returns `{unknown[0]}`; a submodule may set {known}")
        changes = dict(settings)
        if "options" in changes:
            changes["options"] = {**self.options, **changes["options"]}
        return replace(self, **changes)

    def points(self) -> list[dict[str, int]]:
        """Returns the buckets: every combination of the sizes."""
        sizes = itertools.product(*self.buckets.values())
        return [dict(zip(self.buckets, each, strict=True)) for each in sizes] if self.buckets else []


def _flat(options: Mapping[str, Any]) -> list[str]:
    """Returns the names of options, also of those in groups, as `{"triton": {"cudagraphs": True}}`."""
    return [
        full
        for name, value in options.items()
        for full in ([f"{name}.{one}" for one in value] if isinstance(value, Mapping) else [name])
    ]


def _one_of(key: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"`{key}` is {value!r}; it must be one of {', '.join(map(repr, known))}")
