"""What a rank does, as SimPy processes: issue in program order, compute, wait.

A rank has a host, a compute stream and communication streams. Where nothing is shared a rank's own clocks (`host`,
`stream`) may run ahead of the environment's: nothing it does afterwards can change what happens before, because it
stops at every WAIT whose end is not known. Where cores or devices are shared it keeps step with the environment; what
computes on a device while nothing communicates there takes one event, which the next communication cuts short.

Communication that is issued starts after the compute issued before it (as a communication stream that waits for the
current stream does), and a WAIT holds up what follows: the host itself where the host computes, the compute stream
where compute runs behind the host.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping

import simpy

from plans.program import Instruction
from simulator.engine.exchange import Communication, Exchange, Over
from simulator.engine.fluid import Cores, Fabric, Now
from simulator.engine.matching import Links
from simulator.engine.order import ISSUE, RUN, Run, Table

__all__ = ["COMM", "COMPUTE", "HOST", "Rank", "Recorder"]

HOST, COMPUTE, COMM = range(3)
"""Numbers of the streams, as in `plans.timeline.STREAMS`."""

Process = Generator[simpy.Event, object, None]


class Recorder:
    """What is kept of a simulation: single spans as rows, runs with the times at which they began."""

    def __init__(self) -> None:
        self.rows: list[int] = []  # rank, stream, step, name, start, end, and so on
        self.runs: dict[Table, list[tuple[int, int, Run, int, int]]] = {}  # rank, step, run, host, stream

    def span(self, rank: int, stream: int, step: int, name: int, start_ps: int, end_ps: int) -> None:
        """Keep one span."""
        self.rows += (rank, stream, step, name, start_ps, end_ps)

    def communication(self, own: Communication, name: int) -> None:
        """Keep the span of a communication that is over."""
        self.rows += (own.rank, COMM, own.step, name, own.start, own.end)


class Rank:
    """One rank.

    Args:
        rank: its number.
        table_of: step -> the prices of that step.
        links: of its communications by position.
        env, exchange, recorder: what it shares with the others.
        num_steps: steps to run, one after the other.
        host_async: whether compute runs behind the host.
    """

    def __init__(
        self,
        rank: int,
        table_of: Callable[[int], Table],
        links: Mapping[int, Links],
        env: simpy.Environment,
        exchange: Exchange,
        recorder: Recorder,
        *,
        num_steps: int,
        host_async: bool,
    ) -> None:
        self.rank = rank
        self.is_finished = False
        self.num_instructions = 0
        self._table_of = table_of
        self._links = links
        self._env = env
        self._exchange = exchange
        self._recorder = recorder
        self._num_steps = num_steps
        self._host_async = host_async

    def run_alone(self) -> Process:
        """Nothing of the rank is shared: clocks run ahead, events are needed only where an end is not known."""
        is_async, host, stream = self._host_async, 0, 0
        record = self._recorder.span
        for step in range(self._num_steps):
            table = self._table_of(step)
            order, runs = table.order, table.runs
            kept = self._recorder.runs.setdefault(table, [])
            slots: list[Communication | None] = [None] * order.num_slots
            unwaited: list[Communication] = []
            for kind, position, slot in order.segments:
                if kind == RUN:
                    run = runs[position]
                    kept.append((self.rank, step, run, host, stream))
                    if is_async:
                        ahead = host + run.lead_ps
                        stream = run.work_ps + (stream if stream > ahead else ahead)
                        host += run.dispatch_ps
                    else:
                        host += run.total_ps
                    continue
                dispatch = table.dispatch_ps[position]
                own: Communication | None
                if kind == ISSUE:
                    links = self._links[position]
                    if not links.keys:  # no piece of the transfer is this rank's
                        continue
                    own = self._issued(step, position, links, table)
                    if dispatch:
                        record(self.rank, HOST, step, order.name[position], host, host + dispatch)
                        host += dispatch
                    self._exchange.post(own, host if host > stream else stream)
                    if slot >= 0:
                        slots[slot] = own
                        if position in order.unwaited:
                            unwaited.append(own)
                        continue
                else:
                    if dispatch:
                        record(self.rank, HOST, step, order.name[position], host, host + dispatch)
                        host += dispatch
                    own = slots[slot]
                    if own is None:
                        continue
                if not own.done:
                    yield self._over(own)
                if is_async:
                    if own.end > stream:
                        stream = own.end
                elif own.end > host:
                    record(self.rank, HOST, step, order.wait_name[position], host, own.end)
                    host = own.end
            for own in unwaited:
                if not own.done:
                    yield self._over(own)
                if own.end > max(host, stream):
                    if not is_async:
                        record(self.rank, HOST, step, order.wait_name[own.position], host, own.end)
                    host = own.end
            host = stream = max(host, stream)
        self.is_finished = True

    def run_on_cores(self, cores: Cores) -> Process:
        """The host computes, on cores that others use too."""
        env = self._env
        record = self._recorder.span
        for step in range(self._num_steps):
            table = self._table_of(step)
            order = table.order
            slots: list[Communication | None] = [None] * order.num_slots
            unwaited: list[Communication] = []
            for kind, position, slot in order.segments:
                start = int(env.now)
                if kind == RUN:
                    run = table.runs[position]
                    ended = env.event()
                    activity = cores.add(run.total_ps, ended.succeed, run.marks)
                    yield ended
                    for where, end in zip(range(run.first, run.stop), activity.times, strict=True):
                        record(self.rank, COMPUTE, step, order.name[where], start, end)
                        start = end
                    continue
                is_issue = kind == ISSUE
                if is_issue and not self._links[position].keys:
                    continue
                if dispatch := table.dispatch_ps[position]:
                    ended = env.event()
                    cores.add(dispatch, ended.succeed)
                    yield ended
                    record(self.rank, HOST, step, order.name[position], start, int(env.now))
                if is_issue:
                    own = self._issued(step, position, self._links[position], table)
                    self._exchange.post(own, int(env.now))
                    if slot >= 0:
                        slots[slot] = own
                        if position in order.unwaited:
                            unwaited.append(own)
                        continue
                else:
                    waited = slots[slot]
                    if waited is None:
                        continue
                    own = waited
                yield from self._block(own, step, order.wait_name[position])
            for own in unwaited:
                yield from self._block(own, step, order.wait_name[own.position])
        self.is_finished = True

    def run_on_fabric(self, fabric: Fabric) -> Process:
        """Compute runs behind the host, on a device whose communication slows it."""
        host, stream = 0, 0
        record = self._recorder.span
        for step in range(self._num_steps):
            table = self._table_of(step)
            order = table.order
            slots: list[Communication | None] = [None] * order.num_slots
            unwaited: list[Communication] = []
            for kind, position, slot in order.segments:
                if kind == RUN:
                    host, stream = yield from self._run_beside(fabric, step, table, table.runs[position], host, stream)
                    continue
                is_issue = kind == ISSUE
                if is_issue and not self._links[position].keys:
                    continue
                if dispatch := table.dispatch_ps[position]:
                    record(self.rank, HOST, step, order.name[position], host, host + dispatch)
                    host += dispatch
                if is_issue:
                    own = self._issued(step, position, self._links[position], table)
                    self._exchange.post(own, max(host, stream))
                    if slot >= 0:
                        slots[slot] = own
                        if position in order.unwaited:
                            unwaited.append(own)
                        continue
                else:
                    waited = slots[slot]
                    if waited is None:
                        continue
                    own = waited
                if not own.done:
                    yield self._over(own)
                stream = max(stream, own.end)
            for own in unwaited:
                if not own.done:
                    yield self._over(own)
                stream = max(stream, own.end)
            host = stream = max(host, stream)
        self.is_finished = True

    def _run_beside(
        self, fabric: Fabric, step: int, table: Table, run: Run, host: int, stream: int
    ) -> Generator[simpy.Event, object, tuple[int, int]]:
        """A run on a device: all that comes before the next communication there at once, beside one step by step.

        Returns:
            when host and stream are free.
        """
        env, order, record, where = self._env, table.order, self._recorder.span, run.first
        while where < run.stop:
            begun = -1  # of an instruction that is under way
            if fabric.is_quiet(self.rank):
                ends = self._ends(table, where, run.stop, host, stream)
                if ends[-1][2] > env.now:
                    stopped = fabric.run_ahead(self.rank, ends[-1][2])
                    yield stopped
                now = int(env.now)
                if ends[-1][2] <= now and where == run.first:
                    self._recorder.runs.setdefault(table, []).append((self.rank, step, run, host, stream))
                    return ends[-1][0], ends[-1][2]
                for issued, begins, end in ends:
                    if end > now and begins >= now:  # not begun
                        break
                    if issued > host:
                        record(self.rank, HOST, step, order.name[where], host, issued)
                    host = issued
                    if end > now:
                        begun, stream = begins, end
                        break
                    record(self.rank, COMPUTE, step, order.name[where], begins, end)
                    stream = end
                    where += 1
                if where == run.stop:
                    break
            if begun < 0:
                if dispatch := table.dispatch_ps[where]:
                    record(self.rank, HOST, step, order.name[where], host, host + dispatch)
                    host += dispatch
                begins = stream = max(host, stream)
                work_ps = table.work_ps[where]
                if work_ps and begins > env.now:
                    yield env.timeout(begins - int(env.now))
            else:
                begins, work_ps = begun, stream - int(env.now)
            if work_ps:
                ended = Now(env)
                kind, whole_ps = order.instructions[where], table.work_ps[where]
                fabric.compute(self.rank, kind, whole_ps, ended.happen, left_ps=work_ps)
                yield ended
                stream = int(env.now)
            record(self.rank, COMPUTE, step, order.name[where], begins, stream)
            where += 1
        return host, stream

    @staticmethod
    def _ends(table: Table, first: int, stop: int, host: int, stream: int) -> list[tuple[int, int, int]]:
        """(issued, begins, ends) of instructions that nothing slows."""
        found = []
        for dispatch, work in zip(table.dispatch_ps[first:stop], table.work_ps[first:stop], strict=True):
            host += dispatch
            begins = host if host > stream else stream
            stream = begins + work
            found.append((host, begins, stream))
        return found

    def _issued(self, step: int, position: int, links: Links, table: Table) -> Communication:
        instruction: Instruction = table.order.instructions[position]
        return Communication(
            self.rank, step, position, instruction, links, table.work_ps[position], table.cpu_ps[position]
        )

    def _over(self, own: Communication) -> Over:
        """The event of its end."""
        own.event = Over(self._env)
        return own.event

    def _block(self, own: Communication, step: int, name: int) -> Process:
        """Wait in virtual time, and keep the span if it took any."""
        start = int(self._env.now)
        if not own.done:
            yield self._over(own)
        elif own.end > start:
            yield self._env.timeout(own.end - start)
        if self._env.now > start:
            self._recorder.span(self.rank, HOST, step, name, start, int(self._env.now))
