"""Lowers one stage by itself: its bodies without a schedule, without the start and end of a step or other stages'
ranks.

Templates of large models are made from these bodies, each lowered once for all equal stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plans.lower.backward import lower_backward
from plans.lower.boundaries import find_boundaries, parameter_layouts
from plans.lower.chunk import ChunkLowering
from plans.lower.chunk_plan import StageBoundary
from plans.lower.emit import Emitter, ValueTable, Ways
from plans.lower.fuse import block_names, fuse_runs
from plans.lower.in_place import sum_in_place
from plans.lower.liveness import with_frees
from plans.lower.loss import accumulate_loss, loss_operator
from plans.lower.optimizer import OptimizerLowering
from plans.plan import Plan
from plans.program import Instruction, Kind, ParameterPlacement, Value

__all__ = ["StageBodies", "lower_stage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBodies:
    """The bodies of a stage for a micro-batch that is neither the first nor the last.

    Args:
        bodies: the forward "F", the backward "B", and the same in two parts, "I" and "W". A border is crossed by a SEND
            or a WAIT without its other end, which only names the value.
        values: every value by name.
        parameters: where the trained tensors live.
        leaving: the value that the forward sends to the next stage, or None.
        constants: the values that no instruction makes.
    """

    bodies: Mapping[str, tuple[Instruction, ...]]
    values: Mapping[str, Value]
    parameters: tuple[ParameterPlacement, ...]
    leaving: str | None
    constants: tuple[str, ...] = ()


def lower_stage(plan: Plan, number: int, ways: Ways, borders: Sequence[StageBoundary] | None = None) -> StageBodies:
    """The bodies of stage `number`, with no other stage on its ranks and micro-batches in one piece.

    Gradients are accumulated by separate instructions, also where a product can do it: the reader of the bodies knows
        how the optimizer keeps gradients (`plans.lower.symbolic.template.Cell.joined`).

    Args:
        plan: with the stage.
        number: number of the stage.
        ways: by which steps tensors are redistributed.
        borders: of the plan, where they are known.

    Raises:
        TwofoldError: a layout that does not divide a shape.
    """
    micro, mesh, table = plan.slice_graph, plan.stages[number].mesh, ValueTable(ways=ways)
    borders = find_boundaries(plan, micro) if borders is None else borders
    homes, reduced = parameter_layouts(plan, micro, [number])
    tensors = {tensor.name: tensor for tensor in micro.parameters if tensor.name in homes}
    optimizer = OptimizerLowering(
        optimizer=plan.optimizer, mesh=mesh, table=table, parameters=tensors, homes=homes, reduced=reduced,
        num_ranks=plan.num_ranks,
    )  # fmt: skip
    places = optimizer.allocate_parameters()
    chunk = ChunkLowering(
        plan=plan, micro=micro, number=number, table=table, homes=homes, reduced=reduced,
        arriving=tuple(border for border in borders if border.to_stage == number),
        leaving=tuple(border for border in borders if border.from_stage == number),
        accumulators=optimizer.accumulators(), joins=False,
    )  # fmt: skip
    optimizer.arrange(number, chunk.operators(), chunk.completed(), ())
    left: list[str] = []

    def crossing(border: StageBoundary, value: str, gradient: bool) -> Instruction:
        name = border.crossing(gradient)
        return Instruction(
            name=name, kind=Kind.SEND, call="transfer", part="C", inputs=(value,), channel=name,
            dtype=micro.tensors[border.tensor].dtype,
        )  # fmt: skip

    def send(emitter: Emitter, border: StageBoundary, value: str) -> None:
        left.append(value)
        emitter.add(crossing(border, value, False))

    def back(emitter: Emitter, border: StageBoundary, value: str) -> None:
        emitter.add(crossing(border, value, True))

    arriving = [_arrival(chunk, border, False) for border in chunk.arriving]
    forward = chunk.forward(send)
    if loss_operator(micro).name in plan.stages[number].operators:
        forward += accumulate_loss(plan, micro, table, number)
    returning = [_arrival(chunk, border, True) for border in chunk.leaving if border.trained]
    whole, _ = lower_backward(chunk, back, optimizer.reduction(number, is_last=False))
    inputs, weights = lower_backward(chunk, back, optimizer.reduction(number, is_last=False), split=True)
    variants = [[arriving, forward, returning, *each] for each in ([whole], [inputs, weights])]
    if plan.fused:
        variants = fuse_runs(variants, table, block_names(chunk.operators()), 3)
    sum_in_place(variants, table)

    def freed(variant: list[list[Instruction]]) -> list[tuple[Instruction, ...]]:
        bodies = [optimizer.with_gathers(number, body) for body in variant]
        _, own, _, *others = with_frees(bodies, table.values)
        return [tuple(body) for body in (own, *others)]

    (forward_, whole_), (_, inputs_, weights_) = map(freed, variants)
    return StageBodies(
        bodies={"F": forward_, "B": whole_, "I": inputs_, "W": weights_},
        values=table.values, parameters=places, leaving=left[-1] if left else None, constants=tuple(table.constants),
    )  # fmt: skip


def _arrival(chunk: ChunkLowering, border: StageBoundary, gradient: bool) -> Instruction:
    """The instruction that receives a tensor, or its gradient, from another stage."""
    tensor, layout = chunk.micro.tensors[border.tensor], border.source if gradient else border.target
    crossing = border.crossing(gradient)
    name = f"{crossing}@{layout}" if gradient else chunk.name_of(border.tensor, layout)
    chunk.table.add(Value(name=name, shape=layout.local_shape(tensor.shape), dtype=tensor.dtype))
    return Instruction(
        name=crossing, kind=Kind.RECV, call="transfer", part="C", outputs=(name,), channel=crossing,
        token=f"token:{crossing}.recv", dtype=tensor.dtype,
    )  # fmt: skip
