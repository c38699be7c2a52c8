"""Pictures of search results: where the step time goes, and time against memory of all forecasts.

Memory is in GB (10^9 bytes), as everywhere in reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plans.errors import TwofoldError
from reports.svg import Picture, text_width
from reports.units import format_bytes, format_seconds, nice_ticks, time_unit

__all__ = ["Configuration", "shares_picture", "trade_picture"]

_COLOURS = ("sky", "purple", "idle", "orange", "green", "yellow")
_WIDTH, _LEFT, _RIGHT = 1120.0, 78.0, 24.0
_GB = 10**9
_FARTHEST = 1.25
"""Configurations that take more than so many times the fastest are told in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A configuration with its forecast; `parts` are seconds that add up to the step."""

    name: str
    step_s: float
    peak_bytes: int
    parts: Mapping[str, float]


def shares_picture(found: Sequence[Configuration], *, title: str) -> Picture:
    """A bar for every configuration, from its parts; their names stand above the bars.

    Args:
        found: with the same parts.
        title: of the picture.

    Raises:
        TwofoldError: nothing to draw.
    """
    if not found:
        raise TwofoldError(f"no configurations to draw for {title!r}")
    row, top, left, right = 42.0, 34.0, 8.0, 96.0
    longest = max(each.step_s for each in found)
    unit_s, unit = time_unit(longest)
    scale = (_WIDTH - left - right) / longest
    low = top + row * len(found)
    picture = Picture(title=title, width=_WIDTH, height=low + 40)
    picture.text(left, 18, title, "title")
    parts = list(dict.fromkeys(part for each in found for part in each.parts))
    colour = dict(zip(parts, _COLOURS, strict=False))
    picture.legend(32 + text_width(title, 15.0), 18, [(colour[part], part) for part in parts])
    for number, each in enumerate(found):
        y, x = top + row * number, left
        picture.text(left, y + 11, f"{number + 1}.  {each.name}", "small")
        for part, seconds in each.parts.items():
            wide = seconds * scale
            share = f"{100 * seconds / each.step_s:.1f} %" if each.step_s else ""
            hover = f"{part}: {format_seconds(seconds)}, {share} of the step"
            picture.rect(x, y + 16, wide, 18, colour[part], hover)
            if wide > text_width(share, 10.5) + 8:
                style = "small middle" if colour[part] == "idle" else "ink small middle"
                picture.text(x + wide / 2, y + 29, share, style)
            x += wide
        picture.text(x + 6, y + 29, format_seconds(each.step_s), "small")
    for tick in nice_ticks(longest / unit_s, 10):
        x = left + tick * unit_s * scale
        picture.line(x, low, x, low + 4)
        picture.text(x, low + 15, f"{tick:g}", "middle small")
    picture.line(left, low, left + longest * scale, low)
    picture.text((left + _WIDTH - right) / 2, low + 32, f"forecast step ({unit})", "middle small")
    return picture


def trade_picture(found: Sequence[Configuration], *, title: str, limit_bytes: int | None = None) -> Picture:
    """A dot for every configuration, time across and memory up; a line joins those that none beats in both.

    Args:
        found: in any order; the fastest has a ring.
        title: of the picture.
        limit_bytes: what a device has for tensors, drawn as a line.

    Raises:
        TwofoldError: nothing to draw.
    """
    if not found:
        raise TwofoldError(f"no configurations to draw for {title!r}")
    ranked = sorted(found, key=lambda each: (each.step_s, each.peak_bytes))
    near = [each for each in ranked if each.step_s <= _FARTHEST * ranked[0].step_s]
    front: list[Configuration] = []
    for each in near:
        if not front or each.peak_bytes < front[-1].peak_bytes:
            front.append(each)
    height, top, bottom = 330.0, 36.0, 44.0
    low_s, high_s = near[0].step_s, near[-1].step_s
    pad = 0.06 * (high_s - low_s) or 0.05 * low_s or 1.0
    low_s, high_s = low_s - pad, high_s + pad
    sizes = [*(each.peak_bytes for each in near), *([] if limit_bytes is None else [limit_bytes])]
    room = 0.08 * (max(sizes) - min(sizes)) or 0.05 * max(sizes) or 1.0
    least, most = max(0.0, min(sizes) - room), max(sizes) + room
    across, up = (_WIDTH - _LEFT - _RIGHT) / (high_s - low_s), (height - top - bottom) / (most - least)

    def place(each: Configuration) -> tuple[float, float]:
        return _LEFT + (each.step_s - low_s) * across, height - bottom - (each.peak_bytes - least) * up

    picture = Picture(title=title, width=_WIDTH, height=height)
    picture.text(8, 18, title, "title")
    for tick in nice_ticks(most / _GB, max(4, int(5 * most / (most - least)))):
        y = height - bottom - (tick * _GB - least) * up
        if not top <= y <= height - bottom:
            continue
        picture.line(_LEFT, y, _WIDTH - _RIGHT, y, "grid")
        picture.text(_LEFT - 6, y + 4, f"{tick:g}", "end small")
    unit_s, unit = time_unit(high_s)
    for tick in nice_ticks(high_s / unit_s, max(4, int(10 * high_s / (high_s - low_s)))):
        x = _LEFT + (tick * unit_s - low_s) * across
        if _LEFT <= x <= _WIDTH - _RIGHT:
            picture.line(x, height - bottom, x, height - bottom + 4)
            picture.text(x, height - bottom + 15, f"{tick:g}", "middle small")
    picture.line(_LEFT, height - bottom, _WIDTH - _RIGHT, height - bottom)
    picture.line(_LEFT, height - bottom, _LEFT, top)
    if limit_bytes is not None:
        y = height - bottom - (limit_bytes - least) * up
        picture.line(_LEFT, y, _WIDTH - _RIGHT, y, "limit")
        picture.text(_WIDTH - _RIGHT, y - 4, f"room of a device {format_bytes(limit_bytes)}", "end small")
    if len(front) > 1:
        picture.polyline([place(each) for each in front], "line-orange")
    for each in reversed(near):
        hover = f"{each.name}: {format_seconds(each.step_s)}, {format_bytes(each.peak_bytes)}"
        picture.circle(*place(each), 3.6, "orange" if each in front else "sky", hover)
    picture.circle(*place(near[0]), 7, "frame")
    picture.legend(32 + text_width(title, 15.0), 18, [("orange", "none is better in both"), ("sky", "others forecast")])
    beyond = len(ranked) - len(near)
    more = f"; {beyond} of more than {_FARTHEST:g} times the fastest are not shown" if beyond else ""
    picture.text(
        (_LEFT + _WIDTH) / 2, height - 8, f"forecast step ({unit}); the ring is the fastest{more}", "middle small"
    )
    picture.text(20, (top + height - bottom) / 2, "forecast peak (GB)", "middle small", turned=True)
    return picture
