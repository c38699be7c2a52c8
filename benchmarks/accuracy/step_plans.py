"""Plans of transformers for measuring complete steps on 1, 2 and 4 devices, and tiny ones for the host's time.

    python -m benchmarks.accuracy.step_plans FOLDER         # plan files; of one set where its name follows: --set third
    python -m executor.calibrate.steps POINTS.jsonl FOLDER/*.json     # under torchrun, per number of devices

The shapes were chosen before anything was measured on them, and no machine file is fitted to their step times.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.peers.configs import gpt
from costmodels import Machine
from plans.model.transformer import Experts, TransformerConfig, transformer
from plans.optimizer import Optimizer
from plans.plan import Plan, save_plan
from search import uniform_plan

__all__ = ["SETS", "main"]

MACHINE = "h200-x4"
ADAMW = Optimizer(kind="adamw", settings={"lr": 1e-4})
MODELS = {
    "1b": TransformerConfig(
        name="1b", num_layers=12, hidden=2048, num_heads=16, ffn=5632, vocab=32000, seq=2048, dtype="bfloat16"
    ),
    "wide": TransformerConfig(
        name="wide", num_layers=4, hidden=5120, num_heads=40, num_kv_heads=8, ffn=13824, vocab=50304, seq=2048,
        dtype="bfloat16",
    ),
    "gpt": gpt("gpt", num_layers=12, hidden=1024, num_heads=16, vocab=50304, seq=1024),
}  # fmt: skip
NEW_MODELS = {
    "3b": TransformerConfig(
        name="3b", num_layers=8, hidden=3072, num_heads=24, num_kv_heads=8, ffn=8192, vocab=128256, seq=4096,
        dtype="bfloat16",
    ),
    "wide-gpt": gpt("wide-gpt", num_layers=8, hidden=2304, num_heads=18, vocab=32768, seq=2048),
}  # fmt: skip
THIRD_MODELS = {
    "2b": TransformerConfig(
        name="2b", num_layers=10, hidden=2560, num_heads=20, num_kv_heads=4, ffn=6912, vocab=49152, seq=2048,
        dtype="bfloat16",
    ),
    "long": TransformerConfig(
        name="long", num_layers=6, hidden=1536, num_heads=12, num_kv_heads=4, ffn=4096, vocab=32768, seq=8192,
        dtype="bfloat16",
    ),
    "gpt-mid": gpt("gpt-mid", num_layers=16, hidden=1280, num_heads=20, vocab=51200, seq=1024),
    "deep": TransformerConfig(
        name="deep", num_layers=24, hidden=768, num_heads=12, ffn=2048, vocab=32000, seq=512, dtype="bfloat16"
    ),
}  # fmt: skip
FOURTH_MODELS = {
    "6b-cut": TransformerConfig(
        name="6b-cut", num_layers=6, hidden=4608, num_heads=36, num_kv_heads=12, ffn=12288, vocab=64000, seq=2048,
        dtype="bfloat16",
    ),
    "mid": TransformerConfig(
        name="mid", num_layers=14, hidden=1792, num_heads=14, ffn=4864, vocab=40960, seq=3072, dtype="bfloat16"
    ),
    "gpt-wide": gpt("gpt-wide", num_layers=6, hidden=3584, num_heads=28, vocab=50304, seq=1024),
    "thin": TransformerConfig(
        name="thin", num_layers=20, hidden=896, num_heads=14, num_kv_heads=2, ffn=2432, vocab=32768, seq=1024,
        dtype="bfloat16",
    ),
    "huge-cut": TransformerConfig(
        name="huge-cut", num_layers=2, hidden=7168, num_heads=56, num_kv_heads=8, ffn=20480, vocab=32768, seq=4096,
        dtype="bfloat16",
    ),
}  # fmt: skip
FIFTH_MODELS = {
    "8x4096": TransformerConfig(
        name="8x4096", num_layers=8, hidden=4096, num_heads=32, num_kv_heads=8, ffn=12288, vocab=48000, seq=2048,
        dtype="bfloat16",
    ),
    "24x1024": TransformerConfig(
        name="24x1024", num_layers=24, hidden=1024, num_heads=16, ffn=2816, vocab=32000, seq=1536, dtype="bfloat16"
    ),
    "3x8192": TransformerConfig(
        name="3x8192", num_layers=3, hidden=8192, num_heads=64, num_kv_heads=8, ffn=22016, vocab=32000, seq=2048,
        dtype="bfloat16",
    ),
    "10x3072": TransformerConfig(
        name="10x3072", num_layers=10, hidden=3072, num_heads=24, num_kv_heads=6, ffn=8448, vocab=100352, seq=1024,
        dtype="bfloat16",
    ),
    "5x5120": TransformerConfig(
        name="5x5120", num_layers=5, hidden=5120, num_heads=40, ffn=13312, vocab=32768, seq=4096, dtype="bfloat16"
    ),
    "gpt-2048": TransformerConfig(
        name="gpt-2048", num_layers=14, hidden=2048, num_heads=32, vocab=50304, seq=2048, dtype="bfloat16",
        gated=False, norm="layer", position="learned", qkv_bias=True, out_bias=True, mlp_bias=True,
    ),
    "moe-1536": TransformerConfig(
        name="moe-1536", num_layers=6, hidden=1536, num_heads=12, num_kv_heads=4, ffn=4096, vocab=32000, seq=2048,
        dtype="bfloat16", experts=Experts(num_experts=8, top_k=2, ffn=4096),
    ),
}  # fmt: skip
SIXTH_MODELS = {
    "9x3840": TransformerConfig(
        name="9x3840", num_layers=9, hidden=3840, num_heads=30, num_kv_heads=10, ffn=10240, vocab=40000, seq=2048,
        dtype="bfloat16",
    ),
    "18x1408": TransformerConfig(
        name="18x1408", num_layers=18, hidden=1408, num_heads=22, ffn=3840, vocab=32000, seq=1024, dtype="bfloat16"
    ),
    "4x6144": TransformerConfig(
        name="4x6144", num_layers=4, hidden=6144, num_heads=48, num_kv_heads=8, ffn=16384, vocab=32768, seq=2048,
        dtype="bfloat16",
    ),
    "11x2816": TransformerConfig(
        name="11x2816", num_layers=11, hidden=2816, num_heads=22, ffn=7680, vocab=65536, seq=4096, dtype="bfloat16"
    ),
    "gpt-2560": TransformerConfig(
        name="gpt-2560", num_layers=10, hidden=2560, num_heads=20, vocab=50304, seq=1024, dtype="bfloat16",
        gated=False, norm="layer", position="learned", qkv_bias=True, out_bias=True, mlp_bias=True,
    ),
    "moe-1792": TransformerConfig(
        name="moe-1792", num_layers=5, hidden=1792, num_heads=14, num_kv_heads=7, ffn=4864, vocab=32000, seq=2048,
        dtype="bfloat16", experts=Experts(num_experts=16, top_k=2, ffn=2432),
    ),
}  # fmt: skip
EXPERT_MODELS = {
    "moe8": TransformerConfig(
        name="moe8", num_layers=6, hidden=2048, num_heads=16, num_kv_heads=4, ffn=5632, vocab=32000, seq=2048,
        dtype="bfloat16", experts=Experts(num_experts=8, top_k=2, ffn=5632),
    ),
    "moe64": TransformerConfig(
        name="moe64", num_layers=6, hidden=2048, num_heads=16, ffn=8192, vocab=32000, seq=2048, dtype="bfloat16",
        experts=Experts(num_experts=64, top_k=6, ffn=1408, num_shared=2, num_dense_layers=1, weights="all"),
    ),
}  # fmt: skip
TINY_EXPERTS = TransformerConfig(
    name="tiny-moe",
    num_layers=2,
    hidden=64,
    num_heads=4,
    ffn=128,
    vocab=128,
    seq=16,
    experts=Experts(num_experts=8, top_k=2, ffn=32),
)
TINY = TransformerConfig(name="tiny", num_layers=2, hidden=64, num_heads=4, ffn=128, vocab=128, seq=16)

# model, batch, degrees
_STEPS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("1b", 8, {"micro_batch": 4}),
    ("1b", 8, {"micro_batch": 4, "recompute": "full"}),
    ("wide", 8, {"micro_batch": 2}),
    ("gpt", 32, {"micro_batch": 8}),
    ("1b", 16, {"dp": 2, "micro_batch": 4}),
    ("1b", 16, {"dp": 2, "micro_batch": 4, "zero": 1}),
    ("1b", 16, {"dp": 2, "micro_batch": 4, "zero": 3}),
    ("1b", 8, {"tp": 2, "micro_batch": 4}),
    ("1b", 8, {"tp": 2, "micro_batch": 4, "sequence_parallel": True}),
    ("1b", 16, {"pp": 2, "micro_batch": 2}),
    ("wide", 8, {"tp": 2, "micro_batch": 4}),
    ("wide", 8, {"pp": 2, "micro_batch": 1}),
    ("gpt", 32, {"dp": 2, "micro_batch": 16}),
    ("gpt", 32, {"tp": 2, "micro_batch": 16}),
    ("1b", 8, {"tp": 4, "micro_batch": 4}),
    ("1b", 16, {"dp": 2, "tp": 2, "micro_batch": 4, "zero": 1}),
    ("1b", 32, {"dp": 4, "micro_batch": 4, "zero": 2}),
    ("1b", 32, {"pp": 4, "micro_batch": 2}),
    ("1b", 32, {"pp": 4, "micro_batch": 2, "schedule": "zb_h1"}),
    ("1b", 32, {"pp": 2, "dp": 2, "micro_batch": 2, "zero": 1}),
    ("wide", 8, {"tp": 4, "micro_batch": 4, "sequence_parallel": True}),
    ("wide", 16, {"pp": 2, "tp": 2, "micro_batch": 2}),
    ("gpt", 64, {"pp": 2, "dp": 2, "micro_batch": 4}),
)
_NEW: tuple[tuple[str, int, dict[str, Any]], ...] = (  # predicted before they were run for the first time
    ("3b", 4, {"micro_batch": 1}),
    ("wide-gpt", 8, {"micro_batch": 4, "recompute": "selective"}),
    ("3b", 8, {"dp": 2, "micro_batch": 2, "zero": 2}),
    ("3b", 4, {"tp": 2, "micro_batch": 2, "sequence_parallel": True}),
    ("wide-gpt", 16, {"pp": 2, "micro_batch": 2, "schedule": "gpipe"}),
    ("wide-gpt", 16, {"tp": 2, "micro_batch": 8}),
    ("3b", 8, {"dp": 4, "micro_batch": 1, "zero": 3}),
    ("3b", 8, {"tp": 4, "micro_batch": 4}),
    ("3b", 8, {"pp": 2, "tp": 2, "micro_batch": 1}),
    ("3b", 8, {"pp": 4, "micro_batch": 1}),
    ("wide-gpt", 32, {"pp": 2, "dp": 2, "micro_batch": 2, "zero": 1}),
    ("wide-gpt", 16, {"dp": 2, "tp": 2, "micro_batch": 4, "zero": 2}),
)
_THIRD: tuple[tuple[str, int, dict[str, Any]], ...] = (  # on one and two devices, H100 and H200, predicted before
    ("2b", 4, {"micro_batch": 2}),
    ("2b", 8, {"micro_batch": 4, "recompute": "full"}),
    ("long", 2, {"micro_batch": 1}),
    ("gpt-mid", 16, {"micro_batch": 8, "recompute": "selective"}),
    ("gpt-mid", 8, {"micro_batch": 2}),
    ("deep", 8, {"micro_batch": 8}),
    ("2b", 8, {"dp": 2, "micro_batch": 2, "zero": 1}),
    ("2b", 8, {"dp": 2, "micro_batch": 4, "zero": 3}),
    ("2b", 4, {"tp": 2, "micro_batch": 2, "sequence_parallel": True}),
    ("2b", 8, {"pp": 2, "micro_batch": 1}),
    ("2b", 8, {"pp": 2, "micro_batch": 2, "schedule": "interleaved_1f1b", "virtual": 5}),
    ("long", 4, {"pp": 2, "micro_batch": 1, "schedule": "zb_h1"}),
    ("long", 2, {"tp": 2, "micro_batch": 1}),
    ("long", 2, {"cp": 2, "micro_batch": 1}),
    ("gpt-mid", 32, {"dp": 2, "micro_batch": 8, "zero": 2}),
    ("gpt-mid", 16, {"tp": 2, "micro_batch": 16}),
    ("deep", 16, {"dp": 2, "micro_batch": 8}),
    ("deep", 16, {"tp": 2, "micro_batch": 16}),
    ("2b", 8, {"dp": 2, "tp": 2, "micro_batch": 2, "zero": 1}),
    ("2b", 16, {"pp": 2, "dp": 2, "micro_batch": 2}),
    ("long", 4, {"tp": 4, "micro_batch": 2}),
    ("gpt-mid", 64, {"dp": 4, "micro_batch": 8, "zero": 1}),
    ("deep", 32, {"dp": 2, "tp": 2, "micro_batch": 16}),
)
_FOURTH: tuple[tuple[str, int, dict[str, Any]], ...] = (  # on one and two H200, each in both executions
    ("6b-cut", 2, {"micro_batch": 1}),
    ("6b-cut", 4, {"micro_batch": 4}),
    ("6b-cut", 4, {"micro_batch": 2, "recompute": "selective"}),
    ("mid", 4, {"micro_batch": 2}),
    ("mid", 8, {"micro_batch": 4, "recompute": "full"}),
    ("gpt-wide", 8, {"micro_batch": 4}),
    ("gpt-wide", 16, {"micro_batch": 16}),
    ("thin", 8, {"micro_batch": 2}),
    ("thin", 16, {"micro_batch": 16}),
    ("huge-cut", 2, {"micro_batch": 1}),
    ("huge-cut", 2, {"micro_batch": 2}),
    ("6b-cut", 8, {"dp": 2, "micro_batch": 4}),
    ("6b-cut", 8, {"dp": 2, "micro_batch": 2, "zero": 1}),
    ("6b-cut", 4, {"dp": 2, "micro_batch": 1, "zero": 3}),
    ("6b-cut", 4, {"tp": 2, "micro_batch": 2}),
    ("6b-cut", 4, {"tp": 2, "micro_batch": 4, "sequence_parallel": True}),
    ("6b-cut", 8, {"pp": 2, "micro_batch": 1}),
    ("6b-cut", 8, {"pp": 2, "micro_batch": 2, "schedule": "zb_h1"}),
    ("6b-cut", 8, {"pp": 2, "micro_batch": 1, "schedule": "interleaved_1f1b", "virtual": 3}),
    ("mid", 8, {"dp": 2, "micro_batch": 2}),
    ("mid", 8, {"dp": 2, "micro_batch": 4, "zero": 2}),
    ("mid", 16, {"dp": 2, "micro_batch": 4, "zero": 3}),
    ("mid", 4, {"tp": 2, "micro_batch": 4}),
    ("mid", 4, {"tp": 2, "micro_batch": 1, "sequence_parallel": True}),
    ("mid", 8, {"pp": 2, "micro_batch": 2}),
    ("mid", 16, {"pp": 2, "micro_batch": 2, "schedule": "zb_v"}),
    ("mid", 8, {"pp": 2, "micro_batch": 1, "schedule": "interleaved_1f1b", "virtual": 7}),
    ("gpt-wide", 16, {"dp": 2, "micro_batch": 8}),
    ("gpt-wide", 16, {"dp": 2, "micro_batch": 4, "zero": 2}),
    ("gpt-wide", 8, {"tp": 2, "micro_batch": 4}),
    ("gpt-wide", 16, {"tp": 2, "micro_batch": 8, "sequence_parallel": True}),
    ("gpt-wide", 16, {"pp": 2, "micro_batch": 4}),
    ("gpt-wide", 16, {"pp": 2, "micro_batch": 2, "schedule": "gpipe"}),
    ("thin", 16, {"dp": 2, "micro_batch": 8}),
    ("thin", 16, {"dp": 2, "micro_batch": 2, "zero": 3}),
    ("thin", 16, {"tp": 2, "micro_batch": 16}),
    ("thin", 16, {"pp": 2, "micro_batch": 4}),
    ("huge-cut", 4, {"dp": 2, "micro_batch": 2, "zero": 1}),
    ("huge-cut", 2, {"tp": 2, "micro_batch": 1}),
    ("huge-cut", 2, {"tp": 2, "micro_batch": 2, "sequence_parallel": True}),
    ("huge-cut", 8, {"pp": 2, "micro_batch": 1}),
    ("huge-cut", 2, {"cp": 2, "micro_batch": 1}),
)
_FIFTH: tuple[tuple[str, int, dict[str, Any]], ...] = (  # on one and two H200, each in both executions
    ("8x4096", 2, {"micro_batch": 2}),
    ("8x4096", 4, {"micro_batch": 2, "recompute": "full"}),
    ("24x1024", 4, {"micro_batch": 1}),
    ("24x1024", 16, {"micro_batch": 8}),
    ("24x1024", 16, {"micro_batch": 16, "recompute": "selective"}),
    ("3x8192", 2, {"micro_batch": 1}),
    ("3x8192", 2, {"micro_batch": 2}),
    ("10x3072", 8, {"micro_batch": 4}),
    ("10x3072", 4, {"micro_batch": 1, "recompute": "selective"}),
    ("5x5120", 1, {"micro_batch": 1}),
    ("5x5120", 2, {"micro_batch": 2, "recompute": "full"}),
    ("gpt-2048", 4, {"micro_batch": 2}),
    ("gpt-2048", 8, {"micro_batch": 8}),
    ("moe-1536", 4, {"micro_batch": 2}),
    ("8x4096", 4, {"dp": 2, "micro_batch": 2}),
    ("8x4096", 4, {"dp": 2, "micro_batch": 1, "zero": 1}),
    ("8x4096", 4, {"dp": 2, "micro_batch": 2, "zero": 3}),
    ("8x4096", 2, {"tp": 2, "micro_batch": 2}),
    ("8x4096", 2, {"tp": 2, "micro_batch": 1, "sequence_parallel": True}),
    ("8x4096", 4, {"pp": 2, "micro_batch": 1}),
    ("8x4096", 4, {"pp": 2, "micro_batch": 1, "schedule": "zb_h1"}),
    ("8x4096", 4, {"pp": 2, "micro_batch": 1, "schedule": "interleaved_1f1b", "virtual": 2}),
    ("24x1024", 16, {"dp": 2, "micro_batch": 4, "zero": 2}),
    ("24x1024", 16, {"dp": 2, "micro_batch": 8, "recompute": "full"}),
    ("24x1024", 8, {"tp": 2, "micro_batch": 8}),
    ("24x1024", 8, {"tp": 2, "micro_batch": 4, "sequence_parallel": True}),
    ("24x1024", 16, {"pp": 2, "micro_batch": 4, "schedule": "gpipe"}),
    ("24x1024", 16, {"pp": 2, "micro_batch": 2, "schedule": "interleaved_1f1b", "virtual": 4}),
    ("3x8192", 2, {"dp": 2, "micro_batch": 1, "zero": 1}),
    ("3x8192", 2, {"tp": 2, "micro_batch": 2}),
    ("3x8192", 2, {"tp": 2, "micro_batch": 2, "sequence_parallel": True}),
    ("10x3072", 8, {"dp": 2, "micro_batch": 4}),
    ("10x3072", 8, {"dp": 2, "micro_batch": 2, "zero": 3}),
    ("10x3072", 8, {"tp": 2, "micro_batch": 8}),
    ("10x3072", 8, {"pp": 2, "micro_batch": 1}),
    ("10x3072", 8, {"pp": 2, "micro_batch": 2, "schedule": "zb_h1"}),
    ("5x5120", 2, {"dp": 2, "micro_batch": 1, "zero": 2}),
    ("5x5120", 1, {"tp": 2, "micro_batch": 1}),
    ("5x5120", 2, {"tp": 2, "micro_batch": 2, "sequence_parallel": True}),
    ("5x5120", 1, {"cp": 2, "micro_batch": 1}),
    ("5x5120", 2, {"pp": 2, "micro_batch": 1, "schedule": "gpipe"}),
    ("gpt-2048", 8, {"dp": 2, "micro_batch": 4}),
    ("gpt-2048", 8, {"dp": 2, "micro_batch": 2, "zero": 2}),
    ("gpt-2048", 4, {"tp": 2, "micro_batch": 4}),
    ("gpt-2048", 4, {"cp": 2, "micro_batch": 2}),
    ("gpt-2048", 8, {"pp": 2, "micro_batch": 2}),
    ("gpt-2048", 8, {"pp": 2, "micro_batch": 2, "schedule": "zb_v"}),
    ("moe-1536", 4, {"dp": 2, "ep": 2, "micro_batch": 2}),
    ("moe-1536", 8, {"dp": 2, "micro_batch": 4, "zero": 1}),
)
_SIXTH: tuple[tuple[str, int, dict[str, Any]], ...] = (  # on one and two H200, fused, replayed only
    ("9x3840", 2, {"micro_batch": 1}),
    ("9x3840", 4, {"micro_batch": 4}),
    ("18x1408", 4, {"micro_batch": 1}),
    ("18x1408", 16, {"micro_batch": 8}),
    ("18x1408", 16, {"micro_batch": 16, "recompute": "full"}),
    ("4x6144", 2, {"micro_batch": 2}),
    ("4x6144", 2, {"micro_batch": 1, "recompute": "selective"}),
    ("11x2816", 2, {"micro_batch": 1}),
    ("11x2816", 4, {"micro_batch": 2, "recompute": "selective"}),
    ("gpt-2560", 4, {"micro_batch": 2}),
    ("gpt-2560", 16, {"micro_batch": 8}),
    ("moe-1792", 4, {"micro_batch": 2}),
    ("moe-1792", 8, {"micro_batch": 8}),
    ("9x3840", 4, {"dp": 2, "micro_batch": 2, "zero": 1}),
    ("9x3840", 4, {"dp": 2, "micro_batch": 1, "zero": 3}),
    ("9x3840", 4, {"tp": 2, "micro_batch": 4}),
    ("9x3840", 4, {"pp": 2, "micro_batch": 1}),
    ("9x3840", 4, {"pp": 2, "micro_batch": 1, "schedule": "zb_h1"}),
    ("18x1408", 16, {"dp": 2, "micro_batch": 8}),
    ("18x1408", 16, {"dp": 2, "micro_batch": 2, "zero": 2}),
    ("18x1408", 8, {"tp": 2, "micro_batch": 8}),
    ("18x1408", 16, {"pp": 2, "micro_batch": 4, "schedule": "interleaved_1f1b", "virtual": 3}),
    ("4x6144", 4, {"dp": 2, "micro_batch": 2, "zero": 2}),
    ("4x6144", 2, {"tp": 2, "micro_batch": 2, "sequence_parallel": True}),
    ("4x6144", 4, {"pp": 2, "micro_batch": 1, "schedule": "gpipe"}),
    ("11x2816", 4, {"dp": 2, "micro_batch": 2}),
    ("11x2816", 2, {"tp": 2, "micro_batch": 2}),
    ("11x2816", 2, {"cp": 2, "micro_batch": 1}),
    ("gpt-2560", 16, {"dp": 2, "micro_batch": 4, "zero": 1}),
    ("gpt-2560", 8, {"tp": 2, "micro_batch": 4, "sequence_parallel": True}),
    ("gpt-2560", 16, {"pp": 2, "micro_batch": 2, "schedule": "zb_v"}),
    ("moe-1792", 8, {"dp": 2, "ep": 2, "micro_batch": 4}),
)
_EXPERTS: tuple[tuple[str, int, dict[str, Any]], ...] = (  # mixtures of experts
    ("moe8", 4, {"micro_batch": 2}),
    ("moe64", 4, {"micro_batch": 2}),
    ("moe8", 8, {"dp": 2, "ep": 2, "micro_batch": 2, "zero": 1}),
    ("moe64", 8, {"dp": 2, "ep": 2, "micro_batch": 4}),
    ("moe8", 8, {"tp": 2, "micro_batch": 4}),
    ("moe8", 16, {"dp": 4, "ep": 4, "micro_batch": 2}),
    ("moe64", 16, {"dp": 4, "ep": 4, "micro_batch": 4, "zero": 1}),
    ("moe8", 16, {"dp": 4, "ep": 2, "micro_batch": 4}),
    ("moe8", 8, {"dp": 2, "ep": 2, "tp": 2, "micro_batch": 4, "sequence_parallel": True}),
    ("moe64", 16, {"pp": 2, "dp": 2, "ep": 2, "micro_batch": 2}),
)
_TINY_EXPERTS: tuple[dict[str, Any], ...] = (
    {"micro_batch": 4},
    {"dp": 2, "ep": 2, "micro_batch": 4},
    {"dp": 4, "ep": 4, "micro_batch": 2},
)
_TINY: tuple[dict[str, Any], ...] = (
    {"micro_batch": 4},
    {"dp": 2, "micro_batch": 4},
    {"dp": 2, "micro_batch": 4, "zero": 3},
    {"tp": 2, "micro_batch": 4},
    {"pp": 2, "micro_batch": 2},
    {"tp": 4, "micro_batch": 4},
    {"dp": 2, "tp": 2, "micro_batch": 4, "zero": 1},
    {"pp": 2, "tp": 2, "micro_batch": 2},
)


def _tiny_plans() -> dict[str, Plan]:
    """Plans whose tensors are so small that the host's time is all there is."""
    rows = [("tiny", 8, degrees) for degrees in _TINY] + [("tiny-moe", 8, degrees) for degrees in _TINY_EXPERTS]
    return _plans({"tiny": TINY, "tiny-moe": TINY_EXPERTS}, rows)


