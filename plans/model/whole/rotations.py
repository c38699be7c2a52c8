"""Rotary positions written in parts: pairs of a head multiplied by tables of cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from plans.model.graph import Attr, Operator
from plans.model.part import Part
from plans.model.whole.heads import SWAPPED
from plans.model.whole.rewrite import New, Piece, Rule, View, part_as_tensor

__all__ = ["PART_RULES", "ROTATION_RULES"]


class _Table(NamedTuple):
    """The source of the cosines or sines of a rotation: a table [length, pairs] of the model, or frequencies [pairs].

    `length_at` is the dim of four at which the length stands where they are multiplied with.
    """

    source: str | Piece
    shape: tuple[int, ...]
    length_at: int


class _Turn(NamedTuple):
    """The operands of a rotation."""

    x: str
    cos: _Table
    sin: _Table


def _neighbours(view: View, operator: Operator) -> Sequence[New] | None:
    """Pairs (2i, 2i + 1): x as [.., pairs, 2], its two columns turned and joined again."""
    joined = view.made(operator.inputs[0], "concat") if operator.kind == "reshape" else None
    if joined is None or tuple(joined.attrs["sizes"]) != (1, 1):  # type: ignore[arg-type]
        return None
    pair = _turned_pair(view, [view.behind(name, "reshape") for name in joined.inputs])
    if pair is None:
        return None
    (a, b), cos, sin = pair
    parts = [view.made(view.behind(name, "reshape"), "narrow") for name in (a, b)]
    columns = _parts_of(view, parts, step=1, sizes=(1, 1))
    if columns is None or view.shape(columns)[:-2] != view.shape(operator.outputs[0])[:-1]:
        return None
    return _rope(view, operator, _Turn(columns, cos, sin), interleaved=True)


def _halves(view: View, operator: Operator) -> Sequence[New] | None:
    """Pairs (i, i + half): two halves of x turned and joined again."""
    if not _is_joined(view, operator):
        return None
    pair = _turned_pair(view, operator.inputs)
    if pair is None:
        return None
    (a, b), cos, sin = pair
    half = view.shape(a)[-1]
    x = _parts_of(view, [view.made(name, "narrow") for name in (a, b)], step=half, sizes=(half, half))
    return None if x is None else _rope(view, operator, _Turn(x, cos, sin), interleaved=False)


def _is_joined(view: View, operator: Operator) -> bool:
    """Whether an operator joins two tensors along their last dim."""
    is_last = operator.kind == "concat" and operator.attrs["dim"] == len(view.shape(operator.outputs[0])) - 1
    return is_last and len(operator.inputs) == 2


def _turned_halves(view: View, operator: Operator) -> Sequence[New] | None:
    """x cos + (-b, a) sin for the halves a and b of x, as Hugging Face's Llama writes it."""
    return _turned(view, operator, interleaved=False)


def _turned_neighbours(view: View, operator: Operator) -> Sequence[New] | None:
    """x cos + (-x1, x0, -x3, x2, ..) sin, as Hugging Face's Cohere and GLM write it."""
    return _turned(view, operator, interleaved=True)


def _turned(view: View, operator: Operator, *, interleaved: bool) -> Sequence[New] | None:
    """x cos + (every pair (a, b) of x as (-b, a)) sin."""
    if operator.kind != "add" or len(operator.inputs) != 2:
        return None
    straight, crossed = (view.made(name, "mul") for name in operator.inputs)
    if straight is None or crossed is None or len(straight.inputs) != 2 or len(crossed.inputs) != 2:
        return None
    x, tables = straight.inputs[0], (straight.inputs[1], crossed.inputs[1])
    if (_unpaired if interleaved else _unhalved)(view, crossed.inputs[0]) != x:
        return None
    cos, sin = None, None
    if not interleaved:
        cos, sin = (_table(view, name, len(view.shape(x)), doubled=True) for name in tables)
    if cos is None or sin is None:
        cos, sin = (
            _angles(view, name, kind, len(view.shape(x)), interleaved=interleaved)
            for name, kind in zip(tables, ("cos", "sin"), strict=True)
        )
    if cos is None or sin is None:
        return None
    return _rope(view, operator, _Turn(x, cos, sin), interleaved=interleaved)


