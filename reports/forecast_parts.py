"""Sections of a page about one forecast configuration: its composition, its limits, its pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from plans.errors import TwofoldError
from reports.figures import FIGURES, figures_of
from reports.tables import Cell, Table
from reports.units import Bytes, Seconds, Share

if TYPE_CHECKING:
    from plans.degrees import Degrees
    from plans.program import Program
    from plans.timeline import Timeline
    from search.devices import Candidate, Problem
    from search.devices.operators import OperatorCost

__all__ = [
    "MFU", "composition_table", "critical_table", "figure_cells", "headline", "operators_table", "simulated", "subject",
]  # fmt: skip

MFU = (
    "MFU, model FLOPs utilization, is the share of the devices' peak rate in the model's dtype that its products and "
    "all scores of attention need, without what is recomputed (Chowdhery et al. 2022, arXiv 2204.02311)."
)

_MOST_SIMULATED = 16
"""Ranks of a plan whose pipeline is in the report."""

_MOST_BLOCKS = 10_000
"""Layers times micro-batches of it: 30 s in the event engine, a page of some MB."""

_LAYOUTS = 5
"""Layouts of the operators that are laid side by side; the JSON has all."""


def figure_cells(candidate: Candidate) -> list[Cell]:
    """The figures of a forecast."""
    return [FIGURES[key].form(value) for key, value in figures_of(candidate.forecast).items()]


def headline(problem: Problem, candidate: Candidate) -> dict[str, Cell]:
    """The headline figures of a page: a forecast, its interval and its rates."""
    seen, titles = candidate.forecast, [figure.title for figure in FIGURES.values()]
    rate = problem.global_batch * problem.config.seq / seen.step_s / problem.num_devices
    return dict(zip(titles, figure_cells(candidate), strict=True)) | {
        "90 % interval": f"{Seconds(seen.low_s)} to {Seconds(seen.high_s)}", "tokens/s per device": f"{rate:,.0f}",
        "MFU": Share(problem.mfu(seen.step_s)),
    }  # fmt: skip


def subject(problem: Problem) -> str:
    """The model and the machine, in words."""
    return f"{problem.config.name} on {problem.num_devices} devices of {problem.machine.name}"


def composition_table(candidate: Candidate, of: str = "") -> Table:
    """The composition of step and memory; `of` names the configuration."""
    from search.devices.explain import composition

    seen = candidate.forecast
    rows: list[tuple[Cell, ...]] = [
        (name, Seconds(seconds), Share(seconds / seen.step_s)) for name, seconds in composition(candidate).items()
    ]
    rows += [
        (f"memory: {role}", Bytes(size), Share(size / seen.peak_bytes)) for role, size in seen.memory.items() if size
    ]
    return Table(
        title=f"Composition{of}: the mean rank's step, the fullest rank's memory",
        columns=("part", "amount", "share"), rows=tuple(rows),
    )  # fmt: skip


def critical_table(candidate: Candidate, critical_s: Mapping[str, float]) -> Table:
    """The critical path by kind of work."""
    step_s = candidate.forecast.step_s
    rows = tuple((kind, Seconds(seconds), Share(seconds / step_s)) for kind, seconds in critical_s.items())
    return Table(
        title="Critical path of the step: what it consists of", columns=("kind", "time", "share"), rows=rows,
    )  # fmt: skip


def operators_table(operators: Sequence[OperatorCost], chosen: Degrees, said: Mapping[str, str]) -> Table:
    """A column for the layout of the configuration and for others.

    Args:
        operators: of a block, in every layout that is known.
        chosen: the configuration.
        said: descriptions of other layouts, those to show first.
    """
    from plans.degrees.words import layout_words

    own = layout_words(chosen)
    others = [each for each in said if each != own]
    others += sorted({each.layout for each in operators} - {own, *others})
    layouts = [own, *others][:_LAYOUTS]
    letters = "ABCDEFGH"[: len(layouts)]
    cells = {(each.operator, each.layout): _split(each) for each in operators}
    rows = tuple(
        (name, *(cells.get((name, layout), "") for layout in layouts))
        for name in dict.fromkeys(each.operator for each in operators)
    )
    notes = [f"A: {own} (chosen)"]
    notes += [
        f"{letter}: {layout}" + (f" ({said[layout]})" if layout in said else "")
        for letter, layout in zip(letters[1:], layouts[1:], strict=True)
    ]
    where = "the chosen layout and in others" if others else "their layout"
    return Table(
        title=f"Operators of a block in {where}: seconds of a step on the mean rank",
        columns=("operator", *letters), rows=rows,
        notes=("Compute + redistribution that nothing hides (all of it, alone).", *notes),
    )  # fmt: skip


def _split(cost: OperatorCost) -> str:
    if not cost.redistribution_s:
        return f"{cost.compute_s:.3g}"
    return f"{cost.compute_s:.3g} + {cost.exposed_s:.3g} ({cost.redistribution_s:.3g})"


def simulated(problem: Problem, candidate: Candidate) -> tuple[Program | None, Timeline | None]:
    """The configuration in the event engine, for its pipeline; nothing where it has no plan, too many ranks or too
    long a step."""
    from plans.lower import lower
    from search.devices.confirm import plan_of
    from simulator import simulate

    degrees = candidate.degrees
    is_long = degrees.num_micro_batches * problem.config.num_layers > _MOST_BLOCKS
    if degrees.num_ranks > _MOST_SIMULATED or is_long or not problem.stack.runs_programs:
        return None, None
    try:
        program = lower(plan_of(problem, candidate))
        return program, simulate(program, problem.machine, num_steps=2, fold_ranks=True)
    except TwofoldError:
        return None, None
