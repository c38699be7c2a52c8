"""Prices for the search: seconds of one instruction, and of one redistribution step.

Both assume that every rank is busy. A redistribution step costs as much as the instructions that lowering emits for it,
including waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from costmodels import (
    Cost,
    Group,
    Machine,
    mesh_group,
    price,
    price_collective,
    price_compute,
    price_exchange,
    price_wait,
)
from costmodels.price.compute import fused_name
from plans.layout import Layout
from plans.lower import Choice
from plans.lower.emit import step_instructions
from plans.program import GroupProgram, Instruction, Kind, Value
from plans.redistribution import Step, StepKind
from plans.redistribution.price import LocalPrice
from plans.timeline import PS_PER_S
from search.operators.operator_costs import InstructionCost

__all__ = [
    "StepSeconds", "instruction_cost", "known_moves", "ranks_per_core", "redistribution_choice", "without_copies",
]  # fmt: skip


_FEW_PRICES = 256

_PASSED_ON = ("add.grad0", "add.grad1")
"""Calls that may return their input without any work."""


def instruction_cost(machine: Machine, mesh: Layout, num_ranks: int, *, fused: bool = False) -> InstructionCost:
    """The price of an instruction of a group on `mesh`, one of `num_ranks` ranks.

    Host time is added where the host itself computes, and cores that ranks share are taken as shared by all of them. A
    SEND and its RECV both take host and processor time, but are under way together: the RECV has the time on the links.

    Where lowering fuses runs of instructions (`fused`) what may become part of one is priced alone, which is more than
    its part of the run.
    """
    return _InstructionSeconds(machine, mesh, num_ranks, fused)


class _InstructionSeconds:
    """See `instruction_cost`."""

    def __init__(self, machine: Machine, mesh: Layout, num_ranks: int, fused: bool) -> None:
        self.machine, self.num_ranks, self.fused = machine, num_ranks, fused
        self.mesh, self.shared = mesh, ranks_per_core(machine, num_ranks)
        self._known: dict[tuple[int, int], tuple[Cost, object, object]] = {}

    def __call__(self, instruction: Instruction, values: Mapping[str, Value] | None = None) -> float:
        """Seconds, as the search counts them."""
        return _counted_s(self.machine, self.shared, instruction.kind, self._price(instruction, values))

    def _price(self, instruction: Instruction, values: Mapping[str, Value] | None) -> Cost:
        """The price, which is kept for some instructions: of those of an operator each is asked for several times."""
        key = id(instruction), id(values)
        if key not in self._known:
            if len(self._known) >= _FEW_PRICES:
                self._known.clear()
            group = GroupProgram(mesh=self.mesh, values=values or {}, blocks=())
            self._known[key] = price(instruction, group, self.machine, self.num_ranks), instruction, values
        return self._known[key][0]  # what is kept has its ids to itself

    def parts(self, instruction: Instruction, values: Mapping[str, Value] | None = None) -> tuple[float, float]:
        """Seconds on the host and on the device, as if no other rank had anything to do."""
        cost = self._price(instruction, values)
        work_ps = 0 if instruction.call in _PASSED_ON else cost.together_ps
        if self.machine.host_async:
            return cost.dispatch_ps / PS_PER_S, work_ps / PS_PER_S
        return (cost.dispatch_ps + work_ps) / PS_PER_S, 0.0

    def run_s(self, calls: tuple[str, ...], dtype: str, touched_bytes: int) -> float:
        """Seconds on the device of a run of fused instructions."""
        return _run_s(self.machine, calls, dtype, touched_bytes)

    def least_s_per_byte(self, runs: Sequence[tuple[str, ...]], dtype: str) -> float:
        """The least time by which some bytes more lengthen any of some runs, per byte."""
        return min(_least_rise(self.machine, fused_name(calls), dtype) for calls in runs)

    def group_key(self, mesh: Layout, axes: tuple[str, ...]) -> object:
        """Collectives over sets of axes with equal keys cost the same."""
        return mesh_group(self.machine, mesh, tuple(sorted(axes)))


@lru_cache(maxsize=65_536)
def _run_s(machine: Machine, calls: tuple[str, ...], dtype: str, touched_bytes: int) -> float:
    return price_compute(machine, fused_name(calls), (), dtype, touched_bytes, own=True).work_ps / PS_PER_S


@lru_cache(maxsize=1024)
def _least_rise(machine: Machine, name: str, dtype: str) -> float:
    """The least rise of the seconds of a run over its bytes, between any two of many sizes."""
    sizes = [round(2 ** (eighths / 8)) for eighths in range(16 * 8, 40 * 8)]
    seconds = [price_compute(machine, name, (), dtype, size, own=True).work_ps / PS_PER_S for size in sizes]
    rises = np.diff(seconds) / np.diff(sizes)
    return max(0.0, float(rises.min()) * (1 - 1e-3))


def _counted_s(machine: Machine, shared: float, kind: Kind, cost: Cost) -> float:
    work_ps = 0 if kind is Kind.SEND else cost.together_ps
    if machine.host_async:
        return max(cost.dispatch_ps, work_ps) / PS_PER_S
    busy, rest = cost.dispatch_ps + cost.cpu_ps, work_ps
    if kind is Kind.COMPUTE:
        busy, rest = busy + rest, 0
    return (busy * shared + rest) / PS_PER_S


def ranks_per_core(machine: Machine, num_ranks: int) -> float:
    """Number of ranks that share a core of a node when all are busy; 1 if every rank has its own device."""
    if machine.cores_per_node is None:
        return 1.0
    return max(1.0, min(num_ranks, machine.devices_per_node) / machine.cores_per_node)


def redistribution_choice(machine: Machine, num_ranks: int) -> Choice:
    """The steps of redistributions that are fastest on a machine which runs `num_ranks` ranks."""
    return Choice(lru_cache(partial(StepSeconds, machine, num_ranks)))


@lru_cache(maxsize=16)
def known_moves(machine: Machine, num_ranks: int) -> dict[object, float]:
    """Prices of redistributions that searches on a machine have taken so far (`search.operators.moves`)."""
    return {}


def without_copies(instruction: Instruction) -> Instruction:
    """The collective with parts that are contiguous, so that nothing is copied (`plans.redistribution.rows`)."""
    if instruction.kind is not Kind.COLLECTIVE:
        return instruction
    attrs = {name: value for name, value in instruction.attrs.items() if name != "step"}
    return replace(instruction, attrs=attrs)


@dataclass(frozen=True, slots=True)
class StepSeconds(LocalPrice):
    """The price of a step of a redistribution, for `plans.redistribution.redistribute`.

    Sequences are chosen without the copies that collectives along an inner dim need, which would make the price of a
    step depend on its dims; the programs that are simulated have them.

    Args:
        machine: whose prices are taken.
        num_ranks: number of ranks of the complete program.
        dtype: dtype of the tensor; its size must be the `itemsize` that is requested.

    >>> mesh = Layout((2, 2), ("dp", "mp"))
    >>> step = Step(kind=StepKind.ALL_GATHER, axes=("mp",), dim=0, before=mesh("mp"), after=mesh("None"))
    >>> seconds = StepSeconds(Machine.load("h200-x4"), 4, "float32")
    >>> seconds(step, (1 << 20,), 4) < seconds(step, (1 << 30,), 4)
    True
    """

    machine: Machine
    num_ranks: int
    dtype: str
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.machine, self.num_ranks, self.dtype)))

    def __hash__(self) -> int:
        return self._hash

    def __call__(self, step: Step, shape: tuple[int, ...], itemsize: int) -> float:
        """Seconds of any step."""
        return _step_s(self, step, shape)

    def local_s(self, kind: StepKind, mesh: Layout, axes: frozenset[str], size_bytes: int, itemsize: int) -> float:
        """Seconds of a slice or a collective over `axes`.

        `size_bytes` refers to the largest part of a rank: for a slice, the sum of the sizes before and after; for a
        collective, the larger of the two.
        """
        if kind is StepKind.SLICE:
            return _slice_s(self, size_bytes)
        return _collective_s(self, kind, _group(self.machine, mesh, axes), size_bytes, itemsize)

    def transfer_s(
        self, num_peers: int, size_bytes: int, pairs: frozenset[tuple[int, int]], ranks: Sequence[int]
    ) -> float:
        """Seconds of a transfer from the load of its busiest rank; `pairs` are positions in `ranks`."""
        links = self.machine.links
        tier = 0 if len(links) == 1 or not pairs else _slowest_tier(self.machine, pairs, tuple(ranks))
        return _exchange_s(self, num_peers, size_bytes, tier)

    def transfer_floors_s(
        self, sizes_bytes: npt.NDArray[np.int64], least_peers: npt.NDArray[np.int64], most_peers: int,
        leaves_domain: bool,
    ) -> npt.NDArray[np.float64]:  # fmt: skip
        """The least seconds of a transfer whose busiest rank has at least these bytes and these peers, for each entry.

        `leaves_domain`: something goes from one of the `domains` to another.
        """
        fixed_s, hidden_s, start_s, s_per_byte = _exchange_floors(self, most_peers, int(leaves_domain))
        work_s = (start_s[:, least_peers] + s_per_byte[:, least_peers] * sizes_bytes).min(axis=0)
        return np.asarray(fixed_s + np.maximum(hidden_s, work_s))

    def domains(self, ranks: Sequence[int]) -> tuple[int, ...] | None:
        """The number of each rank's domain on the fastest links; None if one domain has all ranks."""
        found = tuple(rank // self.machine.links[0].ranks for rank in ranks)
        return None if len(self.machine.links) == 1 or len(set(found)) == 1 else found

    def floor_s(self, received_bytes: float) -> float:
        """A lower bound on the seconds of any step that brings this number of bytes to a rank; 0 for none.

        A collective that adds on its way (in a switch) brings half of what a ring does.
        """
        if not received_bytes:
            return 0.0
        return _least_s(self) + received_bytes / 2 * _least_s_per_byte(self)


@lru_cache(maxsize=65_536)
def _step_s(price: StepSeconds, step: Step, shape: tuple[int, ...]) -> float:
    seconds = instruction_cost(price.machine, step.before.mesh, price.num_ranks)
    return sum(
        seconds(without_copies(step_instruction)) for step_instruction in step_instructions(step, shape, price.dtype)
    )


@lru_cache(maxsize=65_536)
def _collective_s(
    price: StepSeconds, kind: StepKind, group: Group, size_bytes: int, item_bytes: int
) -> float:  # fmt: skip
    """A collective and the WAIT for it."""
    machine, shared = price.machine, ranks_per_core(price.machine, price.num_ranks)
    cost = price_collective(machine, str(kind), group, size_bytes, item_bytes)
    wait_s = _counted_s(machine, shared, Kind.WAIT, price_wait(machine))
    return _counted_s(machine, shared, Kind.COLLECTIVE, cost) + wait_s


@lru_cache(maxsize=65_536)
def _slice_s(price: StepSeconds, touched_bytes: int) -> float:
    machine, shared = price.machine, ranks_per_core(price.machine, price.num_ranks)
    cost = price_compute(machine, "slice", (), price.dtype, touched_bytes, own=True)
    return _counted_s(machine, shared, Kind.COMPUTE, cost)


@lru_cache(maxsize=4096)
def _group(machine: Machine, mesh: Layout, axes: frozenset[str]) -> Group:
    """The groups along some axes, in any order."""
    return mesh_group(machine, mesh, tuple(axis for axis in mesh.alias_name if axis in axes))


@lru_cache(maxsize=65_536)
def _exchange_s(price: StepSeconds, num_peers: int, size_bytes: int, tier: int) -> float:
    """A SEND, its RECV, and the WAIT for each."""
    machine, shared = price.machine, ranks_per_core(price.machine, price.num_ranks)
    cost = price_exchange(machine, num_peers, size_bytes, tier)
    both = [_counted_s(machine, shared, kind, cost) for kind in (Kind.SEND, Kind.RECV)]
    return sum(both) + 2 * _counted_s(machine, shared, Kind.WAIT, price_wait(machine))


@lru_cache(maxsize=256)
def _exchange_floors(
    price: StepSeconds, most_peers: int, first_tier: int
) -> tuple[float, float, npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Lines below the seconds of an exchange over its bytes: what it takes anyway, what of the rest the host hides, and
    [tiers, least peers] where the lines start and how they rise.

    With one protocol the seconds are on a line, with several they are the least of some lines, above their chord. More
    peers cost processor time and may use more links, so the lowest line of all larger numbers counts.
    """
    machine, shared, large = price.machine, ranks_per_core(price.machine, price.num_ranks), 1 << 62
    lines = np.empty((2, len(machine.links) - first_tier, most_peers + 1))

    def moved_s(peers: int, size_bytes: int, tier: int) -> float:
        cost = price_exchange(machine, peers, size_bytes, tier)
        if machine.host_async:
            return cost.work_ps / PS_PER_S
        return sum(_counted_s(machine, shared, kind, cost) for kind in (Kind.SEND, Kind.RECV))

    for tier in range(first_tier, len(machine.links)):
        for peers in range(most_peers + 1):
            start_s = moved_s(max(1, peers), 0, tier)
            rise = (moved_s(max(1, peers), large, tier) - start_s) / large
            lines[:, tier - first_tier, peers] = start_s, rise
    lowest = np.minimum.accumulate(lines[:, :, ::-1], axis=2)[:, :, ::-1] * (1 - 1e-12)
    hidden_s = machine.dispatch_s["transfer"] * machine.host_scale if machine.host_async else 0.0
    rounded_s = (4 + 4 * shared) / PS_PER_S  # prices are whole picoseconds
    fixed_s = 2 * _counted_s(machine, shared, Kind.WAIT, price_wait(machine)) + hidden_s - rounded_s
    return fixed_s, hidden_s, lowest[0], lowest[1]


@lru_cache(maxsize=4096)
def _slowest_tier(machine: Machine, pairs: frozenset[tuple[int, int]], ranks: tuple[int, ...]) -> int:
    return max(machine.tier((ranks[one], ranks[two])) for one, two in pairs)


@lru_cache(maxsize=1024)
def _least_s(price: StepSeconds) -> float:
    machine = price.machine
    return min(machine.dispatch_s["collective"], machine.dispatch_s["transfer"]) * machine.host_scale


@lru_cache(maxsize=1024)
def _least_s_per_byte(price: StepSeconds) -> float:
    machine = price.machine
    fastest_Bps = max(link.reach_Bps(max(1, price.num_ranks - 1)) for link in machine.links)
    bytes_s = machine.host_scale / fastest_Bps
    return 0.0 if machine.host_async else bytes_s
