"""`--for`: only what a program can run is searched, and its launch states the winner in words that the program has."""

import ast
import importlib.metadata
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import tyro
from torch.distributed.run import get_args_parser
from torchtitan.config.configs import CompileConfig, ParallelismConfig, TrainingConfig

from costmodels import Machine
from interop.accelerate import fsdp2_words
from interop.megatron import megatron_flags
from interop.software import software_named, software_names
from interop.statement import read_statement
from interop.torchtitan import torchtitan_toml
from plans.degrees.rules import broken
from plans.errors import TwofoldError
from plans.model.transformer import sizes_of, transformer_config
from search.devices import Pins, Problem, solve
from search.devices.space import enumerate_degrees
from simulator.stacks import stack_named
from tests import ROOT
from twofold.cli import main

MACHINE = Machine.load("h100-sxm-x8")
WRITERS = {"torchtitan@0.2.2": torchtitan_toml, "megatron": megatron_flags, "fsdp2": lambda *it: fsdp2_words(*it, 8)}
OURS = [name for name in software_names() if name != "twofold"]


def problem(name, config, restricted=True, **values):
    software = software_named(name)
    asked = {"config": config, "machine": MACHINE, "num_devices": 8, "global_batch": 16} | values
    return Problem(stack=stack_named(software.stack), rules=software.rules if restricted else (), **asked)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("pins", [{"micro_batch": 2}, {"pp": 2, "dp": 2, "schedule": "interleaved_1f1b"}])
def test_the_space_is_all_that_can_be_stated_and_nothing_else(name, pins):
    config = transformer_config("llama-3-8b", num_layers=6, seq=2048)

    def is_stated(degrees):
        try:
            WRITERS[name](config, degrees)
        except TwofoldError:
            return False
        return True

    whole = enumerate_degrees(problem(name, config, restricted=False, pins=Pins(**pins)))
    expected = {str(each) for each in whole if is_stated(each)}
    if name == "fsdp2" and "pp" in pins:
        assert not expected
        with pytest.raises(TwofoldError, match="fully_shard alone is data parallelism; plan with --pp 1"):
            problem(name, config, pins=Pins(**pins))
        return
    found = [str(each) for each in enumerate_degrees(problem(name, config, pins=Pins(**pins)))]
    assert set(found) == expected and len(found) == len(expected) > 3


@pytest.mark.parametrize("name", ["megatron", "torchtitan@0.2.2"])
def test_the_search_finds_the_best_of_the_space(name):
    config = transformer_config("llama-3-8b", num_layers=4, seq=2048)
    asked = problem(name, config, num_devices=4, global_batch=8, pins=Pins(recompute="none", cp=1))
    every = (each for each in enumerate_degrees(asked))
    from simulator.forecast import forecast

    seen = (forecast(config, each, MACHINE, stack=asked.stack) for each in every)
    best = min(each.step_s for each in seen if each.peak_bytes <= asked.limit_bytes)
    assert solve(asked).best.forecast.step_s == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("name", OURS)
def test_a_plan_comes_back_from_its_launch_with_the_same_forecast(name, tmp_path, capsys):
    asked = ["plan", "llama-3-8b", "--machine", "h100-sxm-x16", "--global-batch", "32", "--seq", "4096"]
    pins = ["--micro-batch", "1", "--recompute", "full"] + ([] if name.startswith("fsdp2") else ["--pp", "2"])
    assert main([*asked, *pins, "--for", name, "--out", str(tmp_path / "plan.json"), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    script = next(file for file in made["files"] if file.endswith((".sh", ".toml")))
    assert Path(script).read_text() == made["launch"]
    stack = [] if script.endswith(".sh") else ["--stack", software_named(name).stack]
    read = ["simulate", script, "--recost", "--model", "llama-3-8b", "--machine", "h100-sxm-x16", "--json", *stack]
    assert main(read) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == made["best"]["step_s"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--for", "torchtian"], "did you mean torchtitan"),
        (["--for", "torchtitan", "--stack", "megatron"], "--stack megatron: torchtitan does not run as that software"),
        (["--for", "fsdp2", "--stack", "torch-compiled"], "torch-compile"),
        (["--for", "torchtitan@0.1.0"], "version 0.3.0 and 0.2.2"),
        (["--for", "torchtitan", "--layers", "4"], "no configuration of llama-3-8b with 4 layers"),
        (["--for", "megatron", "--schedule", "gpipe"], "plan with --schedule 1f1b"),
        (["--for", "fsdp2", "--tp", "2"], "--tp 1"),
        (["--for", "torchtitan", "--recompute", "selective"], "selective_op or full"),
    ],
)
def test_unrunnable_degrees_are_refused_before_the_search(words, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "llama-3-8b", "--machine", "h100-sxm-x8", *words]) == 2
    assert message in capsys.readouterr().err


# -- the words of each program -----------------------------------------------------------------------------------------

MODELS = ["llama-3-8b", "gpt2", "mixtral-8x7b", "deepseek-moe-16b"]


