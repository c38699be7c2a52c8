"""The groups of ranks along each axis: sizes, strides, names, and the meshes of stages.

Ranks are numbered along the axes in an order, innermost first. Along an axis of size n and stride s, the group of rank
r is r, r + s, ..., r + (n - 1) s for the first rank r of the group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from plans.errors import TwofoldError
from plans.layout import DimAxes, Layout

__all__ = [
    "ORDER",
    "Axis",
    "MeshAxes",
    "Spread",
    "mesh_axes",
    "rank_groups",
    "stage_ranks",
    "stride_of",
    "strides",
    "tensor_axes",
]

ORDER = ("tp", "cp", "dp", "pp")
"""Axes from the innermost, unless something else is said: tp, which communicates most, among the nearest."""


class Axis(NamedTuple):
    """The number of ranks, and the distance from each to the next."""

    size: int
    stride: int


class Spread(Protocol):
    """The degrees on which groups depend."""

    @property
    def dp(self) -> int:
        """The data-parallel degree."""

    @property
    def cp(self) -> int:
        """The context-parallel degree."""

    @property
    def tp(self) -> int:
        """The tensor-parallel degree."""

    @property
    def pp(self) -> int:
        """The pipeline-parallel degree."""

    @property
    def ep(self) -> int:
        """The expert-parallel degree, a part of dp."""

    @property
    def order(self) -> tuple[str, ...]:
        """The order of the axes, innermost first."""


def strides(sizes: Mapping[str, int], order: Sequence[str] = ORDER) -> dict[str, int]:
    """Distance of neighbours along each axis.

    >>> strides({"dp": 2, "cp": 1, "tp": 4, "pp": 2}, ("tp", "cp", "pp", "dp"))
    {'tp': 1, 'cp': 4, 'pp': 4, 'dp': 8}
    """
    result, stride = {}, 1
    for axis in order:
        result[axis] = stride
        stride *= sizes[axis]
    return result


def stride_of(spread: Spread) -> dict[str, int]:
    """Distance of neighbours along each axis."""
    return strides({"dp": spread.dp, "cp": spread.cp, "tp": spread.tp, "pp": spread.pp}, spread.order)


def stage_ranks(spread: Spread, stage: int) -> list[int]:
    """The ranks of a pipeline rank: along dp, then cp, then tp, tp fastest.

    >>> from plans.degrees import Degrees
    >>> stage_ranks(Degrees(dp=2, tp=2, pp=2, global_batch=2, order=("tp", "cp", "pp", "dp")), 1)
    [2, 3, 6, 7]
    """
    stride = stride_of(spread)
    return [
        stage * stride["pp"] + copy * stride["dp"] + part * stride["cp"] + shard * stride["tp"]
        for copy in range(spread.dp) for part in range(spread.cp) for shard in range(spread.tp)
    ]  # fmt: skip


def tensor_axes(tp: int, num_kv_heads: int | None) -> tuple[tuple[str, int], ...]:
    """The mesh axes of tensor parallelism, the outermost first.

    With more ranks than heads of keys and values there are two: "tp_kv" splits these heads, "tp_q" the query heads that
    each of them serves; ranks along "tp_q" compute the same keys and values.

    >>> tensor_axes(4, 8), tensor_axes(8, 2)
    ((('tp', 4),), (('tp_kv', 2), ('tp_q', 4)))
    """
    if num_kv_heads is not None and 1 < num_kv_heads < tp and tp % num_kv_heads == 0:
        return ("tp_kv", num_kv_heads), ("tp_q", tp // num_kv_heads)
    return (("tp", tp),)


def rank_groups(spread: Spread, num_kv_heads: int) -> dict[str, tuple[Axis, ...]]:
    """The groups of ranks inside a stage, by name, each along one or several axes.

    "tp", "cp": along these axes. "dp": all ranks with the same weights, which are those of dp and cp; "replicas": along
    the mesh's axis dp alone. With experts that are shared out, "ep": the ranks that share them, neighbours along dp,
    "copies": the ranks with the same experts, and "dp+ep": both, along which positions that are learned are reduced.
    "tp_kv", "tp_q": see `tensor_axes`; "tp_kv+tp_q": both together.

    >>> from plans.degrees import Degrees
    >>> groups = rank_groups(Degrees(dp=4, ep=2, tp=8, global_batch=4), 2)
    >>> groups["dp"], groups["ep"], groups["copies"], groups["tp_kv"]
    ((Axis(size=4, stride=8), Axis(size=1, stride=8)), (Axis(size=2, stride=8),), (Axis(size=2, stride=16),), \
(Axis(size=2, stride=4),))
    """
    stride = stride_of(spread)
    tp, cp, dp = Axis(spread.tp, stride["tp"]), Axis(spread.cp, stride["cp"]), Axis(spread.dp, stride["dp"])
    groups: dict[str, tuple[Axis, ...]] = {"tp": (tp,), "cp": (cp,), "dp": (dp, cp), "tp_kv+tp_q": (tp,)}
    groups["replicas"] = (Axis(spread.dp // spread.ep, dp.stride * spread.ep),)
    if spread.ep > 1:
        groups["ep"] = (Axis(spread.ep, dp.stride),)
        groups["dp+ep"] = (dp,)
        groups["copies"] = groups["replicas"]
    inner = tp.stride
    for name, size in reversed(tensor_axes(spread.tp, num_kv_heads)):
        groups[name] = (Axis(size, inner),)
        inner *= size
    return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxes:
    """The role of each mesh axis of a stage; axes of size 1 are left out, so that they split nothing.

    Args:
        names: names of all axes, the outermost first.
        sizes: of them.
        dp, cp, tp: data, context and tensor parallel.
        kv: those of tp that split the heads of keys and values.
        ep: those of dp that split the experts.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    dp: DimAxes = ()
    cp: DimAxes = ()
    tp: DimAxes = ()
    kv: DimAxes = ()
    ep: DimAxes = ()

    def mesh(self, ranks: Sequence[int] | None = None) -> Layout:
        """The mesh of a stage on `ranks` (0, 1, 2, ... by default): dp outermost, tp innermost."""
        return Layout(self.sizes, self.names, ranks)


