"""The torch calls of every COMPUTE instruction: call name -> rule.

A rule is a function `(context, attrs, *inputs) -> tensor` (a tuple of tensors for an update) of one or two torch calls.
It reads its inputs and returns new memory, unless the value shares an input's memory in the program; only `accumulate`,
`scale`, `store`, `step_check` and the updates write into their inputs. Rules run without autograd.

* `context`: the rule's information about the rank and its output.
* `operators`: forward and gradients of the operators, collected from `attention`, `elementwise`, `experts`, `images`,
  `lookup`, `matrix`, `normalisation`, `positions`, `random`, `reductions`, `shapes` and `sources`.
* `place`: where a rank's part of a split dim lies; gradients by autograd of one operator alone.
* `losses`: the losses, as means over a full micro-batch whose parts add up.
* `movement`: slices, sums, accumulation, parts of flattened tensors.
* `flat`: flat buffers of several parameters, clipping by the global norm, master weights.
* `optimizers`: the updates, with the arithmetic of torch.optim.
* `step_check`: whether a step is skipped: loss scaling, and the guard against spikes.
"""

from collections.abc import Mapping

from executor.kernels.context import OpContext, Rule, StepCounter
from executor.kernels.flat import FLAT_RULES
from executor.kernels.losses import LOSS_RULES
from executor.kernels.movement import MOVEMENT_RULES
from executor.kernels.operators import OPERATOR_RULES
from executor.kernels.optimizers import UPDATE_RULES
from executor.kernels.step_check import STEP_CHECK_RULES
from plans.errors import TwofoldError

__all__ = ["RULES", "OpContext", "Rule", "StepCounter", "rule_of"]

RULES: Mapping[str, Rule] = {
    **OPERATOR_RULES, **LOSS_RULES, **MOVEMENT_RULES, **FLAT_RULES, **UPDATE_RULES, **STEP_CHECK_RULES,
}  # fmt: skip


def rule_of(call: str) -> Rule:
    """The rule of a call.

    Raises:
        TwofoldError: an unknown call.
    """
    try:
        return RULES[call]
    except KeyError:
        known = ", ".join(sorted(RULES))
        raise TwofoldError(f"unknown operation {call!r}; the executor supports {known}") from None
