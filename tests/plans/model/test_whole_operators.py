"""Rules that merge operators, or take products apart, on graphs written for them and on all near misses of these.

Every graph is computed in float64 by definitions of its operators before and after: the results agree, whatever was
merged. Of the graphs themselves the merged operators are told.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from plans.errors import TwofoldError
from plans.model.graph import Graph, Operator
from plans.model.whole import apart, whole_operators
from tests.plans.model.written_graphs import Call, Written

BATCH, LENGTH, HEADS, SIZE, WIDTH = 2, 3, 2, 4, 8
ROWS = (BATCH, LENGTH, WIDTH)
BHSD, BSHD = (BATCH, HEADS, LENGTH, SIZE), (BATCH, LENGTH, HEADS, SIZE)
SWAP = (0, 2, 1, 3)


def rms_norm(w: Written, x: str, *, by_power: bool, divides: bool) -> str:
    square = w.call("pow", x, exponent=2) if by_power else w.call("mul", x, x)
    added = w.call("add", w.mean(square), number=1e-2)
    return w.call("div", x, w.call("sqrt", added)) if divides else w.call("mul", w.call("rsqrt", added), x)


def of_norm(by_power: bool, divides: bool, offset: float | None, narrow: bool) -> Callable[[Written], str]:
    def write(w: Written) -> str:
        x = w.tensor("x", *ROWS, dtype="bfloat16" if narrow else "float32")
        weight = w.tensor("w", WIDTH, kind="parameter", dtype="bfloat16" if narrow else "float32")
        w.tensor("x2", *ROWS), w.tensor("w2", WIDTH, kind="parameter")
        wide = w.call("cast", x, dtype="float32") if narrow else x
        made = rms_norm(w, wide, by_power=by_power, divides=divides)
        made = w.call("cast", made, dtype="bfloat16") if narrow else made
        return w.call("mul", made, weight if offset is None else w.call("add", weight, number=offset))

    return write


def layer_norm(w: Written) -> str:
    y = w.tensor("y", *ROWS)
    w.tensor("y2", *ROWS)
    x = w.call("sub", y, w.mean(y))
    made = rms_norm(w, x, by_power=True, divides=True)
    return w.call("mul", w.tensor("w", WIDTH, kind="parameter"), made)


def gelu(halves_last: bool, by_power: bool) -> Callable[[Written], str]:
    def write(w: Written) -> str:
        x = w.tensor("x", *ROWS)
        w.tensor("x2", *ROWS)
        cube = w.call("pow", x, exponent=3) if by_power else w.call("mul", w.call("mul", x, x), x)
        summed = w.call("add", x, w.call("mul", cube, number=0.044715))
        tanh = w.call("tanh", w.call("mul", summed, number=math.sqrt(2 / math.pi)))
        one_and = w.call("add", tanh, number=1)
        if halves_last:
            return w.call("mul", w.call("mul", x, one_and), number=0.5)
        return w.call("mul", w.call("mul", x, number=0.5), one_and)

    return write


def tables(w: Written, *, doubled: bool = False, length: int = LENGTH) -> tuple[str, str]:
    angles = torch.rand(length, SIZE // 2, generator=w.draw, dtype=torch.float64)
    angles = torch.cat((angles, angles), -1) if doubled else angles
    return w.constant("cos", angles.cos()), w.constant("sin", angles.sin())


def turned(w: Written, a: str, b: str, cos: str, sin: str) -> tuple[str, str]:
    first = w.call("sub", w.call("mul", a, cos), w.call("mul", b, sin))
    return first, w.call("add", w.call("mul", b, cos), w.call("mul", sin, a))


def rotated_halves(w: Written) -> str:
    """[batch, length, heads, size]; rows of longer tables."""
    x, half = w.tensor("x", *BSHD), SIZE // 2
    w.tensor("x2", *BSHD)
    shape = (LENGTH, 1, half)
    rows = (w.cut(table, 0, 1, (LENGTH, half)) for table in tables(w, length=LENGTH + 2))
    cos, sin = (w.call("reshape", each, shape=shape) for each in rows)
    a, b = (w.cut(x, 3, start, (*BSHD[:3], half)) for start in (0, half))
    return w.call("concat", *turned(w, a, b, cos, sin), dim=3)


def rotated_neighbours(w: Written) -> str:
    """Pairs (2i, 2i + 1), as Llama's own code writes it with real numbers."""
    x, half = w.tensor("x", *BSHD), SIZE // 2
    pairs, column = (*BSHD[:3], half, 2), (*BSHD[:3], half)
    cos, sin = (w.call("reshape", each, shape=(1, LENGTH, 1, half)) for each in tables(w))
    wide = w.call("reshape", x, shape=pairs)
    a, b = (w.call("reshape", w.cut(wide, 4, start, (*column, 1)), shape=column) for start in (0, 1))
    made = (w.call("reshape", each, shape=(*column, 1)) for each in turned(w, a, b, cos, sin))
    return w.call("reshape", w.call("concat", *made, dim=4), shape=BSHD)


