"""The step of every pipeline rank as priced bodies, and the costs of the pipeline.

`RankBodies` comes from a lowered program (`simulator.forecast.program`) or from symbolic bodies
(`simulator.forecast.symbolic`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from plans.errors import TwofoldError
from plans.schedules import Schedule
from plans.schedules.variants import VARIANTS
from plans.timeline import PS_PER_S
from simulator.channels import PairRates
from simulator.forecast.body import COMPUTE, ISSUE, SEND, WAIT, Op, Row, opened, rests, row, steps_of
from simulator.forecast.clock_map import NEVER, MaxPlus
from simulator.forecast.columns import PipelineCosts
from simulator.forecast.columns.structure import CHANNELS
from simulator.forecast.overlap import slowed
from simulator.lines import Payload

__all__ = ["RankBodies", "Transfers", "pipeline_costs"]

Ops = tuple[Op, ...]

_OPENING = (0, "F.first")
"""The first forward of a step, next to what opens the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """The traffic over one boundary of stages, in one direction.

    Args:
        work_ps: on the links, of all pairs of ranks at once.
        alone_ps: likewise of one pair.
        receive_dispatch_ps: host time to post the receive.
        wait_dispatch_ps: host time of the WAIT for the send.
    """

    work_ps: int = 0
    alone_ps: int = 0
    receive_dispatch_ps: int = 0
    wait_dispatch_ps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSeconds:
    """The time of compute and of the host in a body or a step.

    Args:
        kernels_s: compute by its class; that of the body that closes a step is "update".
        host_s: of the host.
    """

    kernels_s: Mapping[str, float]
    host_s: float

    @property
    def compute_s(self) -> float:
        """Compute of all classes."""
        return sum(self.kernels_s.values())


