"""Steps that leave weights as they are: loss scaling for float16, and a guard against spikes of the gradients' norm.

A rank keeps a few numbers of both between steps (`Held`). At the end of a step they follow from the norm of all
gradients, which every rank of a program has alike, so all ranks make the same decision without communication.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

import msgspec

from plans.errors import TwofoldError, number, whole_number
from plans.model.graph import Graph, itemsize

__all__ = ["Held", "LossScale", "Reason", "Spike", "StepCheck"]


_MOST_WINDOW = 1_000_000
"""Every rank keeps the norms of the window, and so does every checkpoint."""


class Held(IntEnum):
    """The numbers that a rank keeps, by their place in a tensor of float32.

    SCALE: of the loss, for the next step. GOOD: steps with finite gradients since it was changed. SKIPPED: steps that
    were skipped in all. IN_A_ROW: those without an update between them, up to now. Of the last step: REASON why it was
    skipped (`Reason`), NORM of its gradients before clipping, USUAL: the mean norm that it was held against, USED: the
    scale that its loss had.
    """

    SCALE = 0
    GOOD = 1
    SKIPPED = 2
    IN_A_ROW = 3
    REASON = 4
    NORM = 5
    USUAL = 6
    USED = 7


class Reason(IntEnum):
    """The reason for which a step was skipped."""

    NONE = 0
    NOT_FINITE = 1
    SPIKE = 2


class LossScale(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Dynamic loss scaling as of torch.amp.GradScaler.

    The gradient of the loss is multiplied by a scale, so that small gradients do not vanish in float16; the updates
    divide by it. A step whose gradients are not finite is skipped.

    Args:
        initial: the first scale.
        growth: by which it is multiplied after `growth_every` steps with finite gradients.
        backoff: by which it is multiplied after a step whose gradients are not finite.
        growth_every: steps.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    growth_every: int = 2000


class Spike(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A guard against steps whose gradients are far larger than those before, or not finite; these steps are skipped.

    Args:
        factor: a norm of all gradients, before clipping, above this many times the mean of the last ones is a spike.
        window: of how many updates the mean is taken; before that, only steps that are not finite are skipped.
        then: "stop" ends training with exit code 1, "skip" continues with the next batch.
    """

    factor: float
    window: int = 100
    then: Literal["stop", "skip"] = "stop"


class StepCheck(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a step is skipped: weights, masters and optimizer states stay unchanged on all ranks.

    What the forward changes (running statistics) is changed, and the step counts for the learning rate and the data,
    but not for AdamW's correction of its means.

    Args:
        loss_scale: None does not scale the loss.
        spike: None does not limit gradients.
    """

    loss_scale: LossScale | None = None
    spike: Spike | None = None

    def check(self, graph: Graph, updates_in: str | None) -> None:
        """Refuse settings that contradict each other or the graph.

        Args:
            graph: graph of the plan.
            updates_in: the dtype of master weights, None where there are none.

        Raises:
            TwofoldError: a number out of its range, a loss that is scaled without float16 or without master weights.
        """
        if (spike := self.spike) is not None:
            number("spike.factor", spike.factor, above=1)
            if whole_number("spike.window", spike.window, least=2) > _MOST_WINDOW:
                raise TwofoldError(f"spike.window must be at most {_MOST_WINDOW:,}, not {spike.window:,}")
        if (scale := self.loss_scale) is None:
            return
        number("loss_scale.initial", scale.initial, above=0)
        number("loss_scale.growth", scale.growth, above=1)
        if not 0 < number("loss_scale.backoff", scale.backoff) < 1:
            raise TwofoldError(f"loss_scale.backoff must be above 0 and below 1, not {scale.backoff}")
        whole_number("loss_scale.growth_every", scale.growth_every)
        if not any(tensor.dtype == "float16" for tensor in graph.tensors.values()):
            raise TwofoldError("loss_scale is for float16, but no tensor of the plan is float16; omit it")
        narrow = next(
            (parameter.name for parameter in graph.parameters if itemsize(updates_in or parameter.dtype) < 4), None
        )
        if narrow is not None:
            raise TwofoldError(
                f"loss_scale needs weights that are updated in float32, and {narrow!r} is updated in "
                f"{updates_in or graph.tensors[narrow].dtype}; plan with an optimizer of master_dtype float32"
            )
