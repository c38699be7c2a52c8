"""The forecast of a configuration that a row of a table states, and its figures in the units of tables."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache

from costmodels import Machine, utilization
from interop.measurements.case import Beyond, Case
from interop.measurements.devices import Network
from interop.measurements.machines import assumed_of, load_machine, machine_of
from interop.measurements.offload import with_host_memory
from interop.measurements.zero_plus import with_copies, with_parts
from plans.degrees import Degrees
from plans.model.transformer import TransformerConfig
from simulator.estimate.memory import memory_interval
from simulator.forecast import Forecast, forecast
from simulator.forecast.composed import folded_mixture_forecast, hybrid_forecast
from simulator.stacks import on_host, stack_named
from simulator.stacks.base import exchanged_share

__all__ = ["MEMORY_MARGIN", "MEMORY_UNITS", "Run", "measured_as", "model_flops", "run_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A configuration on a machine under a software.

    Args:
        found: its forecast.
        memory: the lower and upper end of the interval of its peak, in bytes.
        assumed: what the forecast assumes, in words.
        fits: whether its peak fits the device.
        runs: whether it may have run on it (`MEMORY_MARGIN`).
    """

    found: Forecast
    memory: tuple[float, float]
    assumed: tuple[str, ...]
    fits: bool
    runs: bool


MEMORY_MARGIN = 1.1
"""A row whose predicted peak is at most this times a device's memory may have run on it. A figure above it is wrong."""

MEMORY_UNITS = {"peak_memory_GiB": 2**30, "peak_memory_GB": 10**9}
"""Bytes of the units of memory."""


def run_of(case: Case, *, machine: str | None = None, host: str | None = None) -> Run:
    """The forecast of a configuration.

    Args:
        case: the configuration.
        machine: another machine than that of the row, whose links are then not the row's.
        host: host file of the host that issues the work.

    Raises:
        TwofoldError: it cannot be run.
    """
    own = dataclasses.replace(case.config, name="model")  # rows name one model in several ways
    network = None if machine else case.network
    return _run(
        own, case.degrees, machine or case.machine, network, case.stack, host, case.borrows, case.beyond
    )  # fmt: skip


@lru_cache(maxsize=100_000)
def _run(
    config: TransformerConfig, degrees: Degrees, machine: str, network: Network | None, stack_name: str,
    host: str | None, borrows: bool, beyond: Beyond,
) -> Run:  # fmt: skip
    """The forecast of a configuration; `network` is None if the machine is unchanged."""
    target = Machine.load(machine) if network is None else machine_of(machine, network)
    target, stack = on_host(target, stack_named(stack_name), host)
    if borrows or (config.experts is not None and not stack.runs_programs):  # no mixture of other software was measured
        stack = dataclasses.replace(stack, is_measured=False)
    if beyond.zero_plus:
        stack = with_parts(stack, beyond.zero_plus)
    if beyond.reserved is not None:
        stack = dataclasses.replace(stack, reserved=beyond.reserved)
    experts = config.experts
    if experts is not None:
        stack = dataclasses.replace(stack, exchanged=_exchanged(experts.top_k, degrees, target, beyond))
    if experts is not None and (degrees.cp > 1 or beyond.whole_experts):
        found = folded_mixture_forecast(
            config, degrees, target, stack, beyond.expert_ranks, whole_experts=beyond.whole_experts
        )
    elif beyond.shards:
        found = hybrid_forecast(config, degrees, target, stack, beyond.shards)
    else:
        found = forecast(config, degrees, target, stack=stack)
    if "hpz" in beyond.zero_plus:
        found = with_copies(found, config, degrees, target.devices_per_node)
    if beyond.offloaded:
        found = with_host_memory(found, config, degrees, target, beyond.offloaded)
    unknown = stack.unknown_bytes(config, degrees)
    assumed = [*stack.assumptions(config, degrees), *(assumed_of(target, network) if network is not None else ())]
    return Run(
        found=found, memory=memory_interval(found.memory, unknown_bytes=unknown, reserved=stack.reserved),
        assumed=tuple(assumed), fits=found.peak_bytes <= target.free_bytes,
        runs=found.peak_bytes <= MEMORY_MARGIN * target.free_bytes,
    )  # fmt: skip


def _exchanged(top_k: int, degrees: Degrees, machine: Machine, beyond: Beyond) -> float:
    """Bytes that a rank sends for experts, over those of one copy in 16 bits for each chosen expert."""
    narrow = _HALF_NARROW if beyond.dispatches_float8 else 1.0
    if not beyond.most_nodes:
        return narrow
    ways = 1 if beyond.whole_experts else degrees.tp  # ranks next to each other that have parts of one expert
    per_node = max(1, machine.devices_per_node // ways)
    nodes = -(-beyond.expert_ranks // per_node)
    return narrow * exchanged_share(top_k, nodes, min(per_node, beyond.expert_ranks), beyond.most_nodes)


_HALF_NARROW = 0.75
"""Bytes of tokens that are sent in 8 bits and come back in 16, over those of 16 bits both ways."""


def measured_as(case: Case, found: Forecast, step_s: float) -> float:
    """A prediction in the unit of a row's metric.

    Operations are those of the products and of all scores of attention, masked ones too: so count Narayanan et al.
    2021 (arXiv 2104.04473, eq. 3), PaLM (arXiv 2204.02311, appendix B), Megatron-LM until 2024 and torchtitan. What is
    recomputed counts where the source counts it (`Case.counts_recompute`): the blocks a second time forward, or their
    attention's scores, never the head.
    """
    degrees, config = case.degrees, case.config
    gpus = degrees.num_ranks
    if case.metric == "iteration_time_s":
        return step_s
    if case.metric == "tokens_per_s_per_gpu":
        return degrees.global_batch * config.seq / step_s / gpus
    if case.metric == "samples_per_s_per_gpu":
        return degrees.global_batch / step_s / gpus
    if unit := MEMORY_UNITS.get(case.metric):
        return found.peak_bytes / unit
    flops = model_flops(case)
    if case.metric == "tflops_per_gpu":
        return flops / step_s / gpus / 1e12
    peaks = load_machine(case.machine_of_one).compute.matrix_flops_per_s
    return 100 * flops / step_s / gpus / peaks[case.peak or config.dtype]


def model_flops(case: Case) -> float:
    """Forward and backward of all matrix products and attention of one step, as the row's source counts them."""
    flops, own = (
        utilization.model_flops(case.config, case.degrees.global_batch),
        utilization.forward_products(case.config),
    )
    if case.counts_recompute and case.degrees.recompute != "none":
        again = own["scores"] + (own["weights"] if case.degrees.recompute == "full" else 0.0)
        flops += 2.0 * case.degrees.global_batch * case.config.seq * again
    return flops
