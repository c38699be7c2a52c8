"""Runs that go on from a checkpoint: bit for bit on the same plan, to rounding on another one."""

import errno
import hashlib
import json
import os
import pickle
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from executor.capture.capture import capture
from executor.train.checkpoints import writing
from executor.train.checkpoints.checkpoint import Saver
from executor.train.checkpoints.export import write_weights
from executor.train.checkpoints.files import check_checkpoint, written_checkpoints
from executor.train.checkpoints.writing import HashedFile, HashedFiles
from executor.train.losscell import MAELoss, WithLossCell
from executor.train.options import Checkpoints, RunOptions
from executor.train.run import run_rank
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.lower import lower
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage
from tests.support.on_ranks import lowered, run_on_ranks
from tests.support.small_training import batches, four_ranks, one_rank, parameters

ADAMW = Optimizer(kind="adamw", settings={"lr": 0.01}, parallel_level=1, threshold_bytes=0)
SGD = four_ranks()["data parallel"].optimizer
PLANS = {
    f"{name}, {optimizer.kind}": __import__("msgspec").structs.replace(plan, optimizer=optimizer)
    for optimizer in (
        ADAMW,
        Optimizer(kind="momentum", settings={"lr": 0.1, "momentum": 0.9}, parallel_level=1, threshold_bytes=0),
    )
    for name, plan in four_ranks().items()
    if name in ("data parallel", "two stages") or (name == "split weights" and optimizer is ADAMW)
}
STEPS, CUT = 7, 4


def trained(plan, folder, *, resume=None, save=False, steps=STEPS):
    first = 0 if resume is None else CUT
    asked = Checkpoints(folder=folder, every=2 if save else 1000, keep=1, resume=resume)
    options = RunOptions(checkpoints=asked, count=False, record_steps=0, learning_rate=lambda step: 0.02 / (1 + step))
    feed = iter(batches(STEPS)[first:steps])
    return run_rank(lowered(plan), plan, feed, parameters(), steps - first, device="cpu", options=options)


def work(rank, folder):
    for name, plan in PLANS.items():
        own = folder / name
        trained(plan, own / "cut", save=True, steps=CUT)  # writes 2 and 4
        (checkpoint,) = written_checkpoints(own / "cut")
        found = {
            "at the cut": trained(plan, own / "d", steps=CUT),
            "whole": trained(plan, own / "a"),
            "resumed": trained(plan, own / "b", resume=checkpoint),
        }
        for other, another in PLANS.items():
            if other != name and another.optimizer == plan.optimizer:
                found[f"on {other}"] = trained(another, own / "c", resume=checkpoint)
        if rank == 0:
            for label, result in found.items():
                np.savez(own / f"{label}.npz", losses=result.losses, **result.weights)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    run_on_ranks(work, 4, folder)
    return folder


@pytest.mark.parametrize("name", PLANS)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(folder, name):
    whole, resumed = np.load(folder / name / "whole.npz"), np.load(folder / name / "resumed.npz")
    assert np.array_equal(whole["losses"][CUT:], resumed["losses"])
    for weight in parameters():
        assert np.array_equal(whole[weight], resumed[weight]), weight


@pytest.mark.parametrize("name", PLANS)
def test_another_plan_resumes_from_it(folder, name):
    whole = np.load(folder / name / "whole.npz")
    others = sorted((folder / name).glob("on *.npz"))
    assert len(others) == (2 if "adamw" in name else 1)
    for path in others:
        resumed = np.load(path)
        np.testing.assert_allclose(resumed["losses"], whole["losses"][CUT:], rtol=2e-6)
        for weight in parameters():
            np.testing.assert_allclose(resumed[weight], whole[weight], rtol=1e-4, atol=1e-6)


def test_one_rank_resumes_from_four(folder, tmp_path):
    name = "data parallel, adamw"
    (checkpoint,) = written_checkpoints(folder / name / "cut")
    resumed = trained(one_rank(optimizer=ADAMW), tmp_path, resume=checkpoint)
    np.testing.assert_allclose(resumed.losses, np.load(folder / name / "whole.npz")["losses"][CUT:], rtol=2e-6)


def read_safetensors(path):
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    assert header.pop("__metadata__")["format"] == "pt" and start % 8 == 0
    read = {}
    for name, said in header.items():
        first, last = said["data_offsets"]
        assert said["dtype"] == "F32"
        read[name] = np.frombuffer(content[start + first : start + last], np.float32).reshape(said["shape"])
    assert start + max(said["data_offsets"][1] for said in header.values()) == len(content)
    return read


