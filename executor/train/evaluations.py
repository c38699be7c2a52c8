"""Evaluations between the steps of a run: the current weights, on held-out data."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from executor.data.batches import Share
from executor.data.sources import Source
from executor.step.interpreter import Interpreter
from executor.train.evaluate import Evaluator
from executor.train.metrics import EvaluationRow
from executor.train.settings import EvaluationSettings
from plans.plan import Plan
from plans.program import Program

__all__ = ["Evaluations"]


class Evaluations:
    """Evaluates on this rank when it is time; all ranks of the plan have one.

    The forward has weights of its own, whole where the optimizer's level shards them, from the first evaluation on.

    Args:
        asked: when, and on what; its `batches` are stated.
        plan: that is trained.
        program: program of the plan.
        parameters: name -> whole initial array, for what training does not change.
        seed: seed of the order of the data.
        steps: steps of the run in all; after the last one there is always an evaluation.
        tell: called with the outcome, the same on every rank.
        timeout_s: after which a rank that waits for another one gives up.
    """

    def __init__(
        self, asked: EvaluationSettings, plan: Plan, program: Program, parameters: Mapping[str, Any], *,
        seed: int, steps: int, tell: Callable[[EvaluationRow], None], timeout_s: float,
    ) -> None:  # fmt: skip
        self._asked, self._plan, self._program, self._parameters = asked, plan, program, parameters
        self._source = Source(data=asked.data, seed=seed)
        self._steps, self._tell, self._timeout_s = steps, tell, timeout_s
        self._evaluator: Evaluator | None = None

    def after(self, done: int, training: Interpreter) -> None:
        """Evaluate if an evaluation is due after `done` steps."""
        if done % self._asked.every and done != self._steps:
            return
        began_s = time.perf_counter()
        if self._evaluator is None:
            self._evaluator = Evaluator(self._plan, self._parameters, training.device, self._timeout_s)
        self._evaluator.take(self._program, training)
        assert self._asked.batches is not None
        share = Share.of_rank(self._plan, training.rank)
        found = self._evaluator.run(self._source.batches(self._plan.graph, self._asked.batches, share=share))
        count, seconds = len(found.losses), time.perf_counter() - began_s
        self._tell(EvaluationRow(step=done, loss=found.loss, accuracy=found.accuracy, batches=count, seconds=seconds))

    def close(self) -> None:
        """Close the groups."""
        if self._evaluator is not None:
            self._evaluator.close()
