"""Parts of HTML pages: sections, figures, key figures, the data inside a page.

Nothing is fetched: pictures are inline SVG, the data is JSON in a script element (`id="twofold-data"`), light and dark
themes follow the reader's setting.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from string import Template
from typing import Any

from plans.files import finite
from reports.svg import Picture, style_sheet, template

__all__ = ["figure", "folded", "key_figures", "page", "page_data", "section"]


def page(
    title: str, sections: Sequence[str], *, subtitle: str = "", notes: str = "", figures: str = "",
    footer: str = "Made by twofold.", data: str = "{}",
) -> str:  # fmt: skip
    """A page as text.

    Args:
        title: plain text; it is escaped here.
        sections: HTML of `section` and `folded`; empty ones are left out.
        subtitle: HTML under the title.
        notes: HTML list items under the subtitle.
        figures: HTML of `key_figures`.
        footer: HTML at the end.
        data: JSON of `page_data`.

    >>> "<title>A &lt; B</title>" in page("A < B", [section("one", "One", "<p>text</p>")])
    True
    """
    return Template(template("report.html")).substitute(
        title=escape(title), subtitle=subtitle, notes=notes, style=style_sheet() + template("report.css"),
        figures=figures, sections="\n".join(each for each in sections if each), footer=footer, data=data,
    )  # fmt: skip


def section(id_: str, title: str, *body: str) -> str:
    """A section with a heading; `body` is HTML, `id_` the anchor."""
    return Template(template("section.html")).substitute(id=id_, title=escape(title), body="\n".join(body))


def folded(id_: str, title: str, *body: str) -> str:
    """A section that is closed until the reader opens it; `body` is HTML, `id_` the anchor."""
    return Template(template("folded.html")).substitute(id=id_, title=escape(title), body="\n".join(body))


def figure(picture: Picture, caption: str) -> str:
    """A picture with a caption under it."""
    return Template(template("figure.html")).substitute(picture=picture.inline(), caption=escape(caption))


def key_figures(summary: Mapping[str, str] | None) -> str:
    """Name -> value, shown large at the top of a page; empty without entries."""
    entry = Template(template("key_figure.html"))
    entries = [entry.substitute(name=escape(name), value=escape(str(value))) for name, value in (summary or {}).items()]
    return f'<dl class="keys">{"".join(entries)}</dl>' if entries else ""


def page_data(**given: Any) -> str:
    """Values as JSON that is safe inside a script element; empty ones are left out, non-finite numbers become null.

    >>> page_data(name="<b>", step_s=float("inf"), notes=[])
    '{"name":"\\\\u003cb>","step_s":null}'
    """
    kept = {name: finite(value) for name, value in given.items() if value not in (None, {}, [], "")}
    return json.dumps(kept, default=str, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
