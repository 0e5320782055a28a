"""The backend `"precast"` in Dynamo's registry, in a process that finds no entry point of an installed package.

Private: `_BACKENDS`, the names of the registry. Without it: `import precast` in a checkout registers nothing.
"""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint


def register() -> None:
    """Registers the backend, if Dynamo is imported. It is loaded when it is first used."""
    registry = sys.modules.get("torch._dynamo.backends.registry")
    if registry is not None:
        registry._BACKENDS.setdefault(
            "precast", EntryPoint("precast", "precast.dynamo:backend", "torch_dynamo_backends")
        )
