"""Slow ranks: which ones a share of all stands for, and what of a pipeline each of them slows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from plans.degrees import Degrees
from plans.errors import TwofoldError

__all__ = ["slow_pipelines", "some_ranks"]


def some_ranks(share: float, num_ranks: int, seed: int = 1) -> tuple[int, ...]:
    """A share of all ranks, drawn without order; at least one.

    Args:
        share: above 0, at most 1: 0.001 is one in a thousand.
        num_ranks: of which they are.
        seed: equal seeds give equal ranks.

    Raises:
        TwofoldError: another share.

    >>> len(some_ranks(0.001, 16384))
    16
    """
    if not 0 < share <= 1:
        raise TwofoldError(f"a share of {share:g} of all ranks is above 0 and at most 1 (1/1000 is one in a thousand)")
    count = max(1, round(share * num_ranks))
    found = np.random.default_rng(seed).choice(num_ranks, size=count, replace=False)
    return tuple(sorted(found.tolist()))


def slow_pipelines(degrees: Degrees, slowdown: Mapping[int, float]) -> tuple[Mapping[int, float], ...]:
    """What slow ranks do to pipelines: for each pipeline that one of them is in, pipeline rank -> factor.

    The tensor- and context-parallel neighbours of a slow rank meet it in every operator, so all go at its pace.
    Data-parallel replicas meet at the end of a step: the slowest pipeline sets the pace. Where they meet within blocks
    (optimizer level 3, gradients reduced for every micro-batch, experts), one slow rank slows its stage in all of them.
    Pipelines that are slower nowhere than another one are left out.

    >>> slow_pipelines(Degrees(dp=2, tp=2, pp=2, global_batch=4), {1: 1.2, 7: 1.1})
    ({0: 1.2}, {1: 1.1})
    """
    stride_dp, stride_pp = degrees.strides[2:]
    together = degrees.optimizer.parallel_level >= 3 or degrees.optimizer.reduced_per_micro_batch or degrees.ep > 1
    found: dict[int, dict[int, float]] = {}
    for rank, factor in slowdown.items():
        replica = 0 if together else rank // stride_dp % degrees.dp
        stage = rank // stride_pp % degrees.pp
        own = found.setdefault(replica, {})
        own[stage] = max(factor, own.get(stage, factor))
    return tuple(_largest(found[replica] for replica in sorted(found)))


def _largest(pipelines: Iterable[Mapping[int, float]]) -> list[Mapping[int, float]]:
    """Those that no other one is at least as slow as everywhere."""
    kept: list[Mapping[int, float]] = []
    for own in pipelines:
        if any(all(other.get(stage, 1.0) >= factor for stage, factor in own.items()) for other in kept):
            continue
        kept = [other for other in kept if any(own.get(stage, 1.0) < factor for stage, factor in other.items())]
        kept.append(own)
    return kept
