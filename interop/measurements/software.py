"""The software that ran a row of a table, from the words of the row."""

from __future__ import annotations

import re

from interop.measurements.cells import ZERO_BUBBLE, Cells, Skip

__all__ = ["counts_recompute", "level_of", "software_of"]

_LEVELS = (
    (r"zero[ -]*(stage[ -]*)?([0-3])\b|stage[ -]*([0-3])\b|^([0-3])$", None),
    (r"full[ _]*shard|os *\+ *g *\+ *p", 3),
    (r"shard[ _]*grad[ _]*op|os *\+ *g\b", 2),
    (r"fsdp", 3),
    (r"distributed[ _-]*optimi[sz]er|dist(ributed)?[ _-]*opt|\bos\b|^(y|yes|true|on|enabled)$", 1),
    (r"no[ _]*shard|^(none|no|n|ddp|false|off|disabled|replicated?|dp)$", 0),
)  # fmt: skip
"""Words of a cell -> the level, the first that is found; None: the number in the words."""

_MEGATRONS = r"megatron|nemo|mcore|neox|nanotron|picotron|mindspeed|mindspore|mindformers|modellink"
_TORCHES = r"torch|\bfsdp|llm-foundry|mosaic|composer|lightning|accelerate|hugging ?face|deepspeed"
_OTHER = (
    r"maxtext|\bjax\b|\bflax\b|\bt5x\b|praxis|levanter|colossal-?ai|paddle\w*|tensorflow|"
    r"\balpa\b|oneflow|mesh-tensorflow|\bxla\b|neuronx?\b|axlearn|tinygrad|\bmlx\b|bmtrain|hetu|internevo"
)
"""Software that is not modelled: which modelled one to predict it with would have to be guessed."""

_TAKEN_AS = {
    "megatron-?deepspeed|megatron.*deepspeed": "Megatron-DeepSpeed", "deepspeed": "DeepSpeed",
    "mindspeed|modellink": "MindSpeed", "mindformers|mindspore": "MindSpore's",
    "neox": "GPT-NeoX", r"nemo\b": "NeMo", "nanotron": "nanotron", "picotron": "picotron",
    "llm-foundry": "LLM Foundry", "mosaic": "MosaicML's", r"\bcomposer\b": "Composer", "lightning": "Lightning",
    r"\baccelerate\b": "Accelerate", "hugging ?face": "Hugging Face's",
}  # fmt: skip
"""Words of software that is predicted as another one, and its name."""

_PUBLISHED = r"arxiv|https?:|github|blog|paper|readme|@ ?[0-9a-f]{7,}\b|\b20(1\d|2[0-5])\b"
_LATE = r"\b2026\b|\btorch[ -]?v?2\.(?:[89]|1\d)"
"""Words of runs with torch's parts of today: torch 2.8 came in August 2025."""


def level_of(cells: Cells, default: int | None = None) -> int | None:
    """The optimizer-parallel level of a row."""
    text = cells.text("zero_level").lower()
    if not text:
        return default
    for pattern, level in _LEVELS:
        if found := re.search(pattern, text):
            return level if level is not None else int(next(each for each in found.groups()[1:] if each))
    raise Skip(
        f"zero_level is {cells.text('zero_level')!r}, none of 0 to 3, DDP, ZeRO-1 to ZeRO-3, FSDP, SHARD_GRAD_OP"
    )


