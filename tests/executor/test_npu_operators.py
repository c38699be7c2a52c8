"""What `make check-npu` found with the real torch-npu, and the same again where its environment was made."""

import json
import os
import subprocess

import pytest

from tests import ROOT

FOLDER = ROOT / "build" / "npu"
RESULT = json.loads((ROOT / "benchmarks" / "results" / "npu_operators.json").read_text())
ATTENTION = {"npu::npu_fusion_attention", "npu::npu_fusion_attention_grad"}
LLAMA = {*ATTENTION, "npu::npu_rms_norm", "npu::npu_rms_norm_backward", "npu::npu_rotary_mul", "aten::_fused_adamw_"}
LAYER_NORM = {"aten::native_layer_norm", "aten::native_layer_norm_backward", "aten::_fused_adamw_"}
SCRIPTS = ("advanced_operator_parallel", "multiple_copy", "multiple_mix", "multiple_mix_older_form")
TRANSFORMERS = {
    "llama, dp 2 tp 2 pp 2": LLAMA, "llama, cp 2 tp 2 dp 2": LLAMA, "gpt, dp 4 tp 2": ATTENTION | LAYER_NORM,
    "gpt with dropout, dp 8": LAYER_NORM, "mixture, dp 4 ep 2 tp 2": {*LLAMA, "npu::npu_grouped_matmul"},
}  # fmt: skip
TAKEN = {name: set() for name in SCRIPTS} | {
    name + runs: taken for name, taken in TRANSFORMERS.items() for runs in ("", ", fused runs")
}


def test_steps_take_the_fused_kernels_and_nothing_runs_on_the_host():
    assert RESULT["torch_npu"] == "2.13.0" and RESULT["lacking"] == []
    assert {name: set(case["fused_operators"]) for name, case in RESULT["cases"].items()} == TAKEN
    assert all(case["on_the_host"] == {} and case["ranks"] == 8 for case in RESULT["cases"].values())


@pytest.mark.needs("torch-npu")
@pytest.mark.parametrize("name", ["multiple_mix", "llama, dp 2 tp 2 pp 2", "gpt, dp 4 tp 2", "mixture, dp 4 ep 2 tp 2"])
def test_the_operators_of_a_step_are_those_of_the_result(name, tmp_path):
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "plan.json").symlink_to(FOLDER / "plans" / f"{name}.json")
    command = [FOLDER / "venv" / "bin" / "python", "-m", "benchmarks.npu.check", tmp_path / "plans"]
    own = {"LD_LIBRARY_PATH": str(FOLDER / "stub"), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    subprocess.run([*command, "--out", tmp_path / "out.json"], check=True, cwd=ROOT, env={**os.environ, **own})
    assert json.loads((tmp_path / "out.json").read_text())["cases"]["plan"] == RESULT["cases"][name]
