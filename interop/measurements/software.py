"""The software that ran a row of a table, from the words of the row."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from interop.measurements.cells import Cells, Skip
from interop.measurements.composed import NO_FSDP
from interop.measurements.mixtures import HAI_LLM, OF_2025
from interop.measurements.precisions import has_products
from interop.measurements.spellings import level_named

__all__ = [
    "COMPOSER", "borrows", "counts_recompute", "is_deepseek_v3", "keeps_low", "level_of", "names_part",
    "names_software", "reduces_low", "software_of", "software_of_headers",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """The stack with which a software is predicted.

    Args:
        words: pattern of its name in a source.
        name: its name when it is predicted as another one; "" where that goes without saying.
        stacks: of the present, the most plausible first; a row's interval spans all of them.
        is_known: whether anything of it was measured or read in its code.
        reduces_low: whether gradients are reduced over replicas in the 16-bit dtype of activations; else in float32.
        keeps_low: whether gradients are also accumulated in it.
        is_part: whether other software is built from it.
    """

    words: str
    name: str = ""
    stacks: tuple[str, ...]
    is_known: bool = True
    reduces_low: bool = False
    keeps_low: bool = False
    is_part: bool = False


_SOFTWARE = (
    Software(words=r"2401\.10241", stacks=("zero-bubble",)),
    Software(words=r"zero[- ]?bubble|sail-sg", name="a zero-bubble fork of Megatron-LM",
             stacks=("megatron", "zero-bubble")),
    Software(words=HAI_LLM, name="HAI-LLM", stacks=("megatron",)),
    Software(words="torchtitan", stacks=("torchtitan",)),
    Software(words=r"megatron-?deepspeed|megatron.*deepspeed|deepspeed.*megatron|deepspeed.*(pipeline|3d)",
             name="Megatron-DeepSpeed", stacks=("megatron-deepspeed", "megatron"), reduces_low=True),
    Software(words="neox", name="GPT-NeoX", stacks=("megatron-deepspeed", "megatron"), reduces_low=True),
    Software(words="mindspeed|modellink", name="MindSpeed", stacks=("megatron",)),
    Software(words="mindformers|mindspore", name="MindSpore's", stacks=("mindspore", "megatron")),
    Software(words=r"nemo\b|megatron-?bridge", name="NeMo", stacks=("megatron",), reduces_low=True, keeps_low=True),
    Software(words="nanotron|picotron", name="Nanotron", stacks=("megatron", "torch")),
    Software(words=r"megatron|\bmcore\b|megascale|1909\.08053|2104\.04473|2205\.05198", stacks=("megatron",)),
    Software(words="deepspeed|ulysses", name="DeepSpeed", stacks=("torch",), reduces_low=True, keeps_low=True),
    Software(words=r"foundry|mosaic|composer", name="LLM Foundry", stacks=("torch-composer",)),
    Software(words=r"lightning|lit-?gpt|accelerate|hugging ?face|\bhf\b|transformers\b|axolotl|llama-?factory|torchtune"
                   r"|\btrl\b|unsloth|ms-?swift", name="Hugging Face's or Lightning",
             stacks=("torch",), reduces_low=True),
    Software(words=r"fsdp-?1|fsdp v1|fullyshardeddataparallel", name="FSDP1", stacks=("torch-2024",),
             reduces_low=True, is_part=True),
    Software(words=r"olmo-?core", name="OLMo-core", stacks=("torch-compile",)),
    Software(words=r"torch|\bfsdp|\bddp\b|nanogpt", stacks=("torch",), is_part=True),
    Software(words=r"maxtext|\bjax\b|\bflax\b|\bt5x\b|praxis|levanter|axlearn|\btpus?\b|\bv5[ep]-|\balpa\b|\bxla\b|tensorflow|tinygrad",
             name="JAX's", stacks=("torch-compile", "megatron"), is_known=False),
    Software(words=r"colossal-?ai|paddle\w*|oneflow|internevo|bmtrain|hetu", name="software not known here",
             stacks=("megatron", "torch"), is_known=False),
)  # fmt: skip
"""In the order in which they are looked for; papers of a software by their numbers at arXiv. GPT-NeoX runs Megatron's
layers in DeepSpeed's engine (its README);
NeMo and Megatron-Bridge run Megatron-core; MindSpeed patches Megatron-LM for Ascend (its README). DeepSpeed reduces
gradients in the dtype of the model (runtime/engine.py, communication_data_type) and accumulates them in it
(get_data_types; Megatron-DeepSpeed asks for float32 with bf16), Hugging Face's FSDP plugin and the
published recipes of FSDP1 have one dtype for parameters and reductions. The recipes with which NeMo and Megatron-Bridge
measure set grad_reduce_in_fp32 to false, which is the dtype of Megatron-core's buffers of gradients."""

