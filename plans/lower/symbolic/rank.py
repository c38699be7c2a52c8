"""The step of a pipeline rank or of some of its chunks, with bodies composed of blocks that were lowered once.

What the optimizer adds to a chunk (gathers, reductions, updates) depends on the sizes of its parameters, the number of
blocks, and buckets that span blocks. It is therefore lowered by the same code as a complete program
(`OptimizerLowering`), on a skeleton of the chunk: one instruction for each cell of a template that reads a parameter or
completes a gradient. The cells in between remain references (`Cells`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from plans.degrees import Degrees
from plans.lower.completed import adds_alike
from plans.lower.emit import Emitter, ValueTable
from plans.lower.gathering import Arrival, with_arrivals
from plans.lower.liveness import with_frees
from plans.lower.loss import sum_loss
from plans.lower.optimizer import OptimizerLowering
from plans.lower.reduction import Reduction
from plans.lower.symbolic.items import Item, PieceUse, Skeleton, spelled
from plans.lower.symbolic.outline import ModelOutline, renamed
from plans.lower.symbolic.template import Cell, PieceTemplate
from plans.lower.symbolic.wide import with_wide_buckets
from plans.model.graph import Operator, Tensor
from plans.program import Instruction, Kind, Scope, Value

__all__ = ["SymbolicRank", "are_apart", "lower_rank"]


@dataclass(frozen=True, kw_only=True, eq=False)
class SymbolicRank:
    """The step of a pipeline rank, or of some of its chunks, with symbolic sizes.

    Chunks that are lowered apart (`are_apart`) make up a rank: it begins with what each begins with, and each part of
    its end is that part of every chunk.

    Args:
        begin: what opens the step.
        ends: what closes it, without the waits for what was sent, in parts: reductions of the step, updates that have a
            turn, other updates (`OptimizerLowering.updates_in_turn`), last waits.
        bodies: (chunk of the rank, variant such as "F.first" or "B.last") -> its items in order, each with the
            number of the block that it is in. An instruction whose call is "cell" has been done by the cell before
            it: it only marks which values of the step are alive.
        values: every value that an instruction names.
    """

    begin: tuple[Instruction, ...]
    bodies: Mapping[tuple[int, str], tuple[tuple[int, Item], ...]]
    ends: tuple[tuple[Instruction, ...], ...]
    values: Mapping[str, Value]


def are_apart(degrees: Degrees, outline: ModelOutline, chunks: Sequence[Collection[str]]) -> bool:
    """Whether chunks of a rank can be lowered apart: no instruction is about parameters of several.

    Args:
        degrees: how the model is spread.
        outline: its parameters.
        chunks: the kinds of the pieces of each, besides blocks.
    """
    if degrees.optimizer.clip_norm is not None:  # one instruction reads all gradients
        return len(chunks) == 1
    read = [{tensor.name for kind in kinds for tensor in outline.pieces[kind].tensors} for kinds in chunks]
    return sum(map(len, read)) == len(set().union(*read))


def lower_rank(
    degrees: Degrees,
    outline: ModelOutline,
    pieces: Mapping[str, PieceTemplate],
    chunks: Sequence[Sequence[PieceUse]],
    wanted: Sequence[Collection[tuple[str, bool]]],
    table_of_head: str,
    copies: Mapping[int, int] | None = None,
) -> SymbolicRank:
    """Lower the step of a pipeline rank, or of some of its chunks.

    Args:
        degrees: how the model is spread.
        outline: its parameters.
        pieces: template of each piece.
        chunks: of the rank, in the order of the model, their pieces.
        wanted: for each chunk its kinds of backward: ("B", "I" or "W", whether none comes after it in the step).
        table_of_head: the parameter that the head reads: its own, or the embedding's.
        copies: number of blocks that a block represents, by its number, if it represents more than itself.
    """
    lowering = _RankLowering(
        degrees=degrees, outline=outline, pieces=pieces, chunks=chunks, wanted=wanted, table_of_head=table_of_head,
        copies=copies or {},
    )  # fmt: skip
    return lowering.run()


@dataclass(slots=True, kw_only=True)
class _RankLowering:
    degrees: Degrees
    outline: ModelOutline
    pieces: Mapping[str, PieceTemplate]
    chunks: Sequence[Sequence[PieceUse]]
    wanted: Sequence[Collection[tuple[str, bool]]]
    table_of_head: str
    copies: Mapping[int, int]
    table: ValueTable = field(default_factory=ValueTable)
    optimizer: OptimizerLowering = field(init=False)
    accumulators: Mapping[str, Value] = field(init=False)
    marked: dict[tuple[str, str, bool], list[tuple[int, Cell]]] = field(default_factory=dict)
    lines: dict[tuple[PieceUse, str, int, tuple[str, ...]], Instruction] = field(default_factory=dict)

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
            if self.copies:
                optimizer.chunks[number] = with_wide_buckets(optimizer.chunks[number], self.copies)
        gathers, gathered = optimizer.gathers()
        bodies: dict[tuple[int, str], tuple[tuple[int, Item], ...]] = {}
        for number in range(len(self.chunks)):
            bodies |= {(number, name): body for name, body in self._chunk(number, gathered).items()}
        end = Emitter(mesh=self.outline.mesh, table=self.table)
        optimizer.reduce_rest(end)
        if any(use.piece == "head" for chunk in self.chunks for use in chunk):
            self._share_loss(end)
        ends = [end.taken(), *optimizer.updates_in_turn(places)]
        end.flush()
        return SymbolicRank(
            begin=tuple(gathers), bodies=bodies, ends=tuple(map(tuple, (*ends, end.taken()))), values=self.table.values
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
        forward = Skeleton()
        forward.edge("#begin", 0)
        for use in chunk:
            self._reads(forward, use, "F")
        forward.edge("#end", forward.uses)
        (body,) = self._complete(number, [forward])  # what it makes for the backward is inside of cells
        found["F"] = self._items(chunk, "F", forward, body)
        found["F.first"] = self._items(chunk, "F", forward, with_arrivals(body, gathered))
        kinds = self.wanted[number] or [("B", False)]
        for split, is_last in sorted({(kind != "B", is_last) for kind, is_last in kinds}):
            parts = self._backward(chunk, self.optimizer.reduction(number, is_last=is_last), split)
            for name, skeleton, body in zip("IW" if split else "B", parts, self._complete(number, parts), strict=True):
                found[f"{name}{'.last' * is_last}"] = self._items(chunk[::-1], name, skeleton, body)
        return found

    def _complete(self, number: int, skeletons: Sequence[Skeleton]) -> list[list[Instruction]]:
        """The lines of bodies with the gathers of a chunk, and what they free."""
        lines = [self.optimizer.with_gathers(number, skeleton.lines) for skeleton in skeletons]
        return with_frees(lines, self.table.values)

    def _reads(self, skeleton: Skeleton, use: PieceUse, part: str) -> None:
        """The cells of a piece that read parameters, its first operator, and what it writes for the step."""
        skeleton.begin()
        for at, cell in self._marked(use, part):
            skeleton.add(at, self._line(use, part, at))
            if cell.writes:
                self._add_step_loss()

    def _marked(self, use: PieceUse, part: str) -> list[tuple[int, Cell]]:
        """The cells of a part that a line stands for, with their numbers.

        Those that read parameters or make gradients, or may add one up; what is written for the step; and the first of
        each module, which says where its gathers begin.
        """
        key = use.piece, part, use.block is None
        found = self.marked.get(key)
        if found is None:
            found, module = [], ""
            cells = self.pieces[use.piece].parts[part].cells
            for at, cell in enumerate(cells):
                own = self._known(use, cell.operator) if cell.operator else module
                may_add = at + 1 < len(cells) and cells[at + 1].joined
                if cell.reads or cell.gradient or cell.writes or own != module or may_add:
                    found.append((at, cell))
                module = own
            self.marked[key] = found
        return found

    def _line(self, use: PieceUse, part: str, at: int, made: tuple[str, ...] = ()) -> Instruction:
        """The line of a cell of a part; bodies of one kind have the same."""
        key = use, part, at, made
        found = self.lines.get(key)
        if found is None:
            cell = self.pieces[use.piece].parts[part].cells[at]
            found = self.lines[key] = Instruction(
                name=f"{use.piece}{use.block}#{at}", kind=Kind.COMPUTE, call="cell", part=cell.part,
                outputs=(*made, cell.writes) if cell.writes else made,
                operator=renamed(self._known(use, cell.operator), use.block) if cell.operator else "",
                inputs=tuple([self._named(name, use) for name in cell.reads]),
            )  # fmt: skip
        return found

    def _known(self, use: PieceUse, operator: str) -> str:
        """An operator of the outline in the same module as an operator of the template."""
        operators = self.outline.pieces[use.kind].operators
        if use.block is None and any(each.name == operator for each in operators):
            return operator
        return operators[0].name

    def _backward(self, chunk: Sequence[PieceUse], reduction: Reduction, split: bool) -> list[Skeleton]:
        uses: dict[str, int] = {}
        for use in chunk:
            for _, cell in self._marked(use, "W" if split else "B"):
                if cell.gradient:
                    name = self._named(cell.gradient, use)
                    uses[name] = uses.get(name, 0) + 1
        left = dict(uses)
        found = []
        for part in "IW" if split else "B":
            skeleton = Skeleton()
            skeleton.edge("#begin", 0)
            emitter = Emitter(mesh=self.outline.mesh, table=self.table, instructions=skeleton.lines)
            for use in reversed(chunk):
                skeleton.begin()
                cells = self.pieces[use.piece].parts[part].cells
                for at, cell in self._marked(use, part):
                    if at + 1 < len(cells) and self._adds(cells[at + 1], use, uses):
                        total = self.table.add(self.accumulators[self._named(cells[at + 1].gradient, use)])
                        skeleton.add(at, self._line(use, part, at, (total,)), join=True)
                    elif cell.gradient:
                        self._gradient(emitter, skeleton, use, (part, at), uses, left, reduction)
                    else:
                        skeleton.add(at, self._line(use, part, at))
            skeleton.edge("#end", skeleton.uses)
            if part != "I":
                reduction.finish(emitter)
            found.append(skeleton)
        return found

    def _gradient(
        self,
        emitter: Emitter,
        skeleton: Skeleton,
        use: PieceUse,
        place: tuple[str, int],
        uses: Mapping[str, int],
        left: dict[str, int],
        reduction: Reduction,
    ) -> None:
        """A gradient is accumulated, or, where it is the only one of its body, reduced as it is (`ChunkLowering`).

        Where the cell before has added it already nothing is left to do.
        """
        part, at = place
        cell = self.pieces[use.piece].parts[part].cells[at]
        name = self._named(cell.gradient, use)
        like = self.accumulators[name]
        left[name] -= 1
        if self._adds(cell, use, uses):
            skeleton.add(at, self._line(use, part, at), drop=True)
            if not left[name]:
                reduction.add(emitter, name, like.name)
            return
        made = f"d:{name}" if uses[name] == 1 else f"d:{name}.{left[name]}"
        value = self.table.add(
            Value(name=made, shape=like.shape, dtype=self.optimizer.local[name].tensor.dtype, role="gradient")
        )
        skeleton.add(at, self._line(use, part, at, made=(value,)), drop=True)
        if like.scope is not Scope.BODY or uses[name] > 1:
            total = self.table.add(like)  # the only gradient of a body is reduced as it is
            emitter.compute(f"{total}.use{left[name] + 1}", "accumulate", "W", (value,), (total,))
            value = total
        if not left[name]:
            reduction.add(emitter, name, value)

    def _adds(self, cell: Cell, use: PieceUse, uses: Mapping[str, int]) -> bool:
        """Whether the product before an accumulating cell adds to the gradient itself."""
        if not cell.joined:
            return False
        name = self._named(cell.gradient, use)
        like, made = self.accumulators[name], self.optimizer.local[name].tensor.dtype
        only = self.degrees.num_micro_batches == 1 and uses[name] == 1
        return adds_alike(like.dtype, made, is_only=only) and (like.scope is not Scope.BODY or uses[name] > 1)

    def _share_loss(self, emitter: Emitter) -> None:
        """Sum the loss over the ranks that hold parts of it."""
        self._add_step_loss()
        sum_loss(emitter, self.outline.mesh, self.outline.loss_axes)

    def _add_step_loss(self) -> None:
        self.table.add(
            Value(name="step_loss", shape=(), dtype=self.outline.loss_dtype, scope=Scope.STEP, role="buffer")
        )

    def _items(
        self, chunk: Sequence[PieceUse], part: str, skeleton: Skeleton, body: Sequence[Instruction]
    ) -> tuple[tuple[int, Item], ...]:
        return spelled(chunk, part, self.pieces, skeleton, body)
