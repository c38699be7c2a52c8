"""Training data of the user's own: where they come from, and what is refused before anything is launched."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import twofold as tf
from executor.capture.capture import capture
from executor.data.batches import BatchCheck, input_limits, input_probabilities, random_batches
from executor.data.sources import Source, read_batches, save_batches
from executor.device import Device
from executor.weights.same_start import check_same_batch
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.model.graph import Graph, Operator, Tensor
from plans.model.transformer import TransformerConfig, transformer
from plans.plan import Plan, Stage, Strategy, save_plan
from tests.modules import language_model
from tests.support.on_ranks import run_on_ranks
from twofold.cli import main

FILE = Path(language_model.__file__)
BATCH, LENGTH, VOCAB = language_model.BATCH, language_model.LENGTH, language_model.VOCAB


def word(name):
    return f"{FILE}:{name}"


@pytest.fixture(scope="module")
def graph():
    return capture(*language_model.model())


@pytest.fixture(scope="module")
def plan(graph):
    strategies = {each.name: Strategy(dims={"b0": ("dp",)}) for each in graph.operators if each.kind == "linear"}
    stage = Stage(mesh=Layout((2,), ("dp",)), operators=tuple(each.name for each in graph.operators))
    return Plan(graph=graph, stages=(stage,), strategies=strategies)


def same(found, expected):
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        assert set(mine) == {"ids", "labels"}
        for name, array in zip(("ids", "labels"), other, strict=True):
            np.testing.assert_array_equal(mine[name], array)


# -- where data come from ----------------------------------------------------------------------------------------------


def test_a_function_is_called_once_an_epoch(graph):
    epoch = list(language_model.batches())
    source = Source(data=word("batches"))
    same(list(source.batches(graph, 5)), [*epoch, *epoch[:2]])
    assert source.num_batches(graph) is None


def test_an_object_and_batches_themselves_will_do(graph):
    for data in (word("WORDS"), language_model.WORDS):
        source = Source(data=data)
        same(list(source.batches(graph, 3)), [*language_model.WORDS, language_model.WORDS[0]])
        assert source.num_batches(graph) == 2


def test_a_function_and_a_dataset_themselves_will_do(graph):
    same(list(Source(data=language_model.batches).batches(graph, 2)), list(language_model.batches())[:2])
    ids = torch.arange(2 * BATCH * LENGTH).reshape(-1, LENGTH) % 50
    batches = read_batches(graph, torch.utils.data.TensorDataset(ids, ids), 3, seed=1)
    assert len(batches) == 3 and sorted(row for batch in batches[:2] for row in batch["ids"][:, 0]) == sorted(ids[:, 0])
    assert len(read_batches(graph, iter(language_model.WORDS), 5)) == len(language_model.WORDS)
    with pytest.raises(TwofoldError, match="data int must give an iterable of batches or a dataset, it gave int"):
        read_batches(graph, 5, 1)


def test_tensors_by_name_will_do(graph):
    first = next(Source(data=word("endless")).batches(graph, 1))
    assert first["ids"].shape == first["labels"].shape == (BATCH, LENGTH)
    np.testing.assert_array_equal(first["ids"][:, 1:], first["labels"][:, :-1])


def test_a_file_of_rows_gives_whole_batches(graph, tmp_path):
    batches = list(language_model.batches(4))
    path = save_batches(graph, batches, 3, tmp_path / "data.npz")
    with np.load(path) as file:
        assert file["ids"].shape == (3 * BATCH, LENGTH)
    source = Source(data=str(path))
    assert source.num_batches(graph) == 3
    same(list(source.batches(graph, 4)), [*batches[:3], batches[0]])
    rows = {name: np.zeros((BATCH + 3, LENGTH), np.int64) for name in ("ids", "labels")}
    np.savez(tmp_path / "more.npz", **rows)
    assert Source(data=str(tmp_path / "more.npz")).num_batches(graph) == 1  # the incomplete one is dropped


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (word("too_short"), r"input 'ids': the data gives int64 \(8, 5\), the plan asks for int64 \(8, 6\)"),
        (word("too_large"), "input 'ids': the data gives 5., the plan asks for numbers from 0 to 49"),
        (word("none"), "epoch 1 has no batch; give at least one"),
        (word("BATCH"), "must give an iterable of batches or a dataset, it gave int"),
        (word("missing"), "has no 'missing'"),
        ("nowhere.at.all:batches", "there is no module 'nowhere'; name an installed one, or a file"),
        ("/nowhere/data.npz", "cannot read the data '/nowhere/data.npz': No such file or directory"),
        ("/nowhere", "data '/nowhere' does not exist"),
        ([(np.zeros((8, 6), np.int64),)], "a batch of the data has 1 arrays; the plan asks for ids int64"),
        ([{"ids": 1, "words": 2}], "a batch of the data has the names ids, words; the plan asks for ids int64"),
        ([7], "is not a tuple or dict of arrays but int"),
        ([([[1], [1, 2]], 3)], "input 'ids': the data gives rows of different lengths; pad them"),
        ([(torch.zeros(8, 6, device="meta"), 3)], "input 'ids': the data gives a tensor on the meta device"),
        ([(np.zeros((8, 6)), np.zeros((8, 6), np.int64))], "input 'ids': the data gives float64"),
        ([(np.full((8, 6), -1), np.zeros((8, 6), np.int64))], "input 'ids': the data gives -1, the plan asks for"),
        ("digits", r"input 'ids': the data gives float32 \(8, 1, 28, 28\), the plan asks for int64 \(8, 6\)"),
    ],
)
def test_data_for_another_plan_are_refused_in_one_sentence(data, message, graph):
    with pytest.raises(TwofoldError, match=message) as error:
        Source(data=data).check(graph)
    assert "\n" not in str(error.value)


def test_labels_that_are_ignored_may_be_given():
    tensors = {
        "x": Tensor(name="x", shape=(4, 3), kind="input"),
        "y": Tensor(name="y", shape=(4,), dtype="int64", kind="input"),
        "count": Tensor(name="count", shape=()),
        "loss": Tensor(name="loss", shape=()),
    }
    attrs = {"ignore_index": -100}
    counted = Operator(name="count", kind="count_labels", inputs=("y",), outputs=("count",), attrs=attrs)
    loss = Operator(name="loss", kind="cross_entropy", inputs=("x", "y", "count"), outputs=("loss",), attrs=attrs)
    graph = Graph(name="g", batch_size=4, tensors=tensors, operators=(counted, loss), loss="loss")
    check, x = BatchCheck(graph), np.zeros((4, 3), np.float32)
    assert check((x, np.array([0, 1, -100, 2])))["y"][2] == -100
    with pytest.raises(TwofoldError, match="gives -1,"):
        check((x, np.array([0, 1, -1, 2])))


def test_half_precision_takes_float32():
    tensors = {
        "x": Tensor(name="x", shape=(4, 3), dtype="bfloat16", kind="input"),
        "y": Tensor(name="y", shape=(4, 3), dtype="bfloat16", kind="input"),
        "loss": Tensor(name="loss", shape=(), dtype="bfloat16"),
    }
    loss = Operator(name="loss", kind="mse_loss", inputs=("x", "y"), outputs=("loss",))
    graph = Graph(name="g", batch_size=4, tensors=tensors, operators=(loss,), loss="loss")
    given = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    made = BatchCheck(graph)((given, torch.from_numpy(given).bfloat16()))
    assert made["x"].dtype == torch.bfloat16 and torch.equal(made["x"], made["y"])
    assert next(random_batches(graph, 0, 1))["x"].dtype == torch.bfloat16


# -- random data -------------------------------------------------------------------------------------------------------


def test_random_numbers_stay_below_the_limit_of_each_input(graph):
    assert input_limits(graph) == {"ids": VOCAB, "labels": VOCAB}  # through a flatten
    seen = np.concatenate([batch["ids"].ravel() for batch in random_batches(graph, 0, 4)])
    assert seen.min() >= 0 and 40 < seen.max() < VOCAB


def test_limits_of_a_model_with_segments():
    config = TransformerConfig(num_layers=1, hidden=8, num_heads=2, vocab=30, seq=4, token_types=2)
    graph = transformer(config, batch_size=2)
    assert input_limits(graph) == {"tokens": 30, "token_types": 2, "labels": 30}
    assert next(random_batches(graph, 0, 1))["token_types"].max() < 2


class Columns(nn.Module):
    def __init__(self):
        super().__init__()
        self.countries, self.ages = nn.Embedding(11, 4), nn.Embedding(5, 4)

    def forward(self, ids):
        return (self.countries(ids[:, 0]) * self.ages(ids[:, 1])).mean()


def test_columns_of_an_input_have_limits_of_their_own():
    graph = capture(Columns(), (torch.zeros(8, 2, dtype=torch.int64),))
    ids = np.stack([np.full(8, 10), np.full(8, 4)], 1)
    assert (BatchCheck(graph)((ids,))["ids"] == ids).all()
    with pytest.raises(TwofoldError, match="11, the plan asks for numbers from 0 to 10"):
        BatchCheck(graph)((np.add(ids, 1),))
    assert next(random_batches(graph, 0, 1))["ids"].max() < 5


class Clicks(nn.Module):
    """Its targets reach the loss through a reshape; beyond 0 to 1 torch's CUDA kernel ends the process."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, x, clicks):
        return F.binary_cross_entropy(self.net(x).sigmoid(), clicks.reshape(-1, 1))


