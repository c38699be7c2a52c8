"""Serve a folder of reports to this computer only."""

from __future__ import annotations

from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from plans.errors import TwofoldError
from reports.folder import folder_page, reports_in
from reports.page import Link

__all__ = ["server"]

_HOSTS = ("localhost", "127.0.0.1", "[::1]")
"""Host names of this computer in a browser, including tunnels of ssh."""


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
            elif any(Link("", found_report.path.as_posix()).address == wanted for found_report in reports_in(folder)):
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
