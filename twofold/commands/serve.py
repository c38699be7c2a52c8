"""`twofold serve`: show a folder of reports in the browser."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twofold.commands.options import Output, Word
from twofold.commands.values import Port

if TYPE_CHECKING:
    from twofold.console import Console

__all__ = ["Serve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """List the reports of a folder in the browser. Only this computer can reach the page; stop it with Ctrl-C.

    Args:
        folder: folder with reports; subfolders are included.
        port: port on 127.0.0.1; 0 selects a free one.
        open: open the browser; on by default.
    """

    folder: Word
    port: Port = 8000
    open: bool = True
    output: Output = field(default_factory=Output)

    def run(self, console: Console) -> tuple[dict[str, Any], bool]:
        """Serve until Ctrl-C."""
        import contextlib
        import webbrowser

        from twofold.report_server import server

        with server(Path(self.folder), self.port) as serving, contextlib.suppress(KeyboardInterrupt):
            address = f"http://127.0.0.1:{serving.server_address[1]}/"
            console.print(f"reports in {self.folder}: {address} (Ctrl-C ends it)")
            if self.open:
                webbrowser.open(address)
            serving.serve_forever()
        return {"folder": self.folder}, True
