"""Which plan a training job continues with when fewer nodes are left."""

from __future__ import annotations

import msgspec

from executor.launch.nodes import Nodes
from plans.differences import plan_differences
from plans.errors import TwofoldError, number, whole_number
from plans.plan import Plan, load_plan

__all__ = ["ElasticSettings", "check_elastic", "devices_left", "smaller_plans"]


class ElasticSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Continuing on fewer nodes: at the start and after a failure, for nodes that do not join.

    Args:
        least_nodes: smallest number of nodes, node 0 always included.
        wait_s: how long to wait for missing nodes once `least_nodes` are there.
        plans: plan files for fewer devices, one for each number of nodes from `least_nodes`.
        machine: machine for which `twofold train` searches the plans that `plans` does not have; "" searches none.
    """

    least_nodes: int = 1
    wait_s: float = 30.0
    plans: tuple[str, ...] = ()
    machine: str = ""


def check_elastic(asked: ElasticSettings, nodes: Nodes) -> None:
    """Refuse settings that the nodes of a job cannot have.

    Raises:
        TwofoldError: as above.
    """
    whole_number("elastic.least_nodes", asked.least_nodes)
    number("elastic.wait_s", asked.wait_s, above=0)
    if asked.least_nodes > nodes.num_nodes:
        raise TwofoldError(
            f"elastic.least_nodes is {asked.least_nodes}, but the job has {nodes.num_nodes} nodes (--nodes); reduce it"
        )


def devices_left(asked: ElasticSettings, plan: Plan, nodes: Nodes) -> dict[int, int]:
    """The number of remaining devices for each smaller number of nodes.

    Args:
        asked: settings of the job.
        plan: plan for all nodes.
        nodes: all nodes, which share the ranks of `plan` evenly.

    >>> from plans.model.mlp import mlp_graph
    >>> from plans.layout import Layout
    >>> from plans.plan import Stage
    >>> graph = mlp_graph([8, 4], 16)
    >>> plan = Plan(graph=graph, stages=(Stage(mesh=Layout((8,), ("dp",)), operators=tuple(graph.by_name)),))
    >>> devices_left(ElasticSettings(least_nodes=2), plan, Nodes(num_nodes=4))
    {2: 4, 3: 6}
    """
    per_node = plan.num_ranks // nodes.num_nodes
    return {count: count * per_node for count in range(asked.least_nodes, nodes.num_nodes)}


def smaller_plans(asked: ElasticSettings, plan: Plan, nodes: Nodes) -> dict[int, Plan]:
    """The plans for fewer nodes by number of nodes.

    Args:
        asked: settings of the job.
        plan: plan for all nodes.
        nodes: all nodes, which share the ranks of `plan` evenly.

    Raises:
        TwofoldError: a number of nodes without a plan, or a plan of another model or optimizer.
    """
    given = {smaller.num_ranks: smaller for smaller in map(load_plan, asked.plans)}
    for other in given.values():
        if changed := plan_differences(plan, other):
            path, (before, after) = next(iter(changed.items()))
            raise TwofoldError(
                f"elastic.plans: the plan for {other.num_ranks} devices is not for the same training: {path} is "
                f"{after!r} instead of {before!r}; make it from the same model, batch and optimizer"
            )
    left = devices_left(asked, plan, nodes)
    for count, devices in left.items():
        if devices not in given:
            raise TwofoldError(
                f"elastic has no plan for {devices} devices, which is {count} of {nodes.num_nodes} nodes; add one to "
                "plans, or state machine to have it searched"
            )
    return {count: given[devices] for count, devices in left.items()}
