"""One calibration on one rank: a table of sections in order, inside a budget of time, every point on disk at once.

A `Session` is the common part of all sections: the device and its timer, the other ranks, the file of points, what was
skipped and why. It runs a table of sections (`executor.calibrate.device_sections` for devices, `executor.calibrate.cpu`
for ranks that share the cores of a CPU). A second run with the same file skips existing points.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from costmodels.fit.points import Point, PointLog
from executor.calibrate.operands import OperandPool
from executor.calibrate.rank_sync import RankSync
from executor.calibrate.timing import Timer
from plans.errors import TwofoldError
from plans.reading import json_of

__all__ = ["MEMORY_SHARE", "Section", "Session", "SessionOptions", "Skipped"]

MEMORY_SHARE = 0.5
"""Share of free memory that one point may use."""

PROGRESS_S = 5.0
"""Seconds between two lines of progress."""

SENSE_S = 0.3
"""Seconds that a reading of the device's sensors is kept."""


@dataclass(slots=True)
class Skipped:
    """Number of points that were not measured, and the reasons.

    >>> str(Skipped(time=2, failed=1))
    '2 for lack of time, 1 failed'
    """

    time: int = 0
    memory: int = 0
    work: int = 0
    failed: int = 0

    def __str__(self) -> str:
        reasons = {
            "for lack of time": self.time,
            "too large for its memory": self.memory,
            "too much work for it": self.work,
            "failed": self.failed,
        }
        return ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """The budget of a calibration.

    Args:
        minutes: of time there is.
        quick: only the most informative points.
        sections: names of those to take; all when empty.
        plans: programs whose instructions are timed on the host, and alone on the device.
        rule_plans: programs whose instructions are timed alone on the device; they are not run.
        calls: the only instructions of these programs that are timed alone; empty: all.
        requested: a file of points that are requested beyond the grids.
        order: seed of the order inside a section; another one takes the same points at other times.
        max_call_s: a point whose single call would take longer is left out; None: 0.3 s, on a CPU 0.02 s.
    """

    minutes: float
    quick: bool = False
    sections: Sequence[str] = ()
    plans: Sequence[Path] = ()
    rule_plans: Sequence[Path] = ()
    calls: Sequence[str] = ()
    requested: Path | None = None
    order: int = 0
    max_call_s: float | None = None


class Section(Protocol):
    """One section: its points, how a point is measured, and what is fitted to them.

    The kinds of sections are in `executor.calibrate.sections`.
    """

    @property
    def name(self) -> str:
        """Name of the section."""

    @property
    def title(self) -> str:
        """Its title in progress messages; consecutive sections with the same title are announced once."""

    @property
    def share(self) -> float:
        """Its share of the time, relative to the other sections."""

    @property
    def fits(self) -> str:
        """The part of the machine file that its points are fitted to; "" where they are only reported on."""

    @property
    def min_ranks(self) -> int:
        """Ranks that it takes."""

    @property
    def required(self) -> bool:
        """Whether every point is needed: its time is a guide, not a limit."""

    def take(self, session: Session, budget_s: float) -> None:
        """Measure the points that are not there yet; every rank calls it."""


