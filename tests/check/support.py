"""Helpers of the tests of `check`: a project checked by the worker's own code, in this process."""

from __future__ import annotations

import contextlib
import io
import tempfile
from typing import Any

from tests.worker.support import Project, Quiet, model, part, spec

HEAD = """
import logging
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

log = logging.getLogger(__name__)
"""


def evaluated(body: str, init: str = "pass", extra: str = "", inputs: str = "x") -> str:
    """Returns the source of a model in eval mode, as `model`, with the imports of `HEAD`."""
    return model(body, init, HEAD + extra, inputs).replace("return Model()\n", "return Model().eval()\n")


class Checks(Project):
    def setUp(self) -> None:
        super().setUp()
        # Draft mode writes a log of its own there, as it does into a worker's private folder.
        before, tempfile.tempdir = tempfile.tempdir, str(self.root)
        self.addCleanup(lambda: setattr(tempfile, "tempdir", before))

    def check(self, opened: Any, inputs: Any = None, samples: str | None = None, **request: Any) -> dict[str, Any]:
        """Checks a module; `inputs` are as in `Project.capture`, `samples` names a callable that gives them."""
        sizes = request.pop("sizes", {})
        buckets = request.pop("buckets", [sizes])
        module = {"name": "m", "path": "", "method": "forward", "regions": [], "dynamic": None, **request}
        if samples is None:
            module["inputs"] = [spec(*one) for one in inputs]
        else:
            found = part("model.inputs").find(
                opened, {"path": module["path"], "method": module["method"], "samples": samples, "sizes": sizes}
            )
            module |= {"inputs": found["inputs"], "structure": found["structure"]}
        looks = {name: module.pop(name) for name in ("recompiles", "cost") if name in module}
        asked = {**looks, "module": module, "sizes": sizes, "buckets": buckets, "samples": samples}
        # Draft mode prints its results.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return part("check").check(opened, asked, Quiet())


def found(answer: dict[str, Any], category: str) -> list[dict[str, Any]]:
    return [one for one in answer["findings"] if one["category"] == category]
