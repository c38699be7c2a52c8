"""The README is true: its Python runs, its commands exist, its links lead somewhere."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

TEXT = (ROOT / "README.md").read_text()


@pytest.mark.ranks
def test_python_of_the_readme_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert capsys.readouterr().out.splitlines()[-1].endswith("True")


def test_commands_of_the_readme_exist() -> None:
    from twofold.cli import commands

    assert set(re.findall(r"\| `twofold (\w+)` \|", TEXT)) == set(commands())
    targets = set(re.findall(r"^(\w+):.*## ", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"^make (\w+)", TEXT, flags=re.MULTILINE)) <= targets


def test_links_of_the_documents_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            assert target.startswith("http") or (document.parent / target).exists(), (document.name, target)


def anchors(page: Path) -> set[str]:
    """What `#` of a link may name: the headings outside blocks of code, as Markdown writes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def test_links_between_pages_name_headings_and_stay_in_the_site() -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        for target, heading in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
            assert not target.startswith(".."), (page.name, target)
            assert not heading or heading in anchors(page.parent / target if target else page), (page.name, heading)


def test_every_page_is_in_the_site() -> None:
    named = re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(named) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_the_reference_has_what_twofold_exports() -> None:
    import twofold

    named = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "reference.md").read_text(), flags=re.MULTILINE)
    places = {getattr(twofold, name): name for name in twofold.__all__}
    found = [getattr(importlib.import_module(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in named]
    assert sorted(places[thing] for thing in found) == sorted(twofold.__all__)


@pytest.mark.ranks
def test_commands_of_the_tour_run(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    from twofold.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    text = (ROOT / "docs" / "index.md").read_text()
    commands = [line.split()[1:] for line in text.splitlines() if line.startswith("    twofold ")]
    assert [command[0] for command in commands] == ["plan", "whatif", "run", "verify"]
    for command in commands:
        steps = ["--steps", "2"] if command[0] in ("run", "verify") else []
        if steps and "--steps" in command:
            command = command[: command.index("--steps")]  # the last option of the page
        # a CPU is slower than the H200 that the prediction is of, which `verify` reports as an outcome outside
        assert main([*command, *steps]) == 0, capfd.readouterr()
