"""A schedule as a graph of events: the dependencies of every action and every transfer, independent of times.

Events are the end of an action on its rank's compute stream, the end of the transfer that an action receives, the end
of communication that outlasts its action, and everything else that the end of the step waits for. They are sorted by
level (the longest path to them), so that a full level, of all configurations of a batch, is one array operation.

Order and waiting are those of `plans.lower` and `simulator.engine.run`: a receive is posted one action ahead, or when
its action begins, after the compute issued before it. Transfers between two stages keep their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from plans.errors import TwofoldError
from plans.schedules import Schedule
from plans.schedules.arrivals import releases_of_rows
from plans.schedules.dependencies import rank_of_rows, remote_dependencies
from plans.schedules.variants import VARIANTS, variant_of_rows

__all__ = [
    "ACTION", "CHANNEL", "CHANNELS", "COEFFICIENTS", "FINAL", "FROM_CHANNEL", "FROM_CONSTANT", "FROM_POST",
    "FROM_PREVIOUS", "FROM_STREAM", "FROM_TENSOR", "TRANSFER", "Structure", "structure_of",
]  # fmt: skip

Ints = npt.NDArray[np.int64]

ACTION, TRANSFER, FINAL, CHANNEL = range(4)
"""Kinds of events; that of channel n is CHANNEL + n."""

CHANNELS = tuple(f"channel{number}" for number in range(6))
"""The clocks of channels on which communication outlasts the action that issued it."""

COEFFICIENTS = (
    *((after, before) for after in ("stream", "sent", "final", *CHANNELS)
      for before in ("stream", "arrival", *CHANNELS)),
    ("transfer", ""),
)  # fmt: skip
"""(clock afterwards, clock before) of the coefficients that `Structure.select` chooses from; those of "sent" include
the transfer that follows."""

FROM_STREAM, FROM_TENSOR, FROM_CONSTANT, FROM_POST, FROM_PREVIOUS, FROM_CHANNEL = range(6)
"""Dependencies of an event: its rank's stream, the tensor that its action receives, known times (host, start of the
step), the stream of the receiver when it posts, the transfer before it; from FROM_CHANNEL on a channel."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Structure:
    """The events of one step; event 0 is time zero.

    Attributes:
        schedule: where it comes from.
        rank, variant: of each row of the schedule's table.
        inputs: (5 + channels, number of events) the events waited for, 0 for none (see `FROM_STREAM`).
        level: of each event; they are in ascending order.
        bounds: first event of each level, and the number of events.
        kind: kind of each event.
        row: the action of an event; of a transfer the one that sends.
        receiver: of a transfer the row that receives, else -1.
        event_of_row: the event of each action.
        transfer_of_row: the event of the transfer that each row receives, 0 for none.
        occurrence: of each event, how many like it (kind, stage and kind of the action, which is the receiving one of a
            transfer) come before it.
        select: (as `inputs`) which coefficient belongs to each: (position in `COEFFICIENTS` * number of variants +
            variant) * number of stages + stage; the one behind the last of these for none.
        channel_of_row: (channels, rows) the event of a channel's tail after each action that moves it, else 0.
        sends: how many tensors each row sends, hand-overs on its own rank included: 0 or 1.
        releases: how many earlier sends are waited for behind each row; those that are left, at the end of the step.
        posts_ahead: whether receives are posted one action ahead.
    """

    schedule: Schedule
    rank: Ints
    variant: Ints
    inputs: Ints
    level: Ints
    bounds: tuple[int, ...]
    kind: Ints
    row: Ints
    receiver: Ints
    event_of_row: Ints
    transfer_of_row: Ints
    occurrence: Ints
    select: Ints
    channel_of_row: Ints
    sends: Ints
    releases: Ints
    posts_ahead: bool

    @property
    def num_events(self) -> int:
        """Number of events, including time zero."""
        return len(self.level)


