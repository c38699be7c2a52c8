"""Jobs on several nodes: every node is a launcher of its own, on an address of the loopback interface."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import threading
import time
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest

from costmodels import Machine
from costmodels.fit.points import load_points
from executor.capture.capture import capture
from executor.launch import nodes
from executor.launch.nodes import NodeConnections, Nodes, refusing
from executor.launch.rank_failures import RankFailed, RankRefused, RunFailed
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.model.mlp import mlp_graph
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage, Strategy, save_plan
from search import search
from tests import ROOT
from tests.support.warm import Command, run_command

NUMBERS = itertools.count()


@pytest.fixture
def port():
    """Two free ports in a row."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            number = first.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", number + 1)).close()
            except (OSError, OverflowError):
                continue
            return number


def met(port, facts, does, join_s=5.0):
    """What `does(node, NodeConnections)` gives on each node that has facts, or the error."""
    found = {}

    def one(node):
        try:
            here = NodeConnections(Nodes(num_nodes=3, node_rank=node, port=port, join_s=join_s, facts=facts[node]))
        except TwofoldError as error:
            found[node] = error
            return
        try:
            found[node] = does(node, here)
        finally:
            here.close()

    threads = [threading.Thread(target=one, args=(node,)) for node in facts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


SAME = {node: {"plan": "a"} for node in range(3)}


def until_failed(here):
    while (error := here.failure()) is None:
        time.sleep(0.01)
    return here.agreed(error)


def test_nodes_that_start_something_else_end_with_one_sentence_everywhere(port, monkeypatch):
    monkeypatch.setattr(nodes, "LATE_S", 0.5)
    found = met(port, {**SAME, 2: {"plan": "b"}}, lambda node, here: None)
    assert {str(each) for each in found.values()} == {"node 2 has plan b, node 0 has a; start the same on every node"}


def test_a_node_that_does_not_join_is_named_everywhere(port):
    found = met(port, {0: SAME[0], 1: SAME[1]}, lambda node, here: None, join_s=1.0)
    assert {str(each) for each in found.values()} == {"node 2 did not join within 1 s; start the job on every node"}
    (error,) = met(port, {1: SAME[1]}, lambda node, here: None, join_s=0.5).values()
    assert str(error) == f"node 0 did not answer at 127.0.0.1 port {port + 1} within 0.5 s"


def test_an_error_of_one_node_before_they_meet_is_told_to_all(port):
    found = {}

    def one(node):
        here = Nodes(num_nodes=2, node_rank=node, port=port, join_s=5.0)
        try:
            with refusing(here):
                if node == wrong:
                    raise TwofoldError("job.toml does not exist")
            NodeConnections(here).close()
        except TwofoldError as error:
            found[node] = str(error)

    for wrong in (0, 1):
        threads = [threading.Thread(target=one, args=(node,)) for node in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {wrong: "job.toml does not exist", 1 - wrong: f"on node {wrong}: job.toml does not exist"}


def test_nodes_tell_each_other_their_offers(port):
    found = {}

    def one(node):
        here = NodeConnections(Nodes(num_nodes=2, node_rank=node, port=port, offer={"node": node, "text": "x" * 2**20}))
        found[node] = here.offers
        here.agreed(None)
        here.close()

    threads = [threading.Thread(target=one, args=(node,)) for node in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] and [each["node"] for each in found[0]] == [0, 1]


def test_a_node_that_is_late_is_waited_for(port, monkeypatch):
    monkeypatch.setattr(nodes, "LOST_S", 0.5)
    begun_s = time.monotonic()

    def later(node, here):
        found_s = time.monotonic() - begun_s
        assert here.failure() is None
        assert here.agreed(None) is None
        return found_s

    early = threading.Thread(target=lambda: found.update(met(port, {0: SAME[0], 1: SAME[1]}, later)))
    found = {}
    early.start()
    time.sleep(0.7)
    found.update(met(port, {2: SAME[2]}, later))
    early.join()
    assert sorted(found) == [0, 1, 2] and min(found.values()) >= 0.7


def answered(server, answers):
    """Be node 0, and give these answers to the nodes that connect; None closes the connection."""
    for answer in answers:
        connection, _ = server.accept()
        with connection:
            connection.recv(1 << 16)
            if answer is not None:
                connection.sendall(json.dumps({"verdict": answer}).encode() + b"\n")


def test_a_node_that_just_misses_the_start_of_an_elastic_job_waits_for_its_next_one(port):
    missed, joined = ({"text": None, "joined": ranks, "offers": ranks} for ranks in ([0], [0, 1]))
    late = Nodes(num_nodes=2, node_rank=1, port=port, join_s=60.0)
    for answers, least_nodes, said in (
        ([None, missed, joined], 1, None),
        ([missed], None, "the job started on the nodes (0,) before node 1 had joined"),
        ([None], None, f"node 0 at 127.0.0.1 port {port + 1} ended before all nodes had joined"),
    ):
        with socket.create_server(("127.0.0.1", port + 1)) as server:
            node_0 = threading.Thread(target=answered, args=(server, answers))
            node_0.start()
            here = replace(late, least_nodes=least_nodes)
            if said is None:
                with contextlib.closing(NodeConnections(here)) as connected:
                    assert connected.joined == (0, 1)
            else:
                with pytest.raises(TwofoldError, match=re.escape(said)):
                    NodeConnections(here)
            node_0.join()


def test_the_cause_is_told_to_all_nodes_and_no_consequence_of_it(port):
    """Node 1 has lost a peer, then node 2 says what happened."""

    def ends(node, here):
        if node == 1:
            error = RankFailed("rank 2 lost its connection", rank=2)
            error.is_consequence = True
            return here.agreed(error)
        if node == 2:
            assert str(until_stopped(here)) == "stop"
            return here.agreed(RankRefused("no such file", rank=5, exit_code=2))
        return until_failed(here)

    def until_stopped(here):
        while here.failure() is None:
            time.sleep(0.01)
        return "stop"

    found = met(port, SAME, ends)
    assert [type(found[node]) for node in range(3)] == [RankRefused] * 3
    assert [str(found[node]) for node in range(3)] == ["on node 2: no such file"] * 2 + ["no such file"]
    assert {each.rank for each in found.values()} == {5} and {each.exit_code for each in found.values()} == {2}


def test_a_cause_is_told_before_the_ranks_of_its_node_have_ended(port, monkeypatch):
    """Node 2 ends its ranks for longer than the others wait for the causes of other nodes."""
    monkeypatch.setattr(nodes, "VERDICT_S", 0.3)

    def ends(node, here):
        if node == 2:
            error = RankRefused("the data ended", rank=5, exit_code=2)
            here.tell(error)
            time.sleep(1.0)
            return here.agreed(error)
        error = RankFailed(f"rank {node} lost its connection", rank=node)
        error.is_consequence = True
        here.tell(error)
        return here.agreed(error)

    found = met(port, SAME, ends)
    assert [(type(found[node]), str(found[node])) for node in range(3)] == [
        (RankRefused, "on node 2: the data ended"), (RankRefused, "on node 2: the data ended"),
        (RankRefused, "the data ended"),
    ]  # fmt: skip


@pytest.mark.parametrize("ends_at_once", [0, 2])
def test_a_node_that_told_its_cause_is_not_lost(ends_at_once, port):
    """Its launcher is killed before all have agreed."""
    refused = RankRefused("the data ended", rank=5, exit_code=2)

    def ends(node, here):
        if node == ends_at_once:
            here.tell(refused)
            return None
        return until_failed(here)

    found = met(port, SAME, ends)
    del found[ends_at_once]
    assert {(type(each), str(each)) for each in found.values()} == {(RankRefused, f"on node {ends_at_once}: {refused}")}


def test_what_one_node_refuses_before_its_ranks_start_no_node_tries_again(port):
    full = TwofoldError("cannot write logs to logs/1: No space left on device")
    found = met(port, SAME, lambda node, here: here.agreed(full if node == 1 else None))
    assert found[1] is full and not any(isinstance(each, RunFailed) for each in found.values())
    assert [str(found[node]) for node in (0, 2)] == [f"on node 1: {full}"] * 2 and found[0].exit_code == 2


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_is_named_by_the_others(lost, port):
    found = met(port, SAME, lambda node, here: None if node == lost else until_failed(here))
    del found[lost]
    assert {str(each) for each in found.values()} == {f"node {lost} was lost: its launcher closed its connection"}


def test_a_silent_node_is_lost_too(port, monkeypatch):
    monkeypatch.setattr(nodes, "LOST_S", 0.5)
    monkeypatch.setattr(nodes, "BEAT_S", 0.1)
    found = met(port, SAME, lambda node, here: time.sleep(1.5) if node == 1 else until_failed(here))
    assert str(found[0]) == str(found[2]) == "node 1 was lost: its launcher sent nothing for 0.5 s"


def test_a_node_that_speaks_again_after_it_was_lost_is_named(port, monkeypatch):
    monkeypatch.setattr(nodes, "LOST_S", 0.5)
    is_lost, is_back = threading.Event(), threading.Event()

    def ends(node, here):
        if node == 1:
            is_lost.wait()
            assert here.failure() is None  # speaks, and has heard the others
            is_back.set()
            return here.agreed(None)
        while (error := here.failure()) is None:
            time.sleep(0.01)
        is_lost.set()
        is_back.wait()
        return here.agreed(error)

    monkeypatch.setattr(nodes, "BEAT_S", 0.1)
    found = met(port, SAME, ends)
    assert {str(each) for each in found.values()} == {"node 1 was lost: its launcher sent nothing for 0.5 s"}


def test_all_nodes_wait_for_the_end_of_the_last_one(port):
    ended_s = {}

    def ends(node, here):
        for _ in range(50 if node == 2 else 0):
            assert here.failure() is None
            time.sleep(0.01)
        ended_s[node] = time.monotonic()
        assert here.agreed(None) is None
        return time.monotonic()

    found = met(port, SAME, ends)
    assert all(found[node] >= ended_s[2] for node in range(3))


# -- commands on two nodes ---------------------------------------------------------------------------------------------


def data_parallel(lr=0.1, num_ranks=2):
    """A perceptron whose batch is split over all ranks."""
    graph = mlp_graph([6, 4], 4 * num_ranks)
    strategies = {each.name: Strategy(dims={"b0": ("dp",)}) for each in graph.operators if each.kind == "linear"}
    stage = Stage(mesh=Layout((num_ranks,), ("dp",)), operators=tuple(each.name for each in graph.operators))
    optimizer = Optimizer(settings={"lr": lr})
    return Plan(graph=graph, stages=(stage,), strategies=strategies, optimizer=optimizer)


def started(folder, port, command, work=run_command, also=(), num_nodes=2):
    """The same command on all nodes, each in a folder of its own; `also` are words for node 1 alone."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    runs = []
    for node in range(num_nodes):
        (folder / str(node)).mkdir(exist_ok=True)
        words = [
            *command,
            *(also if node == 1 else ()),
            "--nodes",
            str(num_nodes),
            "--node",
            str(node),
            "--port",
            str(port),
            "--json",
        ]
        files = tuple(folder / f"{next(NUMBERS)}.{kind}" for kind in ("out", "err"))
        runs.append(Command(words, env, folder / str(node), files, work=work))
    return runs


@pytest.mark.ranks
def test_two_nodes_run_a_plan_without_a_common_folder(tmp_path, port):
    for node, lr in ((0, 0.1), (1, 0.1)):
        (tmp_path / str(node)).mkdir()
        save_plan(data_parallel(lr), tmp_path / str(node) / "plan.json")
    runs = started(tmp_path, port, ["run", "plan.json", "--steps", "5", "--out", "out"])
    said = [run.communicate(timeout=300) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    first, second = (json.loads(out) for out, _ in said)
    assert first["losses"] == second["losses"] and len(first["losses"]) == 5
    assert first["collectives_match"] is second["collectives_match"] is True
    files = [{path.name for path in (tmp_path / node / "out").glob("*.npz")} for node in "01"]
    assert files == [{"rank.0.npz", "rank.1.npz", "weights.npz"}, {"rank.0.npz", "rank.1.npz"}]
    for name in ("rank.0.npz", "rank.1.npz"):
        assert (tmp_path / "0" / "out" / name).read_bytes() == (tmp_path / "1" / "out" / name).read_bytes()

    save_plan(data_parallel(0.2), tmp_path / "1" / "plan.json")
    runs = started(tmp_path, port, ["run", "plan.json", "--steps", "5"])
    said = [run.communicate(timeout=300) for run in runs]
    assert [run.returncode for run in runs] == [2, 2]
    for _, error in said:
        assert "error: node 1 has plan " in error and error.endswith("; start the same on every node\n")


def classifier():
    """A module with its loss, and a batch for it."""
    import torch

    from executor.train.losscell import WithLossCell

    body = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    return WithLossCell(body, torch.nn.CrossEntropyLoss()), (torch.randn(8, 6), torch.randint(0, 3, (8,)))


@pytest.mark.ranks
def test_two_nodes_verify_a_plan_against_one_process(tmp_path, port):
    plan = search(capture(*classifier()), Machine.load("cpu-2core-x8"), num_devices=2, top_k=1).best
    for node in "01":
        (tmp_path / node).mkdir()
        save_plan(plan, tmp_path / node / "plan.json")
    words = ["verify", "plan.json", "--model", f"{__file__}:classifier", "--steps", "3", "--out", "out"]
    runs = started(tmp_path, port, words)
    said = [run.communicate(timeout=300) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    first, second = (json.loads(out) for out, _ in said)
    assert first["passed"] is True and second == {"node": 1}
    weights = [np.load(tmp_path / node / "out" / "rank.1.npz") for node in "01"]
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0].files)


def perceptron():
    """The module of `data_parallel`, and a batch for it."""
    import torch

    return torch.nn.Sequential(OrderedDict(layer1=torch.nn.Linear(6, 4))), (torch.randn(8, 6), torch.randn(8, 4))


@pytest.mark.parametrize(("wrong", "command", "also", "reason"), [
    (1, ["run", "plan.json"], ["--model", "absent.py:build"], "absent.py"),
    (1, ["run", "train.py", "--devices", "2"], [], "train.py"),
    (0, ["verify", "plan.json", "--model", f"{__file__}:perceptron", "--machine", "absent"],
     ["--machine", "h200-x8"], "absent"),
    (1, ["calibrate", "--devices", "2", "--device", "cpu"], ["--base", "h200"], "base is for accelerators"),
], ids=lambda value: value[0] if isinstance(value, list) and value else None)  # fmt: skip
def test_an_error_of_one_node_ends_the_command_on_both(tmp_path, port, wrong, command, also, reason):
    """The other node would wait for it for five minutes."""
    for node in "01":
        (tmp_path / node).mkdir()
        save_plan(data_parallel(), tmp_path / node / "plan.json")
    (tmp_path / "0" / "train.py").touch()
    runs = started(tmp_path, port, command, also=also)
    errors = [run.communicate(timeout=60)[1] for run in runs]
    assert [run.returncode for run in runs] == [2, 2], errors
    own = errors[wrong].removeprefix("error: ")
    assert reason in own and errors[1 - wrong].endswith(f"error: on node {wrong}: {own}")


def calibrated_briefly(*words):
    """A command with half a second of measurements and two steps of each probe program."""
    from twofold import calibration

    calibration.QUICK_S, calibration.PROBE_STEPS = 0.5, 2
    run_command(*words)


@pytest.mark.ranks
def test_two_nodes_calibrate_without_a_common_folder(tmp_path, port):
    words = ["calibrate", "--devices", "2", "--device", "cpu", "--quick"]
    runs = started(tmp_path, port, words, calibrated_briefly)
    outputs = [run.communicate(timeout=300) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    first, second = (json.loads(out) for out, _ in outputs)
    assert first["file"] == "machine.json" and second == {"node": 1}
    assert [{path.name for path in (tmp_path / node).iterdir()} for node in "01"] == [
        {"machine.json", "machine.points.jsonl"}, set(),
    ]  # fmt: skip
    points, environment = load_points(tmp_path / "0" / "machine.points.jsonl")
    assert environment["ranks"] == "2" and {point.ranks for point in points if point.kind == "collective"} == {2}
    assert Machine.load(str(tmp_path / "0" / "machine.json")).links[-1].ranks == 2
    assert all(probe["measured_s"] > 0 for probe in first["probes"])

    runs = started(tmp_path, port, [*words[:-1], "--minutes", "3"], calibrated_briefly, ["--minutes", "4"])
    outputs = [run.communicate(timeout=300) for run in runs]
    assert [run.returncode for run in runs] == [2, 2]
    for _, error in outputs:
        assert error.endswith("error: node 1 has minutes 4, node 0 has 3; start the same on every node\n")
