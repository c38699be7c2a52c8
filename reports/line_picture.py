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
    width, height, left, right, top, bottom = 1120.0, 270.0, 78.0, 16.0, 34.0, 48.0
    finite = np.concatenate([np.asarray(line.values, dtype=float) for line in lines])
    finite = finite[np.isfinite(finite)]
    high = max([*finite, *(band[:2] if band else ())], default=1.0)
    low = 0.0 if from_zero else min([*finite, *(band[:2] if band else ())], default=0.0)
    high = high + 0.05 * (high - low) if high > low else low + 1.0
    longest = max(len(line.values) for line in lines)
    across, up = (width - left - right) / max(1, longest - 1), (height - top - bottom) / (high - low)

    def place(step: int, value: float) -> tuple[float, float]:
        return left + step * across, height - bottom - (value - low) * up

    picture = Picture(title=title, width=width, height=height)
    picture.text(8, 18, title, "title")
    for tick in nice_ticks(high - low, 5):
        y = height - bottom - tick * up
        picture.line(left, y, width - right, y, "grid")
        picture.text(left - 6, y + 4, f"{low + tick:.4g}", "end small")
    ticks = sorted({1, *(int(tick) for tick in nice_ticks(longest, 10) if tick >= 1)})
    for tick in ticks:
        x, y = place(tick - 1, low)
        picture.line(x, y, x, y + 4)
        picture.text(x, y + 15, str(tick), "middle small")
    picture.line(left, height - bottom, width - right, height - bottom)
    picture.line(left, height - bottom, left, top)
    if band is not None:
        y = place(0, band[1])[1]
        picture.rect(left, y, width - left - right, place(0, band[0])[1] - y, "band", band[2])
    thinned = False
    for line, colour in zip(lines, _COLOURS, strict=False):
        values = np.asarray(line.values, dtype=float)
        steps = np.unique(np.linspace(0, len(values) - 1, min(len(values), _MAX_POINTS)).astype(int))
        thinned |= len(steps) < len(values)
        points = [place(int(step), float(values[step])) for step in steps if np.isfinite(values[step])]
        if len(points) > 1:
            picture.polyline(points, f"line-{colour}" + (" dashed" if line.dashed else ""))
        if 0 < len(points) <= 60 and not (line.dashed and len(points) > 1):
            for step, (x, y) in zip(steps, points, strict=False):
                picture.circle(x, y, 2.6, colour, f"{line.name}, {step + 1}: {values[step]:.6g}")
    entries = [(colour, line.name) for line, colour in zip(lines, _COLOURS, strict=False)]
    picture.legend(24 + text_width(title, 14.5), 18, [*entries, *([("band", band[2])] if band else [])])
    note = f" (thinned to {_MAX_POINTS} points)" if thinned else ""
    picture.text((left + width - right) / 2, height - 10, x_name + note, "middle small")
    picture.text(20, (top + height - bottom) / 2, y_name, "middle small", turned=True)
    return picture
