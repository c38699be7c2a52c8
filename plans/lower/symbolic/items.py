"""The items of a body: references to cells of templates, between the instructions that the optimizer adds.

The optimizer's lowering works on a skeleton of a chunk, with one line for each cell that affects it. `spelled` puts the
cells back in their places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from plans.lower.symbolic.template import PartTemplate, PieceTemplate, plain
from plans.program import Instruction, Kind

__all__ = ["ARRIVE", "SEND", "Cells", "Item", "PieceUse", "Skeleton", "spelled"]


class PieceUse(NamedTuple):
    """A piece in its place: the name of its template, and the number of its block on the rank; None for others."""

    piece: str
    block: int | None = None

    @property
    def kind(self) -> str:
        """The kind of the piece, ignoring the values that it keeps for its backward."""
        return plain(self.piece)


class Cells(NamedTuple):
    """The cells `first` to `stop` of a part of a piece.

    `is_dropped`: they are left out, as an instruction is in their place, and what they would free stays alive.
    `is_joined`: what they make is made in memory of the step, which an instruction before them names.
    """

    piece: str
    part: str
    first: int
    stop: int
    is_dropped: bool = False
    is_joined: bool = False


ARRIVE, SEND = "arrive", "send"
"""Positions at which a body waits for the tensor of another stage, and sends its own."""

Item = Cells | Instruction | str


def spelled(
    chunk: Sequence[PieceUse], part: str, pieces: Mapping[str, PieceTemplate], skeleton: Skeleton,
    body: Sequence[Instruction],
) -> tuple[tuple[int, Item], ...]:  # fmt: skip
    """The items of a body in order, each with the number of the block that it is in, -1 outside of one.

    Args:
        chunk: its pieces in the order of the body.
        part: of the templates: "F", "B", "I" or "W".
        pieces: template of each piece.
        skeleton: the lines that represent cells.
        body: these lines, among those that the optimizer has added.
    """
    return _Spelling(chunk, part, pieces).run(skeleton, body)


@dataclass(slots=True)
class Skeleton:
    """The lines of a body that represent cells, and their positions: number of the piece, cell, whether it is dropped,
    joined."""

    lines: list[Instruction] = field(default_factory=list)
    place: dict[str, tuple[int, int, bool, bool]] = field(default_factory=dict)
    uses: int = 0

    def begin(self) -> None:
        """Start the next piece."""
        self.uses += 1

    def edge(self, name: str, number: int) -> None:
        """Add a line for the begin or the end of the body."""
        line = Instruction(name=name, kind=Kind.COMPUTE, call="cell", part="C")
        self.lines.append(line)
        self.place[line.name] = (number, -1, False, False)

    def add(self, at: int, line: Instruction, *, drop: bool = False, join: bool = False) -> None:
        """Add a line for cell `at` of the piece."""
        self.lines.append(line)
        self.place[line.name] = (self.uses - 1, at, drop, join)


class _Spelling:
    """Puts cells and the lines of a body together."""

    def __init__(self, chunk: Sequence[PieceUse], part: str, pieces: Mapping[str, PieceTemplate]) -> None:
        self._chunk = chunk
        self._part = part
        self._parts = [pieces[use.piece].parts for use in chunk]
        self._number = 0
        self._at = 0
        self._marked: set[tuple[int, int, str]] = set()
        self.items: list[tuple[int, Item]] = []

    def run(self, skeleton: Skeleton, body: Sequence[Instruction]) -> tuple[tuple[int, Item], ...]:
        """Instructions of the optimizer: gathers and arrivals directly before a cell, reductions directly after it."""
        behind = {line.name for line in skeleton.lines}
        waiting: list[Instruction] = []
        for line in body:
            place = skeleton.place.get(line.name)
            if place is None:
                if line.name in behind:
                    self._append(line)
                else:
                    waiting.append(line)
                continue
            number, at, is_dropped, is_joined = place
            if at >= 0:
                self._cells_until(number, at)
            elif number:
                self._cells_until(number, 0)
            for other in waiting:
                self._append(other)
            waiting.clear()
            if is_joined:
                self._append(line)
            if at >= 0:
                self._add(at, at + 1, is_dropped=is_dropped, is_joined=is_joined)
            if not is_joined and (line.frees or any(not name.startswith("d:") for name in line.outputs)):
                self._append(line)  # the memory of a gradient is that of its cell
        for other in waiting:
            self._append(other)
        return tuple(self.items)

    def _append(self, item: Item) -> None:
        block = self._chunk[min(self._number, len(self._chunk) - 1)].block
        self.items.append((-1 if block is None else block, item))

    def _cells_until(self, number: int, until: int) -> None:
        """All cells up to cell `until` of piece `number`, and what the stage's boundary does before it."""
        while self._number < number:
            self._span(len(self._parts[self._number][self._part].cells))
            self._leave()
            self._number, self._at = self._number + 1, 0
            if self._number < len(self._chunk):
                self._at = self._handed_over
        if number < len(self._chunk):
            self._span(until)

    def _span(self, stop: int) -> None:
        """Cells up to `stop`, with the boundary of the stage: the first piece waits for what arrives, the last
        sends."""
        template = self._parts[self._number][self._part]
        for where in sorted({template.arrives_at, template.sends_at}):
            if self._at <= where <= stop:
                self._add(self._at, where)
                self._mark(where)
        self._add(self._at, stop)

    def _mark(self, at: int) -> None:
        template = self._parts[self._number][self._part]
        is_last = self._number == len(self._chunk) - 1
        for where, kind, holds in (
            (template.arrives_at, ARRIVE, self._number == 0),
            (template.sends_at, SEND, is_last),
            (template.sends_at, "hand over", not is_last),
        ):
            key = (self._number, at, kind)
            if where == at and holds and key not in self._marked:
                self._marked.add(key)
                if kind != "hand over":
                    self._append(kind)
                elif self._issued:
                    self._append(Cells(self._chunk[self._number + 1].piece, self._from, 0, self._issued))

    # In a backward the piece before may begin by bringing the gradient to the layout that it made its output in. That
    # is issued as soon as the gradient is there; in a split backward it is over when the input gradients are.

    @property
    def _from(self) -> str:
        return "W" if self._part == "I" else self._part

    def _next(self) -> PartTemplate | None:
        if self._part == "F" or self._number + 1 >= len(self._chunk):
            return None
        return self._parts[self._number + 1][self._from]

    @property
    def _issued(self) -> int:
        """Leading collectives of the next piece."""
        template = self._next()
        return 0 if template is None else template.num_issued

    def _leave(self) -> None:
        """End a piece of input gradients, and with it the cells that it handed over."""
        template = self._next()
        if self._part == "I" and template is not None and template.num_issued:
            piece = self._chunk[self._number + 1].piece
            self._append(Cells(piece, "W", template.num_issued, template.num_handed))

    @property
    def _handed_over(self) -> int:
        """Cells of the piece that have been done with the one before it."""
        if self._part == "F" or not self._number:
            return 0
        template = self._parts[self._number][self._part]
        return template.num_handed if self._part == "W" else template.num_issued

    def _add(self, first: int, stop: int, *, is_dropped: bool = False, is_joined: bool = False) -> None:
        """Add cells, joined with the item before them if they follow it directly."""
        if stop <= first:
            return
        self._at = stop
        piece = self._chunk[self._number].piece
        before = self.items[-1][1] if self.items else None
        if (
            isinstance(before, Cells) and before[:2] == (piece, self._part) and before.stop == first and first
            and not (before.is_dropped or before.is_joined or is_dropped or is_joined)
        ):  # fmt: skip
            self.items[-1] = self.items[-1][0], before._replace(stop=stop)
        else:
            self._append(Cells(piece, self._part, first, stop, is_dropped, is_joined))
