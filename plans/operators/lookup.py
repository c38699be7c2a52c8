"""Embedding: looks up rows of a table by their ids."""

from __future__ import annotations

import math

from plans.operators.registry import Attrs, Shapes, declares, named
from plans.operators.spec import Gradient, OperatorSpec

__all__: list[str] = []


@declares("embedding")
def _embedding(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """y[b.., n] = table[id[b..], n], written as a sum over the rows v of the table.

    Where v is split each rank looks up the rows it has and leaves zeros for the rest: partial sums. attrs "padding_id"
    is the row without a gradient, if any.
    """
    batch = named("b", inputs[0])
    rows, width = inputs[1]
    sizes = dict(zip(batch, inputs[0], strict=True)) | {"v": rows, "n": width}
    return OperatorSpec(
        kind=kind, sizes=sizes, inputs=(batch, ("v", "n")), outputs=((*batch, "n"),), splittable=frozenset(sizes),
        gradients={1: Gradient(needs=("x0",), flops=math.prod(outputs[0]))}, located=("v",),
    )  # fmt: skip
