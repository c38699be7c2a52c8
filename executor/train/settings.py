"""Settings of a run that a job file may contain. Does not import torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from executor.train.rates import Rate
from plans.optimizer import Optimizer, ParameterGroup

__all__ = ["EvaluationSettings", "OptimizerSettings", "Replicas", "RunSettings"]


class OptimizerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of the optimizer, instead of those of the plan; None keeps the plan's.

    Args:
        kind: "sgd", "momentum" or "adamw"; another kind than the plan's takes none of its settings but the rate.
        lr, weight_decay, momentum, dampening, nesterov, beta1, beta2, eps: as in torch.optim.
        clip_norm: largest norm of all gradients; 0: no clipping.
        groups: parameters with settings of their own.
    """

    kind: Literal["sgd", "momentum", "adamw"] | None = None
    lr: float | None = None
    weight_decay: float | None = None
    momentum: float | None = None
    dampening: float | None = None
    nesterov: bool | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    clip_norm: float | None = None
    groups: tuple[ParameterGroup, ...] | None = None

    def of(self, planned: Optimizer) -> Optimizer:
        """The optimizer of a plan with these settings.

        Raises:
            TwofoldError: a setting that the kind does not have, or a bad value.

        >>> OptimizerSettings(weight_decay=0.1).of(Optimizer(kind="adamw", settings={"lr": 0.01})).settings
        {'lr': 0.01, 'weight_decay': 0.1}
        """
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        changes = {name: given.pop(name) for name in ("kind", "clip_norm", "groups") if name in given}
        if "clip_norm" in changes:
            changes["clip_norm"] = changes["clip_norm"] or None
        kept = planned.settings
        if changes.get("kind", planned.kind) != planned.kind:
            kept = {"lr": kept["lr"]}
        settings = kept | {name: float(value) for name, value in given.items()}
        return msgspec.structs.replace(planned, settings=settings, **changes)


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