def _unhalved(view: View, name: str) -> str | None:
    """x, where a tensor is (-b, a) for its halves a and b."""
    joined = view.made(name, "concat")
    negative = joined and view.made(joined.inputs[0], "neg")
    if joined is None or negative is None or not _is_joined(view, joined):
        return None
    half = view.shape(joined.inputs[0])[-1]
    parts = [view.made(each, "narrow") for each in (joined.inputs[1], negative.inputs[0])]
    return _parts_of(view, parts, step=half, sizes=(half, half))


def _unpaired(view: View, name: str) -> str | None:
    """x, where a tensor is (-x1, x0, -x3, x2, ..)."""
    flat = view.made(name, "reshape")
    joined = flat and view.made(flat.inputs[0], "concat")
    if joined is None or tuple(joined.attrs["sizes"]) != (1, 1):  # type: ignore[arg-type]
        return None
    columns = [view.behind(each, "reshape") for each in joined.inputs]
    negative = view.made(columns[0], "neg")
    parts = [view.made(each, "narrow") for each in (columns[1], negative.inputs[0] if negative else "")]
    first, second = parts
    if first is None or second is None or first.inputs != second.inputs:
        return None
    x = first.inputs[0]
    shape, half = view.shape(x), view.shape(x)[-1] // 2
    for start, part in enumerate((first, second)):
        cut = part.attrs["dim"], part.attrs["start"], part.attrs.get("step", 1)
        if cut != (len(shape) - 1, start, 2) or view.shape(part.outputs[0])[-1] != half:
            return None
    in_pairs = (*shape[:-1], half, 2)
    return x if view.shape(joined.outputs[0]) == in_pairs and view.shape(name) == shape else None


def _angles(view: View, name: str, kind: str, num_dims: int, *, interleaved: bool) -> _Table | None:
    """Frequencies of which `name` is the cosine (or sine) of their products with positions, each product twice."""
    shape = (1,) * (num_dims - len(view.shape(name))) + view.shape(name)
    products = _once(view, name, kind, interleaved=interleaved)
    found = _outer(view, view.behind(products, "reshape")) if products else None
    if found is None or num_dims != 4:
        return None
    length = _counted(view, found[0])
    source = view.tensors[view.behind(found[1], "reshape", "cast", "expand")]
    if length is None or source.kind != "constant" or len(source.shape) != 1:
        return None
    pairs = source.shape[0]
    for at in (1, 2):
        if shape == tuple({at: length, 3: 2 * pairs}.get(each, 1) for each in range(4)):
            return _Table(source.name, source.shape, at)
    return None


def _once(view: View, name: str, kind: str, *, interleaved: bool) -> str | None:
    """The angles of which `name` is the cosine (or sine), each twice: adjacent (interleaved), or in two halves."""
    if interleaved and (single := _each_twice(view, name)) is not None:
        cut = view.made(single, "narrow")
        if cut is None or (cut.attrs["dim"], cut.attrs["start"]) != (len(view.shape(single)) - 1, 0):
            return None
        is_half = 2 * view.shape(single)[-1] == view.shape(cut.inputs[0])[-1] and cut.attrs.get("step", 1) == 1
        return _once(view, cut.inputs[0], kind, interleaved=False) if is_half else None
    turned = view.made(_unscaled(view, name), kind)
    if turned is None:
        return None
    if interleaved:
        return _each_twice(view, turned.inputs[0])
    twice = view.made(turned.inputs[0], "concat")
    if twice is None or not _is_joined(view, twice) or twice.inputs[0] != twice.inputs[1]:
        return None
    return twice.inputs[0]


def _each_twice(view: View, name: str) -> str | None:
    """The tensor that `name` contains with every element of its last dim twice."""
    flat = view.made(name, "reshape")
    wide = flat and view.made(flat.inputs[0], "expand")
    if wide is None:
        return None
    *rest, size, count = view.shape(wide.outputs[0])
    column = view.made(wide.inputs[0], "reshape")
    if column is None or count != 2 or view.shape(name) != (*rest, 2 * size):
        return None
    single = column.inputs[0]
    return single if view.shape(wide.inputs[0]) == (*rest, size, 1) and view.shape(single)[-1] == size else None


