"""Reads a checkpoint whose files are on several nodes: a rank gets from other nodes what its own does not have."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from executor.train.checkpoints.parts import CheckpointFolder

__all__ = ["NodesStore"]


class NodesStore:
    """The tensors of a checkpoint that several folders hold together (a `Store`); every rank must make one.

    Args:
        own: what this rank's folder holds of it; None for nothing.
        folders: ranks that share each folder. The first rank of each sends its tensors to the ranks of other folders.
    """

    def __init__(self, own: CheckpointFolder | None, folders: Sequence[tuple[int, ...]]) -> None:
        self._own, self._rank = own, dist.get_rank()
        self._group = dist.new_group(backend="gloo")  # tensors are read to the host
        held = _gathered(None if own is None else (own.step, own.stored), self._group)
        self.step = next(each[0] for each in held if each is not None)
        self.stored = {key: entry for each in held if each is not None for key, entry in each[1].items()}
        self._sender = {
            key: ranks[0] for ranks in reversed(folders) if held[ranks[0]] is not None for key in held[ranks[0]][1]
        }

    def load(self, keys: Collection[str]) -> dict[str, Tensor]:
        """Read tensors; every rank must call it, each with the keys that it needs."""
        mine = {} if self._own is None else self._own.stored
        found = {} if self._own is None else self._own.load([key for key in keys if key in mine])
        wanted = _gathered([key for key in keys if key not in mine], self._group)
        for receiver, names in enumerate(wanted):
            for key in names:
                if self._rank == self._sender[key]:
                    assert self._own is not None
                    dist.send(_bytes(self._own.load([key])[key]), receiver, group=self._group)
                elif self._rank == receiver:
                    shape, dtype = self.stored[key]
                    found[key] = torch.empty(shape, dtype=dtype)
                    dist.recv(_bytes(found[key]), self._sender[key], group=self._group)
        dist.destroy_process_group(self._group)
        return found


def _gathered(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor, which gloo sends whatever the dtype is."""
    return tensor.view(-1).view(torch.uint8)
