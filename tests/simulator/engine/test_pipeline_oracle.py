"""Random pipelines in the orders of torch's own schedules, against an independent longest path, to the picosecond.

An action starts when the one before it on its rank is over and what it needs has arrived. A send is posted at the end
of its action, a receive when the action two before its own is over, and the transfers between two stages keep their
order, one at a time. The oracle states this as a fixed point: times only grow, in repeated sweeps over all dependencies
until nothing changes (Bellman and Ford), so it shares no order of evaluation with the engine.
"""

import random
from dataclasses import dataclass

import pytest
import torch.distributed.pipelining.schedules as torch_schedules

from plans.layout import Layout
from plans.program import END, Block, Body, GroupProgram, Instruction, Kind, Program, Scope, Value
from plans.redistribution import Piece, TransferPieces
from plans.schedules import Action, ActionKind, Schedule
from simulator import run_program
from simulator.forecast.columns import MaxPlus, PipelineCosts, pipeline_times
from tests.support.handmade import Price

SCHEDULES = {  # torch's class, chunks per rank where they are given
    "gpipe": (torch_schedules.ScheduleGPipe, 1),
    "1f1b": (torch_schedules.Schedule1F1B, 1),
    "interleaved_1f1b": (torch_schedules.ScheduleInterleaved1F1B, None),
    "interleaved_zb": (torch_schedules.ScheduleInterleavedZeroBubble, None),
    "looped_bfs": (torch_schedules.ScheduleLoopedBFS, None),
    "zb_v": (torch_schedules.ScheduleZBVZeroBubble, 2),
    "dualpipe_v": (torch_schedules.ScheduleDualPipeV, 2),
}
KINDS = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}
NUM_PIPELINES = 20  # of each schedule


@dataclass(frozen=True)
class Pipeline:
    """Per rank its actions (kind, stage, micro-batch); picoseconds of kinds by stage and of transfers by source."""

    order: list[list[tuple[str, int, int]]]
    num_stages: int
    work: dict[str, list[int]]
    transfer: dict[str, list[int]]

    @property
    def rank_of(self):
        return {stage: rank for rank, row in enumerate(self.order) for _, stage, _ in row}


