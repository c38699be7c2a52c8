"""Charts: matplotlib draws them as SVG, once for a wide page and once for a narrow one.

Ink takes the colour of the page, so one picture suits light and dark pages. Points have texts that are shown on hover.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plans.errors import TwofoldError
from plans.files import write_atomically
from plans.units import Seconds, time_unit
from reports.colours import COLOURS, PART_COLOURS
from reports.page import Markup, render

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Chart", "Scale", "Series", "bars", "roofline_chart", "seconds_bars", "series_chart"]

_INK, _FAINT = "#010203", "#040506"
_STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "twofold", "font.family": "DejaVu Sans", "font.size": 9.0,
    "text.color": _INK, "axes.labelcolor": _INK, "axes.edgecolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": _FAINT,
    "grid.linewidth": 0.6, "axes.axisbelow": True, "axes.titlesize": 10.0, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "legend.frameon": False, "legend.fontsize": 8.5, "figure.facecolor": "none",
    "axes.facecolor": "none", "savefig.facecolor": "none",
}  # fmt: skip
_WIDE, _NARROW, _HEIGHT = 12.6, 4.2, 3.2
"""Inches; matplotlib counts 72 points to an inch, and a point becomes a pixel and a third."""

_LONG = 10_000
"""Numbers from here on are written with commas, or on logarithmic axes with a prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart.

    Args:
        title: title of the chart, and its text alternative.
        draw: draws on a matplotlib Figure of any width, and may change its height.
        caption: below it.
    """

    title: str
    draw: Callable[[Figure], None]
    caption: str = ""

    def svg(self, width: float = _WIDE) -> str:
        """The SVG element, for a page that gives `--faint` and the colour of text."""
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        with rc_context(_STYLE):
            figure = Figure(figsize=(width, _HEIGHT), layout="constrained")
            self.draw(figure)
            out = io.StringIO()
            figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        text = out.getvalue()
        text = text[text.index("<svg") :].replace(_INK, "currentColor").replace(_FAINT, "var(--faint)")
        text = re.sub(r' id="[a-z0-9]+(\.[a-z]+)?_\d+"', "", _with_texts(text))
        head = f'<svg role="img" aria-label="{escape(self.title)}"'
        return re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL).replace("<svg", head, 1)

    def __html__(self) -> Markup:
        svgs = {"wide": Markup(self.svg()), "narrow": Markup(self.svg(_NARROW))}
        return Markup(render("chart.html", chart=self, svgs=svgs))

    def alone(self) -> str:
        """The chart as the text of a standalone SVG file."""
        text = self.svg()
        at = text.index(">") + 1
        style = f"<style>\n{render('picture_alone.css')}</style>"
        return f'<?xml version="1.0" encoding="UTF-8"?>\n{text[:at]}{style}{text[at:]}'

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a standalone SVG file atomically."""
        return write_atomically(path, self.alone().encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points (x, y) of one name and colour and a curve through them.

    Args:
        name: in the legend.
        points: (x, y, text shown when the pointer rests on it).
        held_out: the same, drawn open.
        curve: (x, y) joined by a line.
        dashed: whether the line is dashed.
        spread: (low, high) of y for every point, drawn as a bar.
    """

    name: str
    points: Sequence[tuple[float, float, str]] = ()
    held_out: Sequence[tuple[float, float, str]] = ()
    curve: Sequence[tuple[float, float]] = ()
    dashed: bool = False
    spread: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The axes of a chart of series.

    Args:
        x, y: names with units.
        log_x, log_y: whether they are logarithmic.
        relative: y is a relative error, shown in per cent around 0.
        diagonal: draw the line y = x.
        band: (low, high, name) of y, drawn behind.
        ticks: the values of x that are named; chosen by matplotlib where there are none.
    """

    x: str
    y: str
    log_x: bool = False
    log_y: bool = False
    relative: bool = False
    diagonal: bool = False
    band: tuple[float, float, str] | None = None
    ticks: Sequence[float] = ()


def series_chart(series: Sequence[Series], scale: Scale, *, title: str, caption: str = "") -> Chart:
    """Points and curves on two axes."""

    def draw(figure: Figure) -> None:
        from matplotlib.ticker import MaxNLocator, PercentFormatter

        with _axes(figure, title) as axes:
            for each, colour in zip(series, [*COLOURS.values()] * (1 + len(series) // 8), strict=False):
                _draw_series(axes, each, colour)
            axes.set(xlabel=scale.x, ylabel=scale.y)
            if scale.log_x:
                axes.set_xscale("log")
            if scale.log_y:
                axes.set_yscale("log")
            if scale.ticks:
                axes.set_xticks(scale.ticks, [f"{tick:g}" for tick in scale.ticks])
                axes.minorticks_off()
            elif not scale.log_x and _is_whole(series):
                axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
            if scale.relative:
                axes.axhline(0, color=_INK, linewidth=0.8)
                axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
            if scale.diagonal:
                axes.axline((1, 1), (2, 2), color=_INK, linewidth=0.8, linestyle="--")
            if scale.band is not None:
                axes.axhspan(*scale.band[:2], color=_INK, alpha=0.12, linewidth=0, label=scale.band[2])

    return Chart(title=title, draw=draw, caption=caption)


def roofline_chart(
    series: Sequence[Series], peak_flops_per_s: float, memory_Bps: float, *, title: str, caption: str
) -> Chart:  # fmt: skip
    """Rates (FLOPs per byte, TFLOP/s) under the roofs of arithmetic and of memory (Williams et al. 2009,
    doi:10.1145/1498765.1498785)."""
    xs = [point[0] for each in series for point in (*each.points, *each.held_out)]
    low, high = min([10.0, *xs]), max([2000.0, *xs])
    grid = [low * (high / low) ** (at / 80) for at in range(81)]
    roof = [(x, min(peak_flops_per_s, x * memory_Bps) / 1e12) for x in grid]
    scale = Scale(x="floating-point operations per byte", y="TFLOP/s", log_x=True, log_y=True)
    return series_chart([*series, Series(name="vendor's roofline", curve=roof)], scale, title=title, caption=caption)


def _is_whole(series: Sequence[Series]) -> bool:
    """Whether x counts something, such as steps."""
    return all(float(x).is_integer() for each in series for x, *_ in (*each.points, *each.curve))


def _draw_series(axes: Axes, each: Series, colour: str) -> None:
    label: str | None = each.name
    if each.spread:
        xs = [x for x, _, _ in each.points]
        axes.vlines(xs, *zip(*each.spread, strict=True), color=colour, alpha=0.35, linewidth=1.0)
    for points, is_open in ((each.points, False), (each.held_out, True)):
        if points:
            drawn = axes.scatter(
                [x for x, _, _ in points], [y for _, y, _ in points], s=22 if is_open else 14, label=label,
                facecolors="none" if is_open else colour, edgecolors=colour, linewidths=1.0,
            )  # fmt: skip
            _say_points(drawn, [f"held out: {text}" if is_open else text for _, _, text in points])
            label = None
    if len(each.curve) > 1:
        axes.plot(
            *zip(*each.curve, strict=True),
            color=colour,
            linewidth=1.5,
            linestyle="--" if each.dashed else "-",
            label=label,
        )


def bars(
    names: Sequence[str], parts: Sequence[tuple[str, str, Sequence[float]]], *, title: str, x: str, caption: str = "",
    ends: Sequence[str] = (), said: Callable[[float], str] = "{:.4g}".format,
) -> Chart:  # fmt: skip
    """A horizontal bar for every name, from parts laid end to end; negative ones go to the left.

    Args:
        names: from top to bottom.
        parts: (name, colour, length for every bar).
        title: title of the chart.
        x: name of the axis with its unit.
        caption: below it.
        ends: texts at the ends of the bars.
        said: a length as people read it, shown when the pointer rests on a part.
    """

    least = 1e-3 * max((abs(length) for _, _, lengths in parts for length in lengths), default=0.0)
    parts = [part for part in parts if any(abs(length) > least for length in part[2])]  # others cannot be seen

    def draw(figure: Figure) -> None:
        wide = 46 if _is_narrow(figure) else 130
        texts = [textwrap.fill(name, wide) for name in names]
        places = list(itertools.accumulate(0.34 + 0.15 * (1 + text.count("\n")) for text in texts))  # inches down
        figure.set_figheight(1.1 + 0.2 * -(-len(parts) // _legend_columns(figure)) + (places[-1] if places else 0.0))
        with _axes(figure, title) as axes:
            rights, lefts = [0.0] * len(names), [0.0] * len(names)
            for name, colour, lengths in parts:
                begins = [rights[at] if length >= 0 else lefts[at] for at, length in enumerate(lengths)]
                drawn = axes.barh(places, lengths, left=begins, height=0.24, color=COLOURS[colour], label=name)
                for at, (patch, length) in enumerate(zip(drawn, lengths, strict=True)):
                    patch.set_gid(f"say:{names[at]}: {name} {said(length)}")
                    rights[at], lefts[at] = max(rights[at], rights[at] + length), min(lefts[at], lefts[at] + length)
            for place, text in zip(places, texts, strict=True):
                axes.annotate(text, (0.004, place - 0.15), xycoords=axes.get_yaxis_transform(), va="bottom")
            axes.set_yticks([])
            axes.set_ylim((places[-1] if places else 0.0) + 0.25, 0)
            axes.set_xlabel(x)
            axes.axvline(0, color=_INK, linewidth=0.8)
            for place, right, text in zip(places, rights, ends, strict=False):
                axes.annotate(text, (right, place), (4, 0), textcoords="offset points", va="center")
            axes.margins(x=0.2 if ends else 0.04)

    return Chart(title=title, draw=draw, caption=caption)


def seconds_bars(
    rows: Mapping[str, Mapping[str, float]], *, title: str, x: str = "time", ends: Sequence[str] = ()
) -> Chart:  # fmt: skip
    """A bar of seconds for every name, from its parts; the same part has the same colour on every page.

    Args:
        rows: name -> part -> seconds, from top to bottom.
        title: title of the chart.
        x: what the axis shows.
        ends: texts at the ends of the bars; by default the sum of each.

    Raises:
        TwofoldError: nothing to draw.
    """
    if not rows:
        raise TwofoldError(f"nothing to draw for {title!r}")
    unit_s, unit = time_unit(max(sum(seconds.values()) for seconds in rows.values()))
    others = itertools.cycle(("orange", "green", "vermillion", "blue"))
    parts = [
        (part, PART_COLOURS.get(part) or next(others), [seconds.get(part, 0.0) / unit_s for seconds in rows.values()])
        for part in dict.fromkeys(part for seconds in rows.values() for part in seconds)
    ]
    return bars(
        list(rows), parts, title=title, x=f"{x} ({unit})", said=f"{{:.4g}} {unit}".format,
        ends=ends or [str(Seconds(sum(seconds.values()))) for seconds in rows.values()],
    )  # fmt: skip


def _say_points(drawn: Any, texts: Sequence[str]) -> None:
    """Add texts to the points of a scatter that are shown on hover."""
    drawn.set_gid("each:" + "\x1f".join(texts))


def _with_texts(svg: str) -> str:
    """Ids that carry texts become titles: of one shape, or of the points of a group in turn."""

    def one(match: re.Match[str]) -> str:
        return f"<g><title>{match[1]}</title>"

    def several(match: re.Match[str]) -> str:
        texts = iter(match[1].split("&#31;") if "&#31;" in match[1] else match[1].split("\x1f"))

        def titled(use: re.Match[str]) -> str:
            return f"{use[1]}><title>{next(texts, '')}</title></use>"

        single = "" if "<use" in match[2] else f"<title>{next(texts, '')}</title>"  # one point is not a repeated mark
        return f"<g>{single}" + re.sub(r"(<use [^>]*?)/>", titled, match[2])

    svg = re.sub(r'<g id="say:([^"]*)">', one, svg)
    return re.sub(r'<g id="each:([^"]*)">(.*?</g>)', several, svg, flags=re.DOTALL)


@contextmanager
def _axes(figure: Figure, title: str) -> Iterator[Axes]:
    """Axes with a title, and a legend below the picture where there are names."""
    from matplotlib.ticker import AutoLocator, LogFormatter, MaxNLocator, StrMethodFormatter

    axes = figure.add_subplot()
    yield axes
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            axis.set_major_formatter(lambda value, _: _named(value))
            axis.set_minor_formatter(LogFormatter(minor_thresholds=(1.2, 0.4)))
        if isinstance(axis.get_major_locator(), AutoLocator):
            axis.set_major_locator(MaxNLocator(4 if _is_narrow(figure) else 9, steps=[1, 2, 2.5, 5, 10]))
            if max(map(abs, axis.get_view_interval())) >= _LONG:
                axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_title(textwrap.fill(title, 46) if _is_narrow(figure) else title)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=_legend_columns(figure))


def _named(value: float) -> str:
    """A number of a logarithmic axis: 0.1, 1,000, 10k, 1M.

    >>> [_named(10.0**power) for power in (-1, 3, 4, 6)]
    ['0.1', '1,000', '10k', '1M']
    """
    from matplotlib.ticker import EngFormatter

    return f"{value:,g}" if value < _LONG else EngFormatter(sep="").format_data(value)


def _legend_columns(figure: Figure) -> int:
    return 1 if _is_narrow(figure) else 4


def _is_narrow(figure: Figure) -> bool:
    """Whether the figure is for a telephone."""
    return figure.get_figwidth() < 6
