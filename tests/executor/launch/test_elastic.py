"""Training that continues on fewer nodes; every node is a launcher of its own on this host."""

import json
import os
import re
import signal
import time

import msgspec
import numpy as np
import pytest

from executor.launch.elastic import ElasticSettings, smaller_plans
from executor.launch.nodes import Nodes
from executor.launch.train_job import CheckpointSettings, TrainingJob, train
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.model.mlp import mlp_graph
from plans.plan import Plan, Stage, load_plan, save_plan
from tests.executor.launch.test_nodes import data_parallel, port, started

__all__ = ["port"]

STEPS, EVERY = 60, 10
JOB = """
plan = "{folder}/plan.json"
steps = {steps}
out = "{out}"
data = "{folder}/data.py:batches"
max_restarts = 2
[checkpoints]
every = {every}
[elastic]
wait_s = 0.5
machine = "cpu-2core-x8"
"""
DATA = """
import time
from pathlib import Path
import numpy as np

def batches():
    draw = np.random.default_rng(1)
    for step in range({steps}):
        while step in {waits} and not Path(__file__).with_name(f"passes {{step}}").exists():
            time.sleep(0.02)  # until something has happened to the run
        yield {{"x": draw.random((8, 6), dtype=np.float32), "labels": draw.random((8, 4), dtype=np.float32)}}
"""


@pytest.mark.ranks
def test_a_job_survives_a_killed_rank_and_then_a_lost_node(tmp_path, port):
    """The run waits for its data where something happens to it, so that it is never over before."""
    plan, waits = data_parallel(), (2 * EVERY, 4 * EVERY)
    save_plan(plan, tmp_path / "plan.json")
    data = DATA.format(steps=STEPS, waits=waits)
    names = [tensor.name for tensor in plan.graph.inputs]
    (tmp_path / "data.py").write_text(data.replace('"x"', f'"{names[0]}"').replace('"labels"', f'"{names[1]}"'))
    job = JOB.format(folder=tmp_path, steps=STEPS, out=tmp_path / "out", every=EVERY)
    (tmp_path / "job.toml").write_text(job)
    first, second = started(tmp_path, port, ["train", str(tmp_path / "job.toml")])

    def wait_for_checkpoint(step):
        deadline_s = time.monotonic() + 200
        while not (tmp_path / "out" / "checkpoints" / f"step-{step:08d}").exists():
            assert time.monotonic() < deadline_s and first.poll() is second.poll() is None
            time.sleep(0.02)

    wait_for_checkpoint(EVERY)
    pids = tmp_path / "out" / "logs" / "1" / "rank.1" / "pids.json"
    os.kill(json.loads(pids.read_text())["rank"], signal.SIGKILL)
    (tmp_path / f"passes {waits[0]}").touch()
    wait_for_checkpoint(3 * EVERY)
    os.kill(second.pid, signal.SIGKILL)
    second.communicate()
    (tmp_path / f"passes {waits[1]}").touch()
    printed, messages = first.communicate(timeout=200)
    assert first.returncode == 0, messages
    assert (
        "rank 1 was killed by SIGKILL" in messages
        and "node 1 was lost" in messages
        and "1 of 2 nodes have joined" in messages
    )
    assert load_plan(tmp_path / "out" / "plan-1.json").num_ranks == 1

    alone = TrainingJob(
        plan=str(tmp_path / "out" / "plans" / "plan-1.json"), steps=STEPS, out=str(tmp_path / "alone"),
        log_dir=str(tmp_path / "logs"), data=f"{tmp_path}/data.py:batches",
    )  # fmt: skip
    expected = [step["loss"] for step in train(alone)]
    assert json.loads(printed)["steps"] == STEPS
    np.testing.assert_allclose(json.loads(printed)["losses"], expected, rtol=2e-6)


@pytest.mark.parametrize(
    ("change", "nodes", "message"),
    [
        ({"least_nodes": 3}, 2, "elastic.least_nodes is 3, but the job has 2 nodes"),
        ({"least_nodes": 0}, 2, "elastic.least_nodes"),
        ({"wait_s": -1.0}, 2, "elastic.wait_s"),
        ({}, 2, "elastic has no plan for 1 devices, which is 1 of 2 nodes"),
    ],
)
def test_settings_that_no_node_could_use_are_refused_before_the_start(change, nodes, message, tmp_path, monkeypatch):
    monkeypatch.setattr("executor.launch.nodes.LATE_S", 0.05)  # the time in which the other nodes would be told
    path = save_plan(data_parallel(), tmp_path / "plan.json")
    job = TrainingJob(
        plan=str(path), steps=1, out=str(tmp_path / "out"), max_restarts=1, elastic=ElasticSettings(**change),
        checkpoints=CheckpointSettings(every=1),
    )  # fmt: skip
    with pytest.raises(TwofoldError, match=re.escape(message)):
        train(job, nodes=Nodes(num_nodes=nodes, port=1))
    assert not (tmp_path / "out").exists()


def test_plans_that_compute_something_else_are_refused(tmp_path):
    wanted = data_parallel()
    other_optimizer = msgspec.structs.replace(wanted.optimizer, clip_norm=1.0)
    for graph, optimizer, difference in (
        (mlp_graph([7, 4], 8), wanted.optimizer, r"tensors.x.shape is \(8, 7\) instead of \(8, 6\)"),
        (wanted.graph, other_optimizer, r"optimizer.clip_norm is 1.0 instead of None"),
    ):
        stage = Stage(mesh=Layout((1,), ("dp",)), operators=tuple(each.name for each in graph.operators))
        path = save_plan(Plan(graph=graph, stages=(stage,), optimizer=optimizer), tmp_path / "other.json")
        with pytest.raises(TwofoldError, match=f"the plan for 1 devices is not for the same training: {difference}"):
            smaller_plans(ElasticSettings(plans=(str(path),)), wanted, Nodes(num_nodes=2))
