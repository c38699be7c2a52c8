"""The pages of docs/ are true: their Python and their studies run, their files are read, their commands exist."""

import json
import re
import shlex
from pathlib import Path

import msgspec
import pytest

from costmodels.machine.links import Graph
from executor.launch.train_job import load_training_job
from interop import megatron, torchtitan
from tests import ROOT
from twofold.cli import commands, main

PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
RUN_ELSEWHERE = {"extensions.md"}  # tests/repository/test_extensions.py installs it


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page], re.DOTALL | re.MULTILINE)


@pytest.fixture
def parsing_only(monkeypatch):
    """Commands are read and do nothing."""
    for command in commands().values():
        monkeypatch.setattr(command, "run", lambda command, console: ({}, True))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python") and page not in RUN_ELSEWHERE])
def test_python_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in blocks(page, "python"):
        exec(code, names)
        printed = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
        assert capsys.readouterr().out.splitlines() == printed


@pytest.mark.parametrize("devices", [1024, 98304])
def test_studies_of_the_page_answer(devices, tmp_path, capsys):
    answers = []
    for number, text in enumerate(text for text in blocks("studies.md", "toml") if "together" not in text):
        file = tmp_path / f"{number}.toml"
        for small, large in (("x1024", f"x{devices}"), ("dp = 16", f"dp = {devices // 64}"), ("= 512", f"= {devices}")):
            assert small in text
            text = text.replace(small, large)
        file.write_text(text)
        assert main(["study", str(file), "--json", "--backend", "sequential"]) == 0
        answers.append(json.loads(capsys.readouterr().out)["points"])
    upgrades, spares = answers
    unchanged, *changed = [point["step_s"] for point in upgrades]
    assert len(changed) == 4 and all(step_s <= unchanged for step_s in changed) and min(changed) < 0.99 * unchanged
    goodput = {point["spares"]: point["goodput"] for point in spares}
    assert sorted(goodput) == [0, 1, 2, 4, 8]
    assert all(goodput[few] < goodput[more] for few, more in ((0, 1), (1, 2), (2, 4), (4, 8)))


def test_a_study_of_the_page_with_axes_that_go_together(tmp_path, capsys):
    (text,) = (text for text in blocks("studies.md", "toml") if "together" in text)
    (tmp_path / "weak.toml").write_text(text)
    assert main(["study", str(tmp_path / "weak.toml"), "--json", "--backend", "sequential"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert len(points) == 6
    for machine in ("h100-sxm-x64", "h200-x64"):
        rates = [each["tokens_per_s"] / each["devices"] for each in points if each["machine"] == machine]
        assert rates == sorted(rates, reverse=True) and rates[-1] > 0.9 * rates[0]


def test_words_of_other_trainers_are_those_that_are_written(parsing_only):
    rows = re.findall(r"^\| `(--.*?)` \| (.*?) \| (.*?) \|$", PAGES["other-trainers.md"], re.MULTILINE)
    known = "".join(Path(module.__file__).read_text() for module in (megatron, torchtitan))
    assert len(rows) == 17
    for ours, flags, keys in rows:
        assert main(["plan", "llama-3-8b", "--machine", "h200-x8", *ours.split()]) == 0
        for word in re.findall(r"--[a-z-]+|\b[a-z]+_[a-z_]+", f"{flags} {keys}"):
            assert word in known, word


def test_files_of_the_pages_are_read(tmp_path):
    (tmp_path / "job.toml").write_text("".join(blocks("training.md", "toml")))  # the job, and a section of it
    job = load_training_job(tmp_path / "job.toml")
    assert (job.steps, job.elastic.least_nodes) == (1000, 1)
    (links,) = blocks("networks.md", "json")
    assert len(msgspec.convert(json.loads(links)["graph"], Graph).wires) == 2


def test_commands_of_the_pages_have_these_options(parsing_only, capsys):
    lines = [
        line for text in PAGES.values() for line in re.findall(r"^(?: {4}|\$ )(?:python -m )?twofold (.*)$", text, re.M)
    ]
    assert len(lines) > 20
    for line in lines:
        assert main(shlex.split(line, comments=True)) == 0, (line, capsys.readouterr().err)
