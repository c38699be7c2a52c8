"""Settings of a run that a job file may contain. Does not import torch."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["EvaluationSettings", "Replicas"]


class Replicas(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of the comparison of ranks (`executor.train.replicas`).

    Args:
        every: steps from one comparison to the next; one more comes after the last step.
        then: "stop" ends training with exit code 1, "warn" prints a line and continues.
    """

    every: int = 100
    then: Literal["stop", "warn"] = "stop"


class EvaluationSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Evaluations between steps.

    Args:
        data: as the data that are trained on: file, folder or function.
        every: steps from one evaluation to the next; one more comes after the last step.
        batches: of each evaluation, always the same first ones; None uses an epoch, if the length of the data is known.
    """

    data: str
    every: int
    batches: int | None = None
