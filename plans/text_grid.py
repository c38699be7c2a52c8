"""Tables of text with one label per row and column, for arrays of any number of dims."""

from __future__ import annotations

import itertools

__all__ = ["grid_lines"]


def grid_lines(labels: list[list[str]], cells: dict[tuple[int, ...], str]) -> list[str]:
    """The lines of a table: the last dim runs across, the one before down, the others block by block.

    Args:
        labels: per dim the labels of its indices.
        cells: index -> text, for every index of the array.

    >>> grid_lines([["a", "b"]], {(0,): "1", (1,): "2"})
    ['  a  b', '  1  2']
    """
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
