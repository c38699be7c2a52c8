"""Consecutive operations of a compute stream, for a step simulated in time order (`simulator.forecast.walk`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from plans.step_parts import PartsTally
from simulator.forecast.body import COMPUTE, ISSUE, Op

__all__ = ["Run", "call_of"]


class Run:
    """Operations on the compute stream, one after the other.

    Args:
        parts: COMPUTE, and what the stream waits for with nothing else under way: such a part has no name.
    """

    __slots__ = ("_ahead", "_compute", "_dispatch", "_exposed", "_work", "parts")

    def __init__(self, parts: Sequence[Op]) -> None:
        self.parts = tuple(parts)
        self._dispatch = [0, *accumulate(op.dispatch_ps for op in parts)]
        self._work = [0, *accumulate(op.work_ps for op in parts)]
        self._compute = [0, *accumulate(op.work_ps if op.kind == COMPUTE else 0 for op in parts)]
        self._exposed = [(number, call_of(op), op.work_ps) for number, op in enumerate(parts) if op.kind == ISSUE]
        leads = [issued - done for issued, done in zip(self._dispatch[1:], self._work, strict=False)]
        self._ahead = list(accumulate(reversed(leads), max))[::-1]

    def ends(self, first: int, host: float, stream: float) -> tuple[float, float]:
        """The times at which host and stream are free after its parts from `first` on, if nothing slows them."""
        work, dispatch = self._work, self._dispatch
        ready = stream + work[-1] - work[first]
        late = host - dispatch[first] + self._ahead[first] + work[-1]
        return host + dispatch[-1] - dispatch[first], ready if ready > late else late

    def tally(self, tally: PartsTally, first: int, length_ps: float) -> None:
        """Count its parts from `first` on, which took some time without being slowed."""
        exposed = [(call, work_ps) for number, call, work_ps in self._exposed if number >= first]
        tally.add_run(self._compute[-1] - self._compute[first], exposed, length_ps)


def call_of(op: Op) -> str:
    """The call of a collective in a run."""
    assert op.payload is not None
    return op.payload.call
