"""Files of tokens, memory-mapped, and sequences packed from their documents.

The documents of an epoch are shuffled, concatenated and cut into sequences of equal length. There is no padding, and
every token is a label once per epoch, except the last tokens that do not fill a sequence. A sequence may contain the
end of one document and the beginning of the next, and attention does not stop there: end every document with a
separator token. Megatron-LM packs its GPT datasets in the same way.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from executor.data.rows import Given, Positions, Rows
from plans.errors import TwofoldError
from plans.model.graph import Graph
from plans.reading import read_file, read_rows

__all__ = ["Documents", "packed", "read_documents"]

# Megatron-LM, megatron/core/datasets/indexed_dataset.py: the header, and the dtypes by their codes
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<QBQQ")  # version, dtype, sequences, documents
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Documents:
    """Tokens of documents, one after the other.

    Args:
        tokens: whole numbers [all tokens].
        bounds: int64 [documents + 1]; document d has the tokens bounds[d] to bounds[d + 1].
    """

    tokens: npt.NDArray[Any]
    bounds: npt.NDArray[np.int64]


def read_documents(path: str) -> Documents:
    """The documents of a file.

    Args:
        path: NAME.npy, a row of tokens, which is one document; or NAME.idx with NAME.bin next to it, as Megatron-LM's
            `tools/preprocess_data.py` writes them.

    Raises:
        TwofoldError: no such file, a damaged one, numbers that are not whole.
    """
    if path.endswith(".idx"):
        return _indexed(Path(path))
    tokens = read_rows(path, "the data")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise TwofoldError(f"data {path!r}: {tokens.dtype} {tokens.shape}; it must be a row of whole numbers")
    return Documents(tokens=tokens, bounds=np.array([0, len(tokens)]))


def _indexed(path: Path) -> Documents:
    index, name = read_file(path, "the index of the data"), str(path)
    try:
        _, code, num_sequences, num_bounds = _HEADER.unpack_from(index, len(_MAGIC))
        dtype = np.dtype(_DTYPES[code])
        if not index.startswith(_MAGIC):
            raise ValueError
        at = len(_MAGIC) + _HEADER.size
        lengths = np.frombuffer(index, "<i4", num_sequences, at)
        places = np.frombuffer(index, "<i8", num_sequences, at + 4 * num_sequences)
        firsts = np.frombuffer(index, "<i8", num_bounds, at + 12 * num_sequences)
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        bounds = ends[firsts]
        if (lengths < 0).any() or (places != ends[:-1] * dtype.itemsize).any() or (np.diff(bounds) < 0).any():
            raise ValueError
        if bounds[0] != 0 or bounds[-1] != ends[-1]:
            raise ValueError
    except (ValueError, KeyError, IndexError, OverflowError, struct.error):
        raise TwofoldError(f"{name}: not a complete index of Megatron-LM's datasets (.idx); write it again") from None
    data = path.with_suffix(".bin")
    try:
        tokens: npt.NDArray[Any] = np.memmap(data, dtype, "r") if ends[-1] else np.zeros(0, dtype)
    except (OSError, ValueError) as error:
        raise TwofoldError(f"cannot read the data {str(data)!r}: {getattr(error, 'strerror', None) or error}") from None
    if len(tokens) != ends[-1]:
        raise TwofoldError(f"{name} is the index of {ends[-1]} tokens, and {data} has {len(tokens)}")
    return Documents(tokens=tokens, bounds=bounds)


def packed(documents: Documents, graph: Graph, *, seed: int, epoch: int, name: str) -> Rows:
    """The sequences of one epoch in a random order: tokens, and as labels the tokens that follow each.

    Args:
        documents: see above.
        graph: a model of tokens and labels [batch, length].
        seed: of both orders.
        epoch: from 0.
        name: name of the data, for messages.

    Raises:
        TwofoldError: a model of other inputs.
    """
    shapes = [tensor.shape for tensor in graph.inputs]
    if len(shapes) != 2 or shapes[0] != shapes[1] or len(shapes[0]) != 2:
        raise TwofoldError(
            f"data {name!r} is for models of tokens and labels [batch, sequence]; this model takes {shapes}"
        )
    length = shapes[0][1]
    lengths = np.diff(documents.bounds)
    order = np.random.default_rng([seed, epoch, len(lengths)]).permutation(len(lengths))
    begins = documents.bounds[:-1][order]
    ends = np.cumsum(lengths[order])  # in the epoch
    starts = ends - lengths[order]

    def sequence(at: int) -> npt.NDArray[np.int64]:
        """The tokens `at` to `at + length + 1` of the epoch."""
        parts, end = [], at + length + 1
        document = int(np.searchsorted(ends, at, side="right"))
        while at < end:
            begin = begins[document] + at - starts[document]
            stop = min(end, int(ends[document]))
            parts.append(documents.tokens[begin : begin + stop - at])
            at, document = stop, document + 1
        return np.concatenate(parts).astype(np.int64)

    def take(positions: Positions) -> Given:
        rows = np.stack([sequence(int(position) * length) for position in positions])
        return rows[:, :-1], rows[:, 1:]

    return Rows(max(len(documents.tokens) - 1, 0) // length, take).shuffled(seed, epoch)