_PUBLISHED = r"arxiv|https?:|github|blog|paper|readme|@ ?[0-9a-f]{7,}\b|\b20(1\d|2[0-5])\b"
_HALF_LOSS = r"measured/readme|loss (of|in|on) (the )?(bf16|fp16|half)|(no|without) float (copy|copies)"
"""Words of runs without float copies of the logits in the loss, and of notes of our own runs."""

_TORCHTITAN_2024 = r"(?<!\d)(?:2024(?:-?(?:0[1-9]|1[0-2]))?|2025-?0[1-3])(?!\d)"
"""Words of runs of torchtitan from before it compiled its loss."""

_LATE = r"\b2026\b|\btorch[ -]?v?2\.(?:[89]|1\d)"
"""Words of runs with torch's parts of today: torch 2.8 came in August 2025."""


_EARLY = {"megatron": "megatron-2022", "megatron-deepspeed": "megatron-deepspeed-2022"}
"""Stack -> the one of 2022 and before."""

_LEVEL_IN_WORDS = (
    r"\b(?:no|without|w/o)[ -](?:deepspeed[ -]*)?zero\b(?![ -]*(?:bubble|offload|infinity))"
    r"|zero[ -]*(?:stage[ -]*)?[0-3]\b|zero[ -]*(?:offload|infinity)\b|full[_ ]shard|shard_grad_op|\bhsdp\b|\bddp\b"
    r"|\bgemini\b"
)


def level_of(cells: Cells) -> int | None:
    """The optimizer-parallel level of a row, from its own cell or the words of its software; None: not stated."""
    text = cells.text("zero_level").lower()
    if not text and "nanogpt" in cells.words("source", "notes"):
        text = "ddp"
    if not text and (found := re.search(_LEVEL_IN_WORDS, cells.words("source", "notes"))):
        text = found.group()
    if not text:
        return None
    level, assumed = level_named(text)
    if assumed:
        cells.assumed.append(assumed)
    if text == NO_FSDP:  # Megatron-LM may shard the optimizer's states without
        return 0 if re.search("torch|deepspeed|foundry|composer", cells.words("source")) else None
    if level is None and not re.fullmatch(r"(w/|with)? ?zero([- ]dp)?", text):  # its stage is left open
        raise Skip(
            "zero_level must be 0 to 3, DDP, ZeRO-1 to ZeRO-3, FSDP or SHARD_GRAD_OP, not "
            f"{cells.text('zero_level')!r}",
            "zero_level",
        )
    return level


def software_of(cells: Cells, device: str) -> tuple[str, ...]:
    """The stacks that a row's source, notes and switches may mean, the most plausible first.

    Megatron-LM of 2022 where a source of that year or before ran on what there was then, or the device has no fused
    attention; torch's parts of 2024 where a source is published and not later than 2025 by its words, which most are.

    Raises:
        Skip: a switch that is modelled for other software only.
    """
    words = cells.words("source", "provenance", "notes", "gpu_type")
    compiled = _is_compiled(cells, words)
    found, named = _software(cells, words)
    stacks = found.stacks
    if found.is_known is False and "megatron" in stacks:
        splits = _splits_model(cells) or (stacks[0] == "megatron" and level_of(Cells(cells.row)) not in (2, 3))
        stacks = tuple(sorted(stacks, key=lambda stack: (stack == "megatron") != splits))
    if cells.switch("async_tp") and stacks[0] != "torchtitan":
        raise Skip("asynchronous tensor parallelism is modelled for torchtitan only", "async_tp")
    dated = [name for stack in stacks for name in _dated(cells, stack, words, device, compiled=compiled)]
    if "megatron" in dated:
        dated = _in_graphs(words, dated)
    if cells.count("ep", 1) > 1 and "megatron" in dated:
        dated = _exchanges(cells, dated)
    if cells.count("cp", 1) > 1 and stacks[0].startswith("torch") and not dated[0].startswith("torchtitan-2024"):
        dated.append("torchtitan-2024-compile")  # whose samples are split unevenly
    result = tuple(dict.fromkeys(product for name in dated for product in _with_products(cells, name, device)))
    _note_software(cells, found.name, result[0], is_named=named)
    return result


