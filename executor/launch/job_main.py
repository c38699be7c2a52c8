"""The main module of every rank of a launch: `python -m executor.launch.job_main JOB.json`."""

from __future__ import annotations

import os
import sys
from collections import ChainMap
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from executor.data.batches import Share
from executor.data.prefetch import Prefetcher
from executor.data.sources import Source
from executor.device import Device, pick_device
from executor.launch.job import Job, Task, load_job
from executor.step.emulate import Emulation
from executor.step.groups import connect
from executor.train.evaluations import Evaluations
from executor.train.folders import ranks_by_folder, share_figures, spread_figures
from executor.train.metrics import EvaluationRow, Metrics, StepFacts
from executor.train.options import Checkpoints, RunOptions
from executor.train.rates import Rate
from executor.train.result import RankResult
from executor.train.run import run_rank
from executor.train.settings import RunSettings
from executor.train.verdict import Verdict
from executor.weights.files import read_weights
from executor.weights.models import InitialParameters, RandomParameters, load_model
from executor.weights.module_weights import as_graph
from executor.weights.same_start import check_same_batch, check_same_start
from plans.files import write_atomically
from plans.lower import lower
from plans.model.graph import Graph
from plans.plan import Plan, load_plan
from plans.program import Program

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the job of a file; the environment of torchrun must be set."""
    import torch.distributed as dist

    job = load_job((sys.argv[1:] if arguments is None else arguments)[0])
    device = pick_device(job.device)
    device.use()
    joined = connect(device, job.timeout_s)
    if job.measure is not None:
        _measure(job)
    for task in job.tasks:
        _run(task, job)
        print(f"task done: {task.out}", flush=True)
    if joined:  # not after an error, which has to be reported before connections close and others report that
        dist.destroy_process_group()
    return 0


def _measure(job: Job) -> None:
    import torch.distributed as dist

    from costmodels.fit.points import PointLog
    from executor.calibrate.cpu import environment, measure_rank
    from executor.calibrate.resume import resume

    log = PointLog(str(job.measure)) if dist.get_rank() == 0 else None
    if log is not None:
        resume(log, environment() | {"ranks": str(dist.get_world_size())})
    points, where = measure_rank(
        lambda line: print(line, flush=True), job.measure_s, log=log, thorough=job.thorough, timeout_s=job.timeout_s
    )
    if log is not None:
        log.begin(where)
        print(f"{len(points)} points in {log.path.name}", flush=True)


def _run(task: Task, job: Job) -> None:
    import torch.distributed as dist

    plan = load_plan(task.plan)
    program, graph = lower(plan), plan.graph
    source = Source(data=task.data, seed=task.seed)
    per_epoch = source.num_batches(graph) or task.steps
    folders: tuple[tuple[int, ...], ...] = ()
    if task.metrics is not None or task.checkpoints is not None:
        folders = ranks_by_folder(Path(task.out))
        spread_figures(Path(task.out), folders)
    check_same_batch(next(source.batches(graph, 1)), pick_device(job.device))
    parameters = _parameters(task, graph, pick_device(job.device))
    emulation = None
    if task.emulate is not None:
        emulation = _emulation(task, program.num_ranks)
    rank = dist.get_rank() if dist.is_initialized() else 0

    checkpoints = _checkpoints(task, folders)
    first = 0 if checkpoints is None else checkpoints.first
    rate = None if task.learning_rate is None else partial(_rate, task.learning_rate, task.steps)
    writers = _metrics_ranks(program, folders)
    metrics = _metrics(task, plan, rank in writers, pick_device(job.device))

    def on_check(step: int, verdict: Verdict) -> None:
        if metrics is not None:
            metrics.checked(verdict)
        if verdict.is_skipped and rank == program.num_ranks - 1:
            print(f"step {step + 1} was skipped: {verdict}", flush=True)

    def on_step(step: int, loss: float | None) -> None:
        if metrics is not None and loss is not None:
            metrics.add(step, loss, plan.optimizer.settings["lr"] if rate is None else rate(step))
        if loss is not None and task.print_every and (step + 1) % task.print_every == 0:
            print(f"epoch: {step // per_epoch + 1} step: {step % per_epoch + 1}, loss is {loss:.9g}", flush=True)

    evaluations = None
    if task.evaluate is not None:
        evaluations = Evaluations(
            task.evaluate, plan, program, parameters, seed=task.seed, steps=task.steps,
            tell=partial(_tell, metrics, rank == program.num_ranks - 1), timeout_s=job.timeout_s,
        )  # fmt: skip
    options = RunOptions(
        emulation=emulation, record_steps=min(task.record_steps, task.steps - first), count=task.count, on_step=on_step,
        on_check=on_check, timeout_s=job.timeout_s, profile_steps=min(task.profile_steps, task.steps),
        profile_path=Path(task.out) / f"profile.rank.{rank}.json", learning_rate=rate, replicas=task.replicas,
        after_step=None if evaluations is None else evaluations.after, checkpoints=checkpoints,
        gather_weights=task.gather_weights,
    )  # fmt: skip
    share = Share.of_rank(plan, rank)
    with Prefetcher(source.batches(graph, task.steps, first=first, share=share)) as feed:
        result = run_rank(
            program, plan, feed, parameters, task.steps - first, device=job.device,
            weights_path=Path(task.out) / "weights.npz", options=options,
        )  # fmt: skip
    _save(result, Path(task.out))
    if evaluations is not None:
        evaluations.close()
    if metrics is not None:
        metrics.close()
    if len(folders) > 1:
        share_figures(
            Path(task.out), writers[0], any(rank == ranks[0] and not {*ranks} & {*writers} for ranks in folders)
        )


def _checkpoints(task: Task, folders: tuple[tuple[int, ...], ...]) -> Checkpoints | None:
    asked = task.checkpoints
    if asked is None:
        return None
    return Checkpoints(
        folder=Path(asked.folder), every=asked.every, keep=asked.keep,
        resume=None if asked.resume is None else Path(asked.resume), first=asked.first, folders=folders,
        settings=RunSettings(seed=task.seed, data=task.data, steps=task.steps, learning_rate=task.learning_rate),
    )  # fmt: skip


def _save(result: RankResult, out: Path) -> None:
    """Write the result of this rank, and on every node those of the ranks of other nodes."""
    import torch.distributed as dist

    path = result.save(out / f"rank.{result.rank}.npz")
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1:
        return
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (os.environ["GROUP_RANK"], path.read_bytes()))
    if os.environ["LOCAL_RANK"] == "0":
        for rank, (node, content) in enumerate(found):
            if node != os.environ["GROUP_RANK"]:
                write_atomically(out / f"rank.{rank}.npz", content)


def _parameters(task: Task, graph: Graph, device: Device) -> Mapping[str, Any]:
    """Initial weights: from a file where it has them, otherwise from the model, otherwise drawn."""
    parameters: Mapping[str, Any] = RandomParameters(graph, task.seed) if not task.model else {}
    if task.model:
        module = load_model(task.model, task.seed)[0]
        check_same_start(module, device)
        parameters = InitialParameters(module, task.seed)
    if not task.weights:
        return parameters
    return ChainMap(as_graph(graph, read_weights(task.weights)), parameters)  # type: ignore[arg-type]


def _metrics_ranks(program: Program, folders: tuple[tuple[int, ...], ...]) -> list[int]:
    """The lowest rank of each folder that has the loss, of folders with one; these write the figures of steps."""
    knowing = sorted(member for group in program.groups if group.loss is not None for member in group.ranks)
    lowest = (next((rank for rank in knowing if not folders or rank in ranks), None) for ranks in folders or ((),))
    return sorted(rank for rank in lowest if rank is not None)


def _metrics(task: Task, plan: Plan, writes: bool, device: Device) -> Metrics | None:
    """The writer of step figures, on ranks that write them."""
    if task.metrics is None or not writes:
        return None
    first = 0 if task.checkpoints is None else task.checkpoints.first
    facts = StepFacts.of(plan, task.peak_flops_per_s)
    return Metrics(Path(task.out), first, facts, device, task.metrics)


def _tell(metrics: Metrics | None, is_followed: bool, found: EvaluationRow) -> None:
    """Write an evaluation down, and print it on the rank whose output is followed."""
    if metrics is not None:
        metrics.evaluated(found)
    if is_followed:
        right = "" if found.accuracy is None else f", accuracy {found.accuracy:.2%}"
        print(f"after step {found.step} the loss of the evaluation is {found.loss:.6g}{right}", flush=True)


def _rate(rate: Rate, steps: int, step: int) -> float:
    return rate.at(step, steps)


def _emulation(task: Task, num_ranks: int) -> Emulation:
    from costmodels import Machine, price

    assert task.emulate is not None
    machine = Machine.load(task.emulate.machine)
    return Emulation(
        machine=machine.name, dilate=task.emulate.dilate, host_async=machine.host_async,
        cost_of=lambda instruction, group: price(instruction, group, machine, num_ranks),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