def _outer(view: View, name: str) -> tuple[str, str] | None:
    """(positions, frequencies), where a tensor [.., length, pairs] holds the product of each with each."""
    turned = view.made(name, "permute")
    product = view.makers.get(turned.inputs[0] if turned else name)
    if product is None or product.kind not in ("mul", "matmul") or len(product.inputs) != 2:
        return None
    rank = len(view.shape(name))
    if turned is not None and turned.attrs["dims"] != (*range(rank - 2), rank - 1, rank - 2):
        return None
    orders = (product.inputs, product.inputs[::-1]) if product.kind == "mul" else (product.inputs,)
    for rows, columns in orders:
        left, right = view.shape(rows), view.shape(columns)
        if left[-1:] == (1,) and math.prod(right) == right[-1] and math.prod(left) == left[-2]:
            return (rows, columns) if turned is None else (columns, rows)
    return None


def _unscaled(view: View, name: str) -> str:
    """A tensor without reshapes and factors of 1."""
    while (maker := view.makers.get(name)) is not None and len(maker.inputs) == 1:
        if maker.kind not in ("reshape", "cast", "expand") and (maker.kind, maker.attrs.get("number")) != ("mul", 1):
            break
        name = maker.inputs[0]
    return name


def _counted(view: View, name: str) -> int | None:
    """The length of a sequence, where a tensor is 0, 1, 2, ... of it."""
    while (maker := view.makers.get(name)) is not None and len(maker.inputs) == 1:
        if maker.kind not in ("reshape", "cast") and (maker.kind, maker.attrs.get("number")) != ("add", 0):
            return None
        name = maker.inputs[0]
    if maker is None or maker.kind != "arange" or (maker.attrs["start"], maker.attrs["step"]) != (0, 1):
        return None
    return view.shape(name)[0]


def _turned_pair(view: View, made: Sequence[str]) -> tuple[tuple[str, str], _Table, _Table] | None:
    """(a, b), cos and sin, where `made` are a cos - b sin and b cos + a sin."""
    first, second = view.made(made[0], "sub"), view.made(made[1], "add")
    if first is None or second is None or len(first.inputs) != 2 or len(second.inputs) != 2:
        return None
    products = [view.made(name, "mul") for name in (*first.inputs, *second.inputs)]
    if any(product is None or len(product.inputs) != 2 for product in products):
        return None
    operands = [_operands(view, product) for product in products if product is not None]
    if any(operand is None for operand in operands):
        return None
    (a, cos), (b, sin), one, other = (operand for operand in operands if operand is not None)
    if {one, other} != {(b, cos), (a, sin)} or a == b:
        return None
    return (a, b), cos, sin


def _operands(view: View, product: Operator) -> tuple[str, _Table] | None:
    """The operands of a product, and the table that it multiplies with."""
    for x, factor in (product.inputs, product.inputs[::-1]):
        table = _table(view, factor, len(view.shape(x)))
        if table is not None:
            return x, table
    return None


