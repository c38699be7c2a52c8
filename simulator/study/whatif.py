"""What-if questions as one value: a machine that is slower, jittering, degraded or mixed, with checkpoints and
failures.

`WhatIf.machine` returns the changed machine, `Network` applies the changed links, `simulate` the ranks, and
`simulator.study.goodput` the cost of checkpoints and failures. Equal values (including the seed) give equal results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from costmodels.machine.machine import Collective, Machine
from plans.errors import TwofoldError, number, whole_number
from plans.ranks import format_ranks
from simulator.engine.link_change import LinkChange
from simulator.study.goodput import Checkpoints, Failures

__all__ = ["KNOBS", "WhatIf"]

KNOBS = {
    "bandwidth": "bandwidth of all links",
    "latency": "latency of links and collectives",
    "compute": "arithmetic rate of devices",
    "memory": "memory bandwidth of devices",
    "dispatch": "host time to issue",
}
"""Factors on the machine and what they scale; larger `latency` and `dispatch` are slower, the others faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Changes to a machine and events on it; without arguments there are none.

    Args:
        bandwidth: factor on the bandwidth of every tier of links, its uplinks and copies of the library included.
        latency: factor on the latency of every tier and on the fixed parts of communication.
        compute: factor on the arithmetic rates of devices; on CPUs also on the processor's work for communication.
        memory: factor on the memory bandwidth of devices.
        dispatch: factor on the host time to issue an instruction.
        slowdown: factor on a rank's own work (dispatch, compute, processor time of communication), by rank.
        jitter: standard deviation of the logarithm of such a factor (median 1), drawn for every rank, step and
            instruction; 0 is none.
        seed: seed of the jitter and of sampled failures.
        links: degraded or failed links.
        devices: machine whose device and host a rank has instead, by rank; links, sharing and overlap rates stay.
        checkpoints: checkpoints, or None.
        failures: failures at a rate, or None.

    Raises:
        TwofoldError: a factor that is not above 0 and finite, jitter below 0 or from 2 on, jitter without a seed.

    >>> WhatIf(bandwidth=0.5).is_none, WhatIf().is_none
    (False, True)
    >>> str(WhatIf(bandwidth=0.5, slowdown={3: 1.2}))
    'bandwidth x0.5, rank 3 x1.2 slower'
    """

    bandwidth: float = 1.0
    latency: float = 1.0
    compute: float = 1.0
    memory: float = 1.0
    dispatch: float = 1.0
    slowdown: Mapping[int, float] = field(default_factory=dict)
    jitter: float = 0.0
    seed: int | None = None
    links: tuple[LinkChange, ...] = ()
    devices: Mapping[int, Machine] = field(default_factory=dict)
    checkpoints: Checkpoints | None = None
    failures: Failures | None = None

    def __post_init__(self) -> None:
        for name in KNOBS:
            number(f"the factor {name}", getattr(self, name), above=0)
        for rank, factor in self.slowdown.items():
            whole_number("a rank of slowdown", rank, least=0)
            number(f"slowdown of rank {rank}", factor, above=0)
        if not 0 <= number("jitter", self.jitter) < 2:
            raise TwofoldError(f"jitter must be at least 0 and below 2 (0.05 is about 5 %), not {self.jitter}")
        if self.jitter and self.seed is None:
            raise TwofoldError(f"jitter = {self.jitter} needs a seed, so that the prediction can be repeated")
        if self.seed is not None:
            whole_number("seed", self.seed, least=0)

    @property
    def is_none(self) -> bool:
        """Whether nothing is changed."""
        return self == WhatIf(seed=self.seed)

    @property
    def factors(self) -> dict[str, float]:
        """The factors on the machine that are not 1."""
        return {name: getattr(self, name) for name in KNOBS if getattr(self, name) != 1.0}

    def machine(self, machine: Machine) -> Machine:
        """`machine` with its figures multiplied by the factors; the same object if all are 1."""
        if not self.factors:
            return machine
        speed = self.compute if not machine.host_async else 1.0
        compute = machine.compute
        changed = msgspec.structs.replace(
            compute,
            matrix_flops_per_s={dtype: rate * self.compute for dtype, rate in compute.matrix_flops_per_s.items()},
            vector_flops_per_s={dtype: rate * self.compute for dtype, rate in compute.vector_flops_per_s.items()},
            memory_Bps=compute.memory_Bps * self.memory,
        )
        links = tuple(link.scaled(self.bandwidth, self.latency) for link in machine.links)
        return msgspec.structs.replace(
            machine,
            compute=changed,
            links=links,
            graph=None if machine.graph is None else machine.graph.scaled(self.bandwidth, self.latency),
            collectives={kind: self._collective(collective, speed) for kind, collective in machine.collectives.items()},
            dispatch_s={kind: time_s * self.dispatch for kind, time_s in machine.dispatch_s.items()},
        )

    def device(self, rank: int, machine: Machine) -> Machine | None:
        """The machine whose device prices `rank`, with the same factors, or None.

        Raises:
            TwofoldError: hosts that compute mixed with devices behind their hosts.
        """
        other = self.devices.get(rank)
        if other is None:
            return None
        if other.host_async != machine.host_async:
            raise TwofoldError(
                f"rank {rank} cannot have the device of {other.name!r}: there hosts "
                f"{'only issue' if other.host_async else 'compute themselves'}, unlike those of {machine.name!r}"
            )
        return self.machine(other)

    def _collective(self, each: Collective, speed: float) -> Collective:
        protocols = tuple(
            msgspec.structs.replace(
                way, start_s=way.start_s * self.latency, hop_s=way.hop_s * self.latency,
                cross_s=way.cross_s * self.latency, peer_s=way.peer_s * self.latency,
            )
            for way in each.protocols
        )  # fmt: skip
        return msgspec.structs.replace(
            each, start_s=each.start_s * self.latency, hop_s=each.hop_s * self.latency, protocols=protocols,
            far_start_s=each.far_start_s * self.latency,
            copy_Bps=_times(each.copy_Bps, self.bandwidth), cpu_start_s=each.cpu_start_s / speed,
            cpu_message_s=each.cpu_message_s / speed, cpu_Bps=_times(each.cpu_Bps, speed),
        )  # fmt: skip

    def __str__(self) -> str:
        parts = [f"{name} x{factor:g}" for name, factor in self.factors.items()]
        by_factor: dict[float, list[int]] = {}
        for rank, factor in self.slowdown.items():
            by_factor.setdefault(factor, []).append(rank)
        parts += [f"{_ranks(ranks)} x{factor:g} slower" for factor, ranks in by_factor.items()]
        parts += [f"jitter {self.jitter:g} (seed {self.seed})"] if self.jitter else []
        parts += [f"link {change}" for change in self.links]
        names: dict[str, list[int]] = {}
        for rank, machine in self.devices.items():
            names.setdefault(machine.name, []).append(rank)
        parts += [f"{_ranks(ranks)} as in {name}" for name, ranks in names.items()]
        parts += [str(each) for each in (self.checkpoints, self.failures) if each is not None]
        return ", ".join(parts) or "nothing changed"


_MOST_RUNS = 8
"""Runs of ranks that are spelled out."""


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks in words, runs of them as such.

    >>> _ranks([3]), _ranks([7, 0, 1, 2])
    ('rank 3', 'ranks 0-2, 7')
    """
    ranks_text = format_ranks(ranks)
    if ranks_text.count(",") > _MOST_RUNS:
        return f"{len(ranks)} ranks ({', '.join(ranks_text.split(', ')[:3])}, ...)"
    return f"rank {ranks_text}" if len(ranks) == 1 else f"ranks {ranks_text}"


def _times(rate: float | None, factor: float) -> float | None:
    return None if rate is None else rate * factor
