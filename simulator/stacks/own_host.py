"""A machine and a software stack with the measured host times of a user's host."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec

from costmodels import Machine
from costmodels.price.torch_hosts import host_s
from simulator.stacks.base import Stack

__all__ = ["on_host"]


def on_host(machine: Machine, stack: Stack, path: str | None) -> tuple[Machine, Stack]:
    """The machine and the stack with the host times of a file; unchanged if it is None.

    All host times of a machine are scaled by the ratio of its time for a plain block to that of the quiet measured
    hosts: assumed of twofold's own instructions and of Inductor's.

    Raises:
        TwofoldError: no such file, or not a host file.
    """
    if path is None:
        return machine, stack
    times = zip(host_s(path, "plain"), host_s("quiet", "plain"), strict=True)
    ratio = math.sqrt(math.prod(own / quiet for own, quiet in times))
    rules = {
        call: rule if rule.dispatch_s is None else msgspec.structs.replace(rule, dispatch_s=ratio * rule.dispatch_s)
        for call, rule in machine.compute.rules.items()
    }
    machine = msgspec.structs.replace(
        machine, dispatch_s={call: ratio * seconds for call, seconds in machine.dispatch_s.items()},
        compute=msgspec.structs.replace(machine.compute, rules=rules),
    )  # fmt: skip
    return machine, replace(stack, host=path)
