"""Host time of torch's own parallel modules, per Llama block and per step, on several hosts or on a user's own."""

from __future__ import annotations

import math
import os
import statistics
from functools import lru_cache
from pathlib import Path

import msgspec

from plans.errors import TwofoldError
from plans.files import write_atomically
from plans.reading import read_json

__all__ = [
    "CHECKPOINT_S",
    "DTENSOR_END_HOST_S",
    "ENTRY_HOST_S",
    "HOSTS_US",
    "KINDS",
    "ROTARY_HOST_S",
    "SEQUENCE_PARALLEL",
    "SPLIT_BACKWARD",
    "UPDATE_HOST_S",
    "Host",
    "host_s",
    "load_host",
    "median_over",
    "save_host",
]

ROTARY_HOST_S = (98e-6, 200e-6)
"""The part of a plain block that is rotary positions of queries and keys: two each of a split, a negation, a
concatenation, two products and a sum, at the measured dispatch of these operators (kinds torch and backward)."""

DTENSOR_END_HOST_S = {"embedding": (489e-6, 196e-6), "head": (105e-6 + 384e-6 + 120e-6, 419e-6 + 200e-6)}
"""Forward and backward: the measured row-wise module; the column-wise one, the extra time of the row-wise one for its
redistribution, and plain operators (norm, cast, loss) at their measured dispatch."""

CHECKPOINT_S = (714e-6 - 426e-6, 1412e-6 - 615e-6 - 426e-6)
"""The host time that activation checkpointing adds to a block's forward and, besides the recomputed forward, to its
backward."""

SEQUENCE_PARALLEL = (1.4, 1.2)
"""Forward and backward of a block of distributed tensors with `SequenceParallel` norms, over those without: its norms
and sums are of distributed tensors too. Ratios on an H100 host in torch's fake process group (torch 2.11): 1.2 to 1.5
and 1.0 to 1.4."""

SPLIT_BACKWARD = {"I": 1.1, "W": 2.8}
"""The two parts of a backward that zero-bubble schedules split, over a whole one. For the second, torch walks the graph
and calls the autograd engine once for each group of parameters (torch/distributed/pipelining/_backward.py,
`stage_backward_weight`). Ratios on an H100 host (torch 2.11, chains of 2 and 6 tiny blocks): 1.0 to 1.1 and 2.7 to 3.0.
"""

ENTRY_HOST_S = (15.6e-6 - 1.9e-6) / 5
"""The extra host time for a distributed tensor in a list of an optimizer's operator: the fused update takes lists of
weights, gradients, two states and counts (kinds of dispatch adamw_fused, stacks fsdp2 and optimizer)."""

UPDATE_HOST_S = {"fused": (1.9e-6, 15.6e-6), "foreach": (5.7e-6, 5.7e-6 + 14 * ENTRY_HOST_S)}
"""Of one parameter in an update, plain and sharded: measured (adamw_fused, adamw_foreach) but for the sharded foreach
form, whose operators take 14 entries of a parameter (torch/optim/adamw.py, _multi_tensor_adamw): assumed."""

KINDS = (
    "plain", "ddp", "dtensor", "fsdp2", "fsdp2_accumulate", "fsdp2_reshard", "fsdp2_reshard_accumulate",
)  # fmt: skip

