"""Sizes of the models that are compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plans.model.transformer import Experts, TransformerConfig

__all__ = ["MODELS", "gpt"]


def gpt(name: str, **sizes: Any) -> TransformerConfig:
    """A model like GPT-2: layer norms, learned positions, an MLP without gate, and biases."""
    return TransformerConfig(
        name=name, gated=False, norm="layer", position="learned", qkv_bias=True, out_bias=True, mlp_bias=True, **sizes
    )


MODELS: Mapping[str, TransformerConfig] = {
    config.name: config
    for config in (
        TransformerConfig(name="8x4096", num_layers=8, hidden=4096, num_heads=32, ffn=11008, vocab=32000, seq=2048),
        TransformerConfig(name="24x1024", num_layers=24, hidden=1024, num_heads=16, ffn=2816, vocab=32000, seq=1024),
        TransformerConfig(name="4x8192", num_layers=4, hidden=8192, num_heads=64, ffn=28672, vocab=32000, seq=4096),
        gpt("gpt", num_layers=12, hidden=2048, num_heads=16, vocab=50304, seq=1024),
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
        gpt("gpt-3072", num_layers=6, hidden=3072, num_heads=24, vocab=50304, seq=2048),
        TransformerConfig(
            name="moe-16", num_layers=4, hidden=1536, num_heads=12, ffn=2816, vocab=32000, seq=2048,
            experts=Experts(num_experts=16, top_k=2, ffn=2816),
        ),
        # of the third set: other shapes again
        TransformerConfig(name="5x5120", num_layers=5, hidden=5120, num_heads=40, ffn=13824, vocab=32000, seq=2048),
        TransformerConfig(name="12x2048", num_layers=12, hidden=2048, num_heads=16, ffn=8192, vocab=128256, seq=1024),
        TransformerConfig(name="20x1280", num_layers=20, hidden=1280, num_heads=20, ffn=3456, vocab=50304, seq=2048),
        TransformerConfig(name="2x7168", num_layers=2, hidden=7168, num_heads=56, ffn=18432, vocab=32000, seq=4096),
        gpt("gpt-1792", num_layers=10, hidden=1792, num_heads=14, vocab=50304, seq=2048),
        TransformerConfig(
            name="moe-4", num_layers=5, hidden=2560, num_heads=20, ffn=6912, vocab=32000, seq=1024,
            experts=Experts(num_experts=4, top_k=2, ffn=6912),
        ),
        # of the fourth set: small layers, a vocabulary whose rows are not aligned
        gpt("gpt2", num_layers=12, hidden=768, num_heads=12, vocab=50257, seq=1024),
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
        gpt("gpt-2560", num_layers=9, hidden=2560, num_heads=20, vocab=50432, seq=1024),
        TransformerConfig(
            name="moe-12", num_layers=5, hidden=1536, num_heads=12, ffn=4096, vocab=32000, seq=2048,
            experts=Experts(num_experts=12, top_k=3, ffn=4096),
        ),
        # of the seventh set: others again, whose heads and widths four ranks split
        TransformerConfig(name="8x4608", num_layers=8, hidden=4608, num_heads=36, ffn=13824, vocab=36864, seq=2048),
        TransformerConfig(name="16x1792", num_layers=16, hidden=1792, num_heads=28, ffn=4992, vocab=43008, seq=1536),
        TransformerConfig(name="4x6656", num_layers=4, hidden=6656, num_heads=52, ffn=17920, vocab=32768, seq=4096),
        TransformerConfig(
            name="4x2048-long", num_layers=4, hidden=2048, num_heads=16, ffn=5504, vocab=32000, seq=12288
        ),
        TransformerConfig(name="20x768", num_layers=20, hidden=768, num_heads=12, ffn=2176, vocab=24576, seq=1024),
        gpt("gpt-3584", num_layers=8, hidden=3584, num_heads=28, vocab=50304, seq=1024),
        TransformerConfig(
            name="moe-10", num_layers=4, hidden=2048, num_heads=16, ffn=3584, vocab=32000, seq=2048,
            experts=Experts(num_experts=10, top_k=2, ffn=3584),
        ),
        # of the eighth set: others again
        TransformerConfig(name="9x3840", num_layers=9, hidden=3840, num_heads=30, ffn=10240, vocab=32000, seq=2048),
        TransformerConfig(name="5x5376", num_layers=5, hidden=5376, num_heads=42, ffn=14336, vocab=49152, seq=4096),
        TransformerConfig(name="12x2688", num_layers=12, hidden=2688, num_heads=28, ffn=7168, vocab=40960, seq=2048),
        TransformerConfig(name="18x1408", num_layers=18, hidden=1408, num_heads=22, ffn=3840, vocab=32000, seq=2048),
        TransformerConfig(
            name="3x3072-long", num_layers=3, hidden=3072, num_heads=24, ffn=8192, vocab=32000, seq=10240
        ),
        gpt("gpt-2304", num_layers=10, hidden=2304, num_heads=24, vocab=50304, seq=1536),
        TransformerConfig(
            name="moe-14", num_layers=4, hidden=1792, num_heads=28, ffn=3072, vocab=32000, seq=2048,
            experts=Experts(num_experts=14, top_k=2, ffn=3072),
        ),
        # of the ninth set: others again
        TransformerConfig(name="7x4352", num_layers=7, hidden=4352, num_heads=34, ffn=11776, vocab=32000, seq=2048),
        TransformerConfig(name="13x2304", num_layers=13, hidden=2304, num_heads=36, ffn=6400, vocab=45056, seq=1536),
        TransformerConfig(name="21x1152", num_layers=21, hidden=1152, num_heads=18, ffn=3072, vocab=28672, seq=1024),
        TransformerConfig(name="3x7680", num_layers=3, hidden=7680, num_heads=60, ffn=20480, vocab=40960, seq=4096),
        TransformerConfig(
            name="3x2560-long", num_layers=3, hidden=2560, num_heads=20, ffn=7168, vocab=32000, seq=14336
        ),
        gpt("gpt-2816", num_layers=8, hidden=2816, num_heads=44, vocab=50304, seq=1024),
        TransformerConfig(
            name="moe-9", num_layers=5, hidden=1920, num_heads=30, ffn=3328, vocab=32000, seq=2048,
            experts=Experts(num_experts=9, top_k=3, ffn=3328),
        ),
        # of the tenth set: others again
        TransformerConfig(name="10x3328", num_layers=10, hidden=3328, num_heads=26, ffn=9216, vocab=32000, seq=2048),
        TransformerConfig(name="6x4864", num_layers=6, hidden=4864, num_heads=38, ffn=12800, vocab=38912, seq=3072),
        TransformerConfig(name="15x1920", num_layers=15, hidden=1920, num_heads=30, ffn=5376, vocab=49152, seq=1024),
        gpt("gpt-1792", num_layers=12, hidden=1792, num_heads=28, vocab=50304, seq=1024),
        TransformerConfig(
            name="moe-8", num_layers=4, hidden=2304, num_heads=36, ffn=4096, vocab=32000, seq=2048,
            experts=Experts(num_experts=8, top_k=2, ffn=4096),
        ),
        # of the eleventh set: others again
        TransformerConfig(name="7x3200", num_layers=7, hidden=3200, num_heads=50, ffn=8704, vocab=32000, seq=2048),
        TransformerConfig(name="17x2176", num_layers=17, hidden=2176, num_heads=34, ffn=5888, vocab=40960, seq=1024),
        TransformerConfig(name="4x5888", num_layers=4, hidden=5888, num_heads=46, ffn=15872, vocab=36864, seq=4096),
        TransformerConfig(name="26x384", num_layers=26, hidden=384, num_heads=6, ffn=1024, vocab=16384, seq=512),
        TransformerConfig(
            name="3x3584-long", num_layers=3, hidden=3584, num_heads=28, ffn=9728, vocab=32000, seq=9216
        ),
        gpt("gpt-1536", num_layers=12, hidden=1536, num_heads=24, vocab=50304, seq=1024),
        # of the twelfth set: others again
        TransformerConfig(name="8x2944", num_layers=8, hidden=2944, num_heads=46, ffn=7936, vocab=34816, seq=2048),
        TransformerConfig(name="12x2432", num_layers=12, hidden=2432, num_heads=38, ffn=6656, vocab=53248, seq=1536),
        TransformerConfig(name="4x6400", num_layers=4, hidden=6400, num_heads=50, ffn=17408, vocab=45056, seq=4096),
        TransformerConfig(name="16x256", num_layers=16, hidden=256, num_heads=4, ffn=704, vocab=8192, seq=512),
        TransformerConfig(
            name="3x3456-long", num_layers=3, hidden=3456, num_heads=54, ffn=9216, vocab=32000, seq=11264
        ),
        gpt("gpt-1408", num_layers=14, hidden=1408, num_heads=22, vocab=50304, seq=1024),
        TransformerConfig(
            name="moe-5", num_layers=4, hidden=1664, num_heads=26, ffn=4608, vocab=32000, seq=2048,
            experts=Experts(num_experts=5, top_k=2, ffn=4608),
        ),
        # so narrow that a GPU waits for its host all the time, in two depths: the difference is the time of a block
        TransformerConfig(name="6x128", num_layers=6, hidden=128, num_heads=8, ffn=256, vocab=512, seq=64),
        TransformerConfig(name="24x128", num_layers=24, hidden=128, num_heads=8, ffn=256, vocab=512, seq=64),
        # for CPU ranks, in single precision, so that losses show every difference
        TransformerConfig(
            name="tiny", num_layers=4, hidden=64, num_heads=4, ffn=96, vocab=128, seq=16, dtype="float32"
        ),
        gpt("tiny-gpt", num_layers=2, hidden=64, num_heads=4, vocab=128, seq=16, dtype="float32"),
        TransformerConfig(
            name="tiny-moe", num_layers=2, hidden=64, num_heads=4, ffn=96, vocab=128, seq=16, dtype="float32",
            experts=Experts(num_experts=4, top_k=2, ffn=48),
        ),
    )
}  # fmt: skip
"""Name -> configuration; bfloat16 (`TransformerConfig`'s default) unless it says otherwise."""