def launches(name: str) -> Iterator[str]:
    """Of every model and many layouts."""
    software = software_named(name)
    for model in MODELS:
        config = replace(transformer_config(model, seq=1024), tied=False)
        try:
            if software.check_model is not None:
                software.check_model(config)
        except TwofoldError:
            continue
        for number, each in enumerate(enumerate_degrees(problem(name, config, pins=Pins(micro_batch=1)))):
            if number % 97 == 0:
                yield software.launch(config, each, 8)


def words_of(name: str) -> Iterator[list[str]]:
    """The words of every launch without its comments."""
    for script in launches(name):
        yield shlex.split(script.replace("\\\n", " "), comments=True)


def source_of(distribution: str, file: str) -> str:
    """A file of a package that is installed in the version of tests/programs.txt."""
    package = importlib.metadata.distribution(distribution)
    assert f"{distribution}=={package.version}\n" in (ROOT / "tests" / "programs.txt").read_text()
    return Path(package.locate_file(file)).read_text()


def fields_of(source: str) -> set[str]:
    """The annotated names in the classes of a Python file."""
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    return {ast.unparse(line.target) for node in classes for line in node.body if isinstance(line, ast.AnnAssign)}


TORCHRUN = {option for action in get_args_parser()._actions for option in action.option_strings}


@dataclass
class Titan:
    """The settings of torchtitan's trainer that a launch states."""

    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)


def test_torchtitan_reads_every_launch():
    recomputes = source_of("torchtitan", "torchtitan/distributed/activation_checkpoint.py")
    models = source_of("torchtitan", "torchtitan/models/llama3/config_registry.py")
    known, seen = set(), set()
    for words in words_of("torchtitan@0.3.0"):
        new = {re.sub(r"\d+", "1", word) for word in words}
        if new <= known:
            continue  # every word is in a launch that was read, up to its numbers
        known |= new
        at = words.index("--config")
        command, (module, model), settings = words[:at], (words[at - 1], words[at + 1]), words[at + 2 :]
        assert {word for word in command if word.startswith("--")} <= TORCHRUN | {"--module"}
        assert module == "llama3" and f"def {model}(" in models
        read = tyro.cli(Titan, args=settings[:-1])
        assert read.training.disable_cuda_graphs and not read.compile.enable and read.training.global_batch_size == 16
        mode = settings[-1].removeprefix("activation_checkpoint:")
        assert f'tyro.conf.subcommand("{mode}")' in recomputes
        seen.add((mode, read.parallelism.pipeline_parallel_schedule, read.parallelism.fsdp_reshard_after_forward))
    modes, schedules, gathers = map(set, zip(*seen, strict=True))
    assert modes == {"none", "selective", "full"} and len(schedules) > 4 and gathers == {"always", "never", "default"}


ARGUMENTS = {
    "--disable-bias-linear", "--global-batch-size", "--group-query-attention", "--make-vocab-size-divisible-by",
    "--max-position-embeddings", "--micro-batch-size", "--mock-data", "--norm-epsilon",
    "--num-layers-per-virtual-pipeline-stage", "--num-experts", "--position-embedding-type",
    "--seq-length", "--swiglu", "--tokenizer-type", "--train-iters",
    "--untie-embeddings-and-output-weights", "--use-tp-pp-dp-mapping", "--vocab-size",
}  # fmt: skip
"""Flags of Megatron-LM's megatron/training/arguments.py, which no package contains, as of commit 000c4ac2 (2025); of
these --disable-bias-linear, --mock-data, --tokenizer-type and --vocab-size are from memory."""


def test_every_flag_of_megatron_is_a_field_of_its_core_or_in_its_list_of_arguments():
    core = set().union(*(
        fields_of(source_of("megatron-core", f"megatron/core/{file}.py"))
        for file in ("transformer/transformer_config", "model_parallel_config", "optimizer/optimizer_config",
                     "distributed/distributed_data_parallel_config")
    ))  # fmt: skip
    used = {word for words in words_of("megatron") for word in words if re.match(r"--[a-z]", word)} - TORCHRUN
    assert {flag for flag in used if flag[2:].replace("-", "_") not in core} == ARGUMENTS & used
    assert len(used - ARGUMENTS) > 20


def test_accelerate_has_every_flag_of_its_launch():
    """What follows the script are arguments of transformers' examples/pytorch/language-modeling/run_clm.py."""
    known = set(re.findall(r'"(--[a-z_0-9]+)"', source_of("accelerate", "accelerate/commands/launch.py")))
    used = {word for words in words_of("fsdp2") for word in words[: words.index("run_clm.py")] if word[:2] == "--"}
    assert len(used) > 6 and used <= known


def test_a_launch_of_torchtitan_is_read_whatever_way_its_values_are_written(tmp_path):
    config = transformer_config("llama-3-8b")
    degrees = next(iter(enumerate_degrees(problem("torchtitan", config, pins=Pins(micro_batch=1, pp=2, tp=2)))))
    script = tmp_path / "run.sh"
    script.write_text(software_named("torchtitan").launch(config, degrees, 8))
    first = read_statement(script).degrees(num_layers=32)
    script.write_text(re.sub(r"(--[a-z]+\.[a-z_]+) (\S+)", r"\1=\2", script.read_text()))
    assert read_statement(script).degrees(num_layers=32) == first
    assert not list(broken(software_named("torchtitan").rules, {**degrees.values, "model": sizes_of(config)}))
