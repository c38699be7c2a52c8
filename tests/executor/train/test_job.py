"""`twofold train`: schedules as torch has them, restarts that change nothing, and bad jobs refused before a launch."""

from __future__ import annotations

import csv
import fcntl
import json
import os
import re
import sys
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

import twofold as tf
from costmodels import Machine
from executor.capture.capture import capture
from executor.data.sources import Source
from executor.device import pick_device
from executor.launch import train_job
from executor.launch.resumable import Held
from executor.launch.train_job import CheckpointSettings, TrainingJob
from executor.train.checkpoints.files import read_manifest, written_checkpoints
from executor.train.metrics import Metrics, StepFacts
from executor.train.options import Checkpoints, RunOptions
from executor.train.rates import Rate
from executor.train.run import run_rank
from executor.train.settings import OptimizerSettings, RunSettings
from plans.errors import TwofoldError
from plans.lower import lower
from plans.model.transformer import transformer
from plans.optimizer import Optimizer, ParameterGroup
from plans.plan import load_plan, save_plan
from search import search
from tests import ROOT
from tests.support.small_training import batches, four_ranks, one_rank, parameters
from twofold.cli import main

JOB = """
plan = "{folder}/plan.json"
steps = {steps}
out = "{folder}/{out}"
data = "{data}"
log_dir = "{folder}/logs"
gather_weights = true
[learning_rate]
kind = "cosine"
peak = 0.05
warmup = 3
[checkpoints]
every = 5
"""

DATA = """
import os, signal
from pathlib import Path
from tests.support.small_training import batches

def fed():
    for number, batch in enumerate(batches(14)):
        mark = Path(__file__).with_name(f"killed.{number}")
        if os.environ.get("RANK") == "2" and number in (8, 12) and not mark.exists():
            mark.touch()
            if number == 12:
                raise OSError("the disk of the data is away")
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch
"""


def write_job(folder: Path, out: str, data: str, steps: int = 14, more: str = "") -> Path:
    path = folder / f"{out}.toml"
    path.write_text(JOB.format(folder=folder, out=out, data=data, steps=steps) + more)
    return path


