"""The plan that a command is given: a plan file, or a file of degrees, of which the plan is made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from plans.errors import TwofoldError
from plans.reading import read_text
from twofold.commands.options import check_at_least

if TYPE_CHECKING:
    from costmodels import Machine
    from plans.plan import Plan
    from twofold.console import Console

__all__ = ["check_steps", "open_plan", "schedule_text"]


def schedule_text(given: str) -> str:
    """The name of a schedule, or the text of the file (.csv, .txt) that holds one.

    Raises:
        TwofoldError: a file that cannot be read or holds no schedule.
    """
    from plans.schedules import Schedule, ScheduleError

    if not given.endswith((".csv", ".txt")):
        if Path(given).exists():
            raise TwofoldError(f"--schedule {given}: a file with a schedule is named *.csv or *.txt")
        return given
    try:
        text = read_text(given, f"--schedule {given}: the file")
        if not text.strip():
            raise ScheduleError("the file is empty; write a row of actions such as 0F0,0F1,0B0 for every pipeline rank")
        Schedule.from_text(text)
    except ScheduleError as error:
        raise TwofoldError(f"--schedule {given}: {error}") from None
    return text


def check_steps(steps: int) -> None:
    """Refuse to simulate no step.

    Raises:
        TwofoldError: fewer than 1.
    """
    check_at_least("steps", steps, 1)


def open_plan(path: str, machine: Machine, schedule: str | None, say: Console) -> Plan:
    """The plan of a plan file, or made from a file of degrees, with another schedule where one is given.

    Args:
        path: of the file.
        machine: for which a plan is made, if it must be made.
        schedule: instead of the plan's: a name, or a file (.csv, .txt).
        say: called with what was assumed.

    Raises:
        TwofoldError: a file that cannot be read, degrees of which no plan can be made, a schedule for other stages or
            micro-batches.
    """
    from interop.plan_file import read_plan
    from plans.lower import schedule_of

    plan, notes = read_plan(path, machine)
    for note in notes:
        say.say(note)
    if schedule is None:
        return plan
    text = schedule_text(schedule)
    try:
        changed = msgspec.structs.replace(plan, schedule=text)
        schedule_of(changed)  # whether it is for these stages and micro-batches
    except TwofoldError as error:
        raise TwofoldError(f"--schedule {schedule}: {error}") from None
    return changed