def software_of(cells: Cells, device: str) -> str:
    """The name of the stack that a row's source, notes and switches point to.

    Megatron-LM of 2022 where a source of that year or before ran on what there was then, or the device has no fused
    attention; torch's parts of 2024 where a source is published and not later than 2025 by its words, which most are.

    Raises:
        Skip: a switch that is modelled for other software only; software that is named and not modelled.
    """
    source, words = cells.words("source", "provenance"), cells.words("source", "provenance", "notes")
    compiled, own = cells.switch("compile"), "own run" in words
    if (name := _named(cells, source, words)) is not None:
        return _with_float8(cells, name)
    if (match := re.search(_OTHER, source)) and not re.search(rf"{_MEGATRONS}|\btorch\b|pytorch", source):
        raise Skip(f"software {match.group()!r} is not modelled; --stack says as which it is to be predicted")
    if re.search(_MEGATRONS, words):
        uses_torch = False
    else:
        uses_torch = own or bool(re.search(_TORCHES, words)) or compiled is not None or level_of(cells) in (2, 3)
    if not uses_torch:
        name = _megatron_of(words, device)
    elif not own and re.search(_PUBLISHED, words) and not re.search(_LATE, words):
        name = "torch-2024"
        cells.assumed.append("torch's parts of 2024: its source is published, of 2025 or before by its words")
    else:
        name = "torch"
    if compiled and uses_torch:
        name += "-compile"
    taken = next((software for word, software in _TAKEN_AS.items() if re.search(word, source)), "")
    if taken:
        cells.assumed.append(f"{taken} taken as {name}")
    if not re.search(f"{_MEGATRONS}|{_TORCHES}", words):
        cells.assumed.append(f"software not named: {name}")
    return _with_float8(cells, name)


_FLOAT8 = {"megatron": "megatron-float8", "torch": "torch-compile-float8", "torch-compile": "torch-compile-float8",
           "torch-2024-compile": "torch-compile-float8"}  # fmt: skip
"""Stack -> the one with float8 linears; torchao's need torch.compile."""


def _with_float8(cells: Cells, name: str) -> str:
    """The stack with float8 linears where the precision says so."""
    recipe = cells.float8
    if not recipe:
        return name
    if name.startswith("torchtitan"):
        how = "async" if name == "torchtitan-async" else "compile"
        return f"torchtitan-{how}-float8{'' if recipe == 'tensorwise' else '-rowwise'}"
    if name not in _FLOAT8 or (recipe == "rowwise"):
        raise Skip(f"float8 with scales a {'row' if recipe == 'rowwise' else 'tensor'} is not modelled for {name}")
    return _FLOAT8[name]


def _named(cells: Cells, source: str, words: str) -> str | None:
    """The stack that a row names by itself; None where its words have to be weighed."""
    if ZERO_BUBBLE in words:
        return "zero-bubble"
    is_titan = "torchtitan" in source
    if cells.switch("async_tp"):
        if not is_titan:
            raise Skip("asynchronous tensor parallelism is modelled for torchtitan only")
        return "torchtitan-async"
    if is_titan:
        return "torchtitan-compile" if cells.switch("compile") else "torchtitan"
    return None


def _megatron_of(words: str, device: str) -> str:
    """Megatron-LM of today; of 2022 by the year of the paper (arXiv number), or on devices without fused attention."""
    match = re.search(r"\b(2[0-9])(?:0[1-9]|1[0-2])\.\d{5}\b", words)
    year = match.group(1) if match else ""
    early = bool(year) and year <= "22" and device.startswith("a100") and "flash" not in words
    return "megatron-2022" if early or device.startswith("v100") else "megatron"


def counts_recompute(cells: Cells, metric: str, stack: str, recompute: str) -> bool:
    """Whether a rate counts recomputation: "hardware" rates do, so do Megatron-LM's until 2022 (Narayanan et al.
    2021, arXiv 2104.04473, eq. 3)."""
    if metric not in ("tflops_per_gpu", "mfu_percent"):
        return False
    words = cells.words("source", "notes", "provenance")
    counts = metric == "tflops_per_gpu" and stack == "megatron-2022"
    if metric == "tflops_per_gpu" and re.search(r"\bhfu\b|hardware (flops|tflops|flop)|2104\.04473|neox", words):
        counts = True
    if re.search(r"\bmodel (flops|tflops|flop)|\bmfu\b", words):
        counts = False
    told = "operations of all scores of attention, masked ones too"
    if recompute != "none":
        told += ", and those of recomputation" if counts else ", none of recomputation"
    cells.assumed.append(f"the rate counts {told}")
    return counts