def losses(path: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


@pytest.mark.ranks
def test_a_run_whose_rank_is_killed_and_raises_equals_one_that_does_neither(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    save_plan(four_ranks()["two stages"], tmp_path / "plan.json")
    (tmp_path / "data.py").write_text(DATA)
    job = write_job(tmp_path, "killed", f"{tmp_path}/data.py:fed")
    assert main(["train", str(job), "--max-restarts", "2"]) == 0
    told = capsys.readouterr().out
    assert told.count("rank 2 was killed by SIGKILL") == 1 and "0 restarts left" in told
    assert told.count("raised OSError: the disk of the data is away") == 1
    whole = write_job(tmp_path, "whole", f"{tmp_path}/data.py:fed")
    assert main(["train", str(whole), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    ran = losses(tmp_path / "killed" / "metrics.jsonl")
    assert [step for step, _ in ran] == list(range(1, 15))
    kept = written_checkpoints(tmp_path / "killed" / "checkpoints")
    assert [path.name for path in kept] == ["step-00000010", "step-00000014"]
    assert ran == losses(tmp_path / "whole" / "metrics.jsonl")
    assert said["losses"] == [loss for _, loss in ran]
    (tmp_path / "killed" / "weights.npz").unlink()  # as if the run ended after its last checkpoint
    assert main(["train", str(job), "--resume"]) == 0
    assert losses(tmp_path / "killed" / "metrics.jsonl") == ran
    with np.load(tmp_path / "killed" / "weights.npz") as killed, np.load(tmp_path / "whole" / "weights.npz") as whole:
        assert all(np.array_equal(killed[name], whole[name]) for name in killed.files)


def test_a_node_that_waited_to_join_resumes_from_a_checkpoint_written_since(tmp_path):
    plan, settings = one_rank(), CheckpointSettings(every=5)
    asked = Checkpoints(folder=tmp_path / "out" / "checkpoints", every=5)
    options = RunOptions(count=False, record_steps=0, checkpoints=asked)
    run_rank(lower(plan), plan, iter(batches(6)), parameters(), 6, device="cpu", options=options)
    written = written_checkpoints(asked.folder)[-1]
    job = TrainingJob(plan="plan.json", steps=9, out=str(tmp_path / "out"), checkpoints=settings)
    for run, resume in ((read_manifest(written).run, str(written)), ("other", None)):
        found = train_job._checkpoints(job, settings, Held(step=6, run=run, share=(0, 1)))
        assert (found.resume, found.first) == (resume, 6)


def test_a_resume_with_settings_that_change_the_losses_names_them(tmp_path, capsys):
    plan, folder = one_rank(), tmp_path / "out" / "checkpoints"
    settings = RunSettings(seed=1, data="random", steps=14, learning_rate=Rate(kind="cosine", peak=0.05, warmup=3))
    options = RunOptions(
        count=False, record_steps=0, checkpoints=Checkpoints(folder=folder, every=5, settings=settings)
    )
    run_rank(lower(plan), plan, iter(batches(6)), parameters(), 6, device="cpu", options=options)
    assert [path.name for path in written_checkpoints(folder)] == ["step-00000005", "step-00000006"]
    path, job = save_plan(plan, tmp_path / "plan.json"), write_job(tmp_path, "out", "random")
    text = job.read_text()

    def resumed(*words):
        code = main(["train", str(job), "--resume", *words])
        printed = capsys.readouterr()
        (line,) = printed.err.splitlines()
        return code, line, printed.out

    for old, new, change in (
        ('data = "random"', 'data = "random"\nseed = 2', "seed was 1 and is now 2"),
        ("steps = 14", "steps = 20", "steps was 14 and is now 20"),
        ("peak = 0.05", "peak = 0.5", "learning_rate.peak was 0.05 and is now 0.5"),
        ("every = 5", "every = 5\n[spike]\nfactor = 3", "spike.factor was None and is now 3.0"),
    ):
        job.write_text(text.replace(old, new))
        code, line, _ = resumed()
        assert code == 2 and f"step-00000006: {change}" in line and line.endswith("--resume --allow-changes"), line
    job.write_text(text)
    changed = msgspec.structs.replace(plan.optimizer, kind="sgd", clip_norm=0.5)
    save_plan(msgspec.structs.replace(plan, optimizer=changed), path)
    assert "optimizer.clip_norm was None and is now 0.5" in resumed()[1]
    # the rate of the plan is not used, and the sharding does not matter
    sharded = msgspec.structs.replace(plan.optimizer, settings={"lr": 3.0}, parallel_level=0)
    save_plan(msgspec.structs.replace(plan, optimizer=sharded), path)
    job.write_text(text.replace("steps = 14", "steps = 5"))
    code, line, printed = resumed("--allow-changes")
    assert code == 2 and "6 steps are done, but the job has 5; increase steps" in line
    assert printed.splitlines() == [f"after {folder}/step-00000006: steps was 14 and is now 5"]


CLASSES = 3


def classifier_batches(seed: int, count: int = 4) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(seed)
    return [
        {"data": random.standard_normal((8, 6)).astype(np.float32), "label": random.integers(0, CLASSES, 8)}
        for _ in range(count)
    ]


def training_batches() -> list[dict[str, np.ndarray]]:
    return classifier_batches(1)


def held_out_batches() -> list[dict[str, np.ndarray]]:
    return classifier_batches(2, 3)


def classifier() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    from executor.train.losscell import WithLossCell

    body = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Dropout(0.2),
        torch.nn.Linear(8, CLASSES),
    )  # fmt: skip
    batch = classifier_batches(0, 1)[0]
    return WithLossCell(body, torch.nn.CrossEntropyLoss()), (torch.tensor(batch["data"]), torch.tensor(batch["label"]))


@pytest.mark.ranks
def test_evaluations_between_steps_are_those_of_a_plain_module_and_change_nothing(tmp_path, capsys, monkeypatch):
    """Sharded weights, two stages, dropout and running statistics: loss and accuracy of a module in eval mode."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    here = f"{__file__}:"
    graph = capture(*classifier())
    adamw = Optimizer(kind="adamw", settings={"lr": 0.05}, parallel_level=3, threshold_bytes=0)
    machine = Machine.load("cpu-2core-x8")
    found = search(graph, machine, num_devices=4, num_stages=2, num_micro_batches=2, optimizer=adamw)
    plan = save_plan(found.best, tmp_path / "plan.json")
    common = f'model = "{here}classifier"\nsteps = 7\ndata = "{here}training_batches"\nlog_dir = "{tmp_path}/logs"\n'
    weights = {}
    for every in (0, 2):
        out = tmp_path / f"every{every}"
        asked = f'[evaluation]\ndata = "{here}held_out_batches"\nevery = {every}\n' if every else ""
        job = tmp_path / f"{every}.toml"
        job.write_text(f'plan = "{plan}"\nout = "{out}"\n{common}{asked}')
        assert main(["train", str(job)]) == 0
        with np.load(out / "weights.npz") as found:
            weights[every] = dict(found)
    told = capsys.readouterr().out
    assert losses(tmp_path / "every2" / "metrics.jsonl") == losses(tmp_path / "every0" / "metrics.jsonl")
    assert all(np.array_equal(weights[0][name], weights[2][name]) for name in weights[0])
    rows = [json.loads(line) for line in (tmp_path / "every2" / "evaluations.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4, 6, 7] and len({row["loss"] for row in rows}) == 4
    plain = classifier()[0].eval()
    plain.load_state_dict({name: torch.tensor(each) for name, each in weights[0].items()}, strict=False)
    with torch.no_grad():
        tensors = [(torch.tensor(each["data"]), torch.tensor(each["label"])) for each in held_out_batches()]
        loss = np.mean([plain(x, y).item() for x, y in tensors])
        right = np.mean([(plain._backbone(x).argmax(1) == y).float().mean().item() for x, y in tensors])
    assert rows[-1]["loss"] == pytest.approx(loss, rel=1e-6) and rows[-1]["accuracy"] == pytest.approx(right)
    assert f"after step 7 the loss of the evaluation is {rows[-1]['loss']:.6g}, accuracy {right:.2%}" in told


def leaves():
    sys.exit(0)


def undefined():
    for batch in batches(14):
        yield batch | {"x": np.full_like(batch["x"], np.nan)}


def breaks():
    for batch in batches(14):
        yield batch | {"x": batch["x"] / (1 // 0)}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"more": "\nevry = 3\n"}, "unknown key `evry`"),
        ({"steps": 2}, "warmup 3 and decay 0 must be at least 0 and together at most the 2 steps"),
        ({"data": f"{__file__}:leaves"}, r"leaves' raised SystemExit: 0 \(.*test_job.py, line \d+\)"),
        ({"data": f"{__file__}:breaks"}, r"breaks' raised ZeroDivisionError: .* \(.*test_job.py, line \d+\)"),
        ({"data": 'random"\nseed = -1\ndevice = "cpu'}, "seed must be a whole number of at least 0, not -1"),
        (
            {"data": 'random"\nmax_restarts = -1\ndevice = "cpu'},
            "max_restarts must be a whole number of at least 0, not -1",
        ),
        ({"data": "a\\u0000b"}, "data has a NUL character"),
        ({"more": "[spike]\nfactor = 2\nwindow = 1000000000\n"}, "spike.window must be at most 1,000,000"),
        ({"data": "nowhere.npy"}, "cannot read the data 'nowhere.npy': No such file"),
        ({"more": "\n[other\n"}, "toml: "),
        ({"more": "[optimizer]\nlr = 0.1\n"}, r"optimizer.lr and \[learning_rate\] are both in the job"),
        (
            {"more": "[optimizer]\nbeta1 = 0.5\n"},
            r"\[optimizer\] of the job: optimizer 'sgd' has no setting \['beta1'\]",
        ),
        ({"more": "[[optimizer.groups]]\nparameters = ['*.bais']\n"}, r"no parameter matches '\*.bais'; names are w1"),
        ({"more": "keep = 0\n"}, "checkpoints.keep must be .* not 0"),
        ({"steps": 0}, "bad.toml: steps must be a whole number of at least 1, not 0"),
        ({"data": 'random"\ndevice = "gpu'}, "device is 'gpu'; it must be 'auto' or 'cpu' or 'cuda' or 'npu'"),
        ({"data": 'random"\ndevice = "npu'}, "device 'npu' "),
        ({"data": f"{__file__}:undefined"}, "input 'x' of the first batch has a number that is not finite"),
        ({"data": "banana"}, "data 'banana' does not exist; give random, digits"),
        ({"data": ""}, "data is empty; name a source"),
        ({"data": 'random"\nweights = "nowhere.pt'}, "weights 'nowhere.pt': there is no such file"),
        ({"data": 'random"\nmodel = "nowhere.py:build'}, "model 'nowhere.py:build': there is no file 'nowhere.py'"),
        ({"more": '[evaluation]\ndata = "random"\nevery = 0\n'}, "evaluation.every must be .* not 0"),
        ({"more": '[evaluation]\ndata = "random"\nevery = 2\n'}, "the length of 'random' is not known"),
        ({"more": '[evaluation]\ndata = "nowhere.npz"\nevery = 2\n'}, "evaluation: .*nowhere.npz"),
    ],
)
def test_a_bad_job_is_refused_in_one_line_before_a_launch(changed, says, tmp_path, capsys):
    save_plan(four_ranks()["two stages"], tmp_path / "plan.json")
    job = write_job(tmp_path, "bad", **{"data": "random"} | changed)
    assert main(["train", str(job)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")

    assert re.search(says, line), line
    assert {path.name for path in tmp_path.iterdir()} == {"plan.json", "bad.toml"}  # nothing is written


def test_a_job_in_python_has_the_keys_of_the_file(tmp_path):
    plan = str(save_plan(one_rank(), tmp_path / "plan.json"))
    job = {"plan": plan, "steps": 3, "out": str(tmp_path / "out"), "learning_rate": {"peak": 0.1, "pek": 1}}
    with pytest.raises(TwofoldError, match=r"the training job: unknown key `pek` .*; did you mean `peak`"):
        tf.train(job)


def test_only_one_job_trains_in_a_folder(tmp_path, capsys):
    save_plan(four_ranks()["two stages"], tmp_path / "plan.json")
    job = write_job(tmp_path, "held", "random")
    (tmp_path / "held").mkdir()
    folder = os.open(tmp_path / "held", os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    assert main(["train", str(job)]) == 2
    os.close(folder)
    assert "another job trains in" in capsys.readouterr().err
    job.write_text(job.read_text().replace(f"{tmp_path}/held", f"{job}/out"))
    assert main(["train", str(job)]) == 2
    assert f"{job} is a file; name a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "rate"), [("adamw", None), ("adamw", lambda step: 0.01 * (step + 1)), ("sgd", None), ("momentum", None)]
)
def test_parameter_groups_have_a_decay_and_a_rate_of_their_own_as_in_torch(kind, rate):
    import torch.nn.functional as F

    asked = OptimizerSettings(
        kind=kind, weight_decay=0.3,
        groups=(
            ParameterGroup(parameters=("b*",), weight_decay=0.0), ParameterGroup(parameters=("?2",), lr_scale=0.25),
        ),
    )  # fmt: skip
    optimizer = asked.of(Optimizer(settings={"lr": 0.02}))
    plan = one_rank(optimizer=optimizer.for_parts(one_rank().graph))
    options = RunOptions(count=False, record_steps=0, learning_rate=rate)
    ran = run_rank(lower(plan), plan, iter(batches(5)), parameters(), 5, device="cpu", options=options)
    weights = {name: torch.tensor(array, requires_grad=True) for name, array in parameters().items()}
    groups = [
        {"params": [weights["w1"]]},
        {"params": [weights["b1"], weights["b2"]], "weight_decay": 0.0},
        {"params": [weights["w2"]], "lr": 0.02 / 4},
    ]
    of_kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "momentum": partial(torch.optim.SGD, momentum=0.9)}
    update = of_kind[kind](groups, lr=0.02, weight_decay=0.3, foreach=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(update, lambda step: 1.0 if rate is None else rate(step) / 0.02)
    for batch in batches(5):
        update.zero_grad()
        hidden = torch.relu(F.linear(torch.tensor(batch["x"]), weights["w1"], weights["b1"]))
        F.l1_loss(F.linear(hidden, weights["w2"], weights["b2"]), torch.tensor(batch["t"])).backward()
        update.step()
        schedule.step()
    assert ran.weights is not None
    for name, weight in weights.items():
        np.testing.assert_allclose(ran.weights[name], weight.detach().numpy(), rtol=1e-6, atol=1e-7)


def test_figures_of_steps_as_lines_and_as_a_table(tmp_path):
    plan = save_plan(four_ranks()["two stages"], tmp_path / "plan.json")
    facts, device = StepFacts.of(load_plan(plan), 1e9), pick_device("cpu")
    metrics = Metrics(tmp_path, 0, facts, device, ["csv"])
    for step in range(3):
        metrics.add(step, 1.0 / (step + 1), 0.1)
    metrics.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed there
    again = Metrics(tmp_path, 2, facts, device, ["csv"])
    again.add(2, 0.25, None)
    again.add(3, 0.125, None)
    again.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1.0), (2, 0.5), (3, 0.25), (4, 0.125)]
    assert rows[2]["step_s"] is None and rows[3]["tokens_per_s"] is None and rows[3]["memory_bytes"] > 1 << 20
    forward, wanted = 2 * 8 * (6 * 8 + 8 * 2), 2 * 2 * 8 * 8 * 2 + 2 * 8 * 6 * 8  # nobody asks for the gradient of x
    assert facts.flops == pytest.approx(forward + wanted, rel=0.2)
    assert rows[3]["mfu"] == pytest.approx(facts.flops / rows[3]["step_s"] / 4e9)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [{name: str(value) if value is not None else "" for name, value in row.items()} for row in rows] == table


def test_schedules_are_those_of_torch():
    steps, peak = 20, 0.3
    rates = {
        kind: [Rate(kind=kind, peak=peak).at(step, steps) for step in range(steps)] for kind in ("linear", "cosine")
    }
    for kind, make in {
        "linear": lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 1e-12, total_iters=steps - 1),
        "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, steps - 1),
    }.items():
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
        scheduler, theirs = make(optimizer), []
        for _ in range(steps):
            theirs.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        np.testing.assert_allclose(rates[kind], theirs, rtol=1e-9, atol=1e-9)
    wsd = [Rate(kind="wsd", peak=1.0, warmup=4, decay=5, final=0.5).at(step, steps) for step in range(steps)]
    np.testing.assert_allclose(wsd[:4], [0.25, 0.5, 0.75, 1.0])
    np.testing.assert_allclose(wsd[4:15], 1.0)
    np.testing.assert_allclose(wsd[15:], [0.9, 0.8, 0.7, 0.6, 0.5])


def test_tokens_are_cut_into_sequences_each_seen_once_an_epoch(tmp_path):
    graph = transformer("gpt2", num_layers=1, seq=8).with_batch(2)
    np.save(tmp_path / "tokens.npy", np.arange(70, dtype=np.uint16))
    found = list(Source(data=str(tmp_path / "tokens.npy"), seed=3).batches(graph, 8))
    firsts = [int(row[0]) for batch in found for row in batch["tokens"]]
    assert sorted(firsts[:8]) == sorted(firsts[8:]) == list(range(0, 64, 8)) and firsts[:8] != firsts[8:]
    for batch in found:
        assert np.array_equal(batch["labels"], batch["tokens"] + 1)
