"""Programs with equal ranks folded, against the same programs with every rank."""

import random
from collections import Counter
from fractions import Fraction

import msgspec
import numpy as np
import pytest

import twofold as tf
from costmodels import Machine
from costmodels.machine.sections import Overlap
from costmodels.price.instruction import price
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.lower import lower
from plans.program import Block, Body, GroupProgram, Instruction, Kind, Program, Value
from plans.redistribution import Piece, TransferPieces
from simulator import WhatIf, run_program, simulate
from simulator.engine.exchange import Loads
from simulator.engine.network import Ports
from tests.support.handmade import Price
from tests.support.small_machine import small_machine


def spans_by_rank(timeline):
    found = {rank: [] for rank in timeline.represents}
    for span in timeline.spans():
        found[span.rank].append((span.step, span.stream, span.start_ps, span.end_ps, span.id, span.call))
    return {rank: tuple(sorted(spans)) for rank, spans in found.items()}


def check_equal(folded, whole):
    """The ranks that are there have their spans, and they stand for ranks that have the same ones."""
    own, all_ = spans_by_rank(folded), spans_by_rank(whole)
    assert all(own[rank] == all_[rank] for rank in own)
    counted = Counter()
    for rank, count in folded.represents.items():
        counted[own[rank]] += count
    assert counted == Counter(all_.values())
    assert (folded.step_start_ps, folded.step_end_ps) == (whole.step_start_ps, whole.step_end_ps)
    assert folded.bubble_fraction == pytest.approx(whole.bubble_fraction, rel=1e-12)
    assert folded.exposed_comm_s == pytest.approx(whole.exposed_comm_s, rel=1e-12)
    assert folded.peak_bytes == whole.peak_bytes


def model(batch_size, num_layers, dtype="bfloat16"):
    config = tf.TransformerConfig(
        num_layers=num_layers, hidden=64, num_heads=4, num_kv_heads=4, head_dim=16, ffn=128, vocab=256, seq=32,
        dtype=dtype,
    )  # fmt: skip
    return tf.transformer(config, batch_size=batch_size)


@pytest.mark.parametrize(("schedule", "virtual", "zero"), [("1f1b", 1, 0), ("interleaved_1f1b", 2, 3), ("zb_v", 2, 1)])
def test_lowered_plans(schedule, virtual, zero):
    machine = Machine.load("h100-sxm-x8")
    plan = tf.uniform_plan(
        model(8, 2 * virtual), machine, dp=2, tp=2, pp=2, micro_batch=1, schedule=schedule, virtual=virtual, zero=zero
    )
    program = lower(plan)

    def cost_of(instruction, group):
        return price(instruction, group, machine, 8)

    def overlap(compute, comm, compute_s, comm_s):
        return (0.7, 0.8) if compute.call.startswith("linear") else (0.9, 1.0)

    for options in ({}, {"overlap": overlap, "with_memory": False}, {"host_async": False, "with_memory": False}):
        folded = run_program(program, cost_of, num_steps=2, fold_ranks=True, **options)
        assert len(folded.represents) == 2
        check_equal(folded, run_program(program, cost_of, num_steps=2, **options))


