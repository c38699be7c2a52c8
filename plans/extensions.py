"""Modules of other packages that add schedules, stacks, devices or operators.

A package registers its module under the entry points "twofold". The module adds its declarations when it is imported,
which happens when an unknown name is first used. Unused extensions therefore cost nothing.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import entry_points

from plans.errors import TwofoldError

__all__ = ["load_extensions"]


@lru_cache(maxsize=1)
def load_extensions() -> tuple[str, ...]:
    """Import all of them, once; returns their names.

    Raises:
        TwofoldError: one that cannot be imported.
    """
    found = []
    for entry in entry_points(group="twofold"):
        try:
            entry.load()
        except (ImportError, AttributeError) as error:
            raise TwofoldError(
                f"the extension {entry.name} = {entry.value} cannot be loaded ({error}); fix or uninstall its package"
            ) from None
        found.append(entry.name)
    return tuple(found)
