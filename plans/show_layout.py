"""Layouts as text: which rank stands where in a mesh, and which rank holds what of a tensor.

`print(mesh)` and `print(layout)` show these tables; inside f-strings a layout keeps its one-line form.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

from plans.layout import Layout, TensorLayout
from plans.ranks import format_ranks

__all__ = ["layout_table", "mesh_table"]


def mesh_table(mesh: Layout) -> str:
    """The ranks of a mesh: the last axis runs across, the one before down, the others block by block.

    >>> print(mesh_table(Layout((2, 2), ("dp", "mp"), [3, 2, 1, 0])))
    mesh dp=2, mp=2
          mp=0  mp=1
    dp=0     3     2
    dp=1     1     0
    """
    head = "mesh " + ", ".join(f"{name}={size}" for name, size in zip(mesh.alias_name, mesh.device_matrix, strict=True))
    sizes = [mesh.size((name,)) for name in mesh.alias_name]
    cells = {mesh.coordinate(rank): str(rank) for rank in mesh.rank_list}
    labels = [[f"{name}={at}" for at in range(size)] for name, size in zip(mesh.alias_name, sizes, strict=True)]
    return "\n".join([head, *_blocks(labels, cells)])


def layout_table(layout: TensorLayout, shape: Sequence[int] | None = None) -> str:
    """Which ranks hold which part: the last split dim runs across, the one before down, the others block by block.

    Ranks with the same part stand together (`0-3`, `0,4`); terms of a partial sum are joined by `+`.

    Args:
        layout: the layout to show.
        shape: the global shape, to show index ranges; without it parts are numbered.

    >>> mesh = Layout((2, 2, 2), ("dp", "sp", "mp"))
    >>> print(layout_table(mesh("mp", ("sp", "dp")), (4, 16)))
    (mp, (sp, dp)) of shape (4, 16) on dp=2, sp=2, mp=2
               dim1[0:4]  dim1[4:8]  dim1[8:12]  dim1[12:16]
    dim0[0:2]          0          4           2            6
    dim0[2:4]          1          5           3            7
    """
    mesh = layout.mesh
    axes = ", ".join(f"{name}={size}" for name, size in zip(mesh.alias_name, mesh.device_matrix, strict=True))
    of_shape = "" if shape is None else f" of shape {tuple(shape)}"
    counts = layout.split_counts
    split = [dim for dim, count in enumerate(counts) if count > 1]
    terms: dict[tuple[int, ...], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    ranges: dict[tuple[int, int], str] = {}
    for rank in mesh.rank_list:
        part = tuple(mesh.index(rank, layout.dims[dim]) for dim in split)
        terms[part][mesh.index(rank, layout.partial)].append(rank)
        if shape is not None:
            region = layout.region(rank, shape)
            ranges.update(
                {(dim, at): f"[{region[dim][0]}:{region[dim][1]}]" for dim, at in zip(split, part, strict=True)}
            )
    cells = {
        part: " + ".join(format_ranks(by_term[term], ",") for term in sorted(by_term))
        for part, by_term in terms.items()
    }
    labels = [
        [f"dim{dim}{ranges.get((dim, at), f' {at}/{counts[dim]}')}" for at in range(counts[dim])] for dim in split
    ]
    return "\n".join([f"{layout}{of_shape} on {axes}", *_blocks(labels, cells)])


def _blocks(labels: list[list[str]], cells: dict[tuple[int, ...], str]) -> list[str]:
    if not labels:
        return [f"everything: {cells[()]}"]
    lines = []
    rows = labels[-2] if len(labels) > 1 else [""]
    left = max(len(row) for row in rows)
    widths = [
        max(len(column), *(len(text) for at, text in cells.items() if at[-1] == number))
        for number, column in enumerate(labels[-1])
    ]
    for outer in itertools.product(*(range(len(names)) for names in labels[:-2])):
        if outer:
            lines.append(", ".join(names[at] for names, at in zip(labels[:-2], outer, strict=True)) + ":")
        lines.append(
            "  ".join([" " * left, *(name.rjust(width) for name, width in zip(labels[-1], widths, strict=True))])
        )
        for row, name in enumerate(rows):
            inner = (row,) if len(labels) > 1 else ()
            texts = (cells[(*outer, *inner, column)].rjust(width) for column, width in enumerate(widths))
            lines.append("  ".join([name.ljust(left), *texts]))
    return lines
