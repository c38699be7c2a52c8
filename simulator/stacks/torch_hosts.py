"""Host time of one Llama block under torch's own parallel parts, as measured on several hosts."""

from __future__ import annotations

import statistics

__all__ = ["host_s"]

_KINDS = (
    "plain", "ddp", "dtensor", "fsdp2", "fsdp2_accumulate", "fsdp2_reshard", "fsdp2_reshard_accumulate",
)  # fmt: skip

HOSTS_US = {
    "first": ((405, 674), (418, 682), (2868, 4008), (1269, 1260), (1280, 795), (1283, 1786), (1239, 1339)),
    "second": ((426, 615), (466, 798), (2615, 3708), (1144, 1174), (1169, 774), (1209, 1702), (1294, 1507)),
    "third": ((453, 610), (476, 760), (2482, 5638), (2110, 1674), (1439, 1947), (1468, 3074), (1425, 2484)),
    "fourth": ((985, 765), (722, 1288), (3315, 5791), (1610, 1808), (1837, 800), (1518, 2300), (1499, 1769)),
    "fifth": ((749, 759), (321, 1069), (3700, 6614), (2726, 1699), (2131, 1165), (2831, 2321), (1078, 1772)),
}
"""Host microseconds of one Llama block, forward and backward, with tiny sizes: torch 2.11.0, 2026-11-21, kinds of
dispatch in benchmarks/data (stacks torch, ddp, dtensor, fsdp2) on five hosts of several H200: h200-x1 and h200-x2,
h200-x4, repeat-h200-x2-quick (which took fewer repeats), h200-third-x2, h200-third-x4."""

PLAIN_HOSTS_US = ((410, 512), (371, 728), (452, 633))
"""The plain block on hosts of one H200: h200-third-x1, repeat-h200-x1-full, repeat-h200-x1-quick."""


def host_s(host: str, kind: str) -> tuple[float, float]:
    """Seconds of a kind on a host; "least": entry by entry the least of every host that was measured, whatever its
    figures are, since other work on a host only ever adds time; "median": entry by entry. Assumed for hosts of other
    devices."""
    place = _KINDS.index(kind)
    if host not in ("least", "median"):
        forward, backward = HOSTS_US[host][place]
        return forward * 1e-6, backward * 1e-6
    own = [each[place] for each in HOSTS_US.values()] + (list(PLAIN_HOSTS_US) if kind == "plain" else [])
    of = min if host == "least" else statistics.median
    return of(forward for forward, _ in own) * 1e-6, of(backward for _, backward in own) * 1e-6
