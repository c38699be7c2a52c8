"""The order of a group's program: one step as a sequence of runs of compute, issues of communication, and waits.

The sequence is the same on every rank of a group and in every step. Every body is processed once, however many blocks
share it, and properties of the blocks are computed for all blocks together.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from plans.errors import TwofoldError
from plans.program import Block, GroupProgram, Instruction, Kind, Scope
from plans.streams import StreamOrder, stream_order

__all__ = ["ISSUE", "RUN", "WAIT", "Names", "Order"]

RUN, ISSUE, WAIT = 0, 1, 2
"""Segments: (RUN, number of the run, -1), (ISSUE, position, slot), (WAIT, position, slot); slot -1 blocks."""

_KIND = {Kind.COMPUTE: RUN, Kind.WAIT: WAIT}
_Ints = npt.NDArray[np.int64]
_Triple = tuple[str, str, str]


class Names(Sequence[_Triple]):
    """The (id, call, part) triples of spans, numbered in order of their first appearance and written out on access.

    An id is held as what is before its first slash, mostly the label of a block, and the rest.

    >>> names = Names()
    >>> names.number("0F0/fc.F", "linear.forward", "F"), names.number("0F1/fc.F", "linear.forward", "F")
    (0, 1)
    >>> names[1], len(names)
    (('0F1/fc.F', 'linear.forward', 'F'), 2)
    """

    def __init__(self) -> None:
        self._heads: dict[str, int] = {}
        self._tails: dict[_Triple, int] = {}
        self._codes: list[_Ints] = []  # the number of a head and that of a tail, in one, of every name in order
        self._size = 0
        self._table: dict[int, int] = {}  # code -> number, of the first parts of `_codes`
        self._tabled = 0
        self._spelled: tuple[_Triple, ...] = ()

    @property
    def num_heads(self) -> int:
        """Number of heads of ids."""
        return len(self._heads)

    def heads(self, texts: Sequence[str]) -> _Ints:
        """The indices of the parts of ids before their first slash."""
        known = self._heads
        return np.array([known.setdefault(text, len(known)) for text in texts], dtype=np.int64)

    def tail(self, rest: str, call: str, part: str) -> int:
        """The index of the rest of an id, with call and part."""
        return self._tails.setdefault((rest, call, part), len(self._tails))

    def numbers(self, heads: _Ints, tails: _Ints, *, are_new: bool = False) -> _Ints:
        """The indices of many triples. `are_new`: none of them was requested before, and no two are equal."""
        codes = (heads << 32) | tails
        if are_new:
            self._add(codes)
            return np.arange(self._size - len(codes), self._size)
        table = self._known()
        found = [table.setdefault(code, len(table)) for code in codes.tolist()]
        self._add(np.array(list(itertools.islice(table, self._size, None)), dtype=np.int64))
        self._tabled = len(self._codes)
        return np.array(found, dtype=np.int64)

    def number(self, id_: str, call: str, part: str) -> int:
        """The index of a triple."""
        head, _, rest = id_.partition("/")
        return int(self.numbers(self.heads((head,)), np.array([self.tail(rest, call, part)]))[0])

    def _add(self, codes: _Ints) -> None:
        self._codes.append(codes)
        self._size += len(codes)

    def _known(self) -> dict[int, int]:
        for codes in self._codes[self._tabled :]:
            self._table.update(zip(codes.tolist(), range(len(self._table), self._size), strict=False))
        self._tabled = len(self._codes)
        return self._table

    def _all(self) -> tuple[_Triple, ...]:
        if len(self._spelled) < self._size:
            heads, tails = list(self._heads), list(self._tails)
            pairs = ((heads[code >> 32], tails[code & 0xFFFFFFFF]) for codes in self._codes for code in codes.tolist())
            self._spelled = tuple((f"{head}/{rest}", call, part) for head, (rest, call, part) in pairs)
        return self._spelled

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, number: Any) -> Any:
        return self._all()[number]

    def __iter__(self) -> Iterator[_Triple]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Sequence) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return repr(self._all())


class _Lines:
    """The instructions of all bodies of a group, one after the other, in columns."""

    def __init__(self, group: GroupProgram, names: Names) -> None:
        self.instructions: list[Instruction] = []
        self.first_block: list[Block] = []
        self.tokens: dict[str, int] = {}  # with their numbers
        self.begin: list[int] = []
        self.size: list[int] = []
        self._group = group
        self._names = names
        self.are_distinct = True  # the names in every body
        self._rows: list[tuple[int, int, int, bool, bool, int]] = []
        self._numbers: dict[Hashable, int] = {}

    def bodies(self, blocks: Sequence[Block]) -> tuple[list[int], list[str]]:
        """The index of every block's body, and the part of its label before the first slash."""
        heads = [block.label for block in blocks]
        prefixes: Sequence[str] = ()
        keys: list[Hashable] = [id(block.body) for block in blocks]
        if "/" in "".join(heads):
            parts = [head.partition("/") for head in heads]
            heads, prefixes = [head for head, _, _ in parts], [rest + slash for _, slash, rest in parts]
            keys = list(zip(keys, prefixes, strict=True))
        known = self._numbers
        for at, key in enumerate(keys):
            if key not in known:
                known[key] = len(known)
                self._add(blocks[at], known[key], prefixes[at] if prefixes else "")
        return list(map(known.__getitem__, keys)), heads

    def _add(self, block: Block, number: int, prefix: str) -> None:
        """Add a block's body that is new; the names of its instructions begin with a prefix."""
        self.begin.append(len(self._rows))
        self.size.append(len(block.body.instructions))
        for instruction in block.body.instructions:
            self.instructions.append(instruction)
            self.first_block.append(block)
            self._rows.append(self._row(instruction, block, prefix))
        tails = {tail for _, tail, *_ in self._rows[self.begin[number] :]}
        self.are_distinct &= len(tails) == self.size[number]

    def columns(self) -> _Ints:
        """Columns: kind, rest of the name, token (-1: none), whether it belongs to one micro-batch, whether that is the
        block's, and otherwise which.
        """
        return np.array(self._rows, dtype=np.int64).reshape(-1, 6).T

    def _row(self, instruction: Instruction, block: Block, prefix: str) -> tuple[int, int, int, bool, bool, int]:
        tail = self._names.tail(prefix + instruction.name, instruction.call, instruction.part)
        if instruction.kind is Kind.COMPUTE:
            return RUN, tail, -1, False, False, 0
        is_wait = instruction.kind is Kind.WAIT
        token = instruction.waits if is_wait else instruction.token
        if token is None and not is_wait:
            return ISSUE, tail, -1, False, False, 0
        if token is None or token not in self._group.values:
            raise TwofoldError(
                f"'{block.label}/{instruction.name}' names the token {token!r}, which is not among the values of its "
                "group"
            )
        micro_batch = instruction.attrs.get("micro_batch") if is_wait else None
        return (
            _KIND.get(instruction.kind, ISSUE), tail, self.tokens.setdefault(token, len(self.tokens)),
            self._group.values[token].scope is Scope.MICRO, micro_batch is None, micro_batch or 0,
        )  # fmt: skip


