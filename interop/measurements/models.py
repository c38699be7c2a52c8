"""Families of transformers: the structure of a model's blocks, from its name and sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from interop.measurements.model_names import named_parameters, spellings_of
from interop.measurements.published import sizes_published
from plans.errors import TwofoldError
from plans.model.transformer import TransformerConfig, named_config
from plans.model.transformer.config import Rope

__all__ = [
    "UNNAMED_SEQ",
    "Family",
    "catalogued",
    "check_decoder",
    "family_of",
    "resized",
    "usual_ffn",
    "usual_seq",
    "usual_sizes",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The common properties of a family of models.

    Args:
        words: words of the family, for lists of assumptions.
        settings: of `TransformerConfig`.
        vocab: usual size of the vocabulary.
        dropout: whether models of the kind are trained with dropout by Megatron-LM's defaults.
    """

    words: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    vocab: int
    dropout: bool = False


_GPT_VOCAB = 51_200
"""GPT-2's 50,257 entries, padded to a multiple of 128 x 8 (Narayanan et al. 2021, arXiv 2104.04473, section 5.1)."""

_LLAMA_VOCAB = 32_000
"""Vocabulary of the usual SentencePiece models."""

_PLAIN = {"gated": False, "norm": "layer"}
_BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
_QUARTER = Rope(fraction=0.25)

_GPT = Family(
    words="GPT: two matrices in the MLP, layer norm, biases, learned positions, the head tied to the embedding",
    settings=_PLAIN | _BIASES | {"tied": True, "position": "learned"}, vocab=_GPT_VOCAB, dropout=True,
)  # fmt: skip
_LLAMA = Family(
    words="Llama: three matrices in the MLP, RMS norm, no biases, rotary positions, a head of its own",
    settings={"gated": True, "norm": "rms", "position": "rope"}, vocab=_LLAMA_VOCAB,
)  # fmt: skip


def _llama(words: str, vocab: int, **settings: Any) -> Family:
    return Family(words=f"{words}: as Llama", settings={**_LLAMA.settings, **settings}, vocab=vocab)


