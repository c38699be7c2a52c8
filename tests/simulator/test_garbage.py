"""Simulations, forecasts and searches leave nothing to Python's garbage collector, which is off while they run."""

from __future__ import annotations

import atexit
import gc
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from types import FunctionType

import pytest

from costmodels import Machine
from plans.degrees import Degrees
from plans.degrees.plan import plan_of
from plans.lower import lower
from plans.model.transformer import TransformerConfig, transformer, transformer_config
from plans.optimizer import Optimizer
from plans.schedules import make_schedule
from search import search
from search.devices import Pins
from search.devices.problem import Problem
from search.devices.solve import solve
from simulator import run_program, simulate
from simulator.forecast import forecast
from simulator.forecast.predict import step_forecast
from tests.support.handmade import pipeline, written_price
from twofold.cli import main

PACKAGES = ("plans", "costmodels", "simulator", "search", "simpy")
CONFIG = TransformerConfig(name="garbage", num_layers=4, hidden=256, num_heads=8, ffn=512, vocab=1000, seq=128)
ONE_LAYER = replace(CONFIG, num_layers=1)
ON_8 = Degrees(dp=2, tp=2, pp=2, micro_batch=2, global_batch=16)
TURNS = Degrees(dp=2, tp=2, pp=2, micro_batch=2, global_batch=16, interleave=2)
ONE_NODE, TWO_NODES = Machine.load("h100-sxm-x8"), Machine.load("h100-sxm-x16")
CONTENDED = Degrees(
    dp=2, cp=2, micro_batch=2, global_batch=32,
    optimizer=Optimizer(kind="adamw", settings={"lr": 1e-4}, parallel_level=2, reduce_every="micro_batch"),
)  # fmt: skip


SCHEDULE = make_schedule("1f1b", 4, 4)


def in_hand(**options: object) -> object:
    program = pipeline(SCHEDULE.order, SCHEDULE.placement, {"F": 10, "B": 20}, transfer=(1, 5, 2))
    return run_program(program, written_price, **options)


def simulated(degrees: Degrees, machine: Machine) -> object:
    return simulate(lower(plan_of(degrees, transformer(CONFIG, batch_size=degrees.global_batch))), machine)


def forecast_by_the_clock() -> None:
    step = step_forecast(transformer_config("llama-2-7b", num_layers=2, seq=768), CONTENDED, ONE_NODE)
    assert step.is_walked
    step.forecast()


RUNS: dict[str, Callable[[], object]] = {
    "hosts ahead of their devices": in_hand,
    "hosts that compute": lambda: in_hand(host_async=False),
    "shared cores": lambda: in_hand(host_async=False, cores_per_node=2),
    "overlap": lambda: simulated(ON_8, ONE_NODE),
    "shared links": lambda: simulated(CONTENDED, TWO_NODES),
    "streams": lambda: simulated(TURNS, ONE_NODE),
    "forecast": lambda: forecast(CONFIG, ON_8, ONE_NODE),
    "forecast of turns": lambda: forecast(CONFIG, TURNS, ONE_NODE),
    "forecast by the clock": forecast_by_the_clock,
    "search of degrees": lambda: solve(
        Problem(config=CONFIG, machine=ONE_NODE, num_devices=4, global_batch=8, pins=Pins(recompute="none"))
    ),
    "search of operators": lambda: search(transformer(ONE_LAYER, batch_size=2), ONE_NODE, num_devices=2),
}


@pytest.fixture
def left() -> Generator[Callable[[], Counter[str]], None, None]:
    """Counts the objects made since the start of the test that only the garbage collector frees, by their names."""

    def found() -> Counter[str]:
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        kinds = [each if isinstance(each, FunctionType) else type(each) for each in gc.garbage]
        gc.garbage.clear()
        return Counter(kind.__qualname__ for kind in kinds if kind.__module__.split(".")[0] in PACKAGES)

    gc.freeze()  # what is there now is not looked at
    gc.disable()
    yield found
    gc.enable()


@pytest.mark.parametrize("name", RUNS)
def test_nothing_refers_to_itself(name: str, left: Callable[[], Counter[str]]) -> None:
    RUNS[name]()
    assert not left()


SMALL = [
    "plan", "llama-3-8b", "--layers", "2", "--machine", "h100-sxm-x8", "--devices", "2", "--global-batch", "2",
    "--tp", "2", "--recompute", "none", "--zero", "0", "--simulate", "0", "--out",
]  # fmt: skip


def test_a_command_that_searches_collects_nothing_when_its_process_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who calls the command in a process of their own keeps their collection."""
    at_exit = list[object]()
    monkeypatch.setattr(atexit, "register", at_exit.append)
    before = gc.get_freeze_count()
    assert main([*SMALL, str(tmp_path / "plan")]) == 0
    assert gc.isenabled() and gc.get_freeze_count() <= before
    assert gc.freeze in at_exit and "llama-3-8b" in capsys.readouterr().out
