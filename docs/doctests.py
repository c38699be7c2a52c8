"""An extension for the reference: examples (`>>>`) of docstrings become blocks of code. mkdocs.yml names it."""

from __future__ import annotations

from typing import Any

import griffe

__all__ = ["Doctests", "fenced"]


class Doctests(griffe.Extension):
    """Changes every docstring as it is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object of the sources."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The text with a fence around each paragraph that begins with `>>>`.

    >>> fenced("Twice.\\n\\n>>> twice(2)\\n4")
    'Twice.\\n\\n```pycon\\n>>> twice(2)\\n4\\n```'
    """
    paragraphs = text.split("\n\n")
    return "\n\n".join(f"```pycon\n{each}\n```" if each.startswith(">>>") else each for each in paragraphs)
