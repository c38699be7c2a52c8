"""The uncertainty of the parts of a prediction: all figures of an interval and their sources.

An interval is composed of parts (`costmodels.interval`): the classes of kernels and of messages, the host if it is the
bottleneck, the unexplained part, and for other software its unknown parts. Figures are errors of predictions of
left-out data, as printed by `python -m benchmarks.accuracy.leave_one_out`, unless they are marked as assumed.
`python -m benchmarks.accuracy.intervals` prints how many measured rows of each group are inside the intervals.
"""

from __future__ import annotations

from collections.abc import Mapping

from costmodels.machine.sections import Interval

__all__ = [
    "CARRIED", "CHIP_SPREAD", "DIFFERENT", "HOST", "MEMORY_ACTIVATIONS", "MEMORY_RESERVED", "MEMORY_RESIDUAL", "NINETY",
    "OTHER_CHIP", "OTHER_LONGER", "OTHER_SOFTWARE", "SOFTWARE", "STEP_LONGER", "TOGETHER", "TORCH_HOST", "UNEXPLAINED",
    "WANDER",
]  # fmt: skip

NINETY = 1.6449
"""Standard normal quantile at 95 %: 90 % of the probability is within plus and minus this."""

CHIP_SPREAD = 0.015
"""Of chips of one kind under power management: they vary by 8 % on average in five centres (Sinha et al. 2022, arXiv
2208.11035, abstract; read as the range between the whiskers of a normal sample, 5.4 standard deviations: assumed). The
large products of five H200 of ours vary by 0.86 % (benchmarks/data); five tell little about many: their 90 % interval,
0.56 to 2.04 % (chi-squared), holds this."""

WANDER = 0.045
"""Of the mean clock of a chip at its power limit over 1.5 ms, against all the time (`costmodels.price.power`)."""

HOST = 0.24
"""Standard deviation of the logarithm of a host's times to issue instructions of this executor, from the median of
other hosts, of 17 sessions."""

TORCH_HOST = 0.37
"""The same of blocks of torch, of eleven hosts (`python -m benchmarks.accuracy.leave_one_out`)."""

OTHER_CHIP: Mapping[str, float] = {
    "matrix": 0.02, "attention": 0.02, "memory": 0.02, "collective": 0.02, "transfer": 0.06,
}  # fmt: skip
"""Class -> by how much all its instructions together are off on another chip of the same kind.

Other H200 measured the same points again (benchmarks/data/repeat-h200-*): the median of a run was off by 1.3 % for
products and attention (root of the mean square over four runs), 0.1 % for memory-bound kernels, 0 % for collectives and
6 % for transfers. At least 2 % is taken: chips differ, and four are few.
"""

DIFFERENT: Mapping[str, float] = {"matrix": 8, "attention": 2, "memory": 8, "collective": 3, "transfer": 1}
"""Class -> instructions of different sizes in a step, whose own errors average out (assumed: the linears of a block and
the head, each in three forms of unequal length; attention forward and backward; what is between them)."""

CARRIED: Mapping[str, float] = {
    "matrix": 0.02, "attention": 0.02, "memory": 0.05, "update": 0.05, "dispatch": 0.0, "collective": 0.05,
    "transfer": 0.1,
}  # fmt: skip
"""Class -> by how much more its instructions together are off when figures are carried over to another device.

With a device left out its products are off by 0.1 to 0.7 % together and 9 % each (root mean square; an A100 as
much as devices of equal cores), attention 0.8 to 1.9 % and 6 to 11 %, memory-bound kernels 0.5 to 1.5 % and 12 to 16 %,
published bandwidths of collectives 1 to 9 % together. Single errors count by the root of `DIFFERENT`; what the
calibrated device has already is taken off in squares. A host is not a part of its device. Transfers were measured on
one kind of device: assumed.
"""

TOGETHER = {frozenset({"matrix", "attention"}): 0.5}
"""Classes whose errors are correlated, and how much (assumed: about half of each is the clock)."""

UNEXPLAINED = Interval(low=0.965, high=1.05)
"""Differences between measured and predicted steps that the spreads of prices do not explain. Of 60 replayed steps of
our own transformers on 1 and 2 H200 of three hosts (the third and fourth set of plans), none of them fitted, the 5 %
and 95 % quantiles were 0.96 and 1.07; prices alone explain 0.963 to 1.038. The fifth and sixth set test it."""

STEP_LONGER = 0.025
"""Median share by which kernels take longer in a step than alone (`python -m benchmarks.accuracy.residuals`).

Device-bound steps of torch's parts: 3.4, 1.6 and 2.4 % of 41, 30 and 39 steps of the second, third and fifth set of
`benchmarks.peers` on H200, 2.8 % of 35 of the fifth on H100. Replayed steps of twofold's executor in the same sets:
2.6, 1.1, 1.9 and 2.3 % of 61, 41, 62 and 58. The seventh set (4.5 % of 24, 4.0 % of 43) and published tables test it.
"""

OTHER_LONGER = 0.09
"""The same of software of which no step was measured: the median of the mean residuals of measured steps predicted as
other software than ran them (`python -m benchmarks.accuracy.other_stacks`)."""

SOFTWARE = Interval(low=0.951, high=1.054)
"""Differences that are left between measured and predicted steps of other software, whose parts are known from its
source or were measured alone. The lower edge is the 5 % quantile of the mean residuals of groups of steps, by software
and way of splitting, 0.975 of the prices of its parts. The upper edge, 1.08 of them, holds 90 % of 44 steps of torch in
new shapes (the second set of `benchmarks.peers`). Steps that a host may bind count by `TORCH_HOST`; rows of float8 with
a scale a row ran with another generation of kernels than the measured one and are none of them."""

OTHER_SOFTWARE = Interval(low=0.833, high=1.23)
"""The same of software of which no step was measured: 5 % and 95 % quantiles over the median of the residuals of
`OTHER_LONGER`."""

MEMORY_RESIDUAL = 0.037
"""Root mean square of the logarithms of measured over predicted peaks of torch's parts on 2 H200; 0.029 of zero-bubble
pipelines, 0.025 of small decoders under four stacks (`python -m benchmarks.accuracy.stack_steps`). The largest is
taken."""

MEMORY_ACTIVATIONS = 0.025
"""Share of the activations that code around a stack may keep alive: masks, copies, a caller's variables (assumed)."""

MEMORY_RESERVED = 0.04
"""By how much more reserved memory is off: 20 rows of torchtitan by 0.044 in all, `MEMORY_RESIDUAL` and 0.024, and
between sessions of the same steps it differs by 0.03."""
