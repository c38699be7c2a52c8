"""Settings of a rank's training."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from executor.step.emulate import Emulation
from executor.step.interpreter import Interpreter
from executor.train.settings import Replicas, RunSettings
from executor.train.verdict import Verdict

__all__ = ["AS_PLANNED", "AfterStep", "Checkpoints", "OnCheck", "OnStep", "RunOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """Checkpoints of a run.

    Args:
        folder: where they go.
        every: steps from one to the next; one more is written after the last step.
        keep: how many whole ones stay.
        resume: the one to resume from, in this rank's folder; None: it is on other nodes, or training begins again.
        first: steps that the checkpoint to resume from has done, for ranks without `resume`; 0: training begins again.
        folders: the ranks that share each folder, for nodes without a common disk; empty: all ranks share one.
        settings: settings of the job, which every checkpoint keeps; None without a job.
    """

    folder: Path
    every: int
    keep: int = 2
    resume: Path | None = None
    first: int = 0
    folders: tuple[tuple[int, ...], ...] = ()
    settings: RunSettings | None = None

    @property
    def resumes(self) -> bool:
        """Whether training continues from a checkpoint."""
        return self.resume is not None or self.first > 0

    def is_due(self, done: int, last: int) -> bool:
        """Whether one is written after `done` of `last` steps."""
        return done % self.every == 0 or done == last


AfterStep = Callable[[int, Interpreter], None]
"""Called on every rank with the number of steps done in all and what holds the rank's weights, after each step."""

OnStep = Callable[[int, float | None], None]
"""Called after step 0, 1, ... with its loss, None if this rank does not have it."""


OnCheck = Callable[[int, Verdict], None]
"""Called on every rank after step 0, 1, ... of a plan whose steps are checked, before `OnStep`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Settings of `run_rank`.

    Args:
        emulation: let instructions take a machine's modelled time; the result is labelled "emulated".
        record_steps: of how many of the last steps spans are kept; recording is done in these steps only.
        count: run one more step at the end, whose result is thrown away, to compare executed with planned communication
            (not under emulation).
        on_step: called after every step; for a replayed step when the next one has been launched.
        on_check: called with the decision of the check of steps.
        timeout_s: seconds after which a rank that waits for another one gives up.
        learning_rate: gives the learning rate of step 0, 1, ...; None keeps that of the plan's optimizer.
        profile_steps: of how many steps before the recorded ones torch's profiler writes a trace.
        profile_path: where it goes (JSON, for Perfetto).
        checkpoints: written, and resumed from; only of runs with a plan.
        after_step: called on all ranks after every step.
        replicas: how often ranks are compared; None never does it, nor do emulated runs.
        gather_weights: collect the final parameters on rank 0.
    """

    emulation: Emulation | None = None
    record_steps: int = 3
    count: bool = True
    on_step: OnStep | None = None
    on_check: OnCheck | None = None
    timeout_s: float = 60.0
    learning_rate: Callable[[int], float] | None = None
    profile_steps: int = 0
    profile_path: str | os.PathLike[str] = "profile.json"
    checkpoints: Checkpoints | None = None
    after_step: AfterStep | None = None
    replicas: Replicas | None = field(default_factory=Replicas)
    gather_weights: bool = True


AS_PLANNED = RunOptions()
"""Without options."""
