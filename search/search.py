"""The double recursive search.

The first recursion is over devices: every mesh of a stage's ranks (`space.meshes`). The second is over the graph: the
exact minimum of the additive cost over all combinations of strategies (`eliminate`), for every mesh of every stage
separately, because stages meet only at their boundaries. The cheapest solutions of stages and their neighbours are then
combined and simulated as complete programs. The simulated step time decides, under the memory limit.

    additive cost of a stage = micro-batches x (operators' forward and backward + redistributions both ways)
                               + weight gathers, gradient reductions and updates

A transformer on accelerators, also in a captured module, is searched over degrees instead (`search.devices`): stages,
schedule, chunks, micro-batch, recompute, optimizer level and the usual layouts. `search.way` chooses the search.

Options that are not given are searched too: the number of stages, their boundaries and widths, devices that are better
left idle, and the number of micro-batches (`shapes`); and the optimizer level, the schedule with its chunks, slices,
and recomputed blocks (`ways`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from costmodels import Machine, executing
from costmodels.price.clock import at_usual_clock
from plans.errors import TwofoldError
from plans.model.graph import Graph
from plans.optimizer import Optimizer
from plans.plan import Plan, Strategy
from search.attach_prediction import predicted
from search.devices import Pins
from search.devices.of_graph import plans_of_graph
from search.operators.plan_search import PlanSearch
from search.operators.ways import Ways
from search.own_clock import with_own_clocks
from search.request import check_asked, check_devices, check_graph, check_schedule, check_stages
from search.result import SearchResult
from search.way import pins_of, stated_by_operator, why_by_operators
from simulator.engine.garbage import without_collection

__all__ = ["search"]


@without_collection()
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
    schedule: str | None = "1f1b",
    recompute: Sequence[str] | None = (),
    optimizer: Optimizer | None = None,
    any_level: bool = False,
    full_batch: bool = True,
    output_broadcast: bool = False,
    fused: bool = True,
    execution: str = "graph",
    degrees: Mapping[str, Any] | None = None,
    method: str = "search",
    memory_limit_bytes: int | None = None,
    pinned: Mapping[str, Strategy] | None = None,
    global_batch: int | None = None,
    top_k: int = 5,
    time_limit_s: float | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> SearchResult[Plan]:
    """Search the best plans for one training step of `graph` on `machine`.

    On accelerators, a graph that is recognised as a transformer is searched over degrees, including stages and
    micro-batches. Any other graph is searched operator by operator, as is a transformer if stages, widths,
    micro-batches, interleave, schedule, recompute or pinned strategies are given. `on_progress` reports which search
    runs, and why.

    Args:
        graph: graph of the full batch; `global_batch` resizes it.
        num_devices: number of ranks; by default all devices of the machine.
        num_stages: number of pipeline stages; None: searched.
        stages: operators of each stage; by default searched or balanced by cost.
        widths: devices per stage: numbers, "even" or "any" (searched; devices may stay idle). The default is even if
            the number of stages is given and divides the devices, otherwise any.
        num_micro_batches: number of micro-batches; None: searched.
        interleave: number of slices of a micro-batch that overlap communication with compute; None: two if that is
            faster than one.
        schedule: pipeline schedule; None: searched, with the number of chunks per rank.
        recompute: operators whose outputs are recomputed in the backward, in addition to `graph.recompute`; None:
            blocks of them where the memory is too small without.
        optimizer: kind, settings and parallel level of the optimizer.
        any_level: whether to search the parallel level, starting with that of the optimizer.
        full_batch, output_broadcast: see `Plan`.
        fused: whether to fuse memory-bound instructions if the machine gains by it (`Machine.fuses`).
        execution: "graph" or "eager", as of `Plan`; it decides on the host times.
        memory_limit_bytes: memory limit per rank; by default `Machine.room_bytes`.
        pinned: strategies to keep, by operator. Their meshes have the ranks of the stage, or count them from 0.
        degrees: degrees of a transformer on accelerators: those given are fixed, all others searched ({} fixes none);
            see `search.devices` and `plans.degrees`. They can be combined with machine, devices, batch, optimizer,
            memory, fused and top_k only. A graph that is not a transformer is refused, and AdamW is the default.
        method: "search", or "operators" to search a transformer operator by operator too.
        top_k: number of plans to return.
        time_limit_s: time limit after which, as on Ctrl-C, the best plan so far is returned.
        on_progress: called with lines of progress.

    Raises:
        TwofoldError: stages or widths that do not fit the devices, micro-batches that do not divide the batch, a memory
            limit that nothing fits in (it names the smallest that would), pins that do not fit.

    >>> from plans.model.mlp import mlp_graph
    >>> found = search(mlp_graph([64, 32, 8], 16), Machine.load("h200-x8"), num_devices=3, num_stages=2)
    >>> len(found.best.stages)
    2
    """
    started, machine = time.perf_counter(), executing(machine, execution)
    if global_batch is not None:
        graph = graph.with_batch(global_batch)
    num_devices = machine.num_devices if num_devices is None else num_devices
    check_devices(machine, num_devices)
    check_stages(graph, num_devices, num_stages=num_stages, stages=stages, widths=widths)
    check_asked(method=method, top_k=top_k, time_limit_s=time_limit_s, memory_limit_bytes=memory_limit_bytes)
    say = on_progress or (lambda line: None)
    stated = stated_by_operator(
        num_stages=num_stages, stages=stages, widths=widths, num_micro_batches=num_micro_batches, interleave=interleave,
        schedule=schedule, recompute=recompute, pinned=pinned,
    )  # fmt: skip
    if degrees is not None and (stated or method != "search"):
        raise TwofoldError(
            f"degrees are searched, and {', '.join(stated) or f'method={method!r}'} given: state it as degrees, or "
            "leave degrees out"
        )
    asked: dict[str, Any] = {
        "top_k": top_k, "time_limit_s": time_limit_s, "machine": machine, "num_devices": num_devices,
        "memory_limit_bytes": memory_limit_bytes, "fused": fused,
    }  # fmt: skip
    settings = {"full_batch": full_batch, "output_broadcast": output_broadcast, "execution": execution}
    if degrees is not None:
        found = plans_of_graph(graph, pins=Pins(**degrees), optimizer=optimizer, **asked)
        return _with_settings(found, settings)
    why = "as requested" if method == "operators" else why_by_operators(graph, machine, stated, full_batch=full_batch)
    if why is None:
        try:
            trained = optimizer or Optimizer()
            found = plans_of_graph(graph, pins=pins_of(trained, any_level), optimizer=trained, **asked)
        except TwofoldError as error:
            why = f"the search over degrees found no plan: {error}"
        else:
            say(f"{graph.name} is a transformer: searched over degrees")
            return _with_settings(found, settings)
    say(f"{graph.name} is searched operator by operator: {why}")
    check_schedule(schedule)
    slices = 1 if interleave is None else interleave
    check_graph(graph, num_micro_batches=num_micro_batches, interleave=slices, pinned=pinned or {})
    usual = at_usual_clock(machine)
    plan_search = PlanSearch(
        graph=graph, machine=usual, num_devices=num_devices, interleave=slices,
        schedule=schedule or "1f1b", recompute=(*graph.recompute, *(recompute or ())),
        ways=Ways(levels=any_level, schedules=schedule is None, slices=interleave is None, recompute=recompute is None),
        optimizer=optimizer or Optimizer(), full_batch=full_batch,
        output_broadcast=output_broadcast, fused=fused and machine.fuses,
        limit_bytes=memory_limit_bytes or machine.room_bytes, pinned=dict(pinned or {}),
        say=say, started=started,
        deadline=None if time_limit_s is None else started + time_limit_s,
    )  # fmt: skip
    found = plan_search.run(stages, num_stages, widths, num_micro_batches, top_k)
    if usual is machine:
        return _with_settings(found, settings)
    return _with_settings(_at_own_clocks(found, plan_search, machine), settings)


def _at_own_clocks(found: SearchResult[Plan], plan_search: PlanSearch, machine: Machine) -> SearchResult[Plan]:
    """The plans at their own clocks, the fastest first: the best one, and the others that there is time for."""
    own: list[Plan] = []
    for plan in found.plans:
        if not own or not plan_search.is_over():
            own.append(predicted(plan, machine, plan_search.limit_bytes, plan_search.time_left_s))
    shares = [step_s(after) / step_s(before) for before, after in zip(found.plans, own, strict=False)]
    return with_own_clocks(found, sorted(own, key=step_s), shares)


def _with_settings(found: SearchResult[Plan], settings: Mapping[str, Any]) -> SearchResult[Plan]:
    """The result, with these settings in its plans."""
    return replace(found, plans=tuple(structs.replace(plan, **settings) for plan in found.plans))


def step_s(plan: Plan) -> float:
    """The step that was predicted for a plan."""
    assert plan.prediction is not None
    return plan.prediction.step_s