HOSTS_US = {
    "first": ((405, 674), (418, 682), (2868, 4008), (1269, 1260), (1280, 795), (1283, 1786), (1239, 1339)),
    "second": ((426, 615), (466, 798), (2615, 3708), (1144, 1174), (1169, 774), (1209, 1702), (1294, 1507)),
    "third": ((453, 610), (476, 760), (2482, 5638), (2110, 1674), (1439, 1947), (1468, 3074), (1425, 2484)),
    "fourth": ((985, 765), (722, 1288), (3315, 5791), (1610, 1808), (1837, 800), (1518, 2300), (1499, 1769)),
    "fifth": ((749, 759), (321, 1069), (3700, 6614), (2726, 1699), (2131, 1165), (2831, 2321), (1078, 1772)),
    "sixth": ((901, 1160), (799, 1524), (4008, 7879), (1746, 1830), (1878, 1411), (2083, 2870), (1561, 2367)),
    "seventh": ((746, 963), (912, 1563), (5616, 11040), (3300, 3122), (2877, 2377), (3270, 4500), (3251, 2356)),
    "eighth": ((696, 1679), (941, 1611), (4984, 8773), (2110, 2513), (2531, 2098), (2605, 3620), (2636, 2497)),
}
"""Host microseconds of one Llama block, forward and backward, with tiny sizes: torch 2.11.0, 2026-11-21, kinds of
dispatch in benchmarks/data (stacks torch, ddp, dtensor, fsdp2) on five hosts of several H200: h200-x1 and h200-x2,
h200-x4, repeat-h200-x2-quick (which took fewer repeats), h200-third-x2, h200-third-x4. The last three are hosts of
H100s of 2026-11-25, measured by `calibrate --host` (benchmarks/results/peers_h100_fifth.json, hosts), whose ddp and
dtensor are scaled."""

PLAIN_HOSTS_US = ((410, 512), (371, 728), (452, 633))
"""The plain block on hosts of one H200: h200-third-x1, repeat-h200-x1-full, repeat-h200-x1-quick."""


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time that one host needs to issue a block: a file written by `twofold calibrate --host`.

    Args:
        name: name of the host.
        source: versions, processor and date.
        blocks_s: of `KINDS`, seconds of a block's forward and backward, in the median.
        spread: standard deviation of the logarithm of repeated times.
        scaled: kinds that were not measured here: those of the median host, times how this one compares with it.
    """

    name: str
    source: str
    blocks_s: dict[str, tuple[float, float]]
    spread: float
    scaled: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if sorted(self.blocks_s) != sorted(KINDS):
            raise TwofoldError(f"blocks_s of a host has the kinds {', '.join(KINDS)}, not {', '.join(self.blocks_s)}")
        if not all(0 < time < 1 for times in self.blocks_s.values() for time in times) or not 0 <= self.spread < 3:
            raise TwofoldError("a host's blocks take between 0 and 1 s, and its spread is between 0 and 3")


def save_host(host: Host, path: str | os.PathLike[str]) -> Path:
    """Write the file of a host atomically."""
    load_host.cache_clear()
    return write_atomically(path, msgspec.json.format(msgspec.json.encode(host), indent=1) + b"\n")


@lru_cache(maxsize=64)
def load_host(path: str) -> Host:
    """The host of a file.

    Raises:
        TwofoldError: no such file, or not a host file.
    """
    return read_json(path, "host", Host)


def host_s(host: str, kind: str) -> tuple[float, float]:
    """Seconds of a kind on a host; "least": for every entry the least time of all measured hosts, since other work on a
    host only adds time; "median": entry by entry. Assumed for hosts of other devices. Another name is the path of a
    host's file.

    Raises:
        TwofoldError: as `load_host`.
    """
    if host not in ("least", "median", *HOSTS_US):
        return load_host(host).blocks_s[kind]
    place = KINDS.index(kind)
    if host in HOSTS_US:
        forward, backward = HOSTS_US[host][place]
        return forward * 1e-6, backward * 1e-6
    times_us = [each[place] for each in HOSTS_US.values()] + (list(PLAIN_HOSTS_US) if kind == "plain" else [])
    of = min if host == "least" else statistics.median
    return of(forward for forward, _ in times_us) * 1e-6, of(backward for _, backward in times_us) * 1e-6


def median_over(host: str) -> float:
    """Logarithm of what the median host takes over this one, in the mean over kinds and both directions.

    >>> round(median_over("least"), 2), median_over("median")
    (0.43, 0.0)
    """
    pairs = [
        (own_s, median_s) for kind in KINDS
        for own_s, median_s in zip(host_s(host, kind), host_s("median", kind), strict=True)
    ]  # fmt: skip
    return statistics.fmean(math.log(median_s / own_s) for own_s, median_s in pairs)
