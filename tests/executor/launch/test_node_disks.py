"""Training on three nodes that share no disk; each node is a launcher of its own with a folder of its own."""

import json
import shutil

import msgspec
import numpy as np
import pytest

from executor.launch.resumable import Held, newest_complete
from executor.launch.train_job import TrainingJob, train
from executor.train.checkpoints.files import read_manifest, written_checkpoints
from plans.errors import TwofoldError
from plans.optimizer import Optimizer
from plans.plan import save_plan
from tests.executor.launch.test_nodes import data_parallel, port, started

__all__ = ["port"]

JOB = """
plan = "plan.json"
steps = {steps}
out = "out"
data = "random"
gather_weights = true
[checkpoints]
every = 2
"""


def plan_of(level):
    optimizer = Optimizer(kind="adamw", settings={"lr": 0.01}, parallel_level=level, threshold_bytes=0)
    return msgspec.structs.replace(data_parallel(num_ranks=3), optimizer=optimizer)


def trained(folder, port, level, steps, *words):
    """Exit codes, what was printed, and messages of all nodes."""
    for node in "012":
        (folder / node).mkdir(exist_ok=True)
        save_plan(plan_of(level), folder / node / "plan.json")
        (folder / node / "job.toml").write_text(JOB.format(steps=steps))
    runs = started(folder, port, ["train", "job.toml", *words], num_nodes=3)
    said = [run.communicate(timeout=300) for run in runs]
    return [run.returncode for run in runs], said


def losses(said):
    first, *others = (json.loads(out)["losses"] for out, _ in said)
    assert others == [first, first]
    return first


@pytest.mark.ranks
def test_checkpoints_on_the_disks_of_three_nodes_are_resumed_by_any_plan(tmp_path, port):
    save_plan(plan_of(1), tmp_path / "plan.json")
    alone = TrainingJob(
        plan=str(tmp_path / "plan.json"), steps=10, out=str(tmp_path / "alone"), log_dir=str(tmp_path / "logs")
    )
    expected = [step["loss"] for step in train(alone)]

    codes, said = trained(tmp_path, port, 1, 4)
    assert codes == [0, 0, 0], said
    assert losses(said) == expected[:4]
    assert [(tmp_path / node / "out" / "weights.npz").exists() for node in "012"] == [True, False, False]
    folders = [tmp_path / node / "out" / "checkpoints" for node in "012"]
    newest = [read_manifest(written_checkpoints(folder)[-1]) for folder in folders]
    assert [each.step for each in newest] == [4, 4, 4] and len({each.run for each in newest}) == 1
    assert [each.share for each in newest] == [(0, 3), (1, 3), (2, 3)]  # of sharded optimizer states

    shutil.move(folders[1], tmp_path / "lost")
    codes, said = trained(tmp_path, port, 1, 8, "--resume")
    assert codes == [2, 2, 2]
    assert all("step-00000004 lacks share 2 of 3; start the node that wrote it" in error for _, error in said)
    shutil.move(tmp_path / "lost", folders[1])

    codes, said = trained(tmp_path, port, 1, 6, "--resume")  # each rank reads its own disk
    assert codes == [0, 0, 0], said
    assert losses(said) == expected[:6]

    codes, said = trained(tmp_path, port, 0, 8, "--resume")  # every rank needs the states of all
    assert codes == [0, 0, 0], said
    np.testing.assert_allclose(losses(said), expected[:8], rtol=2e-6)
    assert read_manifest(written_checkpoints(folders[1])[-1]).share == (0, 1)

    shutil.rmtree(tmp_path / "1" / "out")  # a new disk; the other nodes have a copy of everything
    codes, said = trained(tmp_path, port, 0, 10, "--resume")
    assert codes == [0, 0, 0], said
    np.testing.assert_allclose(losses(said), expected, rtol=2e-6)


def held(step, share, run="a"):
    return Held(step=step, run=run, share=share)


def test_the_newest_checkpoint_that_the_nodes_hold_together_is_chosen():
    first, second = held(20, (0, 2)), held(20, (1, 2))
    older = held(15, (0, 2)), held(15, (1, 2))
    assert newest_complete({0: [], 1: []}) is None
    assert newest_complete({0: [first, older[0]], 1: [second, older[1]]}).step == 20
    assert newest_complete({0: [first, older[0]], 1: [older[1]]}).step == 15  # a run killed between two renames
    assert newest_complete({0: [first, older[0]], 1: [held(20, (1, 2), "b"), older[1]]}).step == 15  # of two runs
    assert newest_complete({0: [], 1: [held(20, (0, 1))]}).step == 20
    with pytest.raises(TwofoldError, match=r"on nodes 0, 1: step-00000020 lacks share 2 of 2"):
        newest_complete({0: [first], 1: [first]})
