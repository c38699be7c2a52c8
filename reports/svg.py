"""Drawing in SVG: rectangles, lines and text with a style sheet that suits light and dark pages.

Text takes the page's colour; fills are the eight colours of Okabe and Ito (https://jfly.uni-koeln.de/color/), which
people with any kind of colour vision can tell apart, each light enough for dark text. A picture stands in a page as it
is, or alone in a file with its own style (`alone`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from pathlib import Path

from plans.files import write_atomically
from reports.page import Markup

__all__ = ["Picture", "style_sheet", "template", "text_width"]


def template(name: str) -> str:
    """A file of `reports/templates` as text."""
    return resources.files("reports").joinpath("templates", name).read_text(encoding="utf-8")


def style_sheet() -> str:
    """The style that every picture needs, once per page."""
    return template("picture.css")


def text_width(text: str, size: float = 12.0) -> float:
    """An estimate of the width of a text in pixels; fonts differ, so leave room."""
    return 0.58 * size * len(text)


@dataclass(slots=True)
class Picture:
    """A picture under construction; positions in pixels from the upper left.

    >>> picture = Picture(title="one box", width=40, height=20)
    >>> picture.rect(1, 2, 30, 10, "sky", hover="a box")
    >>> picture.__html__().count("<rect")
    1
    """

    title: str
    width: float
    height: float
    _parts: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, width: float, height: float, style: str, hover: str = "") -> None:
        """A rectangle; `hover` is shown when the pointer rests on it."""
        place = f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" class="{style}"'
        self._parts.append(f"{place}><title>{escape(hover)}</title></rect>" if hover else f"{place}/>")

    def line(self, x0: float, y0: float, x1: float, y1: float, style: str = "axis") -> None:
        """Draw a straight line."""
        self._parts.append(f'<line x1="{_n(x0)}" y1="{_n(y0)}" x2="{_n(x1)}" y2="{_n(y1)}" class="{style}"/>')

    def path(self, commands: str, style: str, hover: str = "") -> None:
        """A path of SVG commands, e.g. "M0 0L10 5"."""
        inner = f"><title>{escape(hover)}</title></path>" if hover else "/>"
        self._parts.append(f'<path d="{commands}" class="{style}"{inner}')

    def circle(self, x: float, y: float, radius: float, style: str, hover: str = "") -> None:
        """Draw a circle."""
        inner = f"><title>{escape(hover)}</title></circle>" if hover else "/>"
        self._parts.append(f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" class="{style}"{inner}')

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        """A line of text with its baseline at y."""
        names = f' class="{style}"' if style else ""
        self._parts.append(f'<text x="{_n(x)}" y="{_n(y)}"{names}>{escape(text)}</text>')

    def legend(self, x: float, y: float, entries: list[tuple[str, str]]) -> None:
        """Small boxes with names in a row: (style, name)."""
        for style, name in entries:
            self.rect(x, y - 9, 11, 11, style)
            self.text(x + 16, y, name, "small")
            x += 16 + text_width(name, 10.5) + 16

    def __html__(self) -> Markup:
        return Markup('<figure class="scroll">{}</figure>').format(Markup(self._element("")))

    def alone(self) -> str:
        """The picture as the text of a standalone SVG file."""
        style = f"<style>{style_sheet()}{template('picture_alone.css')}</style>"
        return '<?xml version="1.0" encoding="UTF-8"?>\n' + self._element(style) + "\n"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the SVG file atomically."""
        return write_atomically(path, self.alone().encode())

    def _element(self, style: str) -> str:
        size = f'width="{_n(self.width)}" height="{_n(self.height)}" viewBox="0 0 {_n(self.width)} {_n(self.height)}"'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="tf" role="img" aria-label="{escape(self.title)}" {size}>'
        )
        return head + style + f"<title>{escape(self.title)}</title>" + "".join(self._parts) + "</svg>"


def _n(value: float) -> str:
    """A number with at most two decimals, as short as it goes."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