def _software(cells: Cells, words: str) -> tuple[Software, bool]:
    """The software of a row, and whether the row names it."""
    source = cells.words("source", "provenance")
    if _splits_model(cells) and re.search("deepspeed", source) and not re.search("ulysses", source):
        source = f"{source} megatron-deepspeed"  # ZeRO alone splits no layer
    found = _named(source) or _named(words) or _named(_of_model(cells)) or _named(_of_precision(cells))
    named = found is not None
    if cells.switch("async_tp") and (found is None or found.is_part):  # which only torchtitan has as a setting
        found = _named("torchtitan")
    return found or _unnamed(cells, words), named


def _note_software(cells: Cells, name: str, stack: str, *, is_named: bool) -> None:
    """Note the stack by which the software of a row is predicted, where the row does not name it itself."""
    if name:
        cells.assumed.append(f"{name} taken as {stack}")
    if not is_named:
        cells.assumed.append(f"software not named: {stack}")
    if stack.startswith("torch-2024"):
        cells.assumed.append("torch's parts of 2024: its source is published, of 2025 or before by its words")


def _is_compiled(cells: Cells, words: str) -> bool:
    stated = cells.switch("compile")
    if stated is None and "nanogpt" in words:
        cells.assumed.append("compile not stated: on, the default of nanoGPT's train.py")
        return True
    return bool(stated)


def _unnamed(cells: Cells, words: str) -> Software:
    """The software of a row that names none: torch's parts where it compiles or shards as they do, else Megatron-LM's.

    A model spread by tensor and pipeline parallelism is rarely run by eager modules of DTensor.
    """
    own = "own run" in words
    if re.search(r"\bzero[- _]?(?:stage[- _]?)?[123]\b", cells.words("zero_level")) and not own:  # DeepSpeed's name
        return _named("megatron-deepspeed" if _splits_model(cells) else "deepspeed") or _SOFTWARE[0]
    level = "" if cells.text("zero_level") == NO_FSDP else cells.words("zero_level")
    names_torch = re.search(r"\bddp\b|fsdp|hsdp", level) and not _splits_model(cells)
    if not (own or names_torch or cells.switch("compile") is not None or level_of(cells) in (2, 3)):
        return Software(words="", stacks=("megatron",) if _splits_model(cells) else ("megatron", "torch"))
    splits = all(cells.text(name) not in ("", "1") for name in ("tp", "pp"))
    return Software(words="", stacks=("megatron", "torch") if splits and not own else ("torch",))


def _of_model(cells: Cells) -> str:
    """The name of a model; that of GPT-NeoX names its software only where the model is split, as other software trains
    it with ZeRO."""
    return re.sub("" if _splits_model(cells) else r"gpt-?neox", "", cells.words("model"))


def _of_precision(cells: Cells) -> str:
    """The software whose own names of precisions a row has; "" where it has none."""
    if re.search(r"fp8[-_ ](cs|ds|mx|sc)\b", cells.words("precision")):
        return "nemo"
    return (
        "composer" if re.search(r"\bamp_(bf16|fp16|fp8)\b|^(pure|default)\b", cells.words("notes", "precision")) else ""
    )


def borrows(cells: Cells) -> bool:
    """Whether the software of a row is predicted as another one, or is unknown."""
    found = _named(cells.words("source", "provenance")) or _named(cells.words("source", "provenance", "notes"))
    return bool(found.name) if found is not None else "own run" not in cells.words("source")


def reduces_low(cells: Cells) -> bool:
    """Whether the software of a row reduces gradients in 16 bits. Composer does in its mode PURE, not in DEFAULT
    (composer/distributed/mosaic_parallelism.py, get_mixed_precision)."""
    if re.search(COMPOSER, cells.words("source")):
        return "pure" in cells.words("precision", "notes")
    found = _named(cells.words("source", "provenance"))
    return found is not None and found.reduces_low


def keeps_low(cells: Cells) -> bool:
    """Whether the software of a row accumulates gradients in 16 bits."""
    found = _named(cells.words("source", "provenance"))
    return found is not None and found.keeps_low


COMPOSER = r"foundry|mosaic|composer"
"""Words of runs with Composer."""


_OWN_HEADERS = (
    ("llm-foundry", r"mp ?mode|device_train_microbatch_size"), ("torchtitan", r"local batch(?: size)?|wps\b.*"),
    ("NeMo", r"#-gpus"), ("Hugging Face", r"per_device_train_batch_size|model_name_or_path"),
    ("Megatron-LM", r"num_layers_per_virtual_pipeline_stage|tensor_model_parallel_size"),
    ("MaxText", r"per_device_batch_size|remat_policy"),
)  # fmt: skip
"""Software -> headers that only its own tables have."""


