"""The page of a forecast configuration: where its step and its memory go, and what limits it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plans.errors import TwofoldError
from plans.figures import figure_cells
from plans.units import Bytes, Count, Quantity, Seconds, Share
from reports.charts import Chart, Series, bars, roofline_chart, seconds_bars
from reports.colours import ROLE_COLOURS
from reports.live import LiveTimeline
from reports.page import Page, Section, Text
from reports.tables import Cell, Table
from reports.time_tables import STEP, figures_table

if TYPE_CHECKING:
    from plans.degrees import Degrees
    from search.devices import Candidate, Problem
    from search.devices.operators import OperatorCost
    from search.devices.reasons import Reasons
    from simulator.forecast import Forecast

__all__ = [
    "MFU", "critical_table", "forecast_sections", "headline", "operators_table", "prediction_page", "roofline_parts",
    "stages_chart", "subject",
]  # fmt: skip

MFU = (
    "MFU, model FLOPs utilization, is the share of the devices' peak rate in the model's dtype that its products and "
    "all scores of attention need, without recomputation (Chowdhery et al. 2022, arXiv 2204.02311)."
)

_MOST_STAGES = 64
"""Pipeline ranks with a bar."""

_MOST_RANKS = 4_096
"""Ranks of a plan whose pipeline is on the page: more take long to lower."""

_MOST_BLOCKS = 10_000
"""Layers times micro-batches of such a plan: 30 s in the event engine, a page of a few MB."""

_LAYOUTS = 5
"""Layouts of the operators that are laid side by side; the JSON has all."""


def prediction_page(problem: Problem, candidate: Candidate, *, data: Mapping[str, Any], command: str) -> Page:
    """The page.

    Args:
        problem: the model, its machine and the software.
        candidate: the configuration with its forecast.
        data: the JSON object of the command, which the page holds too.
        command: that made the page.
    """
    from search.devices import describe
    from search.devices.explain import composition
    from search.devices.reasons import reasons_for

    reasons = reasons_for(problem, candidate)
    operators = operators_table(reasons.operators, candidate.degrees, {})
    rows = {"average over ranks": composition(candidate)}
    sections = forecast_sections(problem, candidate, reasons, rows, further=[operators])
    return Page(
        kind="prediction", sections=sections, command=command, data=data, title=subject(problem),
        subtitle=f"{describe(candidate.degrees)}, run by {problem.stack.name}.",
        figures=headline(problem, candidate), notes=["All times are forecasts; nothing was run.", MFU],
    )  # fmt: skip


def subject(problem: Problem) -> str:
    """The model and the machine, in words."""
    return f"{problem.config.name} on {problem.num_devices} devices of {problem.machine.name}"


def headline(problem: Problem, candidate: Candidate) -> dict[str, Cell]:
    """The headline figures of a page: the step, its interval and its rates, then the others."""
    seen, cells = candidate.forecast, figure_cells(candidate.forecast)
    rate = problem.global_batch * problem.config.seq / seen.step_s / problem.num_devices
    return {
        STEP: cells.pop(STEP), "90 % interval": f"{Seconds(seen.low_s)} to {Seconds(seen.high_s)}",
        "tokens/s per device": Count(rate), "MFU": Share(problem.mfu(seen.step_s)), **cells,
    }  # fmt: skip


def forecast_sections(
    problem: Problem, candidate: Candidate, reasons: Reasons, bars_s: Mapping[str, Mapping[str, float]],
    further: Sequence[Table],
) -> list[Section]:  # fmt: skip
    """The sections about one configuration.

    Args:
        problem, candidate, reasons: the configuration.
        bars_s: name -> part of the mean rank's step -> seconds, of the configuration and of others to compare it with.
        further: tables for the last section, which is folded.
    """
    from costmodels.utilization import peak_flops_per_s
    from search.devices.explain import composition

    seen, machine = candidate.forecast, problem.machine
    parts = composition(candidate)
    step: list[Any] = [seconds_bars(bars_s, title="Where the forecast step goes, averaged over ranks")]
    step += [stages_chart(seen)] if 1 < len(seen.rank_s) <= _MOST_STAGES else []
    fits = seen.peak_bytes <= problem.limit_bytes
    room = Bytes(problem.limit_bytes)
    verdict = f"It {'fits' if fits else 'does not fit'}: {Bytes(seen.peak_bytes)} of tensors, with room for {room}."
    peaks = peak_flops_per_s(problem.config, machine), machine.compute.memory_Bps
    roofline, rates = roofline_parts(reasons.operators, *peaks)
    amounts: list[tuple[str, Quantity, float]] = [
        (name, Seconds(spent), spent / seen.step_s) for name, spent in parts.items() if spent
    ]
    amounts += [(f"memory: {role}", Bytes(size), size / seen.peak_bytes) for role, size in seen.memory.items() if size]
    whole = Table.of(
        "The step averaged over ranks, and the memory of the fullest rank",
        ({"part": name, "amount": amount, "share": Share(share)} for name, amount, share in amounts),
    )
    return [
        Section(id="step", title="The step", parts=step),
        Section(id="memory", title="Memory", parts=[
            Text(verdict, "pass" if fits else "fail"), _memory(seen, problem.limit_bytes),
        ]),
        Section(id="limits", title="What limits it", parts=[critical_table(candidate, reasons.critical_s), roofline]),
        Section(id="pipeline", title="Pipeline and memory", parts=_pipeline(problem, candidate)),
        Section(id="further", title="Further tables", folded=True, parts=[whole, rates, *further, figures_table()]),
    ]  # fmt: skip


def _pipeline(problem: Problem, candidate: Candidate) -> list[LiveTimeline]:
    """The configuration in the event engine; nothing if it has no plan, too many ranks or too long a step."""
    from plans.lower import lower
    from search.devices.confirm import plan_of
    from simulator import simulate

    degrees = candidate.degrees
    is_long = degrees.num_micro_batches * problem.config.num_layers > _MOST_BLOCKS
    if degrees.num_ranks > _MOST_RANKS or is_long or not problem.stack.runs_programs:
        return []
    try:
        program = lower(plan_of(problem, candidate))
        timeline = simulate(program, problem.machine, num_steps=2, fold_ranks=True)
    except TwofoldError:
        return []
    return [LiveTimeline(timelines=[timeline], programs=[program], limit_bytes=problem.limit_bytes)]


def critical_table(candidate: Candidate, critical_s: Mapping[str, float]) -> Table:
    """The critical path by kind of work."""
    return Table.of("Critical path of the step", (
        {"kind": kind, "time": Seconds(seconds), "share": Share(seconds / candidate.forecast.step_s)}
        for kind, seconds in critical_s.items()
    ), notes=["Communication counts where the step waits for it and where it slows compute down."])  # fmt: skip


def operators_table(operators: Sequence[OperatorCost], chosen: Degrees, remarks: Mapping[str, str]) -> Table:
    """A column for the layout of the configuration and for others.

    Args:
        operators: of a block, in every known layout.
        chosen: the configuration.
        remarks: layouts to show first -> a remark.
    """
    from plans.degrees.words import layout_words

    layout_chosen = layout_words(chosen)
    remarks = {layout_chosen: "", **remarks} | {layout_chosen: "chosen"}  # the first of all
    layouts = list(dict.fromkeys([*remarks, *sorted(operator.layout for operator in operators)]))[:_LAYOUTS]
    letters = dict(zip(layouts, "ABCDE", strict=False))
    cells = {(operator.operator, operator.layout): _split(operator) for operator in operators}
    notes = [
        f"{letter}: {layout}" + (f" ({remarks[layout]})" if layout in remarks else "")
        for layout, letter in letters.items()
    ]
    return Table.of(
        f"Operators of a block in {len(layouts)} layout{'s' if len(layouts) > 1 else ''}: time per step, averaged "
        "over ranks",
        (
            {"operator": name, **{letter: cells.get((name, layout), "") for layout, letter in letters.items()}}
            for name in dict.fromkeys(operator.operator for operator in operators)
        ),
        notes=["Entries: compute + exposed redistribution (redistribution without overlap).", *notes],
    )


def _split(cost: OperatorCost) -> str:
    compute = str(Seconds(cost.compute_s))
    if not cost.redistribution_s:
        return compute
    return f"{compute} + {Seconds(cost.exposed_s)} ({Seconds(cost.redistribution_s)})"


def roofline_parts(
    operators: Sequence[OperatorCost], peak_flops_per_s: float, memory_Bps: float
) -> tuple[Chart, Table]:
    """The operators of a block that have products, in the chosen layout, under the peaks.

    Args:
        operators: costs, which may include other layouts.
        peak_flops_per_s: of a device, in the dtype of the model.
        memory_Bps: of its memory.

    Returns:
        A point for every operator, and the same as a table.
    """
    title, points, records = "Roofline: operators of a block on a device", [], []
    for operator in operators:
        if operator.chosen and operator.flops:
            slope, rate = operator.flops_per_byte * memory_Bps, operator.flops_per_s / 1e12
            share = Share(operator.flops_per_s / min(peak_flops_per_s, slope))
            limit = "arithmetic" if slope > peak_flops_per_s else "memory"
            tooltip = f"{operator.operator}: {rate:.3g} TFLOP/s, {share} of what {limit} allows"
            points.append((operator.flops_per_byte, rate, tooltip))
            records.append({
                "operator": operator.operator, "FLOPs per byte": Quantity(operator.flops_per_byte),
                "TFLOP/s": Quantity(rate), "of its limit": share, "limit": limit,
                "time of a step": Seconds(operator.compute_s),
            })  # fmt: skip
    chart = roofline_chart(
        [Series(name="operators of a block", points=points)], peak_flops_per_s, memory_Bps, title=title,
        caption="Forecast rates of the forward and backward pass, recomputing included. Memory limits the operators "
        "under the slope, arithmetic those under the horizontal line.",
    )  # fmt: skip
    return chart, Table.of(title, records)


def stages_chart(seen: Forecast) -> Chart:
    """A bar for every pipeline rank: compute, exposed communication, and the rest."""
    rows = {
        f"pipeline rank {at}": {
            call if call == "compute" else f"exposed {call}": spent for call, spent in parts.items()
        }
        | {"waits": max(0.0, seen.step_s - sum(parts.values()))}
        for at, parts in enumerate(seen.rank_s[:_MOST_STAGES])
    }
    ends = [f"{Seconds(parts.get('compute', 0.0))} of compute" for parts in seen.rank_s[:_MOST_STAGES]]
    return seconds_bars(rows, title="Where the step of every pipeline rank goes", ends=ends)


def _memory(seen: Forecast, limit_bytes: int) -> Chart:
    """The memory of the fullest rank by role, above the room for tensors."""
    parts = [(role, ROLE_COLOURS.get(role, "grey"), [size / 1e9, 0.0]) for role, size in seen.memory.items()]
    parts.append(("available", "grey", [0.0, limit_bytes / 1e9]))
    return bars(
        ["fullest rank", "room for tensors"], parts, title="Peak memory",
        x="GB", ends=[str(Bytes(seen.peak_bytes)), str(Bytes(limit_bytes))], said="{:.4g} GB".format,
    )  # fmt: skip
