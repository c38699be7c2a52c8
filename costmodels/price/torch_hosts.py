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
    "FAKE_GROUP",
    "HOSTS_US",
    "KINDS",
    "PIPELINE_PASS",
    "QUIET",
    "ROTARY_HOST_S",
    "SEQUENCE_PARALLEL",
    "SPLIT_BACKWARD",
    "UPDATE_HOST_S",
    "Host",
    "host_s",
    "later",
    "load_host",
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
    "sixth": ((901, 1160), (799, 1524), (4008, 7879), (2078, 2178), (2178, 1637), (2416, 3329), (1811, 2746)),
    "seventh": ((746, 963), (912, 1563), (5616, 11040), (3927, 3715), (3337, 2757), (3793, 5220), (3771, 2733)),
    "eighth": ((696, 1679), (941, 1611), (4984, 8773), (2511, 2990), (2936, 2434), (3022, 4199), (3058, 2897)),
    "ninth": ((1033, 751), (943, 837), (5913, 7693), (2338, 2773), (2623, 1214), (2749, 2696), (2393, 1694)),
    "tenth": ((456, 734), (501, 839), (3053, 5248), (1756, 2139), (1463, 1431), (1496, 2123), (1995, 1549)),
    "eleventh": ((1053, 1598), (1112, 2188), (5747, 8247), (3513, 3540), (3427, 2214), (3146, 4301), (3453, 3488)),
}
"""Host microseconds of one Llama block, forward and backward, with tiny sizes: torch 2.11.0, kinds of dispatch in
benchmarks/data (stacks torch, ddp, dtensor, fsdp2) on seven hosts of several H200: h200-x1 and h200-x2, h200-x4,
repeat-h200-x2-quick (which took fewer repeats), h200-third-x2, h200-third-x4, and the ninth and tenth h200-fourth-x2
and h200-fifth-x2. The others were measured by `calibrate --host`, with `FAKE_GROUP`: the sixth to eighth are hosts of
H100s (benchmarks/results/peers_h100_fifth.json, hosts), whose ddp and dtensor are scaled, and the eleventh has two H200
(benchmarks/results/peers_h200_host.json, which tells its ddp too)."""

QUIET = ("first", "second", "third", "tenth")
"""Hosts whose plain block takes 405 to 456 us forward. On the other seven it takes 696 to 1053 us: as virtual machines
they may share their processors with other work, while a host that trains is assumed to do nothing else."""

FAKE_GROUP = {
    "plain": 1.0, "dtensor": 1.27, "fsdp2": 1.19, "fsdp2_accumulate": 1.16, "fsdp2_reshard": 1.16,
    "fsdp2_reshard_accumulate": 1.16,
}  # fmt: skip
"""Host time of a block in steps of two ranks over the one measured in one process, whose messages are not sent: tiny
steps of 6 and 24 blocks beside `calibrate --host` on the same host (benchmarks/results/peers_h200_host.json; the ratios
of single numbers of micro-batches differ by 0.05 around these)."""

PIPELINE_PASS = 0.3
"""Host time of torch's pipeline runtime for a message of a stage, over that of a plain block, both directions: a
micro-batch of one block takes 0.34 to 1.55 times a plain block more than it, 0.69 in the median of six hosts (kind
dispatch, stack pipelining), with a message each way whose own host time is about 0.05."""


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time that one host needs to issue a block: a file written by `twofold calibrate --host`.

    Args:
        name: name of the host.
        source: versions, processor and date.
        blocks_s: of `KINDS`, seconds of a block's forward and backward, in the median.
        spread: standard deviation of the logarithm of repeated times.
        scaled: kinds that were not measured here: those of the quiet hosts, times how this one compares with it.
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
    """Seconds of a kind on a host; "quiet": the median of the `QUIET` ones, entry by entry, assumed of hosts that are
    not known. Another name is the path of a host's file.

    Raises:
        TwofoldError: as `load_host`.
    """
    if host != "quiet" and host not in HOSTS_US:
        return load_host(host).blocks_s[kind]
    place = KINDS.index(kind)
    times_us = [HOSTS_US[name][place] for name in (QUIET if host == "quiet" else (host,))]
    forward, backward = (statistics.median(times) for times in zip(*times_us, strict=True))
    return forward * 1e-6, backward * 1e-6


def later(host: str) -> float:
    """Logarithm of what the median of all measured hosts takes over the quiet ones, in the mean over kinds and both
    directions; 0 for a host that is known.

    >>> round(later("quiet"), 2), later("first")
    (0.34, 0.0)
    """
    if host != "quiet":
        return 0.0
    ratios = [
        statistics.median(times[place][way] for times in HOSTS_US.values()) * 1e-6 / host_s("quiet", kind)[way]
        for place, kind in enumerate(KINDS) for way in (0, 1)
    ]  # fmt: skip
    return statistics.fmean(map(math.log, ratios))
