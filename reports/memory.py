"""A table of the peak memory of the fullest rank of every group."""

from __future__ import annotations

from collections.abc import Iterable

from plans.program import Program
from plans.timeline import PS_PER_S, Timeline
from plans.units import Bytes, Seconds
from reports.colours import ROLE_COLOURS
from reports.tables import Table
from simulator import memory_peak
from simulator.timeline.live import worst_ranks

__all__ = ["memory_table", "role_order"]

_MAX_ACTIONS = 3


def role_order(roles: Iterable[str]) -> list[str]:
    """Roles from the bottom of the stack to its top."""
    known = set(roles)
    return [role for role in ROLE_COLOURS if role in known] + sorted(known - set(ROLE_COLOURS))


def memory_table(timeline: Timeline, program: Program | None = None) -> Table:
    """Bytes by role at the peak, a row for the fullest rank of every group.

    With the program of the timeline, notes say when each rank peaks and which actions hold most memory then. What
    communication adds is the difference to the peak of the values, which may be at another time.
    """
    peaks = worst_ranks(timeline)
    roles = role_order(role for peak in peaks for role, size in peak.by_role.items() if size)
    rows = tuple(
        (str(peak.rank), *(Bytes(peak.by_role.get(role, 0)) for role in roles), Bytes(peak.peak_bytes))
        for peak in peaks
    )
    notes = []
    for each in peaks if program is not None else ():
        assert program is not None
        peak = memory_peak(program, timeline, each.rank)
        made = [f"{action} {Bytes(size)}" for action, size in peak.by_action.items() if action]
        left = len(made) - _MAX_ACTIONS
        more = f" and {left} other{'s' if left > 1 else ''}" if left > 0 else ""
        makers = f"; the actions that hold most are {', '.join(made[:_MAX_ACTIONS])}{more}" if made else ""
        notes.append(f"Rank {each.rank} peaks after {Seconds(peak.time_ps / PS_PER_S)}{makers}.")
    return Table(
        title=f"Peak memory of the fullest rank of every group ({timeline.kind})",
        columns=("rank", *roles, "peak"), rows=rows, notes=tuple(notes),
    )  # fmt: skip
