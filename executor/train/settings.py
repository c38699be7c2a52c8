"""Settings of a run that a job file may contain. Does not import torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from executor.train.rates import Rate

__all__ = ["EvaluationSettings", "Replicas", "RunSettings"]


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


class RunSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of a job that its losses depend on, besides its plan; every checkpoint keeps them.

    Args:
        seed: random seed of initial weights and data order.
        data: source of the data.
        steps: total number of steps, on which learning rates may depend.
        learning_rate: learning-rate schedule; None: the rate of the plan's optimizer.
    """

    seed: int
    data: str
    steps: int
    learning_rate: Rate | None

    def rates(self, steps: int) -> list[float]:
        """The scheduled rates of the first steps."""
        return [] if self.learning_rate is None else [self.learning_rate.at(step, self.steps) for step in range(steps)]
