import json
import math
import os

import msgspec
import pytest

from costmodels.machine.machine import Machine, Overlap, shipped_machines
from plans.errors import TwofoldError


@pytest.fixture
def content() -> dict:
    return json.loads(Machine.load("h200-x4").to_json())


def refused(content: dict) -> str:
    with pytest.raises(TwofoldError) as error:
        Machine.from_json(json.dumps(content).encode(), "mine.json")
    return str(error.value)


@pytest.mark.parametrize("name", [name for name in shipped_machines() if not name.startswith("cpu")])
def test_shipped_machines_load_with_a_source_for_every_section(name):
    machine = Machine.load(name)
    assert name in shipped_machines() and machine.name == name
    sections = {entry.partition(".")[0] for entry in machine.provenance}
    assert sections >= {"compute", "links", "collectives", "dispatch_s", "overlap", "interval", "memory_bytes"}


def test_ascend_files_state_that_they_were_not_run():
    provenance = Machine.load("ascend-910b2-x8").provenance
    assert all("not run on Ascend" in entry.source for entry in provenance.values())
    assert {entry.status for entry in provenance.values()} == {"assumed", "cited"}


def test_round_trip(tmp_path):
    machine = Machine.load("h200-x8")
    assert Machine.load(machine.save(tmp_path / "deep" / "m.json")) == machine


def test_equal_machines_have_equal_hashes():
    assert hash(Machine.load("h200-x8")) == hash(Machine.load("h200-x8"))


def test_unknown_name_suggests_a_shipped_one():
    with pytest.raises(TwofoldError, match="did you mean h200-x"):
        Machine.load("h200-x9")


def test_missing_file_is_named(tmp_path):
    with pytest.raises(TwofoldError, match=r"nowhere\.json"):
        Machine.load(tmp_path / "nowhere.json")


def test_unknown_key_is_named_with_its_path(content):
    content["compute"]["flops"] = 1
    assert "flops" in (message := refused(content)) and "$.compute" in message


def test_wrong_version(content):
    content["version"] = 99
    assert "version 99" in refused(content)


def test_truncated_file(content):
    with pytest.raises(TwofoldError, match="not a complete JSON file"):
        Machine.from_json(json.dumps(content)[:-20].encode())


@pytest.mark.parametrize("value", [-1.0, 0.0])
def test_bandwidth_must_be_above_zero(content, value):
    content["links"][0]["bandwidth_Bps"] = value
    assert "bandwidth_Bps" in (message := refused(content)) and "$.links[0]" in message


def test_negative_dispatch_is_named(content):
    content["dispatch_s"]["matrix"] = -1e-6
    assert "dispatch_s.matrix" in refused(content)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_not_a_number_is_refused(value):
    with pytest.raises(TwofoldError, match="compute_rate"):
        Overlap(compute="matrix", collective="all_reduce", compute_rate=value, comm_rate=0.5)


def test_missing_dispatch_class_is_named(content):
    del content["dispatch_s"]["wait"]
    assert "wait" in refused(content)


def test_unknown_collective_is_named_with_a_suggestion(content):
    content["collectives"]["all_reduc"] = {}
    assert "all_reduc" in (message := refused(content)) and "'all_reduce'" in message


def test_missing_figure_is_named(content):
    del content["compute"]["memory_Bps"]
    assert "memory_Bps" in refused(content)


def test_links_must_join_all_devices(content):
    content["num_devices"] = 16
    assert "join all 16 devices" in refused(content)


def test_interval_must_hold_one(content):
    content["interval"] = {"low": 1.1, "high": 1.2}
    assert "0 < low <= 1 <= high" in refused(content)


def test_provenance_of_an_unknown_section(content):
    content["provenance"]["colour"] = {"status": "assumed", "source": "?"}
    assert "colour" in refused(content)


def test_hosts_that_compute_need_cores(content):
    content["host_async"] = False
    assert "cores_per_node" in refused(content)


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = Machine.load("h200-x4").save(tmp_path / "m.json")

    def fail(source: str, target: str) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        msgspec.structs.replace(Machine.load("h200-x4"), name="new").save(path)
    monkeypatch.undo()
    assert Machine.load(path).name == "h200-x4" and os.listdir(tmp_path) == ["m.json"]


def test_tier_of_ranks():
    content = json.loads(Machine.load("h200-x4").to_json())
    content["num_devices"] = 8
    content["links"].append({"name": "NIC", "ranks": 8, "latency_s": 1e-5, "bandwidth_Bps": 5e10})
    machine = Machine.from_json(json.dumps(content).encode())
    assert [machine.tier(ranks) for ranks in ((0, 3), (4, 7), (3, 4), (2,))] == [0, 0, 1, 0]
    with pytest.raises(TwofoldError, match="8 devices"):
        machine.tier((0, 8))
