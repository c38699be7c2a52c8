"""The cost of one operator: the instructions that lowering writes for it, priced one by one.

Forward and gradients run once per micro-batch. Weights are gathered, gradients reduced and weights updated as often as
the optimizer's level requires (`plans.lower.operator_bodies`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from plans.layout import Layout, TensorLayout
from plans.lower.emit import Emitter, ValueTable, Ways, least_bytes
from plans.lower.operator_bodies import OperatorBodies, lower_operator
from plans.model.graph import Graph, Operator
from plans.optimizer import Optimizer
from plans.plan import Strategy
from plans.program import Instruction, Kind, Value
from search.operators.moves import MoveSeconds

__all__ = ["InstructionCost", "OperatorCosts", "OperatorSeconds", "seconds_of_least_bytes"]


class InstructionCost(Protocol):
    """Seconds of one instruction on a machine."""

    def __call__(self, instruction: Instruction, values: Mapping[str, Value] | None = None) -> float:
        """Seconds of an instruction in the search. `values`: bytes that the instruction reads and writes, if known."""

    def parts(self, instruction: Instruction, values: Mapping[str, Value] | None = None) -> tuple[float, float]:
        """Seconds on the host and on the device."""

    def group_key(self, mesh: Layout, axes: tuple[str, ...]) -> object:
        """Collectives over sets of axes with equal keys cost the same."""


class OperatorSeconds(NamedTuple):
    """The time of an operator alone in a step: kernels, everything else, and kernels on host and device."""

    compute_s: float
    others_s: float
    host_s: float
    device_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCosts:
    """Seconds of single operators on a mesh.

    Args:
        micro: the graph of one micro-batch.
        mesh: the stage's mesh; a strategy may have its own.
        num_micro_batches: how often forward and backward run in a step.
        optimizer: what happens to the parameters.
        cost: seconds of an instruction.
        ways: by which steps tensors are redistributed.
    """

    micro: Graph
    mesh: Layout
    num_micro_batches: int
    optimizer: Optimizer
    cost: InstructionCost
    ways: Ways = least_bytes

    def seconds(self, operator: Operator, strategy: Strategy) -> OperatorSeconds:
        """The total time of the operator alone in a step."""
        bodies = self._bodies(operator, strategy, self.num_micro_batches)
        compute_s = others_s = host_s = device_s = 0.0
        for times, instruction in bodies.counted(self.num_micro_batches):
            seconds = times * self.cost(instruction, bodies.values)
            if _is_kernel(instruction, operator):
                compute_s += seconds
                host, device = self.cost.parts(instruction, bodies.values)
                host_s, device_s = host_s + times * host, device_s + times * device
            else:
                others_s += seconds
        return OperatorSeconds(compute_s, others_s, host_s, device_s)

    def compute_s(self, operator: Operator, strategy: Strategy) -> float:
        """Seconds of the operator's forward and gradients for one micro-batch."""
        bodies = self._bodies(operator, strategy, 1)
        return sum(
            self.cost(instruction, bodies.values)
            for instruction in (*bodies.forward, *bodies.last_backward)
            if _is_kernel(instruction, operator)
        )

    def _bodies(self, operator: Operator, strategy: Strategy, num_micro_batches: int) -> OperatorBodies:
        return lower_operator(
            self.micro, operator, strategy, self.mesh, optimizer=self.optimizer, num_micro_batches=num_micro_batches,
            ways=self.ways,
        )  # fmt: skip


def _is_kernel(instruction: Instruction, operator: Operator) -> bool:
    """Whether it is the operator's forward, statistic or gradient rather than something around it."""
    return instruction.kind is Kind.COMPUTE and instruction.operator == operator.name and instruction.part != "C"


def seconds_of_least_bytes(cost: InstructionCost) -> MoveSeconds:
    """The time of redistributions with the fewest bytes."""

    def seconds(source: TensorLayout, target: TensorLayout, shape: tuple[int, ...], dtype: str) -> float:
        table = ValueTable()
        emitter = Emitter(mesh=source.mesh, table=table)
        value = table.add(Value(name="before", shape=source.local_shape(shape), dtype=dtype))
        emitter.move(value, "moved", source, target, shape)
        emitter.flush()
        return sum(cost(instruction, table.values) for instruction in emitter.instructions)

    return seconds
