"""One step of a redistribution: a collective, a local slice or a point-to-point transfer.

A step describes the change of the layout; which bytes move follows from `before`, `after` and the global shape
(`traffic`, `pieces`). The same record is priced by the cost models, simulated and executed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from plans.errors import TwofoldError
from plans.layout import TensorLayout

__all__ = ["Step", "StepKind"]


class StepKind(StrEnum):
    """The kind of a step; prints as its text."""

    SLICE = "slice"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    TRANSFER = "transfer"


_WITH_DIM = frozenset({StepKind.SLICE, StepKind.ALL_GATHER, StepKind.REDUCE_SCATTER, StepKind.ALL_TO_ALL})


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step from the layout `before` to the layout `after`.

    The groups of a collective are `before.mesh.groups(axes)`: ranks in index order, the first axis is major, and chunk
    i of a group belongs to its member i.

    * slice: every rank keeps its chunk of `dim`; `axes` become the last (minor) axes of that dim. Nothing is sent.
    * all_gather: `axes`, the last ones of `dim`, are gathered; chunks are joined in group order along `dim`.
    * reduce_scatter: partial `axes` are summed and become the last axes of `dim`.
    * all_reduce: partial `axes` are summed; every member holds the sum.
    * all_to_all: `axes`, the last ones of `dim`, become the last axes of `to_dim`: the local part is cut along
      `to_dim`, chunk i goes to member i, received chunks are joined in group order along `dim`.
    * transfer: every rank of `after.mesh` fetches what it lacks from ranks of `before.mesh`, as `pieces(before, after,
      shape)` says. The meshes may differ in ranks, width and axes; `axes` is empty. Partial terms are moved as terms.

    Args:
        kind: what is done.
        axes: the communicating axes of `before.mesh`, the first is major.
        dim: the dim that is sliced, gathered or scattered; for all_to_all the dim the axes are taken from.
        to_dim: for all_to_all the dim the axes go to.
        before: the layout the step starts from.
        after: the layout it leaves.
    """

    kind: StepKind
    axes: tuple[str, ...] = ()
    dim: int | None = None
    to_dim: int | None = None
    before: TensorLayout
    after: TensorLayout

    def __post_init__(self) -> None:
        if (self.dim is not None) != (self.kind in _WITH_DIM):
            raise TwofoldError(
                f"a step of kind {self.kind} {'needs' if self.kind in _WITH_DIM else 'takes no'} dim, got {self.dim}"
            )
        if (self.to_dim is not None) != (self.kind is StepKind.ALL_TO_ALL):
            raise TwofoldError(f"only all_to_all takes to_dim, and needs it; {self.kind} got {self.to_dim}")
        if bool(self.axes) == (self.kind is StepKind.TRANSFER):
            raise TwofoldError(f"a step of kind {self.kind} cannot have the axes {self.axes}")

    def leading(self, before: Sequence[int], after: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Per dim that a collective joins parts or cuts them along, the local sizes of the dims before it.

        Where these are not all 1, the parts are not contiguous, and running the step may copy them
        (`plans.redistribution.rows`).

        Args:
            before, after: local shapes.
        """
        gathered = (tuple(after[: self.dim]),) if self.kind in (StepKind.ALL_GATHER, StepKind.ALL_TO_ALL) else ()
        cut = self.to_dim if self.kind is StepKind.ALL_TO_ALL else self.dim
        scattered = self.kind in (StepKind.REDUCE_SCATTER, StepKind.ALL_TO_ALL)
        return ((tuple(before[:cut]),) if scattered else ()) + gathered

    def __str__(self) -> str:
        where = (
            ""
            if self.dim is None
            else f" dim {self.dim}"
            if self.to_dim is None
            else f" dim {self.dim} to {self.to_dim}"
        )
        over = f" over {','.join(self.axes)}" if self.axes else ""
        return f"{self.kind}{over}{where}: {self.before} -> {self.after}"

    def is_consistent(self) -> bool:
        """Whether the step turns `before` into `after`; axes of size 1 may be written or not."""
        if self.kind is StepKind.TRANSFER:
            kept = self.before.mesh.size(self.before.partial) == self.after.mesh.size(self.after.partial)
            return kept and len(self.before.dims) == len(self.after.dims)
        if self.before.mesh != self.after.mesh or not set(self.axes) <= set(self.before.mesh.alias_name):
            return False
        dims, partial = (
            [list(self._counted(axes)) for axes in self.before.dims],
            set(self._counted(self.before.partial)),
        )
        moved = list(self._counted(self.axes))
        places = [dim for dim in (self.dim, self.to_dim) if dim is not None]
        if len(set(self.axes)) != len(self.axes) or not all(0 <= dim < len(dims) for dim in places):
            return False
        if self.kind in (StepKind.ALL_REDUCE, StepKind.REDUCE_SCATTER):
            if not set(moved) <= partial:
                return False
            partial -= set(moved)
        if self.kind in (StepKind.ALL_GATHER, StepKind.ALL_TO_ALL):
            assert self.dim is not None
            kept_axes = dims[self.dim][: len(dims[self.dim]) - len(moved)]
            if kept_axes + moved != dims[self.dim]:
                return False
            dims[self.dim] = kept_axes
        gaining = {StepKind.SLICE: self.dim, StepKind.REDUCE_SCATTER: self.dim, StepKind.ALL_TO_ALL: self.to_dim}
        if (dim := gaining.get(self.kind)) is not None:
            dims[dim] = dims[dim] + moved
        made = [list(self._counted(axes)) for axes in self.after.dims]
        return made == dims and set(self._counted(self.after.partial)) == partial

    def _counted(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if self.before.mesh.size((axis,)) > 1)

    @property
    def communicates(self) -> bool:
        """Whether the step sends data between ranks."""
        return self.kind is not StepKind.SLICE
