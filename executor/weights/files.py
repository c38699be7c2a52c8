"""Initial weights from files; every rank reads its part: safetensors of Hugging Face, state_dicts, .npz.

A file maps names of parameters to tensors. safetensors files, one or many of a folder, are read slice by slice; a
state_dict of torch is mapped into memory, and read as data only (`weights_only`).
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from executor.weights.initial import as_array
from plans.errors import TwofoldError
from plans.model.graph import Graph
from plans.reading import read_arrays

__all__ = ["WeightsFile", "check_weights", "read_weights"]


class _Slices:
    """A tensor of a safetensors file; what is indexed is read."""

    def __init__(self, path: Path, name: str) -> None:
        from safetensors import safe_open

        with safe_open(str(path), framework="pt") as file:
            self._slice = file.get_slice(name)
        self.shape = tuple(self._slice.get_shape())
        self.is_floating = "F" in self._slice.get_dtype()

    def __getitem__(self, index: Any) -> Any:
        return as_array(self._slice[index] if self.shape else self._slice[...])


class _Mapped:
    """A tensor in memory, or in a file that is mapped into it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self.shape, self.is_floating = tensor, tuple(tensor.shape), tensor.is_floating_point()

    def __getitem__(self, index: Any) -> Any:
        return as_array(self._tensor[index])


class WeightsFile(Mapping[str, Any]):
    """Name -> tensor with `shape`, of which only the elements that are requested are read.

    Args:
        path: for messages.
        where: name -> file that has it, or the tensor.
    """

    def __init__(self, path: str, where: Mapping[str, Path | Tensor]) -> None:
        self.path, self._where = path, where

    def __getitem__(self, name: str) -> Any:
        found = self._where[name]
        return _Slices(found, name) if isinstance(found, Path) else _Mapped(found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def read_weights(path: str) -> WeightsFile:
    """The tensors of a file or folder, by name.

    Args:
        path: FILE.safetensors; a folder with such files, as Hugging Face saves a model; FILE.pt, .pth or .bin with a
            state_dict; FILE.npz.

    Raises:
        TwofoldError: no such file, another kind, one that cannot be read, a name that is in two files of a folder.
    """
    place = Path(path)
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    if not files:
        raise TwofoldError(f"weights {path!r}: the folder has no .safetensors file")
    if not place.exists():
        raise TwofoldError(f"weights {path!r}: there is no such file or folder")
    kind = files[0].suffix
    if kind == ".safetensors":
        return WeightsFile(path, _in_safetensors(path, files))
    if kind in (".pt", ".pth", ".bin"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of files that it then refuses
                state = torch.load(place, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # of any kind: torch calls itself with what a damaged file says
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise TwofoldError(
                f"weights {path!r}: torch.load cannot read a state_dict from it: {lines[0][:200]}; save it again with "
                "torch.save"
            ) from None
        if not isinstance(state, Mapping) or not all(
            isinstance(name, str) and isinstance(each, Tensor) for name, each in state.items()
        ):
            raise TwofoldError(f"weights {path!r}: it must be a state_dict of names and tensors only")
        return WeightsFile(path, dict(state))
    if kind == ".npz":
        arrays = read_arrays(place, "the weights")
        return WeightsFile(path, {name: torch.from_numpy(array) for name, array in arrays.items()})
    raise TwofoldError(f"weights {path!r}: it must be a .safetensors file or folder, .pt, .pth, .bin or .npz")


def check_weights(path: str, graph: Graph) -> None:
    """Refuse a file that lacks a parameter of a graph, or has it in another shape; others in it are ignored.

    Raises:
        TwofoldError: see above, and `read_weights`.
    """
    file = read_weights(path)
    for tensor in graph.parameters:
        part = graph.parts.get(tensor.name)
        name, wanted = (tensor.name, tensor.shape) if part is None else (part.name, part.shape)
        if name not in file:
            some = ", ".join(sorted(file)[:3])
            raise TwofoldError(
                f"weights {path!r} lack the parameter {name!r}; they have {len(file)} tensors: {some}, ...; "
                "plan the module that they were saved from, or, for names of transformers, state config = "
                "'.../config.json'"
            )
        found = file[name]
        if found.shape != wanted:
            raise TwofoldError(f"weights {path!r}: {name!r} has the shape {found.shape}, the plan {wanted}")
        if not found.is_floating:
            raise TwofoldError(
                f"weights {path!r}: {name!r} has no floating-point numbers; quantized weights are not read"
            )


def _in_safetensors(path: str, files: list[Path]) -> dict[str, Path | Tensor]:
    if importlib.util.find_spec("safetensors") is None:
        raise TwofoldError(f"weights {path!r}: safetensors is not installed; pip install safetensors")
    from safetensors import SafetensorError, safe_open

    found: dict[str, Path | Tensor] = {}
    for file in files:
        try:
            with safe_open(str(file), framework="pt") as opened:
                names = list(opened.keys())
        except (OSError, SafetensorError) as error:
            raise TwofoldError(f"weights {str(file)!r}: not a safetensors file: {error}") from None
        if again := sorted(found.keys() & set(names)):
            raise TwofoldError(f"weights {path!r}: {again[0]!r} is in {found[again[0]]} and {file}; remove one of them")
        found |= dict.fromkeys(names, file)
    return found