def software_of_headers(headers: Sequence[str], source: str) -> dict[str, str]:
    """The software of a table that names none, or only a part of one, by headers that only its tables have.

    >>> software_of_headers(["Model", "MP Mode"], ""), software_of_headers(["Model"], "")
    ({'source': 'llm-foundry'}, {})
    """
    if source and not names_part(source):
        return {}
    own = next((name for name, words in _OWN_HEADERS if any(re.fullmatch(words, each, re.I) for each in headers)), "")
    return {"source": "; ".join(filter(None, (own, source)))} if own else {}


def names_software(words: str) -> bool:
    """Whether words name a software that is known.

    >>> names_software("Performance of NeMo 25.07"), names_software("Our runs")
    (True, False)
    """
    return _named(words.lower()) is not None


def names_part(words: str) -> bool:
    """Whether words name only software that other software is built from, such as FSDP, which torchtitan uses.

    >>> names_part("Llama 3 8B with FSDP2"), names_part("torchtitan with FSDP2")
    (True, False)
    """
    found = _named(words.lower())
    return found is not None and found.is_part


def _named(words: str) -> Software | None:
    return next((software for software in _SOFTWARE if re.search(software.words, words)), None)


def _in_graphs(words: str, stacks: list[str]) -> list[str]:
    """The stacks, with layers captured in CUDA graphs first if the row states it, and last if they are usual: in
    recipes of NeMo since 2025 and of Megatron-Bridge."""
    if re.search(r"cuda[-_ ]?graph", words):
        return stacks if re.search(r"(no|without|w/o) cuda[-_ ]?graph", words) else ["megatron-graphs", *stacks]
    is_late = re.search(r"bridge|nemo\D{0,12}(25|26)\b|nemo.*\b202[56]\b", words)
    return [*stacks, "megatron-graphs"] if is_late else stacks


def _exchanges(cells: Cells, stacks: list[str]) -> list[str]:
    """The stacks, with overlapped expert communication first if the row states it, last if it is possible."""
    words = cells.words("source", "provenance", "notes", "schedule")
    exchange = r"(expert|moe|ep\b|all-?to-?all|a2a)"
    stated = rf"overlap[-_ \w]*{exchange}|{exchange}[-_ \w]*overlap|dispatch\w* overlap|1f1b[- ]overlap|dualpipe"
    if re.search(stated, words) or is_deepseek_v3(cells):
        return ["megatron-overlap", *stacks]
    is_late = re.search(r"2025|2026|bridge|v?0\.1[2-9]|deepep", words) or re.search(OF_2025, cells.words("model"))
    return [*stacks, "megatron-overlap"] if is_late else stacks


def is_deepseek_v3(cells: Cells) -> bool:
    """Whether a row is of DeepSeek-V3's training by its makers, which arXiv 2412.19437 describes: DualPipe, messages of
    experts next to compute, float8 in blocks, and the recomputation of norms, activation functions and
    up-projections."""
    return (
        re.search(HAI_LLM, cells.words("source")) is not None and re.search(r"v3\b", cells.words("model")) is not None
    )


def _splits_model(cells: Cells) -> bool:
    return any(cells.text(name) not in ("", "1") for name in ("tp", "pp"))


def _dated(cells: Cells, stack: str, words: str, device: str, *, compiled: bool) -> tuple[str, ...]:
    """A stack of the row's year, and others if the year is open."""
    if stack in _EARLY:
        return _megatron_of(stack, words, device)
    if stack == "torchtitan":
        early = "-2024" if re.search(_TORCHTITAN_2024, words) else ""
        if cells.switch("async_tp"):
            return (f"{stack}{early}-async",)
        return (f"{stack}{early}-compile" if compiled else stack,)
    if stack == "torch" and "own run" not in words and re.search(_PUBLISHED, words) and not re.search(_LATE, words):
        stack = "torch-2024"
    if compiled and stack in ("torch", "torch-2024"):
        return (f"{stack}-compile",)
    year = _year(words)
    if stack == "torch-composer":
        return _composer_of(year, words, device)
    before_fused_attention = year <= "22" if year else not has_products(device, "bfloat16")
    if stack == "torch-2024" and before_fused_attention:
        both = ("megatron-deepspeed-2022", "torch-2024")
        return both if "deepspeed" in words else both[::-1]
    return ("torch-half-loss" if stack == "torch" and re.search(_HALF_LOSS, words) else stack,)


