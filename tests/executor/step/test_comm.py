"""Collectives and transfers on four gloo ranks, against the same steps on pretend ranks in numpy."""

import math
from collections import defaultdict

import numpy as np
import pytest
import torch

from executor.device import Device
from executor.step.comm import SelfTransfer, collective_launch, transfer_launch
from executor.step.groups import Groups
from plans.layout import Layout, TensorLayout
from plans.program import Block, Body, GroupProgram, Instruction, Kind, Program, Value
from plans.redistribution import Step, StepKind, pieces, rows
from tests.pretend.redistribution import apply_step, split
from tests.support.on_ranks import run_on_ranks

pytestmark = pytest.mark.ranks

NUM_RANKS = 4
SHAPE = (8, 12)
# ranks in an order of their own, so that the order of members and the order of torch's groups differ
MESH = Layout((2, 2), ("a", "b"), (3, 1, 2, 0))
LINE = Layout((4,), ("c",), (2, 0, 3, 1))
PAIR = Layout((2,), ("d",), (3, 1))
SORTED = Layout((2, 2), ("e", "f"))
FLAT_COUNTS = (16, 13, 3)


def step(kind, axes, before, after, dim=None, to_dim=None):
    return Step(kind=kind, axes=axes, dim=dim, to_dim=to_dim, before=before, after=after)


def place(*dims, partial=(), mesh=MESH):
    return TensorLayout(mesh=mesh, dims=dims, partial=partial)


GATHER, SCATTER, REDUCE = StepKind.ALL_GATHER, StepKind.REDUCE_SCATTER, StepKind.ALL_REDUCE
EXCHANGE, TRANSFER = StepKind.ALL_TO_ALL, StepKind.TRANSFER
WHOLE = place((), ())

COLLECTIVES = {
    "gather a dim 0": step(GATHER, ("a",), place(("a",), ()), WHOLE, dim=0),
    "gather b dim 1": step(GATHER, ("b",), place(("a",), ("b",)), place(("a",), ()), dim=1),
    "gather a,b dim 0": step(GATHER, ("a", "b"), place(("a", "b"), ()), WHOLE, dim=0),
    "gather b,a dim 0": step(GATHER, ("b", "a"), place(("b", "a"), ()), WHOLE, dim=0),
    "gather b,a dim 1": step(GATHER, ("b", "a"), place((), ("b", "a")), WHOLE, dim=1),
    "gather minor": step(GATHER, ("b",), place(("a", "b"), ()), place(("a",), ()), dim=0),
    "scatter a dim 0": step(SCATTER, ("a",), place((), (), partial=("a",)), place(("a",), ()), dim=0),
    "scatter b dim 1": step(SCATTER, ("b",), place(("a",), (), partial=("b",)), place(("a",), ("b",)), dim=1),
    "scatter b,a dim 0": step(SCATTER, ("b", "a"), place((), (), partial=("b", "a")), place(("b", "a"), ()), dim=0),
    "scatter a,b dim 1": step(SCATTER, ("a", "b"), place((), (), partial=("a", "b")), place((), ("a", "b")), dim=1),
    "reduce a": step(REDUCE, ("a",), place(("b",), (), partial=("a",)), place(("b",), ())),
    "reduce a,b": step(REDUCE, ("a", "b"), place((), (), partial=("a", "b")), WHOLE),
    "exchange a 0 to 1": step(EXCHANGE, ("a",), place(("a",), ()), place((), ("a",)), dim=0, to_dim=1),
    "exchange b,a 1 to 0": step(EXCHANGE, ("b", "a"), place((), ("b", "a")), place(("b", "a"), ()), dim=1, to_dim=0),
    "gather rows": step(GATHER, ("f",), place(("e",), ("f",), mesh=SORTED), place(("e",), (), mesh=SORTED), dim=1),
    "scatter rows": step(
        SCATTER, ("e", "f"), place((), (), partial=("e", "f"), mesh=SORTED), place((), ("e", "f"), mesh=SORTED), dim=1
    ),
    "exchange minor": step(EXCHANGE, ("b",), place(("a", "b"), ()), place(("a",), ("b",)), dim=0, to_dim=1),
}
TRANSFERS = {
    "other order": step(TRANSFER, (), place(("a", "b"), ()), place(("b", "a"), ())),
    "other mesh": step(TRANSFER, (), place(("a",), ("b",)), place((), ("c",), mesh=LINE)),
    "to fewer ranks": step(TRANSFER, (), place(("a",), ("b",)), place(("d",), (), mesh=PAIR)),
    "to more ranks": step(TRANSFER, (), place((), ("d",), mesh=PAIR), place(("c",), (), mesh=LINE)),
    "partial terms": step(TRANSFER, (), place(("a",), (), partial=("b",)), place((), ("b",), partial=("a",))),
}


