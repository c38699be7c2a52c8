"""The lowering of a single operator, with which a search prices strategies.

The instructions are those that the lowering of a complete plan writes for the operator: its kernels; the redistribution
of its output to the layout of its strategy; the gathers, reductions and updates of its parameters; and, for the
operator that computes the loss, the sum over ranks. Its inputs are given in the layouts that it reads, and the gradient
of its output in the layout in which readers return it. The gradients of its inputs keep the layouts in which they are
computed. The redistributions between operators are not included, because they depend on the neighbours' strategies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from plans.layout import Layout
from plans.lower.backward import lower_backward
from plans.lower.boundaries import parameter_layouts
from plans.lower.chunk import LOSSES, ChunkLowering
from plans.lower.emit import Emitter, ValueTable, Ways, least_bytes
from plans.lower.loss import accumulate_loss, sum_loss
from plans.lower.optimizer import OptimizerLowering
from plans.model.graph import Graph, Operator
from plans.optimizer import Optimizer
from plans.plan import Stage, Strategy
from plans.program import Instruction, Value

__all__ = ["OperatorBodies", "lower_operator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorBodies:
    """The instructions of one operator in one step.

    Args:
        begin: once, at the start of the step: weights that are gathered for the complete step.
        forward: of every micro-batch.
        backward: of every micro-batch but the last.
        last_backward: of the last micro-batch, with the reductions that are done once a step.
        end: once, at the end of the step: remaining reductions, updates.
        values: every value by name.
    """

    begin: tuple[Instruction, ...]
    forward: tuple[Instruction, ...]
    backward: tuple[Instruction, ...]
    last_backward: tuple[Instruction, ...]
    end: tuple[Instruction, ...]
    values: Mapping[str, Value]

    def counted(self, num_micro_batches: int) -> Iterator[tuple[int, Instruction]]:
        """Every instruction, and how often it runs in a step of that many micro-batches."""
        bodies = (
            (1, self.begin), (num_micro_batches, self.forward), (num_micro_batches - 1, self.backward),
            (1, self.last_backward), (1, self.end),
        )  # fmt: skip
        return ((times, instruction) for times, body in bodies if times for instruction in body)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OperatorPlan:
    """The plan of a stage that holds one operator (`plans.lower.chunk.ChunkPlan`)."""

    stages: tuple[Stage, ...]
    chosen: Strategy
    num_slices: int
    recompute: tuple[str, ...] = ()
    full_batch: bool = True
    interleave: int = 1

    def strategy(self, operator: Operator) -> Strategy:
        """Strategy of the operator."""
        return self.chosen

    def stage_of(self) -> Mapping[str, int]:
        """The operator's name -> 0."""
        return dict.fromkeys(self.stages[0].operators, 0)


