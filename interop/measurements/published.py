"""Sizes of published models, by family and number of parameters, from the config.json that their authors released."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from plans.model.transformer.config import Experts, Latent

__all__ = ["Sizes", "sizes_published"]


class Sizes(NamedTuple):
    """Sizes of a model.

    Args:
        layers, hidden, heads, kv_heads, ffn, vocab: as of `TransformerConfig`; 0: `heads`, four times `hidden`, or what
            is usual in the family.
        head_dim: 0: `hidden` over `heads`.
        experts, latent: of a mixture, and of latent attention.
        tied: whether its head is the embedding (tie_word_embeddings), in a family whose large models have their own.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int = 0
    ffn: int = 0
    vocab: int = 0
    head_dim: int = 0
    experts: Experts | None = None
    latent: Latent | None = None
    tied: bool = False


def _mixture(num: int, top_k: int, ffn: int, shared: int = 0, dense: int = 0) -> Experts:
    return Experts(num_experts=num, top_k=top_k, ffn=ffn, num_shared=shared, num_dense_layers=dense)


def _tied(
    layers: int, hidden: int, heads: int, kv_heads: int = 0, ffn: int = 0, vocab: int = 0, head_dim: int = 0
) -> Sizes:
    return Sizes(layers, hidden, heads, kv_heads, ffn, vocab, head_dim, tied=True)


