"""The page that compares 2 to 6 plans: figures, where the step goes, critical paths and timelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plans.errors import TwofoldError
from plans.figures import figures_of
from plans.program import Program
from plans.timeline import Timeline
from plans.units import Seconds, Share
from reports.charts import Chart, seconds_bars
from reports.live import LiveTimeline
from reports.page import Page, Section
from reports.tables import Table
from reports.time_tables import changed_records, figures_table, path_parts_ps
from simulator import CriticalPath

__all__ = ["MOST_PLANS", "Compared", "comparison_page", "plans_table"]

MOST_PLANS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A plan that was predicted; `name` identifies it, `path` is its critical path."""

    name: str
    timeline: Timeline
    program: Program
    path: CriticalPath
    limit_bytes: int | None = None


def comparison_page(plans: Sequence[Compared], *, machine: str, command: str) -> Page:
    """The page of 2 to 6 plans, the one that the others are compared with first.

    Raises:
        TwofoldError: fewer or more plans.
    """
    if not 2 <= len(plans) <= MOST_PLANS:
        raise TwofoldError(f"a comparison needs 2 to {MOST_PLANS} plans, not {len(plans)}")
    limits = [plan.limit_bytes for plan in plans if plan.limit_bytes is not None]
    live = LiveTimeline(
        timelines=[plan.timeline for plan in plans], programs=[plan.program for plan in plans],
        names=[plan.name for plan in plans], limit_bytes=min(limits, default=None),
    )  # fmt: skip
    best = min(plans, key=lambda each: each.timeline.step_interval_s)
    sections = [
        Section(id="figures", title="Figures", parts=[plans_table(plans)]),
        Section(id="parts", title="Where the step goes", parts=[_parts(plans), _paths(plans)]),
        Section(id="pipeline", title="Pipelines and memory, on one time axis", parts=[live]),
        Section(id="further", title="What the figures mean", parts=[figures_table()], folded=True),
    ]
    return Page(
        kind="comparison", title=f"{len(plans)} plans on {machine}", sections=sections, command=command,
        figures={"fastest": best.name, "its step": Seconds(best.timeline.step_interval_s)},
        notes=["All times are predictions; nothing was run."],
        data={"plans": [{"name": plan.name, **figures_of(plan.timeline)} for plan in plans]},
    )  # fmt: skip


def plans_table(plans: Sequence[Compared]) -> Table:
    """The figures of a step of each plan; the step's change is against the first one."""
    records = changed_records([(plan.name, plan.timeline) for plan in plans], "plan")
    return Table.of(f"The step of {len(plans)} plans", records)


def _parts(plans: Sequence[Compared]) -> Chart:
    """A bar for every plan: the parts of its last step, averaged over ranks."""
    rows = {}
    for plan in plans:
        begin, end = plan.timeline.window_ps
        waited = {
            "exposed communication": plan.timeline.exposed_comm_s, "host wait": plan.timeline.host_wait_s,
            "bubble": plan.timeline.bubble_fraction * (end - begin) / 1e12,
        }  # fmt: skip
        rows[plan.name] = {"compute": (end - begin) / 1e12 - sum(waited.values()), **waited}
    return seconds_bars(rows, title="The last step, averaged over ranks")


def _paths(plans: Sequence[Compared]) -> Table:
    """A row for every kind of work on the critical paths, a column for every plan."""
    parts_ps = [path_parts_ps(plan.path) for plan in plans]
    return Table.of("Critical paths", (
        {"part": kind, **{
            plan.name: Share(parts.get(kind, 0) / max(1, plan.path.step_ps))
            for plan, parts in zip(plans, parts_ps, strict=True)
        }}
        for kind in dict.fromkeys(kind for parts in parts_ps for kind in parts)
    ))  # fmt: skip