def _plans(
    models: Mapping[str, TransformerConfig], rows: Iterable[tuple[str, int, dict[str, Any]]], *, fused: bool = False,
    receives: str = "ahead",
) -> dict[str, Plan]:  # fmt: skip
    """The plans of one set; earlier ones were measured before runs were fused, with receives posted early."""
    machine, found = Machine.load(MACHINE), {}
    for model, batch, degrees in rows:
        graph = transformer(models[model], batch_size=batch)
        plan = uniform_plan(graph, machine, optimizer=ADAMW, fused=fused, **degrees)
        found[_name(model, batch, degrees)] = msgspec.structs.replace(plan, prediction=None, receives=receives)
    return found


def _name(model: str, batch: int, degrees: dict[str, Any]) -> str:
    short = {"micro_batch": "mb", "sequence_parallel": "sp", "recompute": "recompute-", "schedule": ""}
    said = (f"{short.get(key, key)}{'' if value is True else value}" for key, value in degrees.items())
    return "-".join([model, f"b{batch}", *said])


SETS: dict[str, Callable[[], dict[str, Plan]]] = {
    "first": partial(_plans, MODELS, _STEPS), "new": partial(_plans, NEW_MODELS, _NEW),
    "third": partial(_plans, THIRD_MODELS, _THIRD), "fourth": partial(_plans, FOURTH_MODELS, _FOURTH),
    "fifth": partial(_plans, FIFTH_MODELS, _FIFTH),
    "sixth": partial(_plans, SIXTH_MODELS, _SIXTH, fused=True, receives="needed"),
    "experts": partial(_plans, EXPERT_MODELS, _EXPERTS), "tiny": _tiny_plans,
}  # fmt: skip
"""Name -> its plans."""


def main() -> int:
    """Write the plan files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--set", choices=SETS, action="append", dest="sets", help="all of them unless stated")
    options = parser.parse_args()
    for chosen in options.sets or SETS:
        for name, plan in SETS[chosen]().items():
            print(save_plan(plan, options.folder / f"{name}.json"), plan.num_ranks, "devices")
    return 0


if __name__ == "__main__":
    sys.exit(main())
