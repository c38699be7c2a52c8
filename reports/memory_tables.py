"""The memory peak of the fullest rank of every group, by role."""

from __future__ import annotations

from plans.program import Program
from plans.timeline import PS_PER_S, Timeline
from reports.memory_picture import ROLE_COLOURS, worst_ranks
from reports.tables import Table
from reports.units import format_bytes, format_seconds
from simulator import memory_peak

__all__ = ["memory_table"]

_MAX_ACTIONS = 6


def memory_table(timeline: Timeline, program: Program | None = None) -> Table:
    """Bytes by role at the peak, a row for the fullest rank of every group.

    With the program of the timeline, notes say when the values of each rank are at their peak and which actions made
    them. What communication adds is the difference to the peak of the values, which may be at another time.
    """
    peaks = worst_ranks(timeline)
    present = {role for peak in peaks for role, size in peak.by_role.items() if size}
    roles = [role for role in ROLE_COLOURS if role in present] + sorted(present - set(ROLE_COLOURS))
    rows = tuple(
        (str(peak.rank), *(format_bytes(peak.by_role.get(role, 0)) for role in roles), format_bytes(peak.peak_bytes))
        for peak in peaks
    )
    notes = []
    for each in peaks if program is not None else ():
        assert program is not None
        peak = memory_peak(program, timeline, each.rank)
        made = [f"{action} {format_bytes(size)}" for action, size in peak.by_action.items() if action]
        more = f", {len(made) - _MAX_ACTIONS} more" if len(made) > _MAX_ACTIONS else ""
        said = f", made by {', '.join(made[:_MAX_ACTIONS])}{more}" if made else ""
        when = format_seconds(peak.time_ps / PS_PER_S)
        notes.append(f"Rank {each.rank}: values are at their peak after {when}{said}; the rest is kept between steps.")
    return Table(
        title=f"Peak memory of the fullest rank of every group ({timeline.kind})",
        columns=("rank", *roles, "peak"), rows=rows, right=frozenset((*roles, "peak")), notes=tuple(notes),
    )  # fmt: skip
