"""The data behind the pictures, and that each is well-formed SVG."""

import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plans.errors import TwofoldError
from plans.graph_data import graph_data
from plans.model.mlp import mlp_graph
from plans.timeline import Span, Timeline
from reports import pipeline_picture, save_graph
from reports.charts import Chart
from reports.graph_picture import GraphPicture
from reports.layered import place
from reports.live import pack
from simulator import critical_path
from simulator.timeline.labels import groups_of, representative_step
from simulator.timeline.live import LiveBytes, live_by_role, worst_ranks
from tests.support.reports_example import measured, predicted, small_graph, small_plan, small_program

SVG = "{http://www.w3.org/2000/svg}"


def parsed(picture: GraphPicture | Chart) -> ET.Element:
    root = ET.fromstring(picture.alone())
    assert root.tag == f"{SVG}svg"
    assert float(root.get("width").removesuffix("pt")) > 100
    return root


def texts(root: ET.Element) -> list[str]:
    return [element.text for element in root.iter(f"{SVG}text")]


# -------------------------------------------------------------------------------- pipeline


def test_groups_are_read_from_the_labels():
    assert groups_of(predicted()) == (((0,), (0, 1, 2, 3)), ((1,), (4, 5, 6, 7)))


def test_a_prediction_shows_its_last_step_and_a_run_its_median_one():
    timeline = measured(5)
    lengths = np.subtract(timeline.step_end_ps, timeline.step_start_ps)[1:]
    chosen = representative_step(timeline)
    assert chosen > 0
    assert sorted(lengths)[1] == lengths[chosen - 1]
    assert representative_step(predicted(3)) == 2


def test_the_prediction_is_above_the_run_with_every_rank_and_kind():
    root = parsed(pipeline_picture([predicted(), measured()]))
    shown = texts(root)
    titles = [text for text in shown if text.startswith(("PREDICTED", "MEASURED"))]
    assert [title.split(":")[0] for title in titles] == ["PREDICTED", "MEASURED"]
    assert {"rank 0, stage 0", "rank 7", "rank 4, stage 1", "forward", "recompute", "communication"} <= set(shown)
    assert [shown.count(number) for number in ("1", "2")] >= [16, 16]  # a forward and a backward on 8 ranks, twice


def test_more_ranks_than_fit_are_picked_evenly():
    spans = [
        Span(rank=r, stream="compute", start_ps=0, end_ps=1000 + r, step=0, id=f"{r}F0/a.F",
             call="relu.forward", part="F")
        for r in range(200)
    ]  # fmt: skip
    shown = texts(parsed(pipeline_picture([Timeline.from_spans(spans, kind="predicted", num_ranks=200)])))
    ranks = [text for text in shown if text.startswith("rank ")]
    assert len(ranks) == 64 and ranks[0].startswith("rank 0") and ranks[-1].startswith("rank 199")


def test_a_timeline_without_spans_is_refused():
    with pytest.raises(TwofoldError, match="no spans"):
        pipeline_picture([Timeline.from_spans([], kind="predicted", num_ranks=1)])
    with pytest.raises(TwofoldError, match="at least one"):
        pipeline_picture([])


# ---------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("make", [predicted, measured])
def test_live_bytes_reach_the_peak_that_the_simulator_found(make):
    timeline = make(2)
    for peak in timeline.memory:
        live = live_by_role(small_program(), timeline, peak.rank, step=1)
        assert live.peak[1] == peak.peak_bytes
        at = int(np.argmax(live.total))
        assert {role: int(sizes[at]) for role, sizes in live.by_role.items() if sizes[at]} == dict(peak.by_role)


def test_live_bytes_by_role_add_up_to_the_curve():
    timeline = predicted()
    for rank, (times, sizes) in timeline.memory_curve.items():
        live = live_by_role(small_program(), timeline, rank)
        moments = np.unique(times)
        wanted = sizes[np.searchsorted(times, moments, side="right") - 1]
        found = live.total[np.searchsorted(live.times_ps, moments, side="right") - 1]
        np.testing.assert_array_equal(found, wanted)


def test_the_fullest_rank_of_every_group_is_shown():
    timeline = predicted()
    memory = tuple(replace(peak, peak_bytes=peak.peak_bytes + (peak.rank == 6)) for peak in timeline.memory)
    assert [peak.rank for peak in worst_ranks(replace(timeline, memory=memory))] == [0, 6]


# ----------------------------------------------------------------------------------- graph


def test_the_graph_before_the_search_has_operators_shapes_and_parameters():
    data = graph_data(small_graph())
    nodes = {node.name: node for node in data.nodes}
    assert set(nodes) == {"x", "y", *(operator.name for operator in small_graph().operators)}
    assert nodes["layer1.linear"].parameters == ("weight 512×784", "bias 512")
    assert nodes["layer1.linear"].stage is None
    assert ("relu1.relu", "layer2.linear", (32, 512)) in {(edge.source, edge.target, edge.shape) for edge in data.edges}
    assert not any(edge.steps for edge in data.edges)


def test_the_graph_after_the_search_has_stages_strategies_and_what_moves():
    plan = small_plan()
    data = graph_data(plan.graph, plan)
    nodes = {node.name: node for node in data.nodes}
    moves = {(edge.source, edge.target): edge.steps for edge in data.edges if edge.steps}
    assert data.batch_size == 8
    assert {name: node.stage for name, node in nodes.items() if node.stage is not None} == dict(plan.stage_of())
    assert nodes["layer2.linear"].strategy == "b0→dp, k→tp"
    assert nodes["relu1.relu"].recomputed and not nodes["layer1.linear"].recomputed
    assert moves == {
        ("relu1.relu", "layer2.linear"): ("send to stage 1",),
        ("layer2.linear", "relu2.relu"): ("all_reduce over tp",),
        ("loss.reshape", "loss.cast"): ("slice over dp",),
    }


