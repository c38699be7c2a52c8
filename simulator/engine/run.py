"""The reference engine: a program in virtual time.

Ranks walk their programs (`simulator.engine.walk`, and `simulator.engine.ranks` where cores or devices are shared),
communication is matched and ended in `simulator.engine.exchange`, shared resources are simulated in
`simulator.engine.fluid` by the clock of SimPy. Equal inputs give equal timelines, byte for byte, in any process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from plans.errors import TwofoldError, whole_number
from plans.program import Instruction, Program
from plans.timeline import Timeline
from simulator.engine.deadlock import refuse_deadlock
from simulator.engine.exchange import Communication, Exchange, Shared, Wires
from simulator.engine.fluid import Clock, Cores, Fabric, Rates
from simulator.engine.folding import Folded, fold
from simulator.engine.garbage import without_collection
from simulator.engine.matching import Matching, match
from simulator.engine.order import Names, Order
from simulator.engine.prices import CostOf, PriceTable
from simulator.engine.ranks import Over, TimedRanks
from simulator.engine.record import Recorder
from simulator.engine.streams import ShareOf, on_streams
from simulator.engine.walk import Walk
from simulator.timeline.memory import memory_timeline

__all__ = ["ChipShare", "Overlap", "RunOptions", "Slowdown", "run_program"]

Overlap = Callable[[Instruction, Instruction, float, float], tuple[float, float]]
"""(compute, communication, seconds of the one alone, seconds of the other) -> (rate of the one, rate of the other)
while both run on a device; 1 is alone."""

ChipShare = Callable[[Instruction, float], float]
"""(compute, seconds of it alone) -> the share of a device that it keeps busy, from 0 to 1."""

Slowdown = Mapping[int, float] | Callable[[int, int, int], "npt.NDArray[np.float64] | float | None"]
"""rank -> a factor, or (rank, step, number of instructions) -> a factor for each instruction, one for all, or None.

It acts on dispatch, compute and the processor time of communication, not on links.
"""

_RATE_DIGITS = 10**6
_SHARES = 64
_MOST_RATES = 100_000


class RunOptions(TypedDict, total=False):
    """Settings of a simulation.

    Args:
        num_steps: steps, back to back on every rank; a rank begins its next step when all that it issued is over. 1.
        node_of: rank -> node, for `cores_per_node`; by default all ranks are on one node.
        cores_per_node: cores that the ranks of a node share. Dispatch, compute and the processor time of
            communication then run at min(1, cores / busy) each. Only with host_async=False. By default every rank has
            its own.
        host_async: True, the default: compute runs behind the host; False: the host computes, dispatch and work are one
            span.
        launch_ps: host time of every step next to its instructions; 0.
        overlap: how compute and communication of a device slow each other; by default not. Only with host_async=True.
        chip_share: the share of a device that compute keeps busy: what runs on another stream gets the rest, and more
            of it only by slowing it. All of it by default. Only where instructions are on several streams.
        wires: the links where they are shared or changed: `simulator.engine.network.Network`, or `Ports` alone.
        cost_of_rank: prices of ranks that are not like the others of their group.
        slowdown: slower or jittering ranks.
        with_memory: whether to follow the memory too; True.
        fold_ranks: simulate equal ranks once (`simulator.engine.folding`) where that changes nothing: not where
            cores are shared, or ranks jitter. The timeline then has the spans and the memory of one rank of each kind
            (`Timeline.representatives`). False.
    """

    num_steps: int
    node_of: Callable[[int], int] | None
    cores_per_node: int | None
    host_async: bool
    launch_ps: int
    overlap: Overlap | None
    chip_share: ChipShare | None
    wires: Wires | None
    cost_of_rank: Mapping[int, CostOf]
    slowdown: Slowdown | None
    with_memory: bool
    fold_ranks: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """Checked `RunOptions`."""

    num_steps: int = 1
    node_of: Callable[[int], int] | None = None
    cores_per_node: int | None = None
    host_async: bool = True
    launch_ps: int = 0
    overlap: Overlap | None = None
    chip_share: ChipShare | None = None
    wires: Wires | None = None
    cost_of_rank: Mapping[int, CostOf] = field(default_factory=dict)
    slowdown: Slowdown | None = None
    with_memory: bool = True
    fold_ranks: bool = False

    def __post_init__(self) -> None:
        whole_number("num_steps", self.num_steps)
        if self.cores_per_node is not None and (self.cores_per_node < 1 or self.host_async):
            raise TwofoldError(
                f"cores_per_node = {self.cores_per_node} with host_async = {self.host_async}: cores are shared where "
                "hosts compute (host_async=False), and are at least 1"
            )
        if self.overlap is not None and not self.host_async:
            raise TwofoldError("overlap rates are for devices behind their hosts (host_async=True); hosts share cores")

    @property
    def can_fold(self) -> bool:
        """Whether ranks should be folded, can be equal, and the classes are known."""
        return (
            self.fold_ranks
            and self.cores_per_node is None
            and (self.slowdown is None or isinstance(self.slowdown, Mapping))
        )

    def folded(self, folded: Folded) -> _Settings:
        """The settings for the program of representatives."""
        slow = self.slowdown if isinstance(self.slowdown, Mapping) else {}
        return replace(
            self,
            wires=None if self.wires is None else folded.wires(self.wires),
            cost_of_rank={
                number: folded.cost_of(self.cost_of_rank[rank])
                for number, rank in enumerate(folded.ranks)
                if rank in self.cost_of_rank
            },
            slowdown={number: slow[rank] for number, rank in enumerate(folded.ranks) if rank in slow},
        )


@without_collection()
def run_program(program: Program, cost_of: CostOf, **options: Unpack[RunOptions]) -> Timeline:
    """Run a program in virtual time.

    Args:
        program: program of one step.
        cost_of: the price of an instruction of a group, in whole picoseconds (`costmodels.price.instruction.Cost`).
            A transfer's work is that of the slower of its SEND and RECV, for every pair of ranks; pairs run side by
            side.
        options: see `RunOptions`.

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
    settings = _Settings(**options)
    timeline = _folded_timeline(program, cost_of, settings) if settings.can_fold else None
    return replace(timeline or _run(program, cost_of, settings), program=program)


