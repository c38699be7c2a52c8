"""Samples that are read by number: packed token files, folders of images, datasets of torch."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from executor.capture.capture import capture
from executor.data.batches import Share
from executor.data.sources import Source
from executor.data.token_files import read_documents
from plans.errors import TwofoldError
from plans.model.graph import Graph, Operator, Tensor
from plans.model.mlp import mlp_graph
from plans.model.transformer import transformer
from tests.modules import language_model

FILE = Path(language_model.__file__)
LENGTH = 8


@pytest.fixture(scope="module")
def gpt():
    return transformer("gpt2", num_layers=1, seq=LENGTH).with_batch(4)


def write_indexed(prefix, lengths, dtype="<u2", code=8):
    """Tokens 0, 1, 2, ... in documents, in the layout of megatron/core/datasets/indexed_dataset.py."""
    sizes = np.array(lengths, "<i4")
    pointers = np.concatenate([[0], np.cumsum(sizes[:-1])]) * np.dtype(dtype).itemsize
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sizes), len(sizes) + 1)
    numbers = np.arange(len(sizes) + 1, dtype="<i8").tobytes()
    prefix.with_suffix(".idx").write_bytes(header + sizes.tobytes() + pointers.astype("<i8").tobytes() + numbers)
    prefix.with_suffix(".bin").write_bytes(np.arange(sizes.sum()).astype(dtype).tobytes())
    return str(prefix.with_suffix(".idx"))


@pytest.mark.parametrize(("dtype", "code"), [("<u2", 8), ("<i4", 4)])
def test_documents_are_packed_end_to_end_in_another_order_every_epoch(dtype, code, gpt, tmp_path):
    """Sequences share one token with the next: put in a row again they must be whole documents."""
    lengths = np.random.default_rng(0).integers(0, 31, 40)
    begins = set(np.cumsum(lengths) - lengths)
    source = Source(data=write_indexed(tmp_path / "text", lengths, dtype, code), seed=5)
    count = (lengths.sum() - 1) // LENGTH  # sequences of an epoch
    assert source.num_batches(gpt.with_batch(count)) == 1
    orders = []
    for batch in source.batches(gpt.with_batch(count), 2):
        rows = np.concatenate([batch["tokens"], batch["labels"][:, -1:]], axis=1)
        np.testing.assert_array_equal(rows[:, 1:], batch["labels"])
        after = {row[0]: row for row in rows}
        assert len(after) == count
        at = (set(after) - {row[-1] for row in rows}).pop()
        row = [at]
        while at in after:
            row += list(after[at][1:])
            at = row[-1]
        assert len(row) == len(set(row)) == count * LENGTH + 1
        cuts = [0, *(np.flatnonzero(np.diff(row) != 1) + 1)]
        assert {row[cut] for cut in cuts} <= begins
        assert {row[cut - 1] + 1 for cut in cuts[1:]} <= begins | {lengths.sum()}
        orders.append(row)
    assert orders[0] != orders[1]


def test_tokens_of_every_dtype_of_megatron_are_read(tmp_path):
    for code, dtype in ((1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")):
        found = read_documents(write_indexed(tmp_path / "text", [50, 0, 50], dtype, code))
        assert found.tokens.dtype == dtype and found.bounds.tolist() == [0, 50, 50, 100]
        np.testing.assert_array_equal(found.tokens, np.arange(100))
    np.save(tmp_path / "text.npy", np.arange(9))
    assert read_documents(str(tmp_path / "text.npy")).bounds.tolist() == [0, 9]


def test_each_rank_reads_its_samples_and_a_resumed_run_those_that_are_left(gpt, tmp_path):
    path = write_indexed(tmp_path / "text", [50, 70, 90])
    word = f"{FILE}:Sentences"
    captured = capture(*language_model.model())
    for data, graph in ((path, gpt), (word, captured), (f"{FILE}:loader", captured)):
        source = Source(data=data, seed=1)
        whole = list(source.batches(graph, 9))
        shares = [Share(slices=2, parts=2, part=part) for part in (0, 1)]
        parts = [list(source.batches(graph, 9, first=4, share=share)) for share in shares]
        assert [len(each) for each in parts] == [5, 5]
        for name in whole[0]:
            for batch, one, other in zip(whole[4:], *parts, strict=True):
                rows = np.concatenate([each[name].reshape(2, -1, *each[name].shape[1:]) for each in (one, other)], 1)
                np.testing.assert_array_equal(rows.reshape(batch[name].shape), batch[name])


def test_only_the_samples_of_a_rank_are_read(monkeypatch):
    read = []
    get = language_model.Sentences.__getitem__
    monkeypatch.setattr(language_model.Sentences, "__getitem__", lambda self, at: read.append(at) or get(self, at))
    monkeypatch.setattr("executor.data.sources.load_named", lambda word, what: language_model.Sentences)
    graph = capture(*language_model.model())
    list(Source(data="m:Sentences").batches(graph, 6, first=4, share=Share(parts=4, part=3)))
    assert len(read) == 2 * language_model.BATCH // 4


def test_datasets_are_shuffled_or_read_in_turn():
    graph, samples = capture(*language_model.model()), language_model.Sentences()
    source = Source(data=f"{FILE}:Sentences", seed=2)
    assert source.num_batches(graph) == 20 // language_model.BATCH
    firsts = [int(ids[0]) for batch in source.batches(graph, 4) for ids in batch["ids"]]
    assert len(set(firsts[:16])) == 16 and firsts[:16] != firsts[16:]
    for batch, same in zip(
        source.batches(graph, 4), Source(data=f"{FILE}:Table", seed=2).batches(graph, 4), strict=True
    ):
        np.testing.assert_equal({name: np.asarray(rows) for name, rows in batch.items()}, same)
    for word in ("Stream", "loader"):
        for step, batch in enumerate(Source(data=f"{FILE}:{word}").batches(graph, 4)):
            first = step % 2 * language_model.BATCH
            expected = torch.stack([samples[first + number][0] for number in range(language_model.BATCH)])
            np.testing.assert_array_equal(batch["ids"], expected)


def classifier(channels=3, classes=3, batch=2):
    tensors = {
        "images": Tensor(name="images", shape=(batch, channels, 4, 6), kind="input"),
        "labels": Tensor(name="labels", shape=(batch,), dtype="int64", kind="input"),
        "weight": Tensor(name="weight", shape=(classes, channels * 24), kind="parameter"),
        "flat": Tensor(name="flat", shape=(batch, channels * 24)),
        "logits": Tensor(name="logits", shape=(batch, classes)),
        "loss": Tensor(name="loss", shape=()),
    }
    operators = (
        Operator(name="flat", kind="reshape", inputs=("images",), outputs=("flat",)),
        Operator(name="logits", kind="linear", inputs=("flat", "weight"), outputs=("logits",)),
        Operator(name="loss", kind="cross_entropy", inputs=("logits", "labels"), outputs=("loss",)),
    )
    return Graph(name="g", batch_size=batch, tensors=tensors, operators=operators, loss="loss")


def test_a_folder_of_images_gives_normalised_images_and_the_number_of_their_folder(tmp_path):
    colours = {"cat": (255, 0, 0), "dog": (0, 255, 0), "owl": (0, 0, 51)}
    for name, colour in colours.items():
        (tmp_path / name).mkdir()
        image = Image.new("RGB", (12, 20), colour)  # higher than 4 x 6: it is scaled by a half and cut
        image.putpixel((0, 0), (255, 255, 255))  # a corner that is cut away
        image.save(tmp_path / name / "a.png")
        image.convert("L").save(tmp_path / name / "B.JPG", quality=100)
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    source = Source(data=str(tmp_path), seed=0)
    assert source.num_batches(classifier()) == 3
    mean, deviation = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]  # torchvision's documentation
    seen = []
    for batch in source.batches(classifier(), 3):
        for image, label in zip(batch["images"], batch["labels"], strict=True):
            colour = list(colours.values())[label]
            grey = round(0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2])
            is_grey = np.ptp(image[:, 0, 0] * deviation + mean) < 0.02
            pixel = (grey,) * 3 if is_grey else colour
            expected = [(value / 255 - m) / d for value, m, d in zip(pixel, mean, deviation, strict=True)]
            np.testing.assert_allclose(image, np.broadcast_to(np.reshape(expected, (3, 1, 1)), (3, 4, 6)), atol=0.02)
            seen.append((int(label), bool(is_grey)))
    assert sorted(seen) == [(label, grey) for label in range(3) for grey in (False, True)]
    for batch in source.batches(classifier(channels=1), 3):
        for image, label in zip(batch["images"], batch["labels"], strict=True):
            grey = np.dot((0.299, 0.587, 0.114), list(colours.values())[label])
            np.testing.assert_allclose(image, np.full((1, 4, 6), (grey / 255 - 0.449) / 0.226), atol=0.02)


def test_data_that_cannot_be_read_by_number_are_refused_in_a_sentence(gpt, tmp_path):
    path = Path(write_indexed(tmp_path / "text", [50, 70]))
    whole = path.read_bytes()
    images = tmp_path / "images"
    (images / "cat").mkdir(parents=True)
    Image.new("L", (5, 5)).save(images / "cat" / "a.png")

    def refused(graph, data, match):
        with pytest.raises(TwofoldError, match=match) as error:
            Source(data=str(data)).check(graph)
        assert "\n" not in str(error.value)

    for other in (classifier(), mlp_graph([6, 4], 8)):
        refused(other, path, "models of tokens and labels")
    refused(gpt.with_batch(16), path, "epoch 1 has 14 samples; a batch needs 16")
    for content in (whole[:-1], b"x" + whole[1:], whole[:17] + b"\x07" + whole[18:], whole[:60]):
        path.write_bytes(content)
        refused(gpt, path, "not a complete index")
    path.write_bytes(whole)
    path.with_suffix(".bin").write_bytes(b"\0" * 238)
    refused(gpt, path, "the index of 120 tokens, and .*bin has 119")
    path.with_suffix(".bin").unlink()
    refused(gpt, path, r"cannot read the data .*text.bin': No such file")
    refused(gpt, images, "models of images")
    (images / "dog").mkdir()
    refused(classifier(classes=1), images, "has 2 folders of classes, but the model has 1 classes")
    refused(classifier(), images, "dog: has no images")
    (images / "dog" / "a.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    refused(classifier(), images, "a.png: not a readable image")
