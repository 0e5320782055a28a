"""The parts of a measurement, one module each. A part is a function of a `Run` that adds to the result."""

from collections.abc import Callable

from ..run import Run
from . import build, latency, memory, overhead, padding, rates, start, threads

Part = Callable[[Run], None]

PARTS: dict[str, Part] = {
    "rates": rates.measure,
    "build": build.measure,
    "latency": latency.measure,
    "floor": rates.floor,
    "threads": threads.measure,
    "start": start.measure,
    "memory": memory.measure,
    "padding": padding.measure,
    "overhead": overhead.measure,
    "cold-build": build.cold,
}
