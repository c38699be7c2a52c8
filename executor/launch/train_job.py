"""A training job: a file with the plan, the data, the number of steps and the folder of checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from executor.launch.elastic import ElasticSettings, check_elastic, smaller_plans
from executor.launch.job import Job, Task, TaskCheckpoints, save_job
from executor.launch.nodes import ONE_NODE, Nodes, refusing
from executor.launch.resumable import Held, changes_since, held_here, newest_complete
from executor.train.checkpoints.files import checkpoint_name, read_manifest, written_checkpoints
from executor.train.rates import Rate
from executor.train.settings import EvaluationSettings, OptimizerSettings, Replicas, RunSettings
from plans.errors import TwofoldError, number, whole_number
from plans.model.graph import matches_any
from plans.plan import Plan, load_plan, plan_digest, plan_from_json, plan_to_json, save_plan
from plans.reading import json_of, read_toml, typed
from plans.step_check import LossScale, Spike, StepCheck

__all__ = ["CheckpointSettings", "ElasticSettings", "TrainingJob", "load_training_job", "train", "training_job"]


_MOST_STEPS = 10**9
"""Every rank keeps the times of all steps."""


class CheckpointSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Checkpoints of a job: one after `every` steps, the last `keep` of which stay."""

    every: int
    keep: int = 2


class TrainingJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A training job file.

    Args:
        plan: plan file.
        steps: total number of steps, including those before a resume.
        out: folder of `metrics.jsonl`, `checkpoints` and `weights.npz`.
        data: a name, see `executor.data.sources.Source`.
        model: "package.module:function" or "file.py:function" with initial weights; "": random.
        weights: initial weights by parameter name: FILE.safetensors, a folder of such files as saved by Hugging Face,
            FILE.pt with a state_dict, or FILE.npz; every rank reads its part. "": those of `model`.
        config: config.json of transformers, if `weights` has its names and no config.json next to it.
        seed: random seed of initial weights and data order.
        optimizer: kind, settings and parameter groups instead of those of the plan; None: the plan's.
        learning_rate: learning-rate schedule; None: the rate of the optimizer.
        checkpoints: settings of checkpoints; None: no checkpoints.
        metrics: further files of figures: "csv", "tensorboard".
        peak_flops_per_s: peak rate of one device, for the utilization (MFU).
        replicas: comparison of equal values on several ranks.
        loss_scale: dynamic loss scaling, for plans in float16; None: as in the plan.
        spike: guard against steps with far too large gradients; None: as in the plan.
        evaluation: evaluation of loss and, for classifiers, accuracy on other data, written to `evaluations.jsonl`;
            None: no evaluation.
        max_restarts: number of restarts from the last checkpoint after failures.
        elastic: continuing on fewer nodes; None: only with all nodes.
        print_every: print the loss of every n-th step.
        gather_weights: collect the final weights on rank 0, which writes `weights.npz`; None: only without checkpoints,
            from which `twofold export` writes weights.
        log_dir: folder for the output of the ranks; None: `logs` in `out`.
        device: "auto", "cpu", "cuda" or "npu".
        timeout_s: time limit of one launch.

    >>> TrainingJob(plan="plan.json", steps=100, out="runs/gpt").seed
    1
    """

    plan: str
    steps: int
    out: str
    data: str = "random"
    model: str = ""
    weights: str = ""
    config: str = ""
    seed: int = 1
    optimizer: OptimizerSettings | None = None
    learning_rate: Rate | None = None
    checkpoints: CheckpointSettings | None = None
    metrics: tuple[Literal["csv", "tensorboard"], ...] = ()
    peak_flops_per_s: float | None = None
    replicas: Replicas = Replicas()
    loss_scale: LossScale | None = None
    spike: Spike | None = None
    evaluation: EvaluationSettings | None = None
    max_restarts: int = 0
    elastic: ElasticSettings | None = None
    print_every: int = 10
    gather_weights: bool | None = None
    log_dir: str | None = None
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    timeout_s: float | None = None

    @property
    def gathers_weights(self) -> bool:
        """Whether rank 0 writes `weights.npz`."""
        return self.checkpoints is None if self.gather_weights is None else self.gather_weights


def training_job(tables: Mapping[str, Any]) -> TrainingJob:
    """The job of a mapping with the keys of a job file.

    Raises:
        TwofoldError: an unknown or missing key, a value of another type.

    >>> training_job({"plan": "plan.json", "steps": 100, "out": "runs/gpt", "checkpoints": {"every": 20}}).checkpoints
    CheckpointSettings(every=20, keep=2)
    """
    return typed(tables, "the training job", TrainingJob)


def load_training_job(path: str | os.PathLike[str]) -> TrainingJob:
    """Read a job file (TOML); paths in it are as seen from the current folder.

    Raises:
        TwofoldError: no such file, not TOML, an unknown or missing key, a value of another type.
    """
    return read_toml(path, "the job file", TrainingJob)


def train(
    job: TrainingJob,
    *,
    resume: bool = False,
    allow_changes: bool = False,
    on_line: Callable[[int, str], None] | None = None,
    nodes: Nodes = ONE_NODE,
) -> list[dict[str, Any]]:
    """Run a training job. Returns the figures of all steps, as in `metrics.jsonl`.

    Args:
        job: the job, which is checked before ranks are started.
        resume: resume from the newest checkpoint, which may be of another plan of the same model and optimizer.
        allow_changes: resume although settings that losses depend on have changed, such as the seed or the optimizer's.
        on_line: called with (rank, line) for every line that the last rank of this machine prints.
        nodes: machines of the job; call it on each with the same arguments except `node_rank`. `out` may be a folder
            that all of them share, or one on each; then only node 0 gets `weights.npz`. After a failure all nodes
            restart. A lost node must be started by hand, unless the job is `elastic`: then the others continue.

    Raises:
        TwofoldError: bad input; `executor.launch.rank_failures.RunFailed` when training failed and no restart is left.

    >>> job = TrainingJob(plan="plan.json", steps=100, out="runs/gpt", checkpoints=CheckpointSettings(every=20))
    >>> train(job, resume=True)[-1]["loss"]  # doctest: +SKIP
    """
    from executor.launch.rank_failures import RankRefused, RunFailed

    tell = on_line or _ignore
    for restarts_left in range(max(job.max_restarts, 0), -1, -1):  # numbers below 0 are refused with the rest
        try:
            _train_once(job, resume, allow_changes, tell, nodes)
            break
        except RankRefused:
            raise  # it would come again
        except RunFailed as error:
            if not restarts_left:
                raise
            resume = True
            tell(0, f"{str(error).splitlines()[0]}; restarted, {restarts_left - 1} restarts left")
    return [json_of(line, "metrics.jsonl") for line in (Path(job.out) / "metrics.jsonl").read_bytes().splitlines()]


def _train_once(
    job: TrainingJob, resume: bool, allow_changes: bool, tell: Callable[[int, str], None], nodes: Nodes
) -> None:
    """Train until all steps are done or something fails."""
    from executor.device import pick_device
    from executor.launch.launch import Follow, launch, local_ranks, meet

    with refusing(nodes):
        if allow_changes and not resume:
            raise TwofoldError("--allow-changes needs --resume")
        saved = load_plan(job.plan)
        plan, elastic = _with_settings(job, saved), job.elastic
        task, offer = _checked(job, plan), _Offer()
        pick_device(job.device, len(local_ranks(plan.num_ranks, nodes)) - 1)
        if elastic is not None:
            check_elastic(elastic, nodes)
            if nodes.node_rank == 0:  # the other nodes may not have the plans
                smaller = smaller_plans(elastic, saved, nodes)
                offer.plans = {count: plan_to_json(each).decode() for count, each in smaller.items()}
        held = _held(job, plan, resume, newest_only=nodes.num_nodes == 1)
        if held:
            _report_changes(next(iter(held.values())), job, plan, tell if allow_changes else None)
        offer.held = list(held)
    if elastic is not None:
        nodes = replace(nodes, least_nodes=elastic.least_nodes, wait_s=elastic.wait_s)
    nodes = replace(nodes, facts=_facts(job, plan), offer=msgspec.to_builtins(offer, str_keys=True))
    with _only_job_in(Path(job.out), nodes), contextlib.closing(meet(nodes, plan.num_ranks)) as met:
        offers = [msgspec.convert(each, _Offer, strict=False) for each in met.offers]
        count = len(met.joined)
        if count == nodes.num_nodes:
            file = save_plan(plan, Path(job.out) / "plan.json")
        else:
            plan = _with_settings(job, plan_from_json(offers[0].plans[count].encode()))
            file = save_plan(plan, Path(job.out) / f"plan-{plan.num_ranks}.json")
            tell(0, f"{count} of {nodes.num_nodes} nodes have joined; they train with {file}")
        chosen = newest_complete(dict(zip(met.joined, [each.held for each in offers], strict=True)))
        if resume and chosen is None:
            tell(0, f"{Path(job.out) / 'checkpoints'} has no checkpoint; training begins with step 1")
        main, checkpoints = "job_main", None
        if job.checkpoints is not None:
            main, checkpoints = "checkpointed_main", _checkpoints(job, job.checkpoints, chosen)
        task = msgspec.structs.replace(task, plan=str(file), checkpoints=checkpoints)
        path = save_job(Job(tasks=(task,), device=job.device), Path(job.out) / "job.json")
        launch(
            f"executor.launch.{main}:main", num_ranks=plan.num_ranks, args=[str(path)],
            log_dir=job.log_dir or Path(job.out) / "logs", timeout_s=job.timeout_s, follow=Follow(tell), nodes=met,
        )  # fmt: skip


class _Offer(msgspec.Struct):
    """Facts that nodes tell each other: checkpoints of each, and plans of node 0 for smaller numbers of nodes."""

    held: list[Held] = []
    plans: dict[int, str] = {}


def _facts(job: TrainingJob, plan: Plan) -> dict[str, str]:
    """What must be the same on all nodes."""
    same = {name: str(getattr(job, name)) for name in ("steps", "seed")}
    for name in ("learning_rate", "checkpoints", "replicas"):
        same[name] = str(msgspec.to_builtins(getattr(job, name)))
    if job.evaluation is not None:
        same |= {f"evaluation.{name}": str(getattr(job.evaluation, name)) for name in ("every", "batches")}
    return {"plan": plan_digest(plan), **same}


def _with_settings(job: TrainingJob, plan: Plan) -> Plan:
    """A plan with the settings of the job instead of its own, and the parameter names of its weight files."""
    if job.optimizer is not None:
        plan = _with_optimizer(plan, job.optimizer)
    if job.loss_scale is not None or job.spike is not None:
        given = plan.step_check or StepCheck()
        check = StepCheck(loss_scale=job.loss_scale or given.loss_scale, spike=job.spike or given.spike)
        plan = msgspec.structs.replace(plan, step_check=check)
    if job.config and not job.weights:
        raise TwofoldError("config gives the names of weights; state weights, too, or omit it")
    if job.weights:
        from executor.weights.library_names import with_names_of_files

        plan = msgspec.structs.replace(plan, graph=with_names_of_files(plan.graph, job.weights, job.config))
    return plan


def _with_optimizer(plan: Plan, asked: OptimizerSettings) -> Plan:
    """A plan with another optimizer; its prediction is dropped where that keeps other states."""
    try:
        optimizer = asked.of(plan.optimizer)
    except TwofoldError as error:
        raise TwofoldError(f"[optimizer] of the job: {error}") from None
    names = list(dict.fromkeys(map(plan.graph.of_module, plan.graph.parameters)))
    for group in asked.groups or ():
        if not any(matches_any(name, group.parameters) for name in names):
            raise TwofoldError(
                f"optimizer.groups: no parameter matches {', '.join(map(repr, group.parameters))}; names are "
                f"{', '.join(names[:3])}, ..."
            )
    optimizer = optimizer.for_parts(plan.graph)
    prediction = plan.prediction if optimizer.num_states == plan.optimizer.num_states else None
    return msgspec.structs.replace(plan, optimizer=optimizer, prediction=prediction)


def _ignore(rank: int, line: str) -> None:
    """Ignore a line of output."""


def _checked(job: TrainingJob, plan: Plan) -> Task:
    """The task of a job, without its checkpoints and its plan file."""
    from executor.data.sources import Source

    for name in ("steps", "print_every"):
        whole_number(name, getattr(job, name))
    for name in ("max_restarts", "seed"):
        whole_number(name, getattr(job, name), least=0)
    if job.steps > _MOST_STEPS:
        raise TwofoldError(f"steps must be at most {_MOST_STEPS:,}, not {job.steps:,}")
    _check_out(job.out)
    if not job.data:
        raise TwofoldError("data is empty; name a source, or omit it for random numbers")
    if job.timeout_s is not None:
        number("timeout_s", job.timeout_s, above=0)
    if job.checkpoints is not None:
        whole_number("checkpoints.every", job.checkpoints.every)
        whole_number("checkpoints.keep", job.checkpoints.keep)
    whole_number("replicas.every", job.replicas.every)
    if job.elastic is not None and not job.max_restarts:
        raise TwofoldError("elastic needs restarts: set max_restarts in the job")
    if job.checkpoints is None and job.max_restarts:
        raise TwofoldError("max_restarts needs checkpoints: set every = STEPS in [checkpoints]")
    if job.learning_rate is not None:
        job.learning_rate.check(job.steps)
        if job.optimizer is not None and job.optimizer.lr is not None:
            raise TwofoldError("optimizer.lr and [learning_rate] are both in the job; omit one of them")
    if job.peak_flops_per_s is not None:
        number("peak_flops_per_s", job.peak_flops_per_s, above=0)
    if "tensorboard" in job.metrics and importlib.util.find_spec("tensorboard") is None:
        raise TwofoldError("metrics: 'tensorboard' is not installed; pip install tensorboard, or omit it")
    Source(data=job.data, seed=job.seed).check(plan.graph)
    if job.model:
        from executor.weights.models import check_model

        check_model(job.model, plan.graph)
    if job.weights:
        from executor.weights.files import check_weights

        check_weights(job.weights, plan.graph)
    return Task(
        plan="", out=job.out, steps=job.steps, model=job.model, weights=job.weights, data=job.data,
        seed=job.seed, count=False, print_every=job.print_every, learning_rate=job.learning_rate, metrics=job.metrics,
        peak_flops_per_s=job.peak_flops_per_s,
        gather_weights=job.gathers_weights,
        replicas=job.replicas, evaluate=None if job.evaluation is None else _evaluation(job.evaluation, plan, job.seed),
    )  # fmt: skip


def _check_out(out: str) -> None:
    """Refuse a folder that cannot be made or written."""
    if not out:
        raise TwofoldError("out is empty; name a folder for the results")
    place = Path(out)
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise TwofoldError(f"out {out!r}: {place} is a file; name a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise TwofoldError(f"out {out!r}: no permission to write into {place}; name another folder")


@contextlib.contextmanager
def _only_job_in(out: Path, nodes: Nodes) -> Iterator[None]:
    """Lock the folder of a job until it ends, however this process ends. Node 0 does it for all nodes.

    Raises:
        TwofoldError: another job has locked it, or it cannot be made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TwofoldError(f"out {str(out)!r} cannot be made: {error.strerror}; name another folder") from None
    if nodes.node_rank:
        yield
        return
    folder = os.open(out, os.O_RDONLY)
    try:
        with refusing(nodes):
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TwofoldError(f"another job trains in {out}; wait for its end, or name another out") from None
            except OSError:  # a file system without locks
                pass
        yield
    finally:
        os.close(folder)


