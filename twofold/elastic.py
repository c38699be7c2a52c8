"""Training jobs that continue on fewer nodes. Plans for the nodes that may be left are searched before the start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from costmodels import Machine
from executor.launch.elastic import check_elastic, devices_left
from executor.launch.nodes import ONE_NODE, Nodes, refusing
from plans.plan import Plan, load_plan, save_plan
from search import search

if TYPE_CHECKING:
    from executor.launch.train_job import TrainingJob

__all__ = ["plan_for_fewer", "train"]

SEARCH_S = 60.0


def train(
    job: TrainingJob | Mapping[str, Any],
    *,
    resume: bool = False,
    allow_changes: bool = False,
    on_line: Callable[[int, str], None] | None = None,
    nodes: Nodes = ONE_NODE,
) -> list[dict[str, Any]]:
    """Run a training job (see `executor.launch.train_job.train`); node 0 first searches the plans for fewer nodes.

    Args:
        job: the job, or a mapping with the keys of a job file. Plans are searched if it has `elastic.machine`.
        resume: resume from the newest checkpoint.
        allow_changes: resume although settings that losses depend on have changed.
        on_line: called with (rank, line) for every line that the last rank of this machine prints.
        nodes: machines of the job.

    Raises:
        TwofoldError: bad input, no plan that fits the memory of fewer devices, or an error of the training.

    >>> job = {"plan": "plan.json", "steps": 100, "out": "runs/gpt", "checkpoints": {"every": 20}}
    >>> train(job)[-1]["loss"]  # doctest: +SKIP
    """
    from executor.launch import train_job

    with refusing(nodes):
        job = _with_searched_plans(train_job.training_job(job) if isinstance(job, Mapping) else job, nodes)
    return train_job.train(job, resume=resume, allow_changes=allow_changes, on_line=on_line, nodes=nodes)


def plan_for_fewer(plan: Plan, machine: Machine, num_devices: int) -> Plan:
    """The fastest plan for the model, batch and optimizer of `plan` on other devices.

    With batch normalisation it has the same number of micro-batches, since statistics are taken over each of them.

    Raises:
        TwofoldError: no plan fits the memory.

    >>> from plans.model.mlp import mlp_graph
    >>> machine = Machine.load("h200-x8")
    >>> plan = search(mlp_graph([64, 32, 8], 16), machine, num_devices=4).best
    >>> plan_for_fewer(plan, machine, 2).num_ranks <= 2
    True
    """
    result = search(
        plan.graph, machine, num_devices=num_devices, num_stages=None, interleave=None, schedule=None, recompute=None,
        num_micro_batches=plan.num_micro_batches if plan.graph.updated else None,
        optimizer=plan.optimizer, any_level=True, full_batch=plan.full_batch, output_broadcast=plan.output_broadcast,
        widths="even", top_k=1, time_limit_s=SEARCH_S, execution=plan.execution,
    )  # fmt: skip
    return msgspec.structs.replace(result.best, step_check=plan.step_check)


def _with_searched_plans(job: TrainingJob, nodes: Nodes) -> TrainingJob:
    """The job with plan files for all numbers of nodes; node 0 searches and writes those that are not given."""
    if job.elastic is None or not job.elastic.machine or nodes.node_rank > 0:
        return job
    check_elastic(job.elastic, nodes)
    plan, machine = load_plan(job.plan), Machine.load(job.elastic.machine)
    given = {load_plan(path).num_ranks for path in job.elastic.plans}
    missing = [devices for devices in devices_left(job.elastic, plan, nodes).values() if devices not in given]
    searched = {devices: Path(job.out) / "plans" / f"plan-{devices}.json" for devices in missing}
    for devices, path in searched.items():
        save_plan(plan_for_fewer(plan, machine, devices), path)
    elastic = msgspec.structs.replace(job.elastic, plans=(*job.elastic.plans, *map(str, searched.values())))
    return msgspec.structs.replace(job, elastic=elastic)
