"""Pooling of images: batch and channels can be split, height and width cannot. (Convolution is in `matrix`.)"""

from __future__ import annotations

import math

from plans.operators.registry import Attrs, Shapes, declares
from plans.operators.spec import Gradient, OperatorSpec

__all__: list[str] = []


@declares("max_pool2d", "avg_pool2d")
def _pool2d(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """y[b.., h', w'] over windows of x[b.., h, w]; attrs "kernel", "stride", "padding", "dilation" are pairs.

    attrs "ceil" rounds the number of windows up; attrs "count_padding" lets an average count the padding.
    """
    rest = tuple(f"b{position}" for position in range(len(inputs[0]) - 2))
    sizes = dict(zip((*rest, "_h", "_w"), inputs[0], strict=True))
    sizes |= {"_oh": outputs[0][-2], "_ow": outputs[0][-1]}
    flops = math.prod(outputs[0]) * math.prod(attrs["kernel"])
    return OperatorSpec(
        kind=kind, sizes=sizes, inputs=((*rest, "_h", "_w"),), outputs=((*rest, "_oh", "_ow"),), flops=flops,
        splittable=frozenset(rest), gradients={0: Gradient(needs=("x0",), flops=flops)},
    )  # fmt: skip
