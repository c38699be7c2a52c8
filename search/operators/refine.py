"""The cheapest solutions of one stage on one mesh, with as few redistributions priced as possible.

Redistributions start as lower bounds (`moves`). The best solution under bounds is priced. If it contained a bound, its
cost rises and the problem is solved again. An optimum without bounds is the optimum of the exact costs, because all
other solutions cost at least their bounds. The same holds for the neighbours: the best solution with each strategy of
each operator.

Elimination finds the best solution under bounds. If the graph is too densely connected for that, a dual bound (`dual`)
is raised first: the solutions that it finds are priced, so there is always one, and strategies that cannot be part of a
better one are removed, until elimination can solve the rest or nothing is left. If neither happens in time, the result
is the best solution so far, with a bound on its distance to the optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from search.operators.dual import Dual
from search.operators.eliminate import MinMarginals, best_assignment
from search.operators.problem import Problem

__all__ = ["NO_LOOK", "Answers", "Priced", "Question", "cheapest", "glance"]

MAX_CELLS = 4_000_000
"""Largest joined table, in cells, of a problem that is eliminated completely; all together may have four times that."""

LEFT_CELLS = 1_000_000
"""Cells of all joined tables up to which the rest of a problem is eliminated: about as long as some sweeps."""

MOST_SWEEPS = 300
"""Sweeps of a dual bound."""

_FEW_SWEEPS = 4
"""Sweeps of a first look."""

_DROP_EVERY = 6
"""Sweeps after which strategies are taken away."""

_NEIGHBOURHOOD = 0.02
"""Share by which neighbours may cost more than the best answer, where a dual bound is needed."""

_NEAR = (_NEIGHBOURHOOD, 0.005, 1e-3, 1e-9)
"""Such shares; the first counts with which elimination can end what is left."""

_EQUAL = 1e-9
"""Share by which an answer may exceed a bound that proves it."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Priced:
    """A strategy for every operator (their numbers), and the additive cost."""

    cost_s: float
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The best solution and its cheapest neighbours, and a lower bound on the cost of any solution.

    Args:
        found: the cheapest first; none if all exceed the limit.
        bound_s: no answer costs less; the first one's cost where that is proven to be the least.
    """

    found: list[Priced]
    bound_s: float


NO_LOOK = Answers(found=[], bound_s=0.0)
"""Nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The problem to solve.

    Args:
        problem: own costs and tensors; those may hold bounds.
        price: makes the problem exact for one answer; whether anything of it was a bound.
        start: any answer that is allowed.
    """

    problem: Problem
    price: Callable[[Sequence[int]], bool]
    start: tuple[int, ...]

    @property
    def is_small(self) -> bool:
        """Whether elimination can do it alone."""
        largest, every = self.problem.entangled()
        return largest <= MAX_CELLS and every <= 4 * MAX_CELLS

    def priced(self, values: tuple[int, ...]) -> Priced:
        """An answer with its exact cost."""
        self.price(values)
        return Priced(cost_s=self.problem.total(values), values=values)


def cheapest(
    question: Question, count: int, above_s: float = float("inf"), is_over: Callable[[], bool] = lambda: False
) -> Answers:
    """The best answer and its cheapest neighbours, `count` in all or fewer, the cheapest first.

    Args:
        question: whose problem becomes exact where that matters.
        count: of answers.
        above_s: answers that cost more are of no interest; what is left out may cost as little as that.
        is_over: whether time is up; then the best answer met so far is taken.

    Raises:
        TwofoldError: no combination of strategies is allowed.
    """
    if question.is_small:
        return _eliminated(question, question.problem, count, above_s, is_over)
    narrowed = _Narrowed(question)
    narrowed.run(MOST_SWEEPS, above_s, is_over)
    found, bound_s = {narrowed.best}, narrowed.bound_s
    if bound_s < above_s and (left := narrowed.left()) is not None:
        answers = _eliminated(question, left, count, narrowed.best.cost_s * (1 + _NEIGHBOURHOOD), is_over)
        found |= set(answers.found)
        bound_s = max(bound_s, answers.bound_s)
    kept = sorted(found)[:count] if min(found).cost_s <= above_s else []
    return Answers(found=kept, bound_s=min(bound_s, *(each.cost_s for each in kept[:1]), float("inf")))


def glance(question: Question) -> Answers:
    """A first answer with a bound, after a short time; `NO_LOOK` if solving completely takes no longer."""
    if question.is_small:
        return NO_LOOK
    narrowed = _Narrowed(question)
    narrowed.run(_FEW_SWEEPS, float("inf"), lambda: False)
    return Answers(found=[narrowed.best], bound_s=narrowed.bound_s)


class _Narrowed:
    """A question whose answers are bounded, and whose strategies become fewer; `best` is the best answer met."""

    def __init__(self, question: Question) -> None:
        self.question, self.dual = question, Dual(question.problem)
        self.best = question.priced(question.start)
        self.dual.rise()
        self.bound_s = self.dual.bound()

    def run(self, most_sweeps: int, above_s: float, is_over: Callable[[], bool]) -> None:
        """Raise the bound until the best answer is proven, or nothing costs less than `above_s`, or little is left."""
        for sweep in range(1, most_sweeps + 1):
            self.dual.sweep()
            met = [self.question.priced(self.dual.problem.numbers(values)) for values in self.dual.met]
            self.best = min(self.best, *met)
            self.dual.rise()
            self.bound_s = max(self.bound_s, self.dual.bound())
            if self.bound_s >= min(self.best.cost_s * (1 - _EQUAL), above_s) or is_over():
                return
            if sweep % _DROP_EVERY == 0:
                self.dual.drop(self.best.cost_s * (1 + _EQUAL))
                if self._fits(self.dual.problem.sizes):
                    return

    def _fits(self, sizes: Sequence[int]) -> bool:
        return self.dual.problem.entangled(sizes)[1] <= LEFT_CELLS

    def left(self) -> Problem | None:
        """A problem small enough for elimination, with all values that a better solution may need; None if there is
        none.
        """
        return self.dual.near((self.best.cost_s * (1 + share) for share in _NEAR), self._fits)


def _eliminated(
    question: Question, problem: Problem, count: int, above_s: float, is_over: Callable[[], bool]
) -> Answers:
    """The result of `cheapest` for a part of the problem that can be eliminated."""
    while True:
        total, values = best_assignment(problem.sizes, problem.tables(), problem.memory)
        if total > above_s:
            return Answers(found=[], bound_s=total)
        if not question.price(problem.numbers(values)):
            break
        if is_over():
            return Answers(found=[question.priced(problem.numbers(values))], bound_s=total)
    found: dict[tuple[int, ...], float] = {values: total}
    if problem.entangled()[1] > 2 * MAX_CELLS:  # no neighbours then: they take the tables of all operators at once
        count = 1
    while count > 1 and not is_over():
        marginals = MinMarginals(problem.sizes, problem.tables())
        found, bounded = {values: total}, False
        for cost_s, variable, value in marginals.in_order():
            if len(found) >= count or cost_s > above_s or is_over():
                break
            if any(known[variable] == value and cost_s >= known_s for known, known_s in found.items()):
                continue  # a known answer is the best with this value
            other = marginals.reached(variable, value)
            if other in found:
                continue
            bounded |= question.price(problem.numbers(other))
            found[other] = cost_s
        if not bounded:
            break
    priced = [Priced(cost_s=cost_s, values=problem.numbers(other)) for other, cost_s in found.items()]
    return Answers(found=sorted(priced), bound_s=total)
