"""The benchmark of interleaved slices: the stack by hand computes what autograd does, and the whole runs on CPU."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.devices.interleaving import case_of, main, plan_of, predicted
from benchmarks.devices.two_streams import TwoStreams
from benchmarks.peers.configs import MODELS
from executor.device import Device
from tests import ROOT


def test_two_slices_by_hand_have_the_gradients_of_the_whole_and_of_plain_autograd():
    config, cpu = replace(MODELS["tiny"], num_layers=3), Device(kind="cpu")
    stacks = [TwoStreams(config, 4, slices, cpu, 1) for slices in (1, 2)]
    for stack in stacks:
        stack.step()
    x = stacks[0]._x.clone().requires_grad_()
    y = x
    for block in stacks[0]._blocks:
        y = block(y, None)
    y.backward(stacks[0]._gradient)
    for number, block in enumerate(reversed(stacks[0]._blocks)):
        for plain, one, two in zip(block.parameters(), *(stack.gradients[number] for stack in stacks), strict=True):
            torch.testing.assert_close(one, plain.grad, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(two, plain.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 4])
def test_predictions_are_of_plans_with_two_streams_on_so_many_devices(ranks):
    case = case_of(ranks, 4, smoke=True)
    assert case.ranks == ranks and plan_of(case, 2).interleave == 2
    for told in predicted(case).values():
        one, two = told["step_s"]
        assert told["gain"] == pytest.approx(1 - two / one)


@pytest.mark.ranks
def test_the_benchmark_runs_on_cpu_ranks(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    out = tmp_path / "interleaving.json"
    assert main(["--smoke", "--gpus", "2", "--out", str(out)]) == 0, capsys.readouterr()
    (row,) = json.loads(out.read_text())["rows"]
    assert row["predicted"].keys() == {"graph", "eager"} and row["measured"].keys() == {"eager", "by hand"}
    one, two = row["measured"]["eager"]["losses"]
    assert two == pytest.approx(one, rel=1e-5)
    assert "micro-batch" in capsys.readouterr().out
