"""The engine against the longest path through a graph of everything that must precede what, on random programs.

Without contention a program is a graph of events; an event happens when the last of its predecessors has happened and
the edge to it has passed. The graph is written down here instruction by instruction and solved with a topological sort;
the engine knows nothing of it.
"""

import random
from dataclasses import dataclass, field
from graphlib import TopologicalSorter

import pytest

from plans.program import GroupProgram, Instruction, Kind, Program
from simulator import run_program
from tests.support.handmade import Script, program_of, written_price


def random_scripts(seed: int) -> list[Script]:
    """Programs that cannot deadlock: what several ranks do together is written to all of them at one moment."""
    draw = random.Random(seed)
    scripts = [Script(rank) for rank in range(draw.randint(1, 5))]
    open_tokens: dict[int, list[str]] = {script.rank: [] for script in scripts}

    def price() -> tuple[int, int, int]:
        # processor time stays whole when it is spread over up to three pairs
        return draw.choice((0, 1, 4)), draw.choice((0, 3, 10, 31)), draw.choice((0, 0, 6, 12))

    def token(script: Script, name: str, may_block: bool) -> str | None:
        if may_block and draw.random() < 0.4:
            return None
        if draw.random() < 0.9:
            open_tokens[script.rank].append(name)
        return name

    for number in range(draw.randint(3, 40)):
        choice = draw.random()
        if choice < 0.5:
            draw.choice(scripts).compute(f"n{number}", draw.randint(0, 20), draw.randint(0, 6))
        elif choice < 0.65:
            members = draw.sample(scripts, draw.randint(1, len(scripts)))
            ranks, channel = [script.rank for script in members], draw.choice("xy")
            for script in members:
                script.collective(
                    f"n{number}", ranks, price(), token(script, f"t{number}", True), channel
                )  # fmt: skip
        elif choice < 0.85:
            pairs = list(dict.fromkeys((draw.choice(scripts).rank, draw.choice(scripts).rank) for _ in range(3)))
            may_block = len(pairs) == 1 and pairs[0][0] != pairs[0][1]
            for script in scripts:
                if any(script.rank == source for source, _ in pairs):
                    script.send(f"n{number}", pairs, price(), token(script, f"t{number}.send", may_block))
                if any(script.rank == target for _, target in pairs):
                    script.recv(f"n{number}", pairs, price(), token(script, f"t{number}.recv", may_block))
        else:
            script = draw.choice(scripts)
            if open_tokens[script.rank]:
                taken = open_tokens[script.rank].pop(draw.randrange(len(open_tokens[script.rank])))
                script.wait(taken, (draw.choice((0, 2)),))
    return scripts


@dataclass
class Events:
    """Events with edges (predecessor, length)."""

    edges: dict[object, list[tuple[object, int]]] = field(default_factory=dict)

    def add(self, event: object, *edges: tuple[object, int]) -> object:
        self.edges.setdefault(event, []).extend(edges)
        return event

    def times(self) -> dict[object, int]:
        order = TopologicalSorter({event: {before for before, _ in edges} for event, edges in self.edges.items()})
        times: dict[object, int] = {}
        for event in order.static_order():
            times[event] = max((times[before] + length for before, length in self.edges.get(event, ())), default=0)
        return times


def pairs_of(instruction: Instruction, rank: int) -> list[tuple[int, int]]:
    side = "src_rank" if instruction.kind is Kind.SEND else "dst_rank"
    return [
        (piece.src_rank, piece.dst_rank) for piece in instruction.pieces if getattr(piece, side) == rank
    ]  # fmt: skip