def _evaluation(asked: EvaluationSettings, plan: Plan, seed: int) -> EvaluationSettings:
    """The evaluations asked for, with the number of their batches."""
    from executor.data.sources import Source

    whole_number("evaluation.every", asked.every)
    source = Source(data=asked.data, seed=seed)
    try:
        source.check(plan.graph)
        count = source.num_batches(plan.graph) if asked.batches is None else asked.batches
    except TwofoldError as error:
        raise TwofoldError(f"evaluation: {error}") from None
    if count is None:
        raise TwofoldError(f"evaluation: the length of {asked.data!r} is not known; state batches = NUMBER")
    whole_number("evaluation.batches", count)
    return msgspec.structs.replace(asked, batches=count)


def _held(job: TrainingJob, plan: Plan, resume: bool, *, newest_only: bool) -> dict[Held, Path]:
    """The checkpoints of this node, from which the job may resume."""
    if job.checkpoints is None:
        if resume:
            raise TwofoldError("--resume needs checkpoints: set every = STEPS in [checkpoints] of the job")
        return {}
    folder = Path(job.out) / "checkpoints"
    if not resume:
        if written_checkpoints(folder):
            raise TwofoldError(f"{folder} has checkpoints of an earlier run; use --resume, or another out")
        return {}
    return held_here(folder, plan, newest_only=newest_only)


