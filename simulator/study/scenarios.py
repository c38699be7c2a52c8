"""A program with and without changes: what-if questions on one machine, alone or with other jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from costmodels.machine.machine import Machine
from plans.errors import TwofoldError
from plans.program import Program
from plans.timeline import Timeline
from simulator.predict import Outcome, outcome_of, simulate
from simulator.study.jobs import Job, simulate_jobs
from simulator.study.whatif import WhatIf

__all__ = ["Scenarios"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenarios:
    """The devices of a program and the other jobs on the machine.

    Args:
        program: program of one step.
        machine: it runs on.
        devices: for every rank its device of the machine; None: rank r is on device r.
        others: jobs that run at the same time.
        num_steps: to simulate.
    """

    program: Program
    machine: Machine
    devices: tuple[int, ...] | None = None
    others: Sequence[Job] = ()
    num_steps: int = 3
    _known: dict[tuple[str, bool], Outcome] = field(default_factory=dict, repr=False)

    def timeline(self, what_if: WhatIf, *, alone: bool = False) -> Timeline:
        """The program's timeline under changes; `alone`: without the other jobs.

        Raises:
            TwofoldError: a changed rank that the program has not, and what `simulate` and `simulate_jobs` refuse.
        """
        others = () if alone else self.others
        if not others and self.devices is None:
            return simulate(self.program, self.machine, num_steps=self.num_steps, what_if=what_if)
        devices = tuple(range(self.program.num_ranks)) if self.devices is None else self.devices
        jobs = [Job(program=self.program, ranks=devices), *others]
        changed = _on_devices(what_if, devices)
        return simulate_jobs(jobs, self.machine, num_steps=self.num_steps, what_if=changed)[0]

    def outcome(self, what_if: WhatIf, *, alone: bool = False) -> Outcome:
        """The outcome of the changes, including checkpoints and failures; simulated on first use.

        Raises:
            TwofoldError: as `timeline` and `goodput`.
        """
        key = str(what_if), alone or not self.others
        if key not in self._known:
            self._known[key] = outcome_of(self.timeline(what_if, alone=alone), self.program, what_if)
        return self._known[key]


def _on_devices(what_if: WhatIf, devices: Sequence[int]) -> WhatIf:
    """The same changes with ranks of a program replaced by the devices that they are on."""

    def device(rank: int) -> int:
        if not 0 <= rank < len(devices):
            raise TwofoldError(f"rank {rank} is changed, but the plan's ranks are 0 to {len(devices) - 1}")
        return devices[rank]

    return replace(
        what_if,
        slowdown={device(rank): factor for rank, factor in what_if.slowdown.items()},
        devices={device(rank): machine for rank, machine in what_if.devices.items()},
        links=tuple(replace(change, ranks=tuple(map(device, change.ranks))) for change in what_if.links),
    )
