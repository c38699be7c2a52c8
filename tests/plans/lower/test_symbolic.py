"""Templates with symbolic sizes depend on no size of an axis from 3 on, so one serves all of them."""

from dataclasses import replace

import pytest

from plans.lower.symbolic import model_template, transformer
from plans.model.transformer import transformer_config

GPT = transformer_config("gpt2")
SPREAD = replace(GPT, num_kv_heads=3, num_heads=72, head_dim=32)  # more tensor-parallel ranks than key-value heads


@pytest.mark.parametrize(("config", "degrees"), [
    (GPT, {"dp": 8, "tp": 6}), (GPT, {"dp": 2, "tp": 12, "cp": 4}),
    (GPT, {"dp": 16, "tp": 6, "cp": 2, "sequence_parallel": True}),
    (SPREAD, {"dp": 8, "tp": 6}), (SPREAD, {"dp": 2, "tp": 36, "cp": 4}),
])  # fmt: skip
def test_templates_of_larger_axes_are_equal(config, degrees, monkeypatch):
    transformer._structure.cache_clear()  # sizes are numbered in the order in which templates need them
    found = model_template(config, **degrees).pieces
    monkeypatch.setattr(transformer, "_LARGE", 1 << 20)
    transformer._structure.cache_clear()
    exact = model_template(config, **degrees).pieces
    assert repr(exact) == repr(found) and exact is not found
