"""A user's own host: measured, written, and taken by predictions."""

from __future__ import annotations

import json

import pytest

from costmodels.fit.points import Point
from costmodels.price.torch_hosts import FAKE_GROUP, KINDS, host_s, load_host, save_host
from executor.calibrate import host as measuring
from executor.calibrate.host import host_of, measure_host
from interop.measurements.validation import validate
from plans.errors import TwofoldError
from tests.interop.measurements.measured_table import write_table
from tests.interop.measurements.test_tables import ROW
from twofold.cli import main

PREDICT = ("predict", "gpt2", "--machine", "h200-x8", "--dp", "8")
OPTIONS = [{"reshard": reshard, "sync": sync} for reshard in (0, 1) for sync in (0, 1)]


def _points(times):
    """Points of a host on which everything takes `times` times as long as on the median of the measured hosts, but for
    messages, which no other rank takes."""
    names = {(0, 1): "fsdp2", (0, 0): "fsdp2_accumulate", (1, 1): "fsdp2_reshard", (1, 0): "fsdp2_reshard_accumulate"}
    kinds = [("plain", "torch", {}), ("dtensor", "dtensor", {})]
    kinds += [(names[each["reshard"], each["sync"]], "fsdp2", each) for each in OPTIONS]
    for kind, stack, options in kinds:
        for way, seconds in zip(("forward", "backward"), host_s("quiet", kind), strict=True):
            apart_s = times * seconds / FAKE_GROUP[kind]
            yield Point(
                kind="dispatch", call=f"block_{way}", stack=stack, dtype="bfloat16",
                options=options, seconds=apart_s, low_s=apart_s / 1.1, high_s=apart_s * 2,
            )  # fmt: skip


@pytest.fixture
def slow(tmp_path):
    return str(save_host(host_of(list(_points(3.0)), "slow", "made up"), tmp_path / "slow.json"))


def test_kinds_that_need_other_ranks_are_scaled_by_those_that_were_measured(slow):
    host = load_host(slow)
    assert set(host.scaled) == {"ddp"} and sorted(host.blocks_s) == sorted(KINDS)
    for kind in KINDS:
        assert host.blocks_s[kind] == pytest.approx([3 * each for each in host_s("quiet", kind)])


@pytest.mark.parametrize("source", ["PyTorch FSDP2 2026", "Megatron-LM core", "torchtitan"])
def test_a_slow_host_makes_small_steps_longer_and_large_ones_not(tmp_path, slow, source):
    shape = {"source": source, "tp": "1", "pp": "1", "dp": "16", "metric": "iteration_time_s", "zero_level": "1"}
    small = ROW | shape | {"model": "gpt-like", "hidden": "512", "heads": "8", "seq": "256", "global_batch": "32"}
    table = write_table(tmp_path / "a.csv", [small, ROW | shape | {"micro_batch": "4", "seq": "8192"}])
    usual, hosted = ([row["predicted"] for row in validate(table, host=host).rows] for host in (None, slow))
    assert hosted[0] > 1.5 * usual[0]
    assert hosted[1] == pytest.approx(usual[1], rel=0.03)


def test_commands_take_a_host_file_and_refuse_others(tmp_path, slow, capsys):
    said = []
    for more in ((), ("--host", slow)):
        assert main([*PREDICT, "--seq", "256", "--execution", "eager", "--json", *more]) == 0
        said.append(json.loads(capsys.readouterr().out)["step_s"])
    assert said[1] > 1.2 * said[0]
    (tmp_path / "bad.json").write_text('{"name": "x"}')
    for path, reason in (("nowhere.json", "nowhere.json"), (str(tmp_path / "bad.json"), "bad.json")):
        assert main([*PREDICT, "--host", path]) == 2
        assert reason in capsys.readouterr().err
    with pytest.raises(TwofoldError, match="nowhere"):
        validate(write_table(tmp_path / "a.csv", [ROW]), host="nowhere.json")


def test_this_host_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "REPEATS", 2)
    host = measure_host("mine", device="cpu", say=lambda line: None)
    assert host.name == "mine" and "torch 2." in host.source
    assert all(1e-5 < each < 0.5 for times in host.blocks_s.values() for each in times)
    assert load_host(str(save_host(host, tmp_path / "mine.json"))) == host
