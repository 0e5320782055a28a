"""How contenders, buckets and times are written in tables and pictures."""

import re
from typing import Any

AHEAD = 0.97
"""A peer that takes less than this part of Precast's time is ahead; differences between are noise."""

# Contender: its label, its colour on light and on dark, its mark.
CONTENDERS = {
    "precast": ("Precast", "#0a7d55", "#3fca93", "bar"),
    "precast, no graphs": ("Precast, no graphs", "#0a7d55", "#3fca93", "ring"),
    "eager": ("eager", "#6e7781", "#9aa4ae", "circle"),
    "compile": ("torch.compile", "#1f6feb", "#6cb0ff", "circle"),
    "reduce-overhead": ("reduce-overhead", "#8250df", "#c297ff", "diamond"),
    "max-autotune": ("max-autotune", "#bc4c00", "#f0883e", "square"),
    "aoti": ("AOTInductor, Python", "#137c8b", "#4fd0de", "diamond"),
    "onnxruntime": ("ONNX Runtime", "#bf3989", "#ff8ac4", "square"),
}


def named(contender: str) -> str:
    """Returns a contender's label: `onnxruntime, saved` -> `ONNX Runtime, saved`."""
    if contender in CONTENDERS:
        return CONTENDERS[contender][0]
    way, comma, state = contender.partition(", ")
    return CONTENDERS[way][0] + comma + state if way in CONTENDERS else contender


def under(result: dict[str, Any]) -> str:
    machine = result["machine"]
    device = machine["gpu"].split(",")[0] if result["device"] == "cuda" and machine["gpu"] else machine["processor"]
    waits = machine.get("environment", {}).get("OMP_WAIT_POLICY")
    threads = f"{result['intra_op_threads']} threads" + (f" (OMP_WAIT_POLICY={waits})" if waits else "")
    return f"{device}, {threads}, torch {machine['versions']['torch']}, {result['date']}"


def short(bucket: str) -> str:
    return re.sub(r"batch=(\d+)", r"B=\1", re.sub(r"seq=(\d+)", r"T=\1", bucket))


def rival(contender: str) -> bool:
    """Returns whether a contender is a peer: Precast without graphs and the bare minimum of a start are none."""
    return contender != "bare minimum" and not contender.startswith("precast")


def times(value: float, of: str = "") -> str:
    """Returns a ratio, bold where a peer is ahead."""
    text = f"{value:.2f} x" if value < 10 else f"{value:.0f} x"
    return f"**{text}**" if rival(of) and value < AHEAD else text


def duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size * 0.9995:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"
