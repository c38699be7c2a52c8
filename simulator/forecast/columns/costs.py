"""Costs of the actions of a pipeline, for one configuration or a batch, as columns that the evaluator reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from plans.errors import TwofoldError
from plans.schedules import Schedule
from plans.schedules.variants import VARIANTS
from simulator.forecast.clock_map import NEVER, MaxPlus, Times
from simulator.forecast.columns.structure import CHANNELS, COEFFICIENTS

__all__ = ["Columns", "PipelineCosts"]

Ints = npt.NDArray[np.int64]

_CLOCKS = {"stream", "host", "sent", *CHANNELS, "final"}
_BEFORE = {"stream", "host", "arrival", "start", *CHANNELS}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineCosts:
    """The times of a pipeline as integer picoseconds. All may have leading batch axes, which are broadcast.

    Args:
        maps: effect of an action on the clocks of its rank, constants of shape (*batch, num_stages): "F" and what the
            schedule needs of "B", "I", "W"; "F.first" for the first forward of a stage in a step, "B.last" and "W.last"
            for its last backward, where they differ.

            Clocks before: "stream" and "host" (when the action begins to be issued), "arrival" of the tensor that it
            receives, "start" of the step, and of `CHANNELS`: when what went over a communication channel is over.
            Clocks afterwards: "stream", "host" (only later by its dispatch), "sent": when what it sends is posted (by
            default at its end), `CHANNELS`, and for the last backwards "final": the step is not over before.
        transfer_ps: (*batch, num_stages) "F": of what stage s sends to s + 1, "B": of the gradient that it sends to
            s - 1. Stages of one rank need no transfer.
        receive_dispatch_ps: (*batch, num_stages) "F", "B": host time of posting the receive of stage s.
        begin: constants (*batch, num_ranks): the clocks "stream", "host" and `CHANNELS` from "start".
        end: constants (*batch, num_ranks): "stream" and "host" from "stream", "host", `CHANNELS`, "start".
        wait_dispatch_ps: (*batch, num_ranks) host time of the WAIT for one send (`plans.schedules.arrivals`).
        posts_ahead: whether receives are posted one action ahead, or as the action begins (`Plan.receives`); of the
            full batch.
    """

    maps: Mapping[str, MaxPlus]
    transfer_ps: Mapping[str, Times] = field(default_factory=dict)
    receive_dispatch_ps: Mapping[str, Times] = field(default_factory=dict)
    begin: MaxPlus | None = None
    end: MaxPlus | None = None
    wait_dispatch_ps: Times = 0
    posts_ahead: bool = True

    def __post_init__(self) -> None:
        for name, max_plus in self.maps.items():
            if name not in VARIANTS:
                raise TwofoldError(f"unknown action {name!r}; choose from {', '.join(VARIANTS)}")
            befores = {before for clock in max_plus.clocks for before in max_plus.row(clock)}
            if not set(max_plus.clocks) <= _CLOCKS or not befores <= _BEFORE:
                raise TwofoldError(
                    f"the map of {name!r} makes the clocks {sorted(max_plus.clocks)} of {sorted(befores)}; they may be "
                    f"{sorted(_CLOCKS)} of {sorted(_BEFORE)}: drop tokens that it has waited for"
                )
        for what, table in (("transfer_ps", self.transfer_ps), ("receive_dispatch_ps", self.receive_dispatch_ps)):
            if not set(table) <= {"F", "B"}:
                raise TwofoldError(f'{what} has the entries {sorted(table)}; they may be "F" and "B"')
            if any(np.any(np.asarray(times) < 0) for times in table.values()):
                raise TwofoldError(f"{what} has negative times")

    @property
    def on_channel(self) -> tuple[frozenset[str], ...]:
        """For each used channel the variants that move it or wait for it."""
        found = [
            frozenset(
                name for name in VARIANTS
                if (own := self.of(name)) is not None
                and (channel in own.clocks or any(channel in own.row(clock) for clock in own.clocks))
            )
            for channel in CHANNELS
        ]  # fmt: skip
        while found and not found[-1]:
            found.pop()
        return tuple(found)

    @property
    def has_final(self) -> bool:
        """Whether a last backward determines when the step may end."""
        return any((own := self.of(name)) is not None and "final" in own.clocks for name in ("B.last", "W.last"))

    @property
    def structure_kind(self) -> tuple[tuple[frozenset[str], ...], bool, bool]:
        """The key that determines the events of a schedule and their dependencies: see `structure_of`."""
        return self.on_channel, self.has_final, self.posts_ahead

    def of(self, variant: str) -> MaxPlus | None:
        """The map of a variant; if it has none, that of its kind."""
        return self.maps.get(variant, self.maps.get(variant[0]))

    def batch_shape(self, num_stages: int, num_ranks: int, others: Sequence[Times]) -> tuple[int, ...]:
        """The common batch axes; `others` are (*batch, num_ranks) too.

        Raises:
            TwofoldError: the shapes do not go together.
        """
        by_stage = {
            np.shape(constant)
            for own in self.maps.values() for row in own.rows.values() for constant in row.values()
        }  # fmt: skip
        by_stage |= {np.shape(times) for times in (*self.transfer_ps.values(), *self.receive_dispatch_ps.values())}
        by_rank = {
            np.shape(constant)
            for own in (self.begin, self.end) if own is not None for row in own.rows.values()
            for constant in row.values()
        }  # fmt: skip
        by_rank |= {np.shape(times) for times in (self.wait_dispatch_ps, *others)}
        try:
            sizes = [num_stages] * len(by_stage) + [num_ranks] * len(by_rank)
            shapes = [
                np.broadcast_shapes(shape, (size,)) for shape, size in zip((*by_stage, *by_rank), sizes, strict=True)
            ]
            if any(shape[-1] != size for shape, size in zip(shapes, sizes, strict=True)):
                raise ValueError
            return np.broadcast_shapes((), *(shape[:-1] for shape in shapes))
        except ValueError:
            found = sorted(by_stage | by_rank, key=str)
            raise TwofoldError(
                f"the times of {num_stages} stages on {num_ranks} ranks have the shapes {found}; they must be "
                "(*batch, stages), or (*batch, ranks) for begin, end, waits and start"
            ) from None


class Columns:
    """The costs of a chunk of the batch in the layout of the evaluator: classes (variant, stage) down, batch across.

    Attributes:
        table: ((coefficients * variants * stages) + 1, batch): what `Structure.select` points into; the last is NEVER.
        busy: (classes, batch) stream -> stream.
        dispatch: (classes, batch) host -> host.
        from_host, from_start: clock -> (classes, batch) constants on the host and on the start of the step.
        transfer: (classes, batch) of what the action sends.
        receive: (classes, batch) dispatch of the receive of an action's tensor.
        starting: for each class whether it depends on the start.
    """

    def __init__(self, costs: PipelineCosts, schedule: Schedule, expand: Expand) -> None:
        num_stages, num_classes = schedule.num_stages, len(VARIANTS) * schedule.num_stages
        batch = expand.count
        table = np.full((len(COEFFICIENTS) + 1, num_classes, batch), NEVER, dtype=np.int64)
        self.dispatch = np.zeros((num_classes, batch), dtype=np.int64)
        self.transfer = np.zeros((num_classes, batch), dtype=np.int64)
        self.receive = np.zeros((num_classes, batch), dtype=np.int64)
        clocks = ("stream", "sent", *CHANNELS, "final")
        self.from_host = {clock: np.full((num_classes, batch), NEVER, dtype=np.int64) for clock in clocks}
        self.from_start = {clock: np.full((num_classes, batch), NEVER, dtype=np.int64) for clock in clocks}
        self.starting = np.zeros(num_classes, dtype=bool)
        clock_arrays = [*self.from_host.values(), *self.from_start.values()]
        used = set(np.unique(schedule.table.kind).tolist())
        for number, variant in enumerate(VARIANTS):
            own = costs.of(variant)
            if own is None:
                if number < 4 and number in used:
                    raise TwofoldError(f"schedule {schedule.name!r} has the action {variant!r}, but its map is missing")
                continue
            rows = slice(number * num_stages, (number + 1) * num_stages)
            if variant not in costs.maps:  # as its kind
                base = VARIANTS.index(variant[0]) * num_stages
                like = slice(base, base + num_stages)
                for array in (self.dispatch, self.transfer, self.receive, *clock_arrays):
                    array[rows] = array[like]
                table[:, rows] = table[:, like]
                self.starting[rows] = self.starting[like]
                continue
            own = own if "sent" in own.rows else own.mark("sent")
            for (after, before), place in zip(COEFFICIENTS, table, strict=False):
                if after in own.rows and before in own.row(after):
                    place[rows] = expand(own.row(after)[before], num_stages)
            for clock in clocks:
                if clock in own.rows:
                    row = own.row(clock)
                    if "host" in row:
                        self.from_host[clock][rows] = expand(row["host"], num_stages)
                    if "start" in row:
                        self.from_start[clock][rows] = expand(row["start"], num_stages)
                        self.starting[rows] = True
            host = dict(own.row("host"))
            self.dispatch[rows] = expand(host.pop("host", 0), num_stages)
            if any(np.any(np.asarray(constant) > NEVER // 2) for constant in host.values()):
                raise TwofoldError(
                    f"in the map of {variant!r} the host waits for {sorted(host)}; ahead of its stream it only issues"
                )
            way = {"F": "F", "B": "B", "I": "B"}.get(variant[0])
            if way is not None:
                self.transfer[rows] = expand(costs.transfer_ps.get(way, 0), num_stages)
                self.receive[rows] = expand(costs.receive_dispatch_ps.get(way, 0), num_stages)
        self.busy = table[0].copy()
        placement = np.array(schedule.placement)
        behind, ahead = np.append(placement[1:], -1), np.append(-1, placement[:-1])
        for number, variant in enumerate(VARIANTS):
            other = behind if variant[0] == "F" else ahead
            self.transfer[number * num_stages : (number + 1) * num_stages][other == placement] = 0
        table[COEFFICIENTS.index(("transfer", ""))] = self.transfer
        sent = [number for number, (after, _) in enumerate(COEFFICIENTS) if after == "sent"]
        table[sent] += self.transfer
        self.table = table.reshape(-1, batch)[: len(COEFFICIENTS) * num_classes + 1]


class Expand:
    """Brings times of shape (*batch, size) to (size, part of the flattened batch)."""

    def __init__(self, batch_shape: tuple[int, ...], chosen: npt.NDArray[np.int64]) -> None:
        self._batch_shape = batch_shape
        self._chosen = chosen
        self.count = len(chosen)

    def __call__(self, times: Times, size: int) -> Ints:
        """The columns of all actions."""
        array = np.asarray(times, dtype=np.int64)
        if array.shape == (size,) and self.count == 1:
            return array[:, None]
        if array.ndim <= 1:
            return np.broadcast_to(array.reshape(-1, 1), (size, self.count))
        whole = np.broadcast_to(array, (*self._batch_shape, size)).reshape(-1, size)
        return whole[self._chosen].T
