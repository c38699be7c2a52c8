"""Published bandwidths: the data is whole, device files have the constants that are fitted to one half of it."""

import json

import pytest

from benchmarks.accuracy.network import RESULTS, Published, fitted_constants, load_published, predicted_GBps
from costmodels.fit.transfer_calibration import carried
from costmodels.machine.catalogue import load_device


@pytest.fixture(scope="module")
def points() -> list[Published]:
    return load_published()


def test_every_point_is_cited_and_below_what_its_links_could_carry(points):
    assert len(points) >= 130
    assert {point.call for point in points} == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    for point in points:
        assert len(point.source) > 20 and point.size_bytes > 0
        link = load_device("b200" if point.device == "gb200" else point.device).node[-1]
        # a switch that adds halves the bytes of an all-reduce
        most = link.bandwidth_Bps * (2 if point.call == "all_reduce" else 1) / 1e9
        assert 0 < point.bus_GBps < most


def test_no_table_is_fitted_and_scored(points):
    halves = {(point.case, point.call): set() for point in points}
    for point in points:
        halves[point.case, point.call].add(point.is_fitted)
    assert all(len(own) == 1 for own in halves.values())
    scored = sum(not point.is_fitted for point in points)
    assert 0.4 * len(points) < scored < 0.6 * len(points)


def test_devices_have_the_fitted_constants(points):
    found = fitted_constants(points)
    for name in ("h100-sxm", "h200", "b200", "a100-80gb"):
        model = load_device(name).collectives["all_reduce"]
        assert model.far_start_s == pytest.approx(found["far_start_s"], rel=0.02)
        assert model.far_chunk_s == pytest.approx(found["far_chunk_s"], rel=0.02)
        protocols = {protocol.name: protocol for protocol in model.protocols}
        assert protocols["ring LL"].far_share == pytest.approx(found["ll_far_share"], rel=0.02)
        if "NVLS" in protocols:
            switch = protocols["NVLS"]
            assert switch.far_share == pytest.approx(switch.share * found["switch_far_ratio"], rel=0.02)
            family = "blackwell" if name == "b200" else "switch"
            assert switch.member_chunk_s == pytest.approx(found[f"{family}_member_chunk_s"], rel=0.02)
        else:
            assert model.chunk_s == pytest.approx(found["ampere_chunk_s"], rel=0.02)
    fractions = [load_device(name).collectives["all_gather"].link_fraction for name in ("b200", "h200")]
    assert fractions[0] / fractions[1] == pytest.approx(found["blackwell_link_ratio"], rel=0.02)


def test_figures_carried_over_keep_fitted_constants():
    for name in ("a100-80gb", "b200"):
        device = load_device(name)
        assert carried(device, load_device("h200"), date="2026-11-23").collectives == device.collectives


def test_the_saved_errors_are_those_of_these_devices(points):
    saved = json.loads(RESULTS.read_text())
    for point, row in zip(points, saved["points"], strict=True):
        assert row["predicted_GBps"] == pytest.approx(predicted_GBps(point), rel=1e-3)
