"""`--for`: only what a program can run is searched, and its launch states the winner in words that the program has."""

import ast
import importlib.metadata
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

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
from simulator.forecast import stack_named
from twofold.cli import main

MACHINE = Machine.load("h100-sxm-x8")
LISTS = json.loads((Path(__file__).parent / "data" / "software_flags.json").read_text())
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
        (["--for", "torchtitan@0.1.0"], "version 0.3.0 and 0.2.2"),
        (["--for", "torchtitan", "--layers", "4"], "no configuration of llama-3-8b with 4 layers"),
        (["--for", "megatron", "--schedule", "gpipe"], "plan with --schedule 1f1b"),
        (["--for", "fsdp2", "--tp", "2"], "--tp 1"),
        (["--for", "torchtitan", "--recompute", "selective"], "selective_op or full"),
    ],
)
def test_what_a_program_cannot_run_is_told_before_the_search(words, message, capsys, monkeypatch, tmp_path):
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


@pytest.mark.parametrize("name", ["megatron", "torchtitan@0.3.0", "fsdp2"])
def test_every_flag_of_a_launch_is_one_of_the_program(name):
    known = set(LISTS[name]["flags"])
    used = {
        re.split(r"[ =]", word)[0]
        for script in launches(name)
        for word in shlex.split(script, comments=True)
        if re.match(r"--[a-z]|activation", word)
    }
    assert len(used) > 8 and used <= known, used - known


def fields_of(source: str, *classes: str) -> Iterator[tuple[str, str]]:
    """The annotated names in classes of a Python file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name in classes:
            for line in node.body:
                if isinstance(line, ast.AnnAssign):
                    yield node.name, ast.unparse(line.target)


def test_the_list_of_torchtitan_is_that_of_the_package_where_it_is_installed():
    """Without it the dated list of tests/data stands alone; its text says where it was read."""
    sections = {"TrainingConfig": "training", "ParallelismConfig": "parallelism", "CompileConfig": "compile"}
    listed = {flag for flag in LISTS["torchtitan@0.3.0"]["flags"] if flag.split(".")[0][2:] in sections.values()}
    assert len(listed) > 30 and "read" in LISTS["torchtitan@0.3.0"]
    try:
        package = importlib.metadata.distribution("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        return
    source = Path(package.locate_file("torchtitan/config/configs.py")).read_text()
    own = {f"--{sections[kind]}.{name}" for kind, name in fields_of(source, *sections)}
    assert package.version == "0.3.0" and own == {flag for flag in listed if ".no-" not in flag}


def test_a_launch_of_torchtitan_is_read_whatever_way_its_values_are_written(tmp_path):
    config = transformer_config("llama-3-8b")
    degrees = next(iter(enumerate_degrees(problem("torchtitan", config, pins=Pins(micro_batch=1, pp=2, tp=2)))))
    script = tmp_path / "run.sh"
    script.write_text(software_named("torchtitan").launch(config, degrees, 8))
    first = read_statement(script).degrees(num_layers=32)
    script.write_text(re.sub(r"(--[a-z]+\.[a-z_]+) (\S+)", r"\1=\2", script.read_text()))
    assert read_statement(script).degrees(num_layers=32) == first
    assert not list(broken(software_named("torchtitan").rules, {**degrees.values, "model": sizes_of(config)}))
