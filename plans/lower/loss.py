"""The loss of a step: the mean over its micro-batches, accumulated in the forward of the stage that computes it."""

from __future__ import annotations

from plans.errors import TwofoldError
from plans.layout import Layout
from plans.lower.chunk import LOSSES
from plans.lower.chunk_plan import ChunkPlan
from plans.lower.emit import Emitter, ValueTable, channel_of, value_name
from plans.model.graph import Graph, Operator
from plans.program import Instruction, Kind, Scope, Value

__all__ = ["accumulate_loss", "loss_operator", "step_loss_dtype", "sum_loss"]


def loss_operator(micro: Graph) -> Operator:
    """The operator that computes the loss.

    Raises:
        TwofoldError: its loss is not supported by lowering.
    """
    operator = micro.producers()[micro.loss]
    if operator.kind not in LOSSES:
        raise TwofoldError(
            f"the loss comes from {operator.name!r} ({operator.kind}); it must be one of {sorted(LOSSES)}"
        )
    return operator


def step_loss_dtype(graph: Graph) -> str:
    """The dtype in which the losses of micro-batches are added up: at least float32."""
    dtype = graph.tensors[graph.loss].dtype
    return "float32" if dtype in ("bfloat16", "float16") else dtype


def accumulate_loss(plan: ChunkPlan, micro: Graph, table: ValueTable, stage: int) -> list[Instruction]:
    """The instruction that adds a micro-batch's loss to the step's, on the stage that computes it."""
    operator = loss_operator(micro)
    stage_mesh = plan.stages[stage].mesh
    mesh = plan.strategy(operator).mesh or stage_mesh
    layout = micro.spec(operator).output_layout(0, mesh, plan.strategy(operator).dims)
    value = value_name(micro.loss, layout, stage_mesh)
    total = table.add(Value(name="step_loss", shape=(), dtype=step_loss_dtype(micro), scope=Scope.STEP, role="buffer"))
    emitter = Emitter(mesh=mesh, table=table)
    scale = {"scale": 1.0 / plan.num_slices}
    emitter.compute("step_loss.accumulate", "accumulate", "F", (value,), (total,), attrs=scale)
    return emitter.instructions


def sum_loss(emitter: Emitter, mesh: Layout, axes: tuple[str, ...]) -> None:
    """Sum the step's loss over `axes` of the mesh of the loss, along which ranks hold parts of it."""
    loss = emitter.table["step_loss"]
    if mesh.size(axes) > 1:
        emitter.add(
            Instruction(
                name="step_loss.all_reduce", kind=Kind.COLLECTIVE, call="all_reduce", part="C", inputs=(loss.name,),
                outputs=(loss.name,), mesh=mesh, axes=axes, channel=channel_of(mesh, axes),
                message_bytes=loss.span_bytes, shapes=((), ()), dtype=loss.dtype,
                token=emitter.token("step_loss.all_reduce", Scope.STEP),
            )
        )  # fmt: skip
