"""A machine at the clock of a training step.

If a machine file has the power of its chips (`Compute.power`), every step has its own clock. It is found in two
passes: the step is priced at a typical clock, its load determines the clock at which it settles
(`costmodels.price.power.settled_MHz`), and it is priced again there. Other machines have the constant clock of their
file.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from costmodels.machine.machine import Machine
from costmodels.machine.sections import Collective
from costmodels.price.power import Load, settled_MHz

__all__ = ["START", "at_clock", "at_usual_clock", "settled"]

START = 0.85
"""Share of the highest clock at which a step is priced first."""


def at_usual_clock(machine: Machine) -> Machine:
    """The machine with prices at the initial clock (`START`). It is unchanged if its power is unknown or its prices
    already have a clock.
    """
    power = machine.compute.power
    if power is None or machine.compute.at_MHz is not None:
        return machine
    return at_clock(machine, START * power.highest_MHz)


def settled(machine: Machine, load: Load, num_chips: int) -> Machine:
    """The machine, whose power is known, with prices at the clock of a step."""
    assert machine.compute.power is not None
    return at_clock(machine, settled_MHz(machine.compute.power, load, num_chips))


def at_clock(machine: Machine, clock_MHz: float) -> Machine:
    """The machine with prices at a clock of its devices (`Compute.at_MHz`): of kernels and of communication, whose
    figures are those at the highest clock."""
    compute = msgspec.structs.replace(machine.compute, at_MHz=clock_MHz)
    power = machine.compute.power
    if power is None or not power.message_share:
        return msgspec.structs.replace(machine, compute=compute)
    slower = power.highest_MHz / clock_MHz
    at_it = {name: _slowed(model, slower, power.message_share) for name, model in machine.collectives.items()}
    return msgspec.structs.replace(machine, compute=compute, collectives=at_it)


@lru_cache(maxsize=4096)
def _slowed(model: Collective, slower: float, share: float) -> Collective:
    """A collective at a clock that is lower by a factor; networks between nodes have their own bandwidth."""
    protocols = tuple(
        msgspec.structs.replace(each, start_s=each.start_s * slower, hop_s=each.hop_s * slower)
        for each in model.protocols
    )
    return msgspec.structs.replace(
        model, start_s=model.start_s * slower, hop_s=model.hop_s * slower, chunk_s=model.chunk_s * slower,
        link_fraction=model.link_fraction / (1 + share * (slower - 1)), protocols=protocols,
    )  # fmt: skip
