"""The picture of prediction errors: a lane per table of measurements, a dot per row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plans.errors import TwofoldError
from reports.charts import Chart
from reports.colours import COLOURS

__all__ = ["Scored", "accuracy_picture"]

_PLACES = 80
"""Dots that stand side by side across a column."""

_MOST_HIGH = 5
"""Dots that are on each other; more of them lie over each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The errors of one table.

    Args:
        name: name of the table, short.
        detail: below it: model and devices.
        errors: quantity -> predicted over measured - 1 of every row, as fractions.
    """

    name: str
    detail: str
    errors: Mapping[str, Sequence[float]]


def accuracy_picture(tables: Sequence[Scored], *, title: str, reach: float = 0.2) -> Chart:
    """A column for every quantity, a lane for every table; the mean absolute error is next to the dots.

    Args:
        tables: from top to bottom.
        title: title of the picture.
        reach: errors beyond this share, either way, are a triangle at the edge, with how many and how far.

    Raises:
        TwofoldError: nothing to draw, an error that is not a number.
    """
    quantities = list(dict.fromkeys(name for table in tables for name in table.errors))
    if not quantities:
        raise TwofoldError(f"no errors to draw for {title!r}")
    for table in tables:
        if not all(np.isfinite(list(error)).all() for error in table.errors.values()):
            raise TwofoldError(f"an error of {table.name!r} is not a number")

    def draw(figure: Any) -> None:
        figure.set_figheight(1.1 + 0.55 * len(tables))
        figure.suptitle(title, x=0.01, ha="left", weight="bold")
        columns = figure.subplots(1, len(quantities), sharey=True, squeeze=False)[0]
        for axes, quantity in zip(columns, quantities, strict=True):
            axes.set_title(quantity, loc="center")
            axes.set_xlabel("predicted against measured (%)")
            axes.set_xlim(-110 * reach, 110 * reach)
            axes.set_ylim(len(tables) - 0.5, -0.5)
            axes.axvline(0, color=COLOURS["grey"], linewidth=1)
            axes.set_yticks(range(len(tables)), [f"{table.name}\n{table.detail}" for table in tables], size=8)
            axes.grid(visible=False, axis="y")
            for lane, table in enumerate(tables):
                _lane(axes, lane, np.asarray(table.errors.get(quantity, ()), dtype=float), reach)

    return Chart(title=title, draw=draw)


def _lane(axes: Any, lane: int, errors: np.ndarray, reach: float) -> None:
    """The dots of a table, side by side where they fit, else above and below the middle of the lane in turn."""
    if not len(errors):
        axes.text(0, lane, "not stated", ha="center", va="center", size=8)
        return
    inside = np.sort(errors[abs(errors) <= reach])
    place = np.round((inside / reach + 1) * _PLACES / 2)
    turn = np.arange(len(inside)) - np.searchsorted(place, place)
    up = np.where(turn < _MOST_HIGH, (turn + 1) // 2 * np.where(turn % 2, 1, -1), 0)
    axes.plot(100 * inside, lane + 0.11 * up, "o", markersize=4, color=COLOURS["sky"], markeredgewidth=0.3,
              markeredgecolor=COLOURS["blue"])  # fmt: skip
    for way, beyond in ((-1, errors[errors < -reach]), (1, errors[errors > reach])):
        if len(beyond):
            worst = f"{100 * way * float(np.abs(beyond).max()):+.0f} %"
            said = worst if len(beyond) == 1 else f"{len(beyond)} runs, to {worst}"
            axes.plot([104 * way * reach], [lane], marker="<>"[way > 0], color=COLOURS["vermillion"])
            axes.text(108 * way * reach, lane + 0.38, said, ha="right" if way > 0 else "left", size=7.5)
    mean = f"mean {100 * float(np.mean(np.abs(errors))):.1f} %, {len(errors)} rows"
    axes.text(1.01, lane, mean, transform=axes.get_yaxis_transform(), va="center", size=8)
