"""Calls from an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from ._native import Call


def submit(call: Call) -> Awaitable[Any]:
    """Runs a call in the executor of the running loop. A cancelled call runs to its end, and its answer is dropped."""
    return asyncio.get_running_loop().run_in_executor(None, call.run)
