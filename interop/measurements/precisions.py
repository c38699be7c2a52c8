"""Precisions as tables of measurements spell them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from costmodels.machine.catalogue import device_names, load_device

__all__ = ["BLACKWELL", "HOPPER", "Precision", "has_products", "precision_named"]

HOPPER = ("h100", "h200", "h20", "h800", "gh200", "mi300x")
BLACKWELL = ("b200", "b300", "gb200", "gb300")
_PEAKS = {"mxfp8": "float4", "nvfp4": "float4"}
"""Products -> those whose peak a device with them states: blocks of 32 and 16 came together."""

_FLOAT8 = r"\b(fp8|float8|f8|e4m3|e5m2)"
_PRODUCTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"nvfp4|mxfp4|\bfp4|float4", ("nvfp4",)),
    (r"mx ?fp8|(fp8|float8|f8) ?mx|microscal", ("mxfp8",)),
    (rf"{_FLOAT8}.*(block|sub ?channel|\bsc\b|128|fine|deepseek)|(block\w*|deepseek)[ ]*(fp8|float8)",
     ("float8-block",)),
    (rf"{_FLOAT8}.*(row|channel|axis)|row\w*[ ]*(fp8|float8)", ("float8-rowwise",)),
    (rf"{_FLOAT8}.*(current|dynamic|\bcs\b)", ("float8-current",)),
    (rf"{_FLOAT8}.*(delay|\bds\b|tensor)", ("float8",)),
    (rf"{_FLOAT8}|^hybrid$", ("float8", "float8-current")),
    (r"tf32|tensorfloat", ("tf32",)),
)  # fmt: skip
"""Words -> the products of a block's linears (`simulator.stacks.products.RECIPES`), the most plausible kind first.
"hybrid" is Megatron-LM's --fp8-format.
NeMo's recipes fp8_ds, fp8_cs, fp8_mx and fp8_sc scale with delay, by the step, a block of 32 and a block of 128."""

_DTYPES = (
    (r"bf ?16|bfloat ?16|brain", "bfloat16"),
    (r"(?<!b)(fp|float|f) ?16|\bhalf\b|半精度", "float16"),
    (r"(fp|float|f) ?32|\bsingle\b|单精度|^ ?32( true| bit)?$", "float32"),
)  # fmt: skip
"""Words -> the dtype of activations. The first match counts: a 32-bit type next to a 16-bit one is that of master
weights or accumulation."""

_SOME_HALF = r"混合精度|^16\b|\b16 ?bit|\bmixed\b|\bamp\b|\bo[12]\b|autocast"
_RULED_OUT = (
    rf"\b(no|not|without|w/o|instead of|disabled) +({_FLOAT8}|tf32|tensorfloat)\w*|\btf32 *(off|disabled|false|0)\b"
)
_OTHER = r"\bint ?\d|\bw\d+a\d+|(fp|float) ?64|^64\b|\bdouble\b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The content of a precision cell.

    Args:
        dtype: of activations; "" where the cell only says that it is a 16-bit one.
        products: kinds of products that a block's linears may have, the most plausible first; none: those of `dtype`.
    """

    dtype: str = ""
    products: tuple[str, ...] = ()


@lru_cache(maxsize=1024)
def precision_named(text: str) -> Precision | None:
    """The meaning of a cell; None if it is unknown.

    >>> precision_named("amp_bf16 (DEFAULT)").dtype, precision_named("fp32 params, bf16 compute").dtype
    ('bfloat16', 'bfloat16')
    >>> precision_named("FP8-CS").products, precision_named("fp32 (TF32 off)").products, precision_named("w8a8")
    (('float8-current',), (), None)
    >>> precision_named("MX").products
    ('mxfp8',)
    """
    low = re.sub(r"[_\-/=.,+]+", " ", text.lower().replace("w/o", "without"))
    low = re.sub(r"^ *(mx|cs|ds|sc) *$", r"fp8 \1", re.sub(_RULED_OUT, " ", low))
    if re.search(_OTHER, low) and not re.search(_FLOAT8, low):
        return None
    products = next((names for words, names in _PRODUCTS if re.search(words, low)), ())
    if products:
        return Precision(dtype="float32" if products[0] == "tf32" else "bfloat16", products=products)
    dtype = next((name for words, name in _DTYPES if re.search(words, low)), "")
    if re.match(r"16 mixed", low):  # Lightning's name of fp16 with a scaled loss
        dtype = "float16"
    return Precision(dtype=dtype) if dtype or re.search(_SOME_HALF, low) else None


@lru_cache(maxsize=1024)
def has_products(device: str, products: str) -> bool:
    """Whether a catalogued device has products of a kind, by the peaks of its data sheet; a device not stated has all.

    >>> has_products("h100-sxm", "float8-block"), has_products("h100-sxm", "mxfp8"), has_products("t4", "bfloat16")
    (True, False, False)
    """
    peak = _PEAKS.get(products, products.partition("-")[0])
    return not device or (device in device_names() and peak in load_device(device).compute.matrix_flops_per_s)
