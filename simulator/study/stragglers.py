"""Slow ranks: the ranks that a share of all selects, and the part of a pipeline that each of them slows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plans.degrees import Degrees
from plans.errors import TwofoldError
from simulator.engine.link_change import read_ranks

__all__ = ["Ranks", "slow_pipelines", "slow_ranks", "some_ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks of a plan, as texts name them.

    Args:
        count: of all.
        stages: the ranks of every stage.
    """

    count: int
    stages: Sequence[Sequence[int]]

    @classmethod
    def of(cls, degrees: Degrees) -> Ranks:
        """The ranks of a configuration."""
        stages = [degrees.stage_ranks(rank) for rank in degrees.pipeline.placement]
        return cls(count=degrees.num_ranks, stages=stages)

    def named(self, text: str) -> tuple[int, ...]:
        """The ranks of "3", "0-3,8", "stage1", "stage0-2", or of a share such as "1/1000".

        Raises:
            ValueError: text of another form.
            TwofoldError: a stage that is not there, a share that cannot be.

        >>> Ranks(count=4, stages=[[0, 1], [2, 3]]).named("stage1")
        (2, 3)
        """
        part, slash, whole = text.partition("/")
        if slash:
            if not float(whole):
                raise ValueError(text)
            return some_ranks(float(part) / float(whole), self.count)
        if not text.startswith("stage"):
            return read_ranks(text)
        numbers = read_ranks(text.removeprefix("stage"))
        if absent := [number for number in numbers if not 0 <= number < len(self.stages)]:
            raise TwofoldError(f"{text}: the plan's stages are 0 to {len(self.stages) - 1}, not {absent[0]}")
        return tuple(dict.fromkeys(rank for number in numbers for rank in self.stages[number]))

    def given(
        self, texts: Iterable[str], option: str, what: str, looks_like: str
    ) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Text, ranks and value of each RANKS=VALUE.

        Args:
            texts: to be read.
            option: name of the option, for messages.
            what: the value is.
            looks_like: examples, for messages.

        Raises:
            TwofoldError: another text, a rank that is named twice.
        """
        found = set[int]()
        for text in texts:
            name, _, value = text.partition("=")
            try:
                named = self.named(name)
            except TwofoldError as error:
                raise TwofoldError(f"{option} {error}") from None
            except ValueError:
                raise TwofoldError(f"cannot read {option} {text}; write {option} {looks_like}") from None
            if again := found.intersection(named):
                raise TwofoldError(f"{option} {text}: rank {min(again)} already has a {what}; give one per rank")
            found.update(named)
            yield text, named, value


_FORMS = "3=1.2, 0-7=1.05, stage1=1.3 or 1/1000=1.1"


def slow_ranks(texts: Iterable[str], ranks: Ranks, option: str = "slow") -> dict[int, float]:
    """Rank -> factor of texts such as "3=1.2", "stage1=1.3" and "1/1000=1.1".

    Args:
        texts: each RANKS=FACTOR.
        ranks: ranks of the plan.
        option: name of the option, for messages.

    Raises:
        TwofoldError: another text, a rank that is named twice.

    >>> slow_ranks(["0-1=1.2", "1/2=1.1"], Ranks(count=4, stages=[]))
    Traceback (most recent call last):
        ...
    plans.errors.TwofoldError: slow 1/2=1.1: rank 1 already has a factor; give one per rank
    """
    found: dict[int, float] = {}
    for text, named, factor in ranks.given(texts, option, "factor", _FORMS):
        try:
            found |= dict.fromkeys(named, float(factor))
        except ValueError:
            raise TwofoldError(f"cannot read {option} {text}; write {option} {_FORMS}") from None
    return found


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
        raise TwofoldError(
            f"the share of all ranks must be above 0 and at most 1 (1/1000 is one in a thousand), not {share:g}"
        )
    count = max(1, round(share * num_ranks))
    found = np.random.default_rng(seed).choice(num_ranks, size=count, replace=False)
    return tuple(sorted(found.tolist()))


def slow_pipelines(degrees: Degrees, slowdown: Mapping[int, float]) -> tuple[Mapping[int, float], ...]:
    """The effect of slow ranks on pipelines: for each pipeline with one of them, pipeline rank -> factor.

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
    """Pipelines that are not dominated by a pipeline that is at least as slow everywhere."""
    kept: list[Mapping[int, float]] = []
    for own in pipelines:
        if any(all(other.get(stage, 1.0) >= factor for stage, factor in own.items()) for other in kept):
            continue
        kept = [other for other in kept if any(own.get(stage, 1.0) < factor for stage, factor in other.items())]
        kept.append(own)
    return kept
