"""Messages to experts and back that run beside the compute of another micro-batch.

DualPipe and Megatron-core's --overlap-moe-expert-parallel-comm run the forward of a micro-batch together with the
backward of another one: while one computes, the other sends. A body then takes as long as its compute, on the cores
that the messages leave, or as long as the messages if they are slower (DeepSeek-AI 2024, arXiv 2412.19437, section
3.2.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from simulator.lines import COLLECTIVE, COMPUTE, Line
from simulator.stacks.steps import Kernel, Message, Step

__all__ = ["beside_exchanges", "hidden_ps", "is_exchange", "outlasting", "sent_in_part", "share_of_pair"]

EXCHANGE_CORES = 20
"""Cores that the messages of experts occupy during other micro-batches' compute (DeepSeek-AI 2024, arXiv 2412.19437,
section 3.2.2; the default of DeepEP's buffers)."""


def is_exchange(step: Step) -> bool:
    """Whether a step sends tokens to experts or back."""
    return isinstance(step, Message) and step.is_exchange


def sent_in_part(step: Step, share: float) -> Step:
    """A step with a share of its bytes, if it sends tokens to experts."""
    if isinstance(step, Message) and step.is_exchange:
        return replace(step, size_bytes=round(share * step.size_bytes))
    return step


def beside_exchanges(steps: Sequence[Step], num_cores: int) -> list[Step]:
    """The steps without the messages of experts and the waits for them, on the cores that the messages leave."""
    tokens = {step.token for step in steps if isinstance(step, Message) and step.is_exchange}
    slower = num_cores / (num_cores - min(EXCHANGE_CORES, num_cores // 2))
    return [
        _on_fewer_cores(step, slower) for step in steps
        if not (is_exchange(step) or (isinstance(step, Message) and step.call == "wait" and step.token in tokens))
    ]  # fmt: skip


def share_of_pair(steps: Sequence[Step]) -> float:
    """Messages that run during a body, over its own.

    A forward runs together with the backward of another micro-batch. Both send as much, but the backward computes twice
    as long, so a third of the forward's messages can run while it computes. A backward without weight gradients
    computes as long as a forward.
    """
    parts = {step.part for step in steps if isinstance(step, Kernel)}
    return 2 / 3 if "B" not in parts else 4 / 3 if "W" in parts else 1.0


def outlasting(sent: Sequence[Line], lines: Sequence[Line], share: float) -> list[Line]:
    """The time by which messages beside a body outlast its compute, as one message that the body waits for."""
    computed_ps = sum(line.work_ps for line in lines if line.kind == COMPUTE)
    late_ps = round(share * sum(line.work_ps for line in sent)) - computed_ps
    if late_ps <= 0:
        return []
    return [sent[0]._replace(dispatch_ps=0, work_ps=late_ps, alone_ps=0, payload=None, token=-1)]


def hidden_ps(lines: Sequence[Line]) -> int:
    """By how much a body takes longer without a partner, given its lines with all of its messages."""
    sent_ps = sum(line.work_ps for line in lines if line.kind == COLLECTIVE and line.name == "all_to_all")
    return min(sent_ps, sum(line.work_ps for line in lines if line.kind == COMPUTE))


def _on_fewer_cores(step: Step, times: float) -> Step:
    """A step whose arithmetic takes `times` as long; what moves bytes is bound by the memory."""
    if isinstance(step, Kernel) and step.call.startswith(("linear.", "matmul.", "attention.", "grouped_linear.")):
        return replace(step, times=times * step.times)
    return step