def parts_of(layout, seed):
    """What each rank holds: small integers, so that sums in any order are exact."""
    count = layout.mesh.size(layout.partial)
    generator = np.random.default_rng(seed)
    return split(layout, [generator.integers(-9, 9, SHAPE).astype(float) for _ in range(count)])


def flat_parts(count, seed):
    generator = np.random.default_rng(seed)
    return {rank: generator.integers(-9, 9, count).astype(float) for rank in range(NUM_RANKS)}


def collective(name, call, axes, **attrs):
    mesh = attrs["step"].before.mesh if "step" in attrs else MESH
    return Instruction(
        name=name, kind=Kind.COLLECTIVE, call=call, part="C", inputs=("x",), outputs=("y",), mesh=mesh, axes=axes,
        channel=f"over {axes}", dtype="float64", attrs=attrs,
    )  # fmt: skip


def transfer(name, kind, each):
    return Instruction(
        name=name, kind=kind, call="transfer", part="C", channel=name, dtype="float64",
        inputs=("x",) if kind is Kind.SEND else (), outputs=("y",) if kind is Kind.RECV else (),
        pieces=pieces(each.before, each.after, SHAPE), transfer=(each.before, each.after, SHAPE),
    )  # fmt: skip


def instructions():
    yield from (collective(name, str(each.kind), each.axes, step=each) for name, each in COLLECTIVES.items())
    yield from (collective(f"flat {count}", "all_gather_flat", ("b", "a")) for count in FLAT_COUNTS)
    for name, each in TRANSFERS.items():
        yield transfer(name, Kind.SEND, each)
        yield transfer(name, Kind.RECV, each)


def program():
    body = Body(name="all", instructions=tuple(instructions()))
    group = GroupProgram(mesh=MESH, values={}, blocks=(Block(label="0F0", micro_batch=0, body=body),))
    return Program(groups=(group,), num_micro_batches=1)


class Lanes(Device):
    """A CPU that has transfers go through two-rank groups, as on NCCL."""

    __slots__ = ()

    @property
    def backend(self):
        return "lanes"


def work(rank, folder):
    """Every case on one rank; results go to a file."""
    found = {}
    rows.LEAST_ROW_BYTES = 1  # every row of these small tensors is a message where a team is sorted
    everything = program()
    cpu = Device(kind="cpu")
    groups = Groups(everything, cpu)
    shape = Value(name="y", shape=())

    def run(name, instruction, part, output=shape):
        team = groups.team(instruction.channel, instruction.mesh.group_of(rank, instruction.axes))
        given = torch.from_numpy(part)
        before = given.clone()
        found[name] = collective_launch(instruction, team, output)(given).finish()[0].numpy()
        assert torch.equal(given, before), f"{name} changed its input"

    for seed, (name, each) in enumerate(COLLECTIVES.items()):
        run(name, collective(name, str(each.kind), each.axes, step=each), parts_of(each.before, seed)[rank])
    for count in FLAT_COUNTS:
        size, place_in = math.ceil(count / NUM_RANKS), MESH.index(rank, ("b", "a"))
        whole = np.pad(flat_parts(count, count)[0], (0, size * NUM_RANKS - count))
        shard = whole[place_in * size : (place_in + 1) * size]
        instruction = collective("g", "all_gather_flat", ("b", "a"))
        run(f"gather flat {count}", instruction, shard, Value(name="y", shape=(1, count)))
        instruction = collective("s", "reduce_scatter_flat", ("b", "a"))
        part = flat_parts(count, count)[rank].reshape(1, count)
        run(f"scatter flat {count}", instruction, part, Value(name="y", shape=(size,)))
    run_transfers(rank, groups, cpu, "", found)
    lanes = Lanes(kind="cpu")
    run_transfers(rank, Groups(everything, lanes), lanes, "lanes: ", found)
    in_place = torch.full((3,), float(rank), dtype=torch.float64)
    instruction = Instruction(
        name="r", kind=Kind.COLLECTIVE, call="all_reduce", part="C", inputs=("x",), outputs=("x",), mesh=MESH,
        axes=("a", "b"), channel="over ('a', 'b')",
    )  # fmt: skip
    team = groups.team(instruction.channel, MESH.group_of(rank, ("a", "b")))
    work = collective_launch(instruction, team, shape)(in_place)
    assert work.finish()[0] is in_place and work.finish()[0] is in_place
    found["in place"] = in_place.numpy()
    np.savez(folder / f"{rank}.npz", **found)


