"""The short form of `python -m benchmarks.reliability`: a disk that is full while a checkpoint is written."""

from __future__ import annotations

from benchmarks.reliability.faults import cases


def test_a_full_disk_is_named_and_loses_no_checkpoint():
    (outcome,) = cases(1, 3, ["full disk"])
    assert outcome.wrong == ()
