"""Probe programs: small networks that are simulated and run while a machine is calibrated.

They are perceptrons of widths, depths and degrees that no example uses. What they have in common with any other program
is the stack they run on: dispatch, collectives, the operating system with many processes on few cores.
"""

from __future__ import annotations

import msgspec

from costmodels import Machine
from plans.mlp import mlp_graph
from plans.plan import Plan
from search import uniform_plan

__all__ = ["probe_plans"]

# sizes, batch, dp, tp, pp per eight ranks, micro-batches, optimizer-parallel level, last stage replicated
_PROBES = (
    ((640, 384, 384, 16), 48, 4, 1, 2, 4, 1, False),
    ((512, 640, 256, 8), 32, 2, 2, 2, 4, 1, False),
    ((768, 448, 320, 4), 64, 8, 1, 1, 2, 0, False),
    ((384, 512, 512, 8), 32, 1, 4, 2, 4, 0, False),
    ((896, 384, 640, 2), 24, 1, 4, 2, 3, 1, True),
    ((576, 256, 384, 384, 2), 40, 2, 2, 2, 5, 1, True),
)


def probe_plans(num_ranks: int, machine: Machine) -> list[Plan]:
    """The probes that fit `num_ranks` ranks; degrees are cut down where there are fewer than eight.

    Some replicate their last stage, so that what crosses the border is sent by many to many. `machine` only decides
    which equally valid way of splitting is taken.
    """
    plans = []
    for sizes, batch, dp, tp, pp, count, level, replicated in _PROBES:
        while dp * tp * pp > num_ranks:
            dp, tp, pp = (dp // 2, tp, pp) if dp > 1 else (dp, tp // 2, pp) if tp > 1 else (dp, tp, pp // 2)
        if dp * tp * pp == num_ranks:
            name = f"probe-dp{dp}-tp{tp}-pp{pp}" + ("-replicated-end" if replicated else "")
            graph = mlp_graph(sizes, batch, name=name)
            plan = uniform_plan(graph, machine, dp=dp, tp=tp, pp=pp, micro_batch=batch // count, zero=level)
            if replicated:
                kept = set(plan.strategies) - set(plan.stages[-1].operators)
                strategies = {name: plan.strategies[name] for name in plan.strategies if name in kept}
                plan = msgspec.structs.replace(plan, strategies=strategies)
            plans.append(plan)
    return plans