def _folded_timeline(program: Program, cost_of: CostOf, settings: _Settings) -> Timeline | None:
    """The timeline of the representatives; None where ranks do not fold, or where an error should name all ranks."""
    if (folded := _folded(program, cost_of, settings)) is None:
        return None
    try:
        return folded.named(_run(folded.program, folded.cost_of(cost_of), settings.folded(folded)))
    except TwofoldError:
        return None


def _folded(program: Program, cost_of: CostOf, settings: _Settings) -> Folded | None:
    slow = settings.slowdown if isinstance(settings.slowdown, Mapping) else {}
    special = {rank: id(own) for rank, own in settings.cost_of_rank.items()}
    kinds = {rank: (special.get(rank), slow.get(rank)) for rank in special.keys() | slow.keys()}
    return fold(program, cost_of, kinds=kinds, wires=settings.wires)


def _run(program: Program, cost_of: CostOf, settings: _Settings) -> Timeline:
    names = Names()
    orders = [Order(group, names) for group in program.groups]
    tables = [PriceTable.priced(order, cost_of, settings.launch_ps) for order in orders]
    matching = match(orders)
    recorder = Recorder({rank: order for order in orders for rank in order.group.ranks})
    prices = _Prices(orders, tables, settings)
    if settings.cores_per_node is not None:
        stuck = _on_cores(program, matching, prices, recorder, settings)
    elif settings.overlap is not None or (settings.host_async and any(order.stream_order for order in orders)):
        stuck = _on_devices(orders, matching, prices, recorder, settings)
    else:
        shared = None
        if settings.wires is not None:
            env = Clock()
            shared = Shared(env, fabric=Fabric(env, None), wires=settings.wires)
        walk = Walk(
            matching, prices, recorder, num_steps=settings.num_steps, host_async=settings.host_async, shared=shared
        )
        walk.run()
        stuck = bool(walk.waiting_for)
    if stuck:
        refuse_deadlock(orders, matching)
        raise AssertionError("ranks are stuck in simulated time although their order has no deadlock")
    timeline = recorder.timeline(
        names, num_ranks=program.num_ranks, num_steps=settings.num_steps, host_async=settings.host_async
    )
    if settings.with_memory:
        peaks, curve = memory_timeline(program, timeline, orders)
        timeline = replace(timeline, memory=peaks, memory_curve=curve)
    return timeline


