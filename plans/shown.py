"""Values that show themselves: one line in a terminal, a picture in a notebook, rows for pandas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from plans.errors import TwofoldError

__all__ = ["Notebook", "Shown", "show_by"]


class Notebook(Protocol):
    """Makes tables and pictures of results."""

    def frame_of(self, result: Any) -> Any:
        """The rows of a result as a `pandas.DataFrame`."""

    def html_of(self, result: Any) -> str:
        """A result as HTML."""


_notebooks: list[Callable[[], Notebook]] = []


def show_by(notebook: Callable[[], Notebook]) -> None:
    """Register the maker of tables and pictures. `twofold` does this, so that results do not depend on higher
    packages."""
    _notebooks[:] = [notebook]


class Shown:
    """A result with a text, a picture and rows, for terminals and notebooks."""

    __slots__ = ()

    def to_pandas(self) -> Any:
        """The rows of the result as a `pandas.DataFrame`.

        Raises:
            ModuleNotFoundError: pandas is not installed: pip install 'twofold[reports]'.
            TwofoldError: nothing of twofold's face was used yet.
        """
        for notebook in _notebooks:
            return notebook().frame_of(self)
        raise TwofoldError("to_pandas needs the public API: write `import twofold as tf` and get the result from tf")

    def _repr_html_(self) -> str | None:
        """The result in a notebook; None, which shows its `repr`, while nothing of twofold's face was used."""
        return next((notebook().html_of(self) for notebook in _notebooks), None)
