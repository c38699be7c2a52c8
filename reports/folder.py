"""The reports of a folder, and the page that lists them."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from plans.errors import TwofoldError
from plans.units import Bytes
from reports.page import Link, Page, Section
from reports.tables import Table

__all__ = ["FoundReport", "folder_page", "reports_in"]

_HEAD_BYTES = 4096
_KIND = re.compile(r'<meta name="twofold-report" content="([^"]*)">')
_TITLE = re.compile(r"<title>(.*?)</title>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundReport:
    """A report file; `path` is relative to its folder."""

    path: Path
    kind: str
    title: str
    size_bytes: int
    written: datetime


def reports_in(folder: Path) -> list[FoundReport]:
    """The reports of a folder and of those inside it, the newest first.

    Raises:
        TwofoldError: no such folder, or no report in it.
    """
    if not folder.is_dir():
        raise TwofoldError(f"{str(folder)!r} is not a folder; give the folder that contains reports (.html)")
    reports = []
    for path in sorted(folder.rglob("*.html")):
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES).decode(errors="replace")
        if kind := _KIND.search(head):
            title, status = _TITLE.search(head), path.stat()
            reports.append(FoundReport(
                path=path.relative_to(folder), kind=html.unescape(kind[1]), size_bytes=status.st_size,
                title=html.unescape(title[1]) if title else path.stem,
                written=datetime.fromtimestamp(status.st_mtime, UTC),
            ))  # fmt: skip
    if not reports:
        raise TwofoldError(f"no report in {str(folder)!r}; commands write one with --report FOLDER/NAME.html")
    return sorted(reports, key=lambda each: each.written, reverse=True)


def folder_page(folder: Path) -> Page:
    """The page that lists the reports of a folder."""
    rows = [
        (
            Link(found_report.title, found_report.path.as_posix()),
            found_report.kind,
            f"{found_report.written:%Y-%m-%d %H:%M}",
            Bytes(found_report.size_bytes),
        )
        for found_report in reports_in(folder)
    ]
    table = Table(title=f"{len(rows)} reports", columns=("report", "kind", "written (UTC)", "size"), rows=rows)
    return Page(kind="folder", title=f"Reports in {folder}", sections=[Section(id="all", title="All", parts=[table])])