def _on_cores(program: Program, matching: Matching, prices: _Prices, recorder: Recorder, settings: _Settings) -> bool:
    """Run ranks that share the cores of their nodes; returns whether some ranks are stuck."""
    assert settings.cores_per_node is not None
    env = Clock()
    of_node: dict[int, Cores] = {}
    cores: dict[int, Cores] = {}
    for rank in matching.peers:
        node = settings.node_of(rank) if settings.node_of else 0
        cores[rank] = of_node.setdefault(node, Cores(env, settings.cores_per_node))
    fabric = Fabric(env, None) if settings.wires is not None else None
    ranks = _timed(env, Shared(env, cores=cores, fabric=fabric, wires=settings.wires), prices, recorder, settings)
    for rank, peers in matching.peers.items():
        env.process(ranks.on_cores(rank, peers, cores[rank]))
    env.run()
    return len(ranks.finished) < program.num_ranks


def _on_devices(
    orders: Sequence[Order], matching: Matching, prices: _Prices, recorder: Recorder, settings: _Settings
) -> bool:
    """Run ranks whose concurrent work on a device slows each other; returns whether some ranks are stuck."""
    env = Clock()
    fabric = Fabric(env, _checked(_undisturbed if settings.overlap is None else settings.overlap))
    shared = Shared(env, fabric=fabric, all_on_fabric=True, wires=settings.wires)
    ranks = _timed(env, shared, prices, recorder, settings)
    share_of = _share_of(settings.chip_share)
    for order in orders:
        for rank in order.group.ranks:
            peers = matching.peers[rank]
            one = order.stream_order is None
            env.process(
                ranks.on_fabric(rank, peers, fabric) if one else on_streams(ranks, rank, peers, fabric, share_of)
            )
    env.run()
    return len(ranks.finished) < len(matching.peers)


def _share_of(chip_share: ChipShare | None) -> ShareOf:
    """Shares as integer multiples of 1 / `_SHARES`, so that rates have few denominators."""
    if chip_share is None:
        return lambda instruction, work_ps: Fraction(1)

    def share_of(instruction: Instruction, work_ps: int) -> Fraction:
        share = chip_share(instruction, work_ps / 1e12)
        if not 0 <= share <= 1:
            raise TwofoldError(f"{instruction.call!r} takes the share {share} of a device; shares are from 0 to 1")
        return Fraction(max(1, round(share * _SHARES)), _SHARES)

    return share_of


def _undisturbed(_compute: Instruction, _comm: Instruction, _compute_s: float, _comm_s: float) -> tuple[float, float]:
    return 1.0, 1.0


def _timed(env: Clock, shared: Shared, prices: _Prices, recorder: Recorder, settings: _Settings) -> TimedRanks:
    def wake(over: Communication) -> None:
        waiter: Over = over.waiter
        waiter.after(over.end - int(env.now))

    return TimedRanks(env, Exchange(recorder.communication, wake, shared), recorder, prices, settings.num_steps, set())


class _Prices:
    """(rank, step) -> the prices of that step."""

    def __init__(self, orders: Sequence[Order], tables: Sequence[PriceTable], settings: _Settings) -> None:
        self._slowdown = settings.slowdown
        self._slowed: dict[tuple[int, object], PriceTable] = {}  # of factors that do not change
        self._table_of: dict[int, PriceTable] = {}
        special: dict[tuple[int, int], PriceTable] = {}
        for number, (order, table) in enumerate(zip(orders, tables, strict=True)):
            for rank in order.group.ranks:
                self._table_of[rank] = table
                if (cost_of := settings.cost_of_rank.get(rank)) is not None:
                    key = (number, id(cost_of))
                    if key not in special:
                        special[key] = PriceTable.priced(order, cost_of, settings.launch_ps)
                    self._table_of[rank] = special[key]

    def __call__(self, rank: int, step: int) -> PriceTable:
        table = self._table_of[rank]
        if self._slowdown is None:
            return table
        size = len(table.work_ps)
        is_fixed = isinstance(self._slowdown, Mapping)
        factor = self._slowdown.get(rank) if isinstance(self._slowdown, Mapping) else self._slowdown(rank, step, size)
        if factor is None:
            return table
        if is_fixed and (id(table), factor) in self._slowed:
            return self._slowed[id(table), factor]
        column = np.broadcast_to(np.asarray(factor, dtype=np.float64), (size,))
        if not np.all(np.isfinite(column)) or np.any(column < 0):
            raise TwofoldError(
                f"the slowdown of rank {rank} in step {step} must be finite and at least 0, got {factor}"
            )
        slowed = table.slowed(column)
        if is_fixed:
            self._slowed[id(table), factor] = slowed
        return slowed


def _checked(overlap: Overlap) -> Rates:
    """The rates as fractions of at most six digits, computed once per pair of instructions and their lengths."""
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