def random_group(draw, ranks, name, transfers):
    """Compute, collectives over axes or over all, and its ends of the transfers, each in a block of its own."""
    values, blocks = {}, []
    mesh = Layout((len(ranks) // 2, 2), ("a", "b"), ranks)
    for number in range(draw.randint(1, 4)):
        kind = draw.choice((Kind.COMPUTE, Kind.COLLECTIVE))
        axes = draw.choice((("a",), ("b",), ("a", "b"))) if kind is Kind.COLLECTIVE else ()
        call = "all_reduce" if axes else "linear.forward"
        price_ = (draw.choice((0, 3)), draw.randint(0, 20))
        blocks.append((f"own{number}", kind, call, {"axes": axes, "channel": "c" if axes else ""}, price_))
    for id_, kind, pieces, work in transfers:
        if kind is Kind.SEND:
            values[f"{id_}.token"] = Value(name=f"{id_}.token", shape=(), role="token")
        rest = {"pieces": pieces, "channel": id_, "token": f"{id_}.token" if kind is Kind.SEND else None}
        sent = max((at + 1 for at, block in enumerate(blocks) if block[0] == id_), default=0)  # a RECV comes after
        blocks.insert(draw.randint(sent, len(blocks)), (id_, kind, "transfer", rest, (1, work)))
    lines = [
        Instruction(name=id_, kind=kind, call=call, part="F", attrs={"price": price_}, **rest)
        for id_, kind, call, rest, price_ in blocks
    ]
    body = Body(name=name, instructions=tuple(lines))
    return GroupProgram(mesh=mesh, values=values, blocks=(Block(label=name, micro_batch=0, body=body),))


def random_program(draw):
    """Two groups; the ranks of the first send to some of the second, at random or in a pattern."""
    first, second = tuple(range(8)), tuple(range(8, 8 + draw.choice((4, 8))))
    chosen = draw.choice((second, second[: len(second) // 2], second[::2]))
    pieces = TransferPieces(
        Piece(src_rank=draw.choice(first) if draw.random() < 0.2 else first[at % 8], dst_rank=to, region=((0, 1),))
        for at, to in enumerate(chosen)
    )
    work = draw.randint(0, 30)
    groups = (
        random_group(draw, first, "first", [("x", Kind.SEND, pieces, work)]),
        random_group(draw, second, "second", [("x", Kind.RECV, pieces, work)]),
    )
    return Program(groups=groups, num_micro_batches=1)


def test_groups_whose_ranks_are_not_all_equal():
    num_folded = num_split = 0
    for seed in range(80):
        program = random_program(random.Random(seed))

        def cost_of(instruction, group):
            return Price(*instruction.attrs["price"])

        folded = run_program(program, cost_of, num_steps=2, fold_ranks=True, with_memory=False)
        check_equal(folded, run_program(program, cost_of, num_steps=2, with_memory=False))
        num_folded += len(folded.represents) < program.num_ranks
        num_split += 2 < len(folded.represents) < program.num_ranks
    assert num_folded > 25
    assert num_split > 10


def among_themselves(draw):
    """Ranks of one group send each other something, in one direction, in circles, or all of them in parts of them."""
    count, part = 8, draw.choice((2, 4, 8))
    shift = draw.randrange(1, 8)
    pairs = {
        "circle": [(rank, (rank + shift) % count) for rank in range(count)],
        "back and forth": [(rank, rank ^ shift) for rank in range(count)],
        "parts": [(one, two) for one in range(count) for two in range(count) if one // part == two // part],
        "two ways": [(rank, rank ^ bit) for rank in range(count) for bit in (1, shift)],
        "one way": [(rank, rank + 4) for rank in range(4)],
    }[draw.choice(("circle", "back and forth", "parts", "two ways", "one way"))]
    pieces = TransferPieces(Piece(src_rank=one, dst_rank=two, region=((0, 1),)) for one, two in dict.fromkeys(pairs))
    work = draw.randint(0, 30)
    transfers = [("x", Kind.SEND, pieces, work), ("x", Kind.RECV, pieces, work)]
    return Program(groups=(random_group(draw, tuple(range(count)), "ranks", transfers),), num_micro_batches=1)


class Distant:
    """Links whose use takes longer between nodes of two ranks, and of which each node has one that its ranks share."""

    def work_ps(self, instruction, members, work_ps):
        return work_ps * (1 + 2 * (members[0] // 2 != members[-1] // 2))

    def claims(self, instruction, members, work_ps):
        nodes = sorted({member // 2 for member in members})
        return tuple((node, Fraction(2, 3)) for node in nodes) if len(nodes) > 1 and work_ps else ()

    def works_ps(self, instruction, members, work_ps):
        return np.array([self.work_ps(instruction, each, work_ps) for each in members.tolist()], dtype=np.int64)

    def loads(self, instruction, members, work_ps):
        found = [
            (number, link)
            for number, (each, work) in enumerate(zip(members.tolist(), work_ps.tolist(), strict=True))
            for link, _ in self.claims(instruction, each, work)
        ]
        meetings, links = np.array(found, dtype=np.int64).reshape(-1, 2).T
        return Loads(meetings, links, np.full(len(links), 2))

    def link_number(self, link):
        return link


def test_equal_ranks_that_send_each_other_something():
    num_folded: Counter[str] = Counter()
    for seed in range(150):
        draw = random.Random(2000 + seed)
        program = among_themselves(draw)
        name, options = draw.choice(("plain", "distant")), options_of(draw)

        def settings(name=name, options=options):
            return options() | ({"wires": Distant()} if name == "distant" else {})

        def cost_of(instruction, group):
            return Price(*instruction.attrs["price"])

        folded, whole = (
            run_program(program, cost_of, num_steps=2, fold_ranks=fold_ranks, with_memory=False, **settings())
            for fold_ranks in (True, False)
        )
        check_equal(folded, whole)
        num_folded[name] += len(folded.represents) < program.num_ranks
    assert min(num_folded.values()) > 50


def test_many_ranks_are_simulated_as_their_kinds():
    """Data-parallel width changes neither how many ranks are simulated nor what memory they need."""
    found = []
    for dp in (40, 80):
        machine = Machine.load(f"h100-sxm-x{dp * 8}")
        plan = tf.uniform_plan(model(2 * dp, 4), machine, dp=dp, tp=2, pp=4, micro_batch=1)
        timeline = simulate(plan, machine, num_steps=1, fold_ranks=True)
        found.append(timeline)
        assert sorted(timeline.represents.values()) == [2 * dp] * 4
        assert [each.rank for each in timeline.memory] == [0, 2 * dp, 4 * dp, 6 * dp]
    assert len(found[0].rank) == len(found[1].rank)
    assert found[0].peak_bytes == found[1].peak_bytes


# ------------------------------------------------------------------------------------ slow ranks and shared links


def options_of(draw):
    """What ranks share; made again for every run."""
    overlap = lambda compute, comm, compute_s, comm_s: (0.7, 0.8)  # noqa: E731
    name = draw.choice(("nothing", "host", "overlap", "ports", "ports and overlap"))
    return lambda: {
        "nothing": {}, "host": {"host_async": False}, "overlap": {"overlap": overlap}, "ports": {"wires": Ports()},
        "ports and overlap": {"overlap": overlap, "wires": Ports()},
    }[name]  # fmt: skip


def test_slow_ranks_and_shared_ports_on_random_programs():
    num_folded = 0
    for seed in range(100):
        draw = random.Random(1000 + seed)
        program = random_program(draw)
        slow = {draw.randrange(program.num_ranks): draw.choice((1.5, 2.0)) for _ in range(draw.randint(0, 2))}

        def cost_of(instruction, group):
            return Price(*instruction.attrs["price"])

        options = options_of(draw)
        folded, whole = (
            run_program(
                program, cost_of, num_steps=2, fold_ranks=fold_ranks, with_memory=False, slowdown=slow, **options()
            )
            for fold_ranks in (True, False)
        )
        check_equal(folded, whole)
        num_folded += len(folded.represents) < program.num_ranks
    assert num_folded > 30


@pytest.mark.parametrize("uplink_Bps", [None, 11e9, 60e9])
@pytest.mark.parametrize("slow", [{}, {5: 1.3}, {0: 1.2, 13: 1.2}, {3: 1.1, 12: 1.7}])
def test_a_slow_rank_leaves_few_kinds_of_ranks(slow, uplink_Bps):
    """Along each axis the groups with a slow rank and those without, on links that ranks share."""
    overlap = (Overlap(compute="matrix", collective="all_reduce", compute_rate=0.8, comm_rate=0.6),)
    machine = small_machine(16, uplink_Bps=uplink_Bps, overlap=overlap)
    plan = tf.uniform_plan(model(8, 2, "float32"), machine, dp=4, tp=2, pp=2, micro_batch=1)
    what_if = WhatIf(slowdown=slow)
    folded, whole = (
        simulate(plan, machine, num_steps=2, what_if=what_if, fold_ranks=fold_ranks) for fold_ranks in (True, False)
    )
    check_equal(folded, whole)
    if len(slow) < 2 and not uplink_Bps:
        assert len(folded.represents) == (8 if slow else 2)  # two along each axis
    spelled = folded.spelled_out()
    assert spans_by_rank(spelled) == spans_by_rank(whole)
    assert spelled.memory == whole.memory
    assert simulate(plan, machine, num_steps=2, what_if=what_if).memory == whole.memory


def test_one_slow_rank_of_many():
    """A slow rank in dp x tp: itself, its two groups, and all the others."""
    machine = Machine.load("h100-sxm-x64")
    plan = tf.uniform_plan(model(16, 2), machine, dp=16, tp=4, pp=1, micro_batch=1)
    timeline = simulate(plan, machine, num_steps=1, what_if=WhatIf(slowdown={21: 1.1}), fold_ranks=True)
    assert sorted(timeline.represents.values()) == [1, 3, 15, 45]


@pytest.mark.parametrize("fold_ranks", [True, False])
def test_messages_that_int64_does_not_hold_are_refused(fold_ranks):
    machine = Machine.load("h100-sxm-x8")
    slow = msgspec.structs.replace(machine.collectives["all_reduce"], link_fraction=1e-16)
    machine = msgspec.structs.replace(machine, collectives={**machine.collectives, "all_reduce": slow})
    plan = tf.uniform_plan(model(8, 2), machine, dp=4, tp=2, pp=1, micro_batch=1)
    with pytest.raises(TwofoldError, match="prices of a step add up to over"):
        simulate(lower(plan), machine, with_memory=False, fold_ranks=fold_ranks)
