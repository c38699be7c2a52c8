"""Sizes of the matrix products that a call makes, read off its local shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Product", "keeps_sums", "matrix_shape", "product", "summed_product"]

Shapes = tuple[tuple[int, ...], ...]

_FORMS = {
    ("linear", "forward"): "nt", ("linear", "grad0"): "nn", ("linear", "grad1"): "tn",
    ("matmul", "forward"): "nn", ("matmul", "grad0"): "nt", ("matmul", "grad1"): "tn",
}  # fmt: skip
"""The memory layout of the operands if both are stored as in the forward (see `costmodels.price.compute.FORMS`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """`batch` equal products (m, n, k): rows and columns of a result and the length of its sums; `form` as stored."""

    m: int
    n: int
    k: int
    batch: int = 1
    form: str = "nt"


def product(call: str, shapes: Shapes) -> Product:
    """The matrix products of a call.

    Args:
        call: forward, grad0 or grad1 of a linear, matmul or conv2d.
        shapes: local shapes, inputs first.

    >>> product("matmul.grad1", ((3, 4, 6), (3, 4, 5), (3, 5, 6)))
    Product(m=5, n=6, k=4, batch=3, form='tn')
    """
    kind, _, part = call.partition(".")
    m, n, k = matrix_shape(call, shapes)
    if kind == "matmul" and all(len(shape) > 2 for shape in shapes[:2]):
        # of the three tensors the result of the forward and the first operand are never broadcast in practice
        batch = math.prod(max(shapes, key=math.prod)[:-2])
        work = m * n * k
        made, other = shapes[-1][-2:], shapes[0][-2:]
        m, n = made
        k = work // (batch * m * n) if batch * m * n else 0
        assert len(other) == 2
        return Product(m=m, n=n, k=k, batch=batch, form=_FORMS[kind, part])
    return Product(m=m, n=n, k=k, form=_FORMS.get((kind, part), "nt"))


def summed_product(made: tuple[int, ...], flops: int) -> tuple[int, int, int]:
    """(m, n, k) of a call of which only the operations are known: a convolution of one or three dims, an einsum.

    The largest dim of the result but the first, which is the batch, counts as columns, all others as rows. A gradient
    has the sizes of the forward, with more to sum.

    Args:
        made: local shape of the forward's result.
        flops: local floating-point operations, two for each product that is summed.

    >>> summed_product((8, 64, 100), 2 * 8 * 64 * 100 * 96)
    (512, 100, 96)
    """
    size, columns = math.prod(made), max(made[1:], default=1)
    return size // max(1, columns), columns, flops // max(1, 2 * size)


def keeps_sums(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether a gradient of attention reads the output and the logarithms of the sums that the forward kept.

    They are behind the gradient of the output, q, k and v (`plans.operators.attention`).

    Args:
        shapes: local shapes of the gradient's call, inputs first.

    >>> q, sums = (2, 4, 16, 8), (2, 4, 16)
    >>> keeps_sums((q, q, q, q, q, sums, q, q, q)), keeps_sums((q, q, q, q, q, q, q))
    (True, False)
    """
    return len(shapes) > 5 and len(shapes[5]) == len(shapes[0]) - 1


def matrix_shape(call: str, shapes: tuple[tuple[int, ...], ...]) -> tuple[int, int, int]:
    """(m, n, k) of a matrix product: rows and columns of the result and the length of the sums.

    The batch of a batched product counts as rows, a window of a convolution as part of the sums; attention is taken as
    one product of its queries and keys that does the work of all its products.

    Args:
        call: the forward of a linear, matmul, conv2d or attention, or one of its gradients ("linear.grad0" of
            (g[b.., n], w[n, k]), "linear.grad1" of (g[b.., n], x[b.., k]), and so on).
        shapes: local shapes, inputs first.

    >>> matrix_shape("linear.grad1", ((2, 4, 6), (2, 4, 5), (6, 5)))
    (6, 5, 8)
    >>> matrix_shape("matmul.forward", ((3, 4, 5), (3, 5, 6), (3, 4, 6)))
    (12, 6, 5)
    """
    kind, _, part = call.partition(".")
    first, second = shapes[0], shapes[1]
    if kind == "attention":
        queries, keys, values = shapes[:3] if part == "forward" else shapes[1:4]
        depth = queries[-1] + values[-1]  # q k^T, and the weights times v
        return math.prod(queries[:-1]), keys[-2], depth if part == "forward" else depth * 7 // 2
    if kind == "conv2d":
        return _convolution_shape(part, shapes)
    if kind == "matmul":
        made = shapes[-1] or (1,)
        length = first[-1] if part == "forward" else made[-1] if part == "grad0" else second[-1]
        work = math.prod(made if part == "forward" else first) * length
        rows = math.prod(made[:-1])
        return rows, made[-1], work // (rows * made[-1])
    if kind == "grouped_linear":  # one product with all rows, as if all groups had the same weights
        widths = (shapes[-1][-1], first[-1]) if part != "grad2" else (first[-1], second[-1])
        return (math.prod(first[:-1]), *widths) if part != "grad2" else (*widths, math.prod(first[:-1]))
    rows = math.prod(first[:-1])
    if part == "forward":
        return rows, second[0], first[-1]
    if part == "grad0":
        return rows, second[1], first[-1]
    return first[-1], second[-1], rows


def _convolution_shape(part: str, shapes: tuple[tuple[int, ...], ...]) -> tuple[int, int, int]:
    """Windows as rows (im2col): y = windows w, d windows = g w, dw = g windows."""
    channels, *window_dims = shapes[-1] if part == "grad1" else shapes[1]
    window = math.prod(window_dims)
    made = shapes[-1] if part == "forward" else shapes[0]
    rows = made[0] * math.prod(made[2:])
    return {
        "forward": (rows, channels, window), "grad0": (rows, window, channels), "grad1": (channels, window, rows),
    }[part]  # fmt: skip
