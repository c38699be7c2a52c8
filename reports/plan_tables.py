"""The plan as tables: strategy and communication per operator, placement per parameter."""

from __future__ import annotations

from collections.abc import Mapping

from plans.layout import Layout
from plans.lower import lower
from plans.plan import Plan
from plans.program import GroupProgram, Instruction, Kind, Program, Scope
from plans.ranks import format_ranks
from plans.schedules.registry import is_written
from reports.tables import Table, format_axes
from reports.units import Bytes
from simulator.timeline.labels import read_label

__all__ = ["parameter_table", "plan_table", "plan_text"]

WIDTH = 100
"""Characters of a line of `plan_text`."""


def plan_table(plan: Plan) -> Table:
    """Per operator its stage, ranks, mesh, strategy (dims -> axes), layouts and communication per micro-batch.

    Raises:
        TwofoldError: the plan cannot be lowered.
    """
    micro, stage_of, moved = plan.micro_graph, plan.stage_of(), _communication(lower(plan))
    rows = []
    for operator in micro.operators:
        stage, strategy = plan.stages[stage_of[operator.name]], plan.strategy(operator)
        mesh, spec = strategy.mesh or stage.mesh, micro.spec(operator)
        rows.append(
            (
                str(stage_of[operator.name]),
                format_ranks(stage.mesh.rank_list),
                _mesh(mesh),
                operator.name + (" (recomputed)" if operator.name in plan.recompute else ""),
                ", ".join(f"{dim}→{format_axes(axes)}" for dim, axes in strategy.dims.items() if axes) or "whole",
                " ".join(f"{spec.input_layout(at, mesh, strategy.dims)}" for at in range(len(operator.inputs))),
                " ".join(f"{spec.output_layout(at, mesh, strategy.dims)}" for at in range(len(operator.outputs))),
                "; ".join(sorted(moved.get(operator.name, ()), key=lambda text: text[0] != "F")) or "none",
            )
        )
    schedule = "written by hand" if is_written(plan.schedule) else plan.schedule
    sizes = f"{plan.num_micro_batches} micro-batches of {micro.batch_size}, schedule {schedule}"
    optimizer = f"{plan.optimizer.kind}, optimizer parallel level {plan.optimizer.parallel_level}"
    return Table(
        title=f"Plan of {plan.graph.name!r} on {plan.num_ranks} ranks: {sizes}, {optimizer}",
        columns=(
            "stage",
            "ranks",
            "mesh",
            "operator",
            "strategy",
            "layouts in",
            "layouts out",
            "communication per micro-batch",
        ),
        rows=tuple(rows),
        notes=("F: forward, B: backward; bytes are of one rank and one collective.",),
    )


def plan_text(plan: Plan) -> str:
    """The plan for a terminal: equal layers in one row, without layouts, which `plan_table` and reports have.

    Raises:
        TwofoldError: the plan cannot be lowered.
    """
    return plan_table(plan).joined("operator").without("layouts in", "layouts out").text(WIDTH)


def parameter_table(plan: Plan) -> Table:
    """Per parameter its placement, its optimizer sharding, and its communication once a step.

    Raises:
        TwofoldError: the plan cannot be lowered.
    """
    rows = []
    for group in lower(plan).groups:
        per_step = _per_step(group)
        for placement in group.parameters:
            local = group.values[placement.weight]
            own = f"g:{placement.name}"
            named = {placement.weight, placement.shard, own, f"{own}#sum", f"{own}#shard", f"{own}#view"}
            rows.append(
                (
                    placement.name,
                    "×".join(map(str, placement.shape)),
                    format_ranks(group.ranks),
                    f"{placement.layout}",
                    Bytes(local.span_bytes),
                    f"cut over {format_axes(placement.shard_axes)}" if placement.shard else "whole",
                    "; ".join(text for text, touched in per_step if touched & named) or "none",
                )
            )
    return Table(
        title="Parameters",
        columns=("parameter", "shape", "ranks", "layout", "local weight", "optimizer", "communication per step"),
        rows=tuple(rows),
    )


