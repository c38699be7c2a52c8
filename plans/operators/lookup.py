"""Selection by ids: rows of a table, and the weights of an expert for each token."""

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


@declares("grouped_linear")
def _grouped_linear(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """y[b.., n] = sum_k x[b.., k] w[id[b..], k, n], a linear with the weights that each row chose, such as an expert's.

    It is written as a sum over the groups of weights v too: where v is split, each rank leaves zeros for the rows of
    others, partial sums. With attrs "transposed" the weights are w[v, n, k].
    """
    batch = named("b", inputs[1])
    groups, first, second = inputs[2]
    weights = ("v", "n", "k") if attrs.get("transposed") else ("v", "k", "n")
    sizes = dict(zip((*batch, *weights), (*inputs[1], groups, first, second), strict=True))
    flops = 2 * math.prod(inputs[1]) * first * second
    return OperatorSpec(
        kind=kind, sizes=sizes, inputs=((*batch, "k"), batch, weights), outputs=((*batch, "n"),),
        splittable=frozenset(sizes), flops=flops, located=("v",), discrete=frozenset((1,)),
        gradients={0: Gradient(needs=("x1", "x2"), flops=flops), 2: Gradient(needs=("x0", "x1"), flops=flops)},
    )  # fmt: skip
