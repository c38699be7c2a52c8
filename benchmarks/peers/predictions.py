"""Step times and memory of every case on both sides, written before any step runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from benchmarks.peers.cases import Case, model_flops
from benchmarks.peers.own import EXECUTIONS, with_execution
from benchmarks.peers.peer import lacks
from plans.errors import TwofoldError
from simulator import simulate
from simulator.forecast.predict import forecast
from simulator.stacks.base import Stack
from simulator.stacks.names import stack_named
from simulator.stacks.torch_native import TorchNative

__all__ = ["PEER_STACKS", "predictions"]


def _as_written(**settings: Any) -> Stack:
    """torch's parts as the peer has them: logits are dropped before the backward (`single`), the loss is made of split
    ones and products share an input (`tensor`), a pipeline does not join outputs (`pipeline`)."""
    return TorchNative(holds_logits=False, loss_parallel=True, one_input=True, keeps_outputs=False, **settings)


PEER_STACKS = {
    "torch": _as_written(),
    "compiled": _as_written(name="torch-compile", compiled=True, one_kernel_loss=True, narrows=True),
    "megatron": stack_named("megatron"),
}
"""Side of the peer -> the software stack that forecasts it."""


def predictions(cases: Iterable[Case], device: str = "h200", host: str = "quiet") -> dict[str, dict[str, Any]]:
    """Name of a case -> side -> step_s, low_s, high_s and peak_bytes, or why there is none.

    Sides are the executions of the executor ("eager", "graph", "apart"), "torch" and "compiled".

    Args:
        cases: to predict.
        device: of the catalogue.
        host: whose times the peer's blocks take, as in `costmodels.price.torch_hosts.host_s`.
    """
    return {case.name: _of(case, device, host) for case in cases}


def _of(case: Case, device: str, host: str) -> dict[str, Any]:
    plan, machine = case.plan(), case.machine(device)
    found: dict[str, Any] = {"machine": machine.name, "model_flops": model_flops(case.config, case.batch)}
    for execution in EXECUTIONS if not case.products else ():
        chosen = with_execution(plan, execution)
        timeline = simulate(chosen, machine)
        found[execution] = {
            "step_s": timeline.step_interval_s, "low_s": timeline.low_s, "high_s": timeline.high_s,
            "peak_bytes": timeline.peak_bytes,
        }  # fmt: skip
    for side in ("torch", "compiled") if case.parts == "torch" else (case.parts,):
        if lacks(case):
            continue
        stack = replace(PEER_STACKS[side], host=host)
        stack = replace(stack, products=case.products, narrows=True) if case.products else stack
        try:
            told = forecast(case.config, case.degrees_value(), machine, stack=stack)
        except TwofoldError as error:
            found[side] = {"none": str(error)}
            continue
        found[side] = {
            "step_s": told.step_s, "low_s": told.low_s, "high_s": told.high_s, "peak_bytes": told.peak_bytes
        }  # fmt: skip
    return found
