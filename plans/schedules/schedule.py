"""A pipeline schedule: for every rank of the pipeline the order of its actions.

The actions are kept as columns of numbers, because a schedule of 16 ranks and 256 micro-batches has ten thousands of
them; `Schedule.order` gives them as `Action` values. The text form is the compute-only CSV of
torch.distributed.pipelining (one row per rank, one cell per action, empty cells are idle), with one comment line above
for everything that the cells cannot express.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plans.schedules.action import KINDS, Action
from plans.schedules.errors import ScheduleError
from plans.schedules.text import read_rows, write_rows

__all__ = ["Schedule", "ScheduleTable"]

_NUMBER_OF_KIND = {kind: number for number, kind in enumerate(KINDS)}
_LETTERS = tuple(kind.value for kind in KINDS)
_MAX_NUMBER = int(np.iinfo(np.int32).max) - 1


class ScheduleTable(NamedTuple):
    """All actions of a schedule as columns, rank after rank, each rank in its order. The arrays are read-only.

    Rank `r` owns the rows `rank_start[r]` to `rank_start[r + 1]`. `kind` holds 0 for F, 1 for B, 2 for I, 3 for W.
    """

    rank_start: NDArray[np.int64]
    stage: NDArray[np.int32]
    kind: NDArray[np.int8]
    micro_batch: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """The order of the actions on every rank of a pipeline.

    It does not contain times: a rank starts its next action as soon as the action's inputs are available. Whether the
    order can run at all is the question of `plans.schedules.validate`; here only the numbers must fit each other.

    Args:
        name: one line of text.
        num_stages: virtual stages (chunks) along the complete model.
        num_micro_batches: micro-batches of one step.
        placement: for each virtual stage the pipeline rank (a group of devices) that owns it.
        table: the actions; `Schedule.from_order` makes it from `Action` values.

    Raises:
        ScheduleError: an action outside the stages, micro-batches or ranks, an empty schedule, an unusable name.

    >>> schedule = Schedule.from_text("0F0,0F1,,0B0,0B1\\n,1F0,1B0,1F1,1B1", name="mine")
    >>> schedule.num_ranks, schedule.num_micro_batches, schedule.placement
    (2, 2, (0, 1))
    >>> print(schedule)
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
    """

    name: str
    num_stages: int
    num_micro_batches: int
    placement: tuple[int, ...]
    table: ScheduleTable = field(repr=False)
    _order: tuple[tuple[Action, ...], ...] | None = field(init=False, repr=False, default=None)
    _hash: int | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if not self.name.strip() or len(self.name.splitlines()) != 1:
            raise ScheduleError(f"a schedule needs a name of one line, not {self.name!r}")
        num_actions = int(self.table.rank_start[-1])
        if self.num_stages < 1 or self.num_micro_batches < 1 or num_actions < 1:
            raise ScheduleError(
                f"schedule {self.name!r} has {self.num_stages} stages, {self.num_micro_batches} micro-batches and "
                f"{num_actions} actions; it needs at least one of each"
            )
        _check_placement(self.name, self.num_stages, self.placement, self.num_ranks)
        columns = (self.table.stage, self.table.kind, self.table.micro_batch)
        assert all(len(column) == num_actions for column in columns)
        for column, limit, what in (
            (self.table.stage, self.num_stages, "stages"),
            (self.table.kind, len(KINDS), "kinds"),
            (self.table.micro_batch, self.num_micro_batches, "micro-batches"),
        ):
            if column.min() < 0 or column.max() >= limit:
                row = int(np.flatnonzero((column < 0) | (column >= limit))[0])
                raise ScheduleError(f"schedule {self.name!r} has {limit} {what}; {self.cell_text(row)} is outside them")
        for array in self.table:
            array.flags.writeable = False

    @classmethod
    def from_order(
        cls,
        order: Sequence[Sequence[Action]],
        *,
        name: str = "custom",
        num_stages: int | None = None,
        num_micro_batches: int | None = None,
        placement: Sequence[int] | None = None,
    ) -> Schedule:
        """The schedule of these actions per rank; omitted values are derived from the actions.

        Raises:
            ScheduleError: as the class; also a stage without any action when no placement is given.
        """
        actions = [action for row in order for action in row]
        if not actions:
            raise ScheduleError(f"schedule {name!r} has no actions")
        largest = max(actions, key=lambda action: max(action.stage, action.micro_batch))
        if max(largest.stage, largest.micro_batch) > _MAX_NUMBER:
            raise ScheduleError(f"schedule {name!r} has an action {largest}; numbers end at {_MAX_NUMBER}")
        stage = np.array([action.stage for action in actions], np.int32)
        kind = np.array([_NUMBER_OF_KIND[action.kind] for action in actions], np.int8)
        micro_batch = np.array([action.micro_batch for action in actions], np.int32)
        rank_start = np.concatenate(([0], np.cumsum([len(row) for row in order])))
        if num_stages is None:
            num_stages = int(stage.max()) + 1 if placement is None else len(placement)
        if placement is None:
            placement = _placement_by_first_action(name, order, num_stages)
        return cls(
            name=name,
            num_stages=num_stages,
            num_micro_batches=int(micro_batch.max()) + 1 if num_micro_batches is None else num_micro_batches,
            placement=tuple(placement),
            table=ScheduleTable(rank_start, stage, kind, micro_batch),
        )

    @classmethod
    def from_text(cls, text: str, *, name: str = "custom") -> Schedule:
        """Reads what `to_text` or `to_csv` wrote, or a compute-only CSV of torch.distributed.pipelining.

        Idle cells are dropped. A cell `(0F3;7B1)OVERLAP_F_B`, torch's forward and backward in one, becomes the two
        actions one after the other.

        Raises:
            ScheduleError: a cell that is not an action, or that holds two; the message shows the row and the cell.
        """
        header, order = read_rows(text)
        return cls.from_order(
            order,
            name=header.name or name,
            num_stages=header.num_stages,
            num_micro_batches=header.num_micro_batches,
            placement=header.placement,
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Schedule)
            and (self.name, self.num_stages, self.num_micro_batches, self.placement)
            == (other.name, other.num_stages, other.num_micro_batches, other.placement)
            and self._columns_as_bytes() == other._columns_as_bytes()
        )

    def __hash__(self) -> int:
        if self._hash is None:
            parts = (self.name, self.num_stages, self.num_micro_batches, self.placement)
            object.__setattr__(self, "_hash", hash((parts, *self._columns_as_bytes())))
        assert self._hash is not None
        return self._hash

    def __str__(self) -> str:
        return self.to_csv().rstrip()

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.table.rank_start) - 1

    @property
    def order(self) -> tuple[tuple[Action, ...], ...]:
        """Per rank its actions, built when first asked for."""
        if self._order is None:
            columns = [column.tolist() for column in self.table[1:]]
            actions = [
                Action(stage=stage, kind=KINDS[kind], micro_batch=micro_batch)
                for stage, kind, micro_batch in zip(*columns, strict=True)
            ]
            starts = self.table.rank_start.tolist()
            rows = tuple(tuple(actions[first:last]) for first, last in pairwise(starts))
            object.__setattr__(self, "_order", rows)
        assert self._order is not None
        return self._order

    def _columns_as_bytes(self) -> list[bytes]:
        return [np.ascontiguousarray(column, np.int64).tobytes() for column in self.table]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The virtual stages that `rank` owns, in the order of the model."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def cell_text(self, row: int) -> str:
        """Row `row` of the table in the notation of `Action`."""
        table = self.table
        return f"{table.stage[row]}{_LETTERS[table.kind[row]]}{table.micro_batch[row]}"

    def cells(self) -> list[list[str]]:
        """Per rank its actions as text."""
        columns = [column.tolist() for column in self.table[1:]]
        texts = [f"{stage}{_LETTERS[kind]}{micro}" for stage, kind, micro in zip(*columns, strict=True)]
        starts = self.table.rank_start.tolist()
        return [texts[first:last] for first, last in pairwise(starts)]

    def to_csv(self) -> str:
        """The actions only, as torch.distributed.pipelining reads them (`format="compute_only"`)."""
        return write_rows(self.cells())

    def to_text(self) -> str:
        """The complete schedule as text; `Schedule.from_text` gives it back."""
        placement = ",".join(map(str, self.placement))
        return (
            f"# schedule stages={self.num_stages} micro_batches={self.num_micro_batches} placement={placement} "
            f"name={self.name}\n{self.to_csv()}"
        )


def _check_placement(name: str, num_stages: int, placement: tuple[int, ...], num_ranks: int) -> None:
    if len(placement) != num_stages:
        raise ScheduleError(
            f"schedule {name!r} has {num_stages} stages and a placement for {len(placement)}: {placement}"
        )
    for stage, rank in enumerate(placement):
        if not 0 <= rank < num_ranks:
            raise ScheduleError(
                f"schedule {name!r} places stage {stage} on rank {rank} and has rows for {num_ranks} ranks, from 0 on"
            )


def _placement_by_first_action(name: str, order: Sequence[Sequence[Action]], num_stages: int) -> list[int]:
    owner: dict[int, int] = {}
    for rank, row in enumerate(order):
        for action in row:
            owner.setdefault(action.stage, rank)
    if len(owner) < num_stages:
        missing = next(stage for stage in count() if stage not in owner)
        raise ScheduleError(
            f"schedule {name!r} has {num_stages} stages, and no action of stage {missing} on any rank; "
            "number the stages from 0 without gaps"
        )
    return [owner[stage] for stage in range(num_stages)]
