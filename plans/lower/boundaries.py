"""Tensors that cross between stages, and the placement of parameters: inputs of the lowering of every stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plans.errors import TwofoldError
from plans.layout import Layout, TensorLayout
from plans.lower.chunk_plan import ChunkPlan, StageBoundary
from plans.model.graph import Graph, Operator
from plans.plan import Plan

__all__ = ["find_boundaries", "parameter_layouts"]


def find_boundaries(plan: Plan, micro: Graph) -> list[StageBoundary]:
    """The tensors of `micro` that cross from one stage to a later one, in the order of their readers."""
    stage_of, found = plan.stage_of(), dict[tuple[str, int], StageBoundary]()
    trained = {
        (operator.inputs[index], stage_of[operator.name])
        for operator in micro.operators
        for index in micro.trained_inputs(operator)
    }
    producers = micro.producers()
    for operator in micro.operators:
        here = stage_of[operator.name]
        for index, name in enumerate(operator.inputs):
            maker = producers.get(name)
            if maker is None or stage_of[maker.name] == here or (name, here) in found:
                continue
            there = stage_of[maker.name]
            source = plan.strategy(maker).output_layout(
                micro.spec(maker), maker.outputs.index(name), _mesh(plan, maker, stage_of)
            )
            target = micro.spec(operator).input_layout(
                index, _mesh(plan, operator, stage_of), plan.strategy(operator).dims
            )
            found[name, here] = StageBoundary(
                tensor=name, from_stage=there, to_stage=here, source=source.without_partial(), target=target,
                trained=(name, here) in trained,
            )  # fmt: skip
    return list(found.values())


def parameter_layouts(
    plan: ChunkPlan, micro: Graph, stages: Sequence[int]
) -> tuple[dict[str, TensorLayout], dict[str, TensorLayout]]:
    """The layout of each parameter of these stages, which is the one that its first reader requires, and that of its
    gradient.

    Raises:
        TwofoldError: a parameter that does not reach the loss.
    """
    homes: dict[str, TensorLayout] = {}
    partial: dict[str, tuple[str, ...]] = {}
    wanted, stage_of = micro.needs_gradient(), plan.stage_of()
    mine = [micro.by_name[name] for stage in stages for name in plan.stages[stage].operators]
    for operator in sorted(mine, key=micro.position):
        spec, dims = micro.spec(operator), plan.strategy(operator).dims
        for index, name in enumerate(operator.inputs):
            if micro.tensors[name].kind != "parameter":
                continue
            if name not in wanted:
                raise TwofoldError(f"parameter {name!r} does not affect the loss; freeze or remove it")
            mesh = _mesh(plan, operator, stage_of)
            home = homes.setdefault(name, spec.input_layout(index, mesh, dims))
            if index not in micro.trained_inputs(operator):
                continue
            axes = spec.gradient_layout(index, mesh, dims).partial
            if mesh != home.mesh:
                axes = ()  # the same names mean other axes there
            partial[name] = tuple(axis for axis in partial.get(name, axes) if axis in axes)
    reduced = {}
    for name, home in homes.items():
        own = {axis for axes in home.dims for axis in axes}
        axes = tuple(axis for axis in home.mesh.alias_name if axis in partial[name] and axis not in own)
        reduced[name] = TensorLayout(mesh=home.mesh, dims=home.dims, partial=axes)
    return homes, reduced


def _mesh(plan: ChunkPlan, operator: Operator, stage_of: Mapping[str, int]) -> Layout:
    return plan.strategy(operator).mesh or plan.stages[stage_of[operator.name]].mesh