def run_transfers(rank, groups, device, label, found):
    """All at once and twice: receives first, then sends, then waits in another order."""
    self_transfers = defaultdict(SelfTransfer)
    cases = list(enumerate(TRANSFERS.items()))
    launches = {
        (name, kind): transfer_launch(transfer(name, kind, each), rank, groups, device, self_transfers)
        for _, (name, each) in cases
        for kind, layout in ((Kind.SEND, each.before), (Kind.RECV, each.after))
        if rank in layout.mesh.rank_list
    }
    receives, sends = [], []
    for again in (0, 100):
        for seed, (name, each) in cases:
            if (name, Kind.RECV) in launches:
                receives.append((f"{label}{name} {again}", launches[name, Kind.RECV]()))
            if (name, Kind.SEND) in launches:
                part = torch.from_numpy(parts_of(each.before, seed + again)[rank])
                sends.append(launches[name, Kind.SEND](part))
    for name, work in reversed(receives):
        found[name] = work.finish()[0].numpy()
    for work in sends:
        assert work.finish() == ()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("comm")
    run_on_ranks(work, NUM_RANKS, folder)
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collective_equals_pretend_ranks(found, name):
    each = COLLECTIVES[name]
    seed = list(COLLECTIVES).index(name)
    expected = apply_step(each, parts_of(each.before, seed), SHAPE)
    for rank in range(NUM_RANKS):
        np.testing.assert_array_equal(found[rank][name], expected[rank])


@pytest.mark.parametrize("lane", ["", "lanes: "])
@pytest.mark.parametrize("again", [0, 100])
@pytest.mark.parametrize("name", TRANSFERS)
def test_transfer_equals_pretend_ranks(found, name, again, lane):
    each = TRANSFERS[name]
    seed = list(TRANSFERS).index(name)
    expected = apply_step(each, parts_of(each.before, seed + again), SHAPE)
    for rank in each.after.mesh.rank_list:
        np.testing.assert_array_equal(found[rank][f"{lane}{name} {again}"], expected[rank])


@pytest.mark.parametrize("count", FLAT_COUNTS)
def test_flat_gather_cuts_the_padding(found, count):
    for rank in range(NUM_RANKS):
        np.testing.assert_array_equal(
            found[rank][f"gather flat {count}"], flat_parts(count, count)[0].reshape(1, count)
        )


@pytest.mark.parametrize("count", FLAT_COUNTS)
def test_flat_scatter_sums_and_pads_with_zeros(found, count):
    size = math.ceil(count / NUM_RANKS)
    total = np.pad(sum(flat_parts(count, count).values()), (0, size * NUM_RANKS - count))
    for rank in range(NUM_RANKS):
        start = MESH.index(rank, ("b", "a")) * size
        np.testing.assert_array_equal(found[rank][f"scatter flat {count}"], total[start : start + size])


def test_all_reduce_in_place(found):
    for rank in range(NUM_RANKS):
        assert found[rank]["in place"].tolist() == [6.0, 6.0, 6.0]
