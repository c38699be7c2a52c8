"""Chooses the search for a graph: over degrees if it is a transformer, otherwise operator by operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from costmodels import Machine
from plans.errors import TwofoldError
from plans.model.graph import Graph
from plans.model.transformer import recognise
from plans.optimizer import Optimizer
from search.devices import Pins

__all__ = ["pins_of", "stated_by_operator", "why_by_operators"]

_UNLESS_GIVEN: dict[str, Any] = {"num_stages": 1, "num_micro_batches": 1, "interleave": 1, "schedule": "1f1b"}


def stated_by_operator(**asked: Any) -> list[str]:
    """The arguments of `search.search` about stages of operators, but for defaults and what is left to the search.

    >>> stated_by_operator(num_stages=2, num_micro_batches=1, pinned=None, recompute=())
    ['num_stages']
    """
    return [name for name, value in asked.items() if value not in (None, (), {}, [], _UNLESS_GIVEN.get(name))]


def why_by_operators(graph: Graph, machine: Machine, stated: Sequence[str], *, full_batch: bool) -> str | None:
    """Why a graph is searched operator by operator; None where its degrees are searched.

    Args:
        graph: graph of the full batch.
        machine: that it is to run on.
        stated: the given arguments that only the search over operators supports.
        full_batch: whether every rank is fed the full batch.
    """
    if not machine.host_async:
        return f"machine {machine.name} computes on its hosts"
    if stated:
        return f"{' and '.join(stated)} {'is' if len(stated) == 1 else 'are'} given"
    if not full_batch:
        return "every rank is fed its own part of the batch"
    try:
        recognise(graph)
    except TwofoldError as error:
        return str(error)
    return None


def pins_of(optimizer: Optimizer, any_level: bool = False) -> Pins:
    """The degrees that an optimizer fixes: its level, unless that is 0 or any will do.

    >>> pins_of(Optimizer()).given, pins_of(Optimizer(parallel_level=2)).given
    ({}, {'zero': 2})
    """
    return Pins(zero=None if any_level else optimizer.parallel_level or None)
