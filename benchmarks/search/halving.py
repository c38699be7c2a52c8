"""Greedy halving by element counts: a reimplementation of MindSpore's recursive search, as a baseline.

The devices are halved level by level. On every level each matrix product, in the order of the graph, takes the cut
that moves the fewest elements, given the cuts of its producers on this level; everything else follows its producers.
Formulas, constants and order were read in MindSpore's source; tests/search/devices/test_weaknesses.py repeats runs that
were observed. The rule does not model seconds, links, dtypes, memory, stages, bubbles or overlap, and never revises a
choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from plans.errors import TwofoldError
from plans.layout import Layout
from plans.model.graph import Graph, Operator
from plans.operators import factors
from plans.plan import Strategy

__all__ = ["MAX_DEVICES", "Cuts", "halving", "strategies_of"]

MAX_DEVICES = 1024
"""More are refused, as is any number that is not a power of two."""

_WEIGHT_GRADIENT = 0.1
_REDISTRIBUTION = 16.0
_REPLICATE = 25.0
_MOST_DIMS = 4

_PRODUCTS = ("linear", "matmul")


@dataclass(slots=True)
class Cuts:
    """How a product is cut: dim -> cuts, and the dim of every level ("" where it is not cut)."""

    sizes: dict[str, int]
    levels: list[str] = field(default_factory=list)

    def number(self, dim: str) -> int:
        """Number of parts that a dim is cut into."""
        return 2 ** self.levels.count(dim)

    def left(self, dim: str) -> int:
        """Its size on a device."""
        return self.sizes[dim] // self.number(dim)


def halving(graph: Graph, num_devices: int, *, backwards: bool = False) -> dict[str, Cuts]:
    """The choices of the rule for the matrix products of `graph`.

    Args:
        graph: graph of the full batch.
        num_devices: a power of two, at most 1024.
        backwards: products in reverse order: what the answer should not hang on, and does.

    Returns:
        product -> its cuts, in the words i (rows), k (contracted), j (columns).

    Raises:
        TwofoldError: a number of devices that the rule does not take.
    """
    if num_devices < 1 or num_devices & (num_devices - 1):
        raise TwofoldError(f"greedy halving takes a power of two of devices, not {num_devices}")
    if num_devices > MAX_DEVICES:
        raise TwofoldError(f"greedy halving takes at most {MAX_DEVICES} devices, not {num_devices}")
    products = [operator for operator in graph.operators if operator.kind in _PRODUCTS]
    found = {operator.name: Cuts(_edges(graph, operator)) for operator in products}
    batch, sources = Cuts({"i": _rows(graph)}), _sources(graph)
    for _ in range(num_devices.bit_length() - 1):
        chosen: dict[str, str] = {"": "i" if batch.left("i") % 2 == 0 else ""}
        for operator in products[::-1] if backwards else products:
            chosen[operator.name] = _cheapest(found, operator.name, sources, chosen)
        batch.levels.append(chosen[""])
        for operator in products:
            found[operator.name].levels.append(chosen[operator.name])
    return found


def _rows(graph: Graph) -> int:
    """Of the batch that is read in: samples, and tokens where those are numbers of words."""
    first = next(tensor for tensor in graph.tensors.values() if tensor.kind == "input")
    return math.prod(first.shape[:-1] if first.differentiable else first.shape)


def _edges(graph: Graph, operator: Operator) -> dict[str, int]:
    """Rows, contracted and columns; tensors of more than four dims are taken for scalars."""
    first, second = (graph.tensors[name].shape for name in operator.inputs[:2])
    if max(len(first), len(second), len(graph.tensors[operator.outputs[0]].shape)) > _MOST_DIMS:
        return {"i": 1, "k": 1, "j": 1}
    return {
        "i": math.prod(first[:-1]), "k": first[-1],
        "j": second[0] if operator.kind == "linear" else second[-1],
    }  # fmt: skip


def _sources(graph: Graph) -> dict[str, list[str | None]]:
    """Product -> for its two operands the product that makes each, through what is between.

    "" stands for the batch that is read in, None for a parameter.
    """
    made: dict[str, str | None] = {
        name: "" if tensor.kind == "input" else None
        for name, tensor in graph.tensors.items()
        if tensor.kind != "activation"
    }
    found: dict[str, list[str | None]] = {}
    for operator in graph.operators:
        before = [made[name] for name in operator.inputs]
        if operator.kind in _PRODUCTS:
            found[operator.name] = before[:2]
        through = operator.name if operator.kind in _PRODUCTS else next((each for each in before if each), None)
        if operator.kind == "narrow" and operator.attrs.get("start"):
            through = None  # a second output is not modelled
        elif through is None and "" in before:
            through = ""
        made |= dict.fromkeys(operator.outputs, through)
    return found


def _cheapest(
    found: Mapping[str, Cuts], name: str, sources: Mapping[str, Sequence[str | None]], chosen: Mapping[str, str]
) -> str:
    """The cut of one product on one level; the first of equals."""
    cuts = found[name]
    i, k, j = (cuts.left(dim) for dim in "ikj")
    own = {"i": _WEIGHT_GRADIENT * j * k / 2, "j": i * k / 2, "k": i * j / 2}
    offered = {"": min(own.values()) ** 2 / _REPLICATE}
    for dim, cost in own.items():
        after = {"j": "k", "k": "j"}.get(dim)
        if cuts.left(dim) % 2 == 0 and after not in cuts.levels:
            offered[dim] = cost
    # how the operands and the output are split by each cut: rows, columns or neither
    reads = ({"i": "rows", "k": "columns"}, {"k": "rows", "j": "columns"})
    makes = {"i": "rows", "j": "columns"}
    size = i * k  # of the first operand, whichever has to move
    for dim in offered:
        for operand, source in enumerate(sources[name]):
            if source is None or source not in chosen:
                continue
            arrives = makes.get(chosen[source], "")
            if arrives != reads[operand].get(dim, ""):
                offered[dim] += _REDISTRIBUTION * size
        for reader, before in sources.items():
            for operand, source in enumerate(before):
                if source == name and reader in chosen and makes.get(dim, "") != reads[operand].get(chosen[reader], ""):
                    offered[dim] += _REDISTRIBUTION * size
    order = ("i", "j", "k", "")
    return min((dim for dim in order if dim in offered), key=lambda dim: offered[dim])


# ------------------------------------------------------------------- as a plan


def strategies_of(graph: Graph, cuts: Mapping[str, Cuts], num_devices: int) -> dict[str, Strategy]:
    """The rule's cuts as strategies of every operator; what is not a product follows what it reads.

    A product's devices stand row by row in the order rows, contracted, columns, then those that do the same, as in the
    reference; the rows' cuts go to the first dim that can take them.
    """
    found: dict[str, Strategy] = {}
    parts: dict[str, tuple[Layout, tuple[tuple[str, ...], ...]]] = {}
    for operator in graph.operators:
        spec = graph.spec(operator)
        if operator.name in cuts:
            mesh, dims = _product(cuts[operator.name], spec.sizes, num_devices)
            strategy = Strategy(dims=dims, mesh=mesh)
        else:
            strategy = _following(graph, operator, parts, num_devices)
        found[operator.name] = strategy
        mesh = strategy.mesh or Layout((num_devices,), ("same",))
        for index, name in enumerate(operator.outputs):
            layout = strategy.output_layout(spec, index, mesh).without_partial()
            parts[name] = (mesh, layout.dims)
    return found


def _product(cuts: Cuts, sizes: Mapping[str, int], num_devices: int) -> tuple[Layout, dict[str, tuple[str, ...]]]:
    rows = [dim for dim in sizes if dim not in ("k", "n", "j")]
    given: dict[str, int] = {}
    left = cuts.number("i")
    for dim in rows:
        given[dim] = math.gcd(left, sizes[dim])
        left //= given[dim]
    if left > 1:
        raise TwofoldError(f"{cuts.number('i')} cuts of the rows do not divide {[sizes[dim] for dim in rows]}")
    given |= {"k": cuts.number("k"), "n": cuts.number("j")}
    used = {dim: number for dim, number in given.items() if number > 1}
    same = num_devices // math.prod(used.values())
    names = [f"{dim}_" for dim in used] + (["same"] if same > 1 or not used else [])
    mesh = Layout((*used.values(), *([same] if same > 1 or not used else [])), names)
    return mesh, {dim: (f"{dim}_",) for dim in used}


def _following(
    graph: Graph, operator: Operator, parts: Mapping[str, tuple[Layout, tuple[tuple[str, ...], ...]]], num_devices: int
) -> Strategy:
    """Split as the first operand that is split at all, as far as the operator allows it."""
    spec = graph.spec(operator)
    for index, name in enumerate(operator.inputs):
        if name not in parts:
            continue
        mesh, layout = parts[name]
        dims: dict[str, tuple[str, ...]] = {}
        for dim, axes in zip(spec.inputs[index], layout, strict=True):
            own = factors(dim)[0]
            if axes and spec.fits(mesh, {**dims, own: axes}):
                dims[own] = axes
        if dims:
            return Strategy(dims=dims, mesh=mesh)
    # nothing to follow: the batch that is read in, as far as it can be halved
    cuts = Cuts({"i": graph.batch_size})
    while 2 ** len(cuts.levels) < num_devices and cuts.left("i") % 2 == 0:
        cuts.levels.append("i")
    number = cuts.number("i")
    first = next((factors(dims[0])[0] for dims in spec.inputs if dims and dims[0]), None)
    same = num_devices // number
    mesh = Layout((number, same), ("batch", "same")) if same > 1 else Layout((number,), ("batch",))
    if first is not None and number > 1 and spec.fits(mesh, {first: ("batch",)}):
        return Strategy(dims={first: ("batch",)}, mesh=mesh)
    return Strategy()
