"""The process groups of a program, made once, in the same order on every rank.

Collectives have one group for every (channel, set of ranks). torch sorts the ranks of a group, while the order of a
collective's members is that of `mesh.group_of(rank, axes)`; `Team` knows both.

On gloo transfers run over the default group, one tag per channel. NCCL has no tags and runs the messages of one
communicator in order, so there each direction between two ranks has a separate group (one per channel where the two
ends do not agree on the order), and opposite directions cannot block each other. An NCCL kernel that waits for its peer
occupies multiprocessors, so a receive is started where its data is first needed and not where the program posts it:
what computes in between has the complete device (`Lane`). On gloo, where waiting costs nothing, it is started at once.
"""

from __future__ import annotations

import datetime
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from executor.device import Device
from plans.errors import TwofoldError
from plans.program import GroupProgram, Instruction, Kind, Program

__all__ = ["Groups", "Lane", "Team", "connect"]


def connect(device: Device, timeout_s: float = 60.0) -> bool:
    """Join the default process group that torchrun's environment describes; False if this process has joined already.

    Raises:
        TwofoldError: RANK, WORLD_SIZE or MASTER_ADDR are not set.
    """
    if dist.is_initialized():
        return False
    if missing := [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise TwofoldError(f"{', '.join(missing)} not set: start the ranks with torchrun (or executor.launch.launch)")
    dist.init_process_group(
        device.backend,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=device.torch_device if device.is_async else None,
    )
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """The members of a collective in the order of its axes, and their positions in the process group.

    `group` is None for a team of one. `order[i]` is the position of member i in the process group, `inverse` the other
    way round; `is_sorted`: whether the two orders are the same.
    """

    members: tuple[int, ...]
    group: Any = None
    order: tuple[int, ...] = (0,)
    inverse: tuple[int, ...] = (0,)

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.members)

    @property
    def is_sorted(self) -> bool:
        """Whether member i is at position i."""
        return self.order == tuple(range(len(self.order)))


@dataclass(slots=True, eq=False)
class Lane:
    """The receives of one process group that were posted and not started, in the order of posting.

    The messages of a group meet in order, so a receive starts after all that were posted before it.
    """

    posted: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque)
    num_posted: int = 0

    def post(self, start: Callable[[], None]) -> int:
        """Add a receive to the queue; returns its number."""
        self.num_posted += 1
        self.posted.append((self.num_posted, start))
        return self.num_posted

    def start_until(self, number: int) -> None:
        """Start the receives up to this number that have not been started."""
        while self.posted and self.posted[0][0] <= number:
            self.posted.popleft()[1]()


_Flow = tuple[str, int, int]
"""channel, source rank, destination rank."""


