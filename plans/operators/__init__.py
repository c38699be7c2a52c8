"""Operators: each declares its named dims once; layouts, partial sums, gradients and FLOPs follow from them.

`spec` has the rules and `registry` the table of kinds. The declarations are grouped by family in `elementwise`,
`matrix`, `attention`, `positions`, `normalisation`, `reductions`, `shapes`, `images`, `lookup`, `losses`, `experts`,
`recurrent` and `sources`. This package handles no tensor values: the executor has the matching torch calls.
"""

from plans.operators import (  # noqa: F401  (each enters its kinds)
    attention,
    elementwise,
    experts,
    images,
    lookup,
    losses,
    matrix,
    normalisation,
    positions,
    recurrent,
    reductions,
    shapes,
    sources,
)
from plans.operators.registry import declare, kinds
from plans.operators.spec import Assignment, Dim, Gradient, OperatorSpec, Statistic, factors

__all__ = ["Assignment", "Dim", "Gradient", "OperatorSpec", "Statistic", "declare", "factors", "kinds"]
