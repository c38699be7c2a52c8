"""Models and plans that are compared: 1, 2 and 4 devices, the most telling first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from costmodels import Machine
from plans.degrees import Degrees
from plans.model.transformer import Experts, TransformerConfig, transformer
from plans.plan import Optimizer, Plan
from search import uniform_plan

__all__ = ["CASES", "MODELS", "SECOND_CASES", "SETS", "SMOKE_CASES", "Case", "case_named", "model_flops"]

MODELS: Mapping[str, TransformerConfig] = {
    config.name: config
    for config in (
        TransformerConfig(name="8x4096", num_layers=8, hidden=4096, num_heads=32, ffn=11008, vocab=32000, seq=2048),
        TransformerConfig(name="24x1024", num_layers=24, hidden=1024, num_heads=16, ffn=2816, vocab=32000, seq=1024),
        TransformerConfig(name="4x8192", num_layers=4, hidden=8192, num_heads=64, ffn=28672, vocab=32000, seq=4096),
        TransformerConfig(
            name="gpt", num_layers=12, hidden=2048, num_heads=16, vocab=50304, seq=1024, gated=False, norm="layer",
            position="learned", qkv_bias=True, out_bias=True, mlp_bias=True,
        ),
        TransformerConfig(
            name="moe", num_layers=6, hidden=2048, num_heads=16, ffn=5632, vocab=32000, seq=2048,
            experts=Experts(num_experts=8, top_k=2, ffn=5632),
        ),
        # of the second set: shapes that no earlier step had
        TransformerConfig(name="6x3584", num_layers=6, hidden=3584, num_heads=28, ffn=18944, vocab=64000, seq=2048),
        TransformerConfig(name="16x1536", num_layers=16, hidden=1536, num_heads=12, ffn=8960, vocab=49152, seq=1024),
        TransformerConfig(name="3x6144", num_layers=3, hidden=6144, num_heads=48, ffn=16384, vocab=32768, seq=4096),
        TransformerConfig(name="32x768", num_layers=32, hidden=768, num_heads=12, ffn=2048, vocab=30522, seq=512),
        TransformerConfig(name="4x2560-long", num_layers=4, hidden=2560, num_heads=20, ffn=6912, vocab=32000, seq=8192),
        TransformerConfig(
            name="gpt-3072", num_layers=6, hidden=3072, num_heads=24, vocab=50304, seq=2048, gated=False, norm="layer",
            position="learned", qkv_bias=True, out_bias=True, mlp_bias=True,
        ),
        TransformerConfig(
            name="moe-16", num_layers=4, hidden=1536, num_heads=12, ffn=2816, vocab=32000, seq=2048,
            experts=Experts(num_experts=16, top_k=2, ffn=2816),
        ),
        # of the third set: other shapes again
        TransformerConfig(name="5x5120", num_layers=5, hidden=5120, num_heads=40, ffn=13824, vocab=32000, seq=2048),
        TransformerConfig(name="12x2048", num_layers=12, hidden=2048, num_heads=16, ffn=8192, vocab=128256, seq=1024),
        TransformerConfig(name="20x1280", num_layers=20, hidden=1280, num_heads=20, ffn=3456, vocab=50304, seq=2048),
        TransformerConfig(name="2x7168", num_layers=2, hidden=7168, num_heads=56, ffn=18432, vocab=32000, seq=4096),
        TransformerConfig(
            name="gpt-1792", num_layers=10, hidden=1792, num_heads=14, vocab=50304, seq=2048, gated=False, norm="layer",
            position="learned", qkv_bias=True, out_bias=True, mlp_bias=True,
        ),
        TransformerConfig(
            name="moe-4", num_layers=5, hidden=2560, num_heads=20, ffn=6912, vocab=32000, seq=1024,
            experts=Experts(num_experts=4, top_k=2, ffn=6912),
        ),
        # of the fourth set: small layers, a vocabulary whose rows are not aligned
        TransformerConfig(
            name="gpt2", num_layers=12, hidden=768, num_heads=12, vocab=50257, seq=1024, gated=False, norm="layer",
            position="learned", qkv_bias=True, out_bias=True, mlp_bias=True,
        ),
        TransformerConfig(name="28x640", num_layers=28, hidden=640, num_heads=10, ffn=1728, vocab=50304, seq=512),
        TransformerConfig(name="18x896", num_layers=18, hidden=896, num_heads=14, ffn=2432, vocab=49152, seq=1024),
        TransformerConfig(name="7x3328", num_layers=7, hidden=3328, num_heads=26, ffn=8960, vocab=32000, seq=2048),
        TransformerConfig(
            name="moe-6", num_layers=5, hidden=1792, num_heads=14, ffn=4864, vocab=32000, seq=1024,
            experts=Experts(num_experts=6, top_k=2, ffn=4864),
        ),
        # of the fifth set: widths, depths, vocabularies and lengths of no earlier step
        TransformerConfig(name="9x2816", num_layers=9, hidden=2816, num_heads=22, ffn=7680, vocab=32000, seq=2048),
        TransformerConfig(name="14x1664", num_layers=14, hidden=1664, num_heads=26, ffn=5760, vocab=51200, seq=1024),
        TransformerConfig(name="3x5632", num_layers=3, hidden=5632, num_heads=44, ffn=19712, vocab=65536, seq=4096),
        TransformerConfig(
            name="3x2304-long", num_layers=3, hidden=2304, num_heads=18, ffn=6144, vocab=32000, seq=16384
        ),
        TransformerConfig(name="22x512", num_layers=22, hidden=512, num_heads=8, ffn=1408, vocab=16384, seq=512),
        TransformerConfig(
            name="gpt-2560", num_layers=9, hidden=2560, num_heads=20, vocab=50432, seq=1024, gated=False, norm="layer",
            position="learned", qkv_bias=True, out_bias=True, mlp_bias=True,
        ),
        TransformerConfig(
            name="moe-12", num_layers=5, hidden=1536, num_heads=12, ffn=4096, vocab=32000, seq=2048,
            experts=Experts(num_experts=12, top_k=3, ffn=4096),
        ),
        # for CPU ranks, in single precision, so that losses show every difference
        TransformerConfig(
            name="tiny", num_layers=4, hidden=64, num_heads=4, ffn=96, vocab=128, seq=16, dtype="float32"
        ),
        TransformerConfig(
            name="tiny-gpt", num_layers=2, hidden=64, num_heads=4, vocab=128, seq=16, dtype="float32", gated=False,
            norm="layer", position="learned", qkv_bias=True, out_bias=True, mlp_bias=True,
        ),
        TransformerConfig(
            name="tiny-moe", num_layers=2, hidden=64, num_heads=4, ffn=96, vocab=128, seq=16, dtype="float32",
            experts=Experts(num_experts=4, top_k=2, ffn=48),
        ),
    )
}  # fmt: skip
"""Name -> configuration; bfloat16 (`TransformerConfig`'s default) unless it says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One plan that both sides run.

    Args:
        model: of `MODELS`.
        batch: sequences of a step, of all devices together.
        degrees: as `tf.uniform_plan` takes them.
        reduce_every: as in `plans.plan.Optimizer`.
        compiles: whether the peer is measured with torch.compile too where only a chosen part is.
    """

    model: str
    batch: int
    degrees: Mapping[str, Any] = field(default_factory=dict)
    reduce_every: str = "micro_batch"
    compiles: bool = False

    @property
    def config(self) -> TransformerConfig:
        """The model's sizes."""
        return MODELS[self.model]

    @property
    def ranks(self) -> int:
        """Devices it takes."""
        return int(self.degree("dp") * self.degree("tp") * self.degree("pp"))

    @property
    def name(self) -> str:
        """Words of the model, the batch and the degrees, for tables and flags."""
        short = {"micro_batch": "mb", "zero": "level", "sequence_parallel": "sp", "schedule": "", "virtual": "x"}
        said = [f"{short.get(key, key)}{'' if value is True else value}" for key, value in self.degrees.items()]
        return "-".join([self.model, f"b{self.batch}", *said, *(["once"] if self.reduce_every == "step" else [])])

    def degree(self, name: str) -> int:
        """dp, tp, pp or virtual; 1 unless stated."""
        return int(self.degrees.get(name, 1))

    @property
    def optimizer(self) -> Optimizer:
        """AdamW in the dtype of the weights: gradients, reductions and states have it too."""
        return Optimizer(kind="adamw", settings={"lr": 1e-4}, reduce_every=self.reduce_every)

    def machine(self, device: str = "h200") -> Machine:
        """As many devices of the catalogue as the case has ranks."""
        return Machine.load(f"{device}-x{self.ranks}")

    def plan(self) -> Plan:
        """The plan, as both sides read it."""
        graph = transformer(self.config, batch_size=self.batch)
        return uniform_plan(graph, self.machine(), optimizer=self.optimizer, **self.degrees)

    def degrees_value(self) -> Degrees:
        """The same degrees, as forecasts take them."""
        optimizer = msgspec.structs.replace(self.optimizer, parallel_level=self.degrees.get("zero", 0))
        return Degrees.of(dict(self.degrees), global_batch=self.batch, optimizer=optimizer)


def model_flops(config: TransformerConfig, batch: int) -> float:
    """Floating-point operations of one step, without recomputation.

    6 per parameter of a product and token, and 6 layers batch heads head_dim seq^2 of causal attention, half of what a
    whole score matrix takes (Narayanan et al. 2021, arXiv 2104.04473, appendix). A mixture counts the chosen experts.
    """
    tables = config.vocab * config.hidden + (config.seq * config.hidden if config.position == "learned" else 0)
    products = config.num_active_parameters - tables
    wide = config.num_heads * config.head_size
    return 6.0 * batch * config.seq * (products + config.num_layers * wide * config.seq)


def _case(model: str, batch: int, reduce_every: str = "micro_batch", compiles: bool = False, **degrees: Any) -> Case:
    return Case(model=model, batch=batch, degrees=degrees, reduce_every=reduce_every, compiles=compiles)


_ON_1 = (
    _case("8x4096", 4, micro_batch=4, compiles=True),
    _case("24x1024", 4, micro_batch=1, compiles=True),
    _case("8x4096", 4, micro_batch=1),
    _case("4x8192", 4, micro_batch=4, compiles=True),
    _case("moe", 4, micro_batch=4),
    _case("gpt", 8, micro_batch=8),
    _case("24x1024", 16, micro_batch=16),
    _case("moe", 4, micro_batch=1),
    _case("gpt", 8, micro_batch=2),
)
_ON_2 = (
    _case("8x4096", 8, dp=2, micro_batch=4, compiles=True),
    _case("8x4096", 8, pp=2, micro_batch=1, compiles=True),
    _case("24x1024", 8, dp=2, micro_batch=1, compiles=True),
    _case("8x4096", 8, tp=2, micro_batch=4, compiles=True),
    _case("8x4096", 8, dp=2, micro_batch=4, zero=2, compiles=True),
    _case("8x4096", 8, dp=2, micro_batch=1, zero=3),
    _case("8x4096", 8, tp=2, micro_batch=4, sequence_parallel=True),
    _case("8x4096", 8, pp=2, micro_batch=1, schedule="zb_h1"),
    _case("24x1024", 8, tp=2, micro_batch=1),
    _case("8x4096", 8, dp=2, micro_batch=1),
    _case("24x1024", 8, pp=2, micro_batch=1),
    _case("4x8192", 8, dp=2, micro_batch=4, compiles=True),
    _case("8x4096", 8, dp=2, micro_batch=4, zero=3),
    _case("8x4096", 8, pp=2, micro_batch=1, schedule="interleaved_1f1b", virtual=2),
    _case("8x4096", 8, tp=2, micro_batch=1),
    _case("gpt", 16, dp=2, micro_batch=8),
    _case("moe", 8, dp=2, micro_batch=4),
    _case("8x4096", 8, pp=2, micro_batch=1, schedule="zb_v"),
    _case("24x1024", 8, dp=2, micro_batch=1, zero=3),
    _case("8x4096", 8, dp=2, micro_batch=1, zero=2),
    _case("4x8192", 8, dp=2, micro_batch=4, zero=2),
    _case("gpt", 16, tp=2, micro_batch=8),
    _case("24x1024", 8, tp=2, micro_batch=1, sequence_parallel=True),
    _case("4x8192", 4, tp=2, micro_batch=4, sequence_parallel=True),
    _case("8x4096", 8, dp=2, micro_batch=1, zero=2, reduce_every="step"),
    _case("gpt", 16, pp=2, micro_batch=2),
    _case("8x4096", 8, pp=2, micro_batch=4),
)
_ON_4 = (
    _case("8x4096", 16, dp=4, micro_batch=4, compiles=True),
    _case("8x4096", 16, pp=4, micro_batch=1, compiles=True),
    _case("8x4096", 16, dp=4, micro_batch=4, zero=2, compiles=True),
    _case("4x8192", 16, dp=4, micro_batch=4, compiles=True),
    _case("24x1024", 16, dp=4, micro_batch=1, compiles=True),
    _case("8x4096", 16, tp=4, micro_batch=4, compiles=True),
    _case("8x4096", 16, dp=4, micro_batch=1),
    _case("8x4096", 16, dp=4, micro_batch=1, zero=3),
    _case("8x4096", 16, pp=4, micro_batch=1, schedule="zb_h1"),
    _case("24x1024", 16, pp=4, micro_batch=1),
    _case("8x4096", 16, dp=4, micro_batch=4, zero=3),
    _case("8x4096", 16, tp=4, micro_batch=4, sequence_parallel=True),
    _case("8x4096", 16, pp=4, micro_batch=1, schedule="interleaved_1f1b", virtual=2),
    _case("24x1024", 16, tp=4, micro_batch=1),
    _case("8x4096", 16, dp=2, tp=2, micro_batch=4, zero=2),
    _case("4x8192", 16, dp=4, micro_batch=4, zero=2),
    _case("8x4096", 16, pp=2, dp=2, micro_batch=1, zero=2, reduce_every="step"),
    _case("8x4096", 16, pp=4, micro_batch=1, schedule="zb_v"),
    _case("8x4096", 16, tp=4, micro_batch=1),
    _case("gpt", 32, dp=4, micro_batch=8),
    _case("moe", 16, dp=4, micro_batch=4),
    _case("24x1024", 16, dp=4, micro_batch=1, zero=3),
)

CASES: Mapping[int, tuple[Case, ...]] = {1: _ON_1, 2: _ON_2, 4: _ON_4}
"""Number of devices -> its cases, in the order in which they run."""

_SECOND_ON_1 = (
    _case("6x3584", 4, micro_batch=4),
    _case("6x3584", 4, micro_batch=1),
    _case("6x3584", 6, micro_batch=2),
    _case("6x3584", 3, micro_batch=3),
    _case("16x1536", 8, micro_batch=8),
    _case("16x1536", 8, micro_batch=2),
    _case("16x1536", 24, micro_batch=24),
    _case("3x6144", 2, micro_batch=1),
    _case("3x6144", 3, micro_batch=3),
    _case("32x768", 4, micro_batch=1),
    _case("32x768", 32, micro_batch=32),
    _case("32x768", 16, micro_batch=8),
    _case("4x2560-long", 2, micro_batch=1),
    _case("4x2560-long", 2, micro_batch=2),
    _case("gpt-3072", 6, micro_batch=6),
    _case("gpt-3072", 6, micro_batch=2),
    _case("gpt-3072", 4, micro_batch=1),
    _case("moe-16", 8, micro_batch=8),
    _case("moe-16", 8, micro_batch=2),
)
_SECOND_ON_2 = (
    _case("6x3584", 8, dp=2, micro_batch=4),
    _case("6x3584", 8, pp=2, micro_batch=1),
    _case("6x3584", 8, tp=2, micro_batch=4),
    _case("6x3584", 8, dp=2, micro_batch=2, zero=3),
    _case("16x1536", 16, dp=2, micro_batch=8),
    _case("16x1536", 16, pp=2, micro_batch=2),
    _case("3x6144", 4, dp=2, micro_batch=2, zero=2),
    _case("3x6144", 4, tp=2, micro_batch=2, sequence_parallel=True),
    _case("gpt-3072", 8, dp=2, micro_batch=4),
    _case("gpt-3072", 8, pp=2, micro_batch=1),
    _case("32x768", 16, dp=2, micro_batch=2),
    _case("4x2560-long", 4, dp=2, micro_batch=1, zero=3),
    _case("moe-16", 16, dp=2, micro_batch=8),
    _case("6x3584", 8, dp=2, micro_batch=4, zero=2),
    _case("6x3584", 8, dp=2, micro_batch=1, zero=2, reduce_every="step"),
    _case("6x3584", 12, pp=2, micro_batch=2),
    _case("6x3584", 8, pp=2, micro_batch=1, schedule="zb_h1"),
    _case("6x3584", 8, tp=2, micro_batch=2, sequence_parallel=True),
    _case("6x3584", 4, dp=2, micro_batch=1),
    _case("16x1536", 32, dp=2, micro_batch=16, zero=2),
    _case("16x1536", 16, dp=2, micro_batch=4, zero=3),
    _case("16x1536", 16, tp=2, micro_batch=8),
    _case("16x1536", 16, pp=2, micro_batch=2, schedule="zb_h1"),
    _case("16x1536", 16, pp=2, micro_batch=4, schedule="interleaved_1f1b", virtual=2),
    _case("3x6144", 4, dp=2, micro_batch=1),
    _case("3x6144", 4, dp=2, micro_batch=2, zero=3),
    _case("3x6144", 2, tp=2, micro_batch=1),
    _case("gpt-3072", 8, dp=2, micro_batch=2, zero=3),
    _case("gpt-3072", 8, tp=2, micro_batch=4),
    _case("gpt-3072", 12, pp=2, micro_batch=3),
    _case("gpt-3072", 16, dp=2, micro_batch=8, zero=2),
    _case("32x768", 64, dp=2, micro_batch=32, zero=2),
    _case("32x768", 32, dp=2, micro_batch=16),
    _case("32x768", 32, pp=2, micro_batch=8),
    _case("32x768", 16, dp=2, micro_batch=8, zero=3),
    _case("4x2560-long", 4, dp=2, micro_batch=2),
    _case("4x2560-long", 4, pp=2, micro_batch=1),
    _case("4x2560-long", 2, tp=2, micro_batch=1, sequence_parallel=True),
    _case("4x2560-long", 4, pp=2, micro_batch=1, schedule="zb_h1"),
    _case("moe-16", 16, dp=2, micro_batch=4),
    _case("moe-16", 8, dp=2, micro_batch=2),
    _case("gpt-3072", 8, tp=2, micro_batch=2),
)

SECOND_CASES: Mapping[int, tuple[Case, ...]] = {1: _SECOND_ON_1, 2: _SECOND_ON_2}
"""More of them, in shapes that no step had before, chosen and predicted before any ran."""

_THIRD_ON_1 = (
    _case("5x5120", 2, micro_batch=2),
    _case("5x5120", 4, micro_batch=1),
    _case("12x2048", 8, micro_batch=8),
    _case("12x2048", 8, micro_batch=2),
    _case("20x1280", 8, micro_batch=8),
    _case("20x1280", 4, micro_batch=1),
    _case("2x7168", 2, micro_batch=2),
    _case("2x7168", 3, micro_batch=1),
    _case("gpt-1792", 8, micro_batch=8),
    _case("gpt-1792", 8, micro_batch=2),
    _case("moe-4", 8, micro_batch=8),
    _case("moe-4", 8, micro_batch=4),
    _case("5x5120", 3, micro_batch=3),
    _case("12x2048", 16, micro_batch=16),
    _case("20x1280", 16, micro_batch=4),
)
_THIRD_ON_2 = (
    _case("5x5120", 4, dp=2, micro_batch=2),
    _case("5x5120", 8, pp=2, micro_batch=1),
    _case("5x5120", 4, tp=2, micro_batch=4),
    _case("5x5120", 4, dp=2, micro_batch=2, zero=2),
    _case("5x5120", 4, dp=2, micro_batch=1, zero=3),
    _case("5x5120", 4, tp=2, micro_batch=2, sequence_parallel=True),
    _case("5x5120", 8, pp=2, micro_batch=1, schedule="zb_h1"),
    _case("12x2048", 16, dp=2, micro_batch=8),
    _case("12x2048", 16, dp=2, micro_batch=4, zero=3),
    _case("12x2048", 16, pp=2, micro_batch=2),
    _case("12x2048", 16, tp=2, micro_batch=8),
    _case("12x2048", 16, dp=2, micro_batch=8, zero=2),
    _case("12x2048", 16, pp=2, micro_batch=4, schedule="interleaved_1f1b", virtual=2),
    _case("20x1280", 16, dp=2, micro_batch=8),
    _case("20x1280", 16, dp=2, micro_batch=8, zero=3),
    _case("20x1280", 16, pp=2, micro_batch=4),
    _case("20x1280", 8, tp=2, micro_batch=8, sequence_parallel=True),
    _case("2x7168", 4, dp=2, micro_batch=1, zero=2),
    _case("2x7168", 2, tp=2, micro_batch=1),
    _case("2x7168", 4, dp=2, micro_batch=2),
    _case("2x7168", 4, tp=2, micro_batch=2, sequence_parallel=True),
    _case("gpt-1792", 16, dp=2, micro_batch=8),
    _case("gpt-1792", 16, pp=2, micro_batch=2),
    _case("gpt-1792", 16, dp=2, micro_batch=4, zero=3),
    _case("gpt-1792", 8, tp=2, micro_batch=8),
    _case("moe-4", 16, dp=2, micro_batch=8),
)

_FOURTH_ON_1 = (
    _case("gpt2", 8, micro_batch=8, compiles=True),
    _case("28x640", 16, micro_batch=16, compiles=True),
    _case("28x640", 16, micro_batch=4),
    _case("18x896", 8, micro_batch=8),
    _case("7x3328", 4, micro_batch=2, compiles=True),
    _case("moe-6", 8, micro_batch=8),
)
_FOURTH_ON_2 = (
    _case("gpt2", 16, dp=2, micro_batch=8),
    _case("28x640", 32, dp=2, micro_batch=16, zero=2, compiles=True),
    _case("28x640", 32, pp=2, micro_batch=8),
    _case("18x896", 16, tp=2, micro_batch=8, sequence_parallel=True),
    _case("18x896", 16, dp=2, micro_batch=8, zero=3),
    _case("7x3328", 8, dp=2, micro_batch=4, compiles=True),
    _case("7x3328", 4, tp=2, micro_batch=4),
    _case("moe-6", 16, dp=2, micro_batch=8),
)

_FIFTH_ON_1 = (
    _case("9x2816", 4, micro_batch=4, compiles=True),
    _case("9x2816", 4, micro_batch=1),
    _case("9x2816", 6, micro_batch=2),
    _case("9x2816", 3, micro_batch=3),
    _case("14x1664", 8, micro_batch=8, compiles=True),
    _case("14x1664", 8, micro_batch=2),
    _case("14x1664", 20, micro_batch=20),
    _case("14x1664", 12, micro_batch=4),
    _case("3x5632", 2, micro_batch=2, compiles=True),
    _case("3x5632", 2, micro_batch=1),
    _case("3x5632", 3, micro_batch=3),
    _case("3x2304-long", 1, micro_batch=1),
    _case("3x2304-long", 2, micro_batch=1),
    _case("3x2304-long", 2, micro_batch=2),
    _case("22x512", 8, micro_batch=2),
    _case("22x512", 64, micro_batch=64, compiles=True),
    _case("22x512", 32, micro_batch=16),
    _case("gpt-2560", 8, micro_batch=8, compiles=True),
    _case("gpt-2560", 8, micro_batch=2),
    _case("gpt-2560", 12, micro_batch=12),
    _case("gpt-2560", 6, micro_batch=3),
    _case("moe-12", 8, micro_batch=8),
    _case("moe-12", 8, micro_batch=4),
    _case("moe-12", 4, micro_batch=2),
)
_FIFTH_ON_2 = (
    _case("9x2816", 8, dp=2, micro_batch=4),
    _case("9x2816", 8, dp=2, micro_batch=1),
    _case("9x2816", 8, dp=2, micro_batch=4, zero=2),
    _case("9x2816", 8, dp=2, micro_batch=2, zero=3),
    _case("9x2816", 8, dp=2, micro_batch=1, zero=2, reduce_every="step"),
    _case("9x2816", 8, tp=2, micro_batch=8),
    _case("9x2816", 8, tp=2, micro_batch=4, sequence_parallel=True),
    _case("14x1664", 16, dp=2, micro_batch=8),
    _case("14x1664", 16, dp=2, micro_batch=2),
    _case("14x1664", 32, dp=2, micro_batch=16, zero=2),
    _case("14x1664", 16, dp=2, micro_batch=4, zero=3),
    _case("14x1664", 16, pp=2, micro_batch=2),
    _case("14x1664", 16, pp=2, micro_batch=4, schedule="zb_h1"),
    _case("14x1664", 32, pp=2, micro_batch=8),
    _case("14x1664", 16, tp=2, micro_batch=16),
    _case("3x5632", 4, dp=2, micro_batch=2),
    _case("3x5632", 4, dp=2, micro_batch=2, zero=2),
    _case("3x5632", 4, dp=2, micro_batch=1, zero=3),
    _case("3x5632", 2, tp=2, micro_batch=2),
    _case("3x5632", 4, tp=2, micro_batch=2, sequence_parallel=True),
    _case("3x2304-long", 2, dp=2, micro_batch=1),
    _case("3x2304-long", 4, dp=2, micro_batch=2, zero=2),
    _case("3x2304-long", 2, tp=2, micro_batch=1, sequence_parallel=True),
    _case("22x512", 128, dp=2, micro_batch=64),
    _case("22x512", 32, dp=2, micro_batch=16, zero=2),
    _case("22x512", 64, pp=2, micro_batch=16),
    _case("22x512", 32, tp=2, micro_batch=32),
    _case("gpt-2560", 16, dp=2, micro_batch=8),
    _case("gpt-2560", 16, dp=2, micro_batch=4, zero=3),
    _case("gpt-2560", 16, dp=2, micro_batch=8, zero=2),
    _case("gpt-2560", 16, tp=2, micro_batch=8),
    _case("moe-12", 16, dp=2, micro_batch=8),
    _case("moe-12", 8, dp=2, micro_batch=2),
    _case("22x512", 32, dp=2, micro_batch=4, zero=3),
    _case("gpt-2560", 8, tp=2, micro_batch=8, sequence_parallel=True),
    _case("9x2816", 4, tp=2, micro_batch=1),
    _case("moe-12", 16, dp=2, micro_batch=4, zero=2),
    _case("3x5632", 2, dp=2, micro_batch=1),
)

SETS: Mapping[str, Mapping[int, tuple[Case, ...]]] = {
    "first": CASES,
    "second": SECOND_CASES,
    "third": {1: _THIRD_ON_1, 2: _THIRD_ON_2},
    "fourth": {1: _FOURTH_ON_1, 2: _FOURTH_ON_2},
    "fifth": {1: _FIFTH_ON_1, 2: _FIFTH_ON_2},
}
"""Name -> the cases of a set. The third was chosen after the second had corrected prices of kernels, and predicted
before any of it ran. The fourth has small layers in half of its plans; it and the fifth were predicted first
too."""

SMOKE_CASES: Mapping[int, tuple[Case, ...]] = {
    1: (
        _case("tiny", 4, micro_batch=2, compiles=True),
        _case("tiny-gpt", 4, micro_batch=2),
        _case("tiny-moe", 4, micro_batch=2),
    ),
    2: (
        _case("tiny", 8, dp=2, micro_batch=2, compiles=True),
        _case("tiny", 8, tp=2, micro_batch=4, compiles=True),
        _case("tiny", 8, pp=2, micro_batch=2, compiles=True),
        _case("tiny", 8, dp=2, micro_batch=2, zero=2),
        _case("tiny", 8, dp=2, micro_batch=2, zero=2, reduce_every="step"),
        _case("tiny", 8, dp=2, micro_batch=2, zero=3, compiles=True),
        _case("tiny", 8, tp=2, micro_batch=4, sequence_parallel=True, compiles=True),
        _case("tiny", 8, pp=2, micro_batch=2, schedule="interleaved_1f1b", virtual=2),
        _case("tiny", 8, pp=2, micro_batch=2, schedule="zb_h1"),
        _case("tiny", 8, pp=2, micro_batch=2, schedule="zb_v"),
        _case("tiny-gpt", 8, tp=2, micro_batch=4),
        _case("tiny-gpt", 8, dp=2, micro_batch=2),
        _case("tiny-moe", 8, dp=2, micro_batch=2),
    ),
    4: (
        _case("tiny", 8, dp=2, tp=2, micro_batch=2, zero=2),
        _case("tiny", 8, pp=2, dp=2, micro_batch=2, zero=2, reduce_every="step"),
        _case("tiny", 8, pp=4, micro_batch=1),
    ),
}
"""The same, so small that CPU ranks run them."""


def case_named(name: str) -> Case:
    """The case of a name.

    Raises:
        KeyError: there is none.
    """
    return {case.name: case for table in (*SETS.values(), SMOKE_CASES) for cases in table.values() for case in cases}[
        name
    ]
