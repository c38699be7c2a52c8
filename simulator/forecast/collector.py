"""Work without Python's collector of cycles.

What forecasts make and keep has no cycles, so reference counts free it. Yet every few thousand new objects the
collector would walk over all that is kept, which took a third of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_collector"]


@contextmanager
def without_collector() -> Iterator[None]:
    """The collector rests within; it goes on afterwards if it was at work before.

    >>> with without_collector():
    ...     gc.isenabled()
    False
    """
    was_at_work = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_at_work:
            gc.enable()
