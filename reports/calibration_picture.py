"""Pictures of measured points with fitted curves, and the map of mutual slowdown of compute and collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from plans.errors import TwofoldError
from reports.svg import Picture, text_width

__all__ = ["Series", "log_picture", "map_picture"]

_COLOURS = ("sky", "orange", "green", "purple")
_LEFT, _RIGHT, _TOP, _BOTTOM = 84.0, 16.0, 52.0, 48.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points (x, y, text shown on hover) and a curve of one name and colour; held-out points are drawn open."""

    name: str
    points: Sequence[tuple[float, float, str]] = ()
    held_out: Sequence[tuple[float, float, str]] = ()
    curve: Sequence[tuple[float, float]] = ()
    dashed: bool = False


def log_picture(
    series: Sequence[Series], *, title: str, x_name: str, y_name: str, linear_y: bool = False, width: float = 1120.0
) -> Picture:
    """Draw series on a logarithmic horizontal axis, and a logarithmic vertical one unless `linear_y`.

    Args:
        series: at most four.
        title: of the picture.
        x_name: of the horizontal axis, with its unit.
        y_name: of the vertical axis, with its unit.
        linear_y: for signed values.
        width: in pixels.

    Raises:
        TwofoldError: nothing to draw.
    """
    places = [(x, y) for each in series for x, y, _ in (*each.points, *each.held_out)]
    places += [place for each in series for place in each.curve]
    xs, ys = [x for x, _ in places], [y for _, y in places]
    if not xs:
        raise TwofoldError(f"no points to draw for {title!r}")
    height = 340.0
    low_x, high_x = _decades(xs)
    low_y, high_y = _around(ys) if linear_y else _decades(ys)

    def place(x: float, y: float) -> tuple[float, float]:
        up = (y - low_y) / (high_y - low_y) if linear_y else (math.log10(y) - low_y) / (high_y - low_y)
        across = (math.log10(x) - low_x) / (high_x - low_x)
        return _LEFT + across * (width - _LEFT - _RIGHT), height - _BOTTOM - up * (height - _TOP - _BOTTOM)

    picture = Picture(title=title, width=width, height=height)
    picture.text(8, 18, title, "title")
    for power in range(math.ceil(low_x), math.floor(high_x) + 1):
        x = place(10.0**power, ys[0])[0]
        picture.line(x, height - _BOTTOM, x, _TOP, "grid")
        picture.text(x, height - _BOTTOM + 15, _power(power), "middle small")
    for tick in _ticks(low_y, high_y, linear_y):
        y = place(xs[0], tick)[1]
        picture.line(_LEFT, y, width - _RIGHT, y, "axis" if linear_y and tick == 0 else "grid")
        picture.text(_LEFT - 6, y + 4, f"{tick:+.0%}" if linear_y else _short(tick), "end small")
    for each, colour in zip(series, _COLOURS, strict=False):
        if len(each.curve) > 1:
            picture.polyline(
                [place(x, y) for x, y in each.curve], f"line-{colour}" + (" dashed" if each.dashed else "")
            )
        for x, y, hover in each.points:
            picture.circle(*place(x, y), 2.8, colour, hover)
        for x, y, hover in each.held_out:
            picture.circle(*place(x, y), 3.6, f"line-{colour}", f"held out: {hover}")
    picture.line(_LEFT, height - _BOTTOM, width - _RIGHT, height - _BOTTOM)
    picture.line(_LEFT, height - _BOTTOM, _LEFT, _TOP)
    picture.legend(_LEFT, 40, [(colour, each.name) for each, colour in zip(series, _COLOURS, strict=False)])
    picture.text((_LEFT + width - _RIGHT) / 2, height - 10, x_name, "middle small")
    picture.text(20, (_TOP + height - _BOTTOM) / 2, y_name, "middle small", turned=True)
    return picture


def map_picture(
    rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[tuple[float, float] | None]], *, title: str
) -> Picture:
    """Pairs of rates as a table of boxes: in each the rate of the row's kind above that of the column's.

    Args:
        rows: kinds of compute.
        columns: kinds of communication.
        values: (rate of compute, rate of communication) of each pair, 1 is undisturbed; None where not known.
        title: of the picture.
    """
    left, cell, high = 16.0 + max(text_width(name) for name in rows), 150.0, 54.0
    picture = Picture(title=title, width=left + cell * len(columns) + 16, height=64 + high * len(rows))
    picture.text(8, 18, title, "title")
    for at, name in enumerate(columns):
        picture.text(left + (at + 0.5) * cell, 46, name, "middle")
    for down, (name, line) in enumerate(zip(rows, values, strict=True)):
        top = 56 + down * high
        picture.text(left - 8, top + high / 2 + 4, name, "end")
        for at, pair in enumerate(line):
            x = left + at * cell
            picture.rect(x, top, cell - 4, high - 4, "card")
            if pair is None:
                picture.text(x + cell / 2 - 2, top + high / 2 + 2, "not known", "middle muted small")
                continue
            for row, (rate, colour, what) in enumerate(zip(pair, ("sky", "orange"), (name, columns[at]), strict=True)):
                y = top + 7 + row * 21
                picture.rect(x + 6, y, (cell - 62) * rate, 15, colour, f"{what} at {rate:.2f} of its speed alone")
                picture.text(x + cell - 50, y + 12, f"{rate:.2f}", "small")
    return picture


def _decades(values: Sequence[float]) -> tuple[float, float]:
    low, high = math.log10(min(values)), math.log10(max(values))
    room = max(0.08, 0.04 * (high - low))
    return low - room, high + room


def _around(values: Sequence[float]) -> tuple[float, float]:
    most = max(0.1, *(abs(value) for value in values)) * 1.08
    return -most, most


def _ticks(low: float, high: float, linear: bool) -> list[float]:
    if linear:
        step = next((size for size in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0) if (high - low) / size <= 9), 10.0)
        count = int(high / step)
        return [step * at for at in range(-count, count + 1)]
    powers = range(math.floor(low), math.ceil(high) + 1)
    steps = tuple(range(1, 10)) if high - low < 0.8 else (1, 2, 5) if high - low < 2.5 else (1,)
    return [step * 10.0**power for power in powers for step in steps if low <= math.log10(step * 10.0**power) <= high]


def _power(power: int) -> str:
    digits = str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{digits}"


def _short(value: float) -> str:
    return f"{value:g}" if 1e-3 <= value < 1e5 else _power(round(math.log10(value)))