@lru_cache(maxsize=128)  # a search needs up to 70, of 57 kB each
def structure_of(
    schedule: Schedule,
    on_channel: tuple[frozenset[str], ...] = (),
    with_final: bool = False,
    posts_ahead: bool = True,
) -> Structure:
    """The events of a schedule.

    Args:
        schedule: complete and valid.
        on_channel: for each channel the variants that move it, or wait for it.
        with_final: whether last backwards have a `final`.
        posts_ahead: whether receives are posted one action ahead, or as the action begins.

    Raises:
        TwofoldError: an action without what it waits for, ranks that wait for each other, or a sender and a receiver
            with different orders.
    """
    table = schedule.table
    num_rows = len(table.stage)
    rows = np.arange(num_rows)
    rank, first_row = rank_of_rows(table), table.rank_start
    place = rows - first_row[rank]
    before = np.where(place > 0, rows, 0)  # action `row` has the number row + 1
    sender_of = remote_dependencies(schedule)
    receivers = np.flatnonzero(sender_of >= 0)
    senders = sender_of[receivers]
    _check_complete(schedule, sender_of)
    num_transfers = len(receivers)
    tensor = np.zeros(num_rows, dtype=np.int64)
    tensor[receivers] = 1 + num_rows + np.arange(num_transfers)
    actions_ahead = int(posts_ahead)
    posted_after = np.where(place[receivers] > actions_ahead, receivers - actions_ahead, 0)
    way = 2 * table.stage[receivers].astype(np.int64) + (table.kind[receivers] != 0)
    previous = _previous(way, 1 + num_rows)
    _check_same_order(schedule, way, senders, receivers)
    variant = variant_of_rows(schedule)
    parts = [
        np.zeros((FROM_CHANNEL + len(on_channel), 1), dtype=np.int64),
        _stacked(len(on_channel), before, tensor),
        _stacked(len(on_channel), before[senders], tensor[senders], posted_after, previous),
    ]
    kinds = [np.full(1, -1), np.full(num_rows, ACTION), np.full(num_transfers, TRANSFER)]
    rows_of = [np.full(1, -1), rows, senders]
    using = [np.flatnonzero(np.array([name in names for name in VARIANTS])[variant]) for names in on_channel]
    numbers = np.cumsum([1 + num_rows + num_transfers, *map(len, using)])
    tails = [
        _latest(rank, rows_using, first + np.arange(len(rows_using)), first_row)
        for rows_using, first in zip(using, numbers[:-1].tolist(), strict=True)
    ]
    tail_of_row = np.zeros((len(on_channel), num_rows), dtype=np.int64)
    for number, (rows_using, first) in enumerate(zip(using, numbers[:-1].tolist(), strict=True)):
        tail_of_row[number, rows_using] = first + np.arange(len(rows_using))
        is_using = tail_of_row[number] > 0
        parts[1][FROM_CHANNEL + number] = np.where(is_using, tails[number], 0)
        parts[2][FROM_CHANNEL + number] = np.where(is_using[senders], tails[number][senders], 0)
    for number, rows_using in enumerate(using):
        parts.append(_stacked(len(on_channel), before[rows_using], tensor[rows_using]))
        parts[-1][FROM_CHANNEL:] = [tail[rows_using] for tail in tails]
        kinds.append(np.full(len(rows_using), CHANNEL + number))
        rows_of.append(rows_using)
    if with_final:
        last = np.flatnonzero(variant >= VARIANTS.index("B.last"))
        parts.append(_stacked(len(on_channel), before[last], tensor[last]))
        parts[-1][FROM_CHANNEL:] = np.reshape([tail[last] for tail in tails], (len(on_channel), len(last)))
        kinds.append(np.full(len(last), FINAL))
        rows_of.append(last)
    inputs = np.concatenate(parts, axis=1)
    kind, row = np.concatenate(kinds), np.concatenate(rows_of)
    receiver = np.full(len(kind), -1)
    receiver[1 + num_rows : 1 + num_rows + num_transfers] = receivers
    level = _levels(schedule, inputs)
    by_level = np.argsort(level, kind="stable")
    number_of = np.empty(len(level), dtype=np.int64)
    number_of[by_level] = np.arange(len(level))
    sorted_level = level[by_level]
    bounds = np.searchsorted(sorted_level, np.arange(sorted_level[-1] + 2))
    sorted_inputs = number_of[inputs][:, by_level]
    return Structure(
        schedule=schedule,
        rank=rank,
        variant=variant,
        inputs=sorted_inputs,
        level=sorted_level,
        bounds=tuple(bounds.tolist()),
        kind=kind[by_level],
        row=row[by_level],
        receiver=receiver[by_level],
        event_of_row=number_of[1 : 1 + num_rows],
        transfer_of_row=number_of[tensor],
        occurrence=_occurrences(schedule, kind, np.where(receiver >= 0, receiver, row))[by_level],
        select=_select(schedule, variant, kind[by_level], row[by_level], sorted_inputs),
        channel_of_row=number_of[tail_of_row],
        sends=np.bincount(senders, minlength=num_rows),
        releases=releases_of_rows(schedule),
        posts_ahead=posts_ahead,
    )


def _choices(num_channels: int) -> dict[int, dict[int, int]]:
    """Kind of event -> slot -> number of its coefficient."""
    clocks = {ACTION: "stream", TRANSFER: "sent", FINAL: "final"}
    clocks |= {CHANNEL + number: CHANNELS[number] for number in range(num_channels)}
    befores = {FROM_STREAM: "stream", FROM_TENSOR: "arrival"}
    befores |= {FROM_CHANNEL + number: CHANNELS[number] for number in range(num_channels)}
    found = {
        kind: {slot: COEFFICIENTS.index((clock, before)) for slot, before in befores.items()}
        for kind, clock in clocks.items()
    }
    travel = COEFFICIENTS.index(("transfer", ""))
    found[TRANSFER] |= {FROM_POST: travel, FROM_PREVIOUS: travel}
    return found


