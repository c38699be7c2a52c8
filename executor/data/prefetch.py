"""Reads ahead: a thread prepares the next batches while the current step runs."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

from plans.errors import TwofoldError

__all__ = ["Prefetcher"]

T = TypeVar("T")


class Prefetcher(Iterator[T]):
    """Iterates over `source`, whose next `depth` items a background thread prepares ahead of the consumer.

    Work that should be done ahead too goes into the source: `Prefetcher(map(place_on_device, dataset.epoch(0)))`.
    An error of the source is raised in the consumer after the items before it. The thread ends with the source, on
    `close`, at the end of the `with` block, and when nobody holds the prefetcher any more.

        >>> with Prefetcher(range(3)) as items:
        ...     list(items)
        [0, 1, 2]
    """

    def __init__(self, source: Iterable[T], *, depth: int = 2) -> None:
        """Start reading `source`; raises TwofoldError if `depth` is less than 1."""
        if depth < 1:
            raise TwofoldError(f"prefetch depth {depth}: must be 1 or more")
        self._shelf: _Shelf[T] = _Shelf(depth)
        # The thread knows the shelf and not the prefetcher, or a prefetcher that is dropped would live on.
        self._thread = threading.Thread(target=_fill, args=(self._shelf, source), name="prefetch", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._shelf.close)

    def __next__(self) -> T:
        """The next item of the source, waiting for it if need be."""
        return self._shelf.take()

    def close(self) -> None:
        """Discard prefetched items and wait for the thread, which finishes its current item."""
        self._shelf.close()
        self._thread.join()

    def __enter__(self) -> Self:
        """The prefetcher itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it. An error passes through at once: the thread ends by itself after its current item."""
        self._shelf.close()
        if error is None:
            self._thread.join()


class _Shelf(Generic[T]):
    """A bounded queue of up to `depth` items between the preparing thread and the consumer."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.items: deque[T] = deque()
        self.error: BaseException | None = None
        self.is_finished = False  # no more items will come
        self.is_closed = False  # nobody wants any
        self.changed = threading.Condition()

    def wait_for_room(self) -> bool:
        """Whether another item is needed, once there is room for it."""
        with self.changed:
            self.changed.wait_for(lambda: self.is_closed or len(self.items) < self.depth)
            return not self.is_closed

    def put(self, item: T) -> None:
        with self.changed:
            if not self.is_closed:
                self.items.append(item)
            self.changed.notify_all()

    def finish(self, error: BaseException | None) -> None:
        with self.changed:
            self.is_finished, self.error = True, error
            self.changed.notify_all()

    def take(self) -> T:
        with self.changed:
            self.changed.wait_for(lambda: self.items or self.is_finished or self.is_closed)
            if self.items:
                item = self.items.popleft()
                self.changed.notify_all()
                return item
            error, self.error = self.error, None
        if error is not None and not self.is_closed:
            raise error
        raise StopIteration

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self.items.clear()
            self.changed.notify_all()


def _fill(shelf: _Shelf[T], source: Iterable[T]) -> None:
    error: BaseException | None = None
    try:
        iterator = iter(source)
        while shelf.wait_for_room():
            try:
                item = next(iterator)
            except StopIteration:
                break
            shelf.put(item)
    except BaseException as caught:
        error = caught
    finally:
        shelf.finish(error)
