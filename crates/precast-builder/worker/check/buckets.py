"""The smallest and the largest bucket of each dimension: an eager run, and a capture as in a build."""

from __future__ import annotations

import torch

from .. import capture as capturing
from .. import failures
from ..values import samples
from .finding import HIGH, Finding, Fix
from .sources import finding_at
from .subject import Subject


def findings(subject: Subject, captures: bool) -> list[Finding]:
    """Returns a finding for each of them that fails. `captures`: the first bucket can be captured."""
    found = []
    for sizes in ends(subject):
        category = "inputs"
        try:
            with torch.no_grad():
                subject.call(*subject.values(sizes))
            category = "unsupported"
            if captures:
                module = {**subject.module, "dynamic": None, "inputs": samples.at_sizes(subject.specs, sizes)}
                capturing.trace(subject.opened, module, sizes, subject.wire)
            continue
        except Exception as failed:
            error = failed
        place = subject.sources.at(failures.place_of(error, subject.sources.root))
        bucket = " ".join(f"{dim}={size}" for dim, size in sorted(sizes.items()))
        why = f"it fails at the bucket `{bucket}`: {failures.text_of(error)}"
        fix = Fix("take sizes that the model can't have out of the buckets")
        found.append(finding_at(place, category, HIGH, why, fix))
    return found


def ends(subject: Subject) -> list[dict[str, int]]:
    """Returns buckets with the smallest and the largest size of each dimension, without the subject's own."""
    found: list[dict[str, int]] = []
    for dim in subject.dims:
        sizes = {bucket[dim] for bucket in subject.buckets if dim in bucket}
        for pick in (min, max) if sizes else ():
            size = pick(sizes)
            if not any(bucket.get(dim) == size for bucket in [subject.sizes, *found]):
                having = (bucket for bucket in subject.buckets if bucket.get(dim) == size)
                found.append(pick(having, key=lambda bucket: sum(bucket.values())))
    return found
