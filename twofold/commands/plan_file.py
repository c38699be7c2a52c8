"""Load the plan of a command from a plan file, or make it from a file of degrees."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from plans.errors import TwofoldError
from plans.reading import read_text

if TYPE_CHECKING:
    from costmodels import Machine
    from plans.plan import Plan
    from twofold.console import Console

__all__ = ["open_plan", "schedule_text"]


def schedule_text(given: str) -> str:
    """A schedule's name, or the text of a schedule file (.csv, .txt).

    Raises:
        TwofoldError: a file that cannot be read or has no schedule.
    """
    from plans.schedules import Schedule, ScheduleError

    if not given.endswith((".csv", ".txt")):
        if Path(given).exists():
            raise TwofoldError(f"--schedule {given}: a schedule file must be named *.csv or *.txt")
        return given
    try:
        text = read_text(given, f"--schedule {given}: the file")
        if not text.strip():
            raise ScheduleError("the file is empty; write a row of actions such as 0F0,0F1,0B0 for every pipeline rank")
        Schedule.from_text(text)
    except ScheduleError as error:
        raise TwofoldError(f"--schedule {given}: {error}") from None
    return text


def open_plan(path: str, machine: Machine, schedule: str | None, console: Console) -> Plan:
    """Load a plan file, or make the plan of a file of degrees.

    Args:
        path: path of the file.
        machine: machine for which a plan is made.
        schedule: schedule to use instead of the plan's: a name, or a file (.csv, .txt).
        console: prints assumptions.

    Raises:
        TwofoldError: a file that cannot be read, degrees without a plan, a schedule for other stages or micro-batches.
    """
    from interop.plan_file import read_plan
    from plans.lower import schedule_of

    plan, notes = read_plan(path, machine)
    for note in notes:
        console.print(note)
    if schedule is None:
        return plan
    text = schedule_text(schedule)
    try:
        changed = msgspec.structs.replace(plan, schedule=text)
        schedule_of(changed)  # whether it is for these stages and micro-batches
    except TwofoldError as error:
        raise TwofoldError(f"--schedule {schedule}: {error}") from None
    return changed
