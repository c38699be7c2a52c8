"""Plausible mistakes at the command line: each is one line with the way out, and nothing is written."""

from __future__ import annotations

import gzip
import json
import shlex
import warnings
from pathlib import Path

import pytest

from costmodels import Machine
from interop.statement import write_statement
from plans.degrees import Degrees
from plans.errors import TwofoldError
from plans.files import check_writable, replacing_all
from plans.model.mlp import mlp_graph
from plans.model.transformer import transformer_config
from plans.plan import save_plan
from search import search
from twofold.cli import _read, commands, main
from twofold.commands.examples import EXAMPLES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    config = transformer_config("llama-3-8b", num_layers=2)
    write_statement(folder / "a.degrees.json", config, Degrees(dp=2, global_batch=2), stack="twofold")
    machine = Machine.load("h200-x2")
    save_plan(search(mlp_graph([8, 8], 8), machine, num_devices=2).best, folder / "made.json")
    machine.save(folder / "machine.json")
    both = json.loads(Machine.load("leaf-spine-graph-x32").to_json())
    both["links"][0]["bandwidth_Bps"] *= 2
    (folder / "both.json").write_text(json.dumps(both))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for name, text in {
        "notes.txt": "buy milk\n", "empty.json": "", "list.json": "[1, 2]", "table.csv": "a,b\n1,2\n",
        "mine.html": "<p>",
        "study.toml": '[base]\nmodel = "gpt2"\n[axes]\ntpp = [1]\n', "package.json": '{"version": "1.0.0"}',
    }.items():  # fmt: skip
        (folder / name).write_text(text)
    return folder