def _select(schedule: Schedule, variant: Ints, kind: Ints, row: Ints, inputs: Ints) -> Ints:
    none = len(COEFFICIENTS) * len(VARIANTS) * schedule.num_stages
    own_class = variant[row] * schedule.num_stages + schedule.table.stage[row]
    select = np.full(inputs.shape, none)
    for number, choices in _choices(len(inputs) - FROM_CHANNEL).items():
        for slot, choice in choices.items():
            if slot < len(inputs):
                at = np.flatnonzero((kind == number) & (inputs[slot] > 0))
                select[slot, at] = choice * len(VARIANTS) * schedule.num_stages + own_class[at]
    return select


def _stacked(
    num_channels: int, stream: Ints, tensor: Ints, post: Ints | None = None, previous: Ints | None = None
) -> Ints:
    none = np.zeros_like(stream)
    slots = (stream, tensor, none, post, previous, *[None] * num_channels)
    return np.stack([none if slot is None else slot for slot in slots])


def _previous(way: Ints, first: int) -> Ints:
    """The number of the transfer before each one on its way, 0 for none; transfers are numbered from `first`."""
    by_way = np.argsort(way, kind="stable")
    same = way[by_way][1:] == way[by_way][:-1]
    previous = np.zeros(len(way), dtype=np.int64)
    previous[by_way[1:][same]] = first + by_way[:-1][same]
    return previous


def _latest(rank: Ints, using: Ints, number: Ints, first_row: Ints) -> Ints:
    """The last earlier row on its rank that moves the channel, 0 for none, for each row."""
    made = np.zeros(len(rank), dtype=np.int64)
    made[using] = number
    before = np.concatenate([[0], made[:-1]])
    before[first_row[:-1][first_row[:-1] < len(rank)]] = 0
    place = np.where(before > 0, np.arange(len(rank)), first_row[rank])
    return before[np.maximum.accumulate(place)]


def _levels(schedule: Schedule, inputs: Ints) -> Ints:
    """The longest path from time zero to every event."""
    num_events = inputs.shape[1]
    target, source = np.nonzero(inputs.T)
    source = inputs.T[target, source]
    by_source = np.argsort(source, kind="stable")
    followers = target[by_source].tolist()
    first = np.searchsorted(source[by_source], np.arange(num_events + 1)).tolist()
    missing = np.bincount(target, minlength=num_events).tolist()
    level = [0] * num_events
    ready = [event for event in range(1, num_events) if not missing[event]]
    for event in ready:
        level[event] = 1
    num_seen = 1 + len(ready)
    while ready:
        following = []
        for event in ready:
            behind = level[event] + 1
            for other in followers[first[event] : first[event + 1]]:
                missing[other] -= 1
                if not missing[other]:
                    level[other] = behind  # the last to be ready is on the highest level
                    following.append(other)
        num_seen += len(following)
        ready = following
    if num_seen < num_events:
        from plans.schedules import validate

        validate(schedule)
        raise TwofoldError(
            f"schedule {schedule.name!r} cannot run as its receives are posted: ranks wait for each other"
        )
    return np.array(level)


def _occurrences(schedule: Schedule, kind: Ints, row: Ints) -> Ints:
    table = schedule.table
    at = np.maximum(row, 0)
    key = (kind * schedule.num_stages + table.stage[at]) * 4 + table.kind[at]
    by_key = np.lexsort((at, key))
    place = np.arange(len(key))
    is_first = np.ones(len(key), dtype=bool)
    is_first[1:] = key[by_key][1:] != key[by_key][:-1]
    occurrence = np.empty(len(key), dtype=np.int64)
    occurrence[by_key] = place - np.maximum.accumulate(np.where(is_first, place, 0))
    return occurrence


def _check_complete(schedule: Schedule, sender_of: Ints) -> None:
    table = schedule.table
    forward, weight = table.kind == 0, table.kind == 3
    from_before = forward & (table.stage > 0)
    from_behind = ~forward & ~weight & (table.stage < schedule.num_stages - 1)
    if np.any((from_before | from_behind) & (sender_of < 0)):
        from plans.schedules import validate

        validate(schedule)


def _check_same_order(schedule: Schedule, way: Ints, senders: Ints, receivers: Ints) -> None:
    by_receiver, by_sender = np.lexsort((receivers, way)), np.lexsort((senders, way))
    wrong = np.flatnonzero(by_receiver != by_sender)
    if len(wrong):
        row = int(receivers[by_receiver[wrong[0]]])
        sent = int(senders[by_sender[wrong[0]]])
        raise TwofoldError(
            f"schedule {schedule.name!r}: {schedule.cell_text(row)} is to receive what {schedule.cell_text(sent)} "
            "sends; the two ranks must take the micro-batches in the same order"
        )
