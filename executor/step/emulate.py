"""Emulation: ranks exchange real values while every instruction takes a multiple of its modelled time.

With `--emulate MACHINE --dilate K` the ranks compute and exchange real values over gloo, but every instruction lasts K
times its predicted time. So the meaning of time (what waits for what, what overlaps) can be checked without the
machine. K must lift the shortest instruction far above the real work (about 50 ms on two cores with eight ranks), and
results are always labelled "emulated".

A rank has three kinds of lanes, as in the simulator:

* the **host** issues one instruction after the other, each for its dispatch time;
* the **compute** lane runs COMPUTE in order, each for its work time. Where the machine is `host_async` it is a thread
  of its own behind the host, and waiting for communication stops it, not the host; otherwise it is the host itself;
* one **comm** lane per channel, a thread: the members first tell each other when they arrived (an all-reduce of
  the maximum, or two messages for a transfer), exchange the values, and are done one work time after the last arrival.
  A member arrives when its compute lane has come to the instruction (which is when its inputs exist, as on a CUDA
  stream) and the channel is free.

Lanes sleep until absolute deadlines of the monotonic clock, which the processes of one host share. A lane that wakes up
late by less than `SLACK_NS` continues from its deadline, so that late wake-ups do not add up; one that is later than
that (the real work took longer than the modelled one) continues from the real time, and is counted in `num_late`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from executor.device import Device, now_ns
from executor.step.code import Code, RecordedStep
from executor.step.comm import Work
from executor.step.groups import Groups
from executor.step.interpreter import Interpreter
from plans.errors import TwofoldError
from plans.program import GroupProgram, Instruction, Kind, Program
from plans.streams import stream_order

__all__ = ["SLACK_NS", "EmulatedInterpreter", "Emulation"]

SLACK_NS = 2_000_000
"""A late wake-up below this is the operating system's; 2 ms is 4 % of the shortest sensible instruction."""

_PS_PER_NS = 1000
_SELF_TRANSFER_TIMEOUT_S = 60.0  # how long a RECV waits for this rank's own SEND, which another thread issues


