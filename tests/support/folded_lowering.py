"""What a template says of a small transformer, beside what its real lowering says."""

import math

from plans.degrees.groups import mesh_axes
from plans.layout import Layout
from plans.lower.collectives import by_collectives
from plans.lower.symbolic import model_sizes
from plans.model.transformer import block_strategies, parts_of, recompute_set, transformer
from plans.operators.attention import heads_first
from plans.plan import Plan, Stage
from plans.program import Kind, moved_values


def small_plan(config, *, tp, sequence_parallel, recompute, schedule, cp=1, ep=1):
    """Embedding, one block and head as three stages, as the template has them, with these very sizes."""
    graph = transformer(config, batch_size=4 * ep, num_layers=1)
    axes, parts = mesh_axes(dp=ep, ep=ep, cp=cp, tp=tp, num_kv_heads=config.kv_heads), parts_of(graph)
    width = math.prod(axes.sizes)
    stages = tuple(
        Stage(mesh=Layout(axes.sizes, axes.names, list(range(n * width, (n + 1) * width))), operators=operators)
        for n, operators in enumerate((parts.embedding, parts.blocks[0], parts.head))
    )
    plan = Plan(
        graph=graph, stages=stages, strategies=block_strategies(graph, axes, sequence_parallel=sequence_parallel),
        num_micro_batches=2, schedule=schedule, recompute=recompute_set(graph, recompute),
    )  # fmt: skip
    return by_collectives(plan) if ep > 1 and tp > 1 else plan


def check_template(template, program, config, *, tp, cp=1, ep=1):
    """Every part of every piece has the calls, shapes, bytes and messages of the lowered program."""
    numbers = template.monomials.values(model_sizes(config, micro_batch=2, tp=tp, cp=cp, ep=ep))
    for piece, group in zip(("embedding", "block", "head"), program.groups, strict=True):
        for block in group.blocks:
            if block.micro_batch != 0 or block.label.endswith((".recv", ".sent")):
                continue
            found = []
            for cell in template.pieces[piece].parts[block.label[-2]].cells:
                if cell.joined and cell.gradient in _added_by_products(block.body):
                    continue
                if cell.kind is Kind.COMPUTE:
                    shapes = tuple(tuple(numbers[size] for size in shape) for shape in cell.shapes)
                    found.append((cell.call, shapes, sum(numbers[size] for size in cell.touched)))
                elif cell.kind is Kind.COLLECTIVE:
                    found.append((cell.call, cell.axes, numbers[cell.message]))
            assert found == _said_by_lowering(group, block.body), (piece, block.label)


def _added_by_products(body):
    """The parameters whose gradients are accumulated by what makes them: in a program, not in a template."""
    return {line.outputs[0].removeprefix("g:") for line in body.instructions if line.attrs.get("adds")}


def _said_by_lowering(group, body):
    """(call, shapes or message bytes) of every instruction that does not cross stages."""
    lines = []
    for line in body.instructions:
        if line.kind is Kind.COMPUTE:
            shapes = heads_first(line.shapes, line.attrs) if line.call.startswith("attention.") else line.shapes
            touched = sum(group.values[name].span_bytes for name in moved_values(line))
            lines.append((line.call, tuple(map(tuple, shapes)), touched))
        elif line.kind is Kind.COLLECTIVE:
            lines.append((line.call, line.axes, line.message_bytes))
    return lines
