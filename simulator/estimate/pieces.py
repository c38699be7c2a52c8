"""The pieces of a transformer in one layout: their templates and sizes, priced instructions and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from costmodels import Machine
from costmodels.price.group import Group, axes_group
from plans.degrees import Degrees
from plans.degrees.groups import rank_groups
from plans.lower.symbolic import (
    KEPT,
    ModelTemplate,
    ParameterTemplate,
    PieceTemplate,
    model_sizes,
    model_template,
    plain,
)
from plans.model.graph import itemsize
from plans.model.transformer import TransformerConfig
from simulator.estimate.chunk import Chunk
from simulator.estimate.memory import footprint, parameter_bytes, piece_sizes
from simulator.estimate.pricing import Groups, priced_lines
from simulator.lines import Line
from simulator.stacks import PieceSizes, Stack
from simulator.stacks.footprint import Footprint
from simulator.stacks.ring import without_foreign_keys

__all__ = ["PricedPieces"]


@dataclass(kw_only=True)
class PricedPieces:
    """The pieces of a transformer in one layout on one machine, under one software stack.

    Layouts that differ in data-parallel degree, pipeline, optimizer and `split_backward` only may have one `known`:
    shared results are then computed once. `tier_override` has the tiers of groups whose location differs from the
    degrees' order. `kept` is the same layout without recomputing, of blocks that keep everything where others
    recompute.
    """

    config: TransformerConfig
    degrees: Degrees
    machine: Machine
    stack: Stack
    split_backward: bool
    known: dict[tuple[object, ...], Any] = field(default_factory=dict)
    tier_override: tuple[tuple[str, Group], ...] = ()
    kept: Self | None = None
    _held: dict[str, dict[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.config.position == "learned":  # how many copies sum the gradients of positions is in the bodies
            self.known = self.known.setdefault(("copies", self.degrees.dp), {})

    @cached_property
    def template(self) -> ModelTemplate:
        """The pieces with symbolic sizes."""
        degrees, key = self.degrees, ("template",)
        if key not in self.known:
            self.known[key] = model_template(
                self.config, dp=degrees.dp, tp=degrees.tp, cp=degrees.cp, ep=degrees.ep, recompute=degrees.recompute,
                sequence_parallel=degrees.sequence_parallel, fused=degrees.fused and self.stack.runs_programs,
            )  # fmt: skip
        template: ModelTemplate = self.known[key]
        return template

    @cached_property
    def numbers(self) -> list[int]:
        """The values of the template's monomials."""
        degrees, key = self.degrees, ("numbers",)
        if key not in self.known:  # neither the data-parallel degree nor the optimizer changes them
            self.known[key] = self.template.monomials.values(
                model_sizes(self.config, micro_batch=degrees.micro_batch, tp=degrees.tp, cp=degrees.cp, ep=degrees.ep)
            )
        numbers: list[int] = self.known[key]
        return numbers

    @cached_property
    def groups(self) -> Groups:
        """Members and tiers of the groups inside a stage, of the stage where they are slowest."""
        degrees = self.degrees
        stages = degrees.pp, degrees.strides[-1]
        found = {
            name: axes_group(self.machine, axes, degrees.num_ranks, stages)
            for name, axes in rank_groups(degrees, self.config.kv_heads).items()
        }
        found |= dict(self.tier_override)
        return found | {"tp_kv+tp_q": found["tp"]}

    @property
    def shards(self) -> int:
        """Ranks that hold the same weights."""
        return self.groups["dp"].members

    def owner_of(self, piece: str) -> tuple[Self, str]:
        """The costs to which a piece belongs, and its name there: pieces that keep everything have separate costs."""
        if not piece.startswith(KEPT):
            return self, piece
        assert self.kept is not None
        return self.kept, plain(piece)

    @cached_property
    def pieces(self) -> dict[str, tuple[PieceTemplate, list[int]]]:
        """For each piece its template and the values of its monomials, including pieces that keep everything."""
        found = {name: (piece, self.numbers) for name, piece in self.template.pieces.items()}
        if self.kept is not None:
            found |= {KEPT + name: own for name, own in self.kept.pieces.items()}
        return found

    def lines(self, piece: str, part: str) -> list[Line]:
        """The priced instructions of a body."""
        key = ("lines", piece, part)
        if key not in self.known:
            self.known[key] = priced_lines(
                self.template.pieces[piece].parts[part], self.numbers, self.groups, self.machine, self.stack
            )
        return list(self.known[key])

    def footprint(self, piece: str, *, gathers: bool = False) -> Footprint:
        """A piece's activations.

        `gathers`: full weights exist only while their piece computes. What the head needs then has the room of the
        blocks' weights that are gathered later (`Stack.sharded_at_head_bytes`).
        """
        if gathers and piece == "head":
            head = self.footprint(piece)
            room = self.stack.sharded_at_head_bytes({"block": self.weight_bytes("block")})
            return replace(head, forward=max(head.kept, head.forward - room), backward=max(0, head.backward - room))
        owner, name = self.owner_of(piece)
        if owner is not self:
            return owner.footprint(name)
        key = ("footprint", piece, self.split_backward)
        if key not in self.known:
            size = self.sizes.arrival_bytes
            alone = footprint(
                self.template.pieces[piece], self.numbers, 0 if piece == "embedding" else size,
                0 if piece == "head" else size, split=self.split_backward,
            )  # fmt: skip
            if not self.stack.runs_programs and piece not in ("embedding", "head"):
                alone = without_foreign_keys(alone, self.sizes, self.degrees.cp)
            self.known[key] = self.stack.footprint(piece, alone, self.sizes)
        found: Footprint = self.known[key]
        return found

    @cached_property
    def sizes(self) -> PieceSizes:
        """Facts that the memory of pieces depends on, besides their own tensors."""
        return piece_sizes(self.template, self.numbers, self.config, self.degrees)

    @property
    def outputs_bytes(self) -> int:
        """Bytes of the model's output of one micro-batch on one rank."""
        return self.sizes.logits * self.sizes.item_bytes

    def parameters(self, piece: str) -> Sequence[ParameterTemplate]:
        """The parameters of a piece. Without the table of a head that is tied."""
        own = self.template.pieces[plain(piece)].parameters
        if piece == "head" and self.shares_table:
            return [parameter for parameter in own if not parameter.name.startswith("output.")]
        return own

    @property
    def shares_table(self) -> bool:
        """Whether the head has no table of its own, because it is tied to an embedding on the same ranks."""
        return self.config.tied and self.degrees.pp == 1

    def by_group(self, piece: str) -> list[tuple[str, list[ParameterTemplate]]]:
        """A piece's parameters by the group of ranks that holds copies of them: experts have fewer copies."""
        own = self.parameters(piece)
        if self.degrees.ep == 1:
            return [("dp", list(own))]
        experts = [parameter for parameter in own if ".experts." in parameter.name]
        rest = [parameter for parameter in own if ".experts." not in parameter.name]
        return [(group, some) for group, some in (("dp", rest), ("copies", experts)) if some]

    def static_bytes(self, chunk: Chunk) -> dict[str, int]:
        """Weights, gradients and optimizer states of a chunk, by role."""
        total = {"weight": 0, "gradient": 0, "optimizer": 0}
        for piece, count in chunk.pieces:
            if piece not in self._held:
                held = {"weight": 0, "gradient": 0, "optimizer": 0}
                for group, some in self.by_group(piece):
                    parts = parameter_bytes(some, self.numbers, self.degrees.optimizer, self.groups[group].members)
                    held = {role: held[role] + size for role, size in parts.items()}
                self._held[piece] = held
            for role, size in self._held[piece].items():
                total[role] += count * size
        return total

    def weight_bytes(self, piece: str) -> int:
        """Bytes of a piece's full weights on one rank."""
        return sum(self.numbers[parameter.elements] * itemsize(parameter.dtype) for parameter in self.parameters(piece))

    def bytes_of(self, parameters: Sequence[ParameterTemplate], item_bytes: int) -> int:
        """Bytes of tensors of the parameters' sizes."""
        return sum(self.numbers[parameter.elements] * item_bytes for parameter in parameters)

    def reduced_bytes(self, piece: str) -> int:
        """Bytes of a piece's gradients in the dtype of the reduction."""
        optimizer = self.degrees.optimizer
        return sum(
            self.numbers[parameter.elements] * itemsize(optimizer.reduces_in(parameter.dtype))
            for parameter in self.parameters(piece)
        )
