"""Issues a rank's instructions on its compute streams, with the events between them that `plans.streams` asks for.

Stream 0 is the one that is current when a step is issued, so that a recording has it; the others are the rank's own. A
step begins on them behind all that stream 0 was given before, and is over on stream 0 when it is over on all of them.
Memory that is dropped needs no more than that: who takes it next waits for those who used it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

from executor.device import Device
from plans.streams import StreamOrder

__all__ = ["Streams"]


class Streams:
    """The compute streams of a rank.

    Args:
        order: of its instructions.
        device: where they run.
    """

    def __init__(self, order: StreamOrder, device: Device) -> None:
        self.order = order
        self._device = device
        self._others = [device.stream() for _ in range(order.count - 1)]
        self._issued = [
            (stream, order.waits.get(position, ()), position in order.awaited)
            for position, stream in enumerate(order.streams)
        ]

    def issue(self, run: Callable[[int], None], *, one_by_one: bool = False) -> None:
        """Let `run` issue every instruction of a step on its stream.

        Args:
            run: issues the instruction at a position of the step on the current stream.
            one_by_one: let a stream wait for all of the one before it whenever the stream changes. What rules make
                once and keep, in their first step, is then there for all streams.
        """
        device = self._device
        points: dict[int, torch.Event | None] = {}
        main = device.current_stream()
        streams = [main, *self._others]
        self._after(main, self._others)
        current = 0
        try:
            for position, (stream, waits, is_awaited) in enumerate(self._issued):
                if stream != current:
                    before = device.point() if one_by_one else None
                    device.set_stream(streams[stream])
                    device.wait_for(before)
                    current = stream
                for awaited in waits:
                    device.wait_for(points[awaited])
                run(position)
                if is_awaited:
                    points[position] = device.point()
        except BaseException:
            device.set_stream(main)
            with contextlib.suppress(RuntimeError):  # a recording that failed refuses further events
                self._join(main)
            raise
        device.set_stream(main)
        self._join(main)

    def _join(self, main: torch.Stream | None) -> None:
        """Make stream 0 wait for all others: their work must be complete when a step or a recording ends."""
        for other in self._others:
            self._after(other, [main])

    def _after(self, first: torch.Stream | None, others: Sequence[torch.Stream | None]) -> None:
        """Make streams wait for all work that another stream has been given."""
        with self._device.on(first):
            point = self._device.point()
        for other in others:
            with self._device.on(other):
                self._device.wait_for(point)
