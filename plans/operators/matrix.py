"""Matrix products: linear layers, matmul of any two tensors, convolution."""

from __future__ import annotations

import math

from plans.errors import TwofoldError
from plans.operators.registry import Attrs, Shapes, aligned, declares, named
from plans.operators.spec import Dim, Gradient, OperatorSpec

__all__: list[str] = []


@declares("linear")
def _linear(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """y[b.., n] = sum_k x[b.., k] w[n, k] + bias[n]."""
    batch = named("b", inputs[0][:-1])
    features, contracted = inputs[1]
    sizes = dict(zip(batch, inputs[0][:-1], strict=True)) | {"n": features, "k": contracted}
    flops = 2 * math.prod(sizes.values())
    gradients = {0: Gradient(needs=("x1",), flops=flops), 1: Gradient(needs=("x0",), flops=flops)}
    operands: tuple[tuple[str, ...], ...] = ((*batch, "k"), ("n", "k"))
    if len(inputs) == 3:
        operands += (("n",),)
        gradients[2] = Gradient(flops=math.prod(outputs[0]))
    return OperatorSpec(
        kind=kind, sizes=sizes, inputs=operands, outputs=((*batch, "n"),), splittable=frozenset(sizes),
        flops=flops, gradients=gradients, additive=frozenset({2}) if len(inputs) == 3 else frozenset(),
    )  # fmt: skip


@declares("matmul")
def _matmul(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """torch.matmul: y[b.., n] = sum_k a[b.., k] c[k, n], or y[b.., m, n] = sum_k a[b.., m, k] c[b.., k, n].

    In the second form, where c has more than two dims, the dims b are broadcast. A vector stands for a matrix without
    the missing dim. With attrs "of_the_batch" k is the batch.
    """
    a, c = inputs
    if not a or not c or a[-1] != c[-2 if len(c) > 1 else 0]:
        raise TwofoldError(f"the shapes {a} and {c} of a matmul do not match")
    if len(c) <= 2:
        rows = named("b", a[:-1])
        sizes = dict(zip(rows, a[:-1], strict=True)) | {"k": a[-1]}
        columns = ("n",) if len(c) == 2 else ()
        first, second = (*rows, "k"), ("k", *columns)
        out = (*rows, *columns)
    else:
        rows, columns = ("m",) if len(a) > 1 else (), ("n",)
        count = len(outputs[0]) - len(rows) - 1
        batch = named("b", outputs[0][:count])
        sizes = dict(zip((*batch, *rows), outputs[0], strict=False)) | {"k": a[-1]}
        first = (*aligned(a[:-2], batch, sizes, 0), *rows, "k")
        second = (*aligned(c[:-2], batch, sizes, 1), "k", "n")
        out = (*batch, *rows, *columns)
    if columns:
        sizes["n"] = c[-1]
    flops = 2 * math.prod(outputs[0]) * a[-1]
    return OperatorSpec(
        kind=kind, sizes=sizes, inputs=(first, second), outputs=(out,), flops=flops,
        splittable=frozenset(dim for dim in sizes if not dim.startswith("_")),
        gradients={0: Gradient(needs=("x1",), flops=flops), 1: Gradient(needs=("x0",), flops=flops)},
        of_the_batch=bool(attrs.get("of_the_batch")),
    )  # fmt: skip


@declares("conv2d")
def _conv2d(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """y[b, n, h', w'] = sum over k and a window of x[b, k, h, w] weight[n, k, .., ..] + bias[n]; h and w stay whole.

    attrs "stride", "padding", "dilation" are pairs, attrs "groups" the number of groups of channels (1 by default):
    with several, channels are (g, k) and (g, n), and every g is a separate convolution.
    """
    (batch, _, height, width), (_, contracted, *kernel), groups = inputs[0], inputs[1], attrs.get("groups", 1)
    sizes = {
        "b": batch, "g": groups, "n": inputs[1][0] // groups, "k": contracted, "_h": height, "_w": width,
        "_kh": kernel[0], "_kw": kernel[1], "_oh": outputs[0][2], "_ow": outputs[0][3],
    }  # fmt: skip
    sent: Dim = "k"
    made: Dim = "n"
    if groups > 1:
        sent, made = ("g", "k"), ("g", "n")
    else:
        del sizes["g"]
    operands: tuple[tuple[Dim, ...], ...] = (("b", sent, "_h", "_w"), (made, "k", "_kh", "_kw"))
    flops = 2 * math.prod(outputs[0]) * math.prod(inputs[1][1:])
    gradients = {0: Gradient(needs=("x1",), flops=flops), 1: Gradient(needs=("x0",), flops=flops)}
    if len(inputs) == 3:
        operands += ((made,),)
        gradients[2] = Gradient(flops=math.prod(outputs[0]))
    # with groups, n and k of a part would need every g on a separate rank
    splittable = {"b", "g"} if groups > 1 else {"b", "n", "k"}
    return OperatorSpec(
        kind=kind, sizes=sizes, inputs=operands, outputs=(("b", made, "_oh", "_ow"),), flops=flops,
        splittable=frozenset(splittable), gradients=gradients,
        additive=frozenset({2}) if len(inputs) == 3 else frozenset(),
    )  # fmt: skip
