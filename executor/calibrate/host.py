"""The time that this host needs to issue a block of torch's layers, measured in 20 s in one process.

The parts are those of `executor.calibrate.stacks`. torch's fake process group simulates two ranks: FSDP2 and tensor
parallelism issue all of their usual work, and their messages complete at once. Without an accelerator, tiny CPU
operators replace kernel launches. DistributedDataParallel needs several ranks, so its time is that of the
quiet measured hosts, scaled by the ratio of this host's plain blocks to theirs. Times are processor times, which other
processes on the host do not affect.
"""

from __future__ import annotations

import datetime
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from costmodels.fit.points import Point
from costmodels.price.torch_hosts import FAKE_GROUP, KINDS, Host, host_s
from executor.calibrate.dispatch import block_points
from executor.calibrate.stacks import sharded_points, tensor_parallel_points
from executor.calibrate.timing import Timer
from executor.device import pick_device
from plans.errors import TwofoldError

__all__ = ["measure_host"]

REPEATS = 12
_RANKS = 2
_LEAST_S = 1e-6
"""No host issues a block in less; slopes of disturbed times may be less."""


def measure_host(name: str, *, device: str = "auto", say: Callable[[str], None]) -> Host:
    """Measure and return this host.

    Args:
        name: that it is to have.
        device: "auto", "cpu", "cuda" or "npu".
        say: called with a line now and then.

    Raises:
        TwofoldError: a process group exists already, or the device does not exist.
    """
    if dist.is_initialized():
        raise TwofoldError("a host must be measured in a separate process: this one already has a process group")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    own = pick_device(device)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=_RANKS)
    try:
        timer = Timer(own, repeats=REPEATS, busy_s=0.0, clock_ns=time.process_time_ns)
        say("plain blocks")
        points = list(block_points(timer))
        say("FSDP2")
        points += sharded_points(timer)
        say("tensor parallel")
        points += tensor_parallel_points(timer)
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)
    where = "tiny operators on the processor stand for launches" if not own.is_async else own.kind
    source = (
        f"torch {torch.__version__}, Python {platform.python_version()}, {_processor()}, {where}, "
        f"{datetime.datetime.now(datetime.UTC).date()}"
    )
    return host_of(points, name, source)


def host_of(points: list[Point], name: str, source: str) -> Host:
    """The host fitted to the times in `points`; kinds without measurements are scaled.

    Raises:
        TwofoldError: a time that is none.
    """
    measured: dict[str, tuple[float, float]] = {}
    spreads = []
    for kind, (stack, options) in _MEASURED.items():
        both = [
            next(
                point
                for point in points
                if (point.stack, point.call) == (stack, f"block_{way}") and point.options == options
            )
            for way in ("forward", "backward")
        ]
        if min(point.seconds for point in both) < _LEAST_S:
            raise TwofoldError(
                f"the time of a block ({kind}) could not be measured: the host is too busy; measure it again"
            )
        measured[kind] = (FAKE_GROUP[kind] * both[0].seconds, FAKE_GROUP[kind] * both[1].seconds)
        spreads += [math.log(point.seconds / point.low_s) for point in both if 0 < point.low_s <= point.seconds]
    plain = zip(measured["plain"], host_s("quiet", "plain"), strict=True)
    ratio = math.sqrt(math.prod(own / quiet for own, quiet in plain))
    scaled = tuple(kind for kind in KINDS if kind not in measured)
    others = {kind: (ratio * host_s("quiet", kind)[0], ratio * host_s("quiet", kind)[1]) for kind in scaled}
    spread = round(statistics.fmean(spreads), 4) if spreads else 0.0
    return Host(name=name, source=source, blocks_s={kind: (measured | others)[kind] for kind in KINDS}, spread=spread,
                scaled=scaled)  # fmt: skip


_MEASURED: Mapping[str, tuple[str, dict[str, int]]] = {
    "plain": ("torch", {}),
    "dtensor": ("dtensor", {}),
    "fsdp2": ("fsdp2", {"reshard": 0, "sync": 1}),
    "fsdp2_accumulate": ("fsdp2", {"reshard": 0, "sync": 0}),
    "fsdp2_reshard": ("fsdp2", {"reshard": 1, "sync": 1}),
    "fsdp2_reshard_accumulate": ("fsdp2", {"reshard": 1, "sync": 0}),
}
"""Kind -> stack and options of its points."""


def _processor() -> str:
    """Its model, as reported by Linux."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
