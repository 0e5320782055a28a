"""Starts the worker: `python -P -u <folder of this file>`."""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys


def main() -> int:
    # A worker that crashes, or is told to say where it is before it is ended, leaves the Python stack in its log.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    here = os.path.dirname(os.path.abspath(__file__))
    # A folder given to python lands on sys.path; left there, our `compiler` would hide a module of the user.
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    sys.path.insert(0, os.path.dirname(here))
    package = os.path.basename(here)
    serve = importlib.import_module(f"{package}.serve")
    wire = importlib.import_module(f"{package}.wire")
    bytecode = importlib.import_module(f"{package}.bytecode")
    sys.path.pop(0)
    sys.dont_write_bytecode = True
    bytecode.use()
    return serve.serve(wire.take_stdio())


if __name__ == "__main__":
    sys.exit(main())