@dataclass(frozen=True, kw_only=True, eq=False)
class RankBodies:
    """The bodies of the ranks of one pipeline rank; all of them do the same.

    Args:
        begin: what opens a step: gathers of weights.
        actions: (number of the chunk on the rank, variant of its action) -> body.
        end: what closes a step, without the waits for what was sent.
    """

    begin: Ops = ()
    actions: Mapping[tuple[int, str], Ops] = field(default_factory=dict)
    end: Ops = ()
    _issued: dict[tuple[int, str], tuple[Mapping[tuple[str, Payload], int], int]] = field(default_factory=dict)
    _seconds: dict[tuple[int, str], WorkSeconds] = field(default_factory=dict)
    _of_steps: dict[tuple[object, ...], WorkSeconds] = field(default_factory=dict)
    _rows: dict[tuple[int, str], dict[str, Row]] = field(default_factory=dict)
    _slowed: dict[PairRates, RankBodies] = field(default_factory=dict)

    def action(self, number: int, variant: str) -> Ops:
        """The body of an action; if the variant has none, that of its kind."""
        return self.actions.get((number, variant)) or self.actions.get((number, variant[0]), ())

    def issued(self, number: int, variant: str) -> tuple[Mapping[tuple[str, Payload], int], int]:
        """The collectives of an action, or of "begin" and "end": how many of each channel and payload, and the work in
        picoseconds of those that the body does not wait for."""
        key = number, variant
        if key not in self._issued:
            ops = self._body(number, variant)
            waited = {op.token for op in ops if op.kind == WAIT}
            own = [op for op in ops if op.kind == ISSUE]
            kinds = Counter((op.channel, op.payload) for op in own if op.payload is not None)
            self._issued[key] = kinds, sum(op.work_ps for op in own if op.token not in waited)
        return self._issued[key]

    def _body(self, number: int, variant: str) -> Ops:
        """The body of an action, or of "begin" and "end"."""
        named = {"begin": self.begin, "end": self.end}
        return named[variant] if variant in named else self.action(number, variant)

    def seconds(self, counts: Mapping[tuple[int, str], int]) -> WorkSeconds:
        """The work of a step; `counts` as of `counts_of_variants`."""
        key = tuple(counts.items())
        if key not in self._of_steps:
            host_s, kernels_s = 0.0, dict[str, float]()
            for action, count in (*key, ((-1, "begin"), 1), ((-1, "end"), 1)):
                own = self._seconds_of(*action)
                host_s += count * own.host_s
                for name, seconds in own.kernels_s.items():
                    kernels_s[name] = kernels_s.get(name, 0.0) + count * seconds
            self._of_steps[key] = WorkSeconds(kernels_s=kernels_s, host_s=host_s)
        return self._of_steps[key]

    def _seconds_of(self, number: int, variant: str) -> WorkSeconds:
        key = number, variant
        if key not in self._seconds:
            ops, kernels_s = self._body(number, variant), dict[str, float]()
            for op in ops:
                if op.kind == COMPUTE:
                    name = "update" if variant == "end" else op.name
                    kernels_s[name] = kernels_s.get(name, 0.0) + op.work_ps / PS_PER_S
            host_s = sum(op.dispatch_ps for op in ops) / PS_PER_S
            self._seconds[key] = WorkSeconds(kernels_s=kernels_s, host_s=host_s)
        return self._seconds[key]

    def slowed(self, rates: PairRates | None, arrival_ps: int = 0) -> RankBodies:
        """The same rank with the work of operations under mutual slowdown.

        The first forward overlaps with the gathers of the opening block that have not finished, and the optimizer
        updates overlap with the reductions that the last backward issued. All but the opening block and the first
        forward is the same for any arrival.

        Args:
            rates: of pairs; None: overlap costs nothing.
            arrival_ps: from the start of the step to the arrival of the first tensor.
        """
        if rates is None:
            return self
        if rates not in self._slowed:
            self._slowed[rates] = self._slowed_after_arrival(rates)
        later = self._slowed[rates]
        first = self.actions.get(_OPENING)
        if first is None:
            return later
        begin, first = _slowed_together(self.begin, first, rates, arrival_ps)
        actions = {key: first if key == _OPENING else ops for key, ops in later.actions.items()}
        return RankBodies(begin=begin, actions=actions, end=later.end, _rows=later._rows)

    def _slowed_after_arrival(self, rates: PairRates) -> RankBodies:
        """What does not depend on the arrival of the first tensor, slowed; the first forward as it is."""
        end, closing = self.end, [key for key in ((0, "B.last"), (0, "W.last")) if key in self.actions]
        together = {_OPENING, *closing}
        actions = {key: slowed(ops, rates) if key not in together else ops for key, ops in self.actions.items()}
        for key in closing:
            actions[key], end = _slowed_together(actions[key], self.end, rates)
        return RankBodies(begin=slowed(self.begin, rates), actions=actions, end=end)

    def changed(self, change: Callable[[str, Op], Op]) -> RankBodies:
        """The same with other operations: what `change` makes of each, given "begin", "end" or the action's variant."""
        return RankBodies(
            begin=tuple(change("begin", op) for op in self.begin),
            actions={key: tuple(change(key[1], op) for op in ops) for key, ops in self.actions.items()},
            end=tuple(change("end", op) for op in self.end),
        )

    @cached_property
    def _kernels(self) -> Counter[tuple[str, int]]:
        """(class, picoseconds) of the kernels of all actions -> how many."""
        ops = (op for own in self.actions.values() for op in own)
        return Counter((op.name, op.work_ps) for op in ops if op.kind == COMPUTE)

    def holds_ps(self, rates: PairRates, work_ps: int) -> int:
        """The mean extra time of a transfer during kernels of the actions."""
        total_ps, longer_ps = 0, 0.0
        for (name, kernel_ps), count in self._kernels.items():
            _, rate = rates(name, kernel_ps, "transfer", work_ps)
            total_ps += count * kernel_ps
            longer_ps += count * kernel_ps * work_ps * (1 / rate - 1)
        return round(longer_ps / total_ps) if total_ps else 0

    @cached_property
    def maps(self) -> RankMaps:
        """The clock maps of the bodies."""
        return RankMaps(self)


def _slowed_together(first: Ops, then: Ops, rates: PairRates, arrival_ps: int = 0) -> tuple[Ops, Ops]:
    """Two bodies that follow each other, slowed as one."""
    both = slowed((*first, *then), rates, arrival_ps)
    return both[: len(first)], both[len(first) :]


