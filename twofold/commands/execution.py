"""The machine of a command, with the host times of the execution that it is asked about."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plans.errors import TwofoldError

if TYPE_CHECKING:
    from costmodels import Machine
    from simulator.stacks import Stack

__all__ = ["executed"]


def executed(machine: Machine, stack: Stack, execution: str | None) -> Machine:
    """The machine as a stack's steps meet it: twofold's own are replayed unless eager ones are asked for.

    Raises:
        TwofoldError: an unknown execution, or one asked for of other software, which runs as it does.
    """
    from costmodels import executing

    if stack.runs_programs:
        return executing(machine, execution or "graph")
    if execution is not None:
        raise TwofoldError(f"--execution is for twofold's own steps; {stack.name} runs as it does: leave it out")
    return machine
