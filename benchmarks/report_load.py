"""How long a browser takes to load and draw a report with 100,000 spans: `python -m benchmarks.report_load`.

Headless Chromium opens the page; when its timeline is drawn, the page sends the milliseconds since navigation began to
a server on this computer. The processor time of the browser includes its start. Asked: 5 MB, 2 s.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from queue import Queue

import numpy as np

from plans.timeline import Span, Timeline
from reports.live import LiveTimeline
from reports.page import Page, Section

_RANKS, _SPANS = 16, 6_250
_SEND = """<script>
const watch = setInterval(() => {
  if (document.querySelector(".live")?.dataset.ready !== "yes") return;
  clearInterval(watch);
  requestAnimationFrame(() => fetch("/loaded", { method: "POST", body: String(performance.now()) }));
}, 5);
</script></body>"""


def large_page() -> str:
    """A report with one timeline of 100,000 spans, with different names and random lengths."""
    length_ps = np.random.default_rng(1).integers(10**6, 10**7, (_RANKS, _SPANS)).tolist()
    spans = [
        Span(rank=rank, stream="compute", start_ps=at * 10**7, end_ps=at * 10**7 + length_ps[rank][at], step=0,
             id=f"{rank}{'FB'[at % 2]}{at // 100}/layers.{at % 100}.attention.projection.linear.F",
             call="linear.forward", part="FB"[at % 2])
        for rank in range(_RANKS) for at in range(_SPANS)
    ]  # fmt: skip
    timeline = LiveTimeline(timelines=[Timeline.from_spans(spans, kind="predicted", num_ranks=_RANKS)])
    return Page(kind="prediction", title="large", sections=[Section(id="a", title="A", parts=[timeline])]).html()


@contextmanager
def _serving(page: bytes) -> Iterator[tuple[str, Queue[float]]]:
    """The address of the page, and the times that it sends."""
    times: Queue[float] = Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def do_POST(self) -> None:
            times.put(float(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/", times
        server.shutdown()


def measure(page: str, repeats: int = 3) -> tuple[list[float], list[float]]:
    """Milliseconds until the page is drawn, and processor seconds of the browser, for each repeat."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("no Chromium found; install it")
    loaded_ms, processor_s = [], []
    with _serving(page.replace("</body>", _SEND).encode()) as (address, times):
        for _ in range(repeats):
            before = os.times()
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
                command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
                           "--window-size=1400,900", "--remote-debugging-port=0", address]  # fmt: skip
                browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                try:
                    loaded_ms.append(times.get(timeout=120))
                finally:
                    browser.terminate()
                    browser.wait()
            after = os.times()
            processor_s.append(
                after.children_user + after.children_system - before.children_user - before.children_system
            )
    return loaded_ms, processor_s


def main() -> None:
    """Measure and print one JSON object."""
    page = large_page()
    loaded_ms, processor_s = measure(page)
    print(json.dumps({
        "spans": _RANKS * _SPANS, "size_MB": round(len(page.encode()) / 1e6, 2), "load": os.getloadavg()[0],
        "loaded_ms": [round(each) for each in loaded_ms], "median_ms": round(statistics.median(loaded_ms)),
        "browser_processor_s": [round(each, 2) for each in processor_s],
    }))  # fmt: skip


if __name__ == "__main__":
    main()