def pipeline_costs(
    schedule: Schedule,
    ranks: Sequence[RankBodies],
    transfers: Mapping[tuple[int, str], Transfers],
    *,
    posts_ahead: bool = True,
) -> PipelineCosts:
    """The costs of a pipeline.

    Args:
        schedule: schedule of the pipeline.
        ranks: per pipeline rank.
        transfers: (sending stage, "F" or "B") -> what it sends to the next stage, or the gradient to the one before.
        posts_ahead: whether receives are posted one action ahead.

    Raises:
        TwofoldError: more channels that outlast an action than the evaluator has clocks for.
    """
    maps = [own.maps for own in ranks]
    number_of = {
        stage: number for rank in range(schedule.num_ranks) for number, stage in enumerate(schedule.stages_of(rank))
    }
    channels = sorted({name for own in maps for name in own.channels})
    if len(channels) > len(CHANNELS):
        raise TwofoldError(
            f"communication outlasts its action on {len(channels)} channels ({', '.join(channels)}); forecasts have "
            f"clocks for {len(CHANNELS)}: simulate the plan instead"
        )
    clock_of = dict(zip(channels, CHANNELS, strict=False))
    stages, placement = range(schedule.num_stages), schedule.placement
    used = {part for own in ranks for _, name in own.actions for part in (name, name[0])}
    none = Transfers()
    return PipelineCosts(
        maps={
            name: MaxPlus.stack([maps[placement[stage]].action(number_of[stage], name, clock_of) for stage in stages])
            for name in VARIANTS
            if name in used
        },
        transfer_ps={way: np.array([transfers.get((stage, way), none).work_ps for stage in stages]) for way in "FB"},
        receive_dispatch_ps={
            way: np.array(
                [
                    transfers.get((stage - 1 if way == "F" else stage + 1, way), none).receive_dispatch_ps
                    for stage in stages
                ]
            )
            for way in "FB"
        },
        begin=MaxPlus.stack([own.begin(clock_of) for own in maps]),
        end=MaxPlus.stack([own.end(clock_of) for own in maps]),
        wait_dispatch_ps=np.full(
            schedule.num_ranks,
            max((transfer.wait_dispatch_ps for transfer in transfers.values()), default=0),
            dtype=np.int64,
        ),
        posts_ahead=posts_ahead,
    )