def torch_order(cls, num_ranks, num_micro, chunks):
    """The order of torch's class, made without process groups; None where it has none."""
    made = cls.__new__(cls)
    made._n_microbatches, made.pp_group_size = num_micro, num_ranks
    made._num_stages, made.n_local_stages = num_ranks * chunks, chunks
    made._stages, made.rank = [None] * chunks, 0
    if cls is torch_schedules.Schedule1F1B:  # torch's own table starts the last rank at its second forward
        rows = []
        for rank in range(num_ranks):
            warm = min(num_micro, num_ranks - 1 - rank)
            row = [("F", rank, micro) for micro in range(warm)]
            for micro in range(num_micro - warm):
                row += [("F", rank, warm + micro), ("B", rank, micro)]
            rows.append(row + [("B", rank, micro) for micro in range(num_micro - warm, num_micro)])
        return rows
    if cls is torch_schedules.ScheduleGPipe:
        order = made._get_pipeline_order()
    else:
        made.number_of_rounds = max(1, num_micro // num_ranks)
        made.microbatches_per_round = num_micro // made.number_of_rounds
        if cls in (torch_schedules.ScheduleZBVZeroBubble, torch_schedules.ScheduleDualPipeV):
            made.num_stages = num_ranks * chunks
            made.stage_index_to_group_rank = torch_schedules.generate_stage_to_rank_mapping(
                num_ranks, num_ranks * chunks, style="v"
            )
        order = {rank: made._calculate_single_rank_operations(rank) for rank in range(num_ranks)}
        if cls is torch_schedules.ScheduleInterleavedZeroBubble:
            made.pipeline_order = order
            order = made._add_bubbles_to_actions(chunks * num_ranks)
    rows = []
    for rank in range(num_ranks):
        actions = [sub for action in order[rank] if action is not None for sub in (action.sub_actions or (action,))]
        rows.append(
            [
                (KINDS[each.computation_type.name], each.stage_index, each.microbatch_index)
                for each in actions
                if each.computation_type.name in KINDS
            ]
        )
    return rows


def drawn(name, draw):
    """A random pipeline of a schedule."""
    cls, fixed = SCHEDULES[name]
    num_ranks, chunks = draw.randint(2 if name == "dualpipe_v" else 1, 6), fixed or draw.randint(1, 3)
    num_micro = draw.randint(1, 12)
    if name in ("interleaved_1f1b", "interleaved_zb"):
        num_micro = num_ranks * draw.randint(1, 3)
    elif name == "dualpipe_v":
        num_micro = 2 * num_ranks + draw.randint(0, 6)
    elif name == "1f1b":
        num_micro = max(num_micro, num_ranks)
    num_stages = num_ranks * chunks
    return Pipeline(
        order=torch_order(cls, num_ranks, num_micro, chunks),
        num_stages=num_stages,
        work={kind: [draw.randint(1, 50) for _ in range(num_stages)] for kind in "FBIW"},
        transfer={way: [draw.choice((0, 0, 3, 17, 60)) for _ in range(num_stages)] for way in "FB"},
    )


def longest_path(pipeline):
    """Action -> its end."""
    place = {action: (rank, at) for rank, row in enumerate(pipeline.order) for at, action in enumerate(row)}
    start, last = dict.fromkeys(place, 0), pipeline.num_stages - 1
    end = {(kind, stage, micro): pipeline.work[kind][stage] for kind, stage, micro in place}
    arrives, sends = {}, {}

    def backward(stage, micro):
        return ("B" if ("B", stage, micro) in place else "I", stage, micro)

    for row in pipeline.order:
        for action in row:
            kind, stage, micro = action
            if kind == "F" and stage < last:
                sends.setdefault(("F", stage), []).append((action, ("F", stage + 1, micro)))
            if kind in "BI" and stage > 0:
                sends.setdefault(("B", stage), []).append((action, backward(stage - 1, micro)))
    changed = True
    while changed:
        changed = False
        for (way, stage), pairs in sends.items():
            free = 0
            for sender, receiver in pairs:
                rank, at = place[receiver]
                if place[sender][0] == rank:
                    time = end[sender]
                else:
                    posted = end[pipeline.order[rank][at - 2]] if at >= 2 else 0
                    time = free = max(end[sender], posted, free) + pipeline.transfer[way][stage]
                changed |= arrives.get((way, stage, sender[2])) != time
                arrives[way, stage, sender[2]] = time
        for row in pipeline.order:
            free = 0
            for action in row:
                kind, stage, micro = action
                time = max(free, start[action])
                if kind == "F" and stage > 0:
                    time = max(time, arrives.get(("F", stage - 1, micro), 0))
                if kind in "BI":
                    time = max(time, end["F", stage, micro])
                    if stage < last:
                        time = max(time, arrives.get(("B", stage + 1, micro), 0))
                if kind == "W":
                    time = max(time, end["I", stage, micro])
                changed |= time != start[action]
                start[action], end[action] = time, time + pipeline.work[kind][stage]
                free = end[action]
                assert free < 10**9, "the order deadlocks"
    return end


def program_of_pipeline(pipeline):
    """The same as instructions: receives are posted one action ahead, a WAIT takes each, sends are waited for last."""
    rank_of, last, groups = pipeline.rank_of, pipeline.num_stages - 1, []

    def source_of(kind, stage):
        source = stage - 1 if kind == "F" else stage + 1
        return source if kind != "W" and 0 <= source <= last else None

    def transfer(kind, way, source, target, token):
        price = pipeline.transfer[way][source] if rank_of[source] != rank_of[target] else 0
        piece = Piece(src_rank=rank_of[source], dst_rank=rank_of[target], region=((0, 1),))
        return Instruction(
            name=f"{kind}{source}>{target}", kind=kind, call="transfer", part="C", channel=f"{source}>{target}{way}",
            token=token, pieces=TransferPieces([piece]), attrs={"price": (0, price)},
        )  # fmt: skip

    for rank, row in enumerate(pipeline.order):
        values, blocks, sent = {}, [], []

        def token(name, values=values):
            values[name] = Value(name=name, shape=(), scope=Scope.MICRO, role="token")
            return name

        for at, (kind, stage, micro) in enumerate(row):
            way = "F" if kind == "F" else "B"
            for next_kind, next_stage, next_micro in row[at if at == 0 else at + 1 : at + 2]:
                source, its_way = source_of(next_kind, next_stage), "F" if next_kind == "F" else "B"
                if source is not None:
                    name = token(f"{source}>{next_stage}{its_way}.received")
                    line = transfer(Kind.RECV, its_way, source, next_stage, name)
                    label = f"{next_stage}{next_kind}{next_micro}.receive"
                    blocks.append(
                        Block(label=label, micro_batch=next_micro, body=Body(name="receive", instructions=(line,)))
                    )
            lines = []
            if (source := source_of(kind, stage)) is not None:
                waits = f"{source}>{stage}{way}.received"
                lines.append(Instruction(name="wait", kind=Kind.WAIT, call="wait", part="C", waits=waits))
            attrs = {"price": (0, pipeline.work[kind][stage])}
            lines.append(Instruction(name="work", kind=Kind.COMPUTE, call="linear.forward", part="F", attrs=attrs))
            target = stage + 1 if kind == "F" else stage - 1
            if kind != "W" and 0 <= target <= last:
                sent.append((token(f"{stage}>{target}{way}.sent"), micro))
                lines.append(transfer(Kind.SEND, way, stage, target, sent[-1][0]))
            body = Body(name=f"{stage}{kind}", instructions=tuple(lines))
            blocks.append(Block(label=f"{stage}{kind}{micro}", micro_batch=micro, body=body))
        ends = tuple(
            Instruction(
                name=f"end{at}", kind=Kind.WAIT, call="wait", part="C", waits=name, attrs={"micro_batch": micro}
            )
            for at, (name, micro) in enumerate(sent)
        )
        blocks.append(Block(label="end", micro_batch=END, body=Body(name="end", instructions=ends)))
        groups.append(GroupProgram(mesh=Layout((1,), ("one",), (rank,)), values=values, blocks=tuple(blocks)))
    return Program(groups=tuple(groups), num_micro_batches=1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_pipelines_in_torch_orders_take_the_longest_path(name):
    draw = random.Random(f"2026 {name}")
    for _ in range(NUM_PIPELINES):
        pipeline = drawn(name, draw)
        expected = {f"{stage}{kind}{micro}/work": end for (kind, stage, micro), end in longest_path(pipeline).items()}
        program = program_of_pipeline(pipeline)
        for host_async in (True, False):
            timeline = run_program(
                program, lambda line, group: Price(*line.attrs.get("price", ())), host_async=host_async,
                with_memory=False,
            )  # fmt: skip
            found = {span.id: span.end_ps for span in timeline.spans() if span.stream == "compute"}
            assert found == expected


@pytest.mark.parametrize("name", SCHEDULES)
def test_columns_take_the_longest_path(name):
    """The evaluator of forecasts, on the same pipelines; a step ends when its last transfer has arrived."""
    draw = random.Random(f"2026 {name}")
    for _ in range(NUM_PIPELINES):
        pipeline = drawn(name, draw)
        rows = [[Action(stage=s, kind=ActionKind(k), micro_batch=m) for k, s, m in row] for row in pipeline.order]
        schedule = Schedule.from_order(rows)
        costs = PipelineCosts(maps=maps_of(pipeline), transfer_ps=pipeline.transfer)
        assert int(pipeline_times(schedule, costs).end_ps.max()) == max(longest_path(pipeline).values())


def maps_of(pipeline):
    """Of each kind of action, by stage: compute, after what arrives."""
    last, found = pipeline.num_stages - 1, {}
    for kind in {kind for row in pipeline.order for kind, _, _ in row}:
        own = []
        for stage, work in enumerate(pipeline.work[kind]):
            receives = kind != "W" and not (kind == "F" and stage == 0) and not (kind in "BI" and stage == last)
            before = MaxPlus.identity().wait_for("arrival") if receives else MaxPlus.identity()
            own.append(before.compute(0, work))
        found[kind] = MaxPlus.stack(own)
    return found
