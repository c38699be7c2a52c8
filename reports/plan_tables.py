"""The plan as tables: strategy and communication per operator, placement per parameter."""

from __future__ import annotations

from plans.layout import Layout
from plans.lower import lower
from plans.plan import Plan
from plans.program import Kind
from plans.ranks import format_axes, format_ranks, format_shape
from plans.schedules.registry import is_written
from plans.units import Bytes
from reports.tables import Table
from simulator.timeline.messages import Message, messages_of_operators, messages_of_step

__all__ = ["parameter_table", "plan_table", "plan_text", "short_plan_table"]


def plan_table(plan: Plan) -> Table:
    """Per operator its stage, ranks, mesh, strategy (dims -> axes), layouts and communication per micro-batch.

    Raises:
        TwofoldError: the plan cannot be lowered.
    """
    micro, stage_of, moved = plan.micro_graph, plan.stage_of(), messages_of_operators(lower(plan))
    rows = []
    for operator in micro.operators:
        stage, strategy = plan.stages[stage_of[operator.name]], plan.strategy(operator)
        mesh, spec = strategy.mesh or stage.mesh, micro.spec(operator)
        messages = sorted(moved.get(operator.name, ()), key=lambda message: not message.is_forward)
        rows.append((
            str(stage_of[operator.name]), format_ranks(stage.mesh.rank_list), _mesh(mesh),
            operator.name + (" (recomputed)" if operator.name in plan.recompute else ""),
            ", ".join(f"{dim}→{format_axes(axes)}" for dim, axes in strategy.dims.items() if axes) or "whole",
            " ".join(f"{spec.input_layout(at, mesh, strategy.dims)}" for at in range(len(operator.inputs))),
            " ".join(f"{spec.output_layout(at, mesh, strategy.dims)}" for at in range(len(operator.outputs))),
            "; ".join(f"{'F' if message.is_forward else 'B'}: {_describe(message)}" for message in messages) or "none",
        ))  # fmt: skip
    schedule = "written by hand" if is_written(plan.schedule) else plan.schedule
    sizes = f"{plan.num_micro_batches} micro-batches of {micro.batch_size}, schedule {schedule}"
    optimizer = f"{plan.optimizer.kind}, optimizer parallel level {plan.optimizer.parallel_level}"
    return Table(
        title=f"Plan of {plan.graph.name!r} on {plan.num_ranks} ranks: {sizes}, {optimizer}", rows=tuple(rows),
        columns=("stage", "ranks", "mesh", "operator", "strategy", "layouts in", "layouts out",
                 "communication per micro-batch"),
        notes=("F: forward, B: backward; bytes are of one rank and one collective.",),
    )  # fmt: skip


def short_plan_table(plan: Plan) -> Table:
    """The plan with equal layers in one row and without layouts, which `plan_table` has.

    Raises:
        TwofoldError: the plan cannot be lowered.
    """
    return plan_table(plan).joined("operator").without("layouts in", "layouts out")


def plan_text(plan: Plan) -> str:
    """`short_plan_table` for a terminal.

    Raises:
        TwofoldError: the plan cannot be lowered.
    """
    return short_plan_table(plan).text()


def parameter_table(plan: Plan) -> Table:
    """Per parameter its placement, its optimizer sharding, and its communication once a step.

    Raises:
        TwofoldError: the plan cannot be lowered.
    """
    rows = []
    for group in lower(plan).groups:
        messages = messages_of_step(group)
        for placement in group.parameters:
            gradient = f"g:{placement.name}"
            named = {placement.weight, placement.shard, gradient}
            named |= {f"{gradient}#{part}" for part in ("sum", "shard", "view")}
            rows.append((
                placement.name, format_shape(placement.shape), format_ranks(group.ranks), f"{placement.layout}",
                Bytes(group.values[placement.weight].span_bytes),
                f"cut over {format_axes(placement.shard_axes)}" if placement.shard else "whole",
                "; ".join(_describe(message) for message in messages if message.serves & named) or "none",
            ))  # fmt: skip
    columns = ("parameter", "shape", "ranks", "layout", "local weight", "optimizer", "communication per step")
    return Table(title="Parameters", columns=columns, rows=tuple(rows))


def _mesh(mesh: Layout) -> str:
    return " ".join(f"{axis}={size}" for axis, size in zip(mesh.alias_name, mesh.device_matrix, strict=True))


def _describe(message: Message) -> str:
    moved = message.instruction
    call = {Kind.SEND: "send", Kind.RECV: "receive"}.get(moved.kind, moved.call.removesuffix("_flat"))
    over = f" over {format_axes(moved.axes)}" if moved.axes else ""
    times = f", {message.count} times" if message.count > 1 else ""
    return f"{call}{over} {Bytes(moved.message_bytes)}{times}"