class Order:
    """One step of a group, instruction by instruction.

    Attributes:
        name_array: number of the span that each instruction of the step makes, in `names`.
        line: number of each among the instructions of all bodies, `line_instructions`; equal where the body is.
        issues: positions of communications.
        bounds: (first, stop) positions of each run of consecutive COMPUTE instructions, one row each.
        num_slots: number of tokens.
        unwaited: positions of communications that no later WAIT of the step takes.

    Raises:
        TwofoldError: a WAIT for a token that was never issued.
    """

    def __init__(self, group: GroupProgram, names: Names) -> None:
        self.group = group
        lines = _Lines(group, names)
        first_head = names.num_heads
        bodies, labels = lines.bodies(group.blocks)
        body, heads = np.array(bodies, dtype=np.int64), names.heads(labels)
        size = np.array(lines.size, dtype=np.int64)[body]
        self._block = np.repeat(np.arange(len(body)), size)
        begin = np.array(lines.begin, dtype=np.int64)[body] - (np.cumsum(size) - size)
        self.line: _Ints = np.repeat(begin, size) + np.arange(len(self._block))
        self.line_instructions = lines.instructions
        self._first_block = lines.first_block
        kind, tail, token, by_micro_batch, of_block, micro_batch = lines.columns()[:, self.line]
        are_new = lines.are_distinct and np.array_equal(heads, np.arange(first_head, first_head + len(heads)))
        self.name_array = names.numbers(heads[self._block], tail, are_new=are_new)
        self.issues = np.flatnonzero(kind == ISSUE)
        here = np.array([block.micro_batch for block in group.blocks], dtype=np.int64)[self._block]
        micro_batch = np.where(by_micro_batch == 1, np.where(of_block == 1, here, micro_batch), 0)
        slot = self._slots(kind, token, micro_batch, list(lines.tokens))
        is_run = kind == RUN
        begins = np.ones(len(kind), dtype=bool)  # a segment: all but a COMPUTE behind another
        begins[1:] = ~(is_run[1:] & is_run[:-1])
        at = np.flatnonzero(begins)
        self.bounds: _Ints = np.column_stack([at, np.append(at, len(kind))[1:]])[is_run[at]]
        self._columns = kind[at], at, slot[at]

    @cached_property
    def kinds(self) -> list[int]:
        """Order constraints: the kinds of `segments`."""
        return self._columns[0].tolist()

    def places(self, kind: int) -> tuple[list[int], list[int]]:
        """The positions and the slots of all segments of a kind, ISSUE or WAIT."""
        kinds, at, slot = self._columns
        found = np.flatnonzero(kinds == kind)
        return at[found].tolist(), slot[found].tolist()

    @cached_property
    def segments(self) -> list[tuple[int, int, int]]:
        """See `ISSUE`."""
        kind, at, slot = self._columns
        number = np.cumsum(kind == RUN) - 1
        return list(zip(kind.tolist(), np.where(kind == RUN, number, at).tolist(), slot.tolist(), strict=True))

    @cached_property
    def instructions(self) -> list[Instruction]:
        """The instruction at every position."""
        lines = self.line_instructions
        return [lines[line] for line in self.line.tolist()]

    @cached_property
    def name(self) -> list[int]:
        """`name_array` as a list."""
        return self.name_array.tolist()

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """`bounds` as pairs."""
        return [(first, stop) for first, stop in self.bounds.tolist()]

    @cached_property
    def ids(self) -> list[str]:
        """The id of every instruction."""
        labels = [block.label for block in self.group.blocks]
        return [
            f"{labels[block]}/{instruction.name}"
            for block, instruction in zip(self._block.tolist(), self.instructions, strict=True)
        ]

    @cached_property
    def stream_order(self) -> StreamOrder | None:
        """The order between the compute streams; None where there is one."""
        return stream_order(self.group) if any(line.stream for line in self.line_instructions) else None

    @cached_property
    def has_collectives(self) -> bool:
        """Whether there is any collective."""
        return any(instruction.kind is Kind.COLLECTIVE for instruction in self.line_instructions)

    def line_id(self, line: int) -> str:
        """The id of the first instruction of a line."""
        return f"{self._first_block[line].label}/{self.line_instructions[line].name}"

    def _slots(self, kind: _Ints, token: _Ints, micro_batch: _Ints, tokens: list[str]) -> _Ints:
        """The slot of every position, -1 without a token. Also finds communication that is never waited for."""
        named = np.flatnonzero(token >= 0)
        slot = np.full(len(kind), -1, dtype=np.int64)
        self.unwaited: set[int] = set()
        self.num_slots = 0
        if not len(named):
            return slot
        _, micro_number = np.unique(micro_batch[named], return_inverse=True)
        keys = token[named] * (int(micro_number.max()) + 1) + micro_number
        _, first, number = np.unique(keys, return_index=True, return_inverse=True)
        self.num_slots = len(first)
        slot[named] = number
        is_kept = np.array([self.group.values[name].scope is Scope.KEPT for name in tokens], dtype=bool)
        early = named[first]
        early = early[(kind[early] == WAIT) & ~is_kept[token[early]]]
        if len(early):
            position = int(early.min())
            raise TwofoldError(
                f"{self.ids[position]!r} waits for token {tokens[token[position]]!r}, which nothing before it in the "
                "step issues"
            )
        by_slot = np.argsort(number, kind="stable")
        is_issue, sorted_slot = kind[named[by_slot]] == ISSUE, number[by_slot]
        is_last = np.append(sorted_slot[1:] != sorted_slot[:-1], True)
        self.unwaited = set(named[by_slot][is_issue & (is_last | np.append(is_issue[1:], True))].tolist())
        return slot
