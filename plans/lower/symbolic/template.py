"""The bodies of a piece of a model as rows of symbolic sizes.

A piece is a part that a model contains once or many times: the embedding, one block, the head with the loss. A template
is made from the lowered bodies of a small plan in which every piece is a separate stage. Transfers between these stages
are dropped, because pieces of one stage pass tensors in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from plans.layout import TensorLayout
from plans.lower.backward import ADDING
from plans.lower.stage_bodies import StageBodies
from plans.lower.symbolic.symbols import Monomials
from plans.operators.attention import heads_first
from plans.program import Instruction, Kind, Scope, Value, moved_values
from plans.redistribution.step import Step

__all__ = [
    "KEPT",
    "Cell",
    "ParameterTemplate",
    "PartTemplate",
    "PieceTemplate",
    "joined_gradients",
    "piece_template",
    "plain",
]

KEPT = "kept_"
"""Before the name of a piece that keeps its activations where the others recompute."""


def plain(piece: str) -> str:
    """The name of a piece without the prefix of pieces that keep everything."""
    return piece.removeprefix(KEPT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One instruction; every `int` that is a size is a place in the template's `Monomials`.

    Args:
        kind: COMPUTE, COLLECTIVE or WAIT.
        call, part, operator, dtype: as of `Instruction`.
        shapes: the local shapes that the price depends on.
        touched: bytes of every operand, whose sum is read and written.
        message: bytes of a collective's larger end, or -1.
        leading: of a collective, the sizes of the dims before each that it joins or cuts (`Step.leading`).
        axes: mesh axes of a collective.
        token: numbers the collectives of a body; a WAIT bears the number of what it waits for; -1 for compute.
        gradient: the parameter whose gradient this cell accumulates, where it does.
        joined: it accumulates what the cell before has made, which can add it by itself in the dtype of the weight.
        reads: the parameters whose weights it reads.
        writes: the value of the step that it writes, such as the loss; "" for none.
        is_view: all that it makes shares the memory of what it reads, so that no kernel runs.
        causal: of an attention.
        steps: steps of a run of fused instructions.
    """

    kind: Kind
    call: str
    part: str
    operator: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...] = ()
    touched: tuple[int, ...] = ()
    message: int = -1
    leading: tuple[tuple[int, ...], ...] = ()
    axes: tuple[str, ...] = ()
    token: int = -1
    causal: bool = False
    is_view: bool = False
    gradient: str = ""
    joined: bool = False
    reads: tuple[str, ...] = ()
    writes: str = ""
    steps: tuple[Cell, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartTemplate:
    """One body: forward, full backward, input-gradient or weight-gradient part.

    Args:
        cells: in program order.
        memory: (number of the cell, +1 or -1, place of the bytes, role): allocated before the cell, released after it;
            cell -1 is what arrives from the piece before.
        earlier: places in `memory` of the releases of what an earlier part allocated.
        arrives_at: before which cell the tensor that the piece receives is waited for; -1 where it receives none.
        sends_at: before which cell the tensor that the piece sends is sent; -1 where it sends none.
        num_issued, num_handed: of a backward that begins by redistributing what arrives: how many cells issue that,
            and how many there are with their waits.
    """

    cells: tuple[Cell, ...]
    memory: tuple[tuple[int, int, int, str], ...]
    earlier: tuple[int, ...] = ()
    arrives_at: int = -1
    sends_at: int = -1
    num_issued: int = 0
    num_handed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTemplate:
    """A parameter of a piece, with symbolic sizes.

    Args:
        name: name of the tensor.
        elements: of the local weight (a place).
        dtype: dtype of the weight.
        whole: elements of the full tensor (a place).
        summed: axes inside a stage along which its gradient is a partial sum.
        same: the other axes inside a stage along which ranks hold the same weight.
    """

    name: str
    elements: int
    dtype: str
    whole: int
    summed: tuple[str, ...] = ()
    same: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceTemplate:
    """A piece of a model, with symbolic sizes.

    Args:
        parts: its bodies by "F", "B", "I", "W".
        parameters: that it reads.
        leaves: bytes of the tensor that it passes to the next cell (a place), -1 where there is none.
        constants: (name, bytes (a place)) of the tensors that no step changes.
    """

    parts: Mapping[str, PartTemplate]
    parameters: tuple[ParameterTemplate, ...]
    leaves: int = -1
    constants: tuple[tuple[str, int], ...] = ()


def piece_template(stage: StageBodies, monomials: Monomials) -> PieceTemplate:
    """The template of the piece that a stage consists of, with all its bodies."""
    values, weights = stage.values, {home.weight: home.name for home in stage.parameters}
    parts = {letter: _part(body, values, weights, monomials) for letter, body in stage.bodies.items()}
    if parts["F"].arrives_at < 0:
        parts |= {letter: _with_hand_over(part) for letter, part in parts.items() if letter in "BW"}
    return PieceTemplate(
        parts=parts,
        parameters=tuple(
            ParameterTemplate(
                name=home.name,
                elements=monomials.enter(math.prod(values[home.weight].shape)),
                dtype=home.dtype,
                whole=monomials.enter(math.prod(home.shape)),
                summed=_split(home.layout, home.reduce_axes),
                same=_split(home.layout, [axis for axis in home.layout.replicated if axis not in home.reduce_axes]),
            )
            for home in stage.parameters
        ),
        leaves=-1 if stage.leaving is None else monomials.enter(values[stage.leaving].span_bytes),
        constants=tuple((name, monomials.enter(values[name].size_bytes)) for name in stage.constants),
    )


@lru_cache(maxsize=8192)
def joined_gradients(part: PartTemplate) -> frozenset[str]:
    """The parameters whose gradients products can add up by themselves."""
    return frozenset(cell.gradient for cell in part.cells if cell.joined)


def _split(layout: TensorLayout, axes: Iterable[str]) -> tuple[str, ...]:
    """The axes that have more than one rank."""
    return tuple(axis for axis in axes if layout.mesh.size((axis,)) > 1)


def _part(
    body: Sequence[Instruction], values: Mapping[str, Value], weights: Mapping[str, str], monomials: Monomials
) -> PartTemplate:
    cells: list[Cell] = []
    arrives_at = sends_at = -1
    memory: list[tuple[int, int, int, str]] = []
    earlier: list[int] = []
    tokens: dict[str, int] = {}
    alive: set[str] = set()
    made: tuple[str, ...] = ()  # by the cell before
    for line in body:
        border = line.kind in (Kind.SEND, Kind.RECV) and not line.channel.endswith(":within")
        if line.kind is Kind.WAIT and line.waits not in tokens:
            border = True
        assert line.kind not in (Kind.SEND, Kind.RECV) or border, f"{line.name}: transfers inside a stage do not fold"
        if line.kind is Kind.SEND:
            sends_at = len(cells)
        if line.kind is Kind.WAIT and border:
            arrives_at = len(cells)
        if not border:
            cell = _cell(line, values, weights, monomials, tokens)
            joined = bool(cell.gradient) and bool(cells) and cells[-1].call in ADDING and made == line.inputs
            cells.append(replace(cell, joined=joined))
            made = line.outputs
        at = len(cells) - 1
        while border and at >= 0 and cells[at].gradient:
            at -= 1  # not to be left out with the sum of a gradient, which allocates nothing
        for name in line.outputs:
            _note(memory, alive, values[name], at, +1, monomials)
        for name in line.frees:
            own, count = name in alive, len(memory)
            _note(memory, alive, values[name], at, -1, monomials)
            if not own:
                earlier += range(count, len(memory))
    return PartTemplate(
        cells=tuple(cells), memory=tuple(memory), earlier=tuple(earlier), arrives_at=arrives_at, sends_at=sends_at
    )


def _with_hand_over(part: PartTemplate) -> PartTemplate:
    """The backward of the first piece, with its first instructions issued as soon as the gradient is available."""
    cells = part.cells
    issued = next((at for at, cell in enumerate(cells) if cell.kind is not Kind.COLLECTIVE), len(cells))
    handed = next((at for at, cell in enumerate(cells) if cell.kind is Kind.COMPUTE), len(cells)) if issued else 0
    return replace(part, num_issued=issued, num_handed=handed)


def _note(
    memory: list[tuple[int, int, int, str]], alive: set[str], value: Value, at: int, sign: int, monomials: Monomials
) -> None:
    """Note that a value with its own memory is allocated or freed; a value that shares memory counts with the owner."""
    if value.scope is not Scope.MICRO or value.shares is not None or not value.size_bytes:
        return
    if sign > 0 and value.name in alive:
        return  # written in place
    (alive.add if sign > 0 else alive.discard)(value.name)
    memory.append((at, sign, monomials.enter(value.size_bytes), value.role))


def _cell(
    line: Instruction,
    values: Mapping[str, Value],
    weights: Mapping[str, str],
    monomials: Monomials,
    tokens: dict[str, int],
) -> Cell:
    common: dict[str, Any] = {
        "call": line.call, "part": line.part, "operator": line.operator, "dtype": line.dtype,
        "reads": tuple(weights[name] for name in line.inputs if name in weights),
    }  # fmt: skip
    if line.kind is Kind.WAIT:
        return Cell(kind=Kind.WAIT, token=tokens[str(line.waits)], **common)
    if line.kind is Kind.COLLECTIVE:
        if line.token is not None:
            tokens[line.token] = len(tokens)
        step: Step | None = line.attrs.get("step")
        return Cell(
            kind=Kind.COLLECTIVE, message=monomials.enter(line.message_bytes), axes=line.axes,
            leading=() if step is None else tuple(
                tuple(monomials.enter(size) for size in sizes) for sizes in step.leading(*line.shapes)
            ),
            token=-1 if line.token is None else tokens[line.token], **common,
        )  # fmt: skip
    shapes = heads_first(line.shapes, line.attrs) if line.call.startswith("attention.") else line.shapes
    operands = [values[name].span_bytes for name in moved_values(line) if name in values]
    inside = {**values, **line.attrs["inner"]} if "steps" in line.attrs else values
    return Cell(
        kind=Kind.COMPUTE,
        shapes=tuple(tuple(monomials.enter(size) for size in shape) for shape in shapes),
        touched=tuple(monomials.enter(size) for size in operands if size),
        causal=bool(line.attrs.get("causal", False)),
        is_view=bool(line.outputs) and all(name in values and values[name].shares is not None for name in line.outputs),
        gradient=_accumulated(line),
        writes=line.outputs[0] if line.outputs and line.outputs[0] == "step_loss" else "",
        steps=tuple(_cell(step, inside, weights, monomials, tokens) for step in line.attrs.get("steps", ())),
        **common,
    )


def _accumulated(line: Instruction) -> str:
    """The parameter whose gradient an instruction accumulates."""
    if line.call != "accumulate" or not line.outputs[0].startswith("g:"):
        return ""
    return line.outputs[0].removeprefix("g:")