@pytest.mark.parametrize("name", PLANS)
def test_weights_of_a_checkpoint_are_those_of_a_run_that_ends_there(folder, name, tmp_path):
    (checkpoint,) = written_checkpoints(folder / name / "cut")
    expected = np.load(folder / name / "at the cut.npz")
    for file in ("w.safetensors", "w.pt"):
        assert sorted(write_weights(checkpoint, tmp_path / file)) == sorted(parameters())
    state = torch.load(tmp_path / "w.pt", weights_only=True)
    for read in (read_safetensors(tmp_path / "w.safetensors"), {key: each.numpy() for key, each in state.items()}):
        assert sorted(read) == sorted(parameters())
        assert all(np.array_equal(read[weight], expected[weight]) for weight in read)


def test_masters_are_rounded_and_other_folders_are_refused(tmp_path):
    optimizer = Optimizer(kind="adamw", settings={"lr": 0.01}, master_dtype="float64")
    ran = trained(one_rank(optimizer=optimizer), tmp_path, save=True, steps=CUT)
    (checkpoint,) = written_checkpoints(tmp_path)
    write_weights(checkpoint, tmp_path / "w.safetensors")
    write_weights(checkpoint, tmp_path / "w.safetensors")  # our own file is replaced
    for name, array in read_safetensors(tmp_path / "w.safetensors").items():
        assert ran.weights[name].dtype == np.float64 and np.array_equal(array, ran.weights[name].astype(np.float32))
    data = next(checkpoint.glob("__0_*"))
    data.write_bytes(data.read_bytes()[:-1])
    for given, file, says in (
        (checkpoint, "w.pt", "changed after it was"), (tmp_path, "w.pt", "plan.json"), (checkpoint, "w.txt", "w.txt"),
    ):  # fmt: skip
        with pytest.raises(TwofoldError, match=says):
            write_weights(given, tmp_path / file)
    assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint.name, "w.safetensors"]


def test_incomplete_checkpoints_and_those_of_other_models_are_refused(folder, tmp_path):
    name = "two stages, adamw"
    (checkpoint,) = written_checkpoints(folder / name / "cut")
    assert not list((folder / name / "cut").glob(".*"))  # nothing half-written is left
    assert check_checkpoint(checkpoint, PLANS[name]).step == CUT
    with pytest.raises(TwofoldError, match="another model or optimizer"):
        check_checkpoint(checkpoint, PLANS["two stages, momentum"])
    for path in sorted(checkpoint.iterdir()):
        copy = tmp_path / path.name / checkpoint.name
        shutil.copytree(checkpoint, copy)
        data = bytearray((copy / path.name).read_bytes())
        data[len(data) // 2] ^= 1
        (copy / path.name).write_bytes(data if path.name != "manifest.json" else data[: len(data) // 2])
        with pytest.raises(TwofoldError, match=r"changed after it was written|resume from another"):
            check_checkpoint(copy, PLANS[name])


def test_a_run_killed_while_it_removes_a_checkpoint_leaves_whole_ones_only(tmp_path, monkeypatch):
    """What a kill leaves: the first file is gone."""
    remove, plan = shutil.rmtree, one_rank(optimizer=ADAMW)
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: [file.unlink() for file in [*Path(path).iterdir()][:1]])
    trained(plan, tmp_path, save=True, steps=6)  # writes 2, 4 and 6, and keeps one
    monkeypatch.setattr(shutil, "rmtree", remove)
    assert [check_checkpoint(path, plan).step for path in written_checkpoints(tmp_path)] == [6]
    assert list(tmp_path.glob(".*"))
    trained(plan, tmp_path, save=True, steps=2)
    assert not list(tmp_path.glob(".*"))  # the next run takes away what is left


def test_files_are_hashed_while_they_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "CHUNK_BYTES", 64)
    monkeypatch.setattr(writing, "SYNC_BYTES", 500)
    files, draw, whole = HashedFiles(), np.random.default_rng(1), b""
    with files.create_stream(tmp_path / "part", "wb") as stream:
        for size in draw.integers(0, 3 * writing._BUFFER_BYTES, 5):
            assert stream.tell() == len(whole)
            whole += (data := draw.bytes(size))
            stream.write(data)
    assert (tmp_path / "part").read_bytes() == whole
    assert files.written == {"part": (len(whole), hashlib.blake2b(whole).hexdigest())}


def test_a_disk_that_fails_at_the_end_is_noticed(tmp_path, monkeypatch):
    def fails(number):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    file = HashedFile(tmp_path / "part")
    file.write(b"0123456789")
    with pytest.raises(OSError, match="Input/output"):
        file.close()
    assert file.closed


def test_training_that_waits_for_the_disk_says_which_interval_is_enough(tmp_path, monkeypatch, capsys):
    write = Saver._write
    monkeypatch.setattr("executor.train.checkpoints.checkpoint._WAITED_S", 0.1)
    monkeypatch.setattr(Saver, "_write", lambda saver, *asked: (time.sleep(0.3), write(saver, *asked)))
    trained(one_rank(optimizer=ADAMW), tmp_path, save=True)  # writes 2, 4 and 6, and 7 at the end
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "waited" in line]
    assert re.fullmatch(
        r"the checkpoint of step 4 waited 0\.\d s until .*; with one every \d+ steps it would not", line
    )


