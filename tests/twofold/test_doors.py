"""One plan through every door: the figures of a step have the same keys and units everywhere, and doors that compute
the same thing print the same number."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from costmodels import Machine
from executor.step.memory import memory_peak
from plans.degrees import Degrees
from plans.degrees.plan import plan_of
from plans.figures import FIGURES, figures_of, figures_text
from plans.lower import lower
from plans.model.mlp import mlp_graph
from plans.model.transformer import TransformerConfig, transformer
from plans.plan import load_plan, save_plan
from reports.time_tables import figures_table
from search import search
from simulator import simulate
from simulator.forecast import forecast
from tests import ROOT
from twofold.cli import main

MACHINE = ["--machine", "h200-x8"]
CONFIG = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 512, "vocab_size": 512, "max_position_embeddings": 128,
    "torch_dtype": "float32", "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}  # fmt: skip
DEGREES = ["--dp", "2", "--tp", "2", "--pp", "2", "--micro-batch", "1", "--schedule", "1f1b", "--virtual", "1",
           "--recompute", "none", "--zero", "1"]  # fmt: skip


def figures(found: dict[str, Any]) -> dict[str, Any]:
    return {key: found[key] for key in FIGURES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("doors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code = main([*arguments, "--json"])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    found: dict[str, Any] = json.loads(shown.out)
    return found


@pytest.fixture(scope="module")
def planned(folder: Path) -> dict[str, Any]:
    arguments = ["plan", str(folder / "config.json"), *MACHINE, "--global-batch", "8", *DEGREES, "--json"]
    arguments += ["--sequence-parallel", "False", "--out", str(folder / "plan.json")]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*arguments, "--report", str(folder / "search.html")]) == 0
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def test_every_figure_is_defined_once() -> None:
    assert list(FIGURES) == ["step_s", "exposed_comm_s", "bubble_fraction", "peak_bytes"]
    assert [row[1] for row in figures_table().rows] == list(FIGURES)
    assert all(figure.definition.endswith(".") for figure in FIGURES.values())
    text = figures_text({"step_s": 1e-3, "exposed_comm_s": 0.0, "bubble_fraction": 0.5, "peak_bytes": 2_000_000})
    assert text == "step 1.00 ms, exposed communication 0 s, bubble 50.0 %, peak memory 2.00 MB"


def test_the_docs_have_the_definitions() -> None:
    text = (ROOT / "docs" / "what-if.md").read_text()
    for title, key, unit, definition in figures_table().rows:
        assert f"| {title} | `{key}` | {unit} | {definition} |" in text


def test_all_forecasts_print_the_same_figures(
    planned: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`plan`, its two files, `predict`, `simulate --recost` and `whatif` of degrees forecast one configuration."""
    best = figures(planned["best"])
    assert figures(planned["plans"][0]) == best
    assert figures(json.loads((folder / "plan.degrees.json").read_text())) == best
    prediction = load_plan(folder / "plan.json").prediction
    assert prediction is not None and figures_of(prediction) == best
    for file in ("plan.json", "plan.degrees.json"):
        assert figures(said(["simulate", str(folder / file), *MACHINE, "--recost"], capsys)) == best
    predicted = said(["predict", str(folder / "config.json"), *MACHINE, "--global-batch", "8", *DEGREES], capsys)
    assert figures(predicted) == best and predicted["mfu"] == planned["best"]["mfu"]
    assert f"{100 * predicted['mfu']:.1f} %" in (folder / "search.html").read_text()
    changed = said(["whatif", str(folder / "plan.degrees.json"), *MACHINE, "--dispatch", "2"], capsys)
    assert figures(changed["base"]) == best and changed["predicted_by"] == "forecast"
    assert predicted["step_low_s"] < predicted["step_s"] < predicted["step_high_s"]


