"""The composition of the critical path of a forecast step.

The length of a step is the longest of many paths, each a sum of times. If all times of one kind grow by a small share,
the step grows by that share of their time on the longest path. So every kind is made slightly longer and slightly
shorter, and the step is forecast again. Where several paths are equally long, the result is their mean. Communication
counts where the step waits for it and where it slows compute down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plans.degrees import Degrees
from search.candidate import Candidate
from search.devices.problem import Problem
from simulator.estimate.action import ClockMap
from simulator.estimate.case import PipelineForecast, RankKinds
from simulator.estimate.chunk import Chunk
from simulator.estimate.estimate import chunk_costs, chunks_of
from simulator.estimate.layout import LayoutCosts, is_split
from simulator.forecast.body import COMPUTE, ISSUE, Op
from simulator.forecast.predict import step_forecast, step_machine
from simulator.forecast.turns import program_of, simulated
from simulator.timeline.critical_path import critical_path

__all__ = ["critical_path_s"]

_SHARE = 1e-4

_PROGRAM_SHARE = 1e-3
"""The parts of operations of a program, whose times are integer picoseconds."""

_NOTHING_S = 1e-9

_PS_PER_S = 1e12

_FORWARD, _BACKWARD, _TRANSFERS, _UPDATE = (
    "forward compute", "backward compute", "transfers between stages", "gradients and optimizer after the last action",
)  # fmt: skip


def critical_path_s(problem: Problem, found: Candidate) -> dict[str, float]:
    """Seconds of the step of a configuration by kind, the largest first; together they are the step.

    Raises:
        TwofoldError: a configuration that cannot be.

    >>> from costmodels import Machine
    >>> from plans.model.transformer import transformer_config
    >>> from search.devices import Pins, solve
    >>> asked = Problem(config=transformer_config("llama-3-8b", num_layers=4), machine=Machine.load("h100-sxm-x8"),
    ...                 num_devices=2, global_batch=2, pins=Pins(pp=2, schedule="1f1b"))
    >>> list(critical_path_s(asked, solve(asked).best))[0]
    'backward compute'
    """
    if problem.stack.runs_programs:
        spent, whole_s = _of_program(problem, found.degrees)
    else:
        spent, whole_s = _of_estimate(problem, found.degrees)
    # what contends may end a step sooner by taking longer: it is not on the path
    spent = {kind: max(0.0, seconds) for kind, seconds in spent.items()}
    total_s = sum(spent.values())
    if total_s > whole_s:
        spent = {kind: seconds * whole_s / total_s for kind, seconds in spent.items()}
    spent["host"] = max(0.0, whole_s - total_s) + problem.stack.step_s
    spent["the slowest of many devices"] = found.forecast.step_s - whole_s - problem.stack.step_s
    return dict(
        sorted(((kind, s) for kind, s in spent.items() if s > _NOTHING_S), key=lambda each: (-each[1], each[0]))
    )


def _of_program(problem: Problem, degrees: Degrees) -> tuple[dict[str, float], float]:
    """Seconds by kind, and the pace, of the lowered program."""
    if degrees.takes_turns:
        return _of_turns(problem, degrees)
    step = step_forecast(problem.config, degrees, step_machine(problem.config, degrees, problem.machine))

    def pace_s(kind: str, share: float) -> float:
        def longer(body: str, op: Op) -> Op:
            return op._replace(work_ps=round(op.work_ps * (1.0 + share))) if _kind_of(body, op) == kind else op

        return step.changed_pace_ps(longer, 1.0 + share * (kind == _TRANSFERS)) / _PS_PER_S

    bodies = step.bodies
    seen = {_kind_of(name, op) for own in bodies for (_, name), ops in own.actions.items() for op in ops}
    kinds = sorted((seen | {_UPDATE, _TRANSFERS}) - {""})
    return (
        {kind: (pace_s(kind, _PROGRAM_SHARE) - pace_s(kind, -_PROGRAM_SHARE)) / (2 * _PROGRAM_SHARE) for kind in kinds},
        step.pace_ps() / _PS_PER_S,
    )


def _of_turns(problem: Problem, degrees: Degrees) -> tuple[dict[str, float], float]:
    """Likewise of a step in which slices or pairs take turns: the path of its timeline."""
    program = program_of(problem.config, degrees)
    timeline = simulated(program, problem.machine)
    spent: dict[str, float] = {}
    for span in critical_path(timeline, program).spans:
        if span.stream == "host":  # told as what the others leave
            continue
        kind = _TRANSFERS if span.kind == "transfer" else span.kind
        if span.stream == "compute":
            body = span.id.partition("/")[0].lstrip("0123456789")
            kind = _UPDATE if body == "end" else _FORWARD if body[0] in "bF" else _BACKWARD
        spent[kind] = spent.get(kind, 0.0) + (span.end_ps - span.start_ps) / _PS_PER_S
    return spent, timeline.step_interval_s


def _kind_of(body: str, op: Op) -> str:
    """The body of an operation: "begin", "end", or an action by its variant."""
    if op.kind == ISSUE:
        return op.name
    if op.kind != COMPUTE:
        return ""
    return _UPDATE if body == "end" else _FORWARD if body[0] in "bF" else _BACKWARD


def _of_estimate(problem: Problem, degrees: Degrees) -> tuple[dict[str, float], float]:
    """Seconds by kind, and the end of the pipeline, of software whose programs are not known."""
    split = is_split(degrees.pipeline)
    costs = chunk_costs(problem.config, degrees, problem.machine, problem.stack, split, lambda each: {})
    chunks = chunks_of(problem.config, degrees)
    layout, ranks = LayoutCosts(costs), RankKinds.of(chunks, degrees.pipeline)

    def end_s(kind: str = "", share: float = 0.0) -> float:
        longer = _Longer(kind=kind, factor=share, layout=layout)
        return _LongerForecast(layout=longer, degrees=degrees, chunks=chunks, ranks=ranks).end_ps() / _PS_PER_S  # type: ignore[arg-type]

    calls = {call for chunk in chunks for action in layout.actions(chunk).values() for call in action.exposed_ps}
    kinds = (_FORWARD, _BACKWARD, *sorted(calls), _TRANSFERS, _UPDATE)
    spent = {kind: (end_s(kind, _SHARE) - end_s(kind, -_SHARE)) / (2 * _SHARE) for kind in kinds}
    return spent, end_s()


@dataclass(frozen=True)
class _Longer:
    """Costs of a layout whose times of one kind are longer by a factor."""

    kind: str
    factor: float
    layout: LayoutCosts

    def __getattr__(self, name: str) -> object:
        return getattr(self.layout, name)

    def actions(self, chunk: Chunk) -> Mapping[str, ClockMap]:
        return {name: self._longer(name, action) for name, action in self.layout.actions(chunk).items()}

    def update(self, chunks: tuple[Chunk, ...]) -> ClockMap:
        found = self.layout.update(chunks)
        return _grown(found, found.work_ps * self.factor) if self.kind == _UPDATE else found

    def _longer(self, name: str, each: ClockMap) -> ClockMap:
        if self.kind in (_FORWARD, _BACKWARD):
            mine = name.startswith("F") is (self.kind == _FORWARD)
            return _grown(each, each.compute_ps * self.factor) if mine else each
        return _grown(each, each.exposed_ps.get(self.kind, 0.0) * self.factor)


def _grown(clock_map: ClockMap, by_ps: float) -> ClockMap:
    return (
        clock_map._replace(work_ps=clock_map.work_ps + by_ps, cold_start_ps=clock_map.cold_start_ps + by_ps)
        if by_ps
        else clock_map
    )


class _LongerForecast(PipelineForecast):
    """With transfers that are longer by a factor, where those are the kind."""

    def transfers(self) -> tuple[Mapping[tuple[int, int], float], int]:
        times, dispatch = super().transfers()
        longer = self.layout
        assert isinstance(longer, _Longer)
        if longer.kind == _TRANSFERS:
            times = {pair: time * (1.0 + longer.factor) for pair, time in times.items()}
        return times, dispatch
