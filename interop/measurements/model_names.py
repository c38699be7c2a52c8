"""Spellings of the names of models, and the number of parameters that a name states."""

from __future__ import annotations

import re

__all__ = ["named_parameters", "spellings_of"]

_SPELLINGS = (
    (r"\u00d7", "x"),
    (r"^.*/", ""),  # the organization at Hugging Face
    (r"^(?:meta|mistralai|openai|nvidia|eleutherai|facebook)[- ]", ""),
    (r"^ds[-_ ]?(?=v\d|r1)", "deepseek-"),
    (r"^deepseek[-_ ]?3(?![\d.]*b)", "deepseek-v3"),
    (r"^llama[-_ ]?31(?!\d)", "llama-3.1"),
    (r"(\d) ?billion(?: param\w*)?", r"\1b"),
    (r" *\((\d+(?:\.\d+)?[bmt])\b[^()]*\)$", r" \1"),
    (r" *\([^()]*\)$", ""),
    (r"(?:[-_ ](?:base|pretrain(?:ing)?|instruct|chat|it|hf|bf16|fp8|fp16|v0\.\d|\d+k))+$", ""),
    (r"(deepseek[-_ ]?)r1\b", r"\1v3"),  # the same model, trained further
    (r"(deepseek[-_ ]?v3)(?:[-_ ]0324|\.1)\b", r"\1"),
    (r"^qwq", "qwen2.5"),
    (r"^mixtral$", "mixtral-8x7b"),
    (r"^(qwen3)[-_ ]?moe[-_ ]?(30b|235b)$", r"\1-\2"),
    (r"^(qwen3-(?:30b))$", r"\1-a3b"), (r"^(qwen3-(?:235b))$", r"\1-a22b"),
)  # fmt: skip
"""Patterns of names in lower case -> the usual spelling, in this order."""


def spellings_of(name: str) -> tuple[str, ...]:
    """The spellings under which a model may be known, the fullest first.

    >>> spellings_of("meta-llama/Meta-Llama-3.1-70B-Instruct"), spellings_of("DS-V3 671B")
    (('llama-3.1-70b', 'llama-3-70b', 'llama-3.1'), ('deepseek-v3 671b', 'deepseek-v3'))
    >>> spellings_of("Llama 2 (70B)")[0], spellings_of("LLAMA31_405B")[0]
    ('llama 2 70b', 'llama-3.1_405b')
    """
    plain = name.strip().lower()
    for pattern, spelling in _SPELLINGS:
        plain = re.sub(pattern, spelling, plain)
    version = re.sub(r"^(llama)-?(2|3)(?:\.\d)?-?", r"\1-\2-", plain)
    without_size = re.sub(r"[-_ ]\d+(?:\.\d+)?b$", "", plain)
    return tuple(dict.fromkeys((plain, version, without_size)))


def named_parameters(name: str) -> float | None:
    """The number of parameters that a name states, None where it states none.

    >>> named_parameters("GPT-3 6.7B"), named_parameters("gpt2-125m"), named_parameters("bloom-7b1")
    (6700000000.0, 125000000.0, 7100000000.0)
    """
    low = re.sub(r"(?<![\d.])(\d+)b(\d)(?!\d)", r"\1.\2b", name.lower())  # BLOOM's "7b1"
    low = re.sub(r"(?<=\d) ?(b|m|tr)illion", lambda found: f"{found[1][0]} ", low)
    found = re.findall(r"(?<![a-z0-9.])(\d+(?:\.\d+)?) ?([mbt])(?![a-z0-9])", low)
    if not found:
        return None
    number, unit = found[-1]
    return float(number) * {"m": 1e6, "b": 1e9, "t": 1e12}[unit]