def _composer_of(year: str, words: str, device: str) -> tuple[str, ...]:
    """Composer with FlashAttention in Triton or with FlashAttention-2: the default of llm-foundry's
    scripts/train/benchmarking/submit_benchmarks.py in 2023, with which A100s were measured, and that since."""
    both = ("torch-composer", "torch-composer-triton")
    if re.search(r"\battn_impl[=: ]*flash|flash-?attn|flash ?attention", words) or year > "23":
        return both[:1]
    early = year == "23" or device.startswith(("a100", "a800")) or "triton" in words
    return both[::-1] if early else both


def _megatron_of(stack: str, words: str, device: str) -> tuple[str, ...]:
    """Megatron-LM of today; of 2022 by the year, or on devices without fused attention.

    An A100's row without a year and without a word of attention may be of either time: both are taken.
    """
    if not has_products(device, "bfloat16"):  # nor fused attention
        return (_EARLY[stack],)
    if not device.startswith("a100") or "flash" in words:
        return (stack,)
    if year := _year(words):
        return (_EARLY[stack],) if year <= "22" else (stack,)
    return (stack,) if re.search(r"mcore|nemo|bridge|core", words) else (stack, _EARLY[stack])


def _year(words: str) -> str:
    """The last two digits of the year that words state; "" where they state none.

    >>> _year("arxiv 2104.04473"), _year("megatron-lm, sc'21"), _year("our runs of 2024"), _year("fsdp2")
    ('21', '21', '24', '')
    """
    arxiv = re.search(r"\b(2[0-9])(?:0[1-9]|1[0-2])\.\d{5}\b", words)
    plain = re.search(rf"\b(?:{_MEETINGS})[ '\u2019-]*(?:20)?(1\d|2\d)\b|\b20(1\d|2\d)\b", words)
    return arxiv.group(1) if arxiv else plain.group(1) or plain.group(2) if plain else ""


_MEETINGS = "sc|neurips|icml|iclr|mlsys|osdi|sosp|asplos|nsdi|atc|ppopp|eurosys|sigcomm|hpca|isca"
"""Conferences whose names stand with a year."""


def _with_products(cells: Cells, name: str, device: str) -> tuple[str, ...]:
    """The stack with the products of the precision; a kind that its library has not as the nearest it has."""
    wanted = Cells(cells.row).products(device)
    if cells.may_be_float8(device):
        return name, f"{_NARROW.get(name, name)}-float8"
    if not wanted:
        is_float32 = cells.precision().dtype == "float32"
        is_open = is_float32 and has_products(device, "tf32") and "tf32" not in cells.words("precision")
        return (name, f"{name}-tf32") if is_open else (name,)
    if wanted[0] == "tf32":
        return (f"{name}-tf32",)
    if wanted[0] == "float8" and is_deepseek_v3(cells):
        wanted = ("float8-block",)
    is_torch = name.startswith("torch")
    base = _NARROW.get(name, name)
    nearest = {"float8-current": "float8"} if is_torch else {"float8-rowwise": "float8-block"}
    return tuple(dict.fromkeys(f"{base}-{nearest.get(products, products)}" for products in wanted))


_NARROW = {"torch": "torch-compile", "torch-2024": "torch-2024-compile", "torchtitan": "torchtitan-compile",
           "torchtitan-2024": "torchtitan-2024-compile",
           "megatron-deepspeed": "megatron", "megatron-2022": "megatron", "mindspore": "megatron",
           "megatron-deepspeed-2022": "megatron"}  # fmt: skip
"""Stack -> the one that has its narrow products: torchao's need torch.compile, the others Transformer Engine."""


def counts_recompute(cells: Cells, metric: str, stack: str, recompute: str) -> bool:
    """Whether a rate counts recomputation: "hardware" rates do, so do Megatron-LM's until 2022 (Narayanan et al.
    2021, arXiv 2104.04473, eq. 3)."""
    if metric not in ("tflops_per_gpu", "mfu_percent"):
        return False
    words = cells.words("source", "notes", "provenance")
    counts = metric == "tflops_per_gpu" and stack == "megatron-2022"
    if re.search(r"\bhfu\b|hardware (flops|tflops|flop)|2104\.04473|neox", words):
        counts = metric == "tflops_per_gpu" or "hardware flops" in words
    if re.search(r"\bmodel (flops|tflops|flop)|\bmfu\b", words):
        counts = False
    counted = "operations of all scores of attention, masked ones too"
    if recompute != "none":
        counted += ", and those of recomputation" if counts else ", none of recomputation"
    cells.assumed.append(f"the rate counts {counted}")
    return counts
