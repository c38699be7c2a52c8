"""Transformers by name, with the published figures they were built from.

GPT-3 and Megatron models take the vocabulary of Megatron-LM, GPT-2's 50,257 padded to 51,200, which tensor parallelism
can split (Narayanan et al. 2021, section 5).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable

from plans.errors import TwofoldError, unknown_name
from plans.model.transformer.config import Experts, Latent, Rope, TransformerConfig

__all__ = ["model_names", "named_config"]

_GPT3 = "Brown et al. 2020, arXiv 2005.14165, table 2.1"
_MEGATRON = "Korthikanti et al. 2022, arXiv 2205.05198, table 3; vocabulary 51,200 and sequence 2,048 of its section 6"
_NARAYANAN = "Narayanan et al. 2021, arXiv 2104.04473, table 1"
_LLAMA2 = "Touvron et al. 2023, arXiv 2307.09288; sizes of the released params.json"
_LLAMA3 = "Grattafiori et al. 2024, arXiv 2407.21783, table 3"
_MIXTRAL_22B = "Mistral AI 2024, config.json of mistralai/Mixtral-8x22B-v0.1"
_DEEPSEEK_MOE = "Dai et al. 2024, arXiv 2401.06066, section 5.1; config.json of deepseek-ai/deepseek-moe-16b-base"
_QWEN3 = "Qwen Team 2025, arXiv 2505.09388, table 2 (mixtures), and config.json of Qwen/Qwen3-30B-A3B and -235B-A22B"
_DEEPSEEK_V3 = (
    "DeepSeek-AI 2024, arXiv 2412.19437, section 4.2; config.json of deepseek-ai/DeepSeek-V3; seq of pre-training"
)
_MIXTRAL = "Jiang et al. 2024, arXiv 2401.04088, table 1"


def _gpt(
    name: str, num_layers: int, hidden: int, num_heads: int, source: str, *, vocab: int = 51_200, seq: int = 2048
) -> TransformerConfig:
    return TransformerConfig(
        name=name, num_layers=num_layers, hidden=hidden, num_heads=num_heads, vocab=vocab, seq=seq, gated=False,
        norm="layer", qkv_bias=True, out_bias=True, mlp_bias=True, tied=True, position="learned", source=source,
    )  # fmt: skip


_MODELS: dict[str, Callable[[], TransformerConfig]] = {
    "gpt2": lambda: _gpt(
        "gpt2", 12, 768, 12, "Radford et al. 2019 (GPT-2), and openai/gpt-2's hparams.json of 124M", vocab=50_257,
        seq=1024,
    ),
    "gpt2-medium": lambda: _gpt(
        "gpt2-medium", 24, 1024, 16, "Radford et al. 2019 (GPT-2), and openai/gpt-2's hparams.json of 355M",
        vocab=50_257, seq=1024,
    ),
    "gpt2-large": lambda: _gpt(
        "gpt2-large", 36, 1280, 20, "Radford et al. 2019 (GPT-2), and openai/gpt-2's hparams.json of 774M",
        vocab=50_257, seq=1024,
    ),
    "gpt2-xl": lambda: _gpt(
        "gpt2-xl", 48, 1600, 25, "Radford et al. 2019 (GPT-2), and openai/gpt-2's hparams.json of 1558M", vocab=50_257,
        seq=1024,
    ),
    "gpt3-125m": lambda: _gpt("gpt3-125m", 12, 768, 12, _GPT3),
    "gpt3-350m": lambda: _gpt("gpt3-350m", 24, 1024, 16, _GPT3),
    "gpt3-760m": lambda: _gpt("gpt3-760m", 24, 1536, 16, _GPT3),
    "gpt3-1.3b": lambda: _gpt("gpt3-1.3b", 24, 2048, 16, f"{_GPT3}; 16 heads of 128: its 24 do not divide 2,048"),
    "gpt3-2.7b": lambda: _gpt("gpt3-2.7b", 32, 2560, 32, _GPT3),
    "gpt3-6.7b": lambda: _gpt("gpt3-6.7b", 32, 4096, 32, _GPT3),
    "gpt3-13b": lambda: _gpt("gpt3-13b", 40, 5120, 40, f"{_GPT3}; hidden 40 x 128, its 5,140 is no multiple of 40"),
    "gpt3-175b": lambda: _gpt("gpt3-175b", 96, 12288, 96, f"{_GPT3}; vocabulary of {_NARAYANAN}"),
    "megatron-1.7b": lambda: _gpt("megatron-1.7b", 24, 2304, 24, _NARAYANAN),
    "megatron-3.6b": lambda: _gpt("megatron-3.6b", 30, 3072, 32, _NARAYANAN),
    "megatron-7.5b": lambda: _gpt("megatron-7.5b", 36, 4096, 32, _NARAYANAN),
    "megatron-18.4b": lambda: _gpt("megatron-18.4b", 40, 6144, 48, _NARAYANAN),
    "megatron-22b": lambda: _gpt("megatron-22b", 48, 6144, 64, _MEGATRON),
    "megatron-39.1b": lambda: _gpt("megatron-39.1b", 48, 8192, 64, _NARAYANAN),
    "megatron-76.1b": lambda: _gpt("megatron-76.1b", 60, 10240, 80, _NARAYANAN),
    "megatron-145.6b": lambda: _gpt("megatron-145.6b", 80, 12288, 96, _NARAYANAN),
    "megatron-310.1b": lambda: _gpt("megatron-310.1b", 96, 16384, 128, _NARAYANAN),
    "megatron-530b": lambda: _gpt("megatron-530b", 105, 20480, 128, _MEGATRON),
    "megatron-1t": lambda: _gpt("megatron-1t", 128, 25600, 160, _MEGATRON),
    "llama-2-7b": lambda: TransformerConfig(
        name="llama-2-7b", num_layers=32, hidden=4096, num_heads=32, num_kv_heads=32, ffn=11008, vocab=32_000,
        seq=4096, rope=Rope(base=10_000.0), source=_LLAMA2,
    ),
    "llama-2-13b": lambda: TransformerConfig(
        name="llama-2-13b", num_layers=40, hidden=5120, num_heads=40, num_kv_heads=40, ffn=13824, vocab=32_000,
        seq=4096, rope=Rope(base=10_000.0), source=_LLAMA2,
    ),
    "llama-2-70b": lambda: TransformerConfig(
        name="llama-2-70b", num_layers=80, hidden=8192, num_heads=64, num_kv_heads=8, ffn=28672, vocab=32_000,
        seq=4096, rope=Rope(base=10_000.0), source=_LLAMA2,
    ),
    "llama-3-8b": lambda: TransformerConfig(
        name="llama-3-8b", num_layers=32, hidden=4096, num_heads=32, num_kv_heads=8, ffn=14336, vocab=128_256,
        seq=8192, rope=Rope(base=500_000.0), source=_LLAMA3,
    ),
    "llama-3-70b": lambda: TransformerConfig(
        name="llama-3-70b", num_layers=80, hidden=8192, num_heads=64, num_kv_heads=8, ffn=28672, vocab=128_256,
        seq=8192, rope=Rope(base=500_000.0), source=_LLAMA3,
    ),
    "llama-3-405b": lambda: TransformerConfig(
        name="llama-3-405b", num_layers=126, hidden=16384, num_heads=128, num_kv_heads=8, ffn=53248, vocab=128_256,
        seq=8192, rope=Rope(base=500_000.0), source=_LLAMA3,
    ),
    "mistral-7b": lambda: TransformerConfig(
        name="mistral-7b", num_layers=32, hidden=4096, num_heads=32, num_kv_heads=8, ffn=14336, vocab=32_000,
        seq=4096, rope=Rope(base=10_000.0),
        source="Jiang et al. 2023, arXiv 2310.06825, table 1 (window 4,096 = seq)",
    ),
    "mixtral-8x7b": lambda: TransformerConfig(
        name="mixtral-8x7b", num_layers=32, hidden=4096, num_heads=32, num_kv_heads=8, ffn=14336, vocab=32_000,
        seq=32_768, rope=Rope(base=1_000_000.0), experts=Experts(num_experts=8, top_k=2, ffn=14336), source=_MIXTRAL,
    ),
    "mixtral-8x22b": lambda: TransformerConfig(
        name="mixtral-8x22b", num_layers=56, hidden=6144, num_heads=48, num_kv_heads=8, ffn=16384, vocab=32_768,
        seq=65_536, rope=Rope(base=1_000_000.0), experts=Experts(num_experts=8, top_k=2, ffn=16384),
        source=_MIXTRAL_22B,
    ),
    "qwen3-30b-a3b": lambda: TransformerConfig(
        name="qwen3-30b-a3b", num_layers=48, hidden=2048, num_heads=32, num_kv_heads=4, head_dim=128, ffn=6144,
        vocab=151_936, seq=4096, norm_eps=1e-6, rope=Rope(base=1_000_000.0), qk_norm="head",
        experts=Experts(num_experts=128, top_k=8, ffn=768), source=_QWEN3,
    ),
    "qwen3-235b-a22b": lambda: TransformerConfig(
        name="qwen3-235b-a22b", num_layers=94, hidden=4096, num_heads=64, num_kv_heads=4, head_dim=128, ffn=12_288,
        vocab=151_936, seq=4096, norm_eps=1e-6, rope=Rope(base=1_000_000.0), qk_norm="head",
        experts=Experts(num_experts=128, top_k=8, ffn=1536), source=_QWEN3,
    ),
    "deepseek-moe-16b": lambda: TransformerConfig(
        name="deepseek-moe-16b", num_layers=28, hidden=2048, num_heads=16, num_kv_heads=16, ffn=10944, vocab=102_400,
        seq=4096, rope=Rope(base=10_000.0),
        experts=Experts(num_experts=64, top_k=6, ffn=1408, num_shared=2, num_dense_layers=1, weights="all"),
        source=_DEEPSEEK_MOE,
    ),
    "deepseek-v3": lambda: TransformerConfig(
        name="deepseek-v3", num_layers=61, hidden=7168, num_heads=128, ffn=18_432, vocab=129_280, seq=4096,
        norm_eps=1e-6, rope=Rope(base=10_000.0),
        latent=Latent(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
        experts=Experts(num_experts=256, top_k=8, ffn=2048, num_shared=1, num_dense_layers=3), source=_DEEPSEEK_V3,
    ),
}  # fmt: skip


def model_names() -> tuple[str, ...]:
    """The names that `named_config` knows, sorted."""
    return tuple(sorted(_MODELS))


def named_config(name: str) -> TransformerConfig:
    """The configuration of a published model; case and punctuation do not matter, "llama-3.1-8b" is "llama-3-8b".

    Raises:
        TwofoldError: an unknown name, with suggestions.

    >>> named_config("Llama3_8B").num_parameters
    8030261248
    """
    known = {_plain(each): each for each in _MODELS}
    plain = re.sub(r"^(meta)?llama3\.[123](?=\d+b)", "llama3", _plain(name)).removesuffix("v0.1")
    if plain in known:
        return _MODELS[known[plain]]()
    close = difflib.get_close_matches(plain, known, n=3, cutoff=0.6)
    message = unknown_name("transformer", name, model_names(), [known[each] for each in close])
    raise TwofoldError(f"{message} (a name, or the path of a config.json)")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())