def _table(view: View, name: str, num_dims: int, *, doubled: bool = False) -> _Table | None:
    """A table of the model that is repeated over samples and heads; `doubled`: its two halves are equal, and one is
    enough."""
    rows = view.behind(name, "reshape", "cast", "expand")
    cut = view.made(rows, "narrow")
    if (found := _complex_table(view, name, rows, cut, num_dims)) is not None:
        return found
    source = view.tensors[rows if cut is None else view.behind(cut.inputs[0], "reshape", "cast")]
    if source.kind != "constant" or len(source.shape) != 2 or num_dims != 4 or source.name in view.parts:
        return None
    first, length = 0, source.shape[0]
    if cut is not None:
        if cut.attrs["dim"] != 0 or cut.attrs.get("step", 1) != 1 or len(view.shape(rows)) != 2:
            return None
        first, length = int(cut.attrs["start"]), view.shape(rows)[0]  # type: ignore[arg-type]
    width = source.shape[1]
    shape = (1,) * (num_dims - len(view.shape(name))) + view.shape(name)
    places = [at for at in (1, 2) if shape == tuple({at: length, 3: width}.get(each, 1) for each in range(4))]
    if not places or (doubled and (source.name not in view.doubled or width % 2)):
        return None
    own = (length, width // 2 if doubled else width)
    if own == source.shape:
        return _Table(source.name, own, places[0])
    part = Part(
        name=source.name, shape=source.shape, view=source.shape, region=((first, first + length), (0, own[1])),
        repeats=1 if doubled else None,
    )  # fmt: skip
    word = f"half_{first}_{length}" if doubled else f"rows_{first}_{length}"
    return _Table(part_as_tensor(source, word, own, part), own, places[0])


def _complex_table(view: View, name: str, rows: str, cut: Operator | None, num_dims: int) -> _Table | None:
    """The cosines or sines in a table of complex numbers, a constant [length, pairs, 2], or in rows of it."""
    if cut is None or num_dims != 4:
        return None
    below = view.made(view.behind(cut.inputs[0], "reshape", "cast"), "narrow")
    column, first = (cut, 0) if below is None else (below, cut.attrs["start"])
    source = view.tensors[column.inputs[0]]
    if source.kind != "constant" or len(source.shape) != 3 or source.shape[2] != 2 or column.attrs["dim"] != 2:
        return None
    if below is not None and (cut.attrs["dim"] != 0 or cut.attrs.get("step", 1) != 1 or len(view.shape(rows)) != 2):
        return None
    length, pairs = (source.shape[0] if below is None else view.shape(rows)[0]), source.shape[1]
    shape = (1,) * (num_dims - len(view.shape(name))) + view.shape(name)
    places = [at for at in (1, 2) if shape == tuple({at: length, 3: pairs}.get(each, 1) for each in range(4))]
    if not places or not isinstance(first, int):
        return None
    at = int(column.attrs["start"])  # type: ignore[arg-type]
    part = Part(
        name=source.name, shape=source.shape, view=(source.shape[0] * pairs, 2),
        region=((first * pairs, (first + length) * pairs), (at, at + 1)),
    )  # fmt: skip
    word = ("cos", "sin")[at] if length == source.shape[0] else f"{('cos', 'sin')[at]}_{first}_{length}"
    return _Table(part_as_tensor(source, word, (length, pairs), part), (length, pairs), places[0])


def _parts_of(view: View, parts: Sequence[Operator | None], *, step: int, sizes: tuple[int, int]) -> str | None:
    """The tensor from whose last dim two parts were cut, the first from 0 and the second from `step`."""
    first, second = parts
    if first is None or second is None or first.inputs != second.inputs:
        return None
    x = first.inputs[0]
    last = len(view.shape(x)) - 1
    for part, start, size in ((first, 0, sizes[0]), (second, step, sizes[1])):
        if part.attrs["dim"] != last or part.attrs["start"] != start or part.attrs.get("step", 1) != 1:
            return None
        if view.shape(part.outputs[0])[-1] != size:
            return None
    return x if view.shape(x)[-1] == sum(sizes) else None


def _rope(view: View, operator: Operator, turn: _Turn, *, interleaved: bool) -> Sequence[New] | None:
    """The rotation as one operator, before heads and length change places."""
    made, cos, sin = view.tensors[operator.outputs[0]], turn.cos, turn.sin
    is_frequencies = len(cos.shape) == 1
    angles = (cos.source,) if is_frequencies else (cos.source, sin.source)
    if len(made.shape) != 4 or cos.length_at != sin.length_at or cos.shape != sin.shape:
        return None
    if is_frequencies and cos != sin:
        return None
    attrs: dict[str, Attr] = {"interleaved": True} if interleaved else {}
    x = turn.x
    if view.tensors[x].dtype != made.dtype:
        return None
    if cos.length_at == 1:
        ready = New(kind="reshape", inputs=(x,), shape=made.shape, dtype=made.dtype)
        return [
            ready,
            New(kind="rope", inputs=(0, *angles), shape=made.shape, dtype=made.dtype, attrs=attrs),
        ]
    found = _exchanged(view, x)
    if found is None or view.shape(x) != made.shape:
        return None
    news, source = found
    shape = tuple(made.shape[at] for at in SWAPPED)
    return [
        *news,
        New(kind="rope", inputs=(source, *angles), shape=shape, dtype=made.dtype, attrs=attrs),
        New(kind="permute", inputs=(len(news),), shape=made.shape, dtype=made.dtype, attrs={"dims": SWAPPED}),
    ]


def _exchanged(view: View, name: str) -> tuple[list[New], str | int] | None:
    """The operator that transposes heads and length of a tensor, or of a tensor that it is a part of."""
    swapped = view.made(view.behind(name, "reshape"), "permute")
    if swapped is not None:
        is_swap = swapped.attrs.get("dims") == SWAPPED and view.shape(swapped.outputs[0]) == view.shape(name)
        return ([], swapped.inputs[0]) if is_swap else None
    cut = view.made(name, "narrow")
    found = _exchanged(view, cut.inputs[0]) if cut is not None and cut.attrs["dim"] == 3 else None
    if cut is None or found is None:
        return None
    news, source = found
    shape, dtype = tuple(view.shape(name)[at] for at in SWAPPED), view.tensors[name].dtype
    news.append(New(kind="narrow", inputs=(source,), shape=shape, dtype=dtype, attrs=cut.attrs))
    return news, len(news) - 1


def _narrow(view: View, operator: Operator) -> Sequence[New] | None:
    """cast(rope(cast(x))) back to the dtype of x: half precision is turned in single anyway."""
    rope = view.made(operator.inputs[0], "rope") if operator.kind == "cast" else None
    before = rope and view.made(view.behind(rope.inputs[0], "reshape"), "cast")
    if rope is None or before is None:
        return None
    made, x = view.tensors[operator.outputs[0]], view.tensors[before.inputs[0]]
    if x.dtype != made.dtype or view.tensors[rope.outputs[0]].dtype not in ("float32", made.dtype):
        return None
    ready = New(kind="reshape", inputs=(x.name,), shape=made.shape, dtype=made.dtype)
    inputs: tuple[str | int, ...] = (0, *rope.inputs[1:])
    return [ready, New(kind="rope", inputs=inputs, shape=made.shape, dtype=made.dtype, attrs=rope.attrs)]


def _first_part(view: View, operator: Operator) -> Sequence[New] | None:
    """The first elements of every head turned, and joined with the others as they were."""
    if operator.kind != "concat" or len(operator.inputs) != 2 or operator.attrs["dim"] != 3:
        return None
    made, names = view.tensors[operator.outputs[0]], operator.inputs
    swaps = [view.made(name, "permute") for name in names]
    is_swapped = all(swap is not None and swap.attrs["dims"] == SWAPPED for swap in swaps)
    turned, passed = (swap.inputs[0] for swap in swaps if swap) if is_swapped else names
    rope = view.made(turned, "rope")
    parts = [view.made(view.behind(name, "reshape"), "narrow") for name in (rope.inputs[0] if rope else "", passed)]
    sizes = view.shape(turned)[-1], view.shape(passed)[-1]
    x = _parts_of(view, parts, step=sizes[0], sizes=sizes)
    if rope is None or x is None or len(rope.inputs) < 2 or len(made.shape) != 4:
        return None
    news = [New(kind="rope", inputs=(x, *rope.inputs[1:]), shape=view.shape(x), dtype=made.dtype, attrs=rope.attrs)]
    if is_swapped:
        news.append(New(kind="permute", inputs=(0,), shape=made.shape, dtype=made.dtype, attrs={"dims": SWAPPED}))
    return news


ROTATION_RULES: tuple[Rule, ...] = (_neighbours, _halves, _turned_halves, _turned_neighbours, _narrow)
PART_RULES: tuple[Rule, ...] = (_first_part,)
"""Rules for heads of which only the first elements are rotated; applied after `CUT_RULES`."""