_FAMILIES: tuple[tuple[str, Family], ...] = (
    (r"llama[-_ ]?3(?![\db])", _llama("Llama 3", 128_256)),
    (r"codellama|code[-_ ]llama", _llama("Code Llama", 32_016)),
    (r"llama|vicuna|alpaca|mistral|tinyllama|zephyr", _LLAMA),
    (r"\byi[-_ ]?\d", _llama("Yi", 64_000)),
    (r"qwen[-_ ]?3", _llama("Qwen 3", 151_936)),
    (r"qwen", _llama("Qwen, biases on queries, keys and values", 151_936, qkv_bias=True)),
    (r"gemma", _llama("Gemma, heads of 256, tied head", 256_000, head_dim=256, tied=True)),
    (r"baichuan|internlm", _llama("Baichuan, InternLM", 64_000)),
    (r"chatglm[-_ ]?6b|glm[-_ ]?10b", Family(
        words="GLM of 2022: two matrices in the MLP, layer norm, biases, rotary positions",
        settings=_PLAIN | _BIASES | {"position": "rope"}, vocab=130_528)),
    (r"chatglm|\bglm", _llama("GLM", 65_024)),
    (r"stablelm", _llama("StableLM", 50_304)),
    (r"phi[-_ ]?(?:1|2(?!\d))", Family(
        words="Phi-1 and Phi-2: attention and MLP side by side, rotary positions",
        settings=_PLAIN | _BIASES | {"position": "rope", "rope": _QUARTER, "parallel_residual": True}, vocab=51_200)),
    (r"phi[-_ ]?[34]", _llama("Phi", 32_064)),
    (r"smollm|minicpm|skywork|aquila|granite[-_ ]?[34]", _llama("SmolLM, MiniCPM, Skywork, Aquila, Granite", 49_152)),
    (r"command[-_ ]?r", _llama("Command R, its head tied", 256_000, tied=True)),
    (r"moonlight", _llama("Moonlight, as DeepSeek-V3", 163_840)),
    (r"gpt[-_ ]?oss", _llama(
        "gpt-oss, without its windows and sinks", 201_088, qkv_bias=True, out_bias=True)),
    (r"deepseek|kimi", _llama("DeepSeek, dense", 102_400)),
    (r"olmo", _llama("OLMo", 50_304)),
    (r"neox|pythia|redpajama|dolly", Family(
        words="GPT-NeoX: layer norm, biases, a quarter of each head rotated, attention and MLP side by side",
        settings=_PLAIN | _BIASES | {"position": "rope", "rope": _QUARTER, "parallel_residual": True}, vocab=50_432)),
    (r"gpt[-_ ]?j", Family(
        words="GPT-J: attention and MLP side by side, rotary positions",
        settings=_PLAIN | {"mlp_bias": True, "position": "rope", "rope": _QUARTER, "parallel_residual": True},
        vocab=50_400)),
    (r"\bmpt|mosaic", Family(
        words="MPT: layer norm, no biases, ALiBi in the attention kernel (priced as none), tied head",
        settings=_PLAIN | {"position": "none", "tied": True}, vocab=50_368)),
    (r"bloom", Family(
        words="BLOOM: layer norm, biases, ALiBi in the attention kernel (priced as none), tied head",
        settings=_PLAIN | _BIASES | {"position": "none", "tied": True}, vocab=250_880)),
    (r"falcon", Family(
        words="Falcon: layer norm, no biases, rotary positions, attention and MLP side by side, tied head",
        settings=_PLAIN | {"position": "rope", "parallel_residual": True, "tied": True}, vocab=65_024)),
    (r"nemotron", Family(
        words="Nemotron: two matrices in the MLP, layer norm, no biases, rotary positions",
        settings=_PLAIN | {"position": "rope"}, vocab=256_000)),
    (r"star[-_ ]?coder|santa[-_ ]?coder|bigcode", Family(
        words="StarCoder: as GPT, few key-value heads",
        settings=_PLAIN | _BIASES | {"tied": True, "position": "learned"}, vocab=49_152, dropout=True)),
    (r"\bopt[-_ ]?\d|\bopt\b", Family(words="OPT: as GPT", settings=_GPT.settings, vocab=50_272, dropout=True)),
    (r"gpt|megatron|turing|mt[-_ ]?nlg", _GPT),
)  # fmt: skip

_NOT_DECODERS = (
    r"bert|\b(?:m|by|code|flan[-_ ]?)?t5|\bul2|\bvit\b|vit[-_]|\bdit\b|diffusion|unet|whisper|clip|mamba|jamba|rwkv"
    r"|resnet|flux|nemotron[-_ ]?(?:h(?![a-z])|nano)|zamba|samba|qwen[-_ ]?3[-_ ]?next"
    r"|[-_ \d]vl\b|\bvlm|vision|llava|internvl|multi-?modal|[-_ ]omni\b|audio"
)

_MIXTURES = (
    r"mixtral|moe|dbrx|grok|switch|glam|arctic|moonlight|gpt[-_ ]?oss|glm[-_ ]?4\.\d|hunyuan"
    r"|\d+ ?x ?\d+(\.\d+)?b|experts?|-a\d+(\.\d+)?b|deepseek[-_ ]?(v2|v3|r1)|\bling[-_ ]|minimax|ernie"
)


