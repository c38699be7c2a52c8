"""Prices of communication are those of its flows: never below a cut, the same for one fabric however it is written."""

import itertools
import math
from collections import Counter

import msgspec
import numpy as np
import pytest

from costmodels import Machine, axes_group, mesh_group, price_collective, price_transfer, ranks_group
from costmodels.machine.links import Graph, Link, Wire
from costmodels.machine.machine import COLLECTIVES, Collective, Protocol
from costmodels.machine.topologies import dragonfly, example_machines, leaf_spine, torus
from costmodels.price.flows import double_tree_out
from costmodels.price.group import Group, pair_group
from costmodels.price.links import collective_claims
from plans.errors import TwofoldError
from plans.layout import Layout
from tests.support.small_machine import small_machine

GB, MIB = 1e9, 2**20
CALLS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
EVERY = (
    Protocol(name="ring"), Protocol(name="tree", algorithm="tree"), Protocol(name="PAT", algorithm="pat"),
    Protocol(name="switch", algorithm="switch", far_share=0.9),
    Protocol(name="hierarchical", algorithm="hierarchical"),
)  # fmt: skip
"""Every algorithm at the whole bandwidth, so that only bytes, steps and links count."""

NODE = Link(name="node", ranks=8, latency_s=1e-6, bandwidth_Bps=400 * GB)
CARD = Link(name="card", ranks=512, latency_s=2e-6, bandwidth_Bps=50 * GB)


def fabric(*links: Link, protocols: tuple[Protocol, ...] = EVERY) -> Machine:
    """512 devices in nodes of 8 on these links."""
    of_call = {
        call: Collective(protocols=tuple(each for each in protocols if each.algorithm in ("ring", *_OWN[call])))
        for call in COLLECTIVES
    }
    return small_machine(512, links=links, devices_per_node=8, collectives=of_call, name="fabric")


_OWN = {
    "all_reduce": ("tree", "switch"), "all_gather": ("pat",), "reduce_scatter": ("pat",),
    "all_to_all": ("hierarchical",), "transfer": (),
}  # fmt: skip


def seconds(machine: Machine, call: str, group: Group, size: int) -> tuple[float, float]:
    cost = price_collective(machine, call, group, size, 4)
    return cost.work_ps / 1e12, cost.together_ps / 1e12