class Session:
    """The measurements of one rank.

    Args:
        timer: of this rank's device.
        sync: of all ranks.
        log: this rank's file; that of rank 0 gets everything in the end. None on a rank that keeps no points.
        options: what to take.
        say: takes a line of progress; called on rank 0 only.
        clock_s: the time of day, in seconds.
    """

    def __init__(
        self,
        timer: Timer,
        sync: RankSync,
        log: PointLog | None,
        options: SessionOptions,
        *,
        say: Callable[[str], None] = print,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.timer, self.device, self.sync, self.log, self.options = timer, timer.device, sync, log, options
        self.say = say if sync.rank == 0 else (lambda line: None)
        self.clock_s, self.end_s = clock_s, clock_s() + 60 * options.minutes
        self.max_call_s = options.max_call_s or (0.3 if self.device.is_async else 0.02)
        free, _ = self.device.memory_bytes()
        block_bytes = min(4 * 2**30 if self.device.is_async else 2**25, free // 16)
        self.pool = OperandPool(device=self.device, block_bytes=block_bytes)
        self.skipped = Skipped()
        self.failures: list[str] = []
        self.known: set[Any] = set()
        self._title = ""
        self._has_fixed_shares = False
        self._reported_s = self._sensed_s = -1e30
        self._sensors: dict[str, float] = {}

    @property
    def points(self) -> list[Point]:
        """The points of this rank's file."""
        return [] if self.log is None else self.log.points

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self, sections: Iterable[Section]) -> None:
        """Take the sections of a table, in its order.

        Args:
            sections: those that need more ranks than there are, or that the options leave out, are not taken.

        Raises:
            TwofoldError: the options name a section that is not in the table; the device stopped working, another rank
                stopped answering, the clock jumps. What was measured until then is in the log.
        """
        chosen = self.chosen(sections)
        self.known = self.share_points()
        if self.known:
            self.say(f"{len(self.known)} points are measured already")
        self._has_fixed_shares = all(section.required for section in chosen)
        groups = [(title, list(group)) for title, group in itertools.groupby(chosen, lambda section: section.title)]
        for number, (title, group) in enumerate(groups, 1):
            rest = [section for _, later in groups[number - 1 :] for section in later]
            before, self.skipped = len(self.known), Skipped()
            self._title = f"[{number}/{len(groups)}] {title}"
            self.say(self._announcement(group, rest))
            self.sync.barrier()
            for position, section in enumerate(group):
                section.take(self, self._budget_s(section, rest[position:]))
                self.device.release_memory()
                self.known = self.share_points()
            if not self._has_fixed_shares:
                skipped = f"; left out: {self.skipped}" if str(self.skipped) else ""
                self.say(f"{self._title}: {len(self.known) - before} points{skipped}")
        self.pool.clear()

    def chosen(self, sections: Iterable[Section]) -> list[Section]:
        """The sections of a table that are taken.

        Raises:
            TwofoldError: the options name one that is not there.
        """
        table, names = list(sections), self.options.sections
        titles = list(dict.fromkeys(section.title for section in table))
        if unknown := [name for name in names if name not in titles]:
            raise TwofoldError(f"unknown section {unknown[0]!r}; choose from {', '.join(titles)}")
        return [
            section for section in table
            if (not names or section.title in names) and section.min_ranks <= self.sync.size
            and (section.name != "requested" or self.options.requested is not None)
        ]  # fmt: skip

    def _left_s(self) -> float:
        return max(0.0, self.end_s - self.clock_s())

    def _budget_s(self, section: Section, rest: Sequence[Section]) -> float:
        """Seconds for a section.

        Where every section is required each has its share of the whole. Elsewhere one that needs less than its share
        leaves what remains to those after it.
        """
        if self._has_fixed_shares:
            return section.share * 60 * self.options.minutes
        return section.share / sum(other.share for other in rest) * self._left_s()

    def _announcement(self, group: Sequence[Section], rest: Sequence[Section]) -> str:
        if self._has_fixed_shares:
            rest_share = sum(section.share for section in rest)
            budget_s, done = 60 * self.options.minutes, 1 - rest_share
            spent_s = self.clock_s() - self.end_s + budget_s
            left_s = spent_s * rest_share / done if done > 1e-9 else budget_s
            return f"{self._title} (about {left_s:.0f} s left of measuring)"
        share = sum(section.share for section in group) / sum(section.share for section in rest)
        return f"{self._title} ({self._left_s():.0f} s left, {share * self._left_s():.0f} s for it)"

    # -- for sections --------------------------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """The progress message of the current section."""
        return self._title

    def missing(self, point: Point) -> bool:
        """Whether a point has not been measured yet; the same answer on every rank."""
        return point.key not in self.known

    def keep(self, point: Point) -> None:
        """Write a point to this rank's file, with the device's sensors next to it."""
        if self.log is None:
            return
        now = self.clock_s()
        if now - self._sensed_s > SENSE_S:
            self._sensors = {name: value for name, value in self.device.sensors().items() if name != "clock_MHz"}
            self._sensed_s = now
        empty = {name: value for name, value in self._sensors.items() if not getattr(point, name)}
        self.log.add(msgspec.structs.replace(point, **empty))

    def report_progress(self, done: int, total: int) -> None:
        """Report the progress of the section from time to time."""
        now = self.clock_s()
        if now - self._reported_s > PROGRESS_S and not self._has_fixed_shares:
            self._reported_s = now
            self.say(f"{self._title}: {done} of {total}, {max(0.0, self.end_s - now):.0f} s left in all")

    def share_points(self) -> set[Any]:
        """Rank 0 gets the points of all ranks into its file; all ranks learn which points exist."""
        own = [msgspec.json.encode(point) for point in self.points] if self.sync.rank else []
        for line in itertools.chain(*self.sync.gather(own)):
            point = json_of(line, "points of another rank", Point)
            if self.log is not None and point not in self.log:
                self.log.add(point)
        known: set[Any] = self.sync.from_rank_0({point.key for point in self.points})
        return known

    def check_device(self, error: RuntimeError, what: str) -> None:
        """Go on after an error that leaves the device usable.

        Raises:
            TwofoldError: it does not.
        """
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        try:
            self.device.synchronize()
            torch.ones(1, device=self.device.torch_device).sum().item()
        except RuntimeError as gone:
            path = "no file" if self.log is None else self.log.path
            raise TwofoldError(
                f"device {self.device.name} of rank {self.sync.rank} stopped working in {what}: {reason}; "
                f"{len(self.points)} points are kept in {path}: run the same command again to resume"
            ) from gone
        self.skipped.failed += 1
        self.failures.append(f"{what}: {reason}")
        self.say(f"{what} failed: {reason}")
