"""Reads checkpoints of torch.distributed.checkpoint without executing code from the file.

The index of a checkpoint, `.metadata`, is a pickle, and a pickle can call any importable function. This reader allows
only the names that belong in an index. Tensors are read by `torch.load` with `weights_only`.
"""

from __future__ import annotations

import os
import pickle
from pathlib import PosixPath, WindowsPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.serialization import _get_layout

from plans.errors import TwofoldError

__all__ = ["CheckpointReader"]

_OF_AN_INDEX: dict[tuple[str, str], Any] = {
    (each.__module__, each.__name__): each
    for each in (
        Metadata, StorageMeta, TensorStorageMetadata, metadata.ChunkStorageMetadata, metadata.MetadataIndex,
        metadata.TensorProperties, metadata._MEM_FORMAT_ENCODING, _StorageInfo, _get_layout, PosixPath, WindowsPath,
    )
} | {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}  # fmt: skip
_OF_AN_INDEX["torch", "Size"] = torch.Size


class CheckpointReader(FileSystemReader):
    """`FileSystemReader` whose index may hold tensors of this folder and nothing else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index.

        Raises:
            TwofoldError: it names something else than an index does, lies about a file, or is not a pickle.
        """
        path = os.path.join(self.path, ".metadata")
        try:
            with open(path, "rb") as file:
                found = _IndexUnpickler(file).load()
            _check(found)
        except Exception as error:  # a pickle that was made up fails in any way
            lines = str(error).splitlines()
            raise TwofoldError(
                f"{path}: not the index of a checkpoint ({lines[0] if lines else type(error).__name__}); resume from "
                "another checkpoint"
            ) from None
        index: Metadata = found
        index.storage_meta = StorageMeta(load_id=self.load_id)
        return index


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _OF_AN_INDEX:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which does not belong in an index")
        return _OF_AN_INDEX[module, name]


def _check(index: Any) -> None:
    if type(index) is not Metadata or not isinstance(index.storage_data, dict):
        raise ValueError("it holds no index")
    for key, tensor in index.state_dict_metadata.items():
        if type(tensor) is not TensorStorageMetadata:  # bytes would be unpickled
            raise ValueError(f"{key!r} is not a tensor")
    for stored in index.storage_data.values():
        if os.path.basename(stored.relative_path) != stored.relative_path:
            raise ValueError(f"the file {stored.relative_path!r} is not in the folder")
