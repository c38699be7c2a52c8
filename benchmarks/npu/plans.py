"""The plans whose steps are checked: those of the four example scripts, a Llama, a GPT and a mixture, for 8 NPUs.

    python -m benchmarks.npu.plans FOLDER

runs in the environment of this project. A script is run up to `Model.train`, which says what it would train.
"""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from benchmarks import FOLDER
from costmodels import Machine
from plans.model.transformer import Experts, TransformerConfig, transformer
from plans.optimizer import Optimizer
from plans.plan import Plan, save_plan
from search import uniform_plan

__all__ = ["EXAMPLES", "TRANSFORMERS", "main"]

NUM_RANKS = 8
MACHINE = "ascend-910b2-x8"
EXAMPLES = FOLDER.parent / "examples"

_LLAMA = TransformerConfig(
    name="llama", num_layers=4, hidden=4096, num_heads=32, num_kv_heads=8, ffn=14336, vocab=128256, seq=4096
)
_GPT = TransformerConfig(
    name="gpt", num_layers=4, hidden=2048, num_heads=16, vocab=50304, seq=2048, gated=False, norm="layer",
    position="learned", qkv_bias=True, out_bias=True, mlp_bias=True, tied=True,
)  # fmt: skip
_MIXTURE = TransformerConfig(
    name="mixture", num_layers=4, hidden=2048, num_heads=16, ffn=5632, vocab=32000, seq=2048,
    experts=Experts(num_experts=8, top_k=2, ffn=1408),
)  # fmt: skip
_DROPPED = TransformerConfig(
    name="gpt-dropout", num_layers=2, hidden=1024, num_heads=16, vocab=50304, seq=1024, gated=False, norm="layer",
    position="learned", dropout=0.1, attention_dropout=0.1,
)  # fmt: skip
_ADAMW = Optimizer(kind="adamw", settings={"lr": 1e-4})
_MASTER = Optimizer(
    kind="adamw", settings={"lr": 1e-4}, master_dtype="float32", gradient_dtype="float32", clip_norm=1.0
)
TRANSFORMERS: dict[str, tuple[TransformerConfig, Optimizer, dict[str, Any]]] = {
    "llama, dp 2 tp 2 pp 2": (_LLAMA, _ADAMW, {"dp": 2, "tp": 2, "pp": 2, "sequence_parallel": True}),
    "llama, cp 2 tp 2 dp 2": (_LLAMA, _MASTER, {"cp": 2, "tp": 2, "dp": 2, "zero": 2, "recompute": "full"}),
    "gpt, dp 4 tp 2": (_GPT, _ADAMW, {"dp": 4, "tp": 2, "zero": 3}),
    "gpt with dropout, dp 8": (_DROPPED, _MASTER, {"dp": 8, "zero": 1}),
    "mixture, dp 4 ep 2 tp 2": (_MIXTURE, _ADAMW, {"dp": 4, "ep": 2, "tp": 2, "zero": 1}),
}
"""Configuration, optimizer, degrees; two micro-batches of one sample each."""


def _stated(config: TransformerConfig, optimizer: Optimizer, degrees: dict[str, Any]) -> Plan:
    graph = transformer(config, batch_size=2 * degrees["dp"])
    return uniform_plan(graph, Machine.load(MACHINE), optimizer=optimizer, micro_batch=1, **degrees)


def _of_script(script: Path) -> Plan:
    """The plan that a script would train with."""
    from twofold import Model

    found: list[Plan] = []

    def train(self: Model, epoch: int, train_dataset: Any, *rest: Any, **options: Any) -> None:
        found.append(self.planned(next(iter(train_dataset)), NUM_RANKS, "npu"))

    with mock.patch.object(Model, "train", train):
        runpy.run_path(str(script), run_name="__main__")
    return found[0]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.npu.plans", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--script", type=Path, help="only this script")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.script is not None:
        save_plan(_of_script(options.script), options.folder / f"{options.script.stem}.json")
        return 0
    scripts = [script for script in sorted(EXAMPLES.glob("*.py")) if ".train(" in script.read_text(encoding="utf-8")]
    for script in scripts:  # scripts change settings of their process
        command = [sys.executable, "-m", "benchmarks.npu.plans", str(options.folder), "--script", str(script)]
        subprocess.run(command, check=True, env={**os.environ, "TWOFOLD_SAVE_GRAPHS": "0"})
    for name, (config, optimizer, degrees) in TRANSFORMERS.items():
        plan = _stated(config, optimizer, degrees)
        save_plan(plan, options.folder / f"{name}.json")
        save_plan(msgspec.structs.replace(plan, fused=True), options.folder / f"{name}, fused runs.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
