"""The cheapest answers of one stage on one mesh, with as few redistributions priced as that takes.

Tables start with bounds where tensors are moved (`moves`). The best answer under bounds is priced; if it held a bound,
the tables have become dearer there, and the question is asked again. An answer without bounds that is still the best
is the best of all, since every other one costs at least what its bounds say. The same holds for the neighbours: for
every operator and each of its strategies the best answer with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from search.operators.additive import StageCosts
from search.operators.eliminate import MinMarginals, best_assignment

__all__ = ["Priced", "cheapest"]


MAX_CELLS = 4_000_000
"""Cells of a joined table beyond which operators are tied (`StageCosts.tie`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A strategy for every operator (their numbers), and the additive cost."""

    cost_s: float
    values: tuple[int, ...]


def cheapest(costs: StageCosts, count: int, above_s: float = float("inf")) -> list[Priced]:
    """The best answer and its cheapest neighbours, `count` in all or fewer, the cheapest first.

    Args:
        costs: whose tables become exact where that matters.
        count: of answers.
        above_s: answers that cost more are of no interest; what is left out may cost as little as that.

    Raises:
        TwofoldError: no combination of strategies is allowed.
    """
    largest, every = costs.entangled()
    if largest > MAX_CELLS and costs.tie():
        largest, every = costs.entangled()
    if every > 2 * MAX_CELLS:  # no neighbours then: they take the tables of all operators at once
        count = 1
    while True:
        total, values = best_assignment(costs.sizes, costs.tables(), costs.memory)
        if total > above_s:
            return []
        if not costs.price(values):
            break
    found: dict[tuple[int, ...], float] = {values: total}
    while count > 1:
        marginals = MinMarginals(costs.sizes, costs.tables())
        found, bounded = {values: total}, False
        for cost_s, variable, value in marginals.in_order():
            if len(found) >= count or cost_s > above_s:
                break
            if any(known[variable] == value and cost_s >= known_s for known, known_s in found.items()):
                continue  # a known answer is the best with this value
            other = marginals.reached(variable, value)
            if other in found:
                continue
            bounded |= costs.price(other)
            found[other] = cost_s
        if not bounded:
            break
    return [Priced(cost_s=cost_s, values=other) for other, cost_s in sorted(found.items(), key=lambda each: each[::-1])]
