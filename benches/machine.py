"""The machine of a run, and how fast it multiplies and moves bytes (the floor of everything else)."""

import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from .cases import ROOT

PACKAGES = ("torch", "torchvision", "transformers", "onnxruntime", "onnx", "onnxscript", "triton", "numpy")


def describe(binaries: Path) -> dict[str, Any]:
    """Returns hardware and versions."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = next((line.split(":")[1].strip() for line in cpuinfo.splitlines() if line.startswith("model name")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    known = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    versions = {"python": platform.python_version(), "kernel": platform.release()}
    versions |= {package: known.get(package) for package in PACKAGES}
    versions["precast"] = first_line([binaries / "precast", "--version"])
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return {
        "processor": model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "cache_bytes": last_cache(),
        "memory_bytes": memory,
        "gpu": first_line(query),
        "load_before": os.getloadavg()[0],
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("OMP_", "GOMP_", "MKL_"))},
        "versions": versions,
    }


def document(command: str, binaries: Path) -> dict[str, Any]:
    """Returns what every result begins with: the command, the date and the machine."""
    date = time.strftime("%Y-%m-%d", time.gmtime())
    return {"schema": 1, "command": command, "date": date, "machine": describe(binaries)}


def last_cache() -> int:
    """Returns the size of the CPU's largest cache in bytes, 0 where the kernel does not say."""
    sizes = [file.read_text().strip() for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=0)


def commit() -> str | None:
    """Returns the measured commit: of the checkout, or of the packed files."""
    packed = ROOT / "COMMIT"
    return packed.read_text().strip() if packed.exists() else first_line(["git", "-C", ROOT, "rev-parse", "HEAD"])


def first_line(command: list[Any]) -> str | None:
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return output.strip().splitlines()[0] if output.strip() else None


def rates(device: str) -> dict[str, Any]:
    """Returns the best of several matrix products (FLOP/s by dtype) and copies (bytes read and written a second)."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    cuda = device == "cuda"

    def once(work: Any) -> float:
        begin = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    def best(work: Any, times: int) -> float:
        once(work)
        return min(once(work) for _ in range(times))

    result: dict[str, Any] = {"flops": {}}
    side = 8192 if cuda else 2048
    with torch.inference_mode():
        for dtype in ("float16", "bfloat16", "float32") if cuda else ("float32",):
            a = torch.randn(side, side, device=device, dtype=getattr(torch, dtype))
            result["flops"][dtype] = 2 * side**3 / best(lambda a=a: a @ a, 20)
        size = 4 << 30 if cuda else 1 << 29
        source = torch.ones(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        result["bytes"] = 2 * size / best(lambda: target.copy_(source), 10)
    return result


if __name__ == "__main__":
    print(json.dumps(rates(sys.argv[1])))
