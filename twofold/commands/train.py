"""`twofold train`: run a training job with a learning-rate schedule, checkpoints and restarts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import tyro

from plans.errors import TwofoldError
from twofold.commands.options import NodeOptions, Output
from twofold.commands.values import Above0, AtLeast0

if TYPE_CHECKING:
    from twofold.console import Console

__all__ = ["Train"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Run a training job; --resume continues from its newest checkpoint.

    Args:
        job: job file (TOML): plan, steps, out; data, model, seed, learning_rate, checkpoints, max_restarts.
        resume: continue from the newest checkpoint, which may belong to another plan for the same model.
        allow_changes: resume although settings that losses depend on have changed, such as the seed.
        max_restarts: number of restarts after failures; by default as in the job.
        timeout: time limit of one launch in seconds; by default as in the job.
    """

    job: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="JOB.toml")]
    resume: bool = False
    allow_changes: bool = False
    max_restarts: AtLeast0 | None = None
    timeout: Above0 | None = None
    place: NodeOptions = field(default_factory=NodeOptions)
    output: Output = field(default_factory=Output)

    def run(self, console: Console) -> tuple[dict[str, Any], bool]:
        """Train; passes if all steps were done."""
        from executor.launch.nodes import refusing
        from executor.launch.rank_failures import RunFailed
        from executor.launch.train_job import load_training_job
        from twofold.elastic import train

        with refusing(self.place.stated):
            job = load_training_job(self.job)
        if self.max_restarts is not None:
            job = msgspec.structs.replace(job, max_restarts=self.max_restarts)
        if self.timeout is not None:
            job = msgspec.structs.replace(job, timeout_s=self.timeout)
        try:
            with console.doing(f"training {job.steps} steps"):
                figures = train(
                    job, resume=self.resume, allow_changes=self.allow_changes,
                    on_line=lambda rank, line: console.print(line), nodes=self.place.stated
                )  # fmt: skip
        except RunFailed:
            raise
        except TwofoldError as error:
            raise TwofoldError(f"{self.job}: {error}") from error
        last = figures[-1]["loss"]
        loss = "is not finite" if last is None else f"{last:.6g}"
        files = ["metrics.jsonl"]
        if job.checkpoints is not None:
            files.append("checkpoints")
        if job.gathers_weights and not self.place.stated.node_rank:
            files.append("weights.npz")
        console.print(f"{len(figures)} steps, loss {loss}; {job.out} has {' and '.join(files)}")
        return {"out": job.out, "steps": len(figures), "losses": [figure["loss"] for figure in figures]}, True