def mesh_axes(*, dp: int = 1, cp: int = 1, tp: int = 1, num_kv_heads: int | None = None, ep: int = 1) -> MeshAxes:
    """The axes for these degrees, dp outermost, then ep (a part of dp), cp, and tp.

    Raises:
        TwofoldError: an ep that does not divide dp.

    >>> axes = mesh_axes(dp=2, tp=4, num_kv_heads=2)
    >>> axes.names, axes.sizes, axes.tp, axes.kv
    (('dp', 'tp_kv', 'tp_q'), (2, 2, 2), ('tp_kv', 'tp_q'), ('tp_kv',))
    """
    if ep < 1 or dp % ep:
        raise TwofoldError(f"dp {dp} does not divide into groups of ep {ep}: {dp} % {ep} != 0")
    axes = [("dp", dp)] if ep == 1 else [("dp", dp // ep), ("ep", ep)]
    samples: DimAxes = tuple(name for name, size in axes if size > 1)
    if cp > 1:
        axes.append(("cp", cp))
    split = tensor_axes(tp, num_kv_heads)
    axes += split
    tensor: DimAxes = tuple(name for name, _ in split) if tp > 1 else ()
    kv = ("tp_kv",) if len(split) > 1 else () if num_kv_heads == 1 else tensor
    return MeshAxes(
        names=tuple(name for name, _ in axes), sizes=tuple(size for _, size in axes),
        dp=samples, cp=("cp",) if cp > 1 else (), tp=tensor, kv=kv, ep=("ep",) if ep > 1 else (),
    )  # fmt: skip
