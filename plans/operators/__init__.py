"""Operators: each declares its named dims once; layouts, partial sums, gradients and FLOPs follow from that.

`spec` holds the rules, `declarations` one short function per kind. No tensor values live here: the executor has the
matching torch calls.
"""

from plans.operators.declarations import declare, kinds
from plans.operators.spec import Assignment, Gradient, OperatorSpec

__all__ = ["Assignment", "Gradient", "OperatorSpec", "declare", "kinds"]
