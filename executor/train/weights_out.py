"""Writes the weights of a checkpoint as one file that other programs read: safetensors, or a state_dict of torch.

Weights have the names, shapes and dtypes of the module that was planned: masters are rounded as a step rounds them.
safetensors are written by their description (https://huggingface.co/docs/safetensors): the length of a header, the
header in JSON, the bytes of all tensors. A few tensors are in memory at a time. torch.save takes all at once.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from executor.kernels.context import torch_dtype
from executor.train.checkpoint_files import check_checkpoint
from executor.train.checkpoint_parts import SavedParts
from executor.train.parts import WEIGHT, Part
from plans.errors import TwofoldError
from plans.files import atomic_file, check_writable
from plans.model.graph import itemsize
from plans.plan import load_plan

__all__ = ["write_weights"]

_BATCH_BYTES = 2**30
"""Weights read together: each reading looks through the index of the checkpoint once."""

_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def write_weights(checkpoint: str | os.PathLike[str], path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Write the weights of a checkpoint, whatever the layout of its plan; returns their names.

    Statistics that steps change, such as those of a batch norm, are among them; what no step changes is not.

    Args:
        checkpoint: a folder such as "out/checkpoints/step-00000100".
        path: FILE.safetensors; FILE.pt, .pth or .bin for a state_dict.

    Raises:
        TwofoldError: no checkpoint or one that was changed, another kind of file, one that cannot be written.
    """
    source, target = Path(checkpoint), Path(path)
    if target.suffix not in (".safetensors", ".pt", ".pth", ".bin"):
        raise TwofoldError(f"{str(target)!r}: weights are written to FILE.safetensors, .pt, .pth or .bin")
    plan = load_plan(source / "plan.json")
    check_checkpoint(source, plan)
    check_writable(target)
    saved = SavedParts(source)
    dtypes = {part: plan.graph.tensors[part.name].dtype for part in saved.whole(WEIGHT)}
    parts = list(dtypes)
    tensors = (
        tensor.to(torch_dtype(dtypes[part])).view([last for _, last in part.region])
        for part, tensor in _read(saved, parts)
    )
    try:
        with atomic_file(target) as file:
            if target.suffix == ".safetensors":
                file.write(_header(parts, [dtypes[part] for part in parts]))
                for tensor in tensors:
                    file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            else:
                torch.save(dict(zip((part.name for part in parts), tensors, strict=True)), file)
    except OSError as error:
        raise TwofoldError(f"{str(target)!r} cannot be written: {error.strerror or error}") from None
    return tuple(part.name for part in parts)


def _read(saved: SavedParts, parts: Sequence[Part]) -> Iterator[tuple[Part, Tensor]]:
    batch: list[Part] = []
    for number, part in enumerate(parts, 1):
        batch.append(part)
        if number == len(parts) or sum(each.size for each in batch) * itemsize("float32") >= _BATCH_BYTES:
            yield from zip(batch, saved.read(batch), strict=True)
            batch = []


def _header(parts: Sequence[Part], dtypes: Sequence[str]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt", "writer": "twofold"}}
    first = 0
    for part, dtype in zip(parts, dtypes, strict=True):
        last = first + part.size * itemsize(dtype)
        header[part.name] = {
            "dtype": _NAMES[dtype], "shape": [last for _, last in part.region], "data_offsets": [first, last]
        }  # fmt: skip
        first = last
    said = json.dumps(header).encode()
    said += b" " * (-len(said) % 8)
    return struct.pack("<Q", len(said)) + said
