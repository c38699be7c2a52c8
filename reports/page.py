"""A page: one self-contained HTML file of sections, rendered by Jinja2 from the templates in `reports/templates`.

Styles, scripts, pictures and data are inside the file; nothing is loaded from elsewhere. Light and dark follow the
reader's setting.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

from markupsafe import Markup

from plans.files import finite, write_atomically

if TYPE_CHECKING:
    import jinja2

__all__ = ["Link", "Markup", "Page", "Part", "Section", "Text", "as_json", "render"]


class Part(Protocol):
    """The content of a section: a table, a chart, a timeline, a text."""

    def __html__(self) -> str:
        """HTML that needs no escaping."""


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; `style` is "note", "pass", "fail" or "warn"."""

    text: str
    style: str = "note"

    def __html__(self) -> Markup:
        return Markup("<p class={}>{}</p>").format(self.style, self.text)


@dataclass(frozen=True, slots=True)
class Link:
    """A text that leads to a file next to the page; `path` has slashes."""

    text: str
    path: str

    @property
    def address(self) -> str:
        """The path as it is in an address."""
        return quote(self.path)

    def __str__(self) -> str:
        return self.text

    def __html__(self) -> Markup:
        return Markup('<a href="{}">{}</a>').format(self.address, self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading with its parts; a `folded` one is closed until the reader opens it. Without parts it is left out."""

    id: str
    title: str
    parts: Sequence[Part] = ()
    folded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A report.

    Args:
        kind: of report, such as "plan"; `twofold serve` lists it.
        title: title of the page.
        sections: those without parts are left out.
        subtitle: a sentence under the title.
        notes: sentences in a list under it.
        figures: name -> value, shown large at the top.
        data: values that a program may read from the page, as JSON in a script element (`id="twofold-data"`); empty
            ones are left out.
        command: the command line that made the page.

    >>> page = Page(kind="plan", title="A < B", sections=[Section(id="one", title="One", parts=[Text("text")])])
    >>> "<title>A &lt; B</title>" in page.html()
    True
    """

    kind: str
    title: str
    sections: Sequence[Section]
    subtitle: str = ""
    notes: Sequence[str] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""

    def html(self) -> str:
        """The page as text."""
        kept = {name: value for name, value in self.data.items() if value not in (None, {}, [], "")}
        shown = [section for section in self.sections if section.parts]
        return render("page.html", page=self, sections=shown, data=Markup(as_json(kept)))

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the page atomically.

        Raises:
            OSError: the file cannot be written.
        """
        return write_atomically(path, self.html().encode())


def as_json(value: Any) -> str:
    """JSON that is safe inside a script element; non-finite numbers become null.

    >>> as_json({"name": "<b>", "step_s": float("inf")})
    '{"name":"\\\\u003cb>","step_s":null}'
    """
    text = json.dumps(finite(value), default=str, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c")


def render(name: str, **values: Any) -> str:
    """A template of `reports/templates` with these values; texts are escaped."""
    return _templates().get_template(name).render(values)


@cache
def _templates() -> jinja2.Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
