"""Collectives and transfers on ranks that take turns in one process: redistributions drawn at random, even and uneven.

The calls of torch.distributed are noted; once every rank has made its own, what each receives is worked out by their
definitions. `tests/executor/step/test_comm.py` runs some on real ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from executor.device import Device
from executor.step import comm
from executor.step.comm import SelfTransfer, collective_launch, transfer_launch
from executor.step.groups import Team
from plans.layout import Layout
from plans.program import Instruction, Kind, Value
from plans.redistribution import Step, StepKind, pieces, redistribute, rows
from tests.plans.redistribution.cases import random_case
from tests.pretend.redistribution import Parts, apply_step, split


@dataclass
class World:
    """The calls of all ranks: `rank` is the one whose turn it is."""

    rank: int = 0
    calls: dict[tuple[Any, ...], dict[int, tuple[Any, ...]]] = field(default_factory=lambda: defaultdict(dict))
    messages: dict[tuple[int, int, int], list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    receives: list[tuple[tuple[int, int, int], Tensor]] = field(default_factory=list)

    def note(self, kind: str, group: Any, *operands: Any) -> Any:
        self.calls[kind, group.ranks][group.ranks.index(self.rank)] = operands
        return SimpleNamespace(wait=self.done)

    def done(self) -> None:
        assert not self.calls and not self.receives, "waited for before all ranks made their calls"

    def group(self, ranks: tuple[int, ...]) -> Any:
        group = SimpleNamespace(ranks=ranks)
        group.allgather_into_tensor_coalesced = lambda outs, ins: self.note("gather rows", group, outs, ins)
        group.reduce_scatter_tensor_coalesced = lambda outs, ins: self.note("scatter rows", group, outs, ins)
        return group

    def send(self, message: Tensor, peer: int, *, group: Any, tag: int) -> Any:
        self.messages[self.rank, peer, tag].append(message)
        return SimpleNamespace(wait=self.done)

    def receive(self, buffer: Tensor, peer: int, *, group: Any, tag: int) -> Any:
        self.receives.append(((peer, self.rank, tag), buffer))
        return SimpleNamespace(wait=self.done)

    def exchange(
        self, out: Tensor, given: Tensor, out_sizes: Any = None, sizes: Any = None, *, group: Any, **_: Any
    ) -> Any:
        assert out.dim() == given.dim() == 1
        return self.note("exchange", group, out, given, out_sizes, sizes)

    def resolve(self) -> None:
        for (kind, ranks), by_place in self.calls.items():
            assert sorted(by_place) == list(range(len(ranks))), "a member of a group makes no call"
            calls = [by_place[place] for place in range(len(ranks))]
            if kind in ("gather rows", "scatter rows"):
                for row in range(len(calls[0][0])):
                    _resolve(kind.removesuffix(" rows"), [(call[0][row], call[1][row]) for call in calls])
            else:
                _resolve(kind, calls)
        for key, buffer in self.receives:
            buffer.copy_(self.messages[key].pop(0))
        assert not any(self.messages.values()), "a message that nobody receives"
        self.calls.clear()
        self.receives.clear()


def _resolve(kind: str, calls: list[tuple[Any, ...]]) -> None:
    count = len(calls)
    if kind == "reduce":
        total = sum(given for (given,) in calls)
        for (given,) in calls:
            given.copy_(total)
    elif kind == "gather":
        for out, _ in calls:
            out.copy_(torch.cat([given for _, given in calls]))
    elif kind == "scatter":
        total = sum(given for _, given in calls)
        for place, (out, _) in enumerate(calls):
            out.copy_(total.view(count, -1)[place])
    else:
        even = [[given.numel() // count] * count for _, given, *_ in calls]
        sizes = [call[3] or even[place] for place, call in enumerate(calls)]
        parts = [given.split(own) for (_, given, *_), own in zip(calls, sizes, strict=True)]
        for place, (out, _, out_sizes, _) in enumerate(calls):
            assert (out_sizes or even[place]) == [own[place] for own in sizes]
            out.copy_(torch.cat([own[place] for own in parts]))


@pytest.fixture
def world(monkeypatch):
    made = World()
    names = {
        "get_rank": lambda: made.rank, "isend": made.send, "irecv": made.receive, "all_to_all_single": made.exchange,
        "all_reduce": lambda x, *, group, async_op: made.note("reduce", group, x),
    }  # fmt: skip
    monkeypatch.setattr(comm, "dist", SimpleNamespace(**names))
    monkeypatch.setattr(comm, "_all_gather", lambda out, x, *, group, async_op: made.note("gather", group, out, x))
    monkeypatch.setattr(comm, "_reduce_scatter", lambda out, x, *, group, async_op: made.note("scatter", group, out, x))
    return made


def team_of(world: World, mesh: Layout, rank: int, axes: tuple[str, ...]) -> Team:
    members = mesh.group_of(rank, axes)
    if len(members) == 1:
        return Team(members=members)
    ordered = tuple(sorted(members))
    order, inverse = tuple(map(ordered.index, members)), tuple(map(members.index, ordered))
    return Team(members=members, group=world.group(ordered), order=order, inverse=inverse)


def on_all(world: World, step: Step, parts: Parts, shape: tuple[int, ...]) -> dict[int, np.ndarray]:
    """What every rank holds after a step that communicates."""
    launched, mesh = {}, step.before.mesh
    self_transfers = {rank: defaultdict(SelfTransfer) for rank in (*mesh.rank_list, *step.after.mesh.rank_list)}
    groups = SimpleNamespace(flow=lambda channel, *ends: (None, 3), lane=lambda group: None)

    def end(kind: Kind) -> Instruction:
        return Instruction(
            name="t", kind=kind, call="transfer", part="C", channel="t", dtype="float64",
            pieces=pieces(step.before, step.after, shape), transfer=(step.before, step.after, shape),
        )  # fmt: skip

    for world.rank in step.after.mesh.rank_list if step.kind is StepKind.TRANSFER else ():
        transfers = self_transfers[world.rank]
        launched[world.rank] = transfer_launch(end(Kind.RECV), world.rank, groups, Device(kind="cpu"), transfers)()
    for world.rank in mesh.rank_list:
        x = torch.from_numpy(parts[world.rank].copy())
        if step.kind is StepKind.TRANSFER:
            transfers = self_transfers[world.rank]
            sent = transfer_launch(end(Kind.SEND), world.rank, groups, Device(kind="cpu"), transfers)(x)
            assert sent._result() == ()
            continue
        instruction = Instruction(
            name="c", kind=Kind.COLLECTIVE, call=str(step.kind), part="C", inputs=("x",), outputs=("y",), mesh=mesh,
            axes=step.axes, attrs={"step": step, "shape": shape},
        )  # fmt: skip
        team = team_of(world, mesh, world.rank, step.axes)
        launched[world.rank] = collective_launch(instruction, team, Value(name="y", shape=()))(x)
        if step.kind is not StepKind.ALL_REDUCE:
            assert np.array_equal(x.numpy(), parts[world.rank]), "the input was changed"
    world.resolve()
    found = {rank: work.finish() for rank, work in launched.items()}
    assert all(len(each) == 1 and each[0].is_contiguous() for each in found.values())
    return {rank: each[0].numpy() for rank, each in found.items()}


@pytest.mark.parametrize("least_row_bytes", [1, rows.LEAST_ROW_BYTES])
@pytest.mark.parametrize("relation", ["same", "regrouped", "shuffled", "elsewhere"])
def test_ranks_hold_what_the_steps_of_a_redistribution_say(world, monkeypatch, relation, least_row_bytes):
    monkeypatch.setattr(rows, "LEAST_ROW_BYTES", least_row_bytes)  # rows of small tensors as messages of their own
    kinds: set[StepKind] = set()
    rng = np.random.default_rng(23)
    for _ in range(30):
        case = random_case(rng, relation=relation, max_ranks=12)
        if math.prod(case.shape) > 10_000:
            continue
        terms = rng.integers(-9, 9, (case.source.mesh.size(case.source.partial), *case.shape)).astype(float)
        parts: Parts = split(case.source, list(terms))
        for step in redistribute(case.source, case.target, case.shape):
            expected = apply_step(step, parts, case.shape)
            if step.kind is not StepKind.SLICE:
                kinds.add(step.kind)
                found = on_all(world, step, parts, case.shape)
                assert found.keys() == expected.keys()
                for rank, part in found.items():
                    assert np.array_equal(part, expected[rank]), (str(step), case, rank)
            parts = expected
    assert StepKind.TRANSFER in kinds if relation != "same" else len(kinds) >= 4


@pytest.mark.parametrize("count", [16, 13, 3])
@pytest.mark.parametrize("mesh", [Layout((2, 2), ("a", "b")), Layout((2, 2), ("a", "b"), (3, 1, 2, 0))])
def test_flat_shards_are_gathered_and_scattered_in_the_order_of_the_members(world, mesh, count):
    size, axes = math.ceil(count / 4), ("b", "a")
    whole = np.arange(1.0, count + 1)
    padded = np.pad(whole, (0, 4 * size - count)).reshape(4, size)
    gathers, scatters = {}, {}
    for world.rank in mesh.rank_list:
        team, place = team_of(world, mesh, world.rank, axes), mesh.index(world.rank, axes)

        def launch(call, x, output, team=team):
            instruction = Instruction(
                name=call, kind=Kind.COLLECTIVE, call=call, part="C", inputs=("x",), outputs=("y",)
            )
            return collective_launch(instruction, team, Value(name="y", shape=output))(torch.from_numpy(x))

        gathers[place] = launch("all_gather_flat", padded[place].copy(), (1, count))
        scatters[place] = launch("reduce_scatter_flat", (whole * (world.rank + 1)).reshape(1, count), (size,))
    world.resolve()
    for place in range(4):
        assert np.array_equal(gathers[place].finish()[0].numpy(), whole[None])
        assert np.array_equal(scatters[place].finish()[0].numpy(), 10 * padded[place])