def test_all_simulations_print_the_same_figures(
    planned: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`simulate` of the plan and of its degrees, `whatif` without changes, and the data inside both reports; the
    forecast is within 0.1 % of them."""
    plan, degrees = str(folder / "plan.json"), str(folder / "plan.degrees.json")
    report, other = folder / "step.html", folder / "what_if.html"
    simulated = said(["simulate", plan, *MACHINE, "--report", str(report)], capsys)
    expected = figures(simulated)
    assert planned["best"]["step_s"] == pytest.approx(expected["step_s"], rel=1e-3)
    changed = said(["whatif", degrees, *MACHINE, "--simulate", "--dispatch", "2"], capsys)
    assert figures(changed["base"]) == expected and changed["predicted_by"] == "simulation"
    assert figures(said(["simulate", degrees, *MACHINE], capsys)) == expected
    for file in (plan, degrees):
        found = said(["whatif", file, *MACHINE, "--dispatch", "1", "2", "--report", str(other)], capsys)
        assert figures(found["base"]) == expected
        (slower,) = found["changed"]
        assert slower["step_s"] > expected["step_s"]
    for page in (report, other):
        assert figures(report_data(page)["timelines"][0]) == expected
    assert main(["simulate", plan, *MACHINE]) == 0
    assert figures_text(expected, low_s=simulated["step_low_s"], high_s=simulated["step_high_s"]) in (
        capsys.readouterr().out
    )


def test_forecasts_and_simulations_say_the_same_figures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing is contended, all four figures are equal at every door; on a real machine they are within 1 %."""
    quiet = msgspec.structs.replace(Machine.load("h200-x8"), name="quiet", overlap=())
    machine = ["--machine", str(quiet.save(folder / "quiet.json"))]
    config, plan, degrees = (
        str(folder / "config.json"),
        str(folder / "quiet.plan.json"),
        ["--global-batch", "8", *DEGREES],
    )
    found = said(["plan", config, *machine, *degrees, "--sequence-parallel", "False", "--out", plan], capsys)
    expected = figures(found["best"])
    assert min(expected.values()) > 0
    file, page = str(folder / "quiet.plan.degrees.json"), folder / "quiet.html"
    doors = {
        "the plan file": figures_of(load_plan(plan).prediction),
        "the file of degrees": figures(json.loads(Path(file).read_text())),
        "predict": figures(said(["predict", config, *machine, *degrees], capsys)),
        "simulate, a plan": figures(said(["simulate", plan, *machine, "--report", str(page)], capsys)),
        "its report": figures(report_data(page)["timelines"][0]),
        "simulate, degrees": figures(said(["simulate", file, *machine], capsys)),
        "whatif": figures(said(["whatif", file, *machine, "--dispatch", "2"], capsys)["base"]),
        "whatif, simulated": figures(said(["whatif", file, *machine, "--simulate", "--dispatch", "2"], capsys)["base"]),
    }
    for door, values in doors.items():
        assert values == pytest.approx(expected, rel=1e-12), door
    loud = said(["predict", config, *MACHINE, *degrees], capsys)
    simulated = said(["simulate", plan, *MACHINE], capsys)
    for key in ("step_s", "bubble_fraction", "peak_bytes"):
        assert loud[key] == pytest.approx(simulated[key], rel=0.01)
    assert loud["exposed_comm_s"] == pytest.approx(simulated["exposed_comm_s"], abs=0.01 * loud["step_s"])


@pytest.mark.parametrize(
    ("schedule", "virtual", "zero", "pp"),
    [
        ("interleaved_1f1b", 2, 1, 2), ("interleaved_1f1b", 2, 3, 2), ("zb_v", 2, 0, 2), ("1f1b", 1, 3, 2),
        ("1f1b", 1, 1, 4), ("gpipe", 1, 3, 2),
    ],
)  # fmt: skip
def test_forecasts_and_simulations_agree_in_every_kind_of_step(schedule: str, virtual: int, zero: int, pp: int) -> None:
    """Uncontended. Ranks that run the program hold as many bytes (tests/plans/lower/test_sent_tensors.py)."""
    config = TransformerConfig(
        num_layers=8, hidden=256, num_heads=4, num_kv_heads=4, ffn=512, vocab=512, seq=128, dtype="bfloat16"
    )
    quiet = msgspec.structs.replace(Machine.load("h200-x8"), overlap=())
    degrees = Degrees.of(
        {"dp": 4 // pp, "tp": 2, "pp": pp, "schedule": schedule, "virtual": virtual, "zero": zero}, global_batch=16
    )
    expected = figures_of(forecast(config, degrees, quiet))
    program = lower(plan_of(degrees, transformer(config, batch_size=16)))
    found = figures_of(simulate(program, quiet))
    assert found == pytest.approx(expected, rel=1e-12)
    assert found["peak_bytes"] == max(memory_peak(group, group.ranks[0]).peak_bytes for group in program.groups)


def report_data(page: Path) -> dict[str, Any]:
    (text,) = re.findall(r'<script[^>]*id="twofold-data"[^>]*>(.*?)</script>', page.read_text(), flags=re.DOTALL)
    found: dict[str, Any] = json.loads(text)
    return found


def test_factors_of_predict_and_whatif_are_the_same_machine(
    planned: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["predict", str(folder / "config.json"), *MACHINE, "--global-batch", "8", *DEGREES]
    slow = said([*command, "--bandwidth", "0.05", "--compute", "0.05"], capsys)
    assert slow["step_s"] > planned["best"]["step_s"] and slow["peak_bytes"] == planned["best"]["peak_bytes"]
    assert main([*command, "--bandwidth", "0.25", "1"]) == 2
    assert "--bandwidth has several values, but predict takes one" in capsys.readouterr().err


def test_a_searched_plan_carries_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Operators searched one by one: `plan`, the prediction in the plan file, and `simulate`."""
    out = tmp_path / "plan.json"
    arguments = ["plan", "executor.networks:multiple_mix", *MACHINE, "--devices", "4", "--stages", "2"]
    best = figures(said([*arguments, "--micro-batches", "2", "--out", str(out)], capsys)["best"])
    plan = load_plan(out)
    assert plan.prediction is not None
    assert figures_of(plan.prediction) == best
    assert figures(said(["simulate", str(out), *MACHINE], capsys)) == best
    assert figures_of(simulate(plan, Machine.load("h200-x8"))) == best


@pytest.mark.parametrize("execution", ["graph", "eager"])
def test_python_and_the_command_line_say_the_same(
    execution: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine.load("h200-x8")
    best = search(mlp_graph([64, 32, 8], 16), machine, num_devices=2, execution=execution).best
    assert best.execution == execution and best.prediction is not None
    path = str(save_plan(best, tmp_path / "plan.json"))
    assert figures_of(best.prediction) == figures_of(simulate(best, machine))
    assert figures_of(best.prediction) == figures(said(["simulate", path, *MACHINE], capsys))


@pytest.mark.ranks
def test_runs_have_the_same_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`run` and `verify` of a plan for two CPU ranks."""
    out, model = str(tmp_path / "plan.json"), "executor.networks:multiple_mix"
    machine, logs = ["--machine", "cpu-2core-x8"], ["--log-dir", str(tmp_path / "log"), "--steps", "3"]
    best = said(["plan", model, *machine, "--devices", "2", "--out", out], capsys)["best"]
    run = said(["run", out, "--data", "random", *logs], capsys)
    assert set(FIGURES) < set(run) and run["step_s"] > 0 and run["peak_bytes"] > 0
    verified = said(["verify", out, "--model", model, *machine, *logs], capsys)
    assert set(verified["measured"]) == set(FIGURES)
    assert verified["predicted"] == figures(best)
    assert verified["predicted"]["step_s"] == verified["predicted_step_s"]
    assert verified["measured"]["step_s"] == verified["measured_step_s"]


def test_every_door_answers_for_both_executions(
    planned: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan is replayed unless it says otherwise; small layers wait for an eager host and not for a replay."""
    command = ["predict", str(folder / "config.json"), *MACHINE, "--global-batch", "8", *DEGREES]
    eager, graph = (said([*command, "--execution", each], capsys)["step_s"] for each in ("eager", "graph"))
    assert graph == planned["best"]["step_s"] < eager / 2
    plan = str(folder / "plan.json")
    assert load_plan(plan).execution == "graph"
    replayed, issued = (
        said(["simulate", plan, *MACHINE, *more], capsys)["step_s"] for more in ([], ["--execution", "eager"])
    )
    assert replayed < issued / 2
    out = str(folder / "eager.json")
    shape = [
        "plan",
        str(folder / "config.json"),
        *MACHINE,
        "--global-batch",
        "8",
        *DEGREES,
        "--sequence-parallel",
        "False",
    ]
    assert said([*shape, "--execution", "eager", "--out", out], capsys)["best"]["step_s"] == eager
    assert load_plan(out).execution == "eager"
    assert said(["simulate", out, *MACHINE], capsys)["step_s"] == issued


def test_an_execution_that_cannot_be_is_refused_with_the_way_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["predict", str(folder / "config.json"), *MACHINE, "--global-batch", "8", *DEGREES]
    assert main([*command, "--execution", "fast"]) == 2
    assert "execution 'fast' is not known: graph" in capsys.readouterr().err
    assert main([*command, "--stack", "megatron", "--execution", "graph"]) == 2
    assert "omit it for megatron" in capsys.readouterr().err
