"""The double recursive search.

First recursion, over devices: every mesh of a stage's ranks (`space.meshes`). Second recursion, over the graph: the
exact minimum of the additive cost over all combinations of strategies (`eliminate`), for every mesh of every stage on
its own, since stages meet only at their borders. The cheapest stage answers and their nearest neighbours are then put
together and simulated as whole programs; the simulated step time decides, under the memory limit.

    additive cost of a stage = micro-batches x (operators' forward and backward + redistributions both ways)
                               + weight gathers, gradient reductions and updates

A transformer on accelerators is searched over degrees instead, where `degrees` are given (`search.devices`): stages,
schedule, chunks, micro-batch, recompute, optimizer level and the usual layouts, also in a captured module.

Around it, where they are not given: the number of stages, their boundaries and how many devices each has, devices that
are better left idle, and the number of micro-batches (`shapes`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from costmodels import Machine
from costmodels.price.clock import at_usual_clock
from plans.errors import TwofoldError
from plans.model.graph import Graph
from plans.plan import Optimizer, Plan, Strategy
from search.attach_prediction import predicted
from search.devices import Pins
from search.devices.of_graph import plans_of_graph
from search.operators.plan_search import PlanSearch
from search.own_clock import with_own_clocks
from search.request import check_devices, check_graph, check_stages
from search.result import SearchResult

__all__ = ["search"]


def search(
    graph: Graph,
    machine: Machine,
    *,
    num_devices: int | None = None,
    num_stages: int | None = 1,
    stages: Sequence[Sequence[str]] | None = None,
    widths: str | Sequence[int] | None = None,
    num_micro_batches: int | None = 1,
    interleave: int | None = 1,
    schedule: str = "1f1b",
    recompute: Sequence[str] = (),
    optimizer: Optimizer | None = None,
    full_batch: bool = True,
    output_broadcast: bool = False,
    fused: bool = True,
    degrees: Mapping[str, Any] | None = None,
    memory_limit_bytes: int | None = None,
    pinned: Mapping[str, Strategy] | None = None,
    global_batch: int | None = None,
    top_k: int = 5,
    time_limit_s: float | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> SearchResult[Plan]:
    """The best plans for one training step of `graph` on `machine`.

    Args:
        graph: of the whole batch; `global_batch` resizes it.
        num_devices: ranks to use; all of the machine's by default.
        num_stages: pipeline stages; None: searched.
        stages: per stage its operators (as configured by the user); searched or balanced by cost when absent.
        widths: devices per stage: numbers, "even" (all alike) or "any" (searched; devices may stay idle). By default
            even where the stages divide the devices and their number is given, else any.
        num_micro_batches: into which the batch is cut; None: searched.
        interleave: slices of a micro-batch that hide their communication behind each other's compute; None: two where
            that is faster than one.
        schedule: of the pipeline.
        recompute: operators whose outputs are made again in the backward.
        optimizer: kind, settings and parallel level.
        full_batch, output_broadcast: see `Plan`.
        fused: False leaves runs of memory-bound instructions apart; they are fused only where the machine gains by it
            (`Machine.fuses`).
        memory_limit_bytes: per rank; by default the machine's device memory without what its runtime takes.
        pinned: operator -> strategy to keep. A mesh of its own has the ranks of its stage, or counts them from 0.
        degrees: of a transformer on accelerators, a captured one included: those given are fixed, all others searched
            ({} fixes none), instead of strategies operator by operator; see `search.devices` and `plans.degrees`.
            Only machine, devices, batch, optimizer, memory, fused and what is to be returned go with it.
        top_k: plans to return.
        time_limit_s: after it, or on Ctrl-C, the best so far is returned; what has been started is finished first.
        on_progress: called with a line now and then.

    Raises:
        TwofoldError: stages or widths that do not fit the devices, micro-batches that do not divide the batch, a memory
            limit that nothing fits in (it names the smallest that would), pins that do not fit.

    >>> from plans.model.mlp import mlp_graph
    >>> found = search(mlp_graph([64, 32, 8], 16), Machine.load("h200-x8"), num_devices=3, num_stages=2)
    >>> [stage.mesh.num_ranks for stage in found.best.stages]
    [2, 1]
    """
    started = time.perf_counter()
    if global_batch is not None:
        graph = graph.with_batch(global_batch)
    num_devices = machine.num_devices if num_devices is None else num_devices
    check_devices(machine, num_devices)
    check_stages(graph, num_devices, num_stages=num_stages, stages=stages, widths=widths)
    if degrees is not None:
        stated = (num_stages, stages, widths, num_micro_batches, interleave, schedule, tuple(recompute), pinned or None)
        if stated != (1, None, None, 1, 1, "1f1b", (), None):
            raise TwofoldError(
                "degrees are searched, and stages, widths, micro-batches, interleave, schedule, recompute or pinned "
                "strategies are given: state them as degrees, or leave degrees out"
            )
        found = plans_of_graph(
            graph, top_k=top_k, time_limit_s=time_limit_s, machine=machine, num_devices=num_devices,
            pins=Pins(**degrees), optimizer=optimizer, memory_limit_bytes=memory_limit_bytes, fused=fused,
        )  # fmt: skip
        plans = (
            structs.replace(plan, full_batch=full_batch, output_broadcast=output_broadcast) for plan in found.plans
        )
        return replace(found, plans=tuple(plans))
    slices = 1 if interleave is None else interleave
    check_graph(graph, num_micro_batches=num_micro_batches, interleave=slices, pinned=pinned or {})
    if top_k < 1:
        raise TwofoldError(f"top_k is {top_k}: it is at least 1")
    if time_limit_s is not None and not time_limit_s > 0:
        raise TwofoldError(f"time_limit_s is {time_limit_s}: seconds above 0")
    if memory_limit_bytes is not None and memory_limit_bytes < 1:
        raise TwofoldError(f"memory_limit_bytes is {memory_limit_bytes}: bytes per device, at least 1")
    usual = at_usual_clock(machine)
    plan_search = PlanSearch(
        graph=graph, machine=usual, num_devices=num_devices, interleave=slices, may_slice=interleave is None,
        schedule=schedule, recompute=tuple(recompute), optimizer=optimizer or Optimizer(), full_batch=full_batch,
        output_broadcast=output_broadcast, fused=fused and machine.fuses,
        limit_bytes=memory_limit_bytes or machine.room_bytes, pinned=dict(pinned or {}),
        say=on_progress or (lambda line: None), started=started,
        deadline=None if time_limit_s is None else started + time_limit_s,
    )  # fmt: skip
    found = plan_search.run(stages, num_stages, widths, num_micro_batches, top_k)
    if usual is machine:
        return found
    own = [predicted(plan, machine, plan_search.limit_bytes) for plan in found.plans]
    before_s, after_s = (step_s(plan) for plan in (found.best, own[0]))
    return with_own_clocks(found, sorted(own, key=step_s), before_s, after_s)


def step_s(plan: Plan) -> float:
    """The step that was predicted for a plan."""
    assert plan.prediction is not None
    return plan.prediction.step_s
