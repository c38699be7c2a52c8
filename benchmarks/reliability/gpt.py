"""A small GPT that reads text letter by letter, and the text: the topics of Python's own help."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from pydoc_data import topics

import numpy as np

from costmodels import Machine
from plans.model.transformer import transformer, transformer_config
from plans.optimizer import Optimizer
from plans.plan import Plan, save_plan
from search.uniform import uniform_plan

__all__ = ["plan_in", "text_in"]


def plan_in(folder: Path, *, hidden: int = 64, batch: int = 8, zero: int = 0, **degrees: int) -> Plan:
    """Write `plan.json` of two blocks, on as many ranks as the degrees say.

    Args:
        folder: made where it is not there.
        hidden: width of the model.
        batch: sequences of 32 letters.
        zero: optimizer-parallel level.
        degrees: dp, tp, pp, micro_batch of `uniform_plan`.
    """
    config = dataclasses.replace(
        transformer_config("gpt2", num_layers=2, tied=False), hidden=hidden, ffn=4 * hidden, num_heads=4,
        num_kv_heads=4, head_dim=hidden // 4, vocab=256, dtype="float32",
    )  # fmt: skip
    optimizer = Optimizer(kind="adamw", settings={"lr": 1e-3}, parallel_level=zero, threshold_bytes=0)
    graph = transformer(config, batch_size=batch, seq=32)
    plan = uniform_plan(graph, Machine.load("h100-sxm-x8"), optimizer=optimizer, fused=False, **degrees)
    folder.mkdir(parents=True, exist_ok=True)
    save_plan(plan, folder / "plan.json")
    return plan


def text_in(folder: Path) -> str:
    """Write the text as a row of bytes; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(topics.topics.values()).encode()
    np.save(folder / "text.npy", np.frombuffer(text, np.uint8).astype(np.int64))
    return str(folder / "text.npy")
