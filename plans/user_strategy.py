"""Strategies given by users: per operand of an operator a tuple of ints, or a layout.

`((4, 1),)` cuts dim 0 of the only operand into 4 parts. Where the parts are fewer than the devices, neighbouring ranks
hold the same part: the split goes over the slowest axes, as in MindSpore, which puts the axis of repeated work last.
A tuple of layouts, `(layout("mp", ("sp", "dp")), layout(("sp", "dp"), "None"))`, states which ranks hold which part.
Operands that are left out (a bias) follow from the dims that they share with the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plans.errors import TwofoldError
from plans.layout import INTERLEAVED, DimAxes, Layout, TensorLayout
from plans.model.graph import Graph, Operator
from plans.operators import OperatorSpec, factors
from plans.plan import Strategy

__all__ = ["Entry", "GivenStrategy", "given_strategy"]

Entry = tuple[int, ...] | TensorLayout
"""The split of one operand: parts per dim, or a layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenStrategy:
    """A strategy given by a user; all entries have the same form, and layouts share one mesh."""

    inputs: tuple[Entry, ...]
    output: Entry | None = None

    def __str__(self) -> str:
        entries = ", ".join(_shown(entry) for entry in self.inputs) + ("," if len(self.inputs) == 1 else "")
        return f"({entries})" + ("" if self.output is None else f", out_strategy=({_shown(self.output)},)")

    @property
    def mesh(self) -> Layout | None:
        """The mesh of the layouts; None for ints."""
        first = self.inputs[0]
        return first.mesh if isinstance(first, TensorLayout) else None

    def strategy(self, operator: Operator, graph: Graph, num_ranks: int) -> Strategy:
        """The strategy of `operator` on a stage of `num_ranks` ranks.

        Args:
            operator: of `graph`.
            graph: graph of what is computed at a time: a micro-batch, or a slice of one.
            num_ranks: number of ranks of the operator's pipeline stage. The mesh of ints counts ranks from 0 within the
                stage.

        Raises:
            TwofoldError: too many operands, another number of dims, sizes that do not divide, dims that disagree, a
                mesh of another size, an output that the operator cannot make; it shows what was given.
        """
        spec, asked = graph.spec(operator), f"operator {operator.name!r} ({operator.kind}) was given {self}"
        shapes = [graph.tensors[name].shape for name in operator.inputs]
        if len(self.inputs) > len(shapes):
            raise TwofoldError(
                f"{asked}, {len(self.inputs)} entries; it reads {len(shapes)} "
                f"tensor{'s' if len(shapes) > 1 else ''} of {', '.join(map(str, shapes))}"
            )
        for position, (entry, shape) in enumerate(zip(self.inputs, shapes, strict=False)):
            _check_entry(entry, shape, f"{asked}: entry {position}", f"input {operator.inputs[position]!r}")
        dims, mesh = self._with_mesh(spec, num_ranks, asked)
        try:
            spec.check(mesh, dims, operator.name)
        except TwofoldError as error:
            raise TwofoldError(f"{asked}: {error}") from None
        out = None if self.output is None else self._out(spec, mesh, dims, asked)
        return Strategy(dims=dims, mesh=mesh, out=out)

    def _with_mesh(self, spec: OperatorSpec, num_ranks: int, asked: str) -> tuple[dict[str, DimAxes], Layout]:
        if self.mesh is None:
            counts = self._by_dim(spec, [tuple(entry) for entry in self.inputs], asked)  # type: ignore[arg-type]
            cut = {dim: count for dim, count in counts.items() if count > 1}
            parts = math.prod(cut.values())
            if num_ranks % parts:
                raise TwofoldError(f"{asked}, {parts} parts, which do not divide the {num_ranks} devices it runs on")
            names = {dim: f"s{number}" for number, dim in enumerate(cut)}
            mesh = Layout((*cut.values(), num_ranks // parts), (*names.values(), "same"))
            return {dim: (axis,) for dim, axis in names.items()}, mesh
        if self.mesh.num_ranks != num_ranks:
            raise TwofoldError(
                f"{asked}, on {self.mesh!r} of {self.mesh.num_ranks} ranks; the operator runs on {num_ranks} devices"
            )
        given = self._by_dim(spec, [entry.dims for entry in self.inputs], asked)  # type: ignore[union-attr]
        return {dim: axes for dim, axes in given.items() if axes}, self.mesh

    @staticmethod
    def _by_dim(spec: OperatorSpec, entries: Sequence[tuple[Any, ...]], asked: str) -> dict[str, Any]:
        """named dim -> its split in the entries; the split of a product of dims goes to its major factor."""
        found: dict[str, tuple[int, Any]] = {}
        for position, entry in enumerate(entries):
            for dim, value in zip(spec.inputs[position], entry, strict=True):
                at, known = found.setdefault(factors(dim)[0], (position, value))
                if known != value:
                    raise TwofoldError(
                        f"{asked}: dim {factors(dim)[0]!r} is split by {known!r} in entry {at} and by {value!r} in "
                        f"entry {position}; each dim of an operator can be split in one way only (its dims are "
                        f"{_dims_of(spec)})"
                    )
        return {dim: value for dim, (_, value) in found.items()}

    def _out(
        self, spec: OperatorSpec, mesh: Layout, dims: dict[str, DimAxes], asked: str
    ) -> tuple[DimAxes, ...] | None:
        made = spec.output_layout(0, mesh, dims)
        allowed = [made.dims]
        if made.partial and len(made.dims) > 1:  # the sums may be left scattered over the rows
            rows = len(made.dims) - 2
            scattered = (*made.dims[rows], *made.partial)
            if spec.output_shape(0)[rows] % mesh.size(scattered) == 0:
                allowed.append((*made.dims[:rows], scattered, *made.dims[rows + 1 :]))
        for each in allowed:
            counts = TensorLayout(mesh=mesh, dims=each).split_counts
            if self.output == counts or (isinstance(self.output, TensorLayout) and self.output.dims == each):
                return None if each == made.dims and not made.partial else each
        layouts = [TensorLayout(mesh=mesh, dims=each) for each in allowed]
        shown = [f"layout{layout}" if self.mesh is not None else f"{layout.split_counts}" for layout in layouts]
        ways = f"{shown[0]}" if len(shown) == 1 else f"{shown[0]} (reduced) or {shown[1]} (reduce-scattered)"
        raise TwofoldError(f"{asked}: the output {spec.output_shape(0)} can be {ways}")


def given_strategy(in_strategy: object, out_strategy: object = None) -> GivenStrategy:
    """Check the form of a user's strategy; its fit to the operator is checked when the shapes are known.

    Raises:
        TwofoldError: no tuple with one entry per operand, ints below 1, ints and layouts mixed, layouts on different
            meshes, out_strategy without in_strategy or with several entries.

    >>> print(given_strategy(((4, 1),)))
    ((4, 1),)
    """
    if in_strategy is None:
        raise TwofoldError(f"out_strategy={out_strategy!r} needs an in_strategy as well")
    inputs = _entries(in_strategy, "in_strategy")
    outputs = () if out_strategy is None else _entries(out_strategy, "out_strategy")
    shown = f"in_strategy={_tuple(inputs)}" + (f", out_strategy={_tuple(outputs)}" if outputs else "")
    if len(outputs) > 1:
        raise TwofoldError(f"out_strategy {_tuple(outputs)} has {len(outputs)} entries; operators have one output")
    layouts = [entry for entry in (*inputs, *outputs) if isinstance(entry, TensorLayout)]
    if layouts and len(layouts) != len(inputs) + len(outputs):
        raise TwofoldError(f"{shown} mixes ints and layouts; give one form for all entries")
    for layout in layouts:
        if layout.mesh != layouts[0].mesh:
            raise TwofoldError(
                f"{shown} is on two meshes, {layouts[0].mesh!r} and {layout.mesh!r}; an operator needs a single mesh"
            )
        if INTERLEAVED in layout.mesh.alias_name:
            raise TwofoldError(
                f"{shown}: the axis {INTERLEAVED!r} is not supported for single operators; wrap the "
                "network as MicroBatchInterleaved(net, 2)"
            )
    return GivenStrategy(inputs=inputs, output=outputs[0] if outputs else None)


def _entries(given: object, what: str) -> tuple[Entry, ...]:
    hint = f"{what} takes a tuple with one entry per tensor, such as ((4, 1),) or (layout('dp', 'None'),)"
    if not isinstance(given, tuple | list) or not given:
        raise TwofoldError(f"{hint}; got {_any(given)}")
    entries: list[Entry] = []
    for entry in given:
        if isinstance(entry, Layout):
            raise TwofoldError(
                f"{what} has the mesh {entry!r} itself; call it with the axes of every dim: layout('dp', ...)"
            )
        if isinstance(entry, TensorLayout):
            if entry.partial:
                raise TwofoldError(f"{what} has {entry}, with partial sums; give only how dims are split")
            entries.append(entry)
            continue
        if not isinstance(entry, tuple | list):
            raise TwofoldError(f"{hint}; got {_any(given)}, whose entry {entry!r} is neither a tuple nor a layout")
        for count in entry:
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise TwofoldError(
                    f"{what} {_any(given)}: {count!r} is not a number of parts; give an int of at least 1"
                )
        entries.append(tuple(entry))
    return tuple(entries)


def _check_entry(entry: Entry, shape: tuple[int, ...], asked: str, what: str) -> None:
    counts = entry.split_counts if isinstance(entry, TensorLayout) else entry
    if len(counts) != len(shape):
        raise TwofoldError(f"{asked} names {len(counts)} dims, {what} {shape} has {len(shape)}")
    for dim, (size, count) in enumerate(zip(shape, counts, strict=True)):
        if size % count:
            raise TwofoldError(
                f"{asked} cuts dim {dim} of {what} {shape} into {count} parts: {size} % {count} != 0; the number of "
                f"parts must divide {size}"
            )


def _dims_of(spec: OperatorSpec) -> str:
    return " x ".join("[" + ", ".join("*".join(factors(dim)) for dim in dims) + "]" for dims in spec.inputs)


def _shown(entry: Entry) -> str:
    return f"layout{entry}" if isinstance(entry, TensorLayout) else repr(entry)


def _tuple(entries: Sequence[Entry]) -> str:
    return "(" + ", ".join(map(_shown, entries)) + ("," if len(entries) == 1 else "") + ")"


def _any(given: object) -> str:
    """An entry as the user wrote it, with layouts on one line."""
    if isinstance(given, tuple | list):
        return "(" + ", ".join(_any(each) for each in given) + ("," if len(given) == 1 else "") + ")"
    return f"layout{given}" if isinstance(given, TensorLayout) else repr(given)
