"""A folder of reports in the browser: a page that lists them, served to this computer only."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from plans.errors import TwofoldError
from reports.page import Link, Page, Section
from reports.tables import Table
from reports.units import Bytes

__all__ = ["FoundReport", "folder_page", "reports_in", "server"]

_HEAD_BYTES = 4096
_KIND = re.compile(r'<meta name="twofold-report" content="([^"]*)">')
_TITLE = re.compile(r"<title>(.*?)</title>", re.DOTALL)


_HOSTS = ("localhost", "127.0.0.1", "[::1]")
"""Host names of this computer in a browser, including tunnels of ssh."""


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
        raise TwofoldError(f"{str(folder)!r} is no folder; give the folder that holds reports (.html)")
    found = []
    for path in sorted(folder.rglob("*.html")):
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES).decode(errors="replace")
        if kind := _KIND.search(head):
            title, status = _TITLE.search(head), path.stat()
            found.append(FoundReport(
                path=path.relative_to(folder), kind=html.unescape(kind[1]), size_bytes=status.st_size,
                title=html.unescape(title[1]) if title else path.stem,
                written=datetime.fromtimestamp(status.st_mtime, UTC),
            ))  # fmt: skip
    if not found:
        raise TwofoldError(f"no report in {str(folder)!r}; commands write one with --report FOLDER/NAME.html")
    return sorted(found, key=lambda each: each.written, reverse=True)


def folder_page(folder: Path) -> Page:
    """The page that lists the reports of a folder."""
    rows = [
        (Link(each.title, each.path.as_posix()), each.kind, f"{each.written:%Y-%m-%d %H:%M}", Bytes(each.size_bytes))
        for each in reports_in(folder)
    ]
    table = Table(title=f"{len(rows)} reports", columns=("report", "kind", "written (UTC)", "size"), rows=rows)
    return Page(kind="folder", title=f"Reports in {folder}", sections=[Section(id="all", title="All", parts=[table])])


def server(folder: Path, port: int) -> ThreadingHTTPServer:
    """A server of a folder's reports on 127.0.0.1; it serves nothing but the list and the reports.

    Args:
        folder: with reports.
        port: 0 for a free one; `server_address` says which.

    Raises:
        TwofoldError: no reports there, or the port is taken.
    """
    reports_in(folder)

    class Handler(SimpleHTTPRequestHandler):
        """Answers with the list, or with a report of it."""

        def do_GET(self) -> None:
            """The list at "/", a report by its path."""
            wanted = self.path.partition("?")[0].lstrip("/")
            host = self.headers.get("Host", "localhost").rpartition(":")
            if (host[0] if host[2].isdigit() else "".join(host)).lower() not in _HOSTS:
                return self.send_error(403, "reports are shown to this computer only")  # a name that leads here
            if not wanted:
                content = folder_page(folder).html().encode()
            elif any(Link("", each.path.as_posix()).address == wanted for each in reports_in(folder)):
                return super().do_GET()
            else:
                return self.send_error(404, "no such report")
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            return None

        def do_HEAD(self) -> None:
            """Nothing: it would reveal which other files exist."""
            self.send_error(501, "GET only")

        def log_message(self, *_: Any) -> None:
            """Requests are not logged."""

    def handler(*arguments: Any) -> Handler:
        return Handler(*arguments, directory=str(folder))

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError as error:
        raise TwofoldError(f"port {port}: {error.strerror}; choose another with --port, or 0 for a free one") from None