@pytest.mark.parametrize("num_layers", [20, 70, 500])
def test_a_large_graph_is_folded_into_few_nodes_that_hold_every_operator_once(num_layers):
    graph = mlp_graph([8] * (num_layers + 1), 4)
    data = graph_data(graph)
    operators = [node for node in data.nodes if node.kind != "input"]
    assert len(operators) <= 60
    assert [name for node in operators for name in node.operators] == [operator.name for operator in graph.operators]
    assert bool(data.note) == (len(graph.operators) > 60)
    parsed(GraphPicture(data))


def test_graph_files_hold_every_operator_even_where_the_picture_folds(tmp_path):
    graph = mlp_graph([8] * 100, 4)
    paths = save_graph(tmp_path, graph)
    assert [path.name for path in paths] == ["graph_before.json", "graph_before.svg"]
    assert paths[0].read_text().count('"kind": "linear"') == 99
    after = save_graph(tmp_path, small_graph(), small_plan())
    assert [path.name for path in after] == ["graph_after.json", "graph_after.svg"]
    assert "send to stage 1" in texts(ET.fromstring(after[1].read_bytes()))


@given(st.data())
def test_layered_nodes_do_not_overlap_and_edges_lead_down(data):
    count = data.draw(st.integers(1, 12))
    names = [f"n{at}" for at in range(count)]
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).filter(lambda pair: pair[0] < pair[1])
    edges = [(names[a], names[b]) for a, b in data.draw(st.lists(pairs, max_size=20))] if count > 1 else []
    sizes = {name: (data.draw(st.floats(10, 200)), data.draw(st.floats(10, 60))) for name in names}
    placed = place(sizes, edges)
    for (source, target), route in zip(edges, placed.routes, strict=True):
        assert placed.corners[source][1] + sizes[source][1] <= placed.corners[target][1] + 1e-6
        assert all(low[1] <= high[1] + 1e-6 for low, high in pairwise(route))
    for at, a in enumerate(names):
        (xa, ya), (wa, ha) = placed.corners[a], sizes[a]
        assert xa >= -1e-6 and xa + wa <= placed.width + 1e-6 and ya + ha <= placed.height + 1e-6
        for b in names[at + 1 :]:
            (xb, yb), (wb, hb) = placed.corners[b], sizes[b]
            apart = xa + wa <= xb + 1e-6 or xb + wb <= xa + 1e-6 or ya + ha <= yb + 1e-6 or yb + hb <= ya + 1e-6
            assert apart


def test_a_memory_curve_of_many_changes_is_thinned_without_losing_its_peak():
    times = np.arange(50_000, dtype=np.int64)
    sizes = np.random.default_rng(1).integers(0, 1000, len(times))
    live = LiveBytes(rank=0, times_ps=times, by_role={"live": sizes})
    thin = live.thinned(len(times), 1000)
    assert 1000 < len(thin.times_ps) <= 2000
    assert thin.peak[1] == live.peak[1] and thin.times_ps[-1] == times[-1]
    assert len(live.thinned(50, 50_000).times_ps) == len(times)  # far apart: all are kept


# ---------------------------------------------------------------------------- living timeline


@pytest.mark.parametrize("make", [predicted, measured])
def test_packed_exposed_communication_and_critical_path_are_those_of_the_analysis(make):
    timeline = make(1)
    packed = pack(timeline, small_program())
    unit_ps = packed.header["unit_s"] * 1e12
    lane, length = packed.columns[5], packed.columns[7] * unit_ps
    for row, each in enumerate(packed.header["rows"]):
        exposed = timeline.step_parts[each["rank"]].exposed_ps
        assert length[lane == 3 * row + 2].sum() == pytest.approx(exposed, abs=unit_ps * len(lane))
    path = critical_path(timeline, small_program())
    gaps = path.by_kind_ps.get("gap", 0)
    assert packed.columns[10].sum() * unit_ps == pytest.approx(path.step_ps - gaps, abs=unit_ps * len(path.spans))


def test_packed_causes_end_where_their_effects_start():
    """On a predicted timeline a compute span starts when what it waited for last ends, so a cause is no guess."""
    packed = pack(predicted(), small_program())
    lane, start, length, _, cause = packed.columns[:5]
    lane = np.cumsum(lane)
    for first in np.flatnonzero(np.diff(lane, prepend=-1)):
        last = first + np.count_nonzero(lane == lane[first])
        start[first:last] = np.cumsum(start[first:last])
    effects = np.flatnonzero((cause != 0) & (lane % 3 == 1))
    assert len(effects) > 0.9 * np.count_nonzero(lane % 3 == 1)
    causes = effects - cause[effects]
    assert np.abs(start[causes] + length[causes] - start[effects]).max() <= 2


def test_large_steps_are_cut_to_one_rank_of_each_group_and_stay_small(monkeypatch):
    spans = [
        Span(rank=r, stream="compute", start_ps=at * 997, end_ps=at * 997 + 900 - r, step=0,
             id=f"{r // 8}F{at // 8}/layers.{at % 8}.linear.F", call="linear.forward", part="F")
        for r in range(16) for at in range(500)
    ]  # fmt: skip
    timeline = Timeline.from_spans(spans, kind="predicted", num_ranks=16)
    assert len(pack(timeline).header["rows"]) == 16
    monkeypatch.setattr("reports.live.MAX_SPANS", 2000)
    packed = pack(timeline)
    assert [row["rank"] for row in packed.header["rows"]] == [0, 8]
    assert "2 of 16 ranks" in packed.header["notes"][0]