@dataclass(slots=True)
class Groups:
    """All process groups of a program. Every rank of the default group must make it, with the same program."""

    program: Program
    device: Device
    timeout_s: float = 60.0
    _by_ranks: dict[tuple[str, tuple[int, ...]], Any] = field(default_factory=dict)
    _flows: dict[_Flow, tuple[Any, int]] = field(default_factory=dict)
    _lanes: dict[int, Lane] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if dist.get_world_size() != self.program.num_ranks:
            raise TwofoldError(
                f"the program is for {self.program.num_ranks} ranks, {dist.get_world_size()} were started; "
                f"start {self.program.num_ranks}"
            )
        for key in sorted(_needed_teams(self.program)):
            self._by_ranks[key] = self._new_group(key[1])
        tags = {channel: tag for tag, channel in enumerate(sorted({flow[0] for flow in _flows_of(self.program)}), 1)}
        if self.device.backend == "gloo":
            self._flows = {flow: (dist.group.WORLD, tags[flow[0]]) for flow in _flows_of(self.program)}
        else:
            self._make_lanes(tags)
        self._warm_up()

    def team(self, channel: str, members: tuple[int, ...]) -> Team:
        """The team of a collective."""
        if len(members) == 1:
            return Team(members=members)
        ordered = sorted(members)
        return Team(
            members=members,
            group=self._by_ranks[channel, tuple(ordered)],
            order=tuple(ordered.index(rank) for rank in members),
            inverse=tuple(members.index(rank) for rank in ordered),
        )

    def flow(self, channel: str, src_rank: int, dst_rank: int) -> tuple[Any, int]:
        """The process group and the tag of messages of a channel from one rank to another."""
        return self._flows[channel, src_rank, dst_rank]

    def lane(self, group: Any) -> Lane | None:
        """The queue of receives over a process group until they are needed; None if they start at once."""
        return None if self.device.backend == "gloo" else self._lanes.setdefault(id(group), Lane())

    def all_agree(self, yes: bool) -> bool:
        """Whether all ranks agree; every rank calls it."""
        vote = torch.tensor(float(yes), device=self.device.torch_device)
        dist.all_reduce(vote, dist.ReduceOp.MIN)
        return vote.item() > 0

    def close(self) -> None:
        """Free the groups."""
        for group in (*self._by_ranks.values(), *{id(g): g for g, _ in self._flows.values()}.values()):
            if group is not dist.group.WORLD and group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        self._by_ranks.clear()
        self._flows.clear()
        self._lanes.clear()

    def _new_group(self, ranks: Sequence[int]) -> Any:
        return dist.new_group(list(ranks), timeout=datetime.timedelta(seconds=self.timeout_s))

    def _make_lanes(self, tags: dict[str, int]) -> None:
        """Two-rank groups per direction; per channel too where sender and receiver order the channels differently."""
        lanes: dict[tuple[int, int, str], Any] = {}
        for flow in sorted(_flows_of(self.program)):
            channel, src, dst = flow
            agreed = _sequence(self.program, src, dst, Kind.SEND) == _sequence(self.program, src, dst, Kind.RECV)
            lane = (src, dst, "" if agreed else channel)
            if lane not in lanes:
                lanes[lane] = self._new_group((src, dst))
            self._flows[flow] = (lanes[lane], tags[channel])

    def _warm_up(self) -> None:
        """One tiny exchange per group, in the same order everywhere: it builds the communicators without deadlock.

        NCCL makes a separate communicator for sending and receiving, and the first rank waits for the other on the
            host: made in the middle of a step, that would be a deadlock (seen on 4 H200).
        """
        token = torch.zeros(1, device=self.device.torch_device)
        for group in self._by_ranks.values():
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.all_reduce(token, group=group)
        rank, lanes = dist.get_rank(), set()
        for flow in sorted(self._flows):
            (group, _), (_, src, dst) = self._flows[flow], flow
            if (id(group), src, dst) in lanes or group is dist.group.WORLD:
                continue
            lanes.add((id(group), src, dst))
            if rank == src:
                dist.send(token, dst, group=group)
            elif rank == dst:
                dist.recv(token, src, group=group)
        self.device.synchronize()


def _needed_teams(program: Program) -> set[tuple[str, tuple[int, ...]]]:
    return {
        (instruction.channel, tuple(sorted(team)))
        for group in program.groups
        for instruction in _instructions(group)
        if instruction.kind is Kind.COLLECTIVE
        for team in (instruction.mesh or group.mesh).groups(instruction.axes)
        if len(team) > 1
    }


def _flows_of(program: Program) -> set[_Flow]:
    return {
        (instruction.channel, *pair)
        for group in program.groups
        for instruction in _instructions(group)
        if instruction.kind in (Kind.SEND, Kind.RECV)
        for pair in instruction.pieces.pairs
    }


def _sequence(program: Program, src: int, dst: int, kind: Kind) -> list[str]:
    """The channels of the messages from `src` to `dst`, in the order of the sender or of the receiver."""
    return [
        instruction.channel
        for _, instruction in program.walk(src if kind is Kind.SEND else dst)
        if instruction.kind is kind and (src, dst) in instruction.pieces.pairs
    ]


def _instructions(group: GroupProgram) -> Iterable[Instruction]:
    """Every instruction once, even if several blocks run its body."""
    bodies = {id(block.body): block.body for block in group.blocks}
    return (instruction for body in bodies.values() for instruction in body.instructions)
