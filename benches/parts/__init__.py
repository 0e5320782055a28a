"""The parts of a measurement, one module each. A part is a function of a `Run` that adds to the result."""

from . import build, latency, rates, start, threads

PARTS = {
    "rates": rates.measure,
    "build": build.measure,
    "latency": latency.measure,
    "floor": rates.floor,
    "threads": threads.measure,
    "start": start.measure,
}
