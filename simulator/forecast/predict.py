"""The forecast of a transformer for given degrees, on any number of devices.

For twofold's own executor it is that of the lowered program: calls, host time, bytes and memory are equal, and so is
the time where ranks do not contend for links (`simulator.forecast.step`). Slices and pairs are forecast by the event
engine (`simulator.forecast.turns`), other software by an estimate (`simulator.estimate.estimate`).
"""

from __future__ import annotations

from collections.abc import Iterable

from costmodels.machine.machine import Machine
from costmodels.price.clock import at_usual_clock, settled
from plans.degrees import Degrees, check, describe
from plans.errors import TwofoldError
from plans.model.transformer import TransformerConfig, sizes_of
from simulator.estimate.estimate import check_machine, chunk_costs, chunks_of, estimate, known_layouts
from simulator.forecast.step import StepForecast
from simulator.forecast.turns import simulated_forecast
from simulator.result import Forecast
from simulator.stacks import Stack

__all__ = ["forecast", "forecast_grid", "step_forecast", "step_machine"]


def forecast(config: TransformerConfig, degrees: Degrees, machine: Machine, *, stack: Stack | None = None) -> Forecast:
    """Predict one configuration.

    Args:
        config: configuration of a transformer, dense or with experts.
        degrees: its parallel degrees.
        machine: a machine with at least as many accelerators, with the host times of eager steps as in machine files,
            or of replayed steps by `costmodels.executing(machine, "graph")`. `twofold.predict` chooses by execution.
        stack: the software that runs it; by default twofold's executor.

    Raises:
        TwofoldError: a machine whose hosts compute; what `plans.degrees.check` refuses.

    >>> from plans.model.transformer import transformer_config
    >>> degrees = Degrees(dp=16, tp=8, pp=8, micro_batch=1, global_batch=512)
    >>> found = forecast(transformer_config("llama-3-70b"), degrees, Machine.load("h100-sxm-x1024"))
    >>> 5 < found.step_s < 60
    True
    """
    if stack is not None and not stack.runs_programs:
        return estimate(config, degrees, machine, stack=stack)
    if degrees.takes_turns:
        _check(config, degrees, machine)
        return simulated_forecast(config, degrees, machine)
    return step_forecast(config, degrees, step_machine(config, degrees, machine)).forecast()


def step_machine(config: TransformerConfig, degrees: Degrees, machine: Machine) -> Machine:
    """The machine at the clock of a configuration's step, where its power is known and no clock is given."""
    usual = at_usual_clock(machine)
    if usual is machine:
        return machine
    return settled(machine, step_forecast(config, degrees, usual).load(), degrees.num_ranks)


def forecast_grid(
    config: TransformerConfig, degrees: Iterable[Degrees], machine: Machine, *, stack: Stack | None = None
) -> list[Forecast]:
    """Predict many configurations of one model; shared results are computed once.

    Raises:
        TwofoldError: what `forecast` refuses in any of them.
    """
    return [forecast(config, degree, machine, stack=stack) for degree in degrees]


def _check(config: TransformerConfig, degrees: Degrees, machine: Machine) -> None:
    """Reject configurations that cannot be forecast.

    Raises:
        TwofoldError: as `forecast`.
    """
    check_machine(machine)
    check(degrees, sizes_of(config), num_devices=machine.num_devices, machine=machine.name)


def step_forecast(config: TransformerConfig, degrees: Degrees, machine: Machine) -> StepForecast:
    """The bodies of a configuration's ranks, and what follows from them.

    Raises:
        TwofoldError: as `forecast`; slices and pairs, which take turns.
    """
    _check(config, degrees, machine)
    if degrees.takes_turns:
        raise TwofoldError(
            f"{describe(degrees)}: bodies do not support slices or pairs; forecast or simulate the full step instead"
        )
    costs = chunk_costs(config, degrees, machine, Stack(), False, known_layouts(config, machine, Stack()))
    return StepForecast(config, degrees, machine, costs, chunks_of(config, degrees))
