"""The picture of prediction errors: a lane per table of measurements, a dot per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plans.errors import TwofoldError
from reports.svg import Picture

__all__ = ["Scored", "accuracy_picture"]

_LEFT, _GAP, _RIGHT, _TOP, _DOT, _WIDTH = 250.0, 36.0, 16.0, 58.0, 3.4, 1120.0
_MOST_HIGH = 5
"""Dots that stand on each other; more of them lie over each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The errors of one table.

    Args:
        name: of the table, short.
        detail: below it: model and devices.
        errors: quantity -> predicted over measured - 1 of every row, as fractions.
    """

    name: str
    detail: str
    errors: dict[str, Sequence[float]]


def accuracy_picture(tables: Sequence[Scored], *, title: str, reach: float = 0.2) -> Picture:
    """A column for every quantity, a lane for every table; the mean absolute error stands beside the dots.

    Args:
        tables: from top to bottom.
        title: of the picture.
        reach: errors beyond this share, either way, are a triangle at the edge, with how many and how far.

    Raises:
        TwofoldError: nothing to draw, an error that is no number.
    """
    quantities = list(dict.fromkeys(name for table in tables for name in table.errors))
    if not quantities:
        raise TwofoldError(f"no errors to draw for {title!r}")
    width = (_WIDTH - _LEFT - _RIGHT - _GAP * (len(quantities) - 1)) / len(quantities)
    lane = 54.0
    height = _TOP + lane * len(tables) + 42
    picture = Picture(title=title, width=_WIDTH, height=height)
    picture.text(8, 18, title, "title")
    low = _TOP + lane * len(tables)
    for number, table in enumerate(tables):
        y = _TOP + lane * number + lane / 2
        picture.text(8, y - 1, table.name)
        picture.text(8, y + 13, table.detail, "small muted")
    for at, quantity in enumerate(quantities):
        left = _LEFT + at * (width + _GAP)
        middle, scale = left + (width - 86) / 2, (width - 86) / 2 / reach
        picture.text(middle, _TOP - 14, quantity, "middle")
        for step in (-2, -1, 0, 1, 2):
            x = middle + step * reach / 2 * scale
            picture.line(x, _TOP - 6, x, low, "grid" if step else "axis")
            picture.text(x, low + 15, f"{50 * step * reach:+g} %" if step else "0", "middle small")
        picture.text(middle, low + 33, "predicted against measured", "middle small")
        for number, table in enumerate(tables):
            errors = np.asarray(table.errors.get(quantity, ()), dtype=float)
            if not np.all(np.isfinite(errors)):
                raise TwofoldError(f"an error of {table.name!r} is no number")
            y = _TOP + lane * number + lane / 2
            if not len(errors):
                picture.text(middle + 10, y + 4, "not stated", "small muted")
                continue
            _dots(picture, errors, middle, scale, reach, y)
            mean = 100 * float(np.mean(np.abs(errors)))
            picture.text(left + width, y + 1, f"{mean:.1f} %", "end")
            picture.text(left + width, y + 14, f"{len(errors)} rows", "end small muted")
    for at in range(len(quantities)):
        picture.text(_LEFT + at * (width + _GAP) + width, _TOP - 14, "mean error", "end small muted")
    return picture


def _dots(picture: Picture, errors: np.ndarray, middle: float, scale: float, reach: float, y: float) -> None:
    """Dots side by side where they fit, else above and below the lane's middle in turn."""
    columns: dict[int, int] = {}
    for error in np.sort(errors):
        if abs(error) > reach:
            continue
        column = round(error * scale / (2 * _DOT))
        turn = columns.get(column, 0)
        columns[column] = turn + 1
        up = (turn + 1) // 2 * (1 if turn % 2 else -1) if turn < _MOST_HIGH else 0
        picture.circle(middle + error * scale, y + 2 * _DOT * up, _DOT, "sky dot", f"{100 * error:+.1f} %")
    for way, beyond in ((-1, errors[errors < -reach]), (1, errors[errors > reach])):
        if not len(beyond):
            continue
        x, worst = middle + way * reach * scale, 100 * way * float(np.abs(beyond).max())
        said = f"{worst:+.0f} %" if len(beyond) == 1 else f"{len(beyond)} runs, to {worst:+.0f} %"
        picture.path(f"M{x:.1f} {y - 5:.1f}L{x + 6 * way:.1f} {y:.1f}L{x:.1f} {y + 5:.1f}Z", "vermillion", said)
        picture.text(x - 2 * way, y + 20, said, "end small" if way > 0 else "small")
