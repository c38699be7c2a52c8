"""Synchronises the ranks of a calibration, and names a rank that does not reach a measurement.

Ranks synchronise and exchange times over gloo on the host, never over the measured links. If a measurement hangs, a
watchdog on every rank prints which ranks arrived and which did not, and ends the process.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from executor.device import Device
from plans.errors import TwofoldError

__all__ = ["HUNG_EXIT_CODE", "RankSync"]

HUNG_EXIT_CODE = 75
ANSWER_S = 2.0
"""Seconds that the watch waits for a rank's last message."""


@dataclass(slots=True)
class RankSync:
    """Synchronises the ranks of a calibration. Every rank creates one, at the same point.

    Args:
        device: device of this rank.
        timeout_s: after which a measurement counts as hung.
        leave: called with the exit code to end this process then (for tests).
    """

    device: Device
    timeout_s: float = 30.0
    leave: Callable[[int], Any] = os._exit
    rank: int = field(init=False, default=0)
    size: int = field(init=False, default=1)
    groups: dict[int, Any] = field(init=False, default_factory=dict)
    pair: Any = field(init=False, default=None)
    _control: Any = field(init=False, default=None)
    _store: Any = field(init=False, default=None)
    _number: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        limit = datetime.timedelta(seconds=self.timeout_s)
        self._control = dist.new_group(backend="gloo", timeout=limit)
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        port = [0]
        if self.rank == 0:
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
            port = [self._store.port]
        dist.broadcast_object_list(port, src=0, group=self._control)
        if self.rank != 0:
            self._store = TCPStore(host, port[0], is_master=False, wait_for_workers=False, timeout=limit)
        for size in sorted({2, 4, 8, self.size}):
            if size <= self.size and self.size % size == 0:
                made = [self._group(range(i, i + size)) for i in range(0, self.size, size)]
                self.groups[size] = made[self.rank // size]

    def close(self) -> None:
        """Release the groups, so that they end with `destroy_process_group` and not with the process (which can crash
        in torch 2.13).
        """
        self.groups.clear()
        self.pair = self._control = self._store = None

    def _group(self, ranks: Sequence[int]) -> Any:
        return dist.new_group(list(ranks), timeout=datetime.timedelta(seconds=4 * self.timeout_s))

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait on the host for every rank."""
        self._exchange(lambda: dist.monitored_barrier(self._control, timeout=self._limit(timeout_s)))

    def barrier_until(self, left_s: float) -> None:
        """Like `barrier`, where another rank may still need `left_s` seconds."""
        self.barrier(max(0.0, left_s) + self.timeout_s)

    def all_agree(self, agrees: bool) -> bool:
        """Whether it is true on every rank."""
        return self.maximum([0.0 if agrees else 1.0])[0] == 0.0

    def maximum(self, values: Sequence[float]) -> list[float]:
        """The largest of every value over the ranks."""
        largest = torch.tensor(list(values), dtype=torch.float64)
        self._exchange(lambda: dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._control))
        return [float(value) for value in largest]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank, on rank 0; an empty list elsewhere."""
        everywhere = [value] * self.size if self.rank == 0 else None
        self._exchange(lambda: dist.gather_object(value, everywhere, group=self._control))
        return everywhere or []

    def from_rank_0(self, value: Any) -> Any:
        """The value of rank 0, on every rank."""
        box = [value]
        self._exchange(lambda: dist.broadcast_object_list(box, src=0, group=self._control))
        return box[0]

    def _limit(self, seconds: float | None) -> datetime.timedelta:
        return datetime.timedelta(seconds=self.timeout_s if seconds is None else seconds)

    def _exchange(self, call: Callable[[], object]) -> None:
        """Run a call on all ranks, if there are others."""
        if self.size == 1:
            return
        try:
            call()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise TwofoldError(
                f"rank {self.rank} gets no answer from another rank: {reason}. The measured points are kept: "
                "run the same command again to resume"
            ) from error

    @contextlib.contextmanager
    def watch(self, what: str, ranks: Sequence[int] | None = None, timeout_s: float | None = None) -> Iterator[None]:
        """A context for a measurement of all ranks: if it hangs, name the missing ranks and exit.

        Args:
            what: in words.
            ranks: that take part; all when None.
            timeout_s: other than usual.
        """
        if self.size == 1:
            yield
            return
        self._number += 1
        number, limit_s = self._number, timeout_s or self.timeout_s
        members = range(self.size) if ranks is None else ranks
        self._store.set(f"at/{self.rank}", f"{number} {what}")
        done = threading.Event()

        def look() -> None:
            if done.wait(limit_s):
                return
            print(self._who_is_missing(number, what, members, limit_s), file=sys.stderr, flush=True)
            sys.stdout.flush()
            self.leave(HUNG_EXIT_CODE)

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        try:
            yield
            self._store.set(f"done/{self.rank}", str(number))
        finally:
            done.set()

    def _who_is_missing(self, number: int, what: str, members: Sequence[int], limit_s: float) -> str:
        """The ranks that are still in the measurement, that have finished it, and that never arrived, as text."""
        inside, through, missing = [], [], []
        for rank in members:
            at = self._read(f"at/{rank}")
            if at is None or int(at.split()[0]) < number:
                where = f", which is at {at.split(maxsplit=1)[1]!r}" if at else ""
                missing.append(f"{rank}{where}")
            elif int(self._read(f"done/{rank}") or 0) >= number:
                through.append(str(rank))
            else:
                inside.append(str(rank))
        parts = [f"{what} did not end within {limit_s:g} s"]
        if missing:
            parts.append(f"missing: rank {'; rank '.join(missing)}")
        if inside:
            parts.append(f"waiting in it: rank {', '.join(inside)}")
        if through:
            parts.append(f"through: rank {', '.join(through)}")
        return "; ".join(parts) + ". Measured points are kept: run the same command again to resume"

    def _read(self, key: str) -> str | None:
        start = time.monotonic()
        while time.monotonic() - start < ANSWER_S:
            try:
                if self._store.check([key]):
                    return str(self._store.get(key).decode())
            except RuntimeError:  # rank 0, which keeps the words, has gone
                return None
            time.sleep(0.1)
        return None