_USUAL = (
    (0.125e9, (12, 768, 12)), (0.35e9, (24, 1024, 16)), (0.76e9, (24, 1536, 16)), (1.1e9, (22, 2048, 32)),
    (1.3e9, (24, 2048, 16)), (1.7e9, (24, 2304, 24)), (2.7e9, (32, 2560, 32)), (3.6e9, (30, 3072, 32)),
    (7e9, (32, 4096, 32)), (7.5e9, (36, 4096, 32)), (8e9, (32, 4096, 32)), (13e9, (40, 5120, 40)),
    (18e9, (40, 6144, 48)), (22e9, (48, 6144, 64)), (30e9, (60, 6656, 52)), (39e9, (48, 8192, 64)),
    (65e9, (80, 8192, 64)), (76e9, (60, 10240, 80)), (145e9, (80, 12288, 96)), (175e9, (96, 12288, 96)),
    (310e9, (96, 16384, 128)), (405e9, (126, 16384, 128)), (530e9, (105, 20480, 128)), (1008e9, (128, 25600, 160)),
)  # fmt: skip
"""Parameters -> layers, width, heads: GPT-3 (arXiv 2005.14165, table 2.1), Megatron-LM (arXiv 2104.04473, table 1),
Llama (arXiv 2302.13971, table 2; 2407.21783, table 3), TinyLlama (arXiv 2401.02385)."""


def usual_sizes(name: str) -> tuple[int, int, int] | None:
    """Layers, width and heads of usual models with the number of parameters in a name; None if none is close.

    The layers of the nearest one are scaled.

    >>> usual_sizes("our 7B"), usual_sizes("104B en"), usual_sizes("ours"), usual_sizes(400 * "9" + "B")
    ((32, 4096, 32), (82, 10240, 80), None, None)
    """
    stated = named_parameters(name)
    if not stated or not math.isfinite(stated):  # "0B", or hundreds of digits
        return None
    near, (layers, hidden, heads) = min(_USUAL, key=lambda each: abs(math.log(each[0] / stated)))
    ratio = stated / near
    if not 0.5 < ratio < 2:
        return None
    return (layers if 0.95 < ratio < 1.05 else max(1, round(layers * ratio)), hidden, heads)


UNNAMED_SEQ = 2048
"""Tokens of a sequence if neither the row nor the name of the model determines them."""

_SEQUENCES = (
    (r"llama[-_ ]?[34](?![\db])|qwen[-_ ]?[23]|gemma|nemotron|star[-_ ]?coder|grok", 8192),
    (
        r"llama[-_ ]?2|llama[-_ ]?70b|mistral|mixtral|deepseek|yi\b|qwen|baichuan|glm|intern[-_ ]?lm|gpt[-_ ]?oss|dbrx"
        r"|olmo|command",
        4096,
    ),
    (r"gpt[-_ ]?3|\bopt\b|bloom|turing|mt[-_ ]?nlg|gpt[-_ ]?j|neo|pythia|\bmpt|falcon|llama|vicuna|alpaca|pangu", 2048),
    (r"gpt[-_ ]?2(?!\d*\.?\d*b)", 1024),
)
"""Words of names -> tokens of a sequence in pre-training (the models' papers)."""


def usual_seq(name: str) -> int | None:
    """The usual sequence length in pre-training of a model; None if it is unknown.

    >>> usual_seq("Llama 3 8B"), usual_seq("Llama-2-7b"), usual_seq("GPT-3"), usual_seq("ours 7B")
    (8192, 4096, 2048, None)
    """
    return next((seq for words, seq in _SEQUENCES if re.search(words, name.lower())), None)


@lru_cache(maxsize=4096)
def catalogued(name: str) -> TransformerConfig | None:
    """The catalogued model of this name, or the one whose sizes were published; None where there is none.

    >>> catalogued("Meta-Llama-3.1-70B").num_layers, catalogued("MPT-7B").hidden, catalogued("my own")
    (80, 4096, None)
    """
    plain, *others = spellings_of(name)
    if re.search(_NOT_DECODERS, plain):
        return None
    for each in (plain, *others):
        try:
            found = named_config(each)
        except TwofoldError:
            continue
        if _is_as_large(found, plain):
            return found
    return _published(plain)


def _is_as_large(config: TransformerConfig, name: str) -> bool:
    """Whether a model has about as many parameters as its name states, total or active ("GPT-2 1.5B" is not GPT-2)."""
    stated = named_parameters(name)
    counts = (config.num_parameters, config.num_active_parameters)
    return stated is None or re.search(r"\d ?x ?\d", name) is not None or any(
        0.6 < stated / count < 1.6 for count in counts
    )  # fmt: skip


