"""`twofold plan` builds a module on the meta device, where weights take no memory."""

import pytest
import torch

from twofold.cli import main
from twofold.commands.models import given_model

FACTORY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        {extra}
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
        self.head = nn.Linear(width, 8)

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.head(self.layers(x).relu()), labels)

def make():
    return Net({width}), (torch.randn(16, {width}), torch.zeros(16, dtype=torch.int64))
"""


def planned(folder, capsys, extra):
    """The bytes of the plan, and what was said."""
    file, out = folder / "net.py", folder / "plan.json"
    file.write_text(FACTORY.format(extra=extra, width=64))
    assert main(["plan", f"{file}:make", "--machine", "h200-x2", "--out", str(out)]) == 0
    output = capsys.readouterr()
    return out.read_bytes(), output.out + output.err


def test_a_module_larger_than_any_memory_is_captured_and_planned(tmp_path, capsys):
    """Four layers of 2**18 x 2**18 are 1 TiB: built with its weights this test would be killed."""
    file = tmp_path / "net.py"
    file.write_text(FACTORY.format(extra="", width=2**18))
    model = given_model(f"{file}:make")
    assert model.remark is None and model.graph is not None
    assert sum(each.size_bytes for each in model.graph.parameters) > 2**40


def test_the_plan_is_that_of_the_module_with_its_weights(tmp_path, capsys):
    plain, silent = planned(tmp_path, capsys, "")
    read, told = planned(tmp_path, capsys, "self.scale = torch.ones(2).sum().item()")
    assert "built with its weights in memory" in told and "in memory" not in silent
    assert read == plain and not torch.ones(1).is_meta


def test_a_model_that_is_not_of_the_plan_is_refused_before_ranks_start(tmp_path, capsys, monkeypatch):
    planned(tmp_path, capsys, "")
    (tmp_path / "wide.py").write_text(FACTORY.format(extra="", width=128))
    (tmp_path / "less.py").write_text(FACTORY.format(extra="", width=64).replace("range(4)", "range(2)"))
    (tmp_path / "asks.py").write_text("def make(width):\n    pass\n")
    (tmp_path / "job.toml").write_text('plan = "plan.json"\nsteps = 2\nout = "out"\nmodel = "wide.py:make"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("executor.launch.launch.launch", lambda *words, **named: pytest.fail("ranks were started"))
    shape = "error: wide.py:make: 'layers.0.weight' has the shape (128, 128), the plan (64, 64); give the model that"
    for command, message in (
        ("run plan.json --model wide.py:make", shape),
        ("verify plan.json --model wide.py:make", shape),
        ("train job.toml", shape.replace("error:", "error: job.toml:")),
        ("run plan.json --model less.py:make", "error: less.py:make has no parameter 'layers.2.weight'"),
        ("run plan.json --model asks.py:make", "is called without arguments: missing a required argument: 'width'"),
    ):
        assert main(command.split()) == 2
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1 and message in said[0]