_DEEPSEEK = {"kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}

_GPT3 = {
    125e6: Sizes(12, 768, 12), 350e6: Sizes(24, 1024, 16), 760e6: Sizes(24, 1536, 16), 1.3e9: Sizes(24, 2048, 16),
    2.7e9: Sizes(32, 2560, 32), 6.7e9: Sizes(32, 4096, 32), 13e9: Sizes(40, 5120, 40), 175e9: Sizes(96, 12288, 96),
}  # fmt: skip
"""Brown et al. 2020, arXiv 2005.14165, table 2.1; OPT took them over (arXiv 2205.01068, table 1)."""

_NEMO_GPT3 = {5e9: Sizes(24, 4096, 32), 20e9: Sizes(44, 6144, 48), 40e9: Sizes(48, 8192, 64)}
"""NeMo-Framework-Launcher, launcher_scripts/conf/training/gpt3."""

_QWEN_2 = {
    0.5e9: _tied(24, 896, 14, 2, 4864), 1.5e9: _tied(28, 1536, 12, 2, 8960), 3e9: _tied(36, 2048, 16, 2, 11008),
    7e9: Sizes(28, 3584, 28, 4, 18944), 14e9: Sizes(48, 5120, 40, 8, 13824), 32e9: Sizes(64, 5120, 40, 8, 27648),
    72e9: Sizes(80, 8192, 64, 8, 29568), 57e9: Sizes(28, 3584, 28, 4, 18944, experts=_mixture(64, 8, 2560, 8)),
}  # fmt: skip

_PUBLISHED: tuple[tuple[str, Mapping[float, Sizes]], ...] = (
    (r"gpt-?2[-_ ](small|base)", {0: Sizes(12, 768, 12)}),
    (r"gpt-?2[-_ ]medium", {0: Sizes(24, 1024, 16)}),
    (r"gpt-?2[-_ ]large", {0: Sizes(36, 1280, 20)}),
    (r"gpt-?2[-_ ]xl", {0: Sizes(48, 1600, 25)}),
    (r"gpt-?2(?!\d*\.?\d*b)", {  # the largest three are Megatron-LM's (arXiv 1909.08053, table 2 and section 5.2)
        124e6: Sizes(12, 768, 12), 355e6: Sizes(24, 1024, 16), 774e6: Sizes(36, 1280, 20), 1.5e9: Sizes(48, 1600, 25),
        2.5e9: Sizes(54, 1920, 20), 4.2e9: Sizes(64, 2304, 24), 8.3e9: Sizes(72, 3072, 32),
    }),
    (r"gpt-?3.*\b(small|base)\b", {0: _GPT3[125e6]}),
    (r"gpt-?3.*\bmedium\b", {0: _GPT3[350e6]}),
    (r"gpt-?3.*\blarge\b", {0: _GPT3[760e6]}),
    (r"gpt-?3.*\bxl\b", {0: _GPT3[1.3e9]}),
    (r"cerebras", _GPT3),
    (r"gpt[-_ ]?neo(?!x)", {125e6: Sizes(12, 768, 12), 1.3e9: Sizes(24, 2048, 16), 2.7e9: Sizes(32, 2560, 20)}),
    (r"gpt-?3(?!\d*\.?\d*b)", _GPT3 | _NEMO_GPT3 | {0: _GPT3[175e9]}),
    (r"\bgpt[-_ ]?\d+(\.\d+)?[bm]\b", _GPT3 | _NEMO_GPT3),
    (r"\bopt", _GPT3 | {30e9: Sizes(48, 7168, 56), 66e9: Sizes(64, 9216, 72)}),
    (r"gpt[-_ ]?oss", {
        20e9: Sizes(24, 2880, 64, 8, 2880, 201_088, 64, _mixture(32, 4, 2880)),
        120e9: Sizes(36, 2880, 64, 8, 2880, 201_088, 64, _mixture(128, 4, 2880)),
    }),
    (r"\bmpt|mosaic", {
        125e6: Sizes(12, 768, 12), 350e6: Sizes(24, 1024, 16), 760e6: Sizes(24, 1536, 12), 1e9: Sizes(24, 2048, 16),
        3e9: Sizes(32, 2560, 20), 7e9: Sizes(32, 4096, 32), 13e9: Sizes(40, 5120, 40), 30e9: Sizes(48, 7168, 56),
        70e9: Sizes(80, 8192, 64),
    }),
    (r"code[-_ ]?llama", {
        7e9: Sizes(32, 4096, 32, 32, 11008), 13e9: Sizes(40, 5120, 40, 40, 13824), 34e9: Sizes(48, 8192, 64, 8, 22016),
    }),
    (r"tiny[-_ ]?llama", {0: Sizes(22, 2048, 32, 4, 5632)}),
    (r"llama[-_ ]?3(?![\db])", {1e9: _tied(16, 2048, 32, 8, 8192), 3e9: _tied(28, 3072, 24, 8, 8192)}),
    (r"llama[-_ ]?4.*(scout|17b ?x ?16e)", {0: Sizes(48, 5120, 40, 8, 8192, 202_048, 128, _mixture(16, 1, 8192, 1))}),
    (r"llama[-_ ]?4.*(maverick|17b ?x ?128e)", {  # every other layer is dense: as many of them, first
        0: Sizes(48, 5120, 40, 8, 16384, 202_048, 128, _mixture(128, 1, 8192, 1, 24)),
    }),
    (r"llama|vicuna|alpaca", {
        3e9: Sizes(26, 3200, 32, 32, 8640), 7e9: Sizes(32, 4096, 32, 32, 11008), 13e9: Sizes(40, 5120, 40, 40, 13824),
        32.5e9: Sizes(60, 6656, 52, 52, 17920), 65e9: Sizes(80, 8192, 64, 64, 22016),
        70e9: Sizes(80, 8192, 64, 8, 28672),
    }),
    (r"mistral[-_ ]?nemo", {0: Sizes(40, 5120, 32, 8, 14336, 131_072, 128)}),
    (r"mistral[-_ ]?small", {0: Sizes(40, 5120, 32, 8, 32768, 131_072, 128)}),
    (r"mistral[-_ ]?large", {0: Sizes(88, 12288, 96, 8, 28672)}),
    (r"ministral", {8e9: Sizes(36, 4096, 32, 8, 12288, 131_072, 128)}),
    (r"codestral", {22e9: Sizes(56, 6144, 48, 8, 16384, 32_768)}),
    (r"qwen[-_ ]?3[-_ ]?coder.*480b", {0: Sizes(62, 6144, 96, 8, 8192, 151_936, 128, _mixture(160, 8, 2560))}),
    (r"qwen[-_ ]?3(?!\d*b)", {
        0.6e9: _tied(28, 1024, 16, 8, 3072, 0, 128), 1.7e9: _tied(28, 2048, 16, 8, 6144),
        4e9: _tied(36, 2560, 32, 8, 9728, 0, 128), 8e9: Sizes(36, 4096, 32, 8, 12288),
        14e9: Sizes(40, 5120, 40, 8, 17408), 32e9: Sizes(64, 5120, 64, 8, 25600, 0, 128),
    }),
    (r"qwen[-_ ]?2(?!\d*b)", _QWEN_2),
    (r"qwen[-_ ]?1\.5[-_ ]?moe", {0: Sizes(24, 2048, 16, 16, 5632, 151_936, 0, _mixture(60, 4, 1408, 4))}),
    (r"qwen", {
        0.5e9: _tied(24, 1024, 16, 16, 2816), 1.8e9: Sizes(24, 2048, 16, 16, 5504), 4e9: Sizes(40, 2560, 20, 20, 6912),
        7e9: Sizes(32, 4096, 32, 32, 11008), 14e9: Sizes(40, 5120, 40, 40, 13696),
        32e9: Sizes(64, 5120, 40, 8, 27392), 72e9: Sizes(80, 8192, 64, 64, 24576),
        110e9: Sizes(80, 8192, 64, 8, 49152),
    }),
    (r"\byi\b", {
        6e9: Sizes(32, 4096, 32, 4, 11008), 9e9: Sizes(48, 4096, 32, 4, 11008), 34e9: Sizes(60, 7168, 56, 8, 20480),
    }),
    (r"baichuan[-_ ]?2(?!\d*b)", {
        7e9: Sizes(32, 4096, 32, 32, 11008, 125_696), 13e9: Sizes(40, 5120, 40, 40, 13696, 125_696),
    }),
    (r"baichuan", {7e9: Sizes(32, 4096, 32, 32, 11008), 13e9: Sizes(40, 5120, 40, 40, 13696)}),
    (r"intern[-_ ]?lm[-_ ]?2(?!\d*b)", {
        7e9: Sizes(32, 4096, 32, 8, 14336, 92_544), 20e9: Sizes(48, 6144, 48, 8, 16384, 92_544),
    }),
    (r"intern[-_ ]?lm", {7e9: Sizes(32, 4096, 32, 32, 11008, 103_168), 20e9: Sizes(60, 5120, 40, 40, 13824, 103_168)}),
    (r"glm-?4\.\d.*air", {0: Sizes(46, 4096, 96, 8, 10944, 151_552, 128, _mixture(128, 8, 1408, 1, 1))}),
    (r"glm-?4\.[5-7]", {0: Sizes(92, 5120, 96, 8, 12288, 151_552, 128, _mixture(160, 8, 1536, 1, 3))}),
    (r"glm-?4", {9e9: Sizes(40, 4096, 32, 2, 13696, 151_552)}),
    (r"chatglm[-_ ]?6b", {0: Sizes(28, 4096, 32, 32, 16384, 130_528)}),
    (r"glm", {
        6e9: Sizes(28, 4096, 32, 2, 13696, 65_024), 10e9: Sizes(48, 4096, 64, 64, 16384, 50_304),
        130e9: Sizes(70, 12288, 96, 96, 32768, 150_528),
    }),
    (r"pangu|\u76d8\u53e4", {  # arXiv 2104.12369, table 1
        2.6e9: Sizes(32, 2560, 32), 13e9: Sizes(40, 5120, 40), 200e9: Sizes(64, 16384, 128),
    }),
    (r"gemma[-_ ]?3", {
        1e9: Sizes(26, 1152, 4, 1, 6912, 262_144, 256), 4e9: Sizes(34, 2560, 8, 4, 10240, 262_208, 256),
        12e9: Sizes(48, 3840, 16, 8, 15360, 262_208, 256), 27e9: Sizes(62, 5376, 32, 16, 21504, 262_208, 128),
    }),
    (r"gemma[-_ ]?2(?!\d*b)", {
        2e9: Sizes(26, 2304, 8, 4, 9216, 0, 256), 9e9: Sizes(42, 3584, 16, 8, 14336, 0, 256),
        27e9: Sizes(46, 4608, 32, 16, 36864, 0, 128),
    }),
    (r"gemma", {2e9: Sizes(18, 2048, 8, 1, 16384, 0, 256), 7e9: Sizes(28, 3072, 16, 16, 24576, 0, 256)}),
    (r"gemma", {27e9: Sizes(46, 4608, 32, 16, 36864, 0, 128)}),
    (r"falcon", {
        1e9: Sizes(24, 2048, 32), 7e9: Sizes(32, 4544, 71, 1, 18176), 40e9: Sizes(60, 8192, 128, 8, 32768),
        180e9: Sizes(80, 14848, 232, 8, 59392),
    }),
    (r"bloom", {
        560e6: Sizes(24, 1024, 16), 1.1e9: Sizes(24, 1536, 16), 1.7e9: Sizes(24, 2048, 16), 3e9: Sizes(30, 2560, 32),
        7.1e9: Sizes(30, 4096, 32), 176e9: Sizes(70, 14336, 112), 0: Sizes(70, 14336, 112),
    }),
    (r"olmo[-_ ]?2", {
        7e9: Sizes(32, 4096, 32, 32, 11008, 100_352), 13e9: Sizes(40, 5120, 40, 40, 13824, 100_352),
        32e9: Sizes(64, 5120, 40, 8, 27648, 100_352),
    }),
    (r"neox", {20e9: Sizes(44, 6144, 64)}),
    (r"redpajama", {3e9: Sizes(32, 2560, 32), 7e9: Sizes(32, 4096, 32)}),
    (r"pythia", {
        70e6: Sizes(6, 512, 8), 160e6: Sizes(12, 768, 12), 410e6: Sizes(24, 1024, 16), 1e9: Sizes(16, 2048, 8),
        1.4e9: Sizes(24, 2048, 16), 2.8e9: Sizes(32, 2560, 32), 6.9e9: Sizes(32, 4096, 32), 12e9: Sizes(36, 5120, 40),
    }),
    (r"gpt-?j", {6e9: Sizes(28, 4096, 16)}),
    (r"deepseek[-_ ]?v2[-_ ]?lite|deepseek[-_ ]?v[23].*16b", {0: Sizes(
        27, 2048, 16, 16, 10944, 102_400, 0, _mixture(64, 6, 1408, 2, 1), Latent(**_DEEPSEEK)
    )}),
    (r"deepseek[-_ ]?v2", {0: Sizes(
        60, 5120, 128, 128, 12288, 102_400, 0, _mixture(160, 6, 1536, 2, 1), Latent(q_rank=1536, **_DEEPSEEK)
    )}),
    (r"moonlight", {0: Sizes(
        27, 2048, 16, 16, 11264, 163_840, 0, _mixture(64, 6, 1408, 2, 1), Latent(**_DEEPSEEK)
    )}),
    (r"kimi[-_ ]?k2", {0: Sizes(
        61, 7168, 64, 64, 18432, 163_840, 0, _mixture(384, 8, 2048, 1, 1), Latent(q_rank=1536, **_DEEPSEEK)
    )}),
    (r"deepseek[-_ ]?coder", {
        1.3e9: Sizes(24, 2048, 16, 16, 5504, 32_256), 6.7e9: Sizes(32, 4096, 32, 32, 11008, 32_256),
        33e9: Sizes(62, 7168, 56, 8, 19200, 32_256),
    }),
    (r"deepseek", {7e9: Sizes(30, 4096, 32, 32, 11008), 67e9: Sizes(95, 8192, 64, 8, 22016)}),
    (r"nemotron", {
        8e9: Sizes(32, 4096, 32), 15e9: Sizes(32, 6144, 48, 8, 24576), 22e9: Sizes(40, 6144, 48),
        340e9: Sizes(96, 18432, 96, 8, 73728),
    }),
    (r"star[-_ ]?coder[-_ ]?2", {
        3e9: Sizes(30, 3072, 24, 2, 12288), 7e9: Sizes(32, 4608, 36, 4, 18432), 15e9: Sizes(40, 6144, 48, 4, 24576),
    }),
    (r"star[-_ ]?coder|santa[-_ ]?coder", {
        1.1e9: Sizes(24, 2048, 16, 1, 8192), 1e9: Sizes(24, 2048, 16, 1, 8192), 3e9: Sizes(36, 2816, 22, 1, 11264),
        7e9: Sizes(42, 4096, 32, 1, 16384), 15.5e9: Sizes(40, 6144, 48, 1, 24576), 0: Sizes(40, 6144, 48, 1, 24576),
    }),
    (r"olmoe", {0: Sizes(16, 2048, 16, 16, 1024, 50_304, 0, _mixture(64, 8, 1024))}),
    (r"olmo", {1e9: _tied(16, 2048, 16, 16, 8192), 7e9: Sizes(32, 4096, 32, 32, 11008)}),
    (r"dbrx", {0: Sizes(40, 6144, 48, 8, 10752, 100_352, 0, _mixture(16, 4, 10752))}),
    (r"phi[-_ ]?3\.5[-_ ]?moe", {0: Sizes(32, 4096, 32, 8, 6400, 32_064, 0, _mixture(16, 2, 6400))}),
    (r"phi[-_ ]?3.*mini", {0: Sizes(32, 3072, 32, 32, 8192, 32_064)}),
    (r"phi[-_ ]?3.*medium", {0: Sizes(40, 5120, 40, 10, 17920, 32_064)}),
    (r"phi[-_ ]?3.*small", {0: Sizes(32, 4096, 32, 8, 14336, 100_352)}),
    (r"phi[-_ ]?3", {3.8e9: Sizes(32, 3072, 32, 32, 8192, 32_064), 14e9: Sizes(40, 5120, 40, 10, 17920, 32_064)}),
    (r"phi[-_ ]?4.*mini", {0: Sizes(32, 3072, 24, 8, 8192, 200_064)}),
    (r"phi[-_ ]?4", {0: Sizes(40, 5120, 40, 10, 17920, 100_352)}),
    (r"phi[-_ ]?1", {0: Sizes(24, 2048, 32)}),
    (r"phi[-_ ]?2", {0: Sizes(32, 2560, 32)}),
    (r"stablelm[-_ ]?2", {
        1.6e9: Sizes(24, 2048, 32, 32, 5632, 100_352), 12e9: Sizes(40, 5120, 32, 8, 13824, 100_352),
    }),
    (r"stablelm", {3e9: Sizes(32, 2560, 32, 32, 6912)}),
    (r"smollm", {
        135e6: _tied(30, 576, 9, 3, 1536), 360e6: _tied(32, 960, 15, 5, 2560), 1.7e9: _tied(24, 2048, 32, 32, 8192),
        3e9: _tied(36, 2048, 16, 4, 11008, 128_256),
    }),
    (r"minicpm", {2.4e9: _tied(40, 2304, 36, 36, 5760, 122_753), 2e9: _tied(40, 2304, 36, 36, 5760, 122_753)}),
    (r"skywork", {13e9: Sizes(52, 4608, 36, 36, 12288, 65_519)}),
    (r"aquila", {7e9: Sizes(32, 4096, 32, 32, 11008, 100_008), 34e9: Sizes(60, 6144, 48, 8, 24576, 100_008)}),
    (r"granite[-_ ]?[34]", {2e9: _tied(40, 2048, 32, 8, 8192, 49_155), 8e9: _tied(40, 4096, 32, 8, 12800, 49_155)}),
    (r"command[-_ ]?r ?(plus|\+)", {0: Sizes(64, 12288, 96, 8, 33792)}),
    (r"command[-_ ]?r", {35e9: Sizes(40, 8192, 64, 64, 22528)}),
    (r"mt[-_ ]?nlg|megatron[-_ ]turing", {0: Sizes(105, 20480, 128)}),
    (r"turing[-_ ]?nlg|\bt[-_ ]?nlg", {0: Sizes(78, 4256, 28)}),
    (r"megatron.*\b8\.3b", {0: Sizes(72, 3072, 32)}),
    (r"ernie-?4\.5.*(300b|a47b)", {0: Sizes(54, 8192, 64, 8, 28672, 103_424, 0, _mixture(64, 8, 3584, 0, 3))}),
    (r"minimax-?m2", {0: Sizes(62, 3072, 48, 8, 1536, 200_064, 128, _mixture(256, 8, 1536))}),
    (r"grok[-_ ]?1", {0: Sizes(64, 6144, 48, 8, 32768, 131_072, 128, _mixture(8, 2, 32768))}),
)  # fmt: skip
"""Words of a name -> its sizes by the parameters that the name states, the first family that has them; 0: those of the
name that states none. MPT's are the files of llm-foundry, scripts/train/yamls/pretrain."""


def sizes_published(name: str, parameters: float | None) -> Sizes | None:
    """The published sizes of a model; None where its family publishes none of that many parameters.

    Args:
        name: of the model.
        parameters: that the name states.

    >>> sizes_published("Qwen2-72B", 72e9).ffn, sizes_published("LLaMA 33B", 33e9).layers, sizes_published("my 7B", 7e9)
    (29568, 60, None)
    """
    low = name.lower()
    for words, sizes in _PUBLISHED:
        if re.search(words, low) is None:
            continue
        if not parameters or set(sizes) == {0}:
            if 0 in sizes:
                return sizes[0]
            continue
        near = min(sizes, key=lambda each: abs(each / parameters - 1))
        if abs(near / parameters - 1) <= _AS_NAMED:
            return sizes[near]
    return None


_AS_NAMED = 0.085
"""By how much the number in a name is rounded: LLaMA's 32.5e9 are called 30B and 33B."""