def complex_table(w: Written) -> str:
    """Cosines and sines as a table of complex numbers."""
    x, half = w.tensor("x", *BSHD), SIZE // 2
    table = w.constant("table", torch.randn(LENGTH + 1, half, 2, generator=w.draw, dtype=torch.float64))
    columns = (w.cut(table, 2, at, (LENGTH + 1, half, 1)) for at in (0, 1))
    flat = (w.call("reshape", each, shape=(LENGTH + 1, half)) for each in columns)
    rows = (w.cut(each, 0, 1, (LENGTH, half)) for each in flat)
    cos, sin = (w.call("reshape", each, shape=(1, LENGTH, 1, half)) for each in rows)
    a, b = (w.cut(x, 3, start, (*BSHD[:3], half)) for start in (0, half))
    return w.call("concat", *turned(w, a, b, cos, sin), dim=3)


def unhalved(w: Written, x: str, shape: tuple[int, ...]) -> str:
    half = shape[-1] // 2
    a, b = (w.cut(x, len(shape) - 1, start, (*shape[:-1], half)) for start in (0, half))
    return w.call("concat", w.call("neg", b), a, dim=len(shape) - 1)


def turned_halves(w: Written) -> str:
    """As Hugging Face's Llama, behind the exchange of heads and length, with tables of equal halves."""
    x = w.call("permute", w.tensor("x", *BSHD), dims=SWAP)
    w.tensor("x2", *BHSD)
    cos, sin = (w.call("reshape", each, shape=(1, 1, LENGTH, SIZE)) for each in tables(w, doubled=True))
    return w.call("add", w.call("mul", x, cos), w.call("mul", unhalved(w, x, BHSD), sin))


def frequencies(w: Written) -> str:
    """Angles are made of frequencies: positions times frequencies, each twice."""
    x, half = w.tensor("x", *BSHD), SIZE // 2
    rates = w.constant("rates", torch.rand(half, generator=w.draw, dtype=torch.float64))
    w.constant("rates2", torch.rand(half, generator=w.draw, dtype=torch.float64))
    places = w.call("cast", w.call("arange", shape=(LENGTH,), start=0, step=1), dtype="float32")
    column, row = w.call("reshape", places, shape=(LENGTH, 1)), w.call("reshape", rates, shape=(1, half))
    angles = w.call("mul", column, row)
    twice = w.call("concat", angles, angles, dim=1)
    cos, sin = (
        w.call("reshape", w.call("mul", w.call(kind, twice), number=1.0), shape=(1, LENGTH, 1, SIZE))
        for kind in ("cos", "sin")
    )
    return w.call("add", w.call("mul", x, cos), w.call("mul", unhalved(w, x, BSHD), sin))


def frequencies_of_neighbours(w: Written) -> str:
    """As Hugging Face's GLM: each angle twice in a row, pairs (2i, 2i + 1), frequencies [pairs, 1] by positions."""
    x, half = w.tensor("x", *BSHD), SIZE // 2
    rates = w.constant("rates", torch.rand(half, generator=w.draw, dtype=torch.float64))
    places = w.call("cast", w.call("arange", shape=(LENGTH,), start=0, step=1), dtype="float32")
    product = w.call(
        "matmul", w.call("reshape", rates, shape=(half, 1)), w.call("reshape", places, shape=(1, LENGTH))
    )  # fmt: skip
    angles = w.call("permute", product, dims=(1, 0))
    column = w.call("reshape", angles, shape=(LENGTH, half, 1))
    twice = w.call("reshape", w.call("expand", column, shape=(LENGTH, half, 2)), shape=(LENGTH, SIZE))
    cos, sin = (w.call("reshape", w.call(kind, twice), shape=(1, LENGTH, 1, SIZE)) for kind in ("cos", "sin"))
    a, b = (w.cut(x, 3, start, (*BSHD[:3], half), step=2) for start in (0, 1))
    column_shape = (*BSHD[:3], half, 1)
    pairs = (w.call("reshape", each, shape=column_shape) for each in (w.call("neg", b), a))
    crossed = w.call("reshape", w.call("concat", *pairs, dim=4), shape=BSHD)
    return w.call("add", w.call("mul", x, cos), w.call("mul", crossed, sin))


