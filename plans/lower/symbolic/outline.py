"""The parameters of a transformer for given degrees, piece by piece, as the optimizer's lowering needs them.

The layouts of parameters and the order in which their gradients are complete are read off a model of one block of each
kind, with the real sizes and the real mesh; a block's parameters differ from another's in their names only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import msgspec

from plans.degrees import Degrees
from plans.degrees.groups import mesh_axes
from plans.layout import Layout, TensorLayout
from plans.lower.boundaries import parameter_layouts
from plans.lower.completed import completed_parameters
from plans.lower.loss import step_loss_dtype
from plans.model.graph import Graph, Operator, Tensor
from plans.model.transformer import TransformerConfig, block_strategies, parts_of
from plans.model.transformer.builder import build_graph
from plans.plan import Plan, Stage

__all__ = ["ModelOutline", "PieceOutline", "model_outline", "renamed"]

_BLOCK = re.compile(r"^layers\.\d+\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceOutline:
    """The parameters of one piece.

    Args:
        operators: in the order of the forward, with parameters alone as inputs; of a block those that
            read some, and the first one.
        completed: (parameter, operator whose gradient completes the parameter's gradient), in the order of the
        backward.
        tensors: its parameters in the order of the graph.
    """

    operators: tuple[Operator, ...]
    completed: tuple[tuple[str, str], ...]
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelOutline:
    """All pieces: "embedding", "block", "head", and "dense_block" where there is one.

    Args:
        mesh: mesh of the ranks of the first pipeline rank.
        pieces: by name.
        homes: parameter -> the layout of its weight.
        reduced: parameter -> the layout of its gradient before it is reduced.
        loss_axes: the axes along which ranks hold parts of the loss.
        loss_dtype: of the loss of a step.
    """

    mesh: Layout
    pieces: Mapping[str, PieceOutline]
    homes: Mapping[str, TensorLayout]
    reduced: Mapping[str, TensorLayout]
    loss_axes: tuple[str, ...]
    loss_dtype: str


@lru_cache(maxsize=65_536)
def renamed(name: str, block: int | None) -> str:
    """The name of a parameter or operator of a block in block number `block`.

    >>> renamed("layers.0.attention.wq.weight", 7)
    'layers.7.attention.wq.weight'
    """
    return name if block is None else _BLOCK.sub(f"layers.{block}.", name)


def model_outline(config: TransformerConfig, degrees: Degrees) -> ModelOutline:
    """The outline of a configuration; equal for all degrees with equal meshes.

    Raises:
        TwofoldError: sizes that the degrees do not divide.
    """
    return _outline(
        config, degrees.dp, degrees.tp, degrees.cp, degrees.ep, degrees.sequence_parallel and degrees.tp > 1,
        tuple(degrees.stage_ranks(0)),
    )  # fmt: skip


@lru_cache(maxsize=512)
def _outline(
    config: TransformerConfig, dp: int, tp: int, cp: int, ep: int, sp: bool, ranks: tuple[int, ...]
) -> ModelOutline:
    num_dense = 0 if config.experts is None else min(1, config.experts.num_dense_layers)
    experts = config.experts and replace(config.experts, num_dense_layers=num_dense)
    graph = build_graph(replace(config, num_layers=1 + num_dense, experts=experts), dp, config.seq)
    axes = mesh_axes(dp=dp, cp=cp, tp=tp, num_kv_heads=config.kv_heads, ep=ep)
    mesh = axes.mesh()
    plan = Plan(
        graph=graph,
        stages=(Stage(mesh=mesh, operators=tuple(operator.name for operator in graph.operators)),),
        strategies={
            name: strategy
            for name, strategy in block_strategies(graph, axes, sequence_parallel=sp).items() if strategy.dims
        },
    )  # fmt: skip
    homes, reduced = parameter_layouts(plan, graph, [0])
    own = axes.mesh(ranks)
    parts = parts_of(graph)
    names = ["embedding", *(["dense_block"] if num_dense else []), "block", "head"]
    loss = graph.producers()[graph.loss]
    layout = graph.spec(loss).output_layout(0, mesh, plan.strategy(loss).dims)
    return ModelOutline(
        mesh=own, homes=_on(own, homes), reduced=_on(own, reduced), loss_axes=layout.partial,
        loss_dtype=step_loss_dtype(graph),
        pieces={
            name: _piece(graph, operators)
            for name, operators in zip(names, (parts.embedding, *parts.blocks, parts.head), strict=True)
        },
    )  # fmt: skip


def _on(mesh: Layout, layouts: Mapping[str, TensorLayout]) -> dict[str, TensorLayout]:
    """The same layouts on another mesh."""
    return {name: replace(layout, mesh=mesh) for name, layout in layouts.items()}


def _piece(graph: Graph, names: Sequence[str]) -> PieceOutline:
    is_block = _BLOCK.match(names[0]) is not None  # all operators of a block are in one module
    operators = [graph.by_name[name] for name in names]
    parameters = {tensor.name: tensor for tensor in graph.parameters}
    read = dict.fromkeys(name for operator in operators for name in operator.inputs if name in parameters)
    return PieceOutline(
        operators=tuple(
            msgspec.structs.replace(operator, inputs=tuple(name for name in operator.inputs if name in parameters))
            for number, operator in enumerate(operators)
            if not number or not is_block or any(name in parameters for name in operator.inputs)
        ),
        completed=tuple(completed_parameters(graph, operators)),
        tensors=tuple(tensor for name, tensor in parameters.items() if name in read),
    )
