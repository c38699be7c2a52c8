"""A run that goes wrong is no success: losses that are not finite, and JSON that is always JSON."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass

import pytest

from executor.device import pick_device
from executor.launch import stalls
from executor.launch.launch import launch
from executor.launch.rank_failures import RankFailed, RunFailed
from executor.launch.rank_logs import JobFolder
from executor.train.heartbeat import Heartbeat
from executor.train.loop import train
from executor.train.options import RunOptions
from plans.errors import TrainingStopped, TwofoldError
from plans.layout import Layout
from plans.optimizer import Optimizer
from plans.plan import save_plan
from tests.support.small_training import ALL, plan
from twofold import cli
from twofold.cli import main
from twofold.commands.options import Output

ROWS = {"fc1": {"b0": ("dp",)}, "act": {"d0": ("dp",)}, "fc2": {"b0": ("dp",)}, "loss": {"d0": ("dp",)}}


def two_ranks(lr=0.1, **rest):
    optimizer = Optimizer(settings={"lr": lr}, parallel_level=1, threshold_bytes=0)
    return plan((Layout((2,), ("dp",)), ALL), strategies=ROWS, optimizer=optimizer, **rest)


def test_a_run_that_diverges_stops_with_exit_code_1(tmp_path, capsys):
    path = save_plan(two_ranks(lr=1e38), tmp_path / "plan.json")
    asked = ["run", str(path), "--steps", "6", "--data", "random", "--log-dir", str(tmp_path / "logs"), "--json"]
    assert main(asked) == 1
    told = capsys.readouterr()
    assert told.out == ""
    (line,) = [line for line in told.err.splitlines() if line.startswith("error:")]
    assert "training diverged: the loss of step" in line and "(rank " in line and "learning rate" in line
    assert "Traceback" not in told.err


class Stepper:
    """Steps whose losses are given."""

    held_of_check = None

    def __init__(self, losses):
        self.losses = iter(losses)

    def step(self, batch, learning_rate=None):
        import torch

        return torch.tensor(next(self.losses))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_the_step_and_the_loss_before_are_named(bad):
    options, heartbeat = RunOptions(record_steps=0), Heartbeat(memoryview(bytearray(24)).cast("q"))
    with pytest.raises(TrainingStopped, match=r"step 3 is -?(nan|inf), after 1.5 in the step before"):
        train(Stepper([2.0, 1.5, bad, 1.0]), pick_device("cpu"), iter([{}] * 4), 4, options, heartbeat)


def test_data_that_end_early_are_reported_with_the_steps_of_all_runs():
    """Ten steps were done before, so that the fourth of these five is step 14 of 15."""
    options, heartbeat = RunOptions(record_steps=0), Heartbeat(memoryview(bytearray(24)).cast("q"))
    with pytest.raises(TwofoldError, match="the data ended after 13 of 15 steps"):
        train(Stepper([3.0, 2.0, 1.0]), pick_device("cpu"), iter([{}] * 3), 5, options, heartbeat, first=10)


def test_what_is_printed_as_json_is_json(monkeypatch, capsys):
    @dataclass
    class Says:
        output: Output

        def run(self, say):
            return {"a": float("nan"), "b": [1.0, float("inf")], "c": {"d": (float("-inf"), 2)}}, True

    monkeypatch.setattr(cli, "_read", lambda arguments: Says(output=Output(json=True)))
    assert main(["demo"]) == 0
    refuse = {"parse_constant": lambda word: pytest.fail(f"{word} in JSON")}
    assert json.loads(capsys.readouterr().out, **refuse) == {"a": None, "b": [1.0, None], "c": {"d": [None, 2]}}


SCRIPT = """
import os, signal, sys, time
from executor.train.options import RunOptions
from executor.train.run import run_rank
from plans.lower import lower
from tests.support.small_training import batches, four_ranks, parameters

plan, rank = four_ranks()["two stages"], int(os.environ["RANK"])

def on_step(step, loss):
    if step == 5 and (rank == 1 or sys.argv[1] == "all"):
        if sys.argv[1] == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)

run_rank(lower(plan), plan, iter(batches(50)), parameters(), 50, device="cpu", options=RunOptions(on_step=on_step))
"""


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("sleep", r"rank 1 stopped at \S+ \(\S+\) of step 6, \d s ago is in on_step .*; ranks 0, 2, 3 wait for it"),
        ("stop", r"rank 1 stopped at \S+ \(\S+\) of step 6: process \d+ was stopped by .*; ranks 0, 2, 3 wait for it"),
        ("all", r"rank \d stopped at \S+ \(\S+\) of step 6, \d s ago is in on_step"),
    ],
)
def test_a_rank_that_stops_is_named_with_its_place_and_who_waits(how, says, tmp_path, monkeypatch):
    monkeypatch.setattr(stalls, "STALLED_S", 3.0)  # of 10, and of 5: the rule is the same
    monkeypatch.setattr(stalls, "STOPPED_S", 2.0)
    script = tmp_path / "hangs.py"
    script.write_text(SCRIPT)
    with pytest.raises(RankFailed, match=says) as caught:
        launch(script, num_ranks=4, args=[how], log_dir=tmp_path / "logs", env={"OMP_NUM_THREADS": "1"}, timeout_s=100)
    assert how == "all" or caught.value.rank == 1


def test_a_rank_outside_of_its_steps_is_waited_for_and_then_named(tmp_path, monkeypatch):
    """Rank 0 is busy after step 12, as with a disk; rank 1 waits for it in step 13."""
    job = JobFolder(log_dir=tmp_path)
    meets = {"step_s": None, "instructions": [("0B1", "all_reduce", [0])]}
    for rank, numbers in enumerate([(0, 12, 0), (0, 13, 2)]):
        job.rank(rank).mkdir(parents=True)
        (job.rank(rank) / "heartbeat").write_bytes(struct.pack("3q", *numbers))
        (job.rank(rank) / "heartbeat.json").write_text(json.dumps(meets))
    seconds = iter(range(1000, 1053, 2))
    monkeypatch.setattr(stalls.time, "monotonic", lambda: next(seconds))
    watch = stalls.StallWatch(job, range(2), os.getpid())
    assert [watch.look() for _ in range(26)] == [None] * 26
    error = watch.look()
    assert str(error).startswith("rank 0 stopped after step 12, 52 s ago; rank 1 waits for it; its log: ")
    assert isinstance(error, RankFailed) and error.rank == 0


def test_an_agent_that_is_stopped_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(stalls, "STOPPED_S", 2.0)
    script = tmp_path / "hangs.py"
    script.write_text(
        "import os, signal, time\nfrom pathlib import Path\n"
        "guard = Path(f'/proc/{os.getppid()}/stat').read_text().split()\n"
        "os.kill(int(guard[3]), signal.SIGSTOP)\ntime.sleep(600)\n"
    )
    with pytest.raises(RunFailed, match=r"torchrun's process has stopped: process \d+ was stopped by a signal"):
        launch(script, num_ranks=1, log_dir=tmp_path / "logs", timeout_s=60)
