"""Lines over steps: losses beside the reference, step times with the predicted interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plans.errors import TwofoldError
from reports.svg import Picture, text_width
from reports.units import nice_ticks

__all__ = ["Line", "line_picture"]

_COLOURS = ("sky", "orange", "green", "purple")
_MAX_POINTS = 1000
_WIDTH, _HEIGHT = 1120.0, 270.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 78.0, 16.0, 34.0, 48.0  # margins


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A named series, one value per step; `dashed` lines can be seen above one that they lie on."""

    name: str
    values: Sequence[float]
    dashed: bool = False


def line_picture(
    lines: Sequence[Line],
    *,
    title: str,
    x_name: str,
    y_name: str,
    band: tuple[float, float, str] | None = None,
    from_zero: bool = True,
) -> Picture:
    """Draw series over their positions 1, 2, 3, ...

    Args:
        lines: at most four; long ones are thinned to 1,000 points, and the picture says so.
        title: of the picture.
        x_name: of the horizontal axis, with its unit.
        y_name: of the vertical axis, with its unit.
        band: (low, high, name) of a shaded range.
        from_zero: whether the vertical axis begins at 0.

    Raises:
        TwofoldError: nothing to draw.
    """
    lines = [line for line in lines if len(line.values)]
    if not lines:
        raise TwofoldError(f"no values to draw for {title!r}")
    axes = _Axes.around(lines, band, from_zero)
    picture = Picture(title=title, width=_WIDTH, height=_HEIGHT)
    picture.text(8, 18, title, "title")
    axes.draw(picture)
    if band is not None:
        y = axes.place(0, band[1])[1]
        picture.rect(_LEFT, y, _WIDTH - _LEFT - _RIGHT, axes.place(0, band[0])[1] - y, "band", band[2])
    thinned = [_draw(picture, axes, line, colour) for line, colour in zip(lines, _COLOURS, strict=False)]
    entries = [(colour, line.name) for line, colour in zip(lines, _COLOURS, strict=False)]
    picture.legend(24 + text_width(title, 14.5), 18, [*entries, *([("band", band[2])] if band else [])])
    note = f" (thinned to {_MAX_POINTS} points)" if any(thinned) else ""
    picture.text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 10, x_name + note, "middle small")
    picture.text(20, (_TOP + _HEIGHT - _BOTTOM) / 2, y_name, "middle small", turned=True)
    return picture


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axes:
    """The ranges of a picture: `num_steps` across, values from `low` to `high` upwards."""

    num_steps: int
    low: float
    high: float

    @classmethod
    def around(cls, lines: Sequence[Line], band: tuple[float, float, str] | None, from_zero: bool) -> _Axes:
        values = np.concatenate([np.asarray(line.values, dtype=float) for line in lines])
        finite = [*values[np.isfinite(values)], *(band[:2] if band else ())]
        high = max(finite, default=1.0)
        low = 0.0 if from_zero else min(finite, default=0.0)
        high = high + 0.05 * (high - low) if high > low else low + 1.0
        return cls(num_steps=max(len(line.values) for line in lines), low=low, high=high)

    @property
    def up(self) -> float:
        """Pixels per unit of the value."""
        return (_HEIGHT - _TOP - _BOTTOM) / (self.high - self.low)

    def place(self, step: int, value: float) -> tuple[float, float]:
        """x and y of a value at a step from 0."""
        across = (_WIDTH - _LEFT - _RIGHT) / max(1, self.num_steps - 1)
        return _LEFT + step * across, _HEIGHT - _BOTTOM - (value - self.low) * self.up

    def draw(self, picture: Picture) -> None:
        """Draw grid lines, ticks and both axes."""
        for tick in nice_ticks(self.high - self.low, 5):
            y = _HEIGHT - _BOTTOM - tick * self.up
            picture.line(_LEFT, y, _WIDTH - _RIGHT, y, "grid")
            picture.text(_LEFT - 6, y + 4, f"{self.low + tick:.4g}", "end small")
        for step in sorted({1, *(int(tick) for tick in nice_ticks(self.num_steps, 10) if tick >= 1)}):
            x, y = self.place(step - 1, self.low)
            picture.line(x, y, x, y + 4)
            picture.text(x, y + 15, str(step), "middle small")
        picture.line(_LEFT, _HEIGHT - _BOTTOM, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM)
        picture.line(_LEFT, _HEIGHT - _BOTTOM, _LEFT, _TOP)


def _draw(picture: Picture, axes: _Axes, line: Line, colour: str) -> bool:
    """Draw one line, with a circle per value where these are few; returns whether it was thinned."""
    values = np.asarray(line.values, dtype=float)
    steps = np.unique(np.linspace(0, len(values) - 1, min(len(values), _MAX_POINTS)).astype(int))
    points = [axes.place(int(step), float(values[step])) for step in steps if np.isfinite(values[step])]
    if len(points) > 1:
        picture.polyline(points, f"line-{colour}" + (" dashed" if line.dashed else ""))
    if 0 < len(points) <= 60 and not (line.dashed and len(points) > 1):
        for step, (x, y) in zip(steps, points, strict=False):
            picture.circle(x, y, 2.6, colour, f"{line.name}, {step + 1}: {values[step]:.6g}")
    return len(steps) < len(values)
