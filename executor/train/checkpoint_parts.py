"""Reads tensors, or parts of them, from a checkpoint whose plan may have split them differently."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from executor.kernels.movement import flat_part
from executor.train.checkpoint_reader import CheckpointReader
from executor.train.parts import Part, common_region, within
from plans.errors import TwofoldError
from plans.layout import Region

__all__ = ["SavedParts"]


class SavedParts:
    """The parts of tensors that a checkpoint holds.

    Args:
        checkpoint: its folder.

    Raises:
        TwofoldError: its index is none.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._reader = CheckpointReader(checkpoint)
        self._stored = self._reader.read_metadata().state_dict_metadata
        self._parts: dict[tuple[str, str], list[Part]] = {}
        for key in self._stored:
            part = Part.of_key(key)
            self._parts.setdefault((part.name, part.role), []).append(part)

    def __contains__(self, part: Part) -> bool:
        return part.key in self._stored

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
        asked, needed = list(parts), dict[str, Tensor]()
        for part in asked:
            same = part.key in self._stored
            for key in [part.key] if same else [each.key for each in self._overlapping(part)]:
                stored = self._stored[key]
                assert isinstance(stored, TensorStorageMetadata)
                needed[key] = torch.empty(stored.size, dtype=stored.properties.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # whoever reads needs no group
            load(needed, storage_reader=self._reader, no_dist=True)
        return [_assembled(part, needed, self._overlapping(part)) for part in asked]

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
        flat = torch.cat([read[shard.key].reshape(-1) for shard in sorted(shards, key=lambda each: each.number)])
        sizes = [last - first for first, last in region]
        whole = flat[: math.prod(sizes)].view(sizes)
        common = common_region(region, part.region)
        assert common is not None
        target = box[within(common, part.region)]
        target.copy_(whole[within(common, region)])
        filled += target.numel()
    if filled < box.numel():
        raise TwofoldError(f"the checkpoint does not contain all parts of {part.name!r} ({part.role})")
    return flat_part(box, part.size, part.number)