def test_targets_of_a_binary_cross_entropy_are_probabilities():
    graph = capture(Clicks(), ((64, 3), (64,)))
    assert input_probabilities(graph) == {"clicks"}
    drawn = next(random_batches(graph, 0, 1))
    assert 0 <= drawn["clicks"].min() < 0.2 and 0.8 < drawn["clicks"].max() <= 1 and drawn["x"].min() < 0
    check = BatchCheck(graph)
    assert check(drawn)["clicks"].dtype == np.float32
    with pytest.raises(
        TwofoldError, match=r"input 'clicks': the data gives 1.5, the plan asks for numbers from 0 to 1"
    ):
        check(drawn | {"clicks": np.full(64, 1.5, np.float32)})


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(plan, tmp_path):
    return str(save_plan(plan, tmp_path / "plan.json"))


@pytest.mark.parametrize("command", ["run", "verify"])
def test_wrong_data_are_refused_before_the_launch(command, saved, tmp_path, capsys):
    more = ["--model", word("model")] if command == "verify" else []
    assert main([command, saved, "--data", word("too_short"), "--log-dir", str(tmp_path / "log"), *more]) == 2
    assert "input 'ids': the data gives int64 (8, 5), the plan asks for int64 (8, 6)" in capsys.readouterr().err
    assert not (tmp_path / "log").exists()


