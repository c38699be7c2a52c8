"""The host's part of a replayed step: one launch of a recorded graph instead of a call for every kernel.

The device's front end then issues the nodes of the graph (kernels, copies and communication) and takes a fixed time per
node. Calls that are not nodes (a view, a WAIT) take no time. Kernels take the same time as without replay; machine
files measure them in recordings, including the gap between two kernels.
"""

from __future__ import annotations

import msgspec

from costmodels.machine.machine import DISPATCH_CLASSES, Machine
from costmodels.machine.sections import Replay
from plans.plan import check_execution

__all__ = ["executing"]

ASSUMED_REPLAY = Replay(launch_s=10e-6, node_s=1.0e-6)
"""Assumed if a machine file has no figure. NVIDIA, "Getting Started with CUDA Graphs" (2019): 20 kernels of 2.9 us take
3.4 us each in a graph; "Constant Time Launch for Straight-Line CUDA Graphs" (2024): a launch takes the host 2.5 us and
1 ns a node. The launch here is also the device's pause between two replays, which was not measured."""

_NO_NODE = ("view", "wait")


def executing(machine: Machine, execution: str) -> Machine:
    """The machine with the host times of an execution (`plans.plan.EXECUTIONS`).

    On a machine whose hosts compute (a CPU) there is nothing to record: it is returned unchanged, as is every machine
    for "eager", because machine files contain eager host times.

    Raises:
        TwofoldError: an unknown execution.

    >>> eager = Machine.load("h200-x4")
    >>> graph = executing(eager, "graph")
    >>> graph.dispatch_s["matrix"] < eager.dispatch_s["matrix"], graph.launch_s > 0
    (True, True)
    """
    check_execution(execution)
    if execution == "eager" or not machine.host_async or machine.launch_s:
        return machine
    replay = machine.replay or ASSUMED_REPLAY
    rules = {
        name: msgspec.structs.replace(rule, dispatch_s=None) if rule.dispatch_s is not None else rule
        for name, rule in machine.compute.rules.items()
    }
    issued_s = {name: 0.0 if name in _NO_NODE else replay.node_s for name in DISPATCH_CLASSES}
    if machine.replay is None:  # a node that was not measured takes no longer than its call from the host
        issued_s = {name: min(issued, machine.dispatch_s[name]) for name, issued in issued_s.items()}
    return msgspec.structs.replace(
        machine, launch_s=replay.launch_s, compute=msgspec.structs.replace(machine.compute, rules=rules),
        dispatch_s=issued_s,
    )  # fmt: skip