def _published(name: str) -> TransformerConfig | None:
    sizes = sizes_published(name, named_parameters(re.sub(r"[-_ ]a\d+(\.\d+)?b", "", name.lower())))
    if sizes is None:
        return None
    family, _ = family_of(
        name, hidden=sizes.hidden, heads=sizes.heads, kv_heads=sizes.kv_heads or sizes.heads,
        ffn=sizes.ffn or 4 * sizes.hidden, has_experts=True,  # a row may state the experts of "GPT 1.3B MoE-128"
    )  # fmt: skip
    settings = dict(family.settings) | ({"head_dim": sizes.head_dim} if sizes.head_dim else {})
    settings |= {"tied": True} if sizes.tied else {}
    return TransformerConfig(
        name=name, num_layers=sizes.layers, hidden=sizes.hidden, num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads or sizes.heads, ffn=sizes.ffn or 4 * sizes.hidden,
        seq=usual_seq(name) or UNNAMED_SEQ, vocab=sizes.vocab or family.vocab, experts=sizes.experts,
        latent=sizes.latent, source="its released configuration", **settings,
    )  # fmt: skip


def check_decoder(name: str) -> None:
    """Check that a model is a decoder-only transformer, by its name.

    Raises:
        TwofoldError: it is.
    """
    if match := re.search(_NOT_DECODERS, name.lower()):
        raise TwofoldError(f"model {name!r} is not modelled ({match.group()}): decoder-only transformers are")


def family_of(
    name: str, *, hidden: int, heads: int, kv_heads: int, ffn: int, has_experts: bool = False
) -> tuple[Family, str]:
    """The family of a model, and the assumption behind it; "" if its name states it.

    Raises:
        TwofoldError: a model that is not a decoder-only transformer, or a mixture of experts that is not catalogued.

    >>> family_of("my-7b", hidden=4096, heads=32, kv_heads=8, ffn=14336)[0].settings["gated"]
    True
    """
    low = name.lower()
    check_decoder(name)
    if re.search(_MIXTURES, low) and not has_experts:
        raise TwofoldError(
            f"model {name!r} is a mixture whose experts the row does not state; the catalogue's are known"
        )
    for pattern, family in _FAMILIES:
        if re.search(pattern, low):
            if family is _GPT and _is_gated(hidden, ffn, few_kv_heads=kv_heads < heads):
                return _LLAMA, f"blocks as in {_LLAMA.words} (its sizes are not GPT's)"
            return family, f"blocks as in {family.words}"
    family = _GPT if ffn % hidden == 0 and kv_heads == heads else _LLAMA
    return family, f"family not named: by its sizes {family.words}"


_OF_GATED = (2.5, 2.8)
"""Ratios of the inner size to the width of a gated MLP of as many parameters as a plain one, 8/3 rounded up."""


def _is_gated(hidden: int, ffn: int, *, few_kv_heads: bool) -> bool:
    """Whether the MLP of a model that is called GPT has three matrices, by its inner size."""
    return _OF_GATED[0] <= ffn / hidden <= _OF_GATED[1] or (few_kv_heads and ffn % hidden != 0)


def usual_ffn(family: Family, hidden: int) -> int:
    """The inner size of an MLP that a row does not state: 4 x hidden, or two thirds of that for a gated MLP, rounded up
    to a multiple of 256 (Touvron et al. 2023, arXiv 2302.13971, section 2.2, and its code).

    >>> usual_ffn(family_of("llama", hidden=4096, heads=32, kv_heads=32, ffn=0)[0], 4096)
    11008
    """
    return -(-(8 * hidden // 3) // 256) * 256 if family.settings["gated"] else 4 * hidden


def resized(config: TransformerConfig, **sizes: Any) -> TransformerConfig:
    """A catalogued model with the sizes that a row states.

    >>> resized(named_config("llama-3-8b"), num_layers=4).num_layers
    4
    """
    return replace(config, **sizes)
