"""Hybrid sharding (HSDP) in tables of measurements: ranks that share weights, and groups of them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from interop.measurements.numbers import number

__all__ = ["HYBRID", "hybrid_in", "with_hybrid"]

HYBRID = r"(?<![a-z])(?:hsdp|mics\b|hybrid[-_ ]?(?:full[-_ ]?)?shard\w*|hybrid[-_ ]fsdp)"
"""Words of hybrid sharding."""

_GROUPS = r"replicat\w*[-_ =:(]*(\d+)|(\d+)[- ]?(?:way|x)?[- ]replica\w*"
_SHARDS = r"shard(?:s|ed|ing)?(?:[-_ ](?:size|group|degree))*[-_ =:(]*(\d+)|(\d+)[- ]?way[- ](?:shard|fsdp)\w*"
_GRID = rf"{HYBRID}\W*(\d+) ?[x\u00d7*,/] ?(\d+)"


def hybrid_in(words: str) -> dict[str, str]:
    """The cells `groups` and `shards` that words about hybrid sharding state.

    Two numbers are the groups and the ranks of each, the order of a device mesh (torch/distributed/fsdp/api.py).

    >>> hybrid_in("HSDP (2x8)"), hybrid_in("dp_replicate=4, dp_shard=16"), hybrid_in("FSDP 32")
    ({'groups': '2', 'shards': '8'}, {'groups': '4', 'shards': '16'}, {})
    """
    low = words.lower()
    if grid := re.search(_GRID, low):
        return {"groups": grid[1], "shards": grid[2]}
    if not re.search(rf"{HYBRID}|replicat\w*[-_ =:(]*\d", low):
        return {}
    patterns = (("groups", _GROUPS), ("shards", _SHARDS))
    return {name: found[1] or found[2] for name, pattern in patterns if (found := re.search(pattern, low))}


def with_hybrid(row: Mapping[str, str], ranks: int) -> dict[str, str]:
    """A row whose columns `dp_replicate` and `dp_shard`, and whose words about hybrid sharding, are its data-parallel
    degree, its sharding level and the cells `groups` and `shards`.

    Args:
        row: column -> cell.
        ranks: of tensor, pipeline and context parallelism.
    """
    made = dict(row)
    stated = hybrid_in("; ".join(made.get(name, "") for name in ("zero_level", "notes")))
    groups = number(made.pop("dp_replicate", "") or made.pop("groups", "") or stated.get("groups", ""))
    shards = number(made.pop("dp_shard", "") or made.pop("shards", "") or stated.get("shards", ""))
    if shards is not None and shards < 1:  # torchtitan's -1: all ranks that are left
        shards = None
    if groups is None and shards is None:
        return made
    devices = number(made.get("gpu_count", ""))
    if not made.get("dp") and (ways := _replicas(groups, shards, devices)):
        made["dp"] = f"{ways:g}"
    if not made.get("zero_level"):
        made["zero_level"] = "0" if shards == 1 or (groups and devices == groups * ranks) else "3"
    if shards and shards > 1:
        made["shards"] = f"{shards:g}"
    elif groups and shards is None:
        made["groups"] = f"{groups:g}"
    return made


def _replicas(groups: float | None, shards: float | None, devices: float | None) -> float | None:
    """The data-parallel degree; None where it follows from the number of devices."""
    if groups and shards:
        return groups * shards
    return None if devices else shards
