"""Plan files: what is written comes back equal, and what is no plan is refused with the place and the way out."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from plans.errors import TwofoldError
from plans.layout import Layout
from plans.lower import lower
from plans.model.mlp import mlp_graph
from plans.optimizer import Optimizer
from plans.plan import PLAN_VERSION, Plan, Prediction, Stage, Strategy, load_plan, save_plan
from tests.support.random_plans import random_plan


def small_plan(**rest: object) -> Plan:
    stage = Stage(mesh=Layout((2,), ("dp",), (1, 0)), operators=("layer1.linear", "loss.mse_loss"))
    strategies = {"layer1.linear": Strategy(dims={"b0": ("dp",)}, mesh=Layout((1, 2), ("a", "dp")))}
    return Plan(graph=mlp_graph([4, 2], 8), stages=(stage,), strategies=strategies, **rest)


def written(folder: Path, change: object = None) -> Path:
    """The file of a small plan, its JSON changed by `change(dict)`."""
    path = save_plan(small_plan(), folder / "plan.json")
    if change is not None:
        plan = json.loads(path.read_text())
        change(plan)
        path.write_text(json.dumps(plan))
    return path


@pytest.mark.parametrize("seed", range(8))
def test_round_trip(tmp_path, seed):
    plan = random_plan(seed)
    again = load_plan(save_plan(plan, tmp_path / "plan.json"))
    assert again == plan
    assert hash(again) == hash(plan)
    assert lower(again) == lower(plan)


def test_round_trip_of_everything_optional(tmp_path):
    prediction = Prediction(
        machine="cpu", step_s=0.1 + 0.2, peak_bytes=2**40, low_s=math.nextafter(0.25, 0), high_s=1.0
    )
    plan = small_plan(memory_limit_bytes=10**12, prediction=prediction, interleave=2, output_broadcast=True)
    again = load_plan(save_plan(plan, tmp_path / "plan.json"))
    assert again == plan
    assert again.prediction == prediction


def test_equal_plans_make_equal_files(tmp_path):
    first, second = (save_plan(small_plan(), tmp_path / name) for name in ("a.json", "b.json"))
    assert first.read_bytes() == second.read_bytes()


def set_at(*path: object):
    *way, last = path

    def change(plan: dict) -> None:
        for step in way:
            plan = plan[step]
        plan[last] = 1

    return change


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (set_at("shedule"), r"unknown key `shedule`; did you mean `schedule`\?$"),
        (set_at("stages", 0, "devices"), r"unknown key `devices` - at `\$.stages\[0\]`; known keys: mesh, operators"),
        (set_at("optimizer", "level"), r"unknown key `level` - at `\$.optimizer`; .*parallel_level"),
        (set_at("graph", "operators", 1, "colour"), r"unknown key `colour` - at `\$.graph.operators\[1\]`"),
        (set_at("strategies", "layer1.linear", "axis"), r"unknown key `axis` - at `\$.strategies\[...\]`"),
        (set_at("num_micro_batches"), None),
        (set_at("stages", 0, "mesh", "names"), r"a mesh has the keys .* - at `\$.stages\[0\].mesh`"),
        (set_at("stages", 0, "operators"), r"Expected `array`, got `int` - at `\$.stages\[0\].operators`"),
    ],
)
def test_unknown_keys_are_refused_with_their_path(tmp_path, change, place):
    path = written(tmp_path, change)
    if place is None:  # a key that is known
        load_plan(path)
        return
    with pytest.raises(TwofoldError, match=place) as refusal:
        load_plan(path)
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize("version", [0, PLAN_VERSION + 1])
def test_another_version_is_refused_before_its_keys(tmp_path, version):
    def change(plan: dict) -> None:
        plan["version"], plan["from the future"] = version, 1

    with pytest.raises(TwofoldError, match=f"version {version}, this twofold reads version {PLAN_VERSION}; plan again"):
        load_plan(written(tmp_path, change))


def test_a_missing_version_is_refused(tmp_path):
    with pytest.raises(TwofoldError, match="not a plan file, it has no `version`; write one with `twofold plan`"):
        load_plan(written(tmp_path, lambda plan: plan.pop("version")))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_file_is_refused(tmp_path, share):
    path = written(tmp_path)
    text = path.read_bytes()
    path.write_bytes(text[: int(share * len(text))])
    with pytest.raises(TwofoldError, match=r"not a complete JSON file .* may be truncated") as refusal:
        load_plan(path)
    assert str(path) in str(refusal.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TwofoldError, match=r"cannot read the plan file .*none\.json.*No such file"):
        load_plan(tmp_path / "none.json")


def test_an_impossible_plan_is_refused_on_reading(tmp_path):
    def change(plan: dict) -> None:
        plan["num_micro_batches"] = 3

    with pytest.raises(TwofoldError, match="3 micro-batches do not divide the batch of 8"):
        load_plan(written(tmp_path, change))


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = written(tmp_path)
    before = path.read_bytes()

    def fail(*names: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save_plan(small_plan(num_micro_batches=2), path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"settings": {"learning": 3.0}}, r"'sgd' has no setting \['learning'\]"),
        ({"settings": {"lr": -0.1}}, r"setting lr must be at least 0, not -0.1"),
        (
            {"kind": "adamw", "settings": {"lr": 0.1, "beta2": 1.0}},
            r"setting beta2 must be at least 0 and below 1, not 1.0",
        ),
        ({"settings": {"lr": 0.1, "momentum": 0.9}}, r"'sgd' has no setting \['momentum'\]"),
        ({"kind": "adamw", "settings": {}}, "needs a learning rate"),
    ],
)
def test_settings_that_no_optimizer_has_are_refused(optimizer: dict[str, Any], message: str) -> None:
    with pytest.raises(TwofoldError, match=message):
        Optimizer(**optimizer)
