"""The input of the lowering of a chunk: its plan, and the tensors that cross to and from other stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from plans.layout import Layout, TensorLayout
from plans.model.graph import Graph, Operator
from plans.plan import Stage, Strategy

__all__ = ["ChunkPlan", "StageBoundary", "fed_layout", "is_recomputed"]


class ChunkPlan(Protocol):
    """The parts of a plan that the lowering of a chunk needs; see `plans.plan.Plan`."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The chunks in pipeline order."""

    @property
    def recompute(self) -> tuple[str, ...]:
        """The operators that are recomputed in the backward."""

    @property
    def full_batch(self) -> bool:
        """Whether every rank is fed the full batch."""

    @property
    def interleave(self) -> int:
        """Slices of a micro-batch."""

    @property
    def num_slices(self) -> int:
        """Slices of a step."""

    def strategy(self, operator: Operator) -> Strategy:
        """The strategy of an operator."""

    def stage_of(self) -> Mapping[str, int]:
        """Operator name -> number of its stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBoundary:
    """A tensor that crosses from one stage to a later one.

    `source` is the (summed) layout on the making stage, `target` the layout in which the reading stage wants it;
    `trained` says whether a gradient comes back.
    """

    tensor: str
    from_stage: int
    to_stage: int
    source: TensorLayout
    target: TensorLayout
    trained: bool

    def crossing(self, gradient: bool = False) -> str:
        """The name of the transfer of the tensor, or of its gradient."""
        ends = (self.to_stage, self.from_stage) if gradient else (self.from_stage, self.to_stage)
        return f"{'d:' if gradient else ''}{self.tensor}:{ends[0]}>{ends[1]}"

    def channel(self, gradient: bool = False) -> str:
        """The channel of this transfer."""
        return f"{self.crossing(gradient)}:{'B' if gradient else 'F'}"


def is_recomputed(plan: ChunkPlan, graph: Graph, operator: str) -> bool:
    """Whether an operator's outputs are dropped and recomputed; what reads a constant that changes runs once."""
    return operator in plan.recompute and graph.updated.isdisjoint(graph.by_name[operator].inputs)


def fed_layout(mesh: Layout, shape: tuple[int, ...]) -> TensorLayout:
    """The layout of a batch whose parts are read by the ranks of a stage: dim 0 split over all axes."""
    layout = TensorLayout(mesh=mesh, dims=(mesh.alias_name, *(() for _ in shape[1:])))
    layout.check(shape, "an input that is fed in parts (full_batch=False)")
    return layout
