"""Configurations in other programs' words, and `twofold plan` and `simulate --recost` on the command line."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from interop.megatron import megatron_flags
from interop.software import software_named
from interop.statement import read_statement, write_statement
from interop.torchtitan import torchtitan_toml
from plans.degrees import Degrees
from plans.errors import TwofoldError
from plans.model.transformer import TransformerConfig, transformer_config
from plans.optimizer import Optimizer
from plans.plan import load_plan
from twofold.cli import main

CONFIG = transformer_config("llama-3-8b")
MIXTURE = transformer_config("mixtral-8x7b", seq=4096)
FINE = transformer_config("deepseek-moe-16b")
"""Its first block has no experts; two are shared."""


def megatron_launch(config: Any, stated: Degrees) -> str:
    script = software_named("megatron").launch(config, stated, 8)
    assert script is not None
    return script


def degrees(*, zero: int = 1, **values: Any) -> Degrees:
    given = {"dp": 4, "tp": 2, "pp": 2, "micro_batch": 2, "global_batch": 32, "sequence_parallel": True} | values
    optimizer = Optimizer(
        kind="adamw", settings={"lr": 1e-4}, parallel_level=zero, gradient_dtype="float32", master_dtype="float32"
    )
    return Degrees(**given, optimizer=optimizer)


@pytest.mark.parametrize(
    "stated",
    [
        degrees(),
        degrees(zero=0, tp=1, sequence_parallel=False, recompute="selective"),
        degrees(schedule="interleaved_1f1b", virtual=4, recompute="full"),
        degrees(pp=1, zero=3, cp=2),
        degrees(recompute="full", recompute_layers=5),
        degrees(order=("tp", "cp", "pp", "dp")),
        degrees(schedule="interleaved_1f1b", virtual=4, recompute="full", recompute_layers=3),
        degrees(pp=4, layers=(7, 9, 9, 7)),
        degrees(pp=4, schedule="interleaved_1f1b", virtual=2, layers=(3, 4, 4, 5, 4, 4, 4, 4)),
    ],
)
def test_flags_of_megatron_come_back_as_they_went(stated: Degrees, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    words = " ".join(megatron_flags(CONFIG, stated))
    script.write_text(f"# a job\ntorchrun pretrain_gpt.py \\\n  {words} --world-size {stated.num_ranks}\n")
    found = read_statement(script)
    assert found.seq == 8192
    assert found.degrees() == stated and not found.unread
    script.write_text(megatron_launch(CONFIG, stated))
    assert read_statement(script).degrees() == stated


@pytest.mark.parametrize("config", [MIXTURE, FINE], ids=lambda each: each.name)
@pytest.mark.parametrize(
    "stated",
    [
        degrees(ep=4),
        degrees(ep=2, tp=1, sequence_parallel=False, zero=0),
        degrees(ep=4, pp=1, zero=3),
        degrees(schedule="interleaved_1f1b", virtual=2, pp=2, ep=2),
    ],
)
def test_a_mixture_in_megatrons_flags_comes_back_as_it_went(
    config: TransformerConfig, stated: Degrees, tmp_path: Path
) -> None:
    script = tmp_path / "train.sh"
    script.write_text(megatron_launch(config, stated))
    found = read_statement(script)
    assert found.degrees() == stated and not found.unread and not found.assumed
    assert found.model(config) == config
    flags = megatron_flags(config, stated)
    assert ("--expert-model-parallel-size", str(stated.ep)) in itertools.pairwise(flags)
    assert "--moe-grouped-gemm" in flags and ("--moe-layer-freq" in flags) is (config is FINE)
    with pytest.raises(TwofoldError, match="name another"):
        found.model(FINE if config is MIXTURE else MIXTURE)
    with pytest.raises(TwofoldError, match="has no experts"):
        found.model(CONFIG)


@pytest.mark.parametrize("config", [MIXTURE, FINE], ids=lambda each: each.name)
@pytest.mark.parametrize(
    "stated",
    [
        degrees(ep=4, zero=3),
        degrees(ep=2, tp=1, pp=1, zero=2, sequence_parallel=False),
        degrees(ep=1, zero=3),
        degrees(ep=4, zero=3, schedule="zb_v", virtual=2),
    ],
)
def test_a_mixture_in_torchtitans_settings_comes_back_as_it_went(
    config: TransformerConfig, stated: Degrees, tmp_path: Path
) -> None:
    file = tmp_path / "train.toml"
    file.write_text(torchtitan_toml(config, stated))
    found = read_statement(file)
    assert found.degrees(num_layers=config.num_layers).ep == stated.ep
    assert found.degrees(num_layers=config.num_layers) == stated and not found.unread
    assert bool(found.assumed) is (stated.ep > 1)


BATCH = "--micro-batch-size 2 --global-batch-size 32 --world-size 8 "


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--expert-model-parallel-size 2", "without --num-experts"),
        ("--num-experts 8 --expert-tensor-parallel-size 2", "not the tensor-parallel degree"),
        ("--num-experts 8 --moe-token-dispatcher-type allgather", "only alltoall"),
        ("--num-experts 8 --moe-layer-freq 2", "only first layers"),
        ("--num-experts 8 --moe-layer-freq ([0]*1+[1]*5) --num-layers 8", "not for 8 layers"),
        ("--num-experts 8 --moe-expert-capacity-factor none", "not a number above 0"),
        ("--use-tp-pp-dp-mapping --num-experts 8 --expert-model-parallel-size 2", "inside the pipeline"),
        ("--some-new-parallel-size 2", "some-new-parallel-size"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 4", "or block"),
    ],
)
def test_flags_that_change_the_step_otherwise_are_refused(flags: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(BATCH + flags)
    with pytest.raises(TwofoldError, match=message):
        read_statement(tmp_path / "a.sh")


def test_differences_of_the_forecast_from_the_file_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(BATCH + "--num-experts 8 --moe-ffn-hidden-size 14336 --moe-router-group-topk 2")
    found = read_statement(tmp_path / "a.sh")
    assert len(found.assumed) == 2 and "drop no token" in found.assumed[0]
    model = found.model(MIXTURE)
    assert model.experts is not None and model.experts.capacity_factor == 1.0


@pytest.mark.parametrize(
    "layout",
    ["Et*7|t*9|t*9|t*7L", "Ettttttt|(" + 9 * "t" + "|)*2,t*7,L", "E,t*7,|,t*9,|,t*9,|,t*7,L"],
)
def test_layouts_of_megatron_may_be_short(layout: str, tmp_path: Path) -> None:
    flags = "--micro-batch-size 2 --global-batch-size 32 --pipeline-model-parallel-size 4 --num-layers 32 "
    (tmp_path / "a.sh").write_text(flags + f"--pipeline-model-parallel-layout '{layout}' --world-size 16")
    assert read_statement(tmp_path / "a.sh").degrees().layers == (7, 9, 9, 7)


@pytest.mark.parametrize(("count", "read"), [(15, 15), (16, None), (20, None)])
def test_as_many_recomputed_blocks_as_there_are_is_all_of_them(count: int, read: int | None, tmp_path: Path) -> None:
    flags = "--pipeline-model-parallel-size 2 --num-layers 32 --recompute-granularity full --recompute-method block "
    (tmp_path / "a.sh").write_text(f"{BATCH}{flags}--recompute-num-layers {count}")
    found = read_statement(tmp_path / "a.sh").degrees()
    assert (found.recompute, found.recompute_layers) == ("full", read)


def test_processes_may_come_from_torchrun_and_other_flags_are_listed(tmp_path: Path) -> None:
    words = " ".join(megatron_flags(CONFIG, degrees()))
    (tmp_path / "a.sh").write_text(f"torchrun --nnodes 2 --nproc_per_node=8 pretrain_gpt.py {words} --clip-grad 1.0")
    found = read_statement(tmp_path / "a.sh")
    assert found.degrees() == degrees() and found.unread == ("--clip-grad",)


@pytest.mark.parametrize(
    "stated",
    [
        degrees(zero=3, schedule="zb_v", virtual=2, recompute="full"),
        degrees(zero=2),
        degrees(zero=0, tp=1, pp=1, sequence_parallel=False, recompute="selective_op"),
        degrees(zero=3, pp=1, cp=2),
        degrees(zero=2, dp=1, pp=1, cp=2),
        degrees(zero=3, schedule="interleaved_1f1b", virtual=4),
        degrees(zero=3, pp=4, layers=(7, 9, 9, 7)),
        degrees(zero=3, pp=4, layers=(8, 9, 8, 7)),
        degrees(zero=3, schedule="zb_v", virtual=2, layers=(9, 9, 8, 6)),
    ],
)
def test_settings_of_torchtitan_come_back_as_they_went(stated: Degrees, tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text(torchtitan_toml(CONFIG, stated))
    assert read_statement(file).degrees() == stated


REPLICAS = "data_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 1\n"


def titan(tmp_path: Path, parallelism: str, training: str = "local_batch_size = 8", more: str = "") -> Path:
    file = tmp_path / "train.toml"
    mode = more or '[activation_checkpoint]\nmode = "none"'
    file.write_text(f"[training]\n{training}\n[parallelism]\n{parallelism}\n{mode}\n")
    return file


def test_stages_are_those_that_torchtitan_makes_of_the_model_named(tmp_path: Path) -> None:
    """One layer fewer on the first and the last unless stated; what does not divide goes first."""
    stages = "data_parallel_shard_degree = 1\npipeline_parallel_degree = 4"
    found = read_statement(titan(tmp_path, stages))
    assert found.degrees(num_layers=32).layers == (8, 9, 8, 7)
    assert found.degrees(num_layers=30).layers == (7, 8, 8, 7)
    with pytest.raises(TwofoldError, match="name the model"):
        found.degrees()
    per_stage = stages + '\npipeline_parallel_layers_per_stage = 3\npipeline_parallel_schedule = "Interleaved1F1B"'
    assert read_statement(titan(tmp_path, per_stage)).degrees(num_layers=32).virtual == 3


@pytest.mark.parametrize(
    ("parallelism", "training", "more", "message"),
    [
        (REPLICAS + "tensor_parallel_degree = 2", "", "", "refuses"),
        (REPLICAS + "context_parallel_degree = 2", "", "", "HSDP"),
        ("data_parallel_shard_degree = 2\nexpert_parallel_degree = 4", "", "", "does not divide the 2 ranks"),
        (
            "data_parallel_shard_degree = 2\ntensor_parallel_degree = 2\nexpert_parallel_degree = 2",
            "",
            "",
            "is not tensor_parallel_degree",
        ),
        ("data_parallel_shard_degree = 2\nsome_other_degree = 2", "", "", "some_other_degree"),
        ("data_parallel_shard_degree = 2.5", "", "", "2.5, not a whole number"),
        ("data_parallel_shard_degree = 2\ntensor_parallel_degree = 'two'", "", "", "not a whole number"),
        (
            "data_parallel_shard_degree = 2\npipeline_parallel_degree = 2",
            "global_batch_size = 64",
            "",
            "several passes",
        ),
        ("data_parallel_shard_degree = 2", "", "[activation_checkpoint]\nmode = 'selective'", "option '2'"),
        ("data_parallel_shard_degree = 2", "", "[profiling]", "selective_ac_option '2'"),
    ],
)
def test_settings_that_degrees_cannot_express_are_refused(
    parallelism: str, training: str, more: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(TwofoldError, match=message):
        read_statement(titan(tmp_path, parallelism, "local_batch_size = 8\n" + training, more))


def test_stages_that_torchtitan_refuses_are_refused(tmp_path: Path) -> None:
    stages = "data_parallel_shard_degree = 1\npipeline_parallel_degree = 4\npipeline_parallel_layers_per_stage = "
    for each, layers, message in ((4, 32, "cannot share out"), (5, 36, "1 stage per rank")):
        found = read_statement(titan(tmp_path, f"{stages}{each}"))
        with pytest.raises(TwofoldError, match=message):
            found.degrees(num_layers=layers)


def test_our_own_file_comes_back_as_it_went(tmp_path: Path) -> None:
    stated = degrees(schedule="zb_v", virtual=2, layers=(9, 8, 8, 7), recompute="selective", recompute_layers=2)
    stated = replace(stated, order=("pp", "tp", "dp", "cp"))
    found = read_statement(write_statement(tmp_path / "plan.degrees.json", CONFIG, stated, stack="megatron"))
    assert found.degrees() == stated and found.stack == "megatron"
    assert found.config is not None and found.config.num_parameters == CONFIG.num_parameters


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dp", None), ("foo", 3), ("zero", "a"), ("layers", ["a"]), ("layers", "12"), ("layers", [16, -1]),
        ("layers", []), ("schedule", 5), ("sequence_parallel", "yes"), ("order", 3), ("dp", "4"),
    ],
)  # fmt: skip
def test_degrees_that_are_missing_or_unknown_are_refused(name: str, value: Any, tmp_path: Path) -> None:
    file = write_statement(tmp_path / "plan.degrees.json", CONFIG, degrees(), stack="twofold")
    made = json.loads(file.read_text())
    if value is None:
        del made["degrees"][name]
    else:
        made["degrees"][name] = value
    file.write_text(json.dumps(made))
    with pytest.raises(TwofoldError, match=name):
        read_statement(file).degrees()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("stack", None, "missing: stack"), ("notes", "mine", "unknown: notes"), ("twofold_degrees", 1, "plan again"),
        ("stack", 3, "not a name"), ("degrees", 3, "states no degrees"), ("config", None, "missing: config"),
    ],
)  # fmt: skip
def test_a_file_of_ours_with_other_keys_is_refused(key: str, value: Any, message: str, tmp_path: Path) -> None:
    file = write_statement(tmp_path / "plan.degrees.json", CONFIG, degrees(), stack="twofold")
    made = json.loads(file.read_text())
    made[key] = value
    file.write_text(json.dumps({name: each for name, each in made.items() if each is not None}))
    with pytest.raises(TwofoldError, match=message):
        read_statement(file)


def test_uneven_layers_are_a_layout_of_megatron_and_fewer_on_the_last_stage_of_torchtitan() -> None:
    uneven = degrees(zero=3, layers=(17, 15))
    flags = megatron_flags(CONFIG, degrees(layers=(17, 15)))
    assert flags[flags.index("--pipeline-model-parallel-layout") + 1] == "E" + 17 * "t" + "|" + 15 * "t" + "L"
    assert "pipeline_parallel_last_stage_less_layers = 2" in torchtitan_toml(CONFIG, uneven)


@pytest.mark.parametrize(
    ("write", "stated", "message"),
    [
        (megatron_flags, degrees(schedule="zb_h1"), "no schedule 'zb_h1'"),
        (megatron_flags, degrees(recompute="selective_op"), "by operator"),
        (megatron_flags, degrees(zero=2), "only without pipeline"),
        (megatron_flags, degrees(recompute="selective", recompute_layers=2), "only as a whole"),
        (megatron_flags, degrees(order=("pp", "tp", "cp", "dp")), "order pp-tp-dp; plan with --order tp cp dp pp"),
        (megatron_flags, degrees(order=("tp", "cp", "pp", "dp"), ep=2), "experts shared out"),
        (torchtitan_toml, degrees(zero=3, order=("tp", "cp", "pp", "dp")), "order tp-pp-dp"),
        (torchtitan_toml, degrees(zero=3, recompute="full", recompute_layers=2), "every k-th"),
        (torchtitan_toml, degrees(), "level 1"),
        (torchtitan_toml, degrees(zero=0), "only without tensor"),
        (torchtitan_toml, degrees(zero=0, dp=1, tp=1, pp=1, cp=2, sequence_parallel=False), "context-parallel"),
        (torchtitan_toml, degrees(zero=3, sequence_parallel=False), "splits the sequence"),
        (torchtitan_toml, degrees(zero=3, recompute="selective"), "by operator"),
        (torchtitan_toml, degrees(zero=3, schedule="v_half", virtual=2), "no schedule 'v_half'"),
        (torchtitan_toml, degrees(zero=3, schedule="zb_v", virtual=2, layers=(9, 8, 7, 8)), "equal but for fewer"),
        (megatron_flags, degrees(ep=2, sequence_parallel=False), "where the sequence is split"),
        (torchtitan_toml, degrees(ep=2, zero=0, tp=1, pp=1, sequence_parallel=False), "that shard weights"),
    ],
)
def test_what_a_program_cannot_express_is_refused(write: Any, stated: Degrees, message: str) -> None:
    with pytest.raises(TwofoldError, match=message):
        write(CONFIG if stated.ep == 1 else MIXTURE, stated)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.sh", "python train.py", "no flags"),
        ("a.sh", "--micro-batch-size 1 --global-batch-size 8", "world-size"),
        ("a.sh", "--micro-batch-size 1 --global-batch-size 8 --world-size eight", "not a whole number"),
        ("a.sh", "--micro-batch-size 1 --global-batch-size 8 --world-size 8 --tensor-model-parallel-size 3", "divide"),
        ("a.sh", "--tensor-model-parallel-size '3", "cannot be read as a shell script"),
        (
            "a.sh",
            "--micro-batch-size 1 --global-batch-size 8 --world-size 8 --pipeline-model-parallel-layout Ettm|L",
            "at",
        ),
        ("a.sh", "--rampup-batch-size 8 8 100 --micro-batch-size 1 --global-batch-size 8 --world-size 8", "rampup"),
        (
            "a.sh",
            "torchrun pretrain_gpt.py --world-size '8",
            "a.sh cannot be read as a shell script: No closing quotation",
        ),
        ("a.sh", "accelerate launch --num_machines '1", "a.sh cannot be read as a shell script: No closing quotation"),
        (
            "a.sh",
            "python -m torchtitan.train --training.seq_len '8",
            "a.sh cannot be read as a shell script: No closing quotation",
        ),
        ("a.toml", "parallelism = 3 =", "not TOML"),
        ("a.toml", "[training]\nseq_len = 3", "parallelism"),
        ("a.json", "{}", "states no degrees"),
        ("a.json", '["placements"]', "not a JSON object"),
    ],
)
def test_files_that_state_nothing_are_refused(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TwofoldError, match=message):
        read_statement(tmp_path / name)


def test_plan_saves_what_simulate_costs_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, report = tmp_path / "plan.json", tmp_path / "report.html"
    asked = ["plan", "llama-3-8b", "--layers", "2", "--seq", "512", "--machine", "h100-sxm-x8", "--devices", "4"]
    pins = ["--global-batch", "8", "--cp", "1", "--recompute", "none", "--micro-batch", "1", "--tp", "2"]
    assert main([*asked, *pins, "--out", str(out), "--report", str(report), "--stack", "torch", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["complete"] and found["gap"] == 0 and found["best"]["tp"] == 2
    assert found["physics_bound_s"] <= found["lower_bound_s"] <= found["best"]["step_s"]
    assert load_plan(out).num_ranks == 4 and found["alternatives"]
    assert "not proven to be the next best" in report.read_text()
    assert "Alternatives: one degree changed" in report.read_text()
    assert main(["simulate", str(out), "--recost", "--machine", "h100-sxm-x8", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["step_s"] == pytest.approx(found["best"]["step_s"]) and again["fits"] and again["stack"] == "torch"
    assert main(["simulate", str(out), "--recost", "--machine", "h100-sxm-x8", "--stack", "twofold", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] != again["step_s"]
    larger = ["simulate", str(out), "--recost", "--machine", "h100-sxm-x8", "--global-batch", "16", "--json"]
    assert main(larger) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] > again["step_s"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "llama-4-9b", "--machine", "h100-sxm-x8"], "llama-4-9b"),
        (["plan", "llama-3-8b", "--machine", "h900-x8"], "h900-x8"),
        (["plan", "llama-3-8b", "--machine", "h100-sxm-x8", "--tp", "3"], "over tp 3"),
        (
            ["plan", "llama-3-8b", "--machine", "h100-sxm-x8", "--devices", "0"],
            "--devices must be at least 1, not 0",
        ),
        (
            ["plan", "llama-3-8b", "--machine", "h100-sxm-x8", "--simulate", "-1"],
            "--simulate must be at least 0, not -1",
        ),
        (["plan", "llama-3-8b", "--machine", "h100-sxm-x8", "--method", "magic"], "magic"),
        (["plan", "llama-3-8b", "--machine", "h100-sxm-x8", "--for", "alpa"], "alpa"),
        (
            ["plan", "llama-3-8b", "--machine", "h100-sxm-x8", "--method", "grid", "--tp", "2"],
            "chooses all degrees itself",
        ),
        (["plan", "mixtral-8x7b", "--machine", "h100-sxm-x8", "--cp", "2"], "but cp 2 splits them"),
        (["plan", "executor.networks:multiple_mix", "--machine", "h200-x8", "--tp", "2"], "--tp is for transformers"),
        (["plan", "llama-3-8b", "--machine", "h100-sxm-x8", "--global-batch", "1" + 30 * "0"], "16384 per device"),
        (["simulate", "nowhere.sh", "--recost", "--machine", "h100-sxm-x8"], "nowhere.sh"),
        (["simulate", "", "--recost", "--machine", "h100-sxm-x8"], "PLAN is empty; give a value"),
    ],
)
def test_bad_input_exits_with_2_and_one_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("error:") == 1 and message in error


@pytest.mark.parametrize("model", ["llama-3-8b", "executor.networks:multiple_mix"])
@pytest.mark.parametrize("out", ["/", ".", "file/plan.json"])
def test_a_plan_that_could_not_be_saved_is_refused_before_the_search(
    model: str, out: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def search(*_: Any, **__: Any) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr("search.devices.solve", search)
    monkeypatch.setattr("search.search", search)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("no folder")
    assert main(["plan", model, "--machine", "h100-sxm-x8" if ":" not in model else "h200-x8", "--out", out]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("tp", 10**17, "ranks; machine"), ("batch", 10**17, "product"), ("tp", 10**30, "2^63")],
)
def test_counts_that_no_machine_has_are_refused(
    name: str, value: int, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stated = write_statement(tmp_path / "plan.degrees.json", CONFIG, degrees(sequence_parallel=False), stack="twofold")
    made = json.loads(stated.read_text())
    if name == "batch":
        made["global_batch"] = value
    else:
        made["degrees"][name] = value
    stated.write_text(json.dumps(made))
    assert main(["simulate", str(stated), "--recost", "--machine", "h100-sxm-x64"]) == 2
    assert message in capsys.readouterr().err


def test_plan_simulates_the_listed_plans_and_prefers_the_simplest_of_equal_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", "llama-3-8b", "--layers", "2", "--seq", "512", "--machine", "h100-sxm-x8", "--devices", "2"]
    pins = ["--global-batch", "8", "--recompute", "none", "--tp", "1", "--out", str(tmp_path / "plan.json")]
    assert main([*asked, *pins, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    steps_s = [each["simulated_s"] for each in found["simulated"]]
    assert len(steps_s) == min(5, len(found["plans"])) > 1 and steps_s == sorted(steps_s)
    in_engine = {each["forecast_s"]: each["simulated_s"] for each in found["simulated"]}
    listed_s = [in_engine[each["step_s"]] for each in found["plans"][: len(steps_s)]]
    equal, others = listed_s[: found["num_equal"]], listed_s[found["num_equal"] :]
    assert max(equal) <= 1.01 * steps_s[0] < min(others, default=float("inf"))
    assert others == sorted(others)
    assert main([*asked, *pins, "--simulate", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["simulated"] == []
    assert main([*asked, *pins, "--simulate", "1"]) == 0
    assert "simulated" in capsys.readouterr().out


def test_precision_is_a_choice_where_the_machine_lacks_the_models_own(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = [
        "gpt2",
        "--machine",
        "v100-32gb-x8",
        "--dp",
        "8",
        "--micro-batch",
        "1",
        "--recompute",
        "none",
        "--zero",
        "1",
    ]
    assert main(["plan", *asked]) == 2 and "--precision" in capsys.readouterr().err
    assert main(["plan", *asked, "--precision", "fp16"]) == 2 and "float16" in capsys.readouterr().err
    asked += ["--precision", "float16", "--json"]
    assert main(["plan", *asked]) == 0
    planned = json.loads(capsys.readouterr().out)["best"]["step_s"]
    assert main(["predict", *asked]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == planned
