"""`twofold study`: predict thousands of configurations."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from plans.errors import TwofoldError
from twofold.commands.options import FileOutput
from twofold.commands.values import AtLeast1, HtmlFile, TableFile

if TYPE_CHECKING:
    from twofold.console import Console
    from twofold.studies import Study

__all__ = ["StudyCommand"]

_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Workers.

    Args:
        backend: loky (all cores of this machine), dask (workers of a Dask cluster) or sequential.
        jobs: number of processes; -1 uses all cores.
        scheduler: address of a Dask scheduler, such as tcp://host:8786; by default a local cluster is started.
    """

    backend: str = "loky"
    jobs: int = -1
    scheduler: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyCommand:
    """Predict every point of a study. Running it again resumes an interrupted study.

    Args:
        study: study file (TOML) with the tables base (settings by name) and axes (lists of values); a table
            [[together]] has linked axes: their first values form a point, then their second.
        axes: list all settings and exit.
        results: file for the results; by default the study's name with the suffix .results.jsonl.
        csv: write one row per point to this file.
        report: write the best points, the effect of each axis and all points to this HTML file.
        top: number of rows to show, best tokens per second first.
    """

    study: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="STUDY.toml")] = ""
    axes: bool = False
    results: str | None = None
    csv: TableFile | None = None
    report: HtmlFile | None = None
    top: AtLeast1 = _SHOWN
    workers: WorkerOptions = field(default_factory=WorkerOptions)
    output: FileOutput = field(default_factory=FileOutput)

    def run(self, console: Console) -> tuple[dict[str, Any], bool]:
        """Predict all points and show the best."""
        from plans.files import check_writable
        from simulator.study.sweep import Workers
        from twofold.studies import load_study, run_study

        if self.axes:
            return self._list_axes(console), True
        if not self.study:
            raise TwofoldError("name a study file: twofold study STUDY.toml; `twofold study --axes` lists the settings")
        asked = load_study(self.study)
        results = self.results or asked.results or str(Path(self.study).with_suffix(".results.jsonl"))
        check_writable(results, replaces=False)
        workers = Workers(backend=self.workers.backend, jobs=self.workers.jobs, scheduler=self.workers.scheduler)
        progress = _Progress()
        with console.doing(progress.text):
            result = run_study(asked, results=results, workers=workers, on_progress=progress.tell)
        self._show(result, progress, results, console)
        best = result.best if any(row.get("fits") for row in result.figures) else None
        return {"points": result.rows, "computed": progress.count, "results": results, "best": best}, True

    def _show(self, found: Study, progress: _Progress, results: str, console: Console) -> None:
        from plans.files import write_atomically

        console.print(found.table(self.top).text())
        kept = len(found) - progress.count
        console.print(f"{progress.count:,} points computed, {kept:,} read from an earlier run; all are in {results}")
        if self.csv is not None:
            from reports.notebook import frame_of

            write_atomically(self.csv, frame_of(found).to_csv(index=False).encode())
            console.print(f"saved {self.csv}")
        if self.report is not None:
            with console.doing("writing the report"):
                saved = found.write_report(self.report, name=Path(self.study).stem, command=console.command)
            console.print(f"saved {saved}")

    def _list_axes(self, console: Console) -> dict[str, Any]:
        from reports.tables import Table
        from simulator.study.axes import AXES

        rows = tuple((f"{axis.name}[.PART]" if axis.has_parts else axis.name, axis.meaning) for axis in AXES.values())
        console.print(Table(title="Settings of a study", columns=("setting", "meaning"), rows=rows).text())
        return {"axes": {axis.name: axis.meaning for axis in AXES.values()}}


class _Progress:
    """Progress of a study."""

    def __init__(self) -> None:
        self.done = self.count = 0
        self._begin_s = time.perf_counter()

    def tell(self, done: int, count: int) -> None:
        """Report the number of finished points."""
        self.done, self.count = done, count

    def text(self) -> str:
        """One line, with the time left."""
        if not self.done:
            return f"computing {self.count:,} points"
        left_s = (time.perf_counter() - self._begin_s) / self.done * (self.count - self.done)
        return f"{self.done:,} of {self.count:,} points, about {left_s:.0f} s left"
