"""The layout picture: a tensor cut into the parts that ranks hold, in two dims, as people draw it on paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plans.errors import TwofoldError
from plans.layout import Region, TensorLayout
from plans.ranks import format_ranks
from reports.svg import Picture, text_width

__all__ = ["Part", "layout_parts", "layout_picture"]

_FILLS = ("sky", "orange", "green", "yellow", "purple", "vermillion", "blue", "grey")
_MAX_PARTS = 1024


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


def layout_picture(layout: TensorLayout, shape: Sequence[int], *, name: str = "tensor") -> Picture:
    """Draw which rank holds what: rows are one dim, columns another.

    Two dims are drawn as they are. Of more dims the last two that are split are drawn, and what other split dims add is
    drawn as one picture below the other; whole dims are named in the caption.

    Raises:
        TwofoldError: the shape does not fit the layout, or there are more than 1,024 parts.
    """
    parts = layout_parts(layout, shape)
    if len(parts) > _MAX_PARTS:
        raise TwofoldError(f"{layout} cuts {tuple(shape)} into {len(parts)} parts; pictures show at most {_MAX_PARTS}")
    grid = _grid(layout, shape, parts)
    rest = _others(layout, grid.down, grid.across)
    others = sorted({tuple(part.region[dim] for dim in rest) for part in parts})
    left, top = max(110.0, *(text_width(side, 10.5) + 24 for side in grid.sides), 0.0), 72.0
    block = len(grid.rows) * grid.height + 40
    caption, note = f"{name} {tuple(shape)} as {layout}", _note(layout)
    right = left + len(grid.columns) * grid.width
    width = max(right + 20, text_width(caption, 15) + 20, text_width(note, 11) + 20)
    picture = Picture(title=caption, width=width, height=top + len(others) * block)
    picture.text(8, 20, caption, "title")
    picture.text(8, 38, note, "small muted")
    for number, other in enumerate(others):
        y = top + number * block
        if rest:
            where = ", ".join(f"dim {dim} [{start}:{stop}]" for dim, (start, stop) in zip(rest, other, strict=True))
            picture.text(8, y - 18, where, "small")
        here = [part for part in parts if tuple(part.region[dim] for dim in rest) == other]
        _draw(picture, layout, here, grid, (left, y))
    return picture


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """Rows and columns of a picture.

    Args:
        down: the dim drawn downwards, or None.
        across: the dim drawn across, or None.
        rows: index ranges of the rows.
        columns: index ranges of the columns.
        width: of a cell in pixels.
        height: of a cell in pixels.
    """

    down: int | None
    across: int | None
    rows: list[tuple[int, int]]
    columns: list[tuple[int, int]]
    width: float
    height: float

    @property
    def heads(self) -> list[str]:
        """The labels of the columns."""
        return [f"dim {self.across} [{start}:{stop}]" for start, stop in self.columns if self.across is not None]

    @property
    def sides(self) -> list[str]:
        """The labels of the rows."""
        return [f"dim {self.down} [{start}:{stop}]" for start, stop in self.rows if self.down is not None]

    def corner(self, region: Region) -> tuple[float, float]:
        """x and y of the upper left corner of a part, from that of the grid."""
        column = self.columns.index(region[self.across]) if self.across is not None else 0
        row = self.rows.index(region[self.down]) if self.down is not None else 0
        return column * self.width, row * self.height


def _grid(layout: TensorLayout, shape: Sequence[int], parts: Sequence[Part]) -> _Grid:
    """Rows, columns and a cell size that fits all labels."""
    down, across = _drawn_dims(layout, shape)
    labels = [_label(part) for part in parts]
    inside = min(230.0, 16 + max(text_width(line, 12) for lines in labels for line in lines))
    grid = _Grid(
        down=down, across=across,
        rows=sorted({part.region[down] for part in parts}) if down is not None else [(0, 1)],
        columns=sorted({part.region[across] for part in parts}) if across is not None else [(0, 1)],
        width=inside, height=26 + 15.0 * max(len(lines) for lines in labels),
    )  # fmt: skip
    return replace(grid, width=max(84.0, inside, *(text_width(head, 10.5) + 10 for head in grid.heads)))


def _note(layout: TensorLayout) -> str:
    """The mesh, and the axes that replicate or hold partial sums."""
    mesh = ", ".join(
        f"{axis}={size}" for axis, size in zip(layout.mesh.alias_name, layout.mesh.device_matrix, strict=True)
    )
    note = f"mesh {mesh}" + (f"; replicated over {', '.join(layout.replicated)}" if layout.replicated else "")
    return note + (f"; + joins terms of a sum over {', '.join(layout.partial)}" if layout.partial else "")


def _draw(
    picture: Picture, layout: TensorLayout, parts: Sequence[Part], grid: _Grid, corner: tuple[float, float]
) -> None:
    left, top = corner
    cell, tall = grid.width, grid.height
    for at, head in enumerate(grid.heads):
        picture.text(left + (at + 0.5) * cell, top - 6, head, "middle small")
    for at, side in enumerate(grid.sides):
        picture.text(left - 8, top + (at + 0.5) * tall + 4, side, "end small")
    for part in parts:
        x, y = (start + step for start, step in zip(corner, grid.corner(part.region), strict=True))
        index = layout.mesh.rank_list.index(part.ranks[0])
        hover = f"{part.region}: ranks {format_ranks(part.ranks)}"
        picture.rect(x, y, cell, tall, f"{_FILLS[index % len(_FILLS)]} faint", hover)
        picture.rect(x, y, cell, tall, "frame")
        lines = _label(part)
        for line, text in enumerate(lines):
            picture.text(x + cell / 2, y + tall / 2 + 4 + 15 * (line - (len(lines) - 1) / 2), text, "middle")


def _label(part: Part) -> list[str]:
    """Lines such as "rank 0" or "ranks 0, 4 +" / "1, 5"."""
    several = len(part.ranks) > 1
    lines = [format_ranks(term) for term in part.terms]
    return [
        ("rank" + "s" * several + " " if not at else "") + text + (" +" if at < len(lines) - 1 else "")
        for at, text in enumerate(lines)
    ]


def _drawn_dims(layout: TensorLayout, shape: Sequence[int]) -> tuple[int | None, int | None]:
    """(dim drawn downwards, dim drawn across)."""
    if not shape:
        return None, None
    if len(shape) == 1:
        return None, 0
    if len(shape) == 2:
        return 0, 1
    split = [dim for dim, count in enumerate(layout.split_counts) if count > 1]
    chosen = split[-2:] if len(split) >= 2 else sorted({*split, *range(len(shape) - 2, len(shape))})[:2]
    return chosen[0], chosen[1]


def _others(layout: TensorLayout, down: int | None, across: int | None) -> list[int]:
    return [dim for dim, count in enumerate(layout.split_counts) if count > 1 and dim not in (down, across)]
