"""The four figures of a step that every command, report and file shows. They are defined only here.

`step_s`, `exposed_comm_s`, `bubble_fraction` and `peak_bytes` are keys of JSON objects and of files; texts and tables
show them with `figures_text`, under the titles of `FIGURES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plans.timeline import Timeline
from plans.units import Bytes, Quantity, Seconds, Share

__all__ = ["FIGURES", "Figure", "figure_cells", "figures_of", "figures_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of a training step.

    Args:
        key: in JSON objects and files.
        title: in texts and tables.
        unit: unit of the value in JSON objects and files.
        definition: what it is.
        form: makes a value print itself for people.
    """

    key: str
    title: str
    unit: str
    definition: str
    form: type[Quantity]


FIGURES: Mapping[str, Figure] = {
    figure.key: figure
    for figure in (
        Figure(
            key="step_s", title="step", unit="s", form=Seconds,
            definition="Time from the end of one training step to the end of the next, when steps follow each other.",
        ),
        Figure(
            key="exposed_comm_s", title="exposed communication", unit="s", form=Seconds,
            definition="Time of a step in which a rank waits for collectives and does not compute, averaged over "
            "ranks. The wait for a late member of a collective is bubble.",
        ),
        Figure(
            key="bubble_fraction", title="bubble", unit="1", form=Share,
            definition="Share of a step in which a rank waits for others, mostly for tensors of other pipeline stages, "
            "averaged over ranks: what is left of the step after compute, exposed communication and the wait for its "
            "own host.",
        ),
        Figure(
            key="peak_bytes", title="peak memory", unit="B", form=Bytes,
            definition="The most memory that any rank needs at one time. Predictions include communication buffers, "
            "and fragmentation and the communication library where the machine file states them; runs count the "
            "program's own values.",
        ),
    )
}  # fmt: skip
"""Key -> the figure, in the order in which they are shown."""


def figures_of(step: Any) -> dict[str, Any]:
    """The figures by key of a timeline, a forecast, the prediction of a plan, or the outcome of a what-if.

    `step_s` of a timeline is the interval between steps.

    >>> from types import SimpleNamespace
    >>> figures_of(SimpleNamespace(step_s=0.5, exposed_comm_s=0.1, bubble_fraction=0.25, peak_bytes=8))
    {'step_s': 0.5, 'exposed_comm_s': 0.1, 'bubble_fraction': 0.25, 'peak_bytes': 8}
    """
    values = {key: getattr(step, key) for key in FIGURES}
    return values | ({"step_s": step.step_interval_s} if isinstance(step, Timeline) else {})


def figure_cells(step: Any) -> dict[str, Quantity | None]:
    """The figures of `figures_of` by title, as cells of a table.

    >>> from types import SimpleNamespace
    >>> cells = figure_cells(SimpleNamespace(step_s=0.5, exposed_comm_s=0.1, bubble_fraction=0.25, peak_bytes=None))
    >>> [f"{title}: {cell}" for title, cell in cells.items()]
    ['step: 500 ms', 'exposed communication: 100 ms', 'bubble: 25.0 %', 'peak memory: None']
    """
    values = figures_of(step)
    return {figure.title: None if values[key] is None else figure.form(values[key]) for key, figure in FIGURES.items()}


def figures_text(values: Mapping[str, Any], *, low_s: float | None = None, high_s: float | None = None) -> str:
    """The figures in one line, the step with its 90 % interval where that is given.

    >>> figures_text({"step_s": 0.5, "exposed_comm_s": 0.1, "bubble_fraction": 0.25, "peak_bytes": 8e9}, low_s=0.4,
    ...              high_s=0.6)
    'step 500 ms (90 %: 400 ms to 600 ms), exposed communication 100 ms, bubble 25.0 %, peak memory 8.00 GB'
    """
    parts = []
    for key, figure in FIGURES.items():
        if values[key] is None:
            continue
        part = f"{figure.title} {figure.form(values[key])}"
        if key == "step_s" and low_s is not None and high_s is not None:
            part += f" (90 %: {figure.form(low_s)} to {figure.form(high_s)})"
        parts.append(part)
    return ", ".join(parts)
