"""The page of a configuration that was forecast: its figures, where its step and its memory go, what limits it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reports.charts import Chart, bars, seconds_bars
from reports.colours import ROLE_COLOURS
from reports.figures import figures_table
from reports.forecast_parts import (
    MFU,
    composition_table,
    critical_table,
    headline,
    operators_table,
    simulated,
    subject,
)
from reports.live import LiveTimeline
from reports.page import Page, Part, Section, Text
from reports.search_pictures import roofline_parts
from reports.units import Bytes, Seconds

if TYPE_CHECKING:
    from search.devices import Candidate, Problem
    from simulator.forecast import Forecast

__all__ = ["prediction_page", "stages_chart"]

_MOST_STAGES = 64
"""Pipeline ranks with a bar."""


def prediction_page(problem: Problem, candidate: Candidate, *, data: Mapping[str, Any], command: str) -> Page:
    """The page.

    Args:
        problem: the model, its machine and the software.
        candidate: the configuration with its forecast.
        data: the JSON object of the command, which the page holds too.
        command: that made the page.
    """
    from costmodels.utilization import peak_flops_per_s
    from search.devices import describe
    from search.devices.explain import composition
    from search.devices.reasons import reasons_for

    seen, machine, name = candidate.forecast, problem.machine, describe(candidate.degrees)
    reasons = reasons_for(problem, candidate)
    roofline, rates = roofline_parts(
        reasons.operators, peak_flops_per_s(problem.config, machine), machine.compute.memory_Bps
    )
    program, timeline = simulated(problem, candidate)
    goes: list[Part] = [seconds_bars({"mean rank": composition(candidate)}, title="Where the forecast step goes")]
    goes += [stages_chart(seen)] if 1 < len(seen.rank_s) <= _MOST_STAGES else []
    fits = seen.peak_bytes <= problem.limit_bytes
    verdict = Text(
        f"It fits: {Bytes(seen.peak_bytes)} of {Bytes(problem.limit_bytes)}." if fits else
        f"It does not fit: {Bytes(seen.peak_bytes)}, and a device has {Bytes(problem.limit_bytes)}.",
        "pass" if fits else "fail",
    )  # fmt: skip
    live = [] if timeline is None else [
        LiveTimeline(timelines=[timeline], programs=[program], limit_bytes=problem.limit_bytes)
    ]  # fmt: skip
    sections = [
        Section(id="step", title="The step", parts=goes),
        Section(id="memory", title="Memory", parts=[verdict, _memory(seen, problem.limit_bytes)]),
        Section(id="limits", title="What limits it", parts=[critical_table(candidate, reasons.critical_s), roofline]),
        Section(id="pipeline", title="The step in the event engine", parts=live),
        Section(id="further", title="Further tables", folded=True, parts=[
            composition_table(candidate), operators_table(reasons.operators, candidate.degrees, {}), rates,
            figures_table(),
        ]),
    ]  # fmt: skip
    return Page(
        kind="prediction", sections=sections, command=command, data=data, title=subject(problem),
        subtitle=f"{name}, as {problem.stack.name} runs it.", figures=headline(problem, candidate),
        notes=["Every time is a forecast; nothing was run.", MFU],
    )  # fmt: skip


def stages_chart(seen: Forecast) -> Chart:
    """A bar for every pipeline rank: what it computes, what of its communication nothing hides, and the rest."""
    calls = dict.fromkeys(call for own in seen.rank_s for call in own)
    rows = {
        f"pipeline rank {at}": {call if call == "compute" else f"exposed {call}": own.get(call, 0.0) for call in calls}
        | {"waits": max(0.0, seen.step_s - sum(own.values()))}
        for at, own in enumerate(seen.rank_s[:_MOST_STAGES])
    }
    ends = [f"{Seconds(own.get('compute', 0.0))} of compute" for own in seen.rank_s[:_MOST_STAGES]]
    return seconds_bars(rows, title="Where the step of every pipeline rank goes", ends=ends)


def _memory(seen: Forecast, limit_bytes: int) -> Chart:
    """The memory of the fullest rank by role, above what a device has."""
    parts = [
        (role, ROLE_COLOURS.get(role, "grey"), [size / 1e9, 0.0]) for role, size in seen.memory.items() if size
    ]  # fmt: skip
    parts.append(("room", "grey", [0.0, limit_bytes / 1e9]))
    return bars(
        ["the fullest rank", "a device"], parts, title="Memory", x="GB", ends=[str(Bytes(seen.peak_bytes)),
        str(Bytes(limit_bytes))], said="{:.4g} GB".format,
    )  # fmt: skip
