"""Reads tensors, or parts of them, from a checkpoint whose plan may have split them differently."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from executor.kernels.movement import flat_part
from executor.train.checkpoints.files import read_manifest
from executor.train.checkpoints.reader import CheckpointReader
from executor.weights.parts import Part, common_region, within
from plans.errors import TwofoldError
from plans.layout import Region

__all__ = ["ELSEWHERE", "CheckpointFolder", "SavedParts", "Store"]


ELSEWHERE = "other nodes may have them on their own disks: name a shared disk as out, and resume to write it there"
"""Advice for a checkpoint without all parts."""


class Store(Protocol):
    """Where the tensors of a checkpoint are.

    Attributes:
        step: steps done when it was written.
    """

    step: int

    @property
    def stored(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor by key (`executor.weights.parts.Part.key`)."""

    def load(self, keys: Collection[str]) -> dict[str, Tensor]:
        """Read tensors."""


class CheckpointFolder:
    """The tensors of a checkpoint in a folder.

    Raises:
        TwofoldError: its index or its manifest cannot be read.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._reader = CheckpointReader(checkpoint)
        self.step = read_manifest(checkpoint).step
        self.stored = {
            key: (tuple(each.size), each.properties.dtype)
            for key, each in self._reader.read_metadata().state_dict_metadata.items()
            if isinstance(each, TensorStorageMetadata)  # the reader refuses others
        }

    def load(self, keys: Collection[str]) -> dict[str, Tensor]:
        """Read tensors."""
        found = {key: torch.empty(shape, dtype=dtype) for key in keys for shape, dtype in (self.stored[key],)}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # whoever reads needs no group
            load(found, storage_reader=self._reader, no_dist=True)
        return found


class SavedParts:
    """The parts of tensors that a checkpoint holds."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._parts: dict[tuple[str, str], list[Part]] = {}
        for key in store.stored:
            part = Part.of_key(key)
            self._parts.setdefault((part.name, part.role), []).append(part)

    def __contains__(self, part: Part) -> bool:
        return part.key in self._store.stored

    def whole(self, role: str) -> Iterator[Part]:
        """The full tensors of a role."""
        for (name, found), parts in self._parts.items():
            if found == role:
                region = tuple(
                    (0, max(ends[1] for ends in cut)) for cut in zip(*(part.region for part in parts), strict=True)
                )
                yield Part(name, role, region, 0, math.prod(last for _, last in region))

    def read(self, parts: Iterable[Part]) -> list[Tensor]:
        """Parts, flattened as a rank keeps them.

        Raises:
            TwofoldError: one that the checkpoint does not have.
        """
        asked = list(parts)
        needed = {
            key: None for part in asked
            for key in ([part.key] if part in self else [each.key for each in self._overlapping(part)])
        }  # fmt: skip
        read = self._store.load(needed)
        return [_assembled(part, read, self._overlapping(part)) for part in asked]

    def _overlapping(self, part: Part) -> list[Part]:
        saved = self._parts.get((part.name, part.role), ())
        return [each for each in saved if common_region(each.region, part.region)]


def _assembled(part: Part, read: Mapping[str, Tensor], saved: Sequence[Part]) -> Tensor:
    """The part as a rank keeps it, from the saved parts that it overlaps."""
    if (own := read.get(part.key)) is not None:
        return own
    dtype = next((read[known.key].dtype for known in saved), torch.float32)
    box, filled = torch.zeros([last - first for first, last in part.region], dtype=dtype), 0
    pieces: dict[tuple[Region, int], list[Part]] = {}  # a tied weight may be there twice, cut in other ways
    for each in saved:
        pieces.setdefault((each.region, each.size), []).append(each)
    for (region, _), shards in pieces.items():
        shards.sort(key=lambda each: each.number)
        flat = torch.cat([read[shard.key].reshape(-1) for shard in shards])
        sizes = [last - first for first, last in region]
        count = math.prod(sizes)
        if [shard.number for shard in shards] != [*range(len(shards))] or flat.numel() < count:
            continue  # the others are on another node
        whole = flat[:count].view(sizes)
        common = common_region(region, part.region)
        assert common is not None
        target = box[within(common, part.region)]
        target.copy_(whole[within(common, region)])
        filled += target.numel()
    if filled < box.numel():
        raise TwofoldError(f"the checkpoint does not contain all parts of {part.name!r} ({part.role}); {ELSEWHERE}")
    return flat_part(box, part.size, part.number)
