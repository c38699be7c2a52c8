"""Schedules, stacks, devices and operators of another package: the worked example of the docs, installed for real."""

import json
import os
import re
import subprocess
import sys

from tests import ROOT


def test_the_example_of_the_docs_works(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extensions.md").read_text(), re.DOTALL)
    (tmp_path / "my_twofold.py").write_text("".join(blocks))
    info = tmp_path / "my_twofold-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-twofold\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[twofold]\nmine = my_twofold\n")
    (tmp_path / "devices").mkdir()
    device = json.loads((ROOT / "costmodels" / "machines" / "devices" / "h100-sxm.json").read_text())
    (tmp_path / "devices" / "my-card.json").write_text(json.dumps({**device, "name": "my-card"}))

    def answer(*options):
        done = subprocess.run(
            [sys.executable, "-m", "twofold", "predict", "llama-3-8b", "--tp", "4", "--pp", "2",
             "--global-batch", "8", "--json", *options],
            capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    theirs = answer("--machine", "h100-sxm-x8", "--schedule", "gpipe", "--stack", "torch")
    mine = answer("--machine", "my-card-x8", "--schedule", "all_forward_first", "--stack", "our-trainer")
    assert mine["step_s"] > theirs["step_s"] and mine["machine"] == "my-card-x8"
    code = "from plans.operators import registry; print(registry.declare('swish', ((4, 8),), ((4, 8),), {}, 'x').flops)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
    )  # fmt: skip
    assert done.stdout == "160\n"