def add_rank(events: Events, group: GroupProgram, num_steps: int, host_async: bool, works: dict) -> None:
    rank = group.ranks[0]
    host = stream = events.add(("start", rank))
    tails: dict[tuple, object] = {}
    for step in range(num_steps):
        tokens: dict[str, object] = {}
        over: list[object] = []
        for block, instruction in group.walk():
            dispatch, work, cpu = (*instruction.attrs["price"], 0, 0, 0)[:3]
            here = (rank, step, f"{block.label}/{instruction.name}", str(instruction.kind))
            if instruction.kind is Kind.COMPUTE:
                if host_async:
                    host = events.add(("issued", *here), (host, dispatch))
                    begin = events.add(("begin", *here), (host, 0), (stream, 0))
                else:
                    begin, dispatch, work = events.add(("begin", *here), (host, 0)), 0, dispatch + work
                stream = events.add(("end", *here), (begin, work))
                host = host if host_async else stream
                continue
            pairs = pairs_of(instruction, rank)
            if instruction.kind in (Kind.SEND, Kind.RECV) and not pairs:
                continue
            host = events.add(("issued", *here), (host, dispatch))
            if instruction.kind is Kind.WAIT:
                end = tokens[instruction.waits]
            else:
                direction = (instruction.channel, str(instruction.kind))
                arrival = events.add(("arrival", *here), (host, 0), (stream if host_async else host, 0))
                if direction in tails:
                    events.add(arrival, (tails[direction], 0))
                end = tails[direction] = events.add(("end", *here), (arrival, 0))
                join(events, instruction, group, rank, step, here, arrival, end, pairs, (work, cpu), works)
                over.append(end)
                if instruction.token is not None:
                    tokens[instruction.token] = end
                    continue
            if host_async:
                stream = events.add(("go on", *here), (stream, 0), (end, 0))
            else:
                host = events.add(("go on", *here), (host, 0), (end, 0))
        host = stream = events.add(("step", rank, step), (host, 0), (stream, 0), *((end, 0) for end in over))


def join(events, instruction, group, rank, step, here, arrival, end, pairs, price, works) -> None:
    """A meeting begins with its last member and lasts the longest processor time, then the longest work."""
    if instruction.kind is Kind.COLLECTIVE:
        meetings = [(("meeting", step, here[2], group.members(instruction, rank)), price[1])]
    else:
        far = [pair for pair in pairs if pair[0] != pair[1]]
        meetings = []
        for pair in pairs:
            meeting = ("meeting", step, instruction.name, pair)
            if pair[0] != pair[1]:
                share = price[1] // len(far) + (price[1] % len(far) if pair == far[0] else 0)
                meetings.append((meeting, share))
            elif instruction.kind is Kind.SEND:
                events.add(("handed", *meeting), (arrival, 0))
            else:
                events.add(end, (("handed", *meeting), 0))
    for meeting, cpu in meetings:
        events.add(meeting, (arrival, 0))
        events.add(end, (("over", *meeting), 0))
        works.setdefault(meeting, []).append((price[0], cpu))


def expected(program: Program, num_steps: int, host_async: bool) -> dict[tuple, tuple[int, int]]:
    """(rank, step, id, call) -> (start, end) of every COMPUTE; of communication only the end."""
    events, works = Events(), {}
    for group in program.groups:
        add_rank(events, group, num_steps, host_async, works)
    for meeting, prices in works.items():
        events.add(("over", *meeting), (meeting, max(cpu for _, cpu in prices) + max(work for work, _ in prices)))
    times = events.times()
    found = {}
    for event, time in times.items():
        if event[0] == "end":
            found[event[1:]] = (times.get(("begin", *event[1:]), -1), time)
    return found


@pytest.mark.parametrize("host_async", [True, False])
@pytest.mark.parametrize("block", range(6))
def test_equals_the_longest_path(block, host_async):
    for seed in range(30 * block, 30 * block + 30):
        program = program_of(random_scripts(seed))
        num_steps = 1 + seed % 3
        timeline = run_program(program, written_price, num_steps=num_steps, host_async=host_async)
        wanted = sorted(
            (rank, step, id_, end, start if kind == "compute" else -1)
            for (rank, step, id_, kind), (start, end) in expected(program, num_steps, host_async).items()
        )
        got = sorted(
            (span.rank, span.step, span.id, span.end_ps, span.start_ps if span.stream == "compute" else -1)
            for span in timeline.spans()
            if span.stream != "host"
        )
        assert got == wanted, f"seed {seed}"


@pytest.mark.parametrize("host_async", [True, False])
def test_scaling_all_times_scales_the_result(host_async):
    for seed in range(40):
        program = program_of(random_scripts(seed))
        plain = run_program(program, written_price, num_steps=2, host_async=host_async)

        def longer(instruction: Instruction, group: GroupProgram):
            price = written_price(instruction, group)
            return type(price)(price.dispatch_ps * 1000, price.work_ps * 1000, price.cpu_ps * 1000)

        scaled = run_program(program, longer, num_steps=2, host_async=host_async)
        assert (scaled.end_ps == plain.end_ps * 1000).all()
        assert (scaled.start_ps == plain.start_ps * 1000).all()