PREDICT = "predict llama-3-8b --machine h200-x8"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "name a command: the commands are demo, plan"),
        ("pln gpt2", "unknown command 'pln'; did you mean plan?"),
        ("what-if a.degrees.json", "did you mean whatif?"),
        ("plan", "twofold plan needs a model (such as llama-3-8b) and --machine h100-sxm-x64"),
        ("plan gpt2", "needs --machine h100-sxm-x64"),
        ("plan --machine h200-x8", "needs a model (such as llama-3-8b)"),
        ("plan gpt2 --machine", "--machine needs a value, such as --machine h100-sxm-x64"),
        ("calibrate --nodes 2 --node 2 --out new.json", "--node must be 0 to 1 with --nodes 2, not 2"),
        ("plan gpt2 --machin h200-x8", "--machin is not an option of twofold plan; did you mean --machine?"),
        ("plan gpt2 medium --machine h200-x8", "'medium' is an unexpected argument for twofold plan"),
        ("plan gpt2 --machine h200x8", "machine 'h200x8' is not known; did you mean h200-x8"),
        ("plan gpt5 --machine h200-x8", "gpt5"),
        ("plan gpt2 --machine h200-x8 --for deepspeed", "deepspeed"),
        ("plan gpt2 --machine h200-x8 --devices 16", "16"),
        ("plan gpt2 --machine h200-x8 --memory lots", "--memory"),
        (
            "plan gpt2 --machine h200-x8 --out notes.txt",
            "was not written by twofold; name another file, or add --force",
        ),
        ("plan gpt2 --machine h200-x8 --out package.json", "was not written by twofold"),
        ("simulate made.json --machine machine.json --trace made.json", "--trace would replace the file of PLAN"),
        ("plan gpt2 --machine h200-x8 --report mine.html", "was not written by twofold"),
        ("plan gpt2 --machine h200-x8 --report out.pdf", "--report must end with .html or .htm, not out.pdf"),
        ("plan gpt2 --machine ''", "--machine is empty; give a value"),
        ("plan gpt2 -m h200-x8", "-m is not an option: options begin with two dashes; did you mean --machine?"),
        ("plan llama-3-8b --machine h200-x8 --lr -1", "--lr must be above 0, not -1"),
        ("plan gpt2 --machine h200-x8 --lr 0.1", "--lr is for models that are searched operator by operator"),
        ("plan gpt2 --machine h200-x8 --micro-batches 0", "--micro-batches must be at least 1, not 0"),
        ("plan gpt2 --machine h200-x8 --tp 0", "--tp must be at least 1, not 0"),
        ("plan meta-llama/Llama-3-8B --machine h200-x8", "download the config.json of the model and give its path"),
        ("demo --seed -1", "--seed must be at least 0, not -1"),
        ("demo --data nowhere", "nowhere: not a folder"),
        ("simulate a.degrees.json --machine h200-x8 --steps 1000000000", "--steps must be at most 10,000"),
        ("whatif a.degrees.json --machine h200-x8 --bandwidth", "--bandwidth needs a value, such as --bandwidth 0.5"),
        ("whatif a.degrees.json --machine h200-x8 --slow 1=2 --slow 2=2", "write all values after one --slow"),
        ("whatif a.degrees.json --machine h200-x8 --picture x.txt", "--picture must end with .svg, not x.txt"),
        (f"{PREDICT} --bandwidth 1e300", "--bandwidth must be at most 1e+06, not 1e+300"),
        ("simulate a.degrees.json --machine both.json", "`links` contradict `graph`"),
        ("train study.toml", "study.toml: unknown key `base`"),
        ("plan gpt2 --machine h200-x8 --schedule 1f2b", "1f2b"),
        ("predict --model llama-3-8b --machine h200-x8", "write the model alone, as in `twofold predict llama-3-70b`"),
        ("plan --model gpt2 --machine h200-x8", "write the model alone, as in `twofold plan llama-3-8b`"),
        (f"{PREDICT} --tp eight", "--tp eight: must be a whole number"),
        (
            "plan llama-3-8b --machine h200-x8 --sequence-parallel no",
            "--sequence-parallel no: must be False or True",
        ),
        (f"{PREDICT} --seq 1.5", "--seq 1.5: must be a whole number"),
        (f"{PREDICT} --tp 3", "the next valid tp is 4"),
        (f"{PREDICT} --tp 16", "16"),
        (f"{PREDICT} --global_bach 8", "did you mean --global-batch?"),
        (f"{PREDICT} --sequence-parallel true", "--sequence-parallel is a switch and takes no value"),
        (f"{PREDICT} --fused False", "write --no-fused"),
        (f"{PREDICT} --fused bogus", "--fused is a switch and takes no value; leave out 'bogus'"),
        (f"{PREDICT} --pp 2 --stage-layers 3,9", "--stage-layers 3,9: write the values with spaces between them"),
        ("simulate config.json --machine h200-x8", "config.json: not a plan file, it has no `version`"),
        ("simulate machine.json --machine h200-x8", "machine.json: a machine file, not a plan; name it with --machine"),
        ("predict gpt2 --machine config.json", "config.json: not a machine file, it has no `version`"),
        ("predict gpt2 --machine made.json", "made.json: a plan file, not a machine; name a machine such as"),
        (
            "plan gpt2 --machine h200-x8 --tp 2 --stages 2",
            "--stages is for models that are searched operator by operator; for a transformer, use --pp",
        ),
        ("plan model.py --machine h200-x8", "model.py: name the function that makes the model too, such as model.py:b"),
        (
            "plan torch.nn:Identity --machine h200-x8",
            "(module with its loss, example inputs), it returned a value of type Id",
        ),
        (f"{PREDICT} --stack megatrn", "did you mean megatron"),
        (f"{PREDICT} --recompute all", "recompute"),
        (f"{PREDICT} --zero 4", "zero"),
        (f"{PREDICT} --bandwidth 0.5 2", "predict takes one; use `twofold whatif` or `twofold study`"),
        (f"{PREDICT} --stack torch --execution eager", "execution is for twofold's executor"),
        ("simulate --machine h200-x8", "needs a plan (such as plan.json)"),
        ("simulate plan.jsn --machine h200-x8", "plan.jsn"),
        ("simulate empty.json --machine h200-x8", "empty.json"),
        ("simulate list.json --machine h200-x8", "list.json"),
        ("simulate a.degrees.json --machine h200-x1", "1"),
        ("simulate a.degrees.json --machine h200-x8 --steps 0", "--steps must be at least 1, not 0"),
        ("simulate a.degrees.json --machine h200-x8 --measured nowhere.json", "nowhere.json"),
        ("simulate a.degrees.json --machine h200-x8 --trace package.json", "was not written by twofold"),
        ("whatif a.degrees.json --machine h200-x8 --bandwidth half", "--bandwidth half: must be a number"),
        ("whatif a.degrees.json --machine h200-x8 --slow 3", "--slow 3"),
        ("whatif a.degrees.json --machine h200-x8 --slow 2/1=1.1", "share"),
        ("whatif a.degrees.json --machine h200-x8 --link IB:bandwidth=2", "its tiers are NVLink (0)"),
        (
            "whatif a.degrees.json --machine h200-x8 --checkpoint-every 100 --checkpoint-GBps 0",
            "--checkpoint-GBps must be above 0, not 0",
        ),
        ("study", "name a study file: twofold study STUDY.toml"),
        ("study nowhere.toml", "nowhere.toml"),
        ("study study.toml", "'tpp' is not an axis; did you mean 'tp'?"),
        ("study study.toml --backend ray", "backend 'ray' is not known; known are sequential, loky, dask"),
        ("validate table.csv", "table.csv"),
        ("run plan.txt", "plan.txt"),
        ("verify a.degrees.json", "twofold verify needs --model my_model.py:build"),
        ("train", "needs a job (such as job.toml)"),
        ("links", "twofold links needs traces (such as nccl_logs) and --machine h100-sxm-x16"),
        ("links notes.txt --machine h200-x8", "not a trace of torch's profiler (.json), a table of nccl-tests"),
        ("links nowhere --machine h200-x8", "cannot read the trace 'nowhere'"),
        ("links nowhere --machine h200-x8 --link IB:bandwidth=2", "its tiers are NVLink (0)"),
        ("links nowhere --machine h200-x8 --link 0:0-3:failed", "changes single links"),
        ("links nowhere --machine h200-x8 --top -1", "--top must be at least 1, not -1"),
        ("study study.toml --top 0", "--top must be at least 1, not 0"),
        ("study study.toml --report mine.html", "was not written by twofold"),
        (f"{PREDICT} --report mine.html", "was not written by twofold"),
        (f"{PREDICT} --layers 0", "--layers must be at least 1, not 0"),
        (f"{PREDICT} --dp 8 --global-batch 7", "the next valid batch is 8"),
        (f"{PREDICT} --compute -1", "--compute must be above 0, not -1"),
        ("simulate a.degrees.json --recost --machine h200-x8 --trace t.json", "--trace is not for --recost"),
        ("compare a.degrees.json --machine h200-x8", "compare takes 2 to 6 plan files, not 1"),
        ("serve .", "no report in '.'; commands write one with --report FOLDER/NAME.html"),
        ("run made.json --devices 3", "--devices is for scripts; omit it for a plan"),
        ("run made.json --seed -1", "--seed must be at least 0, not -1"),
        ("run made.json --dilate 10", "dilate stretches emulated times: add emulate (--emulate MACHINE)"),
        ("run made.json --emulate h200-x2 --dilate nan", "--dilate must be a finite number, not nan"),
        ("run made.json --emulate h200-x2 --dilate 0", "--dilate must be above 0, not 0"),
        ("run made.json --model notes.txt", "'notes.txt' must be package.module:function or file.py:function"),
        ("verify made.json --model gone.py:build", "there is no file 'gone.py'"),
        ("export notes.txt weights.bin", "'notes.txt' is not a checkpoint; give its folder"),
        ("--completion fish", "--completion needs a shell, bash, zsh or tcsh"),
    ],
)
def test_a_mistake_is_one_line_with_the_way_out(
    line: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert main(shlex.split(line)) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and said.err.count("\n") == 1 and message in said.err
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("command", EXAMPLES)
def test_examples_of_the_help_can_be_read_and_it_fits_a_screen(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(EXAMPLES) == set(commands())
    for example in EXAMPLES[command]:
        name, *rest = shlex.split(example)
        assert name == "twofold" and isinstance(_read(rest), commands()[command])
    assert main([command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    for option in (
        "--json",
        *(word for example in EXAMPLES[command] for word in shlex.split(example) if word[0] == "-"),
    ):
        assert any(option in line for line in lines)


def test_completion_knows_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--completion", "bash"]) == 0
    assert "--global-batch" in capsys.readouterr().out


def test_own_files_are_replaced_and_others_are_not(tmp_path: Path) -> None:
    for name, begin in (("plan.json", b'{\n "version": 1,\n "graph"'), ("report.html", b"<html> made by twofold")):
        (tmp_path / name).write_bytes(begin)
        check_writable(tmp_path / name)
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress(b'{"otherData": {"twofold_trace": 2}}'))
    check_writable(tmp_path / "trace.json.gz")
    other = tmp_path / "other.json.gz"
    other.write_bytes(gzip.compress(b'{"traceEvents": []}'))
    with pytest.raises(TwofoldError, match=r"was not written by twofold; name another file, or add --force"):
        check_writable(other)
    with replacing_all():
        check_writable(other)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model.py", "from torch import nn\nimport twofold as tf\n"),
        ("notes.md", "# How we use twofold\n"),
        ("study.toml", "# twofold study\nkey = 1\n"),
        ("notebook.ipynb", '{"cells": [{"source": ["import twofold as tf"]}], "nbformat": 4}'),
        ("launch.sh", "#!/bin/sh\ntwofold run plan.json # prints step_s\n"),
    ],
)
def test_files_that_mention_twofold_are_not_its_own(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TwofoldError, match="was not written by twofold"):
        check_writable(tmp_path / name)


def test_tables_of_a_study_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "points.csv").write_text("point,tp,step_s\n0,8,1.5\n")
    check_writable(tmp_path / "points.csv")


def test_a_warning_is_one_line_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def warn(*_: object) -> int:
        print(warnings.formatwarning("not split", UserWarning, "a.py", 3), end="")
        return 0

    monkeypatch.setattr("twofold.cli._run", warn)
    assert main(["demo"]) == 0
    assert capsys.readouterr().out == "warning: not split\n"
    assert warnings.formatwarning("not split", UserWarning, "a.py", 3).startswith("a.py:3: UserWarning")
