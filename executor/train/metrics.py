"""Writes figures of every step during a run: JSON lines, and CSV and TensorBoard on request."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import resource
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from executor.device import Device
from executor.train.verdict import Verdict
from plans.errors import TrainingStopped
from plans.model.flops import necessary_flops
from plans.plan import Plan
from plans.reading import json_of

__all__ = ["EvaluationRow", "Figures", "Metrics", "StepFacts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """The figures that are the same in all steps of a run.

    Args:
        samples: of a step.
        tokens: of a step; None for models that read no whole numbers [batch, sequence].
        flops: that every step needs (`plans.model.flops`), over all devices.
        peak_flops_per_s: of all devices; None where it is not known.
        predicted_step_s: predicted step time of the plan; None where it was not.
    """

    samples: int
    tokens: int | None
    flops: int
    peak_flops_per_s: float | None
    predicted_step_s: float | None

    @classmethod
    def of(cls, plan: Plan, peak_flops_per_s: float | None) -> StepFacts:
        """The figures of a plan, with the peak rate of one device."""
        rows = (tensor.shape for tensor in plan.graph.inputs if tensor.dtype == "int64" and len(tensor.shape) == 2)
        shape = next(rows, None)
        return cls(
            samples=plan.graph.batch_size, tokens=None if shape is None else shape[0] * shape[1],
            flops=sum(necessary_flops(plan.graph).values()),
            peak_flops_per_s=None if peak_flops_per_s is None else peak_flops_per_s * plan.num_ranks,
            predicted_step_s=None if plan.prediction is None else plan.prediction.step_s,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One step.

    Args:
        step: its number, from 1.
        loss: of the full batch; None where it is not finite and the step was skipped.
        learning_rate: of the schedule, or else of the optimizer; a parameter group may scale it.
        step_s: from the end of the step before; None in the first step of a process, which compiles and checks.
        samples_per_s: of all ranks.
        tokens_per_s: of all ranks; None where samples are not rows of tokens.
        mfu: model FLOPs utilization (Chowdhery et al., arXiv 2204.02311): the FLOPs that the step needs, without
            recomputation, over those that the devices could do in its time; None where their peak is not known.
        memory_bytes: the most that this rank held so far: allocated on a device, or resident on a host.
        predicted_step_s: by the simulator, where the plan has a prediction.
        loss_scale: that the step had; None where losses are not scaled.
        gradient_norm: of all gradients, before clipping; None where steps are not checked, or it is not finite.
        skipped: whether the step left weights and states as they were; None where steps are not checked.
        skipped_steps: in all up to this one.
    """

    step: int
    loss: float | None
    learning_rate: float | None
    step_s: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    mfu: float | None
    memory_bytes: int
    predicted_step_s: float | None
    loss_scale: float | None = None
    gradient_norm: float | None = None
    skipped: bool | None = None
    skipped_steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    """An evaluation between steps.

    Args:
        step: steps done before it.
        loss: the mean over its batches.
        accuracy: of a classifier; else None.
        batches: that it took.
        seconds: that training waited for it.
    """

    step: int
    loss: float
    accuracy: float | None
    batches: int
    seconds: float


class Metrics:
    """Appends to files; rows of steps that a resumed run does again are dropped first.

    Args:
        folder: of `metrics.jsonl`, `evaluations.jsonl`, `metrics.csv` and `tensorboard`.
        first: the number of steps that were done before.
        facts: of the run.
        device: whose memory is reported.
        also: "csv", "tensorboard".
    """

    def __init__(self, folder: Path, first: int, facts: StepFacts, device: Device, also: Collection[str] = ()) -> None:
        path, evaluations = folder / "metrics.jsonl", folder / "evaluations.jsonl"
        kept, evaluated = _rows(path, first), _rows(evaluations, first)
        self._facts, self._device = facts, device
        self._seen_s: float | None = None
        self._checked: dict[str, Any] = {}
        self._file = path.open("w", buffering=1)  # by lines
        self._table: Any = None
        if "csv" in also:
            self._csv = path.with_suffix(".csv").open("w", buffering=1, newline="")
            self._table = csv.DictWriter(self._csv, [*Figures.__dataclass_fields__])
            self._table.writeheader()
        for row in kept:
            self._write(row)
        self._evaluations = evaluations
        if evaluated:
            evaluations.write_text("".join(json.dumps(row) + "\n" for row in evaluated))
        else:
            evaluations.unlink(missing_ok=True)
        self._board: Any = None
        if "tensorboard" in also:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first + 1)

    def checked(self, verdict: Verdict) -> None:
        """The decision of the check of steps about the step that is added next."""
        self._checked = {
            "loss_scale": None if verdict.check.loss_scale is None else verdict.loss_scale,
            "gradient_norm": _finite(verdict.norm), "skipped": verdict.is_skipped, "skipped_steps": verdict.skipped,
        }  # fmt: skip

    def add(self, step: int, loss: float, learning_rate: float | None) -> None:
        """A step, counted from 0, was done."""
        now_s, facts = time.perf_counter(), self._facts
        step_s = None if self._seen_s is None else now_s - self._seen_s
        self._seen_s = now_s
        peak = facts.peak_flops_per_s
        figures = Figures(
            step=step + 1, loss=_finite(loss), learning_rate=learning_rate, step_s=step_s,
            samples_per_s=None if step_s is None else facts.samples / step_s,
            tokens_per_s=None if step_s is None or facts.tokens is None else facts.tokens / step_s,
            mfu=None if step_s is None or peak is None else facts.flops / step_s / peak,
            memory_bytes=_memory_bytes(self._device), predicted_step_s=facts.predicted_step_s, **self._checked,
        )  # fmt: skip
        row = asdict(figures)
        self._write(row)
        if self._board is not None:
            for name, value in row.items():
                if name != "step" and value is not None:
                    self._board.add_scalar(name, value, step + 1)

    def evaluated(self, found: EvaluationRow) -> None:
        """An evaluation was done; the time it took is not a step's."""
        if self._seen_s is not None:
            self._seen_s += found.seconds
        row = asdict(found)
        with self._stops_on_error(self._evaluations), self._evaluations.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if self._board is not None:
            for name in ("loss", "accuracy"):
                if row[name] is not None:
                    self._board.add_scalar(f"evaluation/{name}", row[name], found.step)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._table is not None:
            self._csv.close()
        if self._board is not None:
            self._board.close()

    def _write(self, row: dict[str, Any]) -> None:
        with self._stops_on_error(Path(self._file.name)):
            self._file.write(json.dumps(row) + "\n")
            if self._table is not None:
                self._table.writerow(row)

    @staticmethod
    @contextlib.contextmanager
    def _stops_on_error(path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TrainingStopped(
                f"{path} cannot be written: {error.strerror}; free disk space, and use --resume"
            ) from None


def _rows(path: Path, first: int) -> list[dict[str, Any]]:
    """The rows of a file for the first steps."""
    if first and path.is_file():
        return [row for line in path.read_text().splitlines() if (row := _row(line)) and row["step"] <= first]
    return []


def _finite(value: float) -> float | None:
    """JSON has no other numbers."""
    return value if math.isfinite(value) else None


def _memory_bytes(device: Device) -> int:
    if device.is_async:
        return device.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def _row(line: str) -> dict[str, Any] | None:
    """The figures of a line; None where it was cut by the end of its process."""
    try:
        row = json_of(line.encode(), "a line of metrics")
        return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
    except ValueError:
        return None
