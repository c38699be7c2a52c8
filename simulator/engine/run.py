"""The reference engine: a program in virtual time, with SimPy.

Every rank is a process that walks its program (`simulator.engine.ranks`), communication is matched and ended in
`simulator.engine.exchange`, what is shared is worked off in `simulator.engine.fluid`. Equal inputs give equal
timelines, byte for byte, in any process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import simpy

from plans.errors import TwofoldError, whole_number
from plans.program import Instruction, Program
from plans.timeline import Timeline
from simulator.engine.deadlock import refuse_deadlock
from simulator.engine.exchange import Communication, Exchange, Wires
from simulator.engine.fluid import Cores, Fabric, Rates
from simulator.engine.folding import fold
from simulator.engine.garbage import without_collection
from simulator.engine.matching import match
from simulator.engine.order import LONGEST_PS, CostOf, Names, Order, Table
from simulator.engine.ranks import COMPUTE, HOST, Rank, Recorder
from simulator.timeline.memory import memory_timeline

__all__ = ["Overlap", "Stretch", "run_program"]

Overlap = Callable[[Instruction, Instruction, float, float], tuple[float, float]]
"""(compute, communication, seconds of the one alone, seconds of the other) -> (rate of the one, rate of the other)
while both run on a device; 1 is alone."""

Stretch = Callable[[int, int, int], "npt.NDArray[np.float64] | float | None"]
"""(rank, step, number of instructions) -> a factor for each instruction, one for all, or None for 1.