def lower_operator(
    micro: Graph,
    operator: Operator,
    strategy: Strategy,
    mesh: Layout,
    *,
    optimizer: Optimizer,
    num_micro_batches: int = 1,
    ways: Ways = least_bytes,
) -> OperatorBodies:
    """The instructions of one operator under one strategy.

    Args:
        micro: the graph of one micro-batch.
        operator: operator of the graph.
        strategy: how it is split.
        mesh: the mesh of its stage.
        optimizer: of its parameters. Clipping is left out: the norm is one of all parameters.
        num_micro_batches: number of micro batches of a step.
        ways: by which steps tensors are redistributed.

    Raises:
        TwofoldError: a layout that does not divide a shape, a parameter that does not reach the loss.

    >>> from plans.model.mlp import mlp_graph
    >>> graph, mesh = mlp_graph([8, 4], 16), Layout((2,), ("dp",))
    >>> bodies = lower_operator(graph, graph.operators[0], Strategy(dims={"b0": ("dp",)}), mesh, optimizer=Optimizer())
    >>> [each.call for each in (*bodies.forward, *bodies.last_backward)]
    ['linear.forward', 'linear.grad1', 'linear.grad2', 'accumulate', 'flat_pack', 'all_reduce']
    """
    if optimizer.clip_norm is not None:
        optimizer = msgspec.structs.replace(optimizer, clip_norm=None)
    micro, table = _with_own_gradients(micro, operator), ValueTable(ways=ways)
    plan = _OperatorPlan(
        stages=(Stage(mesh=mesh, operators=(operator.name,)),), chosen=strategy, num_slices=num_micro_batches
    )
    homes, reduced = parameter_layouts(plan, micro, [0])
    parameters = OptimizerLowering(
        optimizer=optimizer, mesh=mesh, table=table, parameters={name: micro.tensors[name] for name in homes},
        homes=homes, reduced=reduced, num_ranks=mesh.num_ranks,
    )  # fmt: skip
    places = parameters.allocate_parameters()
    chunk = ChunkLowering(
        plan=plan, micro=micro, number=0, table=table, arriving=(), leaving=(), homes=homes, reduced=reduced,
        accumulators=parameters.accumulators(), shared=frozenset(), mine=[operator],
    )  # fmt: skip
    _place_tensors(chunk, operator)
    parameters.arrange(0, [operator], chunk.completed(), ())
    gathers, arrivals = parameters.gathers()
    begin = [*gathers, *(line for arrival in dict.fromkeys(arrivals.values()) for line in arrival.instructions)]

    def backward(is_last: bool) -> tuple[Instruction, ...]:
        body, _ = lower_backward(chunk, _keep, parameters.reduction(0, is_last=is_last))
        return tuple(parameters.with_gathers(0, body))

    makes_loss = operator.outputs[0] == micro.loss and operator.kind in LOSSES
    forward = parameters.with_gathers(0, chunk.forward(_keep))
    if makes_loss:
        forward += accumulate_loss(plan, micro, table, 0)
    reduced_once = any(not parameter.reduced_per_micro_batch for parameter in parameters.local.values())
    earlier = backward(False) if num_micro_batches > 1 and reduced_once else ()
    last = backward(True)
    end = Emitter(mesh=mesh, table=table)
    parameters.reduce_rest(end)
    if makes_loss:
        own = strategy.mesh or mesh
        sum_loss(end, own, micro.spec(operator).output_layout(0, own, strategy.dims).partial)
        end.flush()
    return OperatorBodies(
        begin=tuple(begin), forward=tuple(forward), backward=earlier or last, last_backward=last,
        end=(*end.instructions, *parameters.updates(places)), values=table.values,
    )  # fmt: skip


def _with_own_gradients(micro: Graph, operator: Operator) -> Graph:
    """The graph, with constants in place of parameters that the operator reads but only other operators train."""
    trained = {operator.inputs[index] for index in micro.trained_inputs(operator)}
    read_only = {name for name in operator.inputs if micro.tensors[name].kind == "parameter"} - trained
    if not read_only:
        return micro
    tensors = {
        name: msgspec.structs.replace(tensor, kind="constant") if name in read_only else tensor
        for name, tensor in micro.tensors.items()
    }
    return msgspec.structs.replace(micro, tensors=tensors)


def _place_tensors(chunk: ChunkLowering, operator: Operator) -> None:
    """Enter the inputs of the operator, in the layouts that it reads, and the gradient of its output."""
    micro, table, strategy = chunk.micro, chunk.table, chunk.plan.strategy(operator)
    spec, mesh = micro.spec(operator), chunk.mesh_of(operator)
    for index, name in enumerate(operator.inputs):
        tensor = micro.tensors[name]
        if tensor.kind != "parameter":
            layout = spec.input_layout(index, mesh, strategy.dims)
            value = Value(name=chunk.name_of(name, layout), shape=layout.local_shape(tensor.shape), dtype=tensor.dtype)
            chunk.placed.setdefault(name, []).append((layout, table.add(value)))
    name = operator.outputs[0]
    tensor, layout = micro.tensors[name], strategy.output_layout(spec, 0, mesh).without_partial()
    value = Value(name=f"d:{name}@{layout}", shape=layout.local_shape(tensor.shape), dtype=tensor.dtype)
    chunk.returned[name] = layout, table.add(value)


def _keep(emitter: Emitter, border: object, value: str) -> None:
    """Nothing is sent: the operator has no neighbours."""
