"""Finds which ranks of a run write to the same output folder: nodes may share a disk or have disks of their own."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from plans.files import write_atomically

__all__ = ["ranks_by_folder", "share_figures", "spread_figures"]

_FIGURES = ("metrics.jsonl", "evaluations.jsonl", "metrics.csv")


def ranks_by_folder(out: Path) -> tuple[tuple[int, ...], ...]:
    """The ranks that see each distinct folder `out`, in order; every rank must call it.

    Every node writes a file, and nodes that see each other's file share the folder.
    """
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1:
        return (tuple(range(dist.get_world_size() if dist.is_initialized() else 1)),)
    run = f"{os.environ['TORCHELASTIC_RUN_ID']}-{os.environ['MASTER_PORT']}"
    marks = [out / f".node-{run}-{node}" for node in range(int(os.environ["GROUP_WORLD_SIZE"]))]
    mine = marks[int(os.environ["GROUP_RANK"])]
    if is_first := os.environ["LOCAL_RANK"] == "0":
        write_atomically(mine, b"")
    dist.barrier()
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, tuple(mark.exists() for mark in marks))
    if is_first:
        mine.unlink()
    return tuple(tuple(rank for rank, own in enumerate(seen) if own == each) for each in dict.fromkeys(seen))


def spread_figures(out: Path, folders: Collection[tuple[int, ...]]) -> None:
    """Give the longest files of figures to the folders whose own are shorter; every rank must call it.

    A node that replaces another one, or that wrote no figures, may train the rank that writes them now.
    """
    if len(folders) == 1:
        return
    path, rank = out / _FIGURES[0], dist.get_rank()
    num_rows = path.read_bytes().count(b"\n") if path.is_file() else 0
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, num_rows)
    longest = max(counts)
    share_figures(out, counts.index(longest), counts[rank] < longest and any(rank == ranks[0] for ranks in folders))


def share_figures(out: Path, source: int, receives: bool) -> None:
    """Copy the files of figures of rank `source` to every rank that `receives`; every rank must call it."""
    is_source = dist.get_rank() == source
    content: list[Any] = [None]
    if is_source:
        content = [{name: (out / name).read_bytes() for name in _FIGURES if (out / name).is_file()}]
    dist.broadcast_object_list(content, src=source)
    if receives and not is_source:
        for name, data in content[0].items():
            write_atomically(out / name, data)
    dist.barrier()