def rotated_part(w: Written) -> str:
    """The first half of every head is rotated, the rest passes."""
    x, half = w.tensor("x", BATCH, LENGTH, HEADS, 2 * SIZE), SIZE // 2
    first, rest = (w.cut(x, 3, start, BSHD) for start in (0, SIZE))
    cos, sin = (w.call("reshape", each, shape=(LENGTH, 1, half)) for each in tables(w))
    a, b = (w.cut(first, 3, start, (*BSHD[:3], half)) for start in (0, half))
    return w.call("concat", w.call("concat", *turned(w, a, b, cos, sin), dim=3), rest, dim=3)


def shared_heads(w: Written) -> str:
    """Keys and values of one head serve both heads of queries; heads and length are exchanged on both sides."""
    q, narrow = w.call("permute", w.tensor("q", *BSHD), dims=SWAP), (BATCH, LENGTH, 1, SIZE)
    wide = []
    for name in ("k", "v"):
        one = w.call("permute", w.tensor(name, *narrow), dims=SWAP)
        row = w.call("reshape", one, shape=(BATCH, 1, 1, LENGTH, SIZE))
        wide.append(w.call("reshape", w.call("expand", row, shape=(BATCH, 1, HEADS, LENGTH, SIZE)), shape=BHSD))
    made = w.call("attention", q, *wide, causal=True)
    return w.call("permute", made, dims=SWAP)


def rotated_part_of_heads(w: Written) -> str:
    """As Hugging Face's GPT-NeoX, with heads before length: the first half of every head is rotated."""
    x, half = w.call("permute", w.tensor("x", BATCH, LENGTH, HEADS, 2 * SIZE), dims=SWAP), SIZE // 2
    first, rest = (w.cut(x, 3, start, BHSD) for start in (0, SIZE))
    cos, sin = (w.call("reshape", each, shape=(1, 1, LENGTH, half)) for each in tables(w))
    a, b = (w.cut(first, 3, start, (*BHSD[:3], half)) for start in (0, half))
    return w.call("concat", w.call("concat", *turned(w, a, b, cos, sin), dim=3), rest, dim=3)


def joined_products(by_kernel: bool) -> Callable[[Written], str]:
    """Queries, keys and values of one product, each head's after the other; GPT-2's kernels are [in, out]."""

    def write(w: Written) -> str:
        x = w.tensor("x", *ROWS)
        out = 3 * HEADS * SIZE
        bias = w.tensor("m.b", out, kind="parameter")
        if by_kernel:
            flat = w.call("reshape", x, shape=(BATCH * LENGTH, WIDTH))
            product = w.call("add", w.call("matmul", flat, w.tensor("m.w", WIDTH, out, kind="parameter")), bias)
            made = w.call("reshape", product, shape=(BATCH, LENGTH, out))
            parts = [w.cut(made, 2, at * HEADS * SIZE, (BATCH, LENGTH, HEADS * SIZE)) for at in range(3)]
            q, k, v = (w.call("reshape", each, shape=BSHD) for each in parts)
        else:
            made = w.call("linear", x, w.tensor("m.w", out, WIDTH, kind="parameter"), bias)
            heads = w.call("reshape", made, shape=(BATCH, LENGTH, HEADS, 3 * SIZE))
            q, k, v = (w.cut(heads, 3, at * SIZE, BSHD) for at in range(3))
        return w.call("add", w.call("mul", q, k), v)

    return write


def gated_halves(w: Written) -> str:
    """Gate and input of an MLP in one product without a bias, heads of it behind a permute."""
    x = w.tensor("x", *ROWS)
    made = w.call("linear", x, w.tensor("w", 2 * WIDTH, WIDTH, kind="parameter"))
    turned = w.call("permute", made, dims=(0, 2, 1))
    gate, up = (w.cut(turned, 1, start, (BATCH, WIDTH, LENGTH)) for start in (0, WIDTH))
    return w.call("mul", w.call("silu", gate), up)


def stream_last(w: Written) -> str:
    """(mlp + attention) + x of both."""
    x = w.tensor("x", *BSHD)
    attended = w.call("attention", x, x, x, layout="bshd", scale=0.5)
    mlp = w.call("mul", w.call("silu", x), number=1.0)
    return w.call("add", w.call("add", mlp, attended), x)


