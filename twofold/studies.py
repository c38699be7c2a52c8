"""Studies: a base case, axes, and the figures of every point, which are stored so that a study can be resumed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from plans.degrees import Degrees
from plans.errors import TwofoldError
from plans.reading import read_toml
from plans.shown import Shown
from simulator.study.findings import Findings
from simulator.study.point import figures_of_point
from simulator.study.space import Space
from simulator.study.store import Store
from simulator.study.sweep import Workers, sweep

if TYPE_CHECKING:
    from costmodels import Machine
    from plans.model.transformer import TransformerConfig
    from reports import Table
    from simulator.stacks import Stack

__all__ = ["Study", "StudyFile", "load_study", "run_study", "study"]


class StudyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A study file.

    Args:
        base: settings of all points, by the names of `AXES`.
        axes: values to try, by name; `bandwidth.NVLink` is one tier of links.
        together: tables of linked axes: their first values form a point, then their second.
        points: "grid": every combination; "one-at-a-time": the base, and one point per value (or row of a table).
        search: search the fastest degrees at every point; those in the base and the axes are fixed.
        sample: number of points drawn from the grid.
        seed: random seed of the sample.
        results: file for the results; by default next to the study, with the suffix .results.jsonl.
    """

    base: dict[str, Any]
    axes: dict[str, Any] = {}
    together: list[dict[str, Any]] = []
    points: Literal["grid", "one-at-a-time"] = "grid"
    search: bool = False
    sample: int | None = None
    seed: int = 1
    results: str | None = None

    @property
    def space(self) -> Space:
        """The points of the study.

        Raises:
            TwofoldError: as `Space`; nothing is varied.
        """
        if not self.axes and not self.together:
            raise TwofoldError("the study has no axes; add some, such as tp = [1, 2, 4] in the table axes")
        return Space(
            base=_flat(self.base), axes=_flat(self.axes), together=[_flat(each) for each in self.together],
            points=self.points, sample=self.sample, seed=self.seed,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, repr=False)
class Study(Shown):
    """The results of a study.

    Args:
        asked: the study.
        axes: names of the axes.
        settings: settings of every point.
        figures: figures of every point, by the names of `COLUMNS`; impossible points have only `refused`.
    """

    asked: StudyFile
    axes: tuple[str, ...]
    settings: tuple[Mapping[str, Any], ...]
    figures: tuple[Mapping[str, Any], ...]

    def __repr__(self) -> str:
        refused = sum("refused" in figure for figure in self.figures)
        return f"<Study of {', '.join(self.axes)}: {len(self.figures)} points, {refused} refused>"

    def __len__(self) -> int:
        return len(self.figures)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row per point: all its settings, then its figures."""
        return [{**own, **seen} for own, seen in zip(self.settings, self.figures, strict=True)]

    @property
    def best(self) -> dict[str, Any]:
        """The row with the most tokens a second among those that fit.

        Raises:
            TwofoldError: no point fits.
        """
        if not self.findings.best_first:
            raise TwofoldError("no point of the study fits the memory of its devices; try more devices or recompute")
        return dict(self.findings.best_first[0])

    @cached_property
    def findings(self) -> Findings:
        """The main results, in words."""
        return Findings(
            axes=self.axes, rows=self.rows, alone=self.asked.points != "grid", searched=self.asked.search
        )  # fmt: skip

    def write_report(self, path: str | os.PathLike[str], *, name: str = "", command: str = "") -> Path:
        """Write a page with the main results, the effect of each axis and all points.

        Raises:
            TwofoldError, OSError: the file cannot be written.
        """
        from reports.study_page import study_page

        page = study_page(name or ", ".join(self.axes), _flat(self.asked.base), self.findings, command=command)
        return page.write(path)

    def table(self, most: int | None = None) -> Table:
        """A table of the points in their order, or of the fastest of a grid."""
        from reports.study_page import change_table, study_table

        return change_table(self.findings) if self.findings.alone else study_table(self.findings, most)


def study(
    base: Mapping[str, Any],
    axes: Mapping[str, Sequence[Any]],
    *,
    together: Sequence[Mapping[str, Sequence[Any]]] = (),
    points: Literal["grid", "one-at-a-time"] = "grid",
    search: bool = False,
    sample: int | None = None,
    results: str | os.PathLike[str] | None = None,
    workers: Workers | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Study:
    """Predict every point of a study.

    Args:
        base: settings of all points, by the names that `twofold study --axes` lists.
        axes: values to try, by name.
        together: tables of linked axes, such as [{"devices": [8, 16], "global_batch": [64, 128]}].
        points: "grid" or "one-at-a-time".
        search: search the degrees that are not given at every point.
        sample: number of points drawn from the grid.
        results: file for the results; an interrupted study resumes from it.
        workers: processes; by default all cores of this machine.
        on_progress: called with (points done, points to compute).

    Raises:
        TwofoldError: an unknown axis, too many points, a file without results.

    >>> base = {"model": "llama-3-8b", "machine": "h200-x8", "global_batch": 8, "tp": 8}
    >>> result = study(base, {"bandwidth": [0.5, 1.0]}, workers=Workers(backend="sequential"))
    >>> result, result.best["bandwidth"]
    (<Study of bandwidth: 2 points, 0 refused>, 1.0)
    """
    asked = StudyFile(
        base=dict(base), axes=dict(axes), together=[dict(each) for each in together], points=points, search=search,
        sample=sample,
    )  # fmt: skip
    return run_study(asked, results=results, workers=workers, on_progress=on_progress)


def run_study(
    asked: StudyFile,
    *,
    results: str | os.PathLike[str] | None = None,
    workers: Workers | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Study:
    """Predict every point of a study that was read; arguments as of `study`.

    Raises:
        TwofoldError: as `study`.
    """
    space = asked.space
    settings = list(space)
    figures = sweep(
        settings, partial(figures_of_point, search=_searched if asked.search else None), store=Store(results),
        workers=workers, is_searched=asked.search, on_progress=on_progress,
    )  # fmt: skip
    return Study(asked=asked, axes=space.names, settings=tuple(settings), figures=tuple(figures))


def load_study(path: str | os.PathLike[str]) -> StudyFile:
    """Read a study (TOML).

    Raises:
        TwofoldError: no such file, not TOML, an unknown or missing key, a value of another type.
    """
    return read_toml(path, "the study", StudyFile)


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """Tables of tables as names with dots, as TOML reads `bandwidth.NVLink = 2`.

    >>> _flat({"tp": 2, "bandwidth": {"NVLink": 2.0}})
    {'tp': 2, 'bandwidth.NVLink': 2.0}
    """
    settings: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            settings |= {f"{name}.{part}": each for part, each in value.items()}
        else:
            settings[name] = value
    return settings


def _searched(
    config: TransformerConfig, pins: Mapping[str, Any], machine: Machine, stack: Stack, devices: int, batch: int
) -> Degrees:
    """The fastest degrees of a point."""
    from search.devices import Pins, Problem, solve

    problem = Problem(
        config=config, machine=machine, num_devices=devices, global_batch=batch, pins=Pins(**pins), stack=stack
    )
    return solve(problem).best.degrees