class RankMaps:
    """The maps of one rank's bodies, and the channels on which communication outlasts them."""

    def __init__(self, bodies: RankBodies) -> None:
        self._actions: dict[tuple[object, ...], MaxPlus] = {}
        self._opened = opened(bodies.begin)
        self._last_opened = steps_of(bodies.begin).last
        self._end = steps_of(bodies.end)
        self._rests = rests(self._end)
        self._rows = {key: self._of(bodies, key) for key in bodies.actions}
        self.channels = {
            clock.removeprefix("channel:")
            for rows in self._rows.values()
            for clock, coefficients in rows.items()
            if clock.startswith("channel:") and not _is_behind(coefficients, rows["stream"])
        }
        self.channels |= {  # what opens the step outlasts it too
            channel for channel in self._last_opened
            if any(f"channel:{channel}" in rows["stream"] for (_, name), rows in self._rows.items() if name[0] == "F")
        }  # fmt: skip

    def _of(self, bodies: RankBodies, key: tuple[int, str]) -> dict[str, Row]:
        """The rows of an action, made once for all arrivals of the first tensor but those of the first forward."""
        known = bodies._rows if key != _OPENING else {}
        if key not in known:
            known[key] = self._made(bodies.actions[key], is_last=key[1].endswith(".last"))
        rows = known[key]
        return {clock: self._from_start(coefficients) for clock, coefficients in rows.items()}

    def _made(self, ops: Ops, *, is_last: bool) -> dict[str, Row]:
        steps = steps_of(ops)
        rows = {"stream": row(steps, after="stream"), "host": row(steps, after="host")}
        if any(kind == SEND for kind, *_ in steps.backwards):
            rows["sent"] = row(steps, after="sent")
        for channel, token in steps.last.items():
            rows[f"channel:{channel}"] = row(steps, ends={token: 0})
        if is_last:
            issued = {token for kind, _, _, _, token, _ in steps.backwards if kind == ISSUE}
            if ends := {token: rest for token, rest in self._rests.items() if token in issued}:
                rows["final"] = row(steps, ends=ends)
        return rows

    def _from_start(self, coefficients: Row) -> Row:
        """Tokens of the opening block, known from the start of the step."""
        if not any(clock.startswith("token:") for clock in coefficients):
            return coefficients
        found: dict[str, int] = {}
        for clock, constant in coefficients.items():
            if clock.startswith("token:"):
                clock, constant = "start", constant + self._opened.ends_ps[clock.removeprefix("token:")]
            found[clock] = max(found.get(clock, NEVER), constant)
        return found

    def stream(self, number: int, name: str) -> Row:
        """The end of an action on the stream, by what the action waits for."""
        rows = self._rows.get((number, name)) or self._rows.get((number, name[0])) or {}
        return rows.get("stream", {})

    def first_sent_ps(self, number: int, arrival_ps: int) -> int:
        """The earliest time, from the start of the step, at which the first forward of a chunk sends its output.

        Args:
            number: of the chunk on the rank.
            arrival_ps: of its input.
        """
        own = self._opened
        begun = {"start": 0, "stream": own.stream_ps, "host": own.host_ps, "arrival": arrival_ps}
        begun |= {f"channel:{channel}": own.ends_ps[token] for channel, token in self._last_opened.items()}
        rows = self._rows.get((number, "F.first")) or self._rows.get((number, "F")) or {}
        sent = rows.get("sent") or rows.get("stream") or {}
        return max((begun.get(clock, 0) + constant for clock, constant in sent.items()), default=arrival_ps)

    def action(self, number: int, name: str, clock_of: Mapping[str, str]) -> MaxPlus:
        """The map of an action; the same as its kind's where the variant has no body of its own."""
        key = number, name, *clock_of.items()
        if key not in self._actions:
            self._actions[key] = self._action(number, name, clock_of)
        return self._actions[key]

    def _action(self, number: int, name: str, clock_of: Mapping[str, str]) -> MaxPlus:
        rows = self._rows.get((number, name)) or self._rows.get((number, name[0]))
        if rows is None:
            return MaxPlus.identity()
        return MaxPlus(rows=_renamed(rows, clock_of))

    def begin(self, clock_of: Mapping[str, str]) -> MaxPlus:
        """The map from the start of the step to the first action."""
        own = self._opened
        rows = {"stream": {"start": own.stream_ps}, "host": {"start": own.host_ps}}
        for channel, clock in clock_of.items():
            last = self._last_opened.get(channel)
            rows[clock] = {"start": 0 if last is None else own.ends_ps[last]}
        return MaxPlus(rows=rows)

    def end(self, clock_of: Mapping[str, str]) -> MaxPlus:
        """The map from the end of the last action. Collectives of the last backwards that it waits for are in their
        "final"; its own go after everything on their channel.
        """
        rows = {
            clock: {
                before: constant
                for before, constant in row(self._end, after=clock).items()
                if not before.startswith("token:")
            }
            for clock in ("stream", "host")
        }
        return MaxPlus(rows=_renamed(rows, clock_of))


def _is_behind(coefficients: Row, stream: Row) -> bool:
    """Whether a clock is never later than the stream."""
    return all(stream.get(clock, NEVER) >= constant for clock, constant in coefficients.items())


def _renamed(rows: Mapping[str, Row], clock_of: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Channels by the clocks of the evaluator; those that never outlast an action are left out."""

    def name_of(clock: str) -> str | None:
        if not clock.startswith("channel:"):
            return clock
        return clock_of.get(clock.removeprefix("channel:"))

    return {
        name: {
            before: constant for clock, constant in coefficients.items() if (before := name_of(clock)) is not None
        }
        for after, coefficients in rows.items() if (name := name_of(after)) is not None
    }  # fmt: skip
