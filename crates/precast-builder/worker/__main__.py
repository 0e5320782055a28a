"""Starts the worker: `python -P -u <folder of this file>`."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import signal
import sys


def main() -> int:
    # A crash leaves the Python stack in the log, and so does SIGUSR1, which precedes the end of a worker that hangs.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    # Imports and compiles make many objects that stay. To look for cycles among them as often as Python does takes an
    # eighth of the time to import torch and inductor, and a twelfth of MiniLM's build.
    gc.set_threshold(100_000, 10, 10)
    here = os.path.dirname(os.path.abspath(__file__))
    # Python adds the folder to sys.path, where our `compiler` would hide a module of the user.
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    sys.path.insert(0, os.path.dirname(here))
    package = os.path.basename(here)
    serve = importlib.import_module(f"{package}.serve")
    wire = importlib.import_module(f"{package}.wire")
    sys.path.pop(0)
    sys.dont_write_bytecode = True
    return serve.serve(wire.take_stdio())


if __name__ == "__main__":
    sys.exit(main())