def counted_positions(w: Written) -> str:
    """Positions from 2 on, of every sample, added to rows of tokens that are multiplied by a number."""
    tokens, rows = w.tensor("tokens", *ROWS), w.tensor("table", LENGTH + 4, WIDTH, kind="parameter")
    count = w.call("add", w.call("arange", shape=(LENGTH,), start=1, step=1), number=1)
    ids = w.call("reshape", count, shape=(1, LENGTH))
    return w.call("add", w.call("div", tokens, number=4.0), w.call("embedding", ids, rows))


def positions_of_samples(w: Written) -> str:
    """Positions that a module adds to zeros of the batch's size."""
    tokens, rows = w.tensor("tokens", *ROWS), w.tensor("table", LENGTH + 1, WIDTH, kind="parameter")
    count = w.call("arange", shape=(LENGTH,), start=0, step=1)
    zeros = w.call("fill", shape=(BATCH, LENGTH), value=0, dtype="int64")
    ids = w.call("add", zeros, w.call("reshape", count, shape=(1, LENGTH)))
    return w.call("add", w.call("embedding", ids, rows), tokens)


def scaled_queries(w: Written) -> str:
    q = w.call("mul", w.tensor("q", BATCH, LENGTH, HEADS * SIZE), number=0.3)
    q = w.call("permute", w.call("reshape", q, shape=BSHD), dims=SWAP)
    k, v = (w.call("permute", w.tensor(name, *BSHD), dims=SWAP) for name in "kv")
    return w.call("permute", w.call("attention", q, k, v, scale=0.7, causal=True), dims=SWAP)


def views_of_views(w: Written) -> str:
    """Rows of a permuted tensor that are normalised; the same part twice; everything of a tensor; a view of a view."""
    x = w.call("permute", w.tensor("x", BATCH, LENGTH, HEADS, WIDTH), dims=SWAP)
    whole = w.cut(x, 1, 0, (BATCH, HEADS, LENGTH, WIDTH))
    normed = w.call("rms_norm", whole, w.tensor("w", WIDTH, kind="parameter"), eps=1e-2)
    one, two = (w.cut(normed, 3, 2, BHSD) for _ in range(2))
    rows = w.call("reshape", w.call("add", one, two), shape=(BATCH * HEADS, LENGTH, SIZE))
    return w.call("reshape", rows, shape=BHSD)


def flat_rows(w: Written) -> str:
    """A product and a residual sum of flattened rows."""
    x, y = (w.call("reshape", w.tensor(name, *ROWS), shape=(BATCH * LENGTH, WIDTH)) for name in "xy")
    made = w.call("linear", x, w.tensor("w", WIDTH, WIDTH, kind="parameter"))
    return w.call("reshape", w.call("add", w.call("silu", made), y), shape=ROWS)


def flattened_loss(w: Written) -> str:
    logits, labels = w.tensor("logits", *ROWS), w.ids("labels", WIDTH, BATCH, LENGTH)
    w.ids("other", WIDTH, BATCH, LENGTH)
    rows = w.call("reshape", logits, shape=(BATCH * LENGTH, WIDTH))
    flat = w.call("reshape", labels, shape=(BATCH * LENGTH,))
    count = w.call("count_labels", flat, ignore_index=1)
    return w.call("cross_entropy", rows, flat, count, ignore_index=1)


def later_labels(w: Written) -> str:
    """The last logits and the first labels are dropped."""
    logits, labels = w.tensor("logits", *ROWS), w.ids("labels", WIDTH, BATCH, LENGTH)
    w.ids("other", WIDTH, BATCH, LENGTH)
    first = w.cut(logits, 1, 0, (BATCH, LENGTH - 1, WIDTH))
    return w.call("cross_entropy", first, w.cut(labels, 1, 1, (BATCH, LENGTH - 1)))


def padded_labels(w: Written) -> str:
    """Labels get an ignored one at the end and lose the first one."""
    logits, labels = w.tensor("logits", *ROWS), w.ids("labels", WIDTH, BATCH, LENGTH)
    w.ids("other", WIDTH, BATCH, LENGTH)
    arguments = '[[{"tensor": 0}, [0, 1], "constant", -100], {}]'
    longer = w.call(
        "opaque", labels, shape=(BATCH, LENGTH + 1), dims="ab->ac", target="aten.pad.default", arguments=arguments
    )
    later = w.cut(longer, 1, 1, (BATCH, LENGTH))
    count = w.call("count_labels", later, ignore_index=-100)
    return w.call("cross_entropy", logits, later, count, ignore_index=-100)


