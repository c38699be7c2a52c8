"""A pipeline rank's step without its length: bodies made of blocks that were lowered once.

What the optimizer adds to a chunk (gathers, reductions, updates) depends on the sizes of its parameters, on how many
blocks there are, and on buckets that pay no attention to blocks. So it is lowered by the very code that lowers a whole
program (`OptimizerLowering`), over a skeleton of the chunk: one instruction for each cell of a template that reads a
parameter or completes a gradient. The cells between stay references (`Cells`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from plans.degrees import Degrees
from plans.lower.completed import adds_alike
from plans.lower.emit import Emitter, ValueTable, channel_of
from plans.lower.gathering import Arrival, with_arrivals
from plans.lower.liveness import with_frees
from plans.lower.optimizer import OptimizerLowering
from plans.lower.reduction import Reduction
from plans.lower.symbolic.outline import ModelOutline, renamed
from plans.lower.symbolic.template import Cell, PartTemplate, PieceTemplate, plain
from plans.model.graph import Operator, Tensor
from plans.program import Instruction, Kind, Scope, Value

__all__ = ["ARRIVE", "SEND", "Cells", "PieceUse", "SymbolicRank", "lower_rank"]


class PieceUse(NamedTuple):
    """A piece in its place: the name of its template, and the number of its block on the rank; None for others."""

    piece: str
    block: int | None = None

    @property
    def kind(self) -> str:
        """The piece without regard to what it keeps for its backward."""
        return plain(self.piece)


class Cells(NamedTuple):
    """The cells `first` to `stop` of a part of a piece.

    `is_dropped`: they are left out, as an instruction stands in their place, and what they would free stays alive.
    `is_joined`: what they make is made in memory of the step, which an instruction before them names.
    """

    piece: str
    part: str
    first: int
    stop: int
    is_dropped: bool = False
    is_joined: bool = False


ARRIVE, SEND = "arrive", "send"
"""Where a body waits for the tensor of another stage, and where it sends its own."""

Item = Cells | Instruction | str


@dataclass(frozen=True, kw_only=True, eq=False)
class SymbolicRank:
    """What a rank does in a step.

    Args:
        begin, end: what opens and closes the step, without the waits for what was sent.
        bodies: (chunk of the rank, variant such as "F.first" or "B.last") -> its items in order, each with the
            number of the block that it stands in. An instruction whose call is "cell" has been done by the cell before
            it: it says only which values of the step are alive.
        values: every value that an instruction names.
    """

    begin: tuple[Instruction, ...]
    bodies: Mapping[tuple[int, str], tuple[tuple[int, Item], ...]]
    end: tuple[Instruction, ...]
    values: Mapping[str, Value]


def lower_rank(
    degrees: Degrees,
    outline: ModelOutline,
    pieces: Mapping[str, PieceTemplate],
    chunks: Sequence[Sequence[PieceUse]],
    wanted: Sequence[Collection[tuple[str, bool]]],
    table_of_head: str,
) -> SymbolicRank:
    """The step of a rank.

    Args:
        degrees: how the model is spread.
        outline: its parameters.
        pieces: template of each piece.
        chunks: of the rank, in the order of the model, their pieces.
        wanted: for each chunk its kinds of backward: ("B", "I" or "W", whether none comes after it in the step).
        table_of_head: the parameter that the head reads: its own, or the embedding's.
    """
    lowering = _RankLowering(
        degrees=degrees, outline=outline, pieces=pieces, chunks=chunks, wanted=wanted, table_of_head=table_of_head
    )
    return lowering.run()


@dataclass(slots=True, kw_only=True)
class _RankLowering:
    degrees: Degrees
    outline: ModelOutline
    pieces: Mapping[str, PieceTemplate]
    chunks: Sequence[Sequence[PieceUse]]
    wanted: Sequence[Collection[tuple[str, bool]]]
    table_of_head: str
    table: ValueTable = field(default_factory=ValueTable)
    optimizer: OptimizerLowering = field(init=False)
    accumulators: Mapping[str, Value] = field(init=False)

    def run(self) -> SymbolicRank:
        tensors, homes, reduced = dict[str, Tensor](), {}, {}
        for use in (use for chunk in self.chunks for use in chunk):
            for tensor in self.outline.pieces[use.kind].tensors:
                name = renamed(tensor.name, use.block)
                if name not in tensors:
                    tensors[name] = msgspec.structs.replace(tensor, name=name)
                    homes[name], reduced[name] = self.outline.homes[tensor.name], self.outline.reduced[tensor.name]
        self.optimizer = optimizer = OptimizerLowering(
            optimizer=self.degrees.optimizer, mesh=self.outline.mesh, table=self.table, parameters=tensors,
            homes=homes, reduced=reduced, num_ranks=self.degrees.num_ranks,
        )  # fmt: skip
        places = optimizer.allocate_parameters()
        self.accumulators = optimizer.accumulators()
        read = [self._parameters(chunk) for chunk in self.chunks]
        for number, chunk in enumerate(self.chunks):
            elsewhere = set().union(*(names for other, names in enumerate(read) if other != number))
            completed: dict[str, str] = {}
            for use in reversed(chunk):
                for name, operator in self.outline.pieces[use.kind].completed:
                    completed.pop(own := renamed(name, use.block), None)
                    completed[own] = renamed(operator, use.block)
            optimizer.arrange(number, self._operators(chunk), list(completed.items()), elsewhere)
        gathers, gathered = optimizer.gathers()
        bodies: dict[tuple[int, str], tuple[tuple[int, Item], ...]] = {}
        for number in range(len(self.chunks)):
            bodies |= {(number, name): body for name, body in self._chunk(number, gathered).items()}
        end = Emitter(mesh=self.outline.mesh, table=self.table)
        optimizer.reduce_rest(end)
        if any(use.piece == "head" for chunk in self.chunks for use in chunk):
            self._share_loss(end)
        closing = end.instructions + optimizer.updates(places)
        end.instructions = []
        end.flush()
        return SymbolicRank(
            begin=tuple(gathers), bodies=bodies, end=(*closing, *end.instructions), values=self.table.values
        )

    def _parameters(self, chunk: Sequence[PieceUse]) -> set[str]:
        return {renamed(tensor.name, use.block) for use in chunk for tensor in self.outline.pieces[use.kind].tensors}

    def _operators(self, chunk: Sequence[PieceUse]) -> list[Operator]:
        return [
            msgspec.structs.replace(
                operator, name=renamed(operator.name, use.block), module=renamed(operator.module, use.block),
                inputs=tuple([renamed(name, use.block) for name in operator.inputs]),
            )
            for use in chunk for operator in self.outline.pieces[use.kind].operators
        ]  # fmt: skip

    def _named(self, name: str, use: PieceUse) -> str:
        """A parameter of a template by its name on the rank."""
        return self.table_of_head if name == "output.weight" else renamed(name, use.block)

    # ------------------------------------------------------------------- bodies

    def _chunk(self, number: int, gathered: Mapping[str, Arrival]) -> dict[str, tuple[tuple[int, Item], ...]]:
        chunk, found = self.chunks[number], dict[str, tuple[tuple[int, Item], ...]]()
        kinds = self.wanted[number] or [("B", False)]
        for split, is_last in sorted({(kind != "B", is_last) for kind, is_last in kinds}):
            forward = _Skeleton()
            forward.edge("#begin", 0)
            for use in chunk:
                self._reads(forward, use, "F")
            forward.edge("#end", forward.uses)
            parts = self._backward(chunk, self.optimizer.reduction(number, is_last=is_last), split)
            skeletons = [forward, *parts]
            lines = [self.optimizer.with_gathers(number, each.lines) for each in skeletons]
            lines = with_frees(lines, self.table.values)
            for name, skeleton, body in zip(("F", *("IW" if split else "B")), skeletons, lines, strict=True):
                if name == "F":
                    found["F"] = self._items(chunk, "F", skeleton, body)
                    found["F.first"] = self._items(chunk, "F", skeleton, with_arrivals(body, gathered))
                else:
                    found[f"{name}{'.last' * is_last}"] = self._items(chunk[::-1], name, skeleton, body)
        return found

    def _reads(self, skeleton: _Skeleton, use: PieceUse, part: str) -> None:
        """The cells of a piece that read parameters, its first operator, and what it writes for the step."""
        skeleton.begin()
        module = ""  # of the cells before; the first cell of a module says where its gathers begin
        for at, cell in enumerate(self.pieces[use.piece].parts[part].cells):
            own = self._known(use, cell.operator) if cell.operator else module
            if cell.reads or cell.writes or own != module:
                skeleton.add(at, self._line(use, cell, at))
            module = own
            if cell.writes:
                self.table.add(Value(name=cell.writes, shape=(), dtype=cell.dtype, scope=Scope.STEP, role="buffer"))

    def _line(self, use: PieceUse, cell: Cell, at: int) -> Instruction:
        outputs = (cell.writes,) if cell.writes else ()
        return Instruction(
            name=f"{use.piece}{use.block}#{at}", kind=Kind.COMPUTE, call="cell", part=cell.part, outputs=outputs,
            operator=renamed(self._known(use, cell.operator), use.block) if cell.operator else "",
            inputs=tuple([self._named(name, use) for name in cell.reads]),
        )  # fmt: skip

    def _known(self, use: PieceUse, operator: str) -> str:
        """An operator of the outline that is in the same module as a template's operator."""
        operators = self.outline.pieces[use.kind].operators
        if use.block is None and any(each.name == operator for each in operators):
            return operator
        return operators[0].name

    def _backward(self, chunk: Sequence[PieceUse], reduction: Reduction, split: bool) -> list[_Skeleton]:
        uses: dict[str, int] = {}
        for use in chunk:
            for cell in self.pieces[use.piece].parts["W" if split else "B"].cells:
                if cell.gradient:
                    name = self._named(cell.gradient, use)
                    uses[name] = uses.get(name, 0) + 1
        left = dict(uses)
        found = []
        for part in "IW" if split else "B":
            skeleton = _Skeleton()
            skeleton.edge("#begin", 0)
            emitter = Emitter(mesh=self.outline.mesh, table=self.table, instructions=skeleton.lines)
            for use in reversed(chunk):
                skeleton.begin()
                module = ""
                cells = self.pieces[use.piece].parts[part].cells
                for at, (cell, following) in enumerate(zip(cells, (*cells[1:], None), strict=False)):
                    own = self._known(use, cell.operator) if cell.operator else module
                    if following is not None and self._adds(following, use, uses):
                        total = self.table.add(self.accumulators[self._named(following.gradient, use)])
                        skeleton.add(at, replace(self._line(use, cell, at), outputs=(total,)), join=True)
                    elif cell.gradient:
                        self._gradient(emitter, skeleton, use, cell, at, uses, left, reduction)
                    elif cell.reads or own != module:
                        skeleton.add(at, self._line(use, cell, at))
                    module = own
            skeleton.edge("#end", skeleton.uses)
            if part != "I":
                reduction.finish(emitter)
            found.append(skeleton)
        return found

    def _gradient(
        self,
        emitter: Emitter,
        skeleton: _Skeleton,
        use: PieceUse,
        cell: Cell,
        at: int,
        uses: Mapping[str, int],
        left: dict[str, int],
        reduction: Reduction,
    ) -> None:
        """A gradient is accumulated, or, where it is the only one of its body, reduced as it is (`ChunkLowering`).

        Where the cell before has added it already nothing is left to do.
        """
        name = self._named(cell.gradient, use)
        like = self.accumulators[name]
        left[name] -= 1
        if self._adds(cell, use, uses):
            skeleton.add(at, self._line(use, cell, at), drop=True)
            if not left[name]:
                reduction.add(emitter, name, like.name)
            return
        made = f"d:{name}" if uses[name] == 1 else f"d:{name}.{left[name]}"
        value = self.table.add(
            Value(name=made, shape=like.shape, dtype=self.optimizer.local[name].tensor.dtype, role="gradient")
        )
        skeleton.add(at, replace(self._line(use, cell, at), outputs=(value,)), drop=True)
        if like.scope is not Scope.BODY or uses[name] > 1:
            total = self.table.add(like)  # the only gradient of a body is reduced as it is
            emitter.compute(f"{total}.use{left[name] + 1}", "accumulate", "W", (value,), (total,))
            value = total
        if not left[name]:
            reduction.add(emitter, name, value)

    def _adds(self, cell: Cell, use: PieceUse, uses: Mapping[str, int]) -> bool:
        """Whether what an accumulating cell does is done by the product before it."""
        if not cell.joined:
            return False
        name = self._named(cell.gradient, use)
        like, made = self.accumulators[name], self.optimizer.local[name].tensor.dtype
        only = self.degrees.num_micro_batches == 1 and uses[name] == 1
        return adds_alike(like.dtype, made, is_only=only) and (like.scope is not Scope.BODY or uses[name] > 1)

    def _share_loss(self, emitter: Emitter) -> None:
        """Sum the loss over the ranks that hold parts of it."""
        mesh, axes = self.outline.mesh, self.outline.loss_axes
        loss = self.table.add(
            Value(name="step_loss", shape=(), dtype=self.outline.loss_dtype, scope=Scope.STEP, role="buffer")
        )
        if mesh.size(axes) > 1:
            emitter.add(
                Instruction(
                    name="step_loss.all_reduce", kind=Kind.COLLECTIVE, call="all_reduce", part="C", inputs=(loss,),
                    outputs=(loss,), mesh=mesh, axes=axes, channel=channel_of(mesh, axes),
                    message_bytes=self.table[loss].span_bytes, shapes=((), ()), dtype=self.outline.loss_dtype,
                    token=emitter.token("step_loss.all_reduce", Scope.STEP),
                )
            )  # fmt: skip

    def _items(
        self, chunk: Sequence[PieceUse], part: str, skeleton: _Skeleton, body: Sequence[Instruction]
    ) -> tuple[tuple[int, Item], ...]:
        return _Spelling(chunk, part, self.pieces).run(skeleton, body)


@dataclass(slots=True)
class _Skeleton:
    """The lines of a body that stand for cells, and where: number of the piece, cell, whether it is dropped, joined."""

    lines: list[Instruction] = field(default_factory=list)
    place: dict[str, tuple[int, int, bool, bool]] = field(default_factory=dict)
    uses: int = 0

    def begin(self) -> None:
        """Another piece begins."""
        self.uses += 1

    def edge(self, name: str, number: int) -> None:
        """A line for the begin or the end of the body."""
        line = Instruction(name=name, kind=Kind.COMPUTE, call="cell", part="C")
        self.lines.append(line)
        self.place[line.name] = (number, -1, False, False)

    def add(self, at: int, line: Instruction, *, drop: bool = False, join: bool = False) -> None:
        """A line for cell `at` of the piece."""
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

    def run(self, skeleton: _Skeleton, body: Sequence[Instruction]) -> tuple[tuple[int, Item], ...]:
        """What the optimizer added before a cell (gathers, arrivals) stands right before it, reductions right
        behind."""
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
            if (line.outputs or line.frees) and not is_joined:
                self._append(line)
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
        """A piece of input gradients ends: so does what it handed over."""
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
        """Cells; one item with those before them where they follow on."""
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
