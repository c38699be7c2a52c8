"""A job for launched ranks, as a JSON file: plans, data, initial weights, and where results go.

`python -m executor.launch.job_main JOB.json` is the main module of every rank of a launch.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from executor.train.rates import Rate
from executor.train.settings import EvaluationSettings, Replicas
from plans.files import write_atomically
from plans.reading import read_json

__all__ = ["Emulate", "Job", "Task", "TaskCheckpoints", "load_job", "save_job"]


class Emulate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Emulation settings: every instruction takes `dilate` times the time of a machine's model."""

    machine: str
    dilate: float


class TaskCheckpoints(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Checkpoints of a task: their folder, the steps between, how many stay, and which to resume, of `first` steps.

    `resume` is None also where only other nodes have the checkpoint; `first` is above 0 then.
    """

    folder: str
    every: int
    keep: int
    resume: str | None = None
    first: int = 0


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One plan to run.

    Args:
        plan: path of the plan file.
        out: folder for `rank.N.npz`, and `weights.npz` of rank 0.
        steps: training steps.
        model: "package.module:function" or "file.py:function" that gives the module (and example inputs), for initial
            weights; "" draws them at random.
        data: where batches come from, as `executor.data.sources.Source` has it.
        seed: of initial weights, random data and the order of the digits.
        record_steps: of how many of the last steps spans are kept.
        count: compare executed with planned communication after the last step.
        print_every: print the loss of every n-th step; 0 for none.
        emulate: machine and dilation, or None.
        profile_steps: of how many steps before the recorded ones torch's profiler writes `profile.rank.N.json`.
        learning_rate: a schedule over the steps; None keeps the rate of the plan's optimizer.
        checkpoints: to write and to resume from, or None.
        metrics: the files of figures that are written next to `metrics.jsonl` ("csv", "tensorboard"); None writes none.
        peak_flops_per_s: of one device, for the utilization.
        replicas: how often ranks are compared, and what follows.
        weights: file or folder of initial weights (`executor.weights.files`); "" takes those of the model.
        evaluate: how often the forward alone is run on other data; its `batches` are stated.
        gather_weights: whether rank 0 collects the final weights and writes `weights.npz`.
    """

    plan: str
    out: str
    steps: int
    model: str = ""
    data: str = "random"
    seed: int = 0
    record_steps: int = 3
    count: bool = True
    print_every: int = 0
    emulate: Emulate | None = None
    profile_steps: int = 0
    learning_rate: Rate | None = None
    checkpoints: TaskCheckpoints | None = None
    metrics: tuple[str, ...] | None = None
    peak_flops_per_s: float | None = None
    replicas: Replicas = Replicas()
    evaluate: EvaluationSettings | None = None
    weights: str = ""
    gather_weights: bool = True


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Tasks to run one after the other.

    Args:
        tasks: in order.
        measure: path of JSON lines for the points of a calibration taken before the tasks, or None; existing points are
            not measured again.
        measure_s: about how long the calibration may take.
        thorough: whether it takes more shapes and sizes.
        device: "auto", "cpu", "cuda" or "npu".
        timeout_s: after which a rank that waits for another one gives up.
    """

    tasks: tuple[Task, ...] = ()
    measure: str | None = None
    measure_s: float = 8.0
    thorough: bool = False
    device: str = "auto"
    timeout_s: float = 60.0


def save_job(job: Job, path: str | os.PathLike[str]) -> Path:
    """Write a job file atomically."""
    return write_atomically(path, msgspec.json.format(msgspec.json.encode(job), indent=1) + b"\n")


def load_job(path: str | os.PathLike[str]) -> Job:
    """Read a job file.

    Raises:
        TwofoldError: no such file, not JSON, an unknown key.
    """
    return read_json(path, "the job file", Job)