def _report_changes(newest: Path, job: TrainingJob, plan: Plan, tell: Callable[[int, str], None] | None) -> None:
    """Print the settings that changed since a checkpoint was written; without `tell`, refuse them."""
    settings = RunSettings(seed=job.seed, data=job.data, steps=job.steps, learning_rate=job.learning_rate)
    changes = changes_since(newest, settings, plan)
    if changes and tell is None:
        others = len(changes) - 1
        more = f" (and {others} other change{'s' if others > 1 else ''})" if others else ""
        raise TwofoldError(
            f"{newest}: {changes[0]}{more}; undo the change, or continue with it: --resume --allow-changes"
        )
    for change in changes:
        assert tell is not None
        tell(0, f"after {newest}: {change}")


def _checkpoints(job: TrainingJob, asked: CheckpointSettings, chosen: Held | None) -> TaskCheckpoints:
    """The folder for checkpoints, and the checkpoint to resume from; this node may have none of its files.

    A node that waited to join looks at its disk again: on a common one, others have written checkpoints since.
    """
    resume, first = None, 0
    if chosen is not None:
        first = chosen.step
        path = Path(job.out) / "checkpoints" / checkpoint_name(first)
        resume = path if path.is_dir() and read_manifest(path).run == chosen.run else None
        if first > job.steps:
            where = checkpoint_name(first) if resume is None else resume
            raise TwofoldError(f"{where}: {first} steps are done, but the job has {job.steps}; increase steps")
    return TaskCheckpoints(
        folder=str(Path(job.out) / "checkpoints"), every=asked.every, keep=asked.keep,
        resume=None if resume is None else str(resume), first=first,
    )  # fmt: skip
