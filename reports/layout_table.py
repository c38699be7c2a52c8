"""Which rank holds which part of a tensor, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plans.errors import TwofoldError
from plans.layout import Region, TensorLayout
from plans.ranks import format_ranks
from reports.tables import Table

__all__ = ["Part", "layout_parts", "layout_table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the tensor and who holds it: `terms` has one set of equal ranks per term of a partial sum."""

    region: Region
    terms: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that hold the part or a term of it."""
        return tuple(sorted(rank for term in self.terms for rank in term))


def layout_parts(layout: TensorLayout, shape: Sequence[int]) -> tuple[Part, ...]:
    """The distinct parts of a tensor of `shape` in index order; empty parts are left out.

    >>> from plans.layout import Layout
    >>> [(part.region, part.ranks) for part in layout_parts(Layout((2, 2), ("dp", "mp"))("mp"), (4,))]
    [(((0, 2),), (0, 2)), (((2, 4),), (1, 3))]

    Raises:
        TwofoldError: the shape has another number of dims than the layout.
    """
    if len(shape) != len(layout.dims):
        raise TwofoldError(
            f"the shape {tuple(shape)} has {len(shape)} dims, the layout {layout} names {len(layout.dims)}"
        )
    found: dict[Region, dict[int, list[int]]] = {}
    for rank in layout.mesh.rank_list:
        region = layout.region(rank, shape)
        if all(start < stop for start, stop in region):
            found.setdefault(region, {}).setdefault(layout.mesh.index(rank, layout.partial), []).append(rank)
    return tuple(
        Part(region=region, terms=tuple(tuple(sorted(terms[index])) for index in sorted(terms)))
        for region, terms in sorted(found.items())
    )


def layout_table(layout: TensorLayout, shape: Sequence[int], *, name: str = "tensor") -> Table:
    """A row for every part of a tensor: its range in each dim, and the ranks that hold it or a term of it.

    Raises:
        TwofoldError: the shape does not fit the layout.
    """
    rows = [
        (*(f"{start}:{stop}" for start, stop in part.region), " + ".join(format_ranks(term) for term in part.terms))
        for part in layout_parts(layout, shape)
    ]
    columns = (*(f"dim {dim}" for dim in range(len(shape))), "ranks")
    notes = ("Ranks joined by + hold terms of a sum.",) if layout.partial else ()
    return Table(title=f"{name} {tuple(shape)} as {layout}", columns=columns, rows=rows, notes=notes)
