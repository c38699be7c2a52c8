"""The decision of a step check about a step, as the host reads it afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from plans.errors import TrainingStopped
from plans.step_check import Held, Reason, StepCheck

__all__ = ["Verdict"]

_MOST_IN_A_ROW = 30
"""Steps that may be skipped without an update between them; a scale of 65536 has then become 6e-5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A step as its check saw it.

    Args:
        check: what is asked for.
        reason: why it was skipped.
        loss_scale: that its loss had; 1 where losses are not scaled.
        next_scale: that of the next step.
        norm: of all its gradients, before clipping.
        usual: the mean norm that it was compared with; NaN while there is none.
        in_a_row: steps skipped without an update between them.
        skipped: steps skipped in all, those of earlier runs that this one resumes from included.
    """

    check: StepCheck
    reason: Reason
    loss_scale: float
    next_scale: float
    norm: float
    usual: float
    in_a_row: int
    skipped: int

    @classmethod
    def of(cls, check: StepCheck, held: Tensor) -> Verdict:
        """The verdict from a rank's values after the step."""
        numbers = held.tolist()
        return cls(
            check=check, reason=Reason(int(numbers[Held.REASON])), loss_scale=numbers[Held.USED],
            next_scale=numbers[Held.SCALE], norm=numbers[Held.NORM], usual=numbers[Held.USUAL],
            in_a_row=int(numbers[Held.IN_A_ROW]), skipped=int(numbers[Held.SKIPPED]),
        )  # fmt: skip

    @property
    def is_skipped(self) -> bool:
        """Whether the step left weights and states as they were."""
        return self.reason is not Reason.NONE

    @property
    def goes_on_without_a_loss(self) -> bool:
        """Whether training continues although the loss of the step is not finite."""
        return self.is_skipped and self.check.spike is not None and self.check.spike.then == "skip"

    def __str__(self) -> str:
        """The reason why the step was skipped, and the consequence."""
        if self.reason is Reason.SPIKE:
            return f"the norm of its gradients is {self.norm:.6g}, the mean of the updates before {self.usual:.6g}"
        scale = ""
        if self.check.loss_scale is not None:
            scale = f"; the loss scale was {self.loss_scale:.9g} and is {self.next_scale:.9g} now"
        return f"its gradients are not finite{scale}"

    def stop_where_asked(self, step: int) -> None:
        """End training if the check requires it, or if too many steps were skipped; all ranks do it after the same
        step.

        Args:
            step: its number, from 1.

        Raises:
            TrainingStopped: so it is.
        """
        if not self.is_skipped:
            return
        spike, is_overflow = self.check.spike, self.reason is Reason.NOT_FINITE and self.check.loss_scale is not None
        if spike is not None and spike.then == "stop" and not is_overflow:
            raise TrainingStopped(
                f"step {step} was not applied: {self}. Check the data of this step, lower the learning rate, "
                'or skip such steps: spike.then = "skip"'
            )
        if self.in_a_row >= _MOST_IN_A_ROW:
            raise TrainingStopped(
                f"{self.in_a_row} steps in a row were skipped, the last one is step {step}: {self}; lower the "
                "learning rate, or check the data"
            )