WHOLE = {
    "rms norm by powers": (of_norm(True, False, None, False), {"rms_norm"}),
    "rms norm by products": (of_norm(False, True, None, False), {"rms_norm"}),
    "rms norm with an offset": (of_norm(True, False, 1.0, False), {"rms_norm"}),
    "rms norm in float32": (of_norm(True, False, None, True), {"rms_norm"}),
    "layer norm": (layer_norm, {"layer_norm"}),
    "gelu": (gelu(False, True), {"gelu"}),
    "gelu, halved last": (gelu(True, False), {"gelu"}),
    "rope of halves": (rotated_halves, {"rope"}),
    "rope of neighbours": (rotated_neighbours, {"rope"}),
    "rope by complex numbers": (complex_table, {"rope"}),
    "rope of turned halves": (turned_halves, {"rope", "permute"}),
    "rope by frequencies": (frequencies, {"rope"}),
    "rope of turned neighbours": (frequencies_of_neighbours, {"rope"}),
    "shared heads": (shared_heads, {"attention"}),
    "loss of rows": (flattened_loss, {"cross_entropy", "count_labels"}),
}
"""Name -> what writes a graph, and the kinds that `whole_operators` leaves of it."""

APART = {
    "rope of a part": (rotated_part, {"rope"}),
    "rope of a part of heads": (rotated_part_of_heads, {"rope", "permute"}),
    "products of kernels": (joined_products(True), {"linear", "reshape", "mul", "add"}),
    "products by heads": (joined_products(False), {"linear", "reshape", "mul", "add"}),
    "gate and input": (gated_halves, {"linear", "permute", "silu", "mul"}),
    "the stream first": (stream_last, {"add", "attention", "silu"}),
    "counted positions": (counted_positions, {"arange", "embedding", "mul", "add"}),
    "positions of samples": (positions_of_samples, {"arange", "embedding", "add"}),
    "scaled queries": (scaled_queries, {"reshape", "attention"}),
    "views": (views_of_views, {"rms_norm", "narrow", "permute", "add"}),
    "rows": (flat_rows, {"linear", "silu", "add"}),
    "later labels": (later_labels, {"cross_entropy", "count_labels"}),
    "padded labels": (padded_labels, {"cross_entropy", "count_labels"}),
}
"""The same of `apart`."""


def is_of_one_dtype(graph: Graph, operator: Operator) -> bool:
    floats = {graph.tensors[name].dtype for name in (*operator.inputs, *operator.outputs)} - {"int64"}
    return operator.kind in ("cast", "count_labels") or len(floats) < 2


def can_be(graph: Graph) -> bool:
    """Whether capture could make a graph: its shapes fit its operators, and none mixes dtypes."""
    try:
        return all(graph.spec(operator) and is_of_one_dtype(graph, operator) for operator in graph.operators)
    except TwofoldError:
        return False


def check(
    w: Written, rewrite: Callable[[Graph], Graph], calls: list[Call], *, must: set[str] | None = None
) -> None:  # fmt: skip
    """Compare the graph of some calls with the rewritten one."""
    values = w.values(calls)
    graph = w.graph(calls, values)
    found = rewrite(graph)
    made = w.compute(found)
    for operator in found.operators:
        found.spec(operator)
        assert is_of_one_dtype(found, operator), operator
    torch.testing.assert_close(made[found.loss], values[graph.loss], rtol=1e-9, atol=1e-12)
    (last,) = (operator for operator in found.operators if operator.outputs == (found.loss,))
    before = graph.operators[-1]
    if before.kind == last.kind == "mean_loss":
        one, two = values[before.inputs[0]], made[last.inputs[0]]
        torch.testing.assert_close(two, one, rtol=1e-9, atol=1e-12)
    if must is not None:
        assert {operator.kind for operator in found.operators} - {"mean_loss"} == must


@pytest.mark.parametrize("name", [*WHOLE, *APART])
def test_rewritten_graphs_and_near_misses_compute_the_same(name: str) -> None:
    write, must = (WHOLE | APART)[name]
    doubled = ("cos", "sin") if name == "rope of turned halves" else ()
    rewrite = apart if name in APART else partial(whole_operators, doubled=doubled)
    w = Written()
    last = write(w)
    if w.calls[-1].kind != "cross_entropy":
        w.call("mean_loss", last)
    check(w, rewrite, w.calls, must=must)
    tried = 0
    for what, calls in w.near_misses():
        try:
            graph = w.graph(calls, w.values(calls))
        except (RuntimeError, IndexError, AssertionError, ValueError, TypeError, TwofoldError):
            continue  # it cannot be computed
        if not can_be(graph):
            continue
        tried += 1
        try:
            check(w, rewrite, calls)
        except Exception as error:
            raise AssertionError(f"{name}, {what}: {error}") from error
    assert tried > 5
