"""Samples read by position, so that a rank reads only its own samples and a resumed run continues where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from executor.user_code import running_user_code
from plans.errors import TwofoldError
from plans.reading import read_arrays

__all__ = ["Given", "Positions", "Rows", "collated", "rows_of_arrays", "rows_of_dataset"]

Given = Sequence[Any] | Mapping[str, Any]
"""Arrays or tensors of some samples, in the order of the model's arguments or by the names of the inputs."""

Positions = npt.NDArray[np.int64]


class Dataset(Protocol):
    """A dataset of `torch.utils.data` or of Hugging Face whose samples have numbers."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Rows:
    """The samples of one epoch.

    Args:
        count: of samples.
        take: positions [n] in the epoch -> the n samples.
    """

    count: int
    take: Callable[[Positions], Given]

    def shuffled(self, seed: int, epoch: int) -> Rows:
        """The same samples in a random order, which is the same for the same seed and epoch.

        >>> rows = Rows(3, lambda positions: (10 * positions,))
        >>> [int(each) for each in rows.shuffled(0, 0).take(np.arange(3))[0]]
        [20, 0, 10]
        """
        order = np.random.default_rng([seed, epoch]).permutation(self.count)
        return Rows(self.count, lambda positions: self.take(order[positions]))


def rows_of_arrays(path: str) -> Rows:
    """The rows of a .npz file with an array for each input, in their order.

    Raises:
        TwofoldError: not such a file, arrays of different lengths.
    """
    arrays = read_arrays(path, "the data")
    lengths = {len(array) if array.ndim else 0 for array in arrays.values()}
    if len(lengths) != 1:
        raise TwofoldError(f"data {path!r}: its arrays have {sorted(lengths)} rows; all need equally many")
    return Rows(lengths.pop(), lambda positions: {name: array[positions] for name, array in arrays.items()})


def rows_of_dataset(dataset: Dataset, what: str) -> Rows:
    """The samples of a dataset of `torch.utils.data` or of Hugging Face.

    Args:
        dataset: of the user.
        what: it is, for messages.
    """

    def take(positions: Positions) -> Given:
        with running_user_code(what):
            return collated([dataset[int(position)] for position in positions])

    with running_user_code(what):
        return Rows(len(dataset), take)


def collated(samples: Sequence[Any]) -> Given:
    """Samples put together as `DataLoader` does by default, except that a list of numbers in a sample is an array.

    Datasets of Hugging Face give lists, of which torch would put the first numbers of all samples together.

    >>> collated([{"x": [1, 2, 3]}, {"x": [4, 5, 6]}])["x"].tolist()
    [[1, 2, 3], [4, 5, 6]]
    """
    from torch.utils.data import default_collate

    found: Given = default_collate([_with_arrays(sample) for sample in samples])
    return found


def _with_arrays(sample: Any) -> Any:
    if isinstance(sample, Mapping):
        return {name: _array(value) for name, value in sample.items()}
    return tuple(map(_array, sample)) if isinstance(sample, (list, tuple)) else sample


def _array(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, list) else value