class Runs:
    """A pickle of it writes a file when it is read."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def _runs_code(index, marker):
    index.planner_data = Runs(marker)


def _holds_bytes(index, marker):
    key = next(iter(index.state_dict_metadata))
    index.state_dict_metadata[key] = BytesStorageMetadata()


def _reads_elsewhere(index, marker):
    next(iter(index.storage_data.values())).relative_path = "../../secret"


@pytest.mark.parametrize(
    ("malice", "says"),
    [
        (_runs_code, r"it names pathlib\.Path\.touch, which does not belong in an index"),
        (_holds_bytes, r"it names .*BytesStorageMetadata"),
        (_reads_elsewhere, r"'\.\./\.\./secret' is not in the folder"),
    ],
)
def test_the_index_of_a_checkpoint_runs_no_code(malice, says, folder, tmp_path):
    (whole,) = written_checkpoints(folder / "data parallel, adamw" / "cut")
    made_up = shutil.copytree(whole, tmp_path / whole.name)
    with (made_up / ".metadata").open("rb") as file:
        index = pickle.load(file)
    malice(index, tmp_path / "marker")
    (made_up / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(TwofoldError, match=says):
        trained(one_rank(optimizer=ADAMW), tmp_path, resume=made_up)
    assert not (tmp_path / "marker").exists()


def test_running_statistics_resume_too(tmp_path):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    graph = capture(WithLossCell(module, MAELoss()), ((8, 3), (8, 1)))
    stage = Stage(mesh=Layout((1,), ("dp",)), operators=tuple(each.name for each in graph.operators))
    plan = Plan(graph=graph, stages=(stage,), num_micro_batches=2, optimizer=ADAMW)
    held = dict([*module.named_parameters(prefix="_backbone"), *module.named_buffers(prefix="_backbone")])
    first = {each.name: held[each.name].detach().numpy().copy() for each in (*graph.parameters, *graph.constants)}
    draw, inputs = np.random.default_rng(0), [each.name for each in graph.inputs]
    feed = [
        dict(zip(inputs, (draw.random((8, 3), dtype="float32"), draw.random((8, 1), dtype="float32")), strict=True))
        for _ in range(STEPS)
    ]

    def found(folder, steps, *, resume=None):
        asked = Checkpoints(folder=folder, every=CUT, keep=1, resume=resume)
        options = RunOptions(checkpoints=asked, count=False, record_steps=0)
        program, weights = lower(plan), folder / "w.npz"
        run_rank(program, plan, iter(steps), first, len(steps), device="cpu", options=options, weights_path=weights)
        return np.load(folder / "w.npz")

    for name in ("whole", "cut", "resumed"):
        (tmp_path / name).mkdir()
    whole = found(tmp_path / "whole", feed)
    found(tmp_path / "cut", feed[:CUT])
    (checkpoint,) = written_checkpoints(tmp_path / "cut")
    resumed = found(tmp_path / "resumed", feed[CUT:], resume=checkpoint)
    assert "_backbone.1.running_mean" in whole and int(whole["_backbone.1.num_batches_tracked"]) == 2 * STEPS
    for name in whole:
        assert np.array_equal(whole[name], resumed[name]), name