It acts on dispatch, compute and the processor time of communication, not on links.
"""

_RATE_DIGITS = 10**6
_MOST_RATES = 100_000


@without_collection()
def run_program(
    program: Program,
    cost_of: CostOf,
    *,
    num_steps: int = 1,
    node_of: Callable[[int], int] | None = None,
    cores_per_node: int | None = None,
    host_async: bool = True,
    overlap: Overlap | None = None,
    wires: Wires | None = None,
    cost_of_rank: Mapping[int, CostOf] | None = None,
    stretch: Stretch | None = None,
    with_memory: bool = True,
    fold_ranks: bool = False,
) -> Timeline:
    """Run a program in virtual time.

    Args:
        program: of one step.
        cost_of: the price of an instruction of a group, in whole picoseconds (`costmodels.price.instruction.Cost`).
        A transfer's
            work is that of the slower of its SEND and RECV, for every pair of ranks; pairs run side by side.
        num_steps: steps, back to back on every rank; a rank begins its next step when all that it issued is over.
        node_of: rank -> node, for `cores_per_node`; by default all ranks are on one node.
        cores_per_node: cores that the ranks of a node share. Dispatch, compute and the processor time of
            communication then run at min(1, cores / busy) each. Only with host_async=False.
        host_async: True: compute runs behind the host; False: the host computes, dispatch and work are one span.
        overlap: how compute and communication of a device slow each other. Only with host_async=True.
        wires: the links where they are shared or changed: `simulator.engine.network.Network`, or `Ports` alone.
        cost_of_rank: prices of ranks that are not like the others of their group.
        stretch: slower or jittering ranks.
        with_memory: whether to follow the memory too.
        fold_ranks: simulate equal ranks once (`simulator.engine.folding`) where that changes nothing: not where
        cores or links
            are shared, or ranks have times of their own. The timeline has the spans and the memory of one of each kind
            of rank then, and says how many each stands for (`Timeline.represents`).

    Returns:
        the timeline; spans are ordered by rank, start, end, stream and name. WAIT and blocking communication leave a
        span "wait" on the host where they block it.

    Raises:
        TwofoldError: a bad price or rate, communication without partner, a deadlock.

    >>> from costmodels.price.instruction import Cost
    >>> from plans.layout import Layout
    >>> from plans.program import Block, Body, GroupProgram, Instruction, Kind
    >>> line = Instruction(name="fc.F", kind=Kind.COMPUTE, call="linear.forward", part="F")
    >>> body = Body(name="0F", instructions=(line,))
    >>> blocks = tuple(Block(label=f"0F{number}", micro_batch=number, body=body) for number in range(3))
    >>> group = GroupProgram(mesh=Layout((1,), ("dp",)), values={}, blocks=blocks)
    >>> program = Program(groups=(group,), num_micro_batches=3)
    >>> timeline = run_program(program, lambda instruction, group: Cost(dispatch_ps=2, work_ps=10))
    >>> [(span.id, span.start_ps, span.end_ps) for span in timeline.spans() if span.stream == "compute"]
    [('0F0/fc.F', 2, 12), ('0F1/fc.F', 12, 22), ('0F2/fc.F', 22, 32)]
    """
    num_steps = whole_number("num_steps", num_steps)
    if cores_per_node is not None and (cores_per_node < 1 or host_async):
        raise TwofoldError(
            f"cores_per_node = {cores_per_node} with host_async = {host_async}: cores are shared where hosts compute "
            "(host_async=False), and are at least 1"
        )
    if overlap is not None and not host_async:
        raise TwofoldError("overlap rates are for devices behind their hosts (host_async=True); hosts share cores")
    shares = wires is not None or cores_per_node is not None or bool(cost_of_rank) or stretch is not None
    if fold_ranks and not shares and (folded := fold(program)) is not None:
        if folded.is_exact(cost_of, shares_devices=overlap is not None):
            timeline = run_program(
                folded.program, folded.cost_of(cost_of), num_steps=num_steps, host_async=host_async, overlap=overlap,
                with_memory=with_memory,
            )  # fmt: skip
            return folded.named(timeline, program.num_ranks)
    names = Names()
    orders = [Order(group, names) for group in program.groups]
    tables = [Table.priced(order, cost_of) for order in orders]
    links = match(orders)
    env = simpy.Environment(initial_time=0)
    recorder = Recorder()
    fabric = Fabric(env, _checked(overlap)) if overlap is not None or wires is not None else None
    cores = _cores(env, program, node_of, cores_per_node)

    order_of = {rank: order for order in orders for rank in order.group.ranks}

    def finished(own: Communication) -> None:
        recorder.communication(own, order_of[own.rank].name[own.position])

    exchange = Exchange(env, finished, cores, fabric, all_on_fabric=overlap is not None, wires=wires)
    ranks: dict[int, Rank] = {}
    special: dict[tuple[int, int], Table] = {}
    for position, (order, of_group) in enumerate(zip(orders, tables, strict=True)):
        for number in order.group.ranks:
            table = of_group
            if (own_cost := (cost_of_rank or {}).get(number)) is not None:
                key = (position, id(own_cost))
                table = special[key] = special.get(key) or Table.priced(order, own_cost)
            ranks[number] = rank = Rank(
                number, _table_of(number, table, stretch), links[number], env, exchange, recorder,
                num_steps=num_steps, host_async=host_async,
            )  # fmt: skip
            if cores is not None:
                env.process(rank.run_on_cores(cores[number]))
            elif overlap is not None and fabric is not None:
                env.process(rank.run_on_fabric(fabric))
            else:
                env.process(rank.run_alone())
    env.run()
    if any(not rank.is_finished for rank in ranks.values()):
        refuse_deadlock(orders, links)
        raise AssertionError("ranks are stuck in time, but not in order")
    timeline = _timeline(recorder, names, num_ranks=program.num_ranks, num_steps=num_steps, host_async=host_async)
    if with_memory:
        peaks, curve = memory_timeline(program, timeline, orders)
        timeline = replace(timeline, memory=peaks, memory_curve=curve)
    return timeline


def _table_of(rank: int, table: Table, stretch: Stretch | None) -> Callable[[int], Table]:
    if stretch is None:
        return lambda step: table

    def stretched(step: int) -> Table:
        size = len(table.work_ps)
        factor = stretch(rank, step, size)
        if factor is None:
            return table
        column = np.broadcast_to(np.asarray(factor, dtype=np.float64), (size,))
        if not np.all(np.isfinite(column)) or np.any(column < 0):
            raise TwofoldError(f"the stretch of rank {rank} in step {step} must be finite and at least 0, got {factor}")
        return table.stretched(column)

    return stretched


def _cores(
    env: simpy.Environment, program: Program, node_of: Callable[[int], int] | None, cores_per_node: int | None
) -> Mapping[int, Cores] | None:
    if cores_per_node is None:
        return None
    of_node: dict[int, Cores] = {}
    result: dict[int, Cores] = {}
    for group in program.groups:
        for rank in group.ranks:
            node = node_of(rank) if node_of else 0
            result[rank] = of_node.setdefault(node, Cores(env, cores_per_node))
    return result


def _checked(overlap: Overlap | None) -> Rates | None:
    """The rates as fractions of at most six digits, asked for once per pair of instructions and their lengths."""
    if overlap is None:
        return None
    known: dict[tuple[int, int, int, int], tuple[Fraction, Fraction]] = {}

    def rates(compute: Instruction, compute_ps: int, comm: Instruction, comm_ps: int) -> tuple[Fraction, Fraction]:
        key = (id(compute), compute_ps, id(comm), comm_ps)
        if key not in known:
            if len(known) >= _MOST_RATES:  # jitter draws ever new lengths
                known.clear()
            pair = overlap(compute, comm, compute_ps / 1e12, comm_ps / 1e12)
            if any(not math.isfinite(rate) or rate * _RATE_DIGITS < 1 for rate in pair):
                raise TwofoldError(
                    f"the overlap rates of {compute.call!r} and {comm.call!r} are {pair}; they must be above 0"
                )
            known[key] = (_fraction(pair[0]), _fraction(pair[1]))
        return known[key]

    return rates


def _fraction(rate: float) -> Fraction:
    return Fraction(round(rate * _RATE_DIGITS), _RATE_DIGITS)


def _timeline(recorder: Recorder, names: Names, *, num_ranks: int, num_steps: int, host_async: bool) -> Timeline:
    """The recorded spans in columns, in an order that does not depend on how they came about.

    A step begins with its first compute or communication.
    """
    last = max(recorder.rows[5::6], default=0)
    for records in recorder.runs.values():
        for _, _, run, host, stream in records:
            if (latest := (host if host > stream else stream) + run.total_ps) > last:
                last = latest
    if last > LONGEST_PS:
        raise TwofoldError(
            f"the timeline ends after {last / 1e12:.3g} s, more than {LONGEST_PS / 1e12:.3g} s; check the prices"
        )
    parts = [np.array(recorder.rows, dtype=np.int64).reshape(-1, 6).T]
    for table, records in recorder.runs.items():
        if not records:
            continue
        ranks, steps, runs, hosts, streams = zip(*records, strict=True)
        found = table.spans(runs, hosts, streams, host_async)
        name = np.array(table.order.name, dtype=np.int64)[found["position"]]
        rank = np.array(ranks, dtype=np.int64)[found["record"]]
        step = np.array(steps, dtype=np.int64)[found["record"]]
        parts.append(np.stack([rank, np.full_like(rank, COMPUTE), step, name, found["start"], found["end"]]))
        issued = found["host_end"] > found["host_start"]
        host_rows = [rank, np.full_like(rank, HOST), step, name, found["host_start"], found["host_end"]]
        parts.append(np.stack(host_rows)[:, issued])
    rank, stream_, step, name, start, end = np.concatenate(parts, axis=1)
    order = np.lexsort((name, stream_, end, start, rank))
    starts = np.full(num_steps, LONGEST_PS)
    ends = np.zeros(num_steps, dtype=np.int64)
    # a rank that is done early waits for its next step, or issues it, while others are still in this one
    works = stream_ != HOST if np.any(stream_ != HOST) else stream_ == HOST
    np.minimum.at(starts, step[works], start[works])
    np.maximum.at(ends, step, end)
    starts = np.minimum(starts, ends)  # of a program without instructions
    return Timeline(
        kind="predicted",
        num_ranks=num_ranks,
        names=tuple(names.table),
        rank=rank[order].astype(np.int32),
        stream=stream_[order].astype(np.int8),
        step=step[order].astype(np.int32),
        name_index=name[order].astype(np.int32),
        start_ps=start[order],
        end_ps=end[order],
        step_start_ps=tuple(int(entry) for entry in starts),
        step_end_ps=tuple(int(entry) for entry in ends),
        meta={"engine": "simpy"},
    )
