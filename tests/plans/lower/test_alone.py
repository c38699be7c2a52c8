"""A stage that is lowered by itself does what it does in the whole program."""

from __future__ import annotations

import math

import msgspec
import pytest

from plans.degrees.groups import mesh_axes
from plans.lower import lower
from plans.lower.emit import least_bytes
from plans.lower.stage_bodies import lower_stage
from plans.lower.symbolic import model_sizes, model_template
from plans.lower.symbolic.transformer import _structure
from plans.model.transformer import (
    TransformerConfig,
    block_strategies,
    parts_of,
    recompute_set,
    transformer,
    transformer_config,
)  # fmt: skip
from plans.plan import Plan, Stage
from plans.program import Instruction, Kind


def _plan(tp: int, sequence_parallel: bool, recompute: str, schedule: str) -> Plan:
    config = TransformerConfig(
        num_layers=1, hidden=16, num_heads=4, num_kv_heads=2, ffn=24, vocab=32, seq=8, dtype="bfloat16"
    )
    graph = transformer(config, batch_size=4)
    axes, parts = mesh_axes(tp=tp, num_kv_heads=2), parts_of(graph)
    width = math.prod(axes.sizes)
    stages = tuple(
        Stage(mesh=axes.mesh(range(number * width, (number + 1) * width)), operators=operators)
        for number, operators in enumerate((parts.embedding, *parts.blocks, parts.head))
    )
    return Plan(
        graph=graph, stages=stages, strategies=block_strategies(graph, axes, sequence_parallel=sequence_parallel),
        num_micro_batches=2, schedule=schedule, recompute=recompute_set(graph, recompute),
    )  # fmt: skip


def _inside(instructions: tuple[Instruction, ...]) -> list[tuple[object, ...]]:
    """What does not cross a border, with what is freed wherever it is."""
    issued = {each.token for each in instructions if each.kind is Kind.COLLECTIVE}
    return [
        (each.name, each.call, each.inputs, each.outputs, each.shapes, each.axes, frozenset(each.frees))
        for each in instructions
        if each.kind is Kind.COMPUTE or each.kind is Kind.COLLECTIVE or each.waits in issued
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "recompute"),
    [
        (1, False, "none"),
        (2, False, "selective"),
        (2, True, "full"),
        (2, True, "selective_op"),
        (2, True, "memory_bound"),
        (4, False, "full"),
    ],
)
def test_bodies_are_those_of_the_whole_program(schedule, tp, sequence_parallel, recompute):
    plan = _plan(tp, sequence_parallel, recompute, schedule)
    one = msgspec.structs.replace(plan, graph=plan.micro_graph, num_micro_batches=1)
    for number, group in enumerate(lower(plan).groups):
        alone, seen = lower_stage(one, number, least_bytes), set()
        for block in group.blocks:
            kind = block.label[len(str(number)) : -1]
            if block.micro_batch == 0 and kind in alone.bodies:
                seen.add(kind)
                assert _inside(alone.bodies[kind]) == _inside(block.body.instructions), block.label
        assert seen == set("FB" if schedule == "1f1b" else "FIW")
        assert [placement.name for placement in alone.parameters] == [placement.name for placement in group.parameters]


def test_templates_do_not_depend_on_what_was_asked_before():
    config = transformer_config("llama-3-8b")
    sizes = model_sizes(config, micro_batch=2, tp=4, cp=1)

    def shapes(*modes: str) -> dict[str, list[object]]:
        _structure.cache_clear()
        found = {}
        for mode in modes:
            template = model_template(config, tp=4, recompute=mode)
            numbers = template.monomials.values(sizes)
            found[mode] = [
                (name, letter, cell.call, [[numbers[size] for size in shape] for shape in cell.shapes])
                for name, piece in template.pieces.items()
                for letter, part in sorted(piece.parts.items()) for cell in part.cells
            ]  # fmt: skip
        return found

    assert shapes("none", "selective", "full") == shapes("full", "selective", "none")