def least_s(machine: Machine, call: str, ranks: list[int], size: int) -> float:
    """Bytes over bandwidth of the worst cut between a domain's members and the others, by what must cross it."""
    found = 0.0
    n = len(ranks)
    for tier in range(1, len(machine.links)):
        link, below = machine.links[tier], machine.links[tier - 1].ranks
        domains = np.unique([rank // below for rank in ranks], return_counts=True)[1]
        for count in domains if len(domains) > 1 else ():
            crossing = {
                "all_reduce": 1.0, "broadcast": 1.0, "reduce": 1.0, "all_to_all": count * (n - count) / n,
            }.get(call, (n - count) / n)  # fmt: skip
            # a gather takes in, a scatter sends out, what the others have; each rank by its own port
            widths = [count * link.bandwidth_Bps, math.inf if link.uplink_Bps is None else link.uplink_Bps]
            found = max(found, crossing * size / min(widths))
    return found


@pytest.mark.parametrize("uplink", [None, 400 * GB, 100 * GB, 10 * GB])
def test_no_price_is_below_bytes_over_bandwidth_of_a_cut(uplink):
    machine, rng = fabric(NODE, msgspec.structs.replace(CARD, uplink_Bps=uplink)), np.random.default_rng(1)
    for _ in range(60):
        ranks = sorted(rng.choice(512, int(rng.integers(2, 64)), replace=False).tolist())
        for call in CALLS:
            size = int(2 ** rng.uniform(12, 30))
            alone, together = seconds(machine, call, ranks_group(machine, ranks), size)
            assert alone >= least_s(machine, call, ranks, size) * (1 - 1e-9)
            assert together == alone  # without siblings


def written_otherwise() -> list[Machine]:
    """One fabric of full bandwidth between nodes, in two, three and four tiers."""
    leaf, pod = (msgspec.structs.replace(CARD, name=str(ranks), ranks=ranks) for ranks in (64, 256))
    wide = msgspec.structs.replace(CARD, uplink_Bps=256 * 50 * GB)
    return [fabric(NODE, CARD), fabric(NODE, leaf, CARD), fabric(NODE, leaf, pod, wide)]


@pytest.mark.parametrize("call", CALLS)
def test_one_fabric_costs_the_same_in_two_three_and_four_tiers(call):
    two, *others = written_otherwise()
    for size, (count, stride) in itertools.product(
        (2**12, 2**20, 2**30), ((512, 1), (64, 8), (64, 1), (8, 64), (16, 4), (32, 16), (3, 8))
    ):
        expected = seconds(two, call, axes_group(two, [(count, stride)], 512), size)
        for other in others:
            assert seconds(other, call, axes_group(other, [(count, stride)], 512), size) == pytest.approx(expected)


def test_more_bytes_are_never_faster():
    machines = [fabric(NODE, msgspec.structs.replace(CARD, uplink_Bps=80 * GB)), Machine.load("h100-sxm-x512")]
    for machine, call, (count, stride) in itertools.product(
        machines, CALLS, ((2, 1), (8, 1), (2, 8), (64, 8), (16, 1), (512, 1))
    ):
        group = axes_group(machine, [(count, stride)], 512)
        times = [seconds(machine, call, group, 2**power)[1] for power in range(4, 34)]
        assert times == sorted(times)


def test_an_exchange_fills_its_own_uplink():
    machine = fabric(NODE, msgspec.structs.replace(CARD, uplink_Bps=50 * GB))
    # 16 ranks on two nodes: 8 x 8 / 16 of 256 MiB leave a node at 50 GB/s
    alone, _ = seconds(machine, "all_to_all", axes_group(machine, [(16, 1)], 16), 2**28)
    assert alone == pytest.approx(8 * 8 / 16 * 2**28 / (50 * GB), rel=1e-3)


def test_an_oversubscribed_spine_slows_crossing_traffic():
    spine = msgspec.structs.replace(CARD, name="spine", uplink_Bps=64 * 50 * GB / 4)
    flat, narrow = fabric(NODE, CARD), fabric(NODE, msgspec.structs.replace(CARD, ranks=64), spine)
    exchanges, rings = (
        [seconds(machine, call, axes_group(machine, [(512, 1)], 512), 2**32)[0] for machine in (flat, narrow)]
        for call in ("all_to_all", "all_gather")
    )
    # 64 x 448 / 512 of all bytes leave a leaf for a quarter of 64 cards, instead of 504 / 512 by a card of each rank
    assert exchanges[1] / exchanges[0] == pytest.approx(4 * 448 / 504, rel=1e-3)
    assert rings[0] == pytest.approx(rings[1])


def test_sibling_groups_share_the_way_out_of_a_node():
    machine = fabric(NODE, msgspec.structs.replace(CARD, uplink_Bps=50 * GB))
    mesh = Layout((2, 8), ("dp", "tp"), list(range(16)))
    group = mesh_group(machine, mesh, ("dp",))
    assert group == axes_group(machine, [(2, 8)], 16) and group.tiers[0].sharing == 8
    alone, together = seconds(machine, "all_reduce", group, 2**28)
    assert alone == pytest.approx(2**28 / (50 * GB), rel=1e-3)
    assert together == pytest.approx(8 * 2**28 / (50 * GB), rel=1e-6)
    # what eight engines claim at once adds up to exactly that
    claims = [collective_claims(machine, "all_reduce", (rank, rank + 8), 2**28, 4, group) for rank in range(8)]
    assert {sum(each[link] for each in claims) for link in claims[0]} == {round(together * 1e12)}
    # along tp nothing leaves a node
    assert collective_claims(machine, "all_reduce", range(8), 2**28, 4, mesh_group(machine, mesh, ("tp",))) == {}
    # pipeline stages do not reduce at the same time
    assert axes_group(machine, [(2, 8)], 32, (2, 16)).tiers[0].sharing == 8
    assert axes_group(machine, [(2, 16)], 32, (2, 8)).tiers[0].sharing == 8


def worst_of_listed(machine: Machine, groups: list[list[int]]) -> list[tuple[float, ...]]:
    """(number, fullest, emptiest, cut, sharing) of every tier below the one that joins each group, rank by rank."""
    tiers: list[tuple[float, ...]] = []
    for link, above in itertools.pairwise(machine.links):
        inside = [Counter(rank // link.ranks for rank in group) for group in groups]
        if all(len(own) == 1 for own in inside):
            break
        n, counts = len(groups[0]), [count for own in inside for count in own.values()]
        leaving = Counter(domain for own in inside for domain, count in own.items() if count < n)
        sharing = float(max(leaving.values())) if above.uplink_Bps is not None else 1.0
        cut = max(count * (n - count) for count in counts)
        tiers.append((max(map(len, inside)), max(counts), min(counts), cut, sharing))
    return tiers


@pytest.mark.parametrize("sizes", [(4, 8, 16), (2, 3, 8), (8, 2, 4), (16, 5, 4), (3, 5, 7)])
@pytest.mark.parametrize("first", [0, 64, 8, 12, 3])
def test_groups_of_meshes_are_those_of_their_listed_ranks(sizes, first):
    leaf = msgspec.structs.replace(CARD, ranks=64, uplink_Bps=80 * GB)
    machine = fabric(NODE, leaf, msgspec.structs.replace(CARD, ranks=2048, uplink_Bps=160 * GB))
    machine = msgspec.structs.replace(machine, num_devices=2048)
    count = math.prod(sizes)
    strides = {"a": sizes[1] * sizes[2], "b": sizes[2], "c": 1}
    orders = {
        "as they come": list(range(first, first + count)),
        "every other rank": list(range(first, first + 2 * count, 2)),
        "turned": np.arange(first, first + count).reshape(sizes).transpose(2, 0, 1).ravel().tolist(),
        "mixed": np.random.default_rng(0).permutation(np.arange(first, first + count)).tolist(),
    }
    for (order, ranks), number in itertools.product(orders.items(), (1, 2, 3)):
        mesh = Layout((sizes[2], *sizes[:2]) if order == "turned" else sizes, ("a", "b", "c"), ranks)
        for axes in itertools.combinations("abc", number):
            group = mesh_group(machine, mesh, axes)
            found = [(own.number, own.fullest, own.emptiest, own.cut, own.sharing) for own in group.tiers[:-1]]
            assert found == worst_of_listed(machine, [list(own) for own in mesh.groups(axes)])
            if order == "as they come" and first == 0:
                along = [(sizes["abc".index(axis)], strides[axis]) for axis in axes]
                assert axes_group(machine, along, count) == group


def test_claims_of_listed_groups_are_those_of_the_price():
    leaf = msgspec.structs.replace(CARD, ranks=64, uplink_Bps=80 * GB)
    machine = fabric(NODE, leaf, msgspec.structs.replace(CARD, uplink_Bps=160 * GB))
    for call, (count, stride), size in itertools.product(CALLS, ((8, 64), (64, 8), (16, 1), (512, 1)), (2**16, 2**28)):
        group = axes_group(machine, [(count, stride)], 512)
        filled: dict[object, int] = {}
        bases = [base + at for base in range(0, 512, count * stride) for at in range(stride)]
        for base in bases:
            own = range(base, base + count * stride, stride)
            for link, ps in collective_claims(machine, call, own, size, 4, group).items():
                filled[link] = filled.get(link, 0) + ps
        alone, together = seconds(machine, call, group, size)
        assert max([alone, *(ps / 1e12 for ps in filled.values())]) == pytest.approx(together, rel=1e-6)


def test_rails_carry_their_own_traffic_and_forward_the_rest():
    rails = msgspec.structs.replace(CARD, rails=True, ranks=128)
    spine = msgspec.structs.replace(CARD, uplink_Bps=16 * 50 * GB / 4)  # of one rail of a pod of 16 nodes
    machine, blocks = fabric(NODE, rails, spine), fabric(NODE, msgspec.structs.replace(rails, rails=False), CARD)
    same, cross = (price_transfer(machine, 0, dst, 2**26).work_ps for dst in (8, 9))
    assert same == price_transfer(blocks, 0, 8, 2**26).work_ps < cross  # one step more, through another rank of a node
    # 64 ranks of one number in their nodes have one rail: its uplink alone carries what leaves a pod
    own, whole = (axes_group(machine, [(count, stride)], 512) for count, stride in ((64, 8), (512, 1)))
    one, all_rails = (seconds(machine, "all_gather", group, 2**34) for group in (own, whole))
    assert one[0] == pytest.approx(63 / 64 * 2**34 / (50 * GB), rel=0.02) and one[1] == one[0]
    assert all_rails[0] == pytest.approx(511 / 512 * 2**34 / (8 * 50 * GB), rel=0.02)
    # an exchange over slow links inside nodes: 7 of 8 ranks of another node are on another rail
    slow = msgspec.structs.replace(NODE, bandwidth_Bps=20 * GB)
    machine, blocks = (fabric(slow, each, CARD, protocols=EVERY[:1]) for each in (rails, blocks.links[1]))
    through, by_card = (seconds(each, "all_to_all", whole, 2**34)[0] for each in (machine, blocks))
    assert by_card == pytest.approx(504 / 512 * 2**34 / (50 * GB), rel=0.02)
    assert through == pytest.approx((7 + 504 * 7 / 8) / 512 * 2**34 / (20 * GB), rel=0.02)


def test_small_gathers_of_one_rank_a_node_take_logarithmic_steps():
    machine = fabric(NODE, CARD)
    group = axes_group(machine, [(64, 8)], 512)
    alone, _ = seconds(machine, "all_gather", group, 2**10)
    assert alone == pytest.approx(6 * 2e-6, rel=0.05)
    only_rings = fabric(NODE, CARD, protocols=EVERY[:1])
    assert seconds(only_rings, "all_gather", group, 2**10)[0] == pytest.approx(63 * 2e-6, rel=0.05)


def test_double_trees_send_what_their_degrees_say():
    assert [double_tree_out(number) for number in (1, 2, 3)] == [0.0, 1.0, 1.5]
    assert all(1.0 <= double_tree_out(number) <= 2.0 for number in range(2, 100))


def test_hierarchical_exchanges_send_one_message_to_every_node():
    ways = (
        Protocol(name="direct", peer_s=1e-6),
        Protocol(name="hierarchical", algorithm="hierarchical", peer_s=1e-6),
    )
    machine = fabric(NODE, CARD, protocols=ways)
    group = axes_group(machine, [(512, 1)], 512)
    assert seconds(machine, "all_to_all", group, 2**12)[0] < 80e-6  # 63 messages instead of 504
    large, plain = (seconds(each, "all_to_all", group, 2**30)[0] for each in (machine, fabric(NODE, CARD)))
    assert large == pytest.approx(plain, rel=0.05)


def test_small_exchanges_on_rails_go_by_pxn():
    """The shipped network of rails: 31 messages of a node instead of 248, 1 us each, for a step more in a node."""
    machine = Machine.load("rail-only-x256")
    model = machine.collectives["all_to_all"]
    direct = {**machine.collectives, "all_to_all": msgspec.structs.replace(model, protocols=model.protocols[:1])}
    without = msgspec.structs.replace(machine, collectives=direct, name="direct")
    found, plain = (
        seconds(each, "all_to_all", axes_group(each, [(256, 1)], 256), 2**20)[0] for each in (machine, without)
    )
    step_s = model.hop_s + model.protocols[1].hop_s + machine.links[0].latency_s
    assert plain - found == pytest.approx((248 - 31) * 1e-6 - step_s, rel=1e-6)
    # one rank of every node has no other rail to reach, so the NVLink of its node carries nothing
    slow = msgspec.structs.replace(machine.links[0], bandwidth_Bps=5 * GB)
    narrow = msgspec.structs.replace(machine, links=(slow, machine.links[1]), name="narrow")
    alone, other = (
        seconds(each, "all_to_all", axes_group(each, [(32, 8)], 256), 2**30)[0] for each in (narrow, machine)
    )
    assert alone == other


def test_broadcast_and_reduce_move_the_message_once():
    machine = fabric(NODE, CARD)
    for call in ("broadcast", "reduce"):
        inside, outside = (
            seconds(machine, call, axes_group(machine, [(8, stride)], 512), 2**30)[0] for stride in (1, 8)
        )
        assert inside == pytest.approx(2**30 / (400 * GB), rel=0.02)
        assert outside == pytest.approx(2**30 / (50 * GB), rel=0.02)


def test_a_super_node_uses_the_ports_of_its_nodes():
    pod = msgspec.structs.replace(CARD, name="pod", ports="below", bandwidth_Bps=400 * GB)
    split, whole = fabric(NODE, pod), fabric(msgspec.structs.replace(NODE, ranks=512, latency_s=2e-6))
    for call in CALLS:
        groups = [axes_group(machine, [(64, 1)], 512) for machine in (split, whole)]
        times = [seconds(each, call, own, 2**32)[0] for each, own in zip((split, whole), groups, strict=True)]
        if call != "all_reduce":  # which has a tree over nodes only where there are some
            assert times[0] == pytest.approx(times[1], rel=0.02)


@pytest.mark.parametrize("call", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_node_of_pairs_leaves_by_the_ports_of_all_its_ranks(call, stride):
    """Cards on PCIe reach the network through it. Pairs that are joined as well change nothing for what goes between
    nodes, nor for rings through one rank of every pair."""
    pair, card = msgspec.structs.replace(NODE, ranks=2), msgspec.structs.replace(CARD, ports="own")
    rings = tuple(protocol for protocol in EVERY if protocol.algorithm == "ring")
    for node_Bps in (50 * GB, 1000 * GB):
        node = msgspec.structs.replace(NODE, bandwidth_Bps=node_Bps)
        plain = fabric(node, msgspec.structs.replace(CARD, ports="below"), protocols=rings)
        paired = fabric(pair, msgspec.structs.replace(node, ports="own"), card, protocols=rings)
        groups = [axes_group(machine, [(512 // stride, stride)], 512) for machine in (plain, paired)]
        times = [seconds(each, call, own, 2**33)[0] for each, own in zip((plain, paired), groups, strict=True)]
        # half of a ring's links join pairs, where it has both ranks of them
        halved = stride == 1 and node_Bps == 50 * GB
        assert times[1] == pytest.approx(times[0] / (2 if halved else 1), rel=0.01)


def test_a_half_duplex_tier_carries_both_directions_one_after_the_other():
    uplink = msgspec.structs.replace(CARD, uplink_Bps=50 * GB)
    both, one = fabric(NODE, uplink), fabric(NODE, msgspec.structs.replace(uplink, half_duplex=True))
    for call in CALLS:
        group = axes_group(both, [(2, 8)], 16)
        times = [seconds(machine, call, group, 2**30) for machine in (both, one)]
        assert times[1] == pytest.approx([2 * each for each in times[0]], rel=1e-3)
    own, other = (sum(collective_claims(each, "all_gather", (0, 8), 2**30, 4, group).values()) for each in (both, one))
    assert other == pytest.approx(2 * own)


# -- graphs ------------------------------------------------------------------------------------------------------------


def on_graph(graph: Graph, number: int, per_node: int) -> Machine:
    plain = dict.fromkeys(COLLECTIVES, Collective())
    return small_machine(number, devices_per_node=per_node, links=(), graph=graph, collectives=plain, name="graph")


@pytest.mark.parametrize(("nodes", "of_leaf", "over"), [(8, 2, 1), (8, 4, 4), (4, 1, 2)])
@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "all_to_all"])
def test_a_leaf_spine_costs_the_same_as_a_graph_and_in_tiers(nodes, of_leaf, over, call):
    up, number = of_leaf * 8 * 50 * GB / over, nodes * 8
    graph = leaf_spine(
        nodes, 8, nodes_of_leaf=of_leaf, spines=4, inside=Wire(ends=("", "x"), bandwidth_Bps=450 * GB),
        card=Wire(ends=("", "x"), bandwidth_Bps=50 * GB), up_Bps=up,
    )  # fmt: skip
    tiers = [Link(name="node", ranks=8, latency_s=0, bandwidth_Bps=450 * GB)]
    if of_leaf > 1:
        tiers.append(Link(name="leaf", ranks=8 * of_leaf, latency_s=0, bandwidth_Bps=50 * GB))
    tiers.append(Link(name="spine", ranks=number, latency_s=0, bandwidth_Bps=50 * GB, uplink_Bps=up))
    long = on_graph(graph, number, 8)
    short = small_machine(number, devices_per_node=8, links=tuple(tiers), collectives=long.collectives, name="tiers")
    for axes in ([(number, 1)], [(nodes, 8)], [(8, 1)]):
        assert seconds(long, call, axes_group(long, axes, number), 2**30) == pytest.approx(
            seconds(short, call, axes_group(short, axes, number), 2**30), rel=1e-6
        )


@pytest.mark.parametrize("sizes", [(4, 4, 4), (4, 4)])
def test_a_torus_reduces_along_all_dimensions_at_once(sizes):
    number, bandwidth = math.prod(sizes), 100 * GB
    machine = on_graph(torus(sizes, bandwidth), number, 1)
    alone, together = seconds(machine, "all_reduce", axes_group(machine, [(number, 1)], number), 2**30)
    assert alone == pytest.approx(2 * (number - 1) / number * 2**30 / (2 * len(sizes) * bandwidth)) == together
    # rings along the last dimension do not touch each other
    rings = seconds(machine, "all_gather", axes_group(machine, [(4, 1)], number), 2**30)
    assert rings[0] == rings[1] == pytest.approx(3 / 4 * 2**30 / (2 * bandwidth))


def test_a_dragonfly_exchanges_by_its_global_links():
    devices, routers, ports, bandwidth = 2, 4, 2, 100 * GB
    number = devices * routers * (routers * ports + 1)
    machine = on_graph(dragonfly(devices, routers, ports, bandwidth), number, devices)
    alone, _ = seconds(machine, "all_to_all", axes_group(machine, [(number, 1)], number), 2**30)
    busiest = max((routers * devices) ** 2, number - 1, devices**2 * (1 + 2 * ports * routers))
    assert alone == pytest.approx(busiest * 2**30 / number / bandwidth)


@pytest.mark.parametrize("name", sorted(example_machines()))
def test_shipped_examples_are_what_their_functions_make(name):
    machine = Machine.load(name)
    assert machine == example_machines()[name]
    assert any(
        each.status in ("assumed", "cited") for entry, each in machine.provenance.items() if entry in ("links", "graph")
    )
    group = axes_group(machine, [(machine.num_devices, 1)], machine.num_devices)
    for call in CALLS:
        assert 0 < seconds(machine, call, group, MIB)[1] < seconds(machine, call, group, 2**30)[1] < 1


def wire(a: str, b: str, **rest: float) -> Wire:
    return Wire(ends=(a, b), **{"bandwidth_Bps": GB, **rest})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Graph(wires=(wire("0", "s"), wire("1", "s")), switches=("s",)), None),
        (lambda: Graph(wires=(wire("0", "s"),), switches=("s",)), "no route leads from device 0 to device 1"),
        (lambda: Graph(wires=(wire("0", "2"), wire("2", "1")), forwarding=True), "ends at '2'"),
        (lambda: Graph(wires=(wire("0", "1", bandwidth_Bps=0.0),)), "bandwidth_Bps is 0"),
        (lambda: Graph(wires=(wire("0", "0"),)), "to itself"),
        (lambda: Graph(wires=(wire("0", "1", length=0),)), "circle"),
        (lambda: Graph(wires=(wire("0", "1"),), switches=("s", "s")), "there twice"),
        (lambda: Graph(wires=(wire("0", "1"),), switches=("1",)), "as devices have"),
        (lambda: Graph(wires=(wire("0", "1"),), torus=(3,)), "a torus of 3 has 3 devices, not 2"),
    ],
)  # fmt: skip
def test_bad_graphs_are_refused_in_one_sentence(make, said):
    if said is None:
        assert on_graph(make(), 2, 1).links[0].ranks == 2
        return
    with pytest.raises(TwofoldError, match=said) as caught:
        on_graph(make(), 2, 1)
    assert "\n" not in str(caught.value)


def test_devices_that_do_not_forward_join_nobody():
    wires = (wire("0", "1"), wire("1", "2"))
    with pytest.raises(TwofoldError, match=r"device 0 to device 2.*forward"):
        on_graph(Graph(wires=wires), 3, 1)
    assert price_transfer(on_graph(Graph(wires=wires, forwarding=True), 3, 1), 0, 2, 10**9).work_ps == 10**12


def test_a_graph_survives_its_file(tmp_path):
    machine = on_graph(torus((2, 3), GB), 6, 1)
    path = machine.save(tmp_path / "machine.json")
    assert Machine.load(path) == machine
    broken = path.read_text().replace('"bandwidth_Bps": 1000000000.0', '"bandwidth_Bps": 0.0')
    path.write_text(broken)
    with pytest.raises(TwofoldError, match=r"machine.json.*bandwidth_Bps is 0"):
        Machine.load(path)


def test_a_pair_is_a_group_of_two_ranks():
    machine = Machine.load("leaf-spine-x256")
    size = 1
    for tier, link in enumerate(machine.links):
        assert pair_group(tier) == ranks_group(machine, (0, size))  # the first rank of the next domain below
        size = link.ranks
    assert tier == 2


@pytest.mark.parametrize("call", ["all_gather", "reduce_scatter", "all_reduce"])
def test_the_start_of_what_leaves_a_node_is_paid_once_on_a_graph(call):
    machine = Machine.load("leaf-spine-graph-x32")
    machine, slow = (
        msgspec.structs.replace(machine, collectives={
            name: msgspec.structs.replace(each, far_start_s=start_s, protocols=())
            for name, each in machine.collectives.items()
        })
        for start_s in (0.0, 1e-3)
    )  # fmt: skip
    for ranks, more_s in (((0, 1), 0.0), ((0, 8), 1e-3), (range(16), 1e-3)):
        usual, own = (seconds(each, call, ranks_group(each, ranks), 2**20)[0] for each in (machine, slow))
        assert own - usual == pytest.approx(more_s, abs=1e-9), ranks
