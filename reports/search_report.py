"""The result of a search over degrees, as tables and as an HTML report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plans.errors import TwofoldError
from reports.figures import FIGURES, figures_of, figures_table
from reports.html import Report, write_report
from reports.search_pictures import Configuration, roofline_parts, shares_picture, trade_picture
from reports.tables import Cell, Table
from reports.units import Bytes, Change, Seconds, Share

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from plans.program import Program
    from plans.timeline import Timeline
    from search.devices import Candidate, SearchResult
    from search.devices.operators import OperatorCost

__all__ = ["Reasons", "explained", "search_tables", "write_search_report"]

_MOST_SIMULATED = 16
"""Ranks of a plan whose pipeline is in the report."""

_DRAWN = 5
"""Configurations with a bar in the report."""

_MFU = (
    "MFU, model FLOPs utilization, is the share of the devices' peak rate in the model's dtype that its products and "
    "all scores of attention need, without what is recomputed (Chowdhery et al. 2022, arXiv 2204.02311)."
)


def search_tables(found: SearchResult[Candidate], top_k: int, reasons: Reasons | None = None) -> list[Table]:
    """Ranking, composition of the best, why it is the best, memory and time against each other, what was refused."""
    return [_ranking(found, top_k), _composition(found), *_why(found, reasons), _pareto(found), *_refused(found)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasons:
    """What explains the best.

    Args:
        operators: costs of the operators of a block, in its layout and in others.
        critical_s: kind of work -> seconds of the critical path.
    """

    operators: Sequence[OperatorCost]
    critical_s: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "critical_path_s": dict(self.critical_s),
            "operators": [
                {"operator": each.operator, "layout": each.layout, "compute_s": each.compute_s,
                 "redistribution_s": each.redistribution_s, "exposed_s": each.exposed_s, "flops": each.flops,
                 "moved_bytes": each.moved_bytes, "chosen": each.chosen}
                for each in self.operators
            ],
        }  # fmt: skip


def explained(found: SearchResult[Candidate]) -> Reasons:
    """The costs of operators and the critical path."""
    from search.devices.critical import critical_path_s
    from search.devices.operators import operator_costs

    beside = [each.candidate.degrees for each in found.alternatives if each.candidate is not None]
    beside += [each.degrees for each in found.plans[1:]]
    return Reasons(
        operators=operator_costs(found.problem, found.best.degrees, beside),
        critical_s=critical_path_s(found.problem, found.best),
    )


def _why(found: SearchResult[Candidate], reasons: Reasons | None) -> list[Table]:
    tables = [_neighbours(found)] if found.alternatives else []
    if reasons is None:
        return tables
    return [_critical(found, reasons.critical_s), *tables, _operators(found, reasons.operators)]


def _ranking(found: SearchResult[Candidate], top_k: int) -> Table:
    from search.devices import describe

    plans = found.plans[:top_k]
    in_engine = any(each.simulated_s is not None for each in plans)
    rows = tuple(
        (number, *_figure_cells(each, in_engine), describe(each.degrees)) for number, each in enumerate(plans, 1)
    )
    step, *titles = (figure.title for figure in FIGURES.values())
    columns = ("", step, *(["in the event engine"] if in_engine else []), *titles, "configuration")
    problem, best = found.problem, found.best.forecast
    rate = problem.global_batch * problem.config.seq / best.step_s / problem.num_devices
    reached = Share(problem.mfu(best.step_s))
    notes = [f"The best: {rate:,.0f} tokens/s per device, MFU {reached}, 90 % interval {_interval(found)}."]
    if found.method == "search" and len(rows) > max(1, found.num_proven):
        first = f"The first {found.num_proven} are" if found.num_proven > 1 else "The first is"
        if found.num_proven:
            notes.append(f"{first} proven to have the shortest forecast step of the search space.")
        notes.append("The others are the fastest plans that the search found. They are not proven to be the next best.")
    title = f"{problem.config.name} on {problem.num_devices} devices of {problem.machine.name}"
    return Table(title=title, columns=columns, rows=rows, notes=tuple(notes))


def _figure_cells(candidate: Candidate, in_engine: bool = False) -> list[Cell]:
    """The figures of a forecast; beside its step that of the event engine, if that is asked for."""
    cells: list[Cell] = [FIGURES[key].form(value) for key, value in figures_of(candidate.forecast).items()]
    if in_engine:
        cells.insert(1, "" if candidate.simulated_s is None else Seconds(candidate.simulated_s))
    return cells


def _interval(found: SearchResult[Candidate]) -> str:
    best = found.best.forecast
    return f"{Seconds(best.low_s)} to {Seconds(best.high_s)}"


def _composition(found: SearchResult[Candidate]) -> Table:
    from search.devices.explain import composition

    best = found.best.forecast
    rows: list[tuple[Cell, ...]] = [
        (name, Seconds(seconds), Share(seconds / best.step_s)) for name, seconds in composition(found.best).items()
    ]
    rows += [(f"memory: {role}", Bytes(size), Share(size / best.peak_bytes))
             for role, size in best.memory.items() if size]  # fmt: skip
    return Table(
        title="Composition of the best: the mean rank's step, the fullest rank's memory",
        columns=("part", "amount", "share"), rows=tuple(rows),
    )  # fmt: skip


def _critical(found: SearchResult[Candidate], critical: Mapping[str, float]) -> Table:
    step_s = found.best.forecast.step_s
    rows = tuple((kind, Seconds(seconds), Share(seconds / step_s)) for kind, seconds in critical.items())
    return Table(
        title="Critical path of the step: what it consists of",
        columns=("kind", "time", "share"), rows=rows,
    )  # fmt: skip


_LAYOUTS = 5
"""Layouts of the operators that are laid side by side; the JSON has all."""


def _operators(found: SearchResult[Candidate], operators: Sequence[OperatorCost]) -> Table:
    """A column for the chosen layout and for those of the neighbours, the least loss first."""
    from plans.degrees.words import layout_words

    forecast = [each for each in found.alternatives[::-1] if each.candidate is not None]
    lost = {layout_words(each.candidate.degrees): each for each in forecast if each.candidate is not None}
    chosen = layout_words(found.best.degrees)
    rest = {each.layout for each in operators} - {chosen, *lost}
    layouts = [chosen, *(each for each in reversed(lost) if each != chosen), *sorted(rest)][:_LAYOUTS]
    letters = "ABCDEFGH"[: len(layouts)]
    cells = {(each.operator, each.layout): _split(each) for each in operators}
    rows = tuple(
        (name, *(cells.get((name, layout), "") for layout in layouts))
        for name in dict.fromkeys(each.operator for each in operators)
    )
    told = [f"{letter}: {layout}" for letter, layout in zip(letters, layouts, strict=True)]
    told[0] += " (chosen)"
    told[1:] = [
        f"{each} ({lost[layout].change}: the step is {lost[layout].extra_s:+.3g} s longer)" if layout in lost else each
        for each, layout in zip(told[1:], layouts[1:], strict=True)
    ]
    return Table(
        title="Operators of a block in the chosen layout and in others: seconds of a step on the mean rank",
        columns=("operator", *letters), rows=rows,
        notes=("Compute + redistribution that nothing hides (all of it, alone).", *told),
    )  # fmt: skip


def _split(cost: OperatorCost) -> str:
    if not cost.redistribution_s:
        return f"{cost.compute_s:.3g}"
    return f"{cost.compute_s:.3g} + {cost.exposed_s:.3g} ({cost.redistribution_s:.3g})"


_NEIGHBOURS = 20
"""Neighbours that are forecast and printed, and as many that cannot be; the JSON has all."""


def _neighbours(found: SearchResult[Candidate]) -> Table:
    slower = [each for each in found.alternatives if each.extra_s is not None]
    impossible = [each for each in found.alternatives if each.extra_s is None]
    shown = [*slower[:_NEIGHBOURS], *impossible[:_NEIGHBOURS]]
    rows = tuple(
        (
            each.change,
            None if each.extra_s is None else Seconds(each.extra_s),
            None if each.extra_s is None else Change(each.extra_s / found.best.forecast.step_s),
            each.reason,
        )
        for each in shown
    )
    left = len(found.alternatives) - len(shown)
    return Table(
        title="One degree changed at a time, the layers spread again", columns=("change", "longer", "share", "why"),
        rows=rows, notes=(f"And {left} more.",) if left else (),
    )  # fmt: skip


def _pareto(found: SearchResult[Candidate]) -> Table:
    from search.devices import describe

    rows = tuple(
        (Seconds(each.forecast.step_s), Bytes(each.forecast.peak_bytes), describe(each.degrees))
        for each in found.pareto[:20]
    )
    return Table(
        title="Time against memory, of all that were forecast", columns=("step", "peak", "configuration"), rows=rows,
    )  # fmt: skip


def _refused(found: SearchResult[Candidate]) -> list[Table]:
    if not found.rejected:
        return []
    reasons: dict[str, list[Any]] = {}
    for each in found.rejected:
        reasons.setdefault(each.reason, []).append(each)
    rows = []
    for reason, own in sorted(reasons.items()):
        nearest = min(own, key=lambda each: (each.excess_bytes or 0, each.what))
        excess = "" if nearest.excess_bytes is None else f"{Bytes(nearest.excess_bytes)} too much"
        rows.append((reason, sum(max(1, each.count) for each in own), nearest.what, excess))
    return [
        Table(
            title="Parts of the space that were refused", columns=("reason", "parts", "nearest", "by"),
            rows=tuple(rows),
        )
    ]  # fmt: skip


def _simulated(found: SearchResult[Candidate]) -> tuple[Program | None, Timeline | None]:
    """The best in the event engine, for its pipeline; nothing where it has no plan or too many ranks."""
    from plans.lower import lower
    from search.devices.confirm import plan_of
    from simulator import simulate

    if found.best.degrees.num_ranks > _MOST_SIMULATED:
        return None, None
    try:
        program = lower(plan_of(found.problem, found.best))
        return program, simulate(program, found.problem.machine, num_steps=2, fold_ranks=True)
    except TwofoldError:
        return None, None


def write_search_report(
    path: str, found: SearchResult[Candidate], *, top_k: int, reasons: Reasons, certificate: str, model: str
) -> Path:
    """The report as HTML: the result, in pictures, and its reasons; the rest folded."""
    from datetime import UTC, datetime

    from costmodels.utilization import peak_flops_per_s
    from search.devices import describe
    from search.devices.explain import composition

    problem, best = found.problem, found.best.forecast
    program, timeline = _simulated(found)
    seen = [
        Configuration(
            name=describe(each.degrees), step_s=each.forecast.step_s, peak_bytes=each.forecast.peak_bytes,
            parts=composition(each),
        )
        for each in found.plans
    ]  # fmt: skip
    peaks = peak_flops_per_s(problem.config, problem.machine), problem.machine.compute.memory_Bps
    roofline, rates = roofline_parts(reasons.operators, *peaks)
    pictures = [
        shares_picture(seen[:_DRAWN], title="Where the forecast step of the mean rank goes"),
        trade_picture(seen, title="Time against memory", limit_bytes=problem.limit_bytes),
        roofline,
    ]
    rate = problem.global_batch * problem.config.seq / best.step_s / problem.num_devices
    figures = dict(zip((figure.title for figure in FIGURES.values()), _figure_cells(found.best), strict=True))
    return write_report(path, Report(
        title=f"Search: {problem.config.name} on {problem.num_devices} devices of {problem.machine.name}",
        results=[_ranking(found, top_k), *pictures, *_why(found, reasons)],
        tables=[_composition(found), rates, _pareto(found), *_refused(found), figures_table()],
        summary={
            **figures, "90 % interval": _interval(found), "tokens/s per device": f"{rate:,.0f}",
            "MFU": Share(problem.mfu(best.step_s)),
            "at most above the fastest of the space": f"{100 * found.gap:.1f} %",
        },
        notes=[certificate, "Every time is a forecast; nothing was run.", _MFU,
               *(["The pipeline is the best plan in the event engine."] if timeline is not None else [])],
        program=program, predicted=timeline, memory_limit_bytes=problem.limit_bytes,
        environment={"date": datetime.now(UTC).date().isoformat()},
        command=f"twofold plan {model} --machine {problem.machine.name} --devices {problem.num_devices} "
        f"--global-batch {problem.global_batch}",
    ))  # fmt: skip
