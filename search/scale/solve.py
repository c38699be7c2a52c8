"""The search as one call."""

from __future__ import annotations

import time
from collections.abc import Callable

from costmodels.compute import rate
from plans.errors import TwofoldError
from plans.transformer import TransformerConfig
from search.scale.answer import Answer, NothingFits
from search.scale.bounds import physics_bound_s
from search.scale.branch import Branching
from search.scale.explain import neighbours, relaxations
from search.scale.found import Found
from search.scale.problem import Problem

__all__ = ["model_flops", "physics_s", "solve"]


def solve(
    problem: Problem,
    *,
    time_limit_s: float | None = None,
    keep: int = 1,
    explain: bool = False,
    on_better: Callable[[Found], None] | None = None,
) -> Answer:
    """Search the space of a problem.

    Args:
        problem: what is asked.
        time_limit_s: after which the best so far is returned, with its gap.
        keep: how many of the fastest are proven; more take longer.
        explain: find out what the neighbours of the best would cost.
        on_better: called with every new best.

    Raises:
        NothingFits: nothing in the space fits the memory.
        TwofoldError: nothing in the space can be made of these sizes at all.

    >>> from costmodels import Machine
    >>> from plans.transformer import transformer_config
    >>> from search.scale import Pins
    >>> problem = Problem(config=transformer_config("llama-3-8b", num_layers=4), machine=Machine.load("h100-sxm-x8"),
    ...                   num_devices=8, global_batch=32, pins=Pins(tp=2, recompute="none", micro_batch=1))
    >>> solve(problem).gap
    0.0
    """
    began = time.monotonic()
    branching = Branching(
        problem=problem, keep=keep, on_better=on_better,
        deadline_s=None if time_limit_s is None else began + time_limit_s,
    )  # fmt: skip
    branching.run()
    if not branching.found:
        raise _nothing(branching)
    least = physics_s(problem)
    bound = max(branching.bound_s, least)
    return Answer(
        problem=problem, found=tuple(branching.found), bound_s=bound, relaxed_s=min(branching.relaxed_s, bound),
        physics_s=least,
        complete=branching.complete, search_s=time.monotonic() - began, num_forecasts=branching.num_forecasts,
        num_opened=branching.num_opened, refused=tuple(branching.refused),
        neighbours=neighbours(branching, branching.found[0]) if explain else (),
    )  # fmt: skip


def _nothing(branching: Branching) -> TwofoldError:
    problem = branching.problem
    asked = f"{problem.config.name} on {problem.num_devices} devices of {problem.machine.name}"
    if branching.interrupted:
        return NothingFits(f"{asked}: the search was stopped before anything that fits was found; give it more time")
    if any(each.reason == "memory" for each in branching.refused):
        ways = "; ".join(each.text for each in relaxations(problem)) or "no larger machine of this kind is known"
        return NothingFits(f"{asked}: nothing fits {problem.limit_bytes / 2**30:.2f} GiB per device. {ways}")
    reasons = "; ".join(dict.fromkeys(each.reason for each in branching.refused)) or "the pins leave nothing"
    return TwofoldError(f"{asked}, global batch {problem.global_batch}: there is no way to spread it: {reasons}")


def model_flops(config: TransformerConfig, global_batch: int) -> float:
    """Arithmetic of the matrix products of one step, without anything made again.

    2 per weight and token forward, 4 backward, beside attention's 4 x heads x head dim per pair of tokens forward and
    twice that backward, half of the pairs where it is causal (Narayanan et al. 2021, arXiv 2104.04473, section 5.1,
    and Dao 2023, arXiv 2307.08691, section 4.1, which counts a backward of 2.5 times; fewer keep this a bound).
    """
    tokens = float(global_batch * config.seq)
    gated = 3 if config.gated else 2
    attention = config.hidden * config.head_size * (2 * config.num_heads + 2 * config.kv_heads)
    mlp = gated * config.hidden * config.inner
    weights = float(config.num_layers * (attention + mlp) + config.vocab * config.hidden)
    if (experts := config.experts) is not None:
        chosen = experts.top_k * min(1.0, experts.capacity_factor) + experts.num_shared
        mixed = config.num_layers - experts.num_dense_layers
        weights += mixed * (chosen * gated * config.hidden * experts.ffn - mlp)
    pairs = tokens * config.seq * (0.5 if config.causal else 1.0)
    scores = 4.0 * config.num_heads * config.head_size * pairs * config.num_layers
    return 6.0 * weights * tokens + 3.0 * scores


def physics_s(problem: Problem) -> float:
    """The physical bound: see `physics_bound_s`. Each weight is read forward and backward, its optimizer state once."""
    config, machine, optimizer = problem.config, problem.machine, problem.optimizer
    assert optimizer is not None
    peak = max(rate(machine.compute, "matrix_flops_per_s", config.dtype), 1.0)
    fastest = max(1.0, *(1.0 / each for each in machine.compute.form_cost.values()), 1.0)
    moved = config.num_parameters * float(optimizer.bytes_per_element(config.dtype))
    flops = model_flops(config, problem.global_batch)
    return physics_bound_s(flops, peak * fastest, moved, machine.compute.memory_Bps, problem.num_devices)