@pytest.mark.ranks
def test_a_plan_is_run_and_verified_on_data_of_ones_own(saved, plan, tmp_path, capsys):
    log = ["--log-dir", str(tmp_path / "log"), "--steps", "4", "--json"]
    assert main(["verify", saved, "--model", word("model"), "--data", word("batches"), *log]) == 0
    verified = json.loads(capsys.readouterr().out)
    assert verified["passed"] and verified["loss_first_rel_diff"] < 2e-6
    more = {"model": word("model"), "log_dir": tmp_path / "log"}
    result = tf.run(plan, steps=4, data=language_model.batches(4), out=tmp_path / "out", **more)
    again = tf.run(plan, steps=4, data=str(tmp_path / "out" / "data.npz"), **more)
    np.testing.assert_array_equal(result.losses, again.losses)
    found = tf.verify(plan, steps=3, data=language_model.batches(4), **more)
    assert found.passed
    np.testing.assert_array_equal(found.run.losses, result.losses[:3])


def compare_batches(rank, folder):
    device = Device(kind="cpu")
    check_same_batch({"ids": np.arange(4)}, device)
    try:
        check_same_batch({"ids": np.arange(4), "labels": np.arange(4) + (rank == 1)}, device)
    except TwofoldError as error:
        (folder / f"{rank}.txt").write_text(str(error))


@pytest.mark.ranks
def test_ranks_with_different_batches_are_named(tmp_path):
    run_on_ranks(compare_batches, 2, tmp_path)
    for rank in range(2):
        assert "input 'labels': the data give rank 1 another first batch" in (tmp_path / f"{rank}.txt").read_text()
