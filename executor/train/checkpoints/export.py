"""Writes the weights of a checkpoint as files that other programs read: safetensors, or a state_dict of torch.

Weights have the names, shapes and dtypes of the module that was planned: masters are rounded as a step rounds them.
safetensors are written by their description (https://huggingface.co/docs/safetensors): the length of a header, the
header in JSON, the bytes of all tensors. A few tensors are in memory at a time. torch.save takes all at once. A folder
gets safetensors of limited size with an index, as transformers saves a model.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from executor.kernels.context import torch_dtype
from executor.train.checkpoints.files import check_checkpoint
from executor.train.checkpoints.parts import ELSEWHERE, CheckpointFolder, SavedParts
from executor.weights.library_names import library_parts
from executor.weights.parts import WEIGHT, Part
from plans.errors import TwofoldError
from plans.files import atomic_file, check_writable
from plans.model.graph import Graph, itemsize
from plans.model.part import Part as WeightPart
from plans.plan import load_plan
from plans.reading import read_file

__all__ = ["write_weights"]

_BATCH_BYTES = 2**30
"""Weights read together: each reading looks through the index of the checkpoint once."""

_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


_FILE_BYTES = 5 * 10**9
"""Weights of one file of a folder, as in transformers."""


def write_weights(
    checkpoint: str | os.PathLike[str], path: str | os.PathLike[str], *, config: str | os.PathLike[str] | None = None
) -> tuple[str, ...]:
    """Write the weights of a checkpoint, for any layout of its plan; returns their names.

    Statistics that steps change, such as those of a batch norm, are among them; constants are not.

    Args:
        checkpoint: a folder such as "out/checkpoints/step-00000100".
        path: FILE.safetensors; FILE.pt, .pth or .bin for a state_dict; a name without an ending for a folder, new or
            empty, with files of at most 5 GB and their index.
        config: config.json of transformers, whose names the weights of a plan by configuration get
            (`executor.weights.library_names`); a folder gets a copy of it.

    Raises:
        TwofoldError: no checkpoint or one that was changed, another kind of file, one that cannot be written, a
            configuration of another model.
    """
    source, target = Path(checkpoint), Path(path)
    if target.suffix not in (".safetensors", ".pt", ".pth", ".bin", ""):
        raise TwofoldError(f"{str(target)!r}: weights are written to FILE.safetensors, .pt, .pth, .bin, or a folder")
    if not source.is_dir():
        raise TwofoldError(f"{str(source)!r} is not a checkpoint; give its folder, such as checkpoints/step-00000100")
    plan = load_plan(source / "plan.json")
    check_checkpoint(source, plan)
    if target.suffix:
        check_writable(target)
    elif target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise TwofoldError(f"{str(target)!r} is a file, or a folder that is not empty; name a new folder")
    else:
        check_writable(target / _INDEX)
    graph = plan.graph
    if config is not None:
        graph = msgspec.structs.replace(graph, parts=library_parts(graph, config))
    saved = SavedParts(CheckpointFolder(source))
    weights = _weights(graph, saved)
    try:
        if not target.suffix:
            _write_folder(target, saved, weights)
            if config is not None:
                with atomic_file(target / "config.json") as file:
                    file.write(read_file(config, "the config.json"))
        elif target.suffix == ".safetensors":
            _write_safetensors(target, saved, weights)
        else:
            with atomic_file(target) as file:
                torch.save({weight.name: tensor for weight, tensor in _read(saved, weights)}, file)
    except OSError as error:
        raise TwofoldError(f"{str(target)!r} cannot be written: {error.strerror or error}") from None
    return tuple(weight.name for weight in weights)


_INDEX = "model.safetensors.index.json"


def _write_safetensors(path: Path, saved: SavedParts, weights: Sequence[_Weight]) -> None:
    with atomic_file(path) as file:
        file.write(_header(weights))
        for _, tensor in _read(saved, weights):
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _write_folder(folder: Path, saved: SavedParts, weights: Sequence[_Weight]) -> None:
    """Write as transformers does: model.safetensors, or numbered files and, last, the index of the tensors."""
    files: list[list[_Weight]] = []
    room = 0
    for weight in weights:
        if not files or weight.size_bytes > room:
            files.append([])
            room = _FILE_BYTES
        files[-1].append(weight)
        room -= weight.size_bytes
    if len(files) <= 1:
        return _write_safetensors(folder / "model.safetensors", saved, weights)
    where: dict[str, str] = {}
    for number, own in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _write_safetensors(folder / name, saved, own)
        where |= {weight.name: name for weight in own}
    total = sum(weight.size_bytes for weight in weights)
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2)
    with atomic_file(folder / _INDEX) as file:
        file.write(index.encode())
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weight:
    """A tensor of the module, and the saved ones that it is put together from."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    saved: tuple[tuple[Part, WeightPart | None], ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)

    def joined(self, read: Sequence[Tensor]) -> Tensor:
        """The full tensor, from those that were saved, flattened."""
        shapes = [[last for _, last in part.region] for part, _ in self.saved]
        tensors = [tensor.to(torch_dtype(self.dtype)).view(shape) for tensor, shape in zip(read, shapes, strict=True)]
        if self.saved[0][1] is None:
            return tensors[0]
        whole = torch.empty(self.shape, dtype=torch_dtype(self.dtype))
        for tensor, (_, part) in zip(tensors, self.saved, strict=True):
            assert part is not None
            part.put(whole, tensor)
        return whole


def _weights(graph: Graph, saved: SavedParts) -> list[_Weight]:
    found: dict[str, list[tuple[Part, WeightPart | None]]] = {}
    for whole in saved.whole(WEIGHT):
        if tuple(last for _, last in whole.region) != graph.tensors[whole.name].shape:
            raise TwofoldError(f"the checkpoint does not contain all parts of {whole.name!r} ({WEIGHT}); {ELSEWHERE}")
        found.setdefault(graph.of_module(graph.tensors[whole.name]), []).append((whole, graph.parts.get(whole.name)))
    weights = []
    for name, parts in found.items():
        first, part = parts[0]
        tensor = graph.tensors[first.name]
        shape = tensor.shape if part is None else part.shape
        weights.append(_Weight(name=name, shape=shape, dtype=tensor.dtype, saved=tuple(parts)))
    return weights


def _read(saved: SavedParts, weights: Sequence[_Weight]) -> Iterator[tuple[_Weight, Tensor]]:
    batch: list[_Weight] = []
    for number, weight in enumerate(weights, 1):
        batch.append(weight)
        asked = [part for weight in batch for part, _ in weight.saved]
        if number == len(weights) or sum(part.size for part in asked) * itemsize("float32") >= _BATCH_BYTES:
            read = iter(saved.read(asked))
            for each in batch:
                yield each, each.joined(list(itertools.islice(read, len(each.saved))))
            batch = []


def _header(weights: Sequence[_Weight]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt", "writer": "twofold"}}
    first = 0
    for weight in weights:
        last = first + weight.size_bytes
        header[weight.name] = {
            "dtype": _NAMES[weight.dtype], "shape": list(weight.shape), "data_offsets": [first, last]
        }  # fmt: skip
        first = last
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded
