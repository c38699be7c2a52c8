"""Run a plan on launched ranks and read the results of all ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from costmodels import Machine, price
from executor.launch.nodes import ONE_NODE, Nodes, refusing
from executor.launch.temporary import temporary_folder
from plans.errors import TwofoldError, whole_number
from plans.figures import figures_of
from plans.lower import lower
from plans.model.graph import itemsize
from plans.plan import Plan, plan_digest, save_plan
from plans.reading import read_arrays
from plans.timeline import PS_PER_S, Timeline
from plans.units import Bytes

if TYPE_CHECKING:
    from executor.device import Device

__all__ = ["RunResult", "dilation", "read_result", "run"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RunResult:
    """A finished run.

    Args:
        plan: what was run.
        losses: mean loss of every step.
        weights: final full weights by name; on node 0 only.
        step_times_s: per rank the seconds of every step, as emulated time where it is emulated.
        interval_s: seconds between the ends of consecutive steps (of the latest rank), as emulated time likewise.
        timeline: spans of the last steps.
        collectives_match: executed = planned communication on every rank (kind, bytes, group, count), or None.
        differences: differences in words.
        num_communications: executed per step, per rank.
        cpu_s: processor seconds per step, per rank.
        peak_bytes: per rank, of the program's values added up.
        device_peak_bytes: per rank, what torch's allocator gave out at most on an accelerator (buffers of communication
            and workspaces included); 0 on a CPU.
        device_reserved_bytes: device memory of each rank after the last step; 0 on a CPU.
        execution: how the last steps ran: "graph" or "eager".
        fallback: why they ran eagerly though the device can record, "" otherwise.
        log_dir: where `1/rank.N/stdout` lies.
        launch_s: seconds of the complete launch, start-up included.
    """

    plan: Plan
    losses: npt.NDArray[np.float64]
    weights: dict[str, npt.NDArray[Any]]
    step_times_s: npt.NDArray[np.float64]
    interval_s: npt.NDArray[np.float64]
    timeline: Timeline
    collectives_match: bool | None
    differences: tuple[str, ...]
    num_communications: tuple[int, ...]
    cpu_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    device_peak_bytes: tuple[int, ...]
    log_dir: Path
    launch_s: float
    device_reserved_bytes: tuple[int, ...] = ()
    execution: str = "eager"
    fallback: str = ""

    @property
    def figures(self) -> dict[str, Any]:
        """The figures of a step (`plans.figures`): the median step after the warm-up, the program's peak on the fullest
        rank, and the others of the recorded steps."""
        return figures_of(self.timeline) | {"step_s": self.step_s, "peak_bytes": max(self.peak_bytes)}

    @property
    def plan_digest(self) -> str:
        """Which plan was run; the files of the ranks carry it too."""
        return plan_digest(self.plan)

    @property
    def step_s(self) -> float:
        """The median interval between steps, the first quarter left out as warm-up."""
        skip = len(self.interval_s) // 4
        return float(np.median(self.interval_s[skip:]))


def run(
    plan: Plan,
    *,
    steps: int = 100,
    data: Any = "random",
    model: str = "",
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
    log_dir: str | os.PathLike[str] = "log_output",
    emulate: str | None = None,
    dilate: float | None = None,
    device: str = "auto",
    print_every: int = 0,
    record_steps: int = 3,
    execution: str | None = None,
    profile_steps: int = 0,
    timeout_s: float | None = None,
    nodes: Nodes = ONE_NODE,
    on_line: Callable[[int, str], None] | None = None,
) -> RunResult:
    """Train a plan for a few steps on real ranks, one process per device of the plan.

    Args:
        plan: the plan to run.
        steps: number of training steps.
        data: a name, see `executor.data.sources.Source`; or a function, an iterable of batches or a dataset, of which
            `steps` batches are saved for the ranks. A batch is a tuple of arrays or tensors in the order of the
            model's arguments, or a dict by the names of its inputs.
        model: "package.module:function" or "file.py:function", for initial weights; "" draws them at random.
        seed: random seed of initial weights and data order.
        out: folder for results; None uses a temporary one.
        log_dir: folder for the output of the ranks.
        emulate: machine whose predicted times the instructions take, multiplied by `dilate`; with None the shortest
            instruction lasts 50 ms.
        device: "auto", "cpu", "cuda" or "npu".
        print_every: the ranks print the loss of every n-th step.
        record_steps: number of last steps whose spans are recorded.
        execution: "graph" or "eager"; by default that of the plan.
        profile_steps: number of steps before those for which every rank writes a profiler trace into `out`.
        timeout_s: time limit of the launch.
        nodes: machines of the run; call it on each with the same arguments except `node_rank`. Only node 0 returns
            weights.
        on_line: called with (rank, line) for every line that the last rank prints.

    Raises:
        TwofoldError: bad input; `executor.launch.launch.RankFailed` when a rank fails.

    >>> result = run(plan, steps=20)  # doctest: +SKIP
    >>> result.losses[-1], result.step_s, result.collectives_match  # doctest: +SKIP
    (2.31, 0.0471, True)
    """
    from executor.device import pick_device
    from executor.launch.job import Emulate, Job, Task, save_job
    from executor.launch.launch import Follow, launch, local_ranks
    from executor.weights.models import check_model

    with refusing(nodes):
        whole_number("steps", steps)
        whole_number("record_steps", record_steps)
        whole_number("profile_steps", profile_steps, least=0)
        whole_number("seed", seed, least=0)
        if dilate is not None and emulate is None:
            raise TwofoldError("dilate stretches emulated times: add emulate (--emulate MACHINE), or omit dilate")
        if dilate is not None and not 0 < dilate < math.inf:
            raise TwofoldError(f"dilate must be a finite number above 0, not {dilate:g}")
        if profile_steps and out is None:
            raise TwofoldError("a profile needs a folder for its traces: give out (--out FOLDER)")
        if execution is not None:
            plan = msgspec.structs.replace(plan, execution=execution)
        num_local = len(local_ranks(plan.num_ranks, nodes))
        _check_room(plan, pick_device(device, num_local - 1), num_local)
        if model:
            check_model(model, plan.graph)
        emulation = None
        if emulate is not None:
            dilate = dilation(plan, Machine.load(emulate)) if dilate is None else dilate
            emulation = Emulate(machine=emulate, dilate=dilate)
    with temporary_folder() as temporary:
        folder = Path(temporary if out is None else out)
        with refusing(nodes):
            task = Task(
                plan=str(save_plan(plan, folder / "plan.json")), out=str(folder), steps=steps, model=model,
                data=_checked_data(plan, data, steps, seed, folder), seed=seed, record_steps=record_steps,
                print_every=print_every, emulate=emulation, profile_steps=profile_steps,
            )  # fmt: skip
            job = save_job(Job(tasks=(task,), device=device), folder / "job.json")
        facts = {"plan": plan_digest(plan), "steps": str(steps), "seed": str(seed)}
        ended = launch(
            "executor.launch.job_main:main", num_ranks=plan.num_ranks, args=[str(job)], log_dir=log_dir,
            timeout_s=timeout_s, nodes=replace(nodes, facts=facts), follow=None if on_line is None else Follow(on_line),
        )  # fmt: skip
        return read_result(plan, folder, Path(log_dir), ended.elapsed_s, has_weights=nodes.node_rank == 0)


def _check_room(plan: Plan, device: Device, num_local: int) -> None:
    """Refuse a plan whose weights, master weights and states are larger than the memory of the host that runs them.

    On a CPU they would drive the whole host out of memory; a device reports that by itself.
    """
    if device.kind != "cpu" or num_local < plan.num_ranks:
        return
    optimizer, (_, room_bytes) = plan.optimizer, device.memory_bytes()
    kept_bytes = sum(
        each.num_elements * (optimizer.bytes_per_element(each.dtype) - itemsize(optimizer.accumulates_in(each.dtype)))
        for each in plan.graph.parameters
    )
    if kept_bytes > room_bytes:
        raise TwofoldError(
            f"the weights and optimizer states of the plan are {Bytes(kept_bytes)}, but this host, on whose processors "
            f"it would run, has {Bytes(room_bytes)} of memory; run it on accelerators, or plan a smaller model"
        )


def _checked_data(plan: Plan, data: Any, steps: int, seed: int, folder: Path) -> str:
    """The name of the data, after checking that its first batch fits the plan."""
    from executor.data.sources import Source, save_batches

    if not isinstance(data, str):
        return str(save_batches(plan.graph, data, steps, folder / "data.npz", seed))
    Source(data=data, seed=seed).check(plan.graph)
    return data


def dilation(plan: Plan, machine: Machine, shortest_s: float = 0.05) -> float:
    """The factor on a machine's times with which the plan's shortest instruction lasts `shortest_s`."""
    shortest_ps = min(
        cost.dispatch_ps + cost.work_ps
        for group in lower(plan).groups
        for _, instruction in group.walk()
        if (cost := price(instruction, group, machine, plan.num_ranks)).dispatch_ps + cost.work_ps > 0
    )
    return shortest_s * PS_PER_S / shortest_ps


def read_result(plan: Plan, folder: Path, log_dir: Path, launch_s: float, *, has_weights: bool = True) -> RunResult:
    """The result of a run from the files of its ranks; rank 0 writes the weights, on its own node.

    Raises:
        TwofoldError: files that are not there, or that another plan's run has left there.
    """
    from executor.train.result import RankResult, merged_timeline

    ranks = [RankResult.load(folder / f"rank.{rank}.npz") for rank in range(plan.num_ranks)]
    for rank in ranks:
        if rank.plan_digest != plan_digest(plan):
            raise TwofoldError(
                f"rank.{rank.rank}.npz in {os.fspath(folder)!r} is of the plan {rank.plan_digest}, not of "
                f"{plan_digest(plan)}; run again with another folder"
            )
    weights = read_arrays(folder / "weights.npz", "the weights") if has_weights else {}
    ends = np.max([rank.step_end_ns for rank in ranks], axis=0)
    begin = np.min([rank.step_start_ns[0] for rank in ranks])
    interval_s = np.diff(np.concatenate([[begin], ends])) / 1e9 / ranks[0].dilate
    counted = [rank.differences for rank in ranks]
    known = [difference for difference in counted if difference is not None]
    return RunResult(
        plan=plan,
        losses=ranks[0].losses,
        weights=weights,
        step_times_s=np.array([rank.step_s for rank in ranks]),
        interval_s=interval_s,
        timeline=replace(merged_timeline(ranks), program=lower(plan)),
        collectives_match=None if not known else not any(known),
        differences=tuple(line for lines in known for line in lines),
        num_communications=tuple(rank.num_communications for rank in ranks),
        cpu_s=tuple(rank.cpu_s for rank in ranks),
        peak_bytes=tuple(rank.peak.peak_bytes for rank in ranks),
        device_peak_bytes=tuple(rank.device_peak_bytes for rank in ranks),
        device_reserved_bytes=tuple(rank.device_reserved_bytes for rank in ranks),
        execution=ranks[0].execution,
        fallback=next((rank.fallback for rank in ranks if rank.fallback), ""),
        log_dir=log_dir,
        launch_s=launch_s,
    )
