"""Pipelines as programs, written the way plans.lower writes them, and the same as costs of forecast columns.

Actions are drawn at random: compute with dispatch, collectives of one rank (beside the compute, waited for or not), the
wait for what is received, the send. Receives are posted one action ahead; the closing block waits for every send.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from plans.layout import Layout
from plans.program import BEGIN, END, Block, Body, GroupProgram, Instruction, Kind, Program, Scope, Value
from plans.redistribution import Piece, TransferPieces
from plans.schedules import Action, ActionKind, Schedule, ScheduleError, make_schedule
from plans.schedules.arrivals import release_rows
from plans.schedules.dependencies import remote_dependencies
from plans.timeline import Timeline
from simulator.forecast.columns import MaxPlus, PipelineCosts

VARIANTS = ("F", "B", "I", "W", "F.first", "B.last", "W.last")


@dataclass
class Drawn:
    """Random times."""

    draw: random.Random
    with_channel: bool = True
    dispatch: tuple[int, ...] = (0, 1, 4)
    work: tuple[int, ...] = (0, 3, 10, 31)

    def d(self) -> int:
        return self.draw.choice(self.dispatch)

    def w(self) -> int:
        return self.draw.choice(self.work)


@dataclass
class Content:
    """Instructions of one body and the map that says the same."""

    map: MaxPlus
    lines: list[Instruction] = field(default_factory=list)


@dataclass
class Writer:
    """Writes the bodies of one rank."""

    rank: int
    times: Drawn
    schedule: Schedule
    values: dict[str, Value] = field(default_factory=dict)
    reductions: list[tuple[str, int]] = field(default_factory=list)

    def new(self) -> Content:
        return Content(map=MaxPlus.identity())

    def token(self, name: str, scope: Scope = Scope.MICRO) -> str:
        self.values[name] = Value(name=name, shape=(), scope=scope, role="token")
        return name

    def line(self, content: Content, kind: Kind, call: str, price: tuple[int, ...], **rest) -> None:
        attrs = {"price": price, **rest.pop("attrs", {})}
        name = f"n{len(content.lines)}"
        content.lines.append(Instruction(name=name, kind=kind, call=call, part="F", attrs=attrs, **rest))

    def compute(self, content: Content) -> int:
        d, w = self.times.d(), self.times.w()
        self.line(content, Kind.COMPUTE, "linear.forward", (d, w))
        content.map = content.map.compute(d, w)
        return w

    def issue(self, content: Content, token: str, channel: str, scope: Scope = Scope.MICRO) -> None:
        d, w = self.times.d(), self.times.w()
        self.line(
            content, Kind.COLLECTIVE, "all_reduce", (d, w), axes=("one",), channel=channel,
            token=self.token(token, scope),
        )  # fmt: skip
        content.map = content.map.issue(token, d, w, channel)

    def wait(self, content: Content, token: str) -> None:
        d = self.times.d()
        self.line(content, Kind.WAIT, "wait", (d,), waits=token)
        content.map = content.map.wait(token, d)

    def wait_elsewhere(self, content: Content, token: str) -> None:
        """A wait for what another body issued: the map has only its dispatch."""
        d = self.times.d()
        self.line(content, Kind.WAIT, "wait", (d,), waits=token)
        content.map = content.map.host(d)

    def beside(self, content: Content, name: str) -> None:
        """A collective with compute beside it; "y" is only used so, "x" also elsewhere."""
        self.issue(content, name, "x" if self.times.with_channel and self.times.draw.random() < 0.3 else "y")
        for _ in range(self.times.draw.randint(0, 2)):
            self.compute(content)
        self.wait(content, name)


CHOOSE = ("interleaved_1f1b", "interleaved_zb", "looped_bfs")
"""Schedules whose chunks per rank the caller chooses."""


def random_schedule(draw: random.Random, name: str, most: int = 12, most_ranks: int = 4) -> Schedule:
    """A member of a family, or "custom": any order that can run, stages placed at random."""
    if name == "custom":
        return _custom_schedule(draw, most_ranks, min(most, 8))
    while True:
        virtual = draw.randint(1, 3) if name in CHOOSE else None
        try:
            return make_schedule(name, draw.randint(1, most_ranks), draw.randint(1, most), virtual=virtual)
        except ScheduleError:
            continue


def _custom_schedule(draw: random.Random, most_ranks: int, most: int) -> Schedule:
    num_ranks, num_micro_batches, split = draw.randint(1, most_ranks), draw.randint(1, most), draw.random() < 0.5
    num_stages = draw.randint(num_ranks, 3 * num_ranks)
    placement = [*range(num_ranks), *(draw.randrange(num_ranks) for _ in range(num_stages - num_ranks))]
    draw.shuffle(placement)
    done = {kind: [0] * num_stages for kind in "FBW"}  # B: whole or of the input
    order: list[list[Action]] = [[] for _ in range(num_ranks)]
    left = num_stages * num_micro_batches * (3 if split else 2)
    while left:
        rank = draw.randrange(num_ranks)
        ready = []
        for stage in (stage for stage in range(num_stages) if placement[stage] == rank):
            forwards, backwards, weights = (done[kind][stage] for kind in "FBW")
            if forwards < num_micro_batches and (stage == 0 or done["F"][stage - 1] > forwards):
                ready.append((stage, "F", "F"))
            if backwards < forwards and (stage == num_stages - 1 or done["B"][stage + 1] > backwards):
                ready.append((stage, "B", "I" if split else "B"))
            if split and weights < backwards:
                ready.append((stage, "W", "W"))
        if ready:
            stage, counted, kind = draw.choice(ready)
            order[rank].append(Action(stage=stage, kind=ActionKind(kind), micro_batch=done[counted][stage]))
            done[counted][stage] += 1
            left -= 1
    return Schedule.from_order(order, num_stages=num_stages, num_micro_batches=num_micro_batches, placement=placement)


def rank_ends(timeline: Timeline, num_ranks: int, step: int) -> list[int]:
    """When each rank of a timeline has ended a step."""
    ends = np.zeros(num_ranks, dtype=np.int64)
    rows = timeline.step == step
    np.maximum.at(ends, timeline.rank[rows], timeline.end_ps[rows])
    return ends.tolist()


def crossing(schedule: Schedule, stage: int, kind: str) -> tuple[int | None, int | None]:
    """The stages from which an action receives and to which it sends."""
    before = stage - 1 if stage else None
    behind = stage + 1 if stage < schedule.num_stages - 1 else None
    return {"F": (before, behind), "B": (behind, before), "I": (behind, before), "W": (None, None)}[kind]


def way(kind: str) -> str:
    return "F" if kind == "F" else "B"


def random_pipeline(
    schedule: Schedule, times: Drawn, transfer: tuple[int, ...] = (0, 5, 20)
) -> tuple[Program, PipelineCosts]:
    """A program for the schedule, and its costs (no batch)."""
    stages, draw = range(schedule.num_stages), times.draw
    ways = {kind: [draw.choice(transfer) for _ in stages] for kind in "FB"}
    receive = {kind: [times.d() for _ in stages] for kind in "FB"}
    wait_dispatch = [times.d() for _ in range(schedule.num_ranks)]
    writers = [Writer(rank, times, schedule) for rank in range(schedule.num_ranks)]
    begins, gathered = [], {}
    for writer in writers:
        content = writer.new()
        for stage in schedule.stages_of(writer.rank) if times.with_channel else ():
            if draw.random() < 0.6:
                writer.issue(content, f"gather{stage}", "x", Scope.STEP)
                gathered[stage] = max(content.map.rows[f"gather{stage}"].values())
        begins.append(content)
    closing = closing_variants(schedule)
    bodies = {}
    for stage in stages:
        for variant in VARIANTS:
            reduces = times.with_channel and closing[stage] == variant
            writer = writers[schedule.placement[stage]]
            bodies[stage, variant] = _body(writer, stage, variant, ways, gathered.get(stage), reduces)
    ends, groups = [], []
    for writer in writers:
        end = _end(writer, bodies)
        ends.append(end.map)
        blocks = _blocks(writer, bodies, begins[writer.rank], end, ways, receive, wait_dispatch[writer.rank])
        mesh = Layout((1,), ("one",), (writer.rank,))
        groups.append(GroupProgram(mesh=mesh, values=writer.values, blocks=tuple(blocks)))
    used = {"FBIW"[kind] for kind in set(schedule.table.kind.tolist())}
    costs = PipelineCosts(
        maps={
            variant: MaxPlus.stack([_named(bodies[stage, variant].map) for stage in stages])
            for variant in VARIANTS
            if variant[0] in used
        },
        transfer_ps=ways,
        receive_dispatch_ps=receive,
        begin=MaxPlus.stack([_from_start(content.map) for content in begins]),
        end=MaxPlus.stack(ends),
        wait_dispatch_ps=wait_dispatch,
    )
    return Program(groups=tuple(groups), num_micro_batches=schedule.num_micro_batches), costs


def closing_variants(schedule: Schedule) -> dict[int, str]:
    """For each stage what its last backward is: B.last or W.last."""
    return {
        action.stage: f"{action.kind}.last" for actions in schedule.order for action in actions if action.kind in "BW"
    }


def _body(writer: Writer, stage: int, variant: str, ways: dict, gathered: int | None, reduces: bool) -> Content:
    content, draw, times = writer.new(), writer.times.draw, writer.times
    receives, sends = crossing(writer.schedule, stage, variant[0])
    things = ["compute"] * draw.randint(0, 2) + ["beside"] * draw.randint(0, 1)
    for thing, wanted in (("arrive", receives is not None), ("send", sends is not None)):
        if wanted:
            things.insert(
                draw.randint(things.index("arrive") + 1 if thing == "send" and "arrive" in things else 0, len(things)),
                thing,
            )
    if variant == "F.first" and gathered is not None:
        things.insert(draw.randint(0, len(things)), "gathered")
    if reduces:
        things.insert(draw.randint(0, len(things)), "reduce")
    for number, thing in enumerate(things):
        if thing == "compute":
            writer.compute(content)
        elif thing == "beside":
            writer.beside(content, f"beside{stage}{variant}{number}")
        elif thing == "arrive":
            writer.wait_elsewhere(content, f"{receives}>{stage}.{way(variant[0])}.recv")
            content.map = content.map.wait_for("arrival")
        elif thing == "gathered":
            writer.wait_elsewhere(content, f"gather{stage}")
            content.map = MaxPlus(rows={**content.map.rows, "gathered": {"start": gathered}})
            content.map = content.map.wait_for("gathered").drop("gathered")
        elif thing == "send":
            d, channel = times.d(), f"{stage}>{sends}.{way(variant[0])}"
            writer.line(
                content, Kind.SEND, "transfer", (d, ways[way(variant[0])][stage]), channel=channel,
                token=writer.token(f"{channel}.send"), pieces=_pieces(writer.schedule, stage, sends),
            )  # fmt: skip
            content.map = content.map.host(d).mark("sent")
        else:
            writer.issue(content, f"reduce{stage}", "x", Scope.STEP)
            writer.reductions.append((f"reduce{stage}", stage))
    return content


def _end(writer: Writer, bodies: dict) -> Content:
    """Waits for the reductions, each followed by an update; what each leaves to do goes into the "final" of its map."""
    content = writer.new()
    writer.compute(content)
    rests: list[int] = []
    draw = writer.times.draw
    draw.shuffle(writer.reductions)
    for token, _ in writer.reductions:
        writer.wait_elsewhere(content, token)
        taken = writer.compute(content)
        rests = [rest + taken for rest in rests] + [taken]
    closing = closing_variants(writer.schedule)
    for (token, stage), rest in zip(writer.reductions, rests, strict=True):
        body = bodies[stage, closing[stage]]
        final = {before: constant + rest for before, constant in body.map.rows[token].items()}
        body.map = MaxPlus(rows={**body.map.drop(token).rows, "final": final})
    return content


def _blocks(
    writer: Writer, bodies: dict, begin: Content, end: Content, ways: dict, receive: dict, wait_dispatch: int
) -> list[Block]:
    schedule, order = writer.schedule, writer.schedule.order[writer.rank]
    blocks = [Block(label="begin", micro_batch=BEGIN, body=Body(name="begin", instructions=tuple(begin.lines)))]
    received: dict[tuple[int, str], Body] = {}
    closed = {action.stage: place for place, action in enumerate(order) if action.kind in "BW"}
    opened: dict[int, int] = {}
    for place, action in enumerate(order):
        if action.kind == "F":
            opened.setdefault(action.stage, place)
    sent = _sent_blocks(schedule, writer.rank, wait_dispatch)
    for place, action in enumerate(order):
        for other in order[place + 1 : place + 2] if place else order[:2]:
            source, _ = crossing(schedule, other.stage, other.kind)
            if source is None:
                continue
            if (other.stage, other.kind) not in received:
                content, channel = writer.new(), f"{source}>{other.stage}.{way(other.kind)}"
                price = (receive[way(other.kind)][other.stage], ways[way(other.kind)][source])
                writer.line(
                    content, Kind.RECV, "transfer", price, channel=channel, token=writer.token(f"{channel}.recv"),
                    pieces=_pieces(schedule, source, other.stage),
                )  # fmt: skip
                received[other.stage, other.kind] = Body(name=f"{channel}.recv", instructions=tuple(content.lines))
            body = received[other.stage, other.kind]
            blocks.append(Block(label=f"{other}.recv", micro_batch=other.micro_batch, body=body))
        variant = str(action.kind)
        if opened.get(action.stage) == place:
            variant = "F.first"
        elif closed.get(action.stage) == place:
            variant = f"{variant}.last"
        body = Body(name=variant, instructions=tuple(bodies[action.stage, variant].lines))
        blocks.append(Block(label=str(action), micro_batch=action.micro_batch, body=body))
        blocks += sent.get(place, [])
    blocks.append(Block(label="end", micro_batch=END, body=Body(name="end", instructions=tuple(end.lines))))
    return [*blocks, *sent.get(-1, [])]


def _sent_blocks(schedule: Schedule, rank: int, wait_dispatch: int) -> dict[int, list[Block]]:
    """Place on a rank -> the waits for sends behind it; -1: at the end of the step."""
    table, needed = schedule.table, remote_dependencies(schedule)
    receivers = np.flatnonzero(needed >= 0)
    first, stop = table.rank_start[rank : rank + 2].tolist()
    found: dict[int, list[Block]] = {}
    released_rows = release_rows(schedule, needed[receivers], receivers)
    for row, released in sorted(zip(needed[receivers].tolist(), released_rows.tolist(), strict=True)):
        if first <= row < stop:
            action = schedule.order[rank][row - first]
            _, target = crossing(schedule, action.stage, action.kind)
            line = Instruction(
                name="over", kind=Kind.WAIT, call="wait", part="C", attrs={"price": (wait_dispatch,)},
                waits=f"{action.stage}>{target}.{way(action.kind)}.send",
            )  # fmt: skip
            block = Block(
                label=f"{action}.sent", micro_batch=action.micro_batch, body=Body(name="", instructions=(line,))
            )
            found.setdefault(released - first if released >= 0 else -1, []).append(block)
    return found


def _pieces(schedule: Schedule, source: int, target: int) -> TransferPieces:
    return TransferPieces(
        [Piece(src_rank=schedule.placement[source], dst_rank=schedule.placement[target], region=((0, 1),))]
    )


def _named(own: MaxPlus) -> MaxPlus:
    """With "x" as the channel; "y" is always waited for, so that it is over before what follows begins."""
    rows = {
        {"x": "channel0"}.get(clock, clock): {
            {"x": "channel0"}.get(before, before): constant for before, constant in row.items() if before != "y"
        }
        for clock, row in own.rows.items()
        if clock != "y"
    }
    return MaxPlus(rows=rows)


def _from_start(own: MaxPlus) -> MaxPlus:
    rows = {clock: {"start": max(row.values())} for clock, row in own.rows.items() if clock[:6] != "gather"}
    channel = rows.pop("x", {"start": 0})
    return MaxPlus(rows={**rows, "channel0": channel})
