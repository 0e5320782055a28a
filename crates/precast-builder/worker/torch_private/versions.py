"""Versions of torch: the tried ones, and the features and options that they lack.

The one table of versions. A *feature* of Precast needs private names of torch: for a tried version, the table has
whether it works; in a newer one, the names are looked up. A feature that is off is left out of a compile, and
`precast build` and `precast doctor` report it. An *option* of the compiler may have been removed.

Nothing here imports torch before a call about the torch in use: `precast doctor` runs this file as a program.

Private: the names in `FEATURES` and `EVERY_BUILD`, each used by the module that is named there. Without them: see
`without`.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from dataclasses import dataclass

Version = tuple[int, int]

# The runtime and the builder have the same (`TRIED` of the store's `target`); a test of the builder holds it.
OLDEST: Version = (2, 11)
NEWEST: Version = (2, 15)


@dataclass(frozen=True)
class Feature:
    """A use of private names of torch that Precast can work without."""

    name: str
    used_by: str
    """The module of `torch_private`."""
    needs: tuple[str, ...]
    """Private names, as `module:attribute.attribute`."""
    without: str
    off_since: Version | None = None
    """The first version that was tried where it does not work."""
    why: str = ""


@dataclass(frozen=True)
class Gone:
    """A compiler option that torch has removed."""

    option: str
    since: Version
    instead: str = "leave it out"


EARLY_LAUNCH = Feature(
    "early launch of kernels (`triton.enable_pdl`)",
    "early_launch",
    (
        "torch._inductor.codegen.cpp_wrapper_gpu:DeferredTritonCallWrapper.generate_launch_kernel",
        "torch._inductor.codegen.cuda.device_op_overrides:CUDADeviceOpOverrides.kernel_driver",
        "torch._inductor.codegen.triton:TritonKernel._filter_pdl",
        "torch._inductor.codegen.triton:TritonKernel.GDC_LAUNCH",
        "torch._inductor.codegen.triton:TritonKernel.GDC_WAIT",
    ),
    "each kernel starts when the one before it has ended",
)
PREPACKED = Feature(
    "prepacked weights (`freezing`)",
    "freezing",
    (
        "torch._inductor.freezing:constant_fold",
        "torch._inductor.constant_folding:ConstantFolder",
        "torch._inductor.constant_folding:replace_node_with_constant",
        "torch._inductor.fx_passes.freezing_patterns:binary_folding_pass",
        "torch._inductor.fx_passes.mkldnn_fusion:_is_packable_convolution",
        "torch._inductor.fx_passes.mkldnn_fusion:_is_packable_linear",
        "torch._inductor.fx_passes.mkldnn_fusion:_is_packable_mkldnn_rnn_layer",
    ),
    "weights are laid out in every call",
)
SHARED_HEADERS = Feature(
    "C++ headers that builds share",
    "cpp_toolchain",
    ("torch._inductor.codecache:_precompile_header",),
    "each build compiles them again",
)
# Not to be done without: an untried torch that lacks one of these is refused.
EVERY_BUILD = Feature(
    "builds",
    "inductor",
    (
        "torch._inductor:list_mode_options",
        "torch._inductor:list_options",
        "torch._inductor.codegen.common:CSEProxy.indirect_indexing",
        "torch._inductor.codegen.cpp:CppKernel.device_assert_async",
        "torch._inductor.codegen.cpp:CppVecKernel.indirect_assert",
        "torch._inductor.codegen.cpp:WorkSharing.parallel",
        "torch._inductor.compile_fx:compile_fx_aot",
        "torch._inductor.cpp_builder:_get_optimization_cflags",
        "torch._inductor.cpp_builder:_run_compile_cmd",
        "torch._inductor.cpu_vec_isa:VecISA.check_build",
        "torch._inductor.cpu_vec_isa:supported_vec_isa_list",
        "torch._inductor.cpu_vec_isa:valid_vec_isa_list",
        "torch._inductor.index_propagation:IndexPropagation.indirect_indexing",
        "torch._inductor.kernel.bmm:use_cpp_bmm_template",
        "torch._inductor.kernel.mm:use_cpp_gemm_template",
    ),
    "nothing can be built",
)

FEATURES = (EARLY_LAUNCH, PREPACKED, SHARED_HEADERS)

GONE = (
    Gone("autoheuristic_collect", (2, 12)),
    Gone("autoheuristic_use", (2, 12)),
    Gone("triton.enable_tlx_templates", (2, 12)),
    Gone("force_same_precision", (2, 13)),
    Gone("partitioned_scatter_memory_budget", (2, 14)),
    Gone("cuda.nvgemm_max_profiling_configs", (2, 14)),
    Gone("benchmark_epilogue_fusion", (2, 15)),
    Gone("max_epilogue_benchmarked_choices", (2, 15)),
)


def parsed(version: str) -> Version:
    """Returns the major and minor number of a version such as `2.11.0+cu130`."""
    major, minor, *_ = version.split("+")[0].split(".")
    return int(major), int(minor)


def in_use() -> Version:
    """Returns major and minor number of the torch in use."""
    import torch

    return parsed(str(torch.__version__))


def works(feature: Feature) -> bool:
    """Returns whether a feature works with the torch in use."""
    return not _why_off(feature, in_use())


def gone(option: str) -> Gone | None:
    """Returns the table's entry of a compiler option, if the torch in use has dropped it."""
    return next((one for one in GONE if one.option == option and in_use() >= one.since), None)


def off(version: Version) -> list[dict[str, str]]:
    """Returns the features that are off in a version, with reasons. An untried version must be the one in use."""
    reasons = [(feature, _why_off(feature, version)) for feature in FEATURES]
    return [{"what": feature.name, "why": f"{why}: {feature.without}"} for feature, why in reasons if why]


def missing(feature: Feature) -> str | None:
    """Returns the first private name of a feature that the torch in use lacks."""
    for name in feature.needs:
        module, _, path = name.partition(":")
        try:
            functools.reduce(getattr, path.split("."), importlib.import_module(module))
        except (ImportError, AttributeError):
            return name
    return None


@functools.cache
def _why_off(feature: Feature, version: Version) -> str:
    if version <= NEWEST:
        return feature.why if feature.off_since is not None and version >= feature.off_since else ""
    name = missing(feature)
    return f"torch {version[0]}.{version[1]} has no `{name.replace(':', '.')}`" if name else ""


if __name__ == "__main__":
    print(json.dumps(off(parsed(sys.argv[1]))))
