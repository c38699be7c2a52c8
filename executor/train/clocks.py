"""The offset of each rank's clock from rank 0's.

All processes of a host share its monotonic clock, so only hosts differ. A rank on another host than rank 0 asks it for
the time several times; the fastest answer is the most accurate, and is wrong by at most half of the time it took (D. L.
Mills, "Internet Time Synchronization: the Network Time Protocol", IEEE Transactions on Communications 39, 1991).
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from executor.device import Device, now_ns

__all__ = ["ahead_ns"]

_ROUNDS = 16
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def ahead_ns(device: Device) -> int:
    """By how many nanoseconds this rank's clock is ahead of that of rank 0; every rank of the default group calls it.

    0 on the host of rank 0, and without a process group.
    """
    if not dist.is_initialized():
        return 0
    rank, hosts = dist.get_rank(), [""] * dist.get_world_size()
    dist.all_gather_object(hosts, host_id())
    place, found = device.torch_device, 0
    for other, host in enumerate(hosts):
        if host == hosts[0]:
            continue
        if rank == 0:
            _answer(other, place)
        elif rank == other:
            found = _ask(place)
    return found


def host_id() -> str:
    """A text that only the processes of this host share."""
    return _BOOT.read_text().strip() if _BOOT.exists() else ""


def _ask(place: torch.device) -> int:
    answers, time = [], torch.zeros(1, dtype=torch.int64, device=place)
    for _ in range(_ROUNDS):
        asked_ns = now_ns()
        dist.send(time, 0)
        dist.recv(time, 0)
        theirs_ns, answered_ns = int(time.item()), now_ns()
        answers.append((answered_ns - asked_ns, (asked_ns + answered_ns) // 2 - theirs_ns))
    return min(answers)[1]


def _answer(rank: int, place: torch.device) -> None:
    time = torch.zeros(1, dtype=torch.int64, device=place)
    for _ in range(_ROUNDS):
        dist.recv(time, rank)
        time.fill_(now_ns())
        dist.send(time, rank)
