"""The short form of `python -m benchmarks.reliability`: a disk that is full while a checkpoint is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.reliability import faults, training
from tests.support.warm import Command


def started(job: Path, *, resume: bool = False) -> Command:
    """As `benchmarks.reliability.training.started`, from a process that has imported torch."""
    out = job.parent / "said"
    out.unlink(missing_ok=True)
    words = ["train", str(job), *["--resume"] * resume]
    return Command(words, training.environment(job), job.parent, (out, out))


@pytest.mark.ranks
def test_a_full_disk_is_named_and_loses_no_checkpoint(monkeypatch):
    for module in (faults, training):
        monkeypatch.setattr(module, "started", started)
    (outcome,) = faults.cases(1, 3, ["full disk"])
    assert outcome.wrong == ()
