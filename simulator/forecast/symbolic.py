"""The priced bodies of a transformer in stated degrees, from templates: the same as those of its lowered program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from costmodels.price.instruction import Cost, price
from plans.lower.symbolic.outline import model_outline
from plans.lower.symbolic.rank import ARRIVE, Cells, PieceUse, SymbolicRank, lower_rank
from plans.program import GroupProgram, Instruction
from simulator.forecast.action import COLLECTIVE as LINE_COLLECTIVE
from simulator.forecast.action import COMPUTE as LINE_COMPUTE
from simulator.forecast.body import ARRIVE as ARRIVE_OP
from simulator.forecast.body import COMPUTE, ISSUE, SEND, WAIT, Op
from simulator.forecast.chunks import Chunk, Chunks
from simulator.forecast.program import ops_of
from simulator.forecast.rank import RankBodies

__all__ = ["bodies_of_rank"]


def uses_of(chunks: Sequence[Chunk]) -> list[list[PieceUse]]:
    """The pieces of each chunk of a rank; blocks are numbered through."""
    number, found = 0, []
    for chunk in chunks:
        uses: list[PieceUse] = []
        for piece, count in chunk.pieces:
            if not piece.endswith("block"):
                uses.append(PieceUse(piece))
                continue
            uses += [PieceUse(piece, number + place) for place in range(count)]
            number += count
        found.append(uses)
    return found


def symbolic_rank(
    costs: Chunks, chunks: Sequence[Chunk], wanted: Sequence[frozenset[tuple[str, bool]]]
) -> SymbolicRank:
    pieces = dict(costs.template.pieces)
    if costs.kept is not None:
        pieces |= {f"kept_{name}": piece for name, piece in costs.kept.template.pieces.items()}
    uses = uses_of(chunks)
    tied = costs.config.tied
    return lower_rank(
        costs.degrees,
        model_outline(costs.config, costs.degrees),
        pieces,
        uses,
        wanted,
        "tok_embeddings.weight" if tied else "output.weight",
    )


def bodies_of_rank(
    costs: Chunks, chunks: Sequence[Chunk], stages: Sequence[int], wanted: Sequence[frozenset[tuple[str, bool]]]
) -> RankBodies:
    rank = symbolic_rank(costs, chunks, wanted)
    group = GroupProgram(mesh=model_outline(costs.config, costs.degrees).mesh, values=dict(rank.values), blocks=())

    def cost_of(line: Instruction) -> Cost:
        return price(line, group, costs.machine, costs.degrees.num_ranks)

    send = price_send(costs)
    known: dict[tuple[str, str], list[tuple[Op, ...]]] = {}

    def cells(piece: str, part: str) -> list[tuple[Op, ...]]:
        if (piece, part) not in known:
            own, name = (costs.kept, piece.removeprefix("kept_")) if piece.startswith("kept_") else (costs, piece)
            assert own is not None
            known[piece, part] = [_ops(line) for line in own.lines(name, part)]
        return known[piece, part]

    actions: dict[tuple[int, str], tuple[Op, ...]] = {}
    wait_ps = send[1]
    for (number, variant), items in rank.bodies.items():
        ops: list[Op] = []
        for item in items:
            if isinstance(item, Cells):
                if not item.is_dropped:
                    for cell in cells(item.piece, item.part)[item.first : item.stop]:
                        ops += cell
            elif isinstance(item, Instruction):
                if item.call != "cell":
                    ops += ops_of([item], cost_of)
            elif item == ARRIVE:
                ops.append(Op(ARRIVE_OP, wait_ps))
            else:
                ops.append(Op(SEND, send[0]))
        actions[stages[number], variant] = tuple(ops)
    return RankBodies(begin=ops_of(rank.begin, cost_of), actions=actions, end=ops_of(rank.end, cost_of))


def price_send(costs: Chunks) -> tuple[int, int]:
    from costmodels.price.instruction import price_transfer, price_wait

    send, wait = price_transfer(costs.machine, 0, 0, 0), price_wait(costs.machine)
    return send.dispatch_ps, wait.dispatch_ps


def _ops(line: Any) -> tuple[Op, ...]:
    if line.kind == LINE_COMPUTE:
        return (Op(COMPUTE, line.dispatch_ps, line.work_ps, line.name),)
    if line.kind == LINE_COLLECTIVE:
        issue = Op(ISSUE, line.dispatch_ps, line.work_ps, line.name, line.channel, str(line.token))
        return (issue,) if line.token >= 0 else (issue, Op(WAIT, 0, token=str(line.token)))
    return (Op(WAIT, line.dispatch_ps, token=str(line.token)),)
