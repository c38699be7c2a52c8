"""Products that compute several results at once, such as queries, keys and values, replaced by a product for each.

The weight and bias of each product are parts of the module's (`plans.model.part`). Parts may be interleaved by heads,
as in GPT-NeoX. A kernel that is stored as [in, out], as in GPT-2, is a transposed part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import structs

from plans.model.graph import Operator
from plans.model.part import Part
from plans.model.whole.rewrite import New, Piece, Rule, View, part_as_tensor

__all__ = ["FUSED_RULES", "KERNEL_RULES"]

_WEIGHTS = ("parameter", "constant")


def _kernel_and_bias(view: View, operator: Operator) -> Sequence[New] | None:
    """x w + b for a kernel w [in, out]."""
    if operator.kind != "add" or len(operator.inputs) != 2:
        return None
    for made, bias in (operator.inputs, operator.inputs[::-1]):
        product, tensor = view.made(made, "matmul"), view.tensors[bias]
        if product is None or len(view.readers[made]) > 1 or tensor.kind not in _WEIGHTS:
            continue
        if tensor.shape == view.shape(made)[-1:]:
            return _linear(view, operator, product, (bias,))
    return None


def _kernel(view: View, operator: Operator) -> Sequence[New] | None:
    """x w for a kernel w [in, out]."""
    return _linear(view, operator, operator, ()) if operator.kind == "matmul" else None


def _linear(view: View, operator: Operator, product: Operator, bias: tuple[str, ...]) -> Sequence[New] | None:
    x, kernel = product.inputs
    tensor = view.tensors[kernel]
    if tensor.kind not in _WEIGHTS or len(tensor.shape) != 2 or product.attrs or kernel in view.parts:
        return None
    if len(view.readers[kernel]) > 1 or len(view.shape(x)) < 2:
        return None
    part = Part(name=kernel, shape=tensor.shape, view=tensor.shape, region=_all(tensor.shape), transposed=True)
    piece = part_as_tensor(tensor, "transposed", tensor.shape[::-1], part)
    made = view.tensors[operator.outputs[0]]
    if piece.tensor.name in view.tensors:
        return None
    return [
        New(kind="linear", inputs=(x, piece, *bias), shape=made.shape, dtype=made.dtype, module=product.module)
    ]  # fmt: skip


def _cut(view: View, operator: Operator) -> Sequence[New] | None:
    """A part of a linear's output, if the whole output is cut into such parts."""
    product = view.makers.get(view.behind(operator.inputs[0], "reshape")) if operator.kind == "narrow" else None
    if product is None or product.kind != "linear":
        return None
    source, lead = operator.inputs[0], view.shape(product.outputs[0])[:-1]
    factors, at = view.shape(source)[len(lead) :], int(operator.attrs["dim"]) - len(lead)  # type: ignore[arg-type]
    if view.shape(source)[: len(lead)] != lead or at < 0:
        return None
    siblings = _siblings(view, product, source, operator)
    number = next((number for number, sibling in enumerate(siblings) if sibling is operator), None)
    if number is None:
        return None
    pieces = [
        [_part_of(view, weight, factors, at, sibling, index) for weight in product.inputs[1:]]
        for index, sibling in enumerate(siblings)
    ]
    if any(piece is None or piece.tensor.name in view.tensors for own in pieces for piece in own):
        return None
    made, size = view.tensors[operator.outputs[0]], view.shape(operator.outputs[0])[int(operator.attrs["dim"])]  # type: ignore[arg-type]
    rows = math.prod(factors) // factors[at] * size
    inputs: tuple[str | Piece, ...] = (product.inputs[0], *(piece for piece in pieces[number] if piece is not None))
    return [
        New(kind="linear", inputs=inputs, shape=(*lead, rows), dtype=made.dtype, module=product.module),
        New(kind="reshape", inputs=(0,), shape=made.shape, dtype=made.dtype),
    ]


def _siblings(view: View, product: Operator, source: str, operator: Operator) -> list[Operator]:
    """All that reads a product, where that are parts of one dim which leave nothing out; in order. Else nothing."""
    name = source
    while name != product.outputs[0]:
        name = view.makers[name].inputs[0]
        if len(view.readers[name]) > 1:
            return []
    dim, done = operator.attrs["dim"], 0
    readers = view.readers[source]
    if any(
        reader.kind != "narrow" or reader.attrs["dim"] != dim or reader.attrs.get("step", 1) != 1 for reader in readers
    ):
        return []
    readers = sorted(readers, key=lambda each: int(each.attrs["start"]))  # type: ignore[arg-type]
    for each in readers:
        if each.attrs["start"] != done:
            return []
        done += view.shape(each.outputs[0])[int(dim)]  # type: ignore[arg-type]
    return readers if done == view.shape(source)[int(dim)] else []  # type: ignore[arg-type]


def _part_of(view: View, weight: str, factors: tuple[int, ...], at: int, cut: Operator, number: int) -> Piece | None:
    """The rows of a weight [out, in], or elements of a bias [out], that make a part of `factors`, which out is."""
    tensor, before = view.tensors[weight], view.parts.get(weight)
    if tensor.kind not in _WEIGHTS or len(view.readers[weight]) > 1:
        return None
    start, size = int(cut.attrs["start"]), view.shape(cut.outputs[0])[int(cut.attrs["dim"])]  # type: ignore[arg-type]
    rows = math.prod(factors) // factors[at] * size
    shape = (rows, *tensor.shape[1:])
    cut_out = (*_all(factors[:at]), (start, start + size), *_all(factors[at + 1 :]))
    if before is None:
        inside = tensor.shape[1:]
        part = Part(name=weight, shape=tensor.shape, view=(*factors, *inside), region=(*cut_out, *_all(inside)))
        return part_as_tensor(tensor, str(number), shape, part)
    if not before.transposed or not before.is_whole:
        return None
    part = Part(
        name=before.name, shape=before.shape, view=(tensor.shape[1], *factors),
        region=((0, tensor.shape[1]), *cut_out), transposed=True,
    )  # fmt: skip
    return part_as_tensor(structs.replace(tensor, name=before.name), str(number), shape, part)


def _all(sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((0, size) for size in sizes)


KERNEL_RULES: tuple[Rule, ...] = (_kernel_and_bias, _kernel)
FUSED_RULES: tuple[Rule, ...] = (_cut,)
