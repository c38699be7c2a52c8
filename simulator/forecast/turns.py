"""Configurations with slices of a micro-batch or pairs of actions: their program in the event engine.

Clock maps describe one action after the other. Interleaved actions and slices affect each other depending on their
times, so the full program is lowered and simulated, equal ranks once (`simulator.engine.folding`). The forecast equals
`simulator.simulate` in every figure.
"""

from __future__ import annotations

from costmodels.machine.machine import Machine
from plans.degrees import Degrees
from plans.degrees.plan import plan_of
from plans.lower import lower
from plans.model.transformer import TransformerConfig, transformer
from plans.program import Program
from plans.timeline import PS_PER_S, Timeline
from simulator.predict import simulate
from simulator.result import Forecast
from simulator.timeline.analysis import composition
from simulator.timeline.memory import peak_of_order

__all__ = ["program_of", "simulated", "simulated_forecast"]

_PACED = 2
"""Steps that show the pace."""


def program_of(config: TransformerConfig, degrees: Degrees) -> Program:
    """The program of a configuration, at its full length.

    Raises:
        TwofoldError: degrees that no plan can be made of.
    """
    return lower(plan_of(degrees, transformer(config, batch_size=degrees.global_batch)))


def simulated(program: Program, machine: Machine, *, num_steps: int = _PACED) -> Timeline:
    """A timeline of some steps with one of each kind of rank."""
    return simulate(program, machine, num_steps=num_steps, with_memory=False, fold_ranks=True)


def simulated_forecast(config: TransformerConfig, degrees: Degrees, machine: Machine) -> Forecast:
    """The complete prediction; its step is the pace of training.

    Raises:
        TwofoldError: as `program_of`.

    >>> from plans.model.transformer import transformer_config
    >>> degrees = Degrees(tp=2, micro_batch=2, global_batch=4, interleave=2)
    >>> found = simulated_forecast(transformer_config("llama-3-8b", num_layers=2), degrees, Machine.load("h100-sxm-x8"))
    >>> 0 < found.exposed_comm_s < found.step_s
    True
    """
    program = program_of(config, degrees)
    timeline = simulated(program, machine)
    peak = max((peak_of_order(group) for group in program.groups), key=lambda each: each.peak_bytes)
    parts = {each.rank: each for each in composition(timeline)}
    of_groups = [parts[timeline.representatives[group.ranks[0]]] for group in program.groups]
    assert timeline.low_s is not None
    assert timeline.high_s is not None
    return Forecast(
        step_s=timeline.step_interval_s, low_s=timeline.low_s, high_s=timeline.high_s, peak_bytes=peak.peak_bytes,
        memory=dict(sorted(peak.by_role.items())), bubble_fraction=timeline.bubble_fraction,
        exposed_comm_s=timeline.exposed_comm_s, host_wait_s=timeline.host_wait_s,
        rank_s=tuple(
            {"compute": own.compute_ps / PS_PER_S}
            | {call: exposed_ps / PS_PER_S for call, exposed_ps in own.exposed_ps.items()}
            for own in of_groups
        ),
    )  # fmt: skip
