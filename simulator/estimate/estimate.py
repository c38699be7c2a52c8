"""A quick estimate of a transformer for given degrees: a millisecond, on thousands of devices.

Blocks are priced once and counted (`simulator.estimate.chunks`). The search ranks configurations by it, and software
other than twofold's executor, whose instructions are not known, is predicted by it. `simulator.forecast` predicts
what the simulator does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from costmodels import Machine
from plans.degrees import Degrees, check, describe
from plans.errors import TwofoldError
from plans.model.transformer import TransformerConfig, sizes_of
from plans.timeline import PS_PER_S
from simulator.channels import PairRates, pair_rates
from simulator.estimate.case import PipelineForecast, RankKinds
from simulator.estimate.chunk import Chunk
from simulator.estimate.chunks import Chunks
from simulator.estimate.layout import LayoutCosts, is_split
from simulator.result import Forecast
from simulator.stacks import Stack

__all__ = ["check_machine", "chunk_costs", "chunks_of", "estimate", "known_layouts", "rates_of"]


def estimate(
    config: TransformerConfig,
    degrees: Degrees,
    machine: Machine,
    *,
    stack: Stack | None = None,
) -> Forecast:
    """Estimate one configuration.

    Args:
        config: of a transformer, dense or with experts.
        degrees: how it is spread.
        machine: with at least as many devices, whose compute runs behind the host.
        stack: the software that runs it; twofold's executor by default.

    Raises:
        TwofoldError: a machine whose hosts compute; slices and pairs; what `plans.degrees.check` refuses.

    >>> from plans.model.transformer import transformer_config
    >>> degrees = Degrees(dp=16, tp=8, pp=8, micro_batch=1, global_batch=512)
    >>> found = estimate(transformer_config("llama-3-70b"), degrees, Machine.load("h100-sxm-x1024"))
    >>> 5 < found.step_s < 60
    True
    """
    check_machine(machine)
    check(degrees, sizes_of(config), num_devices=machine.num_devices, machine=machine.name)
    if degrees.takes_turns:
        raise TwofoldError(f"{describe(degrees)}: slices and pairs can only be forecast, and only for twofold")
    schedule, stack = degrees.pipeline, (stack or Stack()).on(machine)
    degrees = stack.as_run(degrees)
    split = is_split(schedule)
    costs = chunk_costs(config, degrees, machine, stack, split, known_layouts(config, machine, stack))
    chunks = chunks_of(config, degrees)
    case = PipelineForecast(
        layout=LayoutCosts(costs), degrees=degrees, chunks=chunks, ranks=RankKinds.of(chunks, schedule)
    )
    return case.forecast(case.end_ps(), case.activations())


def chunk_costs(
    config: TransformerConfig,
    degrees: Degrees,
    machine: Machine,
    stack: Stack,
    split: bool,
    known: Callable[[Degrees], dict[tuple[object, ...], Any]],
) -> Chunks:
    """The costs of a configuration's chunks.

    Args:
        config, degrees, machine, stack: as of `estimate`.
        split: whether the backward is.
        known: what layouts share (see `Chunks`), by degrees.
    """

    def made(each: Degrees, kept: Chunks | None) -> Chunks:
        return Chunks(
            config=config, degrees=each, machine=machine, stack=stack, rates=rates_of(machine, stack),
            split_backward=split, known=known(each), kept=kept,
        )  # fmt: skip

    if degrees.recompute_layers is None:
        return made(degrees, None)
    return made(degrees, made(replace(degrees, recompute="none", recompute_layers=None), None))


def known_layouts(
    config: TransformerConfig, machine: Machine, stack: Stack
) -> Callable[[Degrees], dict[tuple[object, ...], Any]]:
    """The chunks of layouts that differ in data-parallel degree, pipeline and optimizer only (see `Chunks`), by
    degrees.

    It is kept from one configuration to the next.
    """

    def known(degrees: Degrees) -> dict[tuple[object, ...], Any]:
        return _known(
            config, machine, stack, degrees.tp, degrees.cp, degrees.ep, degrees.micro_batch, degrees.sequence_parallel,
            degrees.recompute, degrees.num_ranks, degrees.strides[:3], degrees.fused,
        )  # fmt: skip

    return known


@lru_cache(maxsize=256)
def _known(*shared: object) -> dict[tuple[object, ...], Any]:
    return {}


def check_machine(machine: Machine) -> None:
    """Refuse a machine whose hosts compute."""
    if not machine.host_async:
        raise TwofoldError(
            f"machine {machine.name!r} computes on its hosts; degrees are predicted for accelerators: "
            "simulate a plan instead"
        )


def chunks_of(config: TransformerConfig, degrees: Degrees) -> tuple[Chunk, ...]:
    """The content of each pipeline stage."""
    layers = degrees.layers_of(config.num_layers)
    last, found = len(layers) - 1, []
    dense = 0 if config.experts is None else config.experts.num_dense_layers
    for number, count in enumerate(layers):
        plain = min(dense, count)
        dense -= plain
        kept = 0 if degrees.recompute_layers is None else max(0, count - degrees.recompute_layers)
        found.append(
            Chunk(
                num_blocks=count, has_embedding=number == 0, has_head=number == last, num_dense=plain, num_kept=kept
            )
        )  # fmt: skip
    return tuple(found)


def rates_of(machine: Machine, stack: Stack) -> PairRates | None:
    """The rates of compute and communication that overlap: for twofold's programs those of its forecasts.

    The kernels of other software are not known one by one, so a kernel and a message are taken to be equally long.
    """
    return pair_rates(machine) if stack.runs_programs else _equally_long(machine)


@lru_cache(maxsize=64)
def _equally_long(machine: Machine) -> PairRates | None:
    rates = pair_rates(machine)
    return None if rates is None else lambda kind, _, call, __: rates(kind, PS_PER_S, call, PS_PER_S)
