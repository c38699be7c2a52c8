"""Simulations, forecasts and searches without cyclic garbage collection.

Python's collector starts whenever some hundred more objects exist. Most objects of a simulation or a forecast belong to
its result or are freed at once, and none of them refer to each other in a circle (`tests/simulator/test_garbage.py`):
the collector would find nothing. Without it forecasts take an eighth less time.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_collection_at_exit", "without_collection"]


@contextmanager
def without_collection() -> Iterator[None]:
    """A context or decorator in which the garbage collector is off.

    >>> with without_collection():
    ...     gc.isenabled()
    False
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()  # the new objects count as old, so that the next collection does not look at all of them
            gc.unfreeze()
            gc.enable()


def no_collection_at_exit() -> None:
    """Skip garbage collection at the end of the process too, over everything that a search has left in memory.

    For commands that end the process. Calling it twice is harmless.
    """
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
