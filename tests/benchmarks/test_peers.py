from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch

from benchmarks.peers.__main__ import main
from benchmarks.peers.cases import Case, model_flops
from benchmarks.peers.configs import MODELS
from benchmarks.peers.model import Decoder
from benchmarks.peers.pipeline import chunks_of
from benchmarks.peers.predictions import PEER_STACKS
from benchmarks.peers.sets import CASES, SMOKE_CASES, case_named
from benchmarks.peers.single import Rows
from benchmarks.peers.table import row_of, table
from benchmarks.peers.weights import SharedWeights
from plans.degrees import Degrees
from plans.model.transformer import transformer
from simulator.forecast import forecast
from simulator.stacks import stack_named
from tests import ROOT

RESULTS = ROOT / "benchmarks" / "results"

EVERY = [case for table in (CASES, SMOKE_CASES) for cases in table.values() for case in cases]


def test_there_are_thirty_plans_and_each_has_a_name_of_its_own() -> None:
    real = [case for cases in CASES.values() for case in cases]
    assert len(real) >= 30 and len({case.name for case in EVERY}) == len(EVERY)
    assert {ranks for ranks, cases in CASES.items() for case in cases if case.ranks == ranks} == {1, 2, 4}


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_every_case_is_a_plan_for_its_number_of_devices_in_one_dtype(case: Case) -> None:
    plan = case.plan()
    assert plan.num_ranks == case.ranks
    assert plan.optimizer.bytes_per_element(case.config.dtype) == 4 * (2 if case.config.dtype == "bfloat16" else 4)
    blocks = [block for _, chunk in chunks_of(plan) for block in chunk]
    assert blocks == list(range(case.config.num_layers))


@pytest.mark.parametrize("name", MODELS)
def test_the_peers_model_has_the_parameters_of_the_graph(name: str) -> None:
    config = MODELS[name]
    with torch.device("meta"):
        peer = {name: tuple(weight.shape) for name, weight in Decoder(config).named_parameters()}
    assert peer == {tensor.name: tuple(tensor.shape) for tensor in transformer(config, batch_size=1).parameters}


def test_weights_on_the_host_are_those_of_tensors() -> None:
    weights = SharedWeights(transformer(MODELS["tiny-moe"], batch_size=1))
    for name, array in weights.items():
        assert torch.equal(torch.from_numpy(array.copy()), weights.tensor(name, torch.device("cpu")))
    assert abs(float(weights["norm.weight"].mean()) - 1) < 0.1


def test_data_parallel_ranks_take_their_part_of_every_micro_batch() -> None:
    batch = torch.arange(8)
    parts = [Rows(micro_batch=2, dp=2, index=index, count=2).of(batch).tolist() for index in (0, 1)]
    assert parts == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_model_flops_are_those_of_the_published_formula() -> None:
    """Narayanan et al. 2021, equation 3, for a GPT without recomputation: 72 b s l h^2 (1 + s / 6h + V / 12lh)."""
    config = MODELS["gpt"]
    b, s, l, h, v = 4, config.seq, config.num_layers, config.hidden, config.vocab  # noqa: E741
    whole_scores = 72 * b * s * l * h**2 * (1 + s / (6 * h) + v / (12 * l * h))
    causal = whole_scores - 6 * b * l * h * s**2
    assert model_flops(config, b) == pytest.approx(causal, rel=1e-3)  # norms and biases are counted with the products


def test_a_row_shows_where_losses_differ() -> None:
    case, side = (
        SMOKE_CASES[1][0],
        {"step_s": 2.0, "peak_bytes": 8, "steady_peak_bytes": 4, "left_bytes": 0, "spread": 0.0},
    )
    good = {"eager": side | {"losses": [5.0, 4.0]}, "torch": side | {"losses": [5.0, 4.0], "step_s": 1.0}}
    row = row_of(case, good, {"torch": {"step_s": 1.5}})
    assert row["losses_agree"] and row["ratios"] == {"eager/torch": {"step": 2.0, "peak": 2.0}}
    assert row["prediction_errors"] == {"torch": 0.5}
    wrong = row_of(case, good | {"compiled": side | {"losses": [5.1, 4.0]}, "graph": {"error": "no device"}}, {})
    assert not wrong["losses_agree"] and "graph: no device" in table([row, wrong])


@pytest.mark.ranks
def test_both_sides_train_equally_over_data_tensor_and_pipeline_parallel_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    names = ["tiny-b8-dp2-mb2-level3", "tiny-b8-tp2-mb4", "tiny-b8-pp2-mb2-zb_h1"]
    command = ["--smoke", "--gpus", "2", "--out", str(tmp_path), "--only", *names]
    assert main(command) == 0, capsys.readouterr()
    assert "first loss" in capsys.readouterr().out
    report = json.loads((tmp_path / "peers.json").read_bytes())
    assert {row["case"] for row in report["rows"]} == set(names)
    for row in report["rows"]:
        assert row["losses"]["torch"]["later"] < 1e-6  # four steps: values, gradients and updates, in single precision
        assert row["measured"]["eager"]["losses"][0] != row["measured"]["eager"]["losses"][3]
        assert row["predicted"]["eager"]["step_s"] > 0 and row["predicted"]["torch"]["step_s"] > 0
    first = json.loads((tmp_path / "predictions.json").read_bytes())
    assert first["written"] == report["predictions_written"] <= report["date"]
    assert main([*command, "--resume"]) == 0, capsys.readouterr()
    assert "first loss" not in capsys.readouterr().out  # nothing is measured twice
    assert json.loads((tmp_path / "peers.json").read_bytes())["rows"] == report["rows"]


def test_cases_that_are_not_there_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--only", "8x4096", "unknown", "--out", str(tmp_path)]) == 2
    assert "--only unknown: no case on 1 or 2 devices" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("file", "device", "name"),
    [
        ("peers_h100_fifth_in_a_row", "h100-sxm", "14x1664-b16-pp2-mb4-zb_h1"),
        ("peers_h200_seventh", "h200", "8x4608-b16-pp4-mb1-zb_h1"),
        ("peers_h200_eighth", "h200", "12x2688-b32-pp4-mb4-zb_h1"),
        ("peers_h100_fifth_in_a_row", "h100-sxm", "3x5632-b4-dp2-mb1-level3"),
        ("peers_h200_seventh", "h200", "8x4608-b16-dp4-mb2-level3"),
        ("peers_h200_eighth", "h200", "5x5376-b8-dp4-mb2-level3"),
    ],
)
def test_peaks_of_split_backwards_and_of_gathered_weights_are_as_measured(file: str, device: str, name: str) -> None:
    """Torch's split backward keeps its graph; blocks are not gathered while a large loss is computed."""
    rows = json.loads((RESULTS / f"{file}.json").read_bytes())["rows"]
    measured = next(row["measured"]["torch"]["peak_bytes"] for row in rows if row["case"] == name)
    case = case_named(name)
    found = forecast(case.config, case.degrees_value(), case.machine(device), stack=PEER_STACKS["torch"])
    assert found.peak_bytes == pytest.approx(measured, rel=0.05)


def test_the_host_of_megatron_takes_what_was_measured_over_plain_torch() -> None:
    rounds = json.loads((RESULTS / "megatron_host_h200.json").read_bytes())["layer_us"]
    for way, part in enumerate("FB"):
        measured = statistics.median(each["layers"][way] / each["plain torch"][way] for each in rounds)
        own, plain = (
            stack.block_host_s(Degrees(), part, reduces=False)
            for stack in (PEER_STACKS["megatron"], stack_named("megatron-2022"))
        )
        assert own / plain == pytest.approx(measured, rel=0.05)
