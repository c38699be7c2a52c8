"""The remaining host time of recorded launches: a recording of n smallest kernels, replayed in a row.

One replay takes launch_s + n node_s: the device's pause between two replays, and its front end's time for a node with
the kernel in it. `costmodels.fit.device` solves for both.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from costmodels.fit.points import Point
from executor.calibrate.timing import Timer

__all__ = ["replay_points"]

_NODES = (1, 8, 64, 512, 4096)


def replay_points(timer: Timer) -> Iterator[Point]:
    """One point per length of recording; none where the device cannot record launches."""
    device = timer.device
    if not device.can_record:
        return
    number = torch.zeros(1, device=device.torch_device)
    number.add_(1)
    for nodes in _NODES:

        def issue(nodes: int = nodes) -> None:
            for _ in range(nodes):
                number.add_(1)

        recording = device.capture(issue)
        if recording is None:
            return
        sample = timer.issued_time(recording.replay)
        recording.release()
        yield Point(kind="replay", call="nodes", shape=(nodes,), dtype="float32", **sample.fields)
