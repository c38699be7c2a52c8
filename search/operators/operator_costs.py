"""The cost of one operator: the instructions that lowering writes for it, priced one by one.

Forward and gradients run once per micro-batch. Weights are gathered, gradients reduced and weights updated as often as
the optimizer's level requires (`plans.lower.operator_bodies`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from plans.layout import Layout, TensorLayout
from plans.lower.emit import Emitter, ValueTable, Ways, least_bytes
from plans.lower.fuse import FUSIBLE, fuse_runs
from plans.lower.operator_bodies import OperatorBodies, lower_operator
from plans.model.graph import Graph, Operator
from plans.optimizer import Optimizer
from plans.plan import Strategy
from plans.program import Instruction, Kind, Value
from search.operators.moves import MoveSeconds
from search.operators.runs import AtBorders, border_values, possible_runs

__all__ = ["InstructionCost", "OperatorCosts", "OperatorSeconds", "seconds_of_least_bytes"]


class InstructionCost(Protocol):
    """Seconds of one instruction on a machine."""

    def __call__(self, instruction: Instruction, values: Mapping[str, Value] | None = None) -> float:
        """Seconds of an instruction in the search. `values`: bytes that the instruction reads and writes, if known."""

    @property
    def fused(self) -> bool:
        """Whether lowering fuses runs of memory-bound instructions (`plans.lower.fuse`)."""

    def parts(self, instruction: Instruction, values: Mapping[str, Value] | None = None) -> tuple[float, float]:
        """Seconds on the host and on the device."""

    def run_s(self, calls: tuple[str, ...], dtype: str, touched_bytes: int) -> float:
        """Seconds on the device of a run of fused instructions."""

    def least_s_per_byte(self, runs: Sequence[tuple[str, ...]], dtype: str) -> float:
        """The least time by which some bytes more lengthen any of some runs, per byte."""

    def group_key(self, mesh: Layout, axes: tuple[str, ...]) -> object:
        """Collectives over sets of axes with equal keys cost the same."""


class OperatorSeconds(NamedTuple):
    """The time of an operator alone in a step: kernels, everything else; and lower bounds on the time of its kernels on
    host and device, whatever they are fused with.
    """

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
        places: operator -> its place between kernels and runs of fused instructions.
        in_order: whether a rank has one compute stream, which waits where a kernel reads what a collective makes.
    """

    micro: Graph
    mesh: Layout
    num_micro_batches: int
    optimizer: Optimizer
    cost: InstructionCost
    ways: Ways = least_bytes
    places: Mapping[str, AtBorders] = field(default_factory=dict)
    in_order: bool = False
    _num_readers: Mapping[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        read = (name for operator in self.micro.operators for name in set(operator.inputs))
        object.__setattr__(self, "_num_readers", Counter(read))

    def seconds(self, operator: Operator, strategy: Strategy) -> OperatorSeconds:
        """The total time of the operator alone in a step."""
        bodies = self._bodies(operator, strategy, self.num_micro_batches)
        compute_s = others_s = 0.0
        kernels: list[tuple[float, tuple[float, float]]] = []
        for times, instruction in bodies.counted(self.num_micro_batches):
            seconds = times * self.cost(instruction, bodies.values)
            if _is_kernel(instruction, operator):
                compute_s += seconds
                if not (self.cost.fused and instruction.call in FUSIBLE):
                    kernels.append((times, self.cost.parts(instruction, bodies.values)))
            else:
                others_s += seconds
                if share := self._share_at_any_level(instruction):
                    kernels.append((times * share, self.cost.parts(instruction, bodies.values)))
        place = self.places.get(operator.name, AtBorders(alone=(False, False)))
        parts = []
        if self.cost.fused:
            parts += self._fused_parts(bodies, f"{operator.kind}.forward", place.alone)
            parts += [(0.0, self._joined_s(bodies, operator, place, way)) for way in range(2) if not place.alone[way]]
        if self.in_order and place.alone[0]:
            parts += [self.cost.parts(line, bodies.values) for line in _between_kernels(bodies.forward, operator)]
        kernels += [(self.num_micro_batches, each) for each in parts]
        host_s, device_s = (sum(times * each[at] for times, each in kernels) for at in range(2))
        return OperatorSeconds(compute_s, others_s, host_s, device_s)

    def _fused_parts(self, bodies: OperatorBodies, call: str, alone: tuple[bool, bool]) -> list[tuple[float, float]]:
        """The least seconds on host and device of memory-bound instructions that nothing joins: of one micro-batch.

        A schedule may split the backward between them, so they may be fused or not. `call` makes the output.
        """
        plain = [bodies.forward, bodies.last_backward]
        if not any(line.call in FUSIBLE for body in plain for line in body):
            return []
        read = {name for body in plain for line in body for name in line.inputs}
        made = {line.outputs[0] for line in bodies.forward if line.call == call}
        table = ValueTable(
            values={
                name: value if name in read and name not in made else replace(value, role="gradient")  # others read it
                for name, value in bodies.values.items()
            }
        )
        ((*fused,),) = fuse_runs([plain], table, {}, 1)
        found = []
        for is_alone, *forms in zip(alone, plain, fused, strict=True):
            if is_alone:
                parts = [
                    [self.cost.parts(line, table.values if body is forms[1] else bodies.values)
                     for line in body if line.call in FUSIBLE or line.call == "fused"]
                    for body in forms
                ]  # fmt: skip
                sums = [[sum(each[at] for each in form) for at in range(2)] for form in parts]
                found.append((min(each[0] for each in sums), min(each[1] for each in sums)))
        return found

    def _joined_s(self, bodies: OperatorBodies, operator: Operator, place: AtBorders, way: int) -> float:
        """The least seconds of the runs that an operator's memory-bound instructions join, for this operator: of the
        forward (0) or backward (1) of one micro-batch.
        """
        lines = [
            line for line in (bodies.forward, bodies.last_backward)[way]
            if line.call in FUSIBLE and line.operator == operator.name
        ]  # fmt: skip
        moved = [self._bytes(bodies, border_values(place, operator, [line], forward=way == 0)) for line in lines]
        alone = [self.cost.parts(line, bodies.values)[1] for line in lines]
        total = self._bytes(bodies, border_values(place, operator, lines, forward=way == 0))
        if not total:
            return 0.0
        calls, dtype = possible_runs(self.micro), lines[0].dtype
        rates = [seconds / size for seconds, size in zip(alone, moved, strict=True) if size]
        byte_s = min(self.cost.least_s_per_byte(calls, dtype), *rates)
        least_s = total * byte_s
        sums = [at for at, line in enumerate(lines) if way == 1 and line.call in place.apart]
        if sums:
            size = self._bytes(bodies, border_values(place, operator, [lines[at] for at in sums], forward=False))
            kernels = [self.cost.run_s((*some, *place.apart), dtype, size) for some in calls]
            kernels += [alone[at] for at in sums if len(sums) == 1]  # two of them share a tensor: they are fused
            least_s = max(least_s, min(kernels) + (total - size) * byte_s)
        return least_s

    @staticmethod
    def _bytes(bodies: OperatorBodies, names: Iterable[str]) -> int:
        return sum(bodies.values[name].span_bytes for name in names)

    def compute_s(self, operator: Operator, strategy: Strategy) -> float:
        """Seconds of the operator's forward and gradients for one micro-batch."""
        bodies = self._bodies(operator, strategy, 1)
        return sum(
            self.cost(instruction, bodies.values)
            for instruction in (*bodies.forward, *bodies.last_backward)
            if _is_kernel(instruction, operator)
        )

    def _share_at_any_level(self, instruction: Instruction) -> float:
        """The share of a parameter's update, or of adding to its gradient, that every optimizer-parallel level leaves.

        Levels shard large parameters and add up several gradients at once; AdamW updates several parameters at once. A
        parameter that several operators read is updated once, so each of them has a part of its share.
        """
        own_update = f"{self.optimizer.kind}.update" if self.optimizer.kind != "adamw" else ""
        if instruction.call not in (own_update, "accumulate") or not instruction.outputs:
            return 0.0
        tensor = self.micro.tensors.get(instruction.outputs[0].removeprefix("g:"))
        if tensor is None or tensor.kind != "parameter":
            return 0.0
        each = 1.0 / self._num_readers[tensor.name]
        if tensor.size_bytes < self.optimizer.threshold_bytes:
            return each
        return each / self.mesh.num_ranks if instruction.call == own_update else 0.0

    def _bodies(self, operator: Operator, strategy: Strategy, num_micro_batches: int) -> OperatorBodies:
        return lower_operator(
            self.micro, operator, strategy, self.mesh, optimizer=self.optimizer, num_micro_batches=num_micro_batches,
            ways=self.ways,
        )  # fmt: skip


def _between_kernels(body: Sequence[Instruction], operator: Operator) -> list[Instruction]:
    """The communication of what one kernel of the operator makes and a later one reads, on all ranks alike: the gather
    of a statistic. A SEND is under way with its RECV.
    """
    kernels = [at for at, line in enumerate(body) if _is_kernel(line, operator)]
    inside = body[kernels[0] : kernels[-1]] if kernels else ()
    return [line for line in inside if line.kind in (Kind.COLLECTIVE, Kind.RECV)]


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