class _Cost(Protocol):
    @property
    def dispatch_ps(self) -> int: ...

    @property
    def work_ps(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """The settings of an emulated run.

    Args:
        machine: its name, for labels.
        dilate: K, by which every modelled time is multiplied.
        cost_of: (instruction, group) -> cost with dispatch_ps and work_ps, undilated.
        host_async: whether compute runs behind the host.
    """

    machine: str
    dilate: float
    cost_of: Callable[[Instruction, GroupProgram], _Cost]
    host_async: bool = True

    def __post_init__(self) -> None:
        if not self.dilate > 0:
            raise TwofoldError(f"--dilate must be above 0, it is {self.dilate}")


@dataclass(slots=True, eq=False)
class _Transit:
    """One communication in progress on a communication lane."""

    code: Code
    inputs: tuple[Tensor, ...]
    arrived_ns: int
    done: threading.Event = field(default_factory=threading.Event)
    outputs: tuple[Tensor, ...] = ()
    start_ns: int = 0
    end_ns: int = 0
    error: BaseException | None = None


@dataclass(slots=True)
class _Clock:
    """The time line of one lane: `time_ns` is when it is free."""

    time_ns: int = 0
    num_late: int = 0

    def start(self, ready_ns: int) -> int:
        """The time at which work that is ready at `ready_ns` can start here."""
        start, now = max(self.time_ns, ready_ns), now_ns()
        if now - start > SLACK_NS:
            self.num_late += 1
            return now
        return start

    def sleep_until(self, deadline_ns: int) -> int:
        """Sleep, and advance to the deadline, or to the real time if that is much later."""
        while (left := deadline_ns - now_ns()) > 0:
            time.sleep(left / 1e9)
        if -left > SLACK_NS:
            self.num_late += 1
            deadline_ns -= left
        self.time_ns = deadline_ns
        return deadline_ns


class EmulatedInterpreter(Interpreter):
    """An `Interpreter` whose instructions take modelled time; takes the same arguments and `emulation`.

    Every step is recorded: `record` returns its spans and `step` drops them. `num_late` counts how often the real work
    outlasted the modelled one; where it grows, dilate more.

    Raises:
        TwofoldError: a device other than the CPU, interleaved slices where compute runs behind the host.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        device: Device,
        groups: Groups | None = None,
        *,
        emulation: Emulation,
        memory_limit_bytes: int | None = None,
    ) -> None:
        if device.is_async:
            raise TwofoldError(f"emulation runs on CPU ranks, not on {device.kind}")
        if emulation.host_async and stream_order(program.group_of(rank)) is not None:
            raise TwofoldError(
                "interleaved slices compute on two streams of a device, and emulation has one: emulate a plan with "
                'interleave_order "sequential" or without slices'
            )
        super().__init__(program, rank, device, groups, memory_limit_bytes=memory_limit_bytes)
        self.emulation = emulation
        self.num_late = 0
        for self_transfer in self._self_transfers.values():
            self_transfer.timeout_s = _SELF_TRANSFER_TIMEOUT_S
        self._costs = [self._dilated(code.instruction) for code in self.codes]
        self._gates = {id(code): _gate(code, self, groups) for code in self.codes if code.launch is not None}

    def _dilated(self, instruction: Instruction) -> tuple[int, int]:
        cost, factor = self.emulation.cost_of(instruction, self.group), self.emulation.dilate / _PS_PER_NS
        return round(cost.dispatch_ps * factor), round(cost.work_ps * factor)

    def _run(self) -> None:
        self._run_recorded(now_ns())

    def _run_checked(self) -> None:
        self._run_recorded(now_ns())

    def _run_recorded(self, start_ns: int) -> RecordedStep:
        run = _EmulatedStep(interpreter=self)
        try:
            recorded = run.go()
        except Exception as error:
            if run.failed is not None:
                self._explain(error, run.failed)
            raise
        self.num_late += run.num_late
        return recorded


@dataclass(slots=True, eq=False)
class _EmulatedStep:
    """The lanes of one rank during one step."""

    interpreter: EmulatedInterpreter
    host: _Clock = field(default_factory=_Clock)
    compute: _Clock = field(default_factory=_Clock)
    comm: dict[tuple[str, Kind], queue.SimpleQueue[_Transit | None]] = field(default_factory=dict)
    threads: list[threading.Thread] = field(default_factory=list)
    clocks: list[_Clock] = field(default_factory=list)
    failed: Code | None = None
    error: BaseException | None = None
    host_ns: list[tuple[int, int]] = field(default_factory=list)
    compute_ns: list[tuple[int, int]] = field(default_factory=list)
    in_transit: list[_Transit] = field(default_factory=list)

    @property
    def num_late(self) -> int:
        return sum(clock.num_late for clock in (self.host, self.compute, *self.clocks))

    def go(self) -> RecordedStep:
        start_ns = now_ns()
        self.host.time_ns = self.compute.time_ns = start_ns
        try:
            if self.interpreter.emulation.host_async:
                self._host_ahead()
            else:
                self._host_computes()
            self._drain()
        finally:
            for lane in self.comm.values():
                lane.put(None)
        if self.error is not None:
            raise self.error
        end_ns = max(
            self.host.time_ns, self.compute.time_ns, *(transit.end_ns for transit in self.in_transit), start_ns
        )
        return RecordedStep(
            start_ns=start_ns,
            end_ns=end_ns,
            host_ns=self.host_ns,
            device_ns=self.compute_ns,
            comm_ns=[(transit.code.id, transit.start_ns, transit.end_ns) for transit in self.in_transit],
        )

    # -- the two forms of a host ---------------------------------------------------------------------------------------

    def _host_computes(self) -> None:
        """The host thread dispatches and computes."""
        for code, (dispatch_ns, work_ns) in zip(self.interpreter.codes, self.interpreter._costs, strict=True):
            self.failed = code
            start = self.host.start(0)
            self.host.sleep_until(start + dispatch_ns)
            dispatched = self.host.time_ns
            self.compute.time_ns = dispatched
            self._on_compute(code, dispatched, work_ns)
            self.host.time_ns = self.compute.time_ns
            # the host is busy with compute itself; for communication it is busy until it may continue
            is_compute = code.instruction.kind is Kind.COMPUTE
            self.host_ns.append((start, dispatched if is_compute else self.host.time_ns))
        self.failed = None

    def _host_ahead(self) -> None:
        """The host thread only dispatches; a compute thread executes the rest in order."""
        work: queue.SimpleQueue[tuple[Code, int, int] | None] = queue.SimpleQueue()

        def compute() -> None:
            with torch.inference_mode():
                while (item := work.get()) is not None:
                    if self.error is None:
                        try:
                            self._on_compute(*item)
                        except BaseException as error:
                            self.failed, self.error = item[0], error

        thread = threading.Thread(target=compute, name="emulated compute", daemon=True)
        thread.start()
        try:
            for code, (dispatch_ns, work_ns) in zip(self.interpreter.codes, self.interpreter._costs, strict=True):
                start = self.host.start(0)
                self.host_ns.append((start, self.host.sleep_until(start + dispatch_ns)))
                work.put((code, self.host.time_ns, work_ns))
                if self.error is not None:
                    break
        finally:
            work.put(None)
            thread.join()

    def _on_compute(self, code: Code, ready_ns: int, work_ns: int) -> None:
        """Execute one instruction on the compute lane, which may be the host's own."""
        env, instruction = self.interpreter._env, code.instruction
        start = self.compute.start(ready_ns)
        self.compute.time_ns = start
        if instruction.kind is Kind.COMPUTE:
            code.run()
            self.compute.sleep_until(start + work_ns)
        elif instruction.kind is Kind.WAIT:
            assert code.token is not None
            self._join(env[code.token], code.writes)
        else:
            transit = _Transit(code=code, inputs=tuple(env[slot] for slot in code.reads), arrived_ns=start)
            self.in_transit.append(transit)
            self._lane(instruction).put(transit)
            if code.token is None:
                self._join(transit, code.writes)
            else:
                env[code.token] = transit
        self.compute_ns.append((start, self.compute.time_ns))
        for slot in code.frees:
            env[slot] = None

    def _join(self, transit: _Transit, writes: tuple[int, ...]) -> None:
        transit.done.wait()
        if transit.error is not None:
            self.failed = transit.code
            raise transit.error
        for slot, output in zip(writes, transit.outputs, strict=False):
            self.interpreter._env[slot] = output
        transit.outputs = ()
        self.compute.time_ns = max(self.compute.time_ns, transit.end_ns)

    # -- communication -------------------------------------------------------------------------------------------------

    def _lane(self, instruction: Instruction) -> queue.SimpleQueue[_Transit | None]:
        """The lane of a channel; sends and receives have separate lanes, so that a group can send to itself."""
        key = (instruction.channel, instruction.kind)
        if key not in self.comm:
            lane: queue.SimpleQueue[_Transit | None] = queue.SimpleQueue()
            self.comm[key] = lane
            clock = _Clock()
            self.clocks.append(clock)
            thread = threading.Thread(target=self._serve, args=(lane, clock), name=f"emulated {key[0]}", daemon=True)
            self.threads.append(thread)
            thread.start()
        return self.comm[key]

    def _serve(self, lane: queue.SimpleQueue[_Transit | None], clock: _Clock) -> None:
        works = dict(zip(map(id, self.interpreter.codes), self.interpreter._costs, strict=True))
        with torch.inference_mode():
            while (transit := lane.get()) is not None:
                try:
                    assert transit.code.launch is not None
                    arrived = clock.start(transit.arrived_ns)
                    met = self.interpreter._gates[id(transit.code)]
                    work, begun = met.meet(transit, arrived)
                    before_ns = now_ns()
                    transit.outputs = work.finish()
                    transit.start_ns = min(begun, default=arrived)
                    end_ns = max(begun) + works[id(transit.code)][1] if begun else arrived
                    if met.own and now_ns() - before_ns > SLACK_NS:
                        end_ns = max(end_ns, now_ns())  # had to wait for this rank's own SEND, which takes no work
                    transit.end_ns = clock.sleep_until(end_ns)
                except BaseException as error:
                    transit.error = error
                finally:
                    transit.inputs = ()
                    transit.done.set()

    def _drain(self) -> None:
        """Wait for all communication at the end of a step."""
        for transit in self.in_transit:
            transit.done.wait()
            if transit.error is not None and self.error is None:
                self.failed, self.error = transit.code, transit.error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gate:
    """The meeting point of the members of one communication.

    `meet` launches a communication that arrived at the given time, and returns when the last member arrived: one time
    for a collective, one for every peer of a transfer. `own` is true where a rank receives from itself.
    """

    meet: Callable[[_Transit, int], tuple[Work, list[int]]]
    own: bool = False


def _gate(code: Code, interpreter: Interpreter, groups: Groups | None) -> _Gate:
    instruction, rank, launch = code.instruction, interpreter.rank, code.launch
    assert launch is not None
    if instruction.kind is Kind.COLLECTIVE:
        members = interpreter.group.members(instruction, rank)
        team = groups.team(instruction.channel, members) if groups is not None and len(members) > 1 else None

        def collective(transit: _Transit, arrived_ns: int) -> tuple[Work, list[int]]:
            last = torch.tensor([arrived_ns])
            if team is not None:
                dist.all_reduce(last, dist.ReduceOp.MAX, group=team.group)
            return launch(*transit.inputs), last.tolist()

        return _Gate(meet=collective)
    sending = instruction.kind is Kind.SEND
    mine = sorted(instruction.pieces.pairs_of(rank, sends=sending))
    ways = []
    for src, dst in mine:
        if src != dst:
            assert groups is not None
            ways.append((dst if sending else src, *groups.flow(instruction.channel, src, dst)))
    to_tag, from_tag = (_SENDER_TAG, _RECEIVER_TAG) if sending else (_RECEIVER_TAG, _SENDER_TAG)

    def transfer(transit: _Transit, arrived_ns: int) -> tuple[Work, list[int]]:
        here = torch.tensor([arrived_ns])
        there = [torch.zeros_like(here) for _ in ways]
        works: list[Any] = []
        for (peer, group, tag), answer in zip(ways, there, strict=True):
            works.append(dist.irecv(answer, peer, group=group, tag=tag + from_tag))
            works.append(dist.isend(here, peer, group=group, tag=tag + to_tag))
        started = launch(*transit.inputs)
        for work in works:
            work.wait()
        return started, [max(arrived_ns, int(answer.item())) for answer in there]

    return _Gate(meet=transfer, own=not sending and (rank, rank) in mine)


_SENDER_TAG, _RECEIVER_TAG = 1 << 20, 1 << 21
"""Added to a channel's tag for the arrival times of the two ends; above the tags of all channels."""
