"""The prices of redistribution steps that the searches accept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from plans.layout import Layout
from plans.redistribution.step import Step, StepKind
from plans.redistribution.table import Array

__all__ = ["LocalPrice", "Seconds", "StepPrice"]

Seconds = npt.NDArray[np.float64]
"""Seconds, one per element."""

StepPrice = Callable[[Step, tuple[int, ...], int], float]
"""Seconds of one step, for the global shape and the bytes per element."""


class LocalPrice(ABC):
    """A price of steps with parts and lower bounds, so that a search can prune what cannot win.

    The object is hashable (what was found is kept), and equal prices are equal objects.
    """

    __slots__ = ()

    @abstractmethod
    def __call__(self, step: Step, shape: tuple[int, ...], itemsize: int) -> float:
        """Seconds of any step."""

    @abstractmethod
    def local_s(self, kind: StepKind, mesh: Layout, axes: frozenset[str], size_bytes: int, itemsize: int) -> float:
        """Seconds of a slice or a collective, as `__call__` says.

        `size_bytes`: of a slice the largest parts before and after together, of a collective the larger of the two.
        """

    @abstractmethod
    def transfer_s(
        self, num_peers: int, size_bytes: int, pairs: frozenset[tuple[int, int]], ranks: Sequence[int]
    ) -> float:
        """Seconds of a transfer from the load of its busiest rank; `pairs` are positions in `ranks`."""

    @abstractmethod
    def transfer_floors_s(
        self, sizes_bytes: Array, least_peers: Array, most_peers: int, leaves_domain: bool
    ) -> Seconds:
        """Lower bounds on the seconds of transfers whose busiest rank has at least the given bytes and peers.

        `leaves_domain`: something goes from one of the `domains` to another.
        """

    @abstractmethod
    def domains(self, ranks: Sequence[int]) -> tuple[int, ...] | None:
        """Per rank the number of its domain (ranks joined by the fastest links); None if there is one domain."""
