"""The coordinate descent of searches whose time is short, against enumeration."""

import itertools
import time
from types import SimpleNamespace

from costmodels import Machine
from plans.model.transformer import transformer_config
from search.devices import Pins, Problem
from search.devices.branch import Branching
from search.devices.descent import descended
from search.devices.space import enumerate_degrees


def test_a_descent_comes_near_the_best_estimate_of_the_space():
    problem = Problem(
        config=transformer_config("llama-3-8b", num_layers=4), machine=Machine.load("h100-sxm-x8"), num_devices=4,
        global_batch=8, pins=Pins(cp=1, recompute="none"),
    )  # fmt: skip
    estimated = Branching(problem=problem).estimated
    found = descended(problem, estimated, time.monotonic() + 60)
    seconds = [seen.step_s for seen in map(estimated, found) if seen is not None]
    every = [seen for seen in map(estimated, enumerate_degrees(problem)) if seen is not None]
    least_s = min(seen.step_s for seen in every if seen.peak_bytes <= problem.limit_bytes)
    assert seconds == sorted(seconds) and len({(each.dp, each.tp, each.pp, each.schedule) for each in found}) == len(
        found
    )
    assert least_s <= seconds[0] <= 1.01 * least_s
    assert not descended(problem, estimated, time.monotonic() - 1)


def test_a_descent_ends_inside_a_mesh_when_its_time_is_over(monkeypatch):
    problem = Problem(
        config=transformer_config("llama-3-8b", num_layers=4), machine=Machine.load("h100-sxm-x8"), num_devices=4,
        global_batch=8,
    )  # fmt: skip
    clock, tried = itertools.count(), []

    def estimated(degrees):
        tried.append((degrees.dp, degrees.cp, degrees.tp, degrees.pp))

    monkeypatch.setattr("search.devices.descent.time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert not descended(problem, estimated, 6)
    assert 1 < len(tried) <= 6 and len(set(tried)) == 1
