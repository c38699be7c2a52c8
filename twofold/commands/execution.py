"""Loads the machine of a command, with the host times of the requested execution."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plans.errors import TwofoldError

if TYPE_CHECKING:
    from costmodels import Machine
    from simulator.stacks import Stack

__all__ = ["executed"]


def executed(machine: Machine, stack: Stack, execution: str | None) -> Machine:
    """The machine for the steps of a stack: twofold's executor replays steps unless eager execution is requested.

    Raises:
        TwofoldError: an unknown execution, or one for other software.
    """
    from costmodels import executing

    if stack.runs_programs:
        return executing(machine, execution or "graph")
    if execution is not None:
        raise TwofoldError(f"--execution is for twofold's executor; omit it for {stack.name}")
    return machine
