"""Links in tiers and graphs: shared ports and uplinks, degraded and failed links, by hand."""

import itertools
import math
import random

import msgspec
import pytest

from costmodels import mesh_group, price_collective
from costmodels.machine.machine import Link
from costmodels.machine.topologies import torus
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.program import Block, Body, GroupProgram, Instruction, Kind, Program, Scope, Value
from plans.redistribution import Piece, TransferPieces
from simulator import LinkChange, WhatIf, simulate
from simulator.engine.network import Network
from tests.support.small_machine import GB, small_machine

MS = 10**9


class Ranks:
    """A program by rank: transfers and collectives of that many bytes, one after the other or side by side."""

    def __init__(self, num_ranks: int) -> None:
        self.lines: list[list[Instruction]] = [[] for _ in range(num_ranks)]
        self.tokens: list[dict[str, Value]] = [{} for _ in range(num_ranks)]
        self.number = 0

    def transfer(self, pairs: list[tuple[int, int]], size_bytes: int) -> None:
        """One transfer of several pairs, each of `size_bytes`, that nobody waits for until the end."""
        self.number += 1
        pieces = TransferPieces(
            Piece(src_rank=source, dst_rank=target, region=((0, size_bytes // 4),)) for source, target in pairs
        )
        for kind, ranks in ((Kind.SEND, {s for s, _ in pairs}), (Kind.RECV, {t for _, t in pairs})):
            for rank in sorted(ranks):
                self._add(
                    rank, kind, "transfer", pieces=pieces, channel=f"x{self.number}", message_bytes=size_bytes
                )  # fmt: skip

    def collective(self, call: str, members: list[int], size_bytes: int) -> None:
        self.number += 1
        mesh = Layout((len(members),), ("axis",), members)
        for rank in members:
            self._add(
                rank, Kind.COLLECTIVE, call, mesh=mesh, axes=("axis",), channel=f"c{self.number}",
                message_bytes=size_bytes,
            )  # fmt: skip

    def _add(self, rank: int, kind: Kind, call: str, **rest: object) -> None:
        name = f"n{self.number}.{kind}"
        token = f"t.{name}"
        self.tokens[rank][token] = Value(name=token, shape=(), scope=Scope.STEP, role="token")
        self.lines[rank].append(Instruction(name=name, kind=kind, call=call, part="C", token=token, **rest))

    def program(self) -> Program:
        groups = tuple(
            GroupProgram(
                mesh=Layout((1,), ("one",), (rank,)), values=self.tokens[rank],
                blocks=(Block(label="meet", micro_batch=0, body=Body(name="meet", instructions=tuple(lines))),),
            )
            for rank, lines in enumerate(self.lines)
        )  # fmt: skip
        return Program(groups=groups, num_micro_batches=1)


def ends(ranks: Ranks, machine, **settings) -> dict[str, int]:
    """instruction -> when it ends, in whole milliseconds of picoseconds."""
    timeline = simulate(ranks.program(), machine, num_steps=1, **settings)
    return {span.id: span.end_ps for span in timeline.spans() if span.stream == "comm"}


def test_one_transfer_has_its_link_for_itself():
    ranks = Ranks(8)
    ranks.transfer([(0, 4)], 10**8)
    assert set(ends(ranks, small_machine()).values()) == {10 * MS}  # 0.1 GB over 10 GB/s
    assert set(ends(ranks, small_machine(uplink_Bps=10 * GB)).values()) == {10 * MS}


def test_an_uplink_is_shared_by_what_leaves_a_node():
    ranks = Ranks(8)
    ranks.transfer([(0, 4)], 10**8)
    ranks.transfer([(1, 5)], 2 * 10**8)
    alone = ends(ranks, small_machine())
    assert {alone["meet/n1.send"], alone["meet/n2.send"]} == {10 * MS, 20 * MS}
    # both at half rate until 20 ms, then the longer one has 10 ms left
    shared = ends(ranks, small_machine(uplink_Bps=10 * GB))
    assert (shared["meet/n1.recv"], shared["meet/n2.recv"]) == (20 * MS, 30 * MS)
    # an uplink for one and a half of them: each at 3/4 rate: 10 / 0.75, then what is left
    wider = ends(ranks, small_machine(uplink_Bps=15 * GB))
    assert wider["meet/n1.recv"] == -(-10 * MS * 4 // 3)
    assert wider["meet/n2.recv"] == pytest.approx(10 * MS * 4 / 3 + 10 * MS, abs=2)


def test_both_directions_of_an_uplink_are_apart():
    ranks = Ranks(8)
    ranks.transfer([(0, 4)], 10**8)
    ranks.transfer([(5, 1)], 10**8)
    assert set(ends(ranks, small_machine(uplink_Bps=10 * GB)).values()) == {10 * MS}


def test_what_stays_inside_a_node_does_not_feel_the_uplink():
    ranks = Ranks(8)
    ranks.transfer([(0, 4)], 10**8)
    ranks.transfer([(1, 2)], 10**9)
    assert set(ends(ranks, small_machine(uplink_Bps=10 * GB)).values()) == {10 * MS}


def test_a_collective_and_a_transfer_share_an_uplink():
    ranks = Ranks(8)
    ranks.collective("all_reduce", [0, 4], 10**8)  # a ring of 2: each member sends 2 x 1/2 x 0.1 GB
    ranks.transfer([(1, 5)], 10**8)
    assert set(ends(ranks, small_machine()).values()) == {10 * MS}
    assert set(ends(ranks, small_machine(uplink_Bps=10 * GB)).values()) == {20 * MS}


def test_rings_of_equal_ranks_of_two_nodes_share_their_uplinks():
    ranks = Ranks(8)
    for first in range(4):  # data parallel across nodes, as tensor parallel inside leaves it
        ranks.collective("all_gather", [first, first + 4], 2 * 10**8)
    assert set(ends(ranks, small_machine()).values()) == {10 * MS}
    assert set(ends(ranks, small_machine(uplink_Bps=20 * GB)).values()) == {20 * MS}
    assert set(ends(ranks, small_machine(uplink_Bps=40 * GB)).values()) == {10 * MS}


def test_pairs_of_one_transfer_fill_the_port_that_they_were_priced_for():
    ranks = Ranks(8)
    ranks.transfer([(0, 1), (0, 2)], 10**9)  # 2 GB leave rank 0 at 100 GB/s
    assert set(ends(ranks, small_machine()).values()) == {20 * MS}


def test_two_transfers_of_one_rank_share_its_port():
    ranks = Ranks(8)
    ranks.transfer([(0, 1)], 10**9)
    ranks.transfer([(0, 2)], 10**9)
    assert set(ends(ranks, small_machine()).values()) == {20 * MS}


def test_an_uplink_below_one_link_is_what_a_transfer_alone_gets():
    ranks = Ranks(8)
    ranks.transfer([(0, 4)], 10**8)
    assert set(ends(ranks, small_machine(uplink_Bps=5 * GB)).values()) == {20 * MS}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("wire:bandwidth=0.5", (20, 20, 10)),
        ("1:4:bandwidth=0.5", (20, 10, 10)),
        ("*:0~4:bandwidth=0.25", (40, 10, 10)),
        ("node:bandwidth=0.5", (10, 10, 20)),
        ("node:2:failed", (10, 10, 100)),
        ("node:2~3:failed", (10, 10, 100)),
        ("node:0~3:failed", (10, 10, 10)),
    ],
)
def test_degraded_and_failed_links(change, expected):
    ranks = Ranks(8)
    ranks.transfer([(0, 4)], 10**8)
    ranks.transfer([(1, 5)], 10**8)
    ranks.transfer([(2, 3)], 10**9)
    found = ends(ranks, small_machine(), what_if=WhatIf(links=(LinkChange.parse(change),)))
    assert tuple(found[f"meet/n{number}.recv"] for number in (1, 2, 3)) == tuple(each * MS for each in expected)


def test_a_slow_port_slows_the_whole_collective():
    ranks = Ranks(8)
    ranks.collective("all_reduce", [0, 1, 4, 5], 10**8)
    ranks.collective("all_gather", [2, 6], 10**8)
    change = LinkChange(tier="wire", ranks=(5,), bandwidth=0.5)
    before, after = (ends(ranks, small_machine(), what_if=WhatIf(links=each)) for each in ((), (change,)))
    assert after["meet/n1.collective"] == 2 * before["meet/n1.collective"]
    assert after["meet/n2.collective"] == before["meet/n2.collective"]


@pytest.mark.parametrize(("tier", "members", "slower"), [
    ("wire", [0, 4], 2), ("wire", [0, 1, 2, 3], 1), ("node", [0, 4], 1), ("node", [0, 1, 2, 3], 2),
])  # fmt: skip
def test_a_slow_port_of_one_tier_slows_what_crosses_that_tier_alone(tier, members, slower):
    ranks = Ranks(8)
    ranks.collective("all_gather", members, 10**8)
    change = LinkChange(tier=tier, ranks=(0,), bandwidth=0.5)
    before, after = (ends(ranks, small_machine(), what_if=WhatIf(links=each)) for each in ((), (change,)))
    assert after["meet/n1.collective"] == slower * before["meet/n1.collective"]


@pytest.mark.parametrize("pair", [False, True])
def test_a_change_concerns_those_of_whom_two_meet_in_its_tier(pair):
    """Two ranks meet in the smallest tier that has both."""
    links = tuple(Link(name=f"of {size}", ranks=size, latency_s=0.0, bandwidth_Bps=GB) for size in (2, 4, 16))
    network = Network(small_machine(links=links, devices_per_node=2), Ranks(16).program())
    draw, outcomes = random.Random(5), set()
    for _ in range(400):
        members, tier = tuple(draw.sample(range(16), draw.randint(2, 5))), draw.randrange(3)
        ranks = tuple(draw.sample(members if draw.random() < 0.5 else range(16), 2 if pair else draw.randint(0, 2)))
        meet = {
            (a, b): next(at for at, link in enumerate(links) if a // link.ranks == b // link.ranks)
            for a, b in itertools.permutations(members, 2)
        }
        if pair:
            expected = meet.get(ranks) == tier
        else:
            expected = any(at == tier and (not ranks or a in ranks) for (a, _), at in meet.items())
        change = LinkChange(ranks=ranks, pair=pair, bandwidth=0.5)
        assert network._concerns(change, tier, members) == expected, (change, tier, members)
        outcomes.add((tier, expected))
    assert len(outcomes) == 6


def test_latency_of_a_tier_counts_per_step_of_a_ring():
    ranks = Ranks(8)
    ranks.collective("all_gather", [0, 1, 2], 3 * 10**6)
    change = LinkChange(tier="node", latency=3.0)
    found = [
        ends(ranks, small_machine(latency_s=1e-6), what_if=WhatIf(links=each))["meet/n1.collective"]
        for each in ((), (change,))
    ]
    assert found[1] - found[0] == 2 * 2 * 10**6  # two steps, 2 us more each


def test_a_rank_that_cannot_be_reached_is_named_before_simulating():
    ranks = Ranks(8)
    ranks.transfer([(0, 4)], 10**8)
    failed = WhatIf(links=(LinkChange(tier="wire", ranks=(4,), failed=True),))
    with pytest.raises(TwofoldError, match=r"'meet/n1.send' needs ranks 0, 4 .* 'wire:4:failed'.*last tier"):
        simulate(ranks.program(), small_machine(), what_if=failed)
    inside = Ranks(8)
    inside.transfer([(4, 5)], 10**8)
    simulate(inside.program(), small_machine(), what_if=failed)  # does not use it


def test_a_failed_first_tier_leaves_the_uplink_to_the_next_one():
    ranks = Ranks(8)
    ranks.transfer([(2, 3)], 10**8)
    failed = WhatIf(links=(LinkChange(tier="node", ranks=(2,), failed=True),))
    assert set(ends(ranks, small_machine(uplink_Bps=20 * GB), what_if=failed).values()) == {10 * MS}


def ring_machine(number: int):
    """Devices in one ring of 10 GB/s."""
    plain = small_machine(number)
    return small_machine(
        number, links=(), graph=torus((number,), 10 * GB), devices_per_node=1, collectives=plain.collectives
    )


def test_transfers_on_a_graph_share_the_links_of_their_routes():
    ranks = Ranks(8)
    ranks.transfer([(0, 2)], 10**8)
    ranks.transfer([(1, 3)], 10**8)  # both over 1 - 2
    ranks.transfer([(5, 4)], 10**8)
    found = ends(ranks, ring_machine(8))
    assert [found[f"meet/n{number}.recv"] // MS for number in (1, 2, 3)] == [20, 20, 10]


def test_a_failed_wire_of_a_graph_sends_bytes_the_other_way_round():
    ranks = Ranks(4)
    ranks.transfer([(0, 1)], 10**8)
    ranks.transfer([(3, 2)], 10**8)
    machine = ring_machine(4)
    assert set(ends(ranks, machine).values()) == {10 * MS}
    change = LinkChange.parse("torus:0~1:failed")  # 0, 3, 2, 1 shares 3 - 2 with the other
    assert set(ends(ranks, machine, what_if=WhatIf(links=(change,))).values()) == {20 * MS}
    slow = LinkChange.parse("torus:3:bandwidth=0.5")
    found = ends(ranks, machine, what_if=WhatIf(links=(slow,)))
    assert [found[f"meet/n{number}.recv"] // MS for number in (1, 2)] == [10, 20]
    for text, said in (("rope:failed", "its wires are torus"), ("torus:0:failed", "no route leads from device 0")):
        with pytest.raises(TwofoldError, match=said):
            ends(ranks, machine, what_if=WhatIf(links=(LinkChange.parse(text),)))


def at_once(call: str, sizes: tuple[int, ...], axes: tuple[str, ...], size_bytes: int) -> Program:
    """All groups of a mesh along some axes communicate, and nothing else happens."""
    mesh = Layout(sizes, ("a", "b", "c")[: len(sizes)], list(range(math.prod(sizes))))
    token = Value(name="t", shape=(), scope=Scope.STEP, role="token")
    line = Instruction(
        name="all", kind=Kind.COLLECTIVE, call=call, part="C", token="t", axes=axes, channel="c",
        message_bytes=size_bytes,
    )  # fmt: skip
    block = Block(label="step", micro_batch=0, body=Body(name="step", instructions=(line,)))
    return Program(groups=(GroupProgram(mesh=mesh, values={"t": token}, blocks=(block,)),), num_micro_batches=1)


@pytest.mark.parametrize(("uplink", "expected"), [(20 * GB, 20), (None, 10)])
@pytest.mark.parametrize("fold", [False, True])
def test_groups_of_one_mesh_share_uplinks_folded_or_not(fold, uplink, expected):
    program = at_once("all_reduce", (2, 4), ("a",), 10**8)
    timeline = simulate(program, small_machine(8, uplink_Bps=uplink), num_steps=1, fold_ranks=fold)
    # four rings of 0.1 GB out of each node: at 10 GB/s each by their own cards, at 20 GB/s together
    assert max(span.end_ps for span in timeline.spans()) == expected * MS


def narrow_machine(kind: str):
    """16 devices on links that groups of a mesh fight for."""
    if kind == "torus":
        plain = small_machine(16)
        graph = torus((4, 4), 10 * GB, 1e-6)
        return small_machine(16, links=(), graph=graph, devices_per_node=4, collectives=plain.collectives)
    if kind == "two tiers":
        return small_machine(16, uplink_Bps=15 * GB, latency_s=1e-6)
    node, wire = small_machine(16, latency_s=1e-6).links
    pod = msgspec.structs.replace(wire, name="pod", ranks=8, uplink_Bps=25 * GB)
    return small_machine(16, links=(node, pod, msgspec.structs.replace(wire, ranks=16, uplink_Bps=12 * GB)))


@pytest.mark.parametrize("kind", ["two tiers", "three tiers", "torus"])
@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "all_to_all"])
def test_the_engine_takes_what_forecasts_and_folding_take_of_groups_at_once(kind, call):
    machine = narrow_machine(kind)
    for sizes, number in itertools.product(((4, 4), (2, 8), (8, 2), (2, 2, 4), (4, 2, 2)), (1, 2)):
        names = ("a", "b", "c")[: len(sizes)]
        for axes in itertools.combinations(names, number):
            program = at_once(call, sizes, axes, 10**8)
            group = mesh_group(machine, program.groups[0].mesh, axes)
            together_ps = price_collective(machine, call, group, 10**8, 4).together_ps
            for fold in (False, True):
                timeline = simulate(program, machine, num_steps=1, fold_ranks=fold)
                end_ps = max(span.end_ps for span in timeline.spans())
                assert end_ps == pytest.approx(together_ps, abs=2), (sizes, axes, fold)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wire", "cannot read"),
        ("wire:bandwidth=x", "cannot read"),
        ("wire:speed=2", "cannot read"),
        ("wire:bandwidth=0", "above 0"),
        ("wire:bandwidth=nan", "above 0"),
        ("wire:3~3:failed", "needs two ranks"),
        ("wire:bandwidth=1", "changes nothing"),
    ],
)
def test_bad_changes_are_refused(text, message):
    with pytest.raises(TwofoldError, match=message):
        LinkChange.parse(text)


@pytest.mark.parametrize(("text", "message"), [("rope:failed", "its tiers are node"), ("wire:9:failed", "rank 9")])
def test_changes_of_what_is_not_there_are_refused(text, message):
    ranks = Ranks(8)
    ranks.transfer([(0, 4)], 10**8)
    with pytest.raises(TwofoldError, match=message):
        simulate(ranks.program(), small_machine(), what_if=WhatIf(links=(LinkChange.parse(text),)))


def test_the_text_of_a_change_gives_it_back():
    for text in ("node:0,1:bandwidth=0.5", "1:2~5:failed", "*:latency=2", "wire:bandwidth=0.5,latency=3"):
        assert str(LinkChange.parse(text)) == text


def test_an_uplink_of_the_first_tier_is_refused():
    machine = small_machine()
    with pytest.raises(TwofoldError, match="no tier below"):
        small_machine(links=(type(machine.links[0])(name="a", ranks=64, latency_s=0, bandwidth_Bps=1, uplink_Bps=1.0),))
