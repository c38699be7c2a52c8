"""Whether a step is skipped, and the state of the check (`plans.step_check`): scalars on the device, no host waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from executor.kernels.context import OpContext, Rule
from plans.step_check import Held, LossScale, Reason, StepCheck

__all__ = ["STEP_CHECK_RULES", "initial_held", "number_of_update"]

Attrs = Mapping[str, Any]


def initial_held(check: StepCheck, device: torch.device) -> Tensor:
    """The numbers `Held` before the first step."""
    held = torch.zeros(len(Held), dtype=torch.float32, device=device)
    held[Held.SCALE] = held[Held.USED] = 1.0 if check.loss_scale is None else check.loss_scale.initial
    return held


def step_check(
    context: OpContext, attrs: Attrs, square: Tensor, held: Tensor, norms: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Whether the step is skipped (1 or 0), the state, and the factor of the gradients, if the program has one.

    Args:
        context: of the instruction.
        attrs: "check" is a `StepCheck`, "clip_norm" may be None.
        square: the sum of the squares of all gradients, which are those of the scaled loss.
        held: `Held`, changed in place.
        norms: of the last updates, changed in place.
    """
    check: StepCheck = attrs["check"]
    old = held.unbind()
    scale = old[Held.SCALE].clone()
    norm = square.sqrt() / scale
    finite = norm.isfinite()
    usual, jumps = torch.full_like(scale, torch.nan), torch.zeros_like(finite)
    if norms is not None and check.spike is not None:
        usual = norms.mean()
        jumps = (norm > check.spike.factor * usual) & finite  # false as long as the mean is NaN
    skips = ~finite | jumps
    kept = norm.to(torch.float32)
    reason = torch.where(finite, jumps * int(Reason.SPIKE), int(Reason.NOT_FINITE))
    new = {Held.SCALE: scale, Held.GOOD: old[Held.GOOD], Held.SKIPPED: old[Held.SKIPPED] + skips,
           Held.IN_A_ROW: (old[Held.IN_A_ROW] + 1) * skips, Held.REASON: reason, Held.NORM: kept, Held.USUAL: usual,
           Held.USED: scale}  # fmt: skip
    if check.loss_scale is not None:
        new[Held.SCALE], new[Held.GOOD] = _rescaled(check.loss_scale, scale, old[Held.GOOD], finite)
    if norms is not None:
        norms.copy_(torch.where(skips, norms, torch.cat([norms[1:], kept.view(1)])))
    held.copy_(torch.stack([new[each].to(torch.float32) for each in Held]))
    result = (skips.to(torch.float32), held) if norms is None else (skips.to(torch.float32), held, norms)
    if (clip := attrs["clip_norm"]) is None:
        return (*result, scale.to(square.dtype).reciprocal()) if check.loss_scale is not None else result
    return (*result, (clip / (norm + 1e-6)).clamp_(max=1.0) / scale)


def _rescaled(asked: LossScale, scale: Tensor, good: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
    """The scale of the next step and the steps since it was changed, as torch's `_amp_update_scale_` has them."""
    good = (good + 1) * finite
    grows, grown = good == asked.growth_every, scale * asked.growth
    after = torch.where(grows & grown.isfinite(), grown, scale)
    return torch.where(finite, after, scale * asked.backoff), good * ~grows


def number_of_update(step: int | Tensor, held: Tensor) -> Tensor:
    """The number of this update, from 1, in a step that is not skipped: steps less those that were."""
    return step - held[Held.SKIPPED]


STEP_CHECK_RULES: Mapping[str, Rule] = {"step_check": step_check}