def _mesh(mesh: Layout) -> str:
    return " ".join(f"{axis}={size}" for axis, size in zip(mesh.alias_name, mesh.device_matrix, strict=True))


def _describe(instruction: Instruction) -> str:
    call = {Kind.SEND: "send", Kind.RECV: "receive"}.get(instruction.kind, instruction.call.removesuffix("_flat"))
    over = f" over {format_axes(instruction.axes)}" if instruction.axes else ""
    return f"{call}{over} {Bytes(instruction.message_bytes)}"


def _communication(program: Program) -> Mapping[str, list[str]]:
    """operator -> what it causes for one micro-batch: it reads what arrives or, else, it made what leaves."""
    found: dict[str, list[str]] = {}
    last = program.num_micro_batches - 1
    for group in program.groups:
        reader, maker = _neighbours(group)
        for block, instruction in group.walk():
            label = read_label(block.label)
            wanted = (
                last if label.action == "F" else 0
            )  # the other bodies of the first and last differ by work per step
            if instruction.kind not in (Kind.COLLECTIVE, Kind.SEND, Kind.RECV) or label.micro_batch != wanted:
                continue
            if any(group.values[name].scope is not Scope.MICRO for name in instruction.outputs):
                continue
            owner = next((reader[name] for name in instruction.outputs if name in reader), "")
            owner = owner or next((maker[name] for name in instruction.inputs if name in maker), "")
            found.setdefault(owner, []).append(f"{'F' if label.action == 'F' else 'B'}: {_describe(instruction)}")
    return found


def _neighbours(group: GroupProgram) -> tuple[dict[str, str], dict[str, str]]:
    """value -> the first operator that reads it, value -> the operator that made it; both through moves and sums."""
    reader: dict[str, str] = {}
    maker: dict[str, str] = {}
    instructions = list({id(block.body): block.body for block in group.blocks}.values())
    flat = [instruction for body in instructions for instruction in body.instructions]
    for instruction in flat:
        if instruction.kind is Kind.COMPUTE and instruction.operator and instruction.call != "slice":
            for name in instruction.inputs:
                reader.setdefault(name, instruction.operator)
            for name in instruction.outputs:
                maker.setdefault(name, instruction.operator)
    for _ in range(4):  # moves follow one another at most a few times
        for instruction in flat:
            for name in instruction.inputs:
                if name not in reader and (
                    owner := next((reader[each] for each in instruction.outputs if each in reader), "")
                ):
                    reader[name] = owner
            for name in instruction.outputs:
                if name not in maker and (
                    owner := next((maker[each] for each in instruction.inputs if each in maker), "")
                ):
                    maker[name] = owner
    return reader, maker


def _per_step(group: GroupProgram) -> list[tuple[str, set[str]]]:
    """The communication of a group's parameters in a step, with the values that each message serves."""
    derived: dict[str, set[str]] = {}
    moves: dict[str, tuple[Instruction, int]] = {}
    for _, instruction in group.walk():
        if instruction.call in ("flat_unpack", "accumulate"):
            for name in instruction.inputs:
                derived.setdefault(name, set()).update(instruction.outputs)
        if instruction.kind is Kind.COLLECTIVE and any(
            group.values[name].scope is not Scope.MICRO for name in instruction.outputs
        ):
            _, count = moves.get(instruction.name, (instruction, 0))
            moves[instruction.name] = (instruction, count + 1)
    result = []
    for instruction, count in moves.values():
        served = {*instruction.inputs, *instruction.outputs}
        reached = set(instruction.outputs)
        while reached:
            reached = {after for name in reached for after in derived.get(name, ())} - served
            served |= reached
        times = f", {count} times" if count > 1 else ""
        result.append((f"{_describe(instruction)}{times}", served))
    return result
