"""Sharding levels, recomputation and schedules as tables of measurements spell them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache

from plans.degrees import MEMORY_BOUND

__all__ = [
    "UNMODELLED_SCHEDULES",
    "Recompute",
    "compile_named",
    "is_offloaded",
    "level_named",
    "recompute_named",
    "recomputed_layers",
    "schedule_named",
    "switch_named",
]

_YES = ("y", "yes", "true", "1", "on", "enabled", "t", "是", "开", "开启", "打开", "启用", "✓", "✔", "✅", "√")
_NO = (
    "n", "no", "false", "0", "off", "disabled", "none", "f", "否", "无", "关", "关闭", "不开启", "未开启",
    "✗", "✘", "✕", "❌", "×",
)  # fmt: skip

_HYBRID = r"hsdp|\bmics\b|hybrid(?! parallel)|replicat\w* \d.*shard|shard.*replicat\w* \d"
_LEVELS = (
    (r"\b(?:no|non|without) (?:deepspeed )?zero\b(?! (?:bubble|offload|infinity))", 0),
    (r"reshard after forward ?=? ?(false|no|0)|no reshard", 2),
    (r"\b(?:z|zero)[ ]*(?:stage[ ]*)?([0-3])\b|stage ?([0-3])\b|\blevel ?([0-3])\b|^([0-3])(?![\w./])", None),
    (r"zero infinity", 3), (r"zero offload", 2),
    (r"full[ ]*shard|fully shard|os g p(arams?|arameters)?\b|optim\w* (and )?grad\w* (and )?(param|weight)",
     3),
    (r"zero ?plus|\b(?:hpz|qwz|qgz)\b|^full$|^sharded$|reshard after forward", 3),
    (r"shard[ ]*grad[ ]*op|os g\b|optim\w* (and )?grad", 2),
    (r"fsdp|gemini", 3),
    (r"dist(ributed)?[ ]*opt|parallel optim|shard\w* optim|优化器|low level zero|\bp? ?os\b|\bpos\b|^optim"
     r"|^(y|yes|true|on|enabled)$", 1),
    (r"no[ ]*shard|^(none|no|n|ddp|false|off|disabled|replicated?|dp|data parallel)$", 0),
)  # fmt: skip
"""Patterns of words -> level; the first match counts. None: the number in the words."""

_PARTIAL = r"minimal|^save |partial|auto|adaptive|smart|dynamic|mixed|some|optimi[sz]ed|\u90e8\u5206"

_RECOMPUTE = (
    (r"^(none( .*)?|null|no|n|false|off|0|disabled|without|without .*|never|no .*|not used|0 layers|0 ?%)$", "none"),
    (r"^(?:minimal|save (?:qkv|out|dot)|qkv proj|attn out)", "selective"),  # MaxText's remat_policy
    (r"per ?op|by op|selective op|\bop\b|operator|\bsac\b|save.*matmul", "selective_op"),
    (r"\bsel|recompute activations|\u9009\u62e9|core ?att|attention|\battn|softmax", "selective"),
    (r"^(yes|y|true|on|1|ac|ac on|enabled|all)$|full|every|all layers|uniform|block|layers?\b|ckpt|check ?point|"
     r"recompute|remat|partition|\u5168|%|^\d+ ?/ ?\d+$|\bmlp\b|\bmoe\b(?! act)", "full"),
    (_PARTIAL, "selective"),
    (r"norm|moe act|up proj|activation func|\bact\b|memory bound", MEMORY_BOUND),
)  # fmt: skip
"""Words -> the mode, the first that is found. Of Megatron-core's --recompute-modules "mlp" and "moe" are most of a
layer."""

_SCHEDULES = (
    (r"interleaved ?(?:zb|zero ?bubble)|zb ?interleaved", "interleaved_zb"),
    (r"zb ?v|zbv|v ?shape", "zb_v"), (r"v ?half", "v_half"), (r"v ?min", "v_min"), (r"dual ?pipe", "dualpipe_v"),
    (r"zb ?(h ?)?2p?", "zb_h2"), (r"zb ?(h ?)?1p?|zero ?bubble|^zb\b", "zb_h1"),
    (r"^(none|no|no pipeline|sync\w*|standard|pipeline|yes|y|true|default|1f1b)$|(?:no|non|not|without) ?interleav"
     r"|pipedream|dapple|bpipe|terapipe|^one forward one backward$", "1f1b"),
    (r"chimera|hanayo|\bwaves?\b|interleav|depth ?first|1f1b ?i\b|\bvpp? ?\d*\b|virtual", "interleaved_1f1b"),
    (r"loop\w* ?bfs|breadth ?first|^bfs", "looped_bfs"), (r"afab|g ?pipe|all forward", "gpipe"), (r"1f1b", "1f1b"),
)  # fmt: skip
"""Patterns of words -> schedule; the first match counts."""

UNMODELLED_SCHEDULES = re.compile(r"chimera|hanayo|\bwaves?\b|bpipe|terapipe|seq ?1f1b|2bw|async", re.I)
"""Words of schedules that are predicted as the nearest one of `_SCHEDULES`."""

_OFFLOADED = re.compile(
    r"\b(?P<no>(?:no|not|without|w/o|disabled?)\b[ -]*"
    r"(?:any|cpu|zero|activations?|optimi[sz]ers?|states?|[-/,& ]|and|or)*)?"
    r"(?P<what>offload\w*|zero-infinity)\b(?P<off>[ :=]*(?:no|off|none|false|disabled|0)\b)?"
)
"""Words about offloading to host memory, also of its absence."""


def _plain(text: str) -> str:
    low = re.sub(r"zero ?\+\+", "zero plus", text.lower().replace("w/o", "without"))
    return re.sub(r"[-_+,;:()=. ]+", " ", low.replace("%", " %")).strip()


@lru_cache(maxsize=1024)
def switch_named(text: str) -> bool | None:
    """Whether a switch is on; None where a cell is neither.

    >>> switch_named("True"), switch_named("\u2717"), switch_named("perhaps")
    (True, False, None)
    """
    low = text.strip().lower()
    plain = {"enable": "on", "disable": "off"}.get(low, low)
    return True if plain in _YES else False if plain in _NO else None


def compile_named(text: str) -> bool | None:
    """Whether a cell states that torch compiled the model; None where it states nothing.

    >>> compile_named("torch.compile"), compile_named("eager"), compile_named("")
    (True, False, None)
    """
    low = text.lower()
    if re.search(r"eager|\b(?:no|not|without|w/o)\b", low):
        return False
    return True if re.search(r"compile|inductor|autotune|cuda ?graph", low) else None


@lru_cache(maxsize=1024)
def is_offloaded(text: str) -> str:
    """The words of a text about offloading tensors to host memory; "" if there are none.

    >>> is_offloaded("ZeRO-3 + offload"), is_offloaded("no CPU offload"), is_offloaded("CPU offload: off")
    ('offload', '', '')
    """
    found = _OFFLOADED.finditer(text.lower())
    return next((each["what"] for each in found if not each["no"] and not each["off"]), "")


@lru_cache(maxsize=1024)
def level_named(text: str) -> tuple[int | None, str]:
    """The optimizer-parallel level and the assumption behind it; None if no level is named.

    >>> level_named("FSDP full (ZeRO-3)"), level_named("z1"), level_named("optim_grads_params"), level_named("some")
    ((3, ''), (1, ''), (3, ''), (None, ''))
    """
    plain = _plain(text)
    if re.search(_HYBRID, plain):
        return 3, ""
    if switch_named(text) is not None and text.strip() not in ("0", "1"):
        return int(bool(switch_named(text))), ""
    for pattern, level in _LEVELS:
        if found := re.search(pattern, plain):
            if level is None:
                return int(next(group for group in found.groups() if group)), ""
            return level, "Gemini taken as ZeRO-3 without moving chunks to the host" if "gemini" in plain else ""
    return None, ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """The recomputation that a cell states.

    Args:
        mode: of `plans.degrees.RECOMPUTE_MODES`.
        layers: of "full": how many layers of a chunk; None: all.
        share: of "full": which share of all layers; None: not said as a share.
        is_open: whether the words fit no mode exactly; `mode` is the nearest.
    """

    mode: str
    layers: int | None = None
    share: float | None = None
    is_open: bool = False


@lru_cache(maxsize=1024)
def recompute_named(text: str) -> Recompute | None:
    """The recomputation that a cell states; None if it is unknown.

    >>> recompute_named("core_attn").mode, recompute_named("full, 2 layers").layers, recompute_named("50%").share
    ('selective', 2, 0.5)
    >>> recompute_named("every 2nd layer").share, recompute_named("mlp").is_open, recompute_named("purple")
    (0.5, True, None)
    """
    switch = switch_named(text)
    if switch is not None:
        return Recompute(mode="full" if switch else "none")
    plain = _plain(text)
    mode = next((mode for pattern, mode in _RECOMPUTE if re.search(pattern, plain)), None)
    if nth := re.fullmatch(r"(?:every|ac|each)? ?(\d+)", plain):  # torchtitan's selective_ac_option, too
        return Recompute(mode="full", share=1 / int(nth.group(1))) if int(nth.group(1)) > 1 else None
    if mode == "selective" and (nth := re.fullmatch(r"sel\w* (\d+)", plain)):  # torchtitan's selective_ac_option
        return Recompute(mode="full", share=1 / max(1, int(nth.group(1))))
    if mode != "full":
        return None if mode is None else Recompute(mode=mode, is_open=re.search(_PARTIAL, plain) is not None)
    if share := _share(plain):
        return Recompute(mode="full", share=share)
    if re.search(r"(?<!all )(every|each) (?!layer|block)", plain):
        return None
    counted = (
        None
        if "uniform" in plain or "every" in plain or "each" in plain
        else re.search(r"(\d+) ?layers?\b|\bblock (\d+)$", plain)
    )
    modules = re.search(r"\bmlp\b|\bmoe\b", plain) is not None and "full" not in plain
    layers = int(next(group for group in counted.groups() if group)) if counted else None
    return Recompute(mode="full", layers=layers, is_open=modules)


def _share(plain: str) -> float | None:
    """The share of the layers in "50 %", "4/8", "2 of 8 layers" or "every 2nd layer"; None if there is none."""
    if found := re.search(r"(\d+) ?%", plain):
        return min(1.0, int(found.group(1)) / 100)
    if found := re.search(r"(\d+) ?(?:/|of|out of) ?(\d+)", plain):
        part, whole = int(found.group(1)), int(found.group(2))
        return part / whole if 0 < part <= whole else None
    if re.search(r"every other|alternat", plain):
        return 0.5
    found = re.search(r"every ?(\d+)(?:(?:st|nd|rd|th)? ?(?:layers?|blocks?)|(?:st|nd|rd|th)$)", plain)
    return 1 / int(found.group(1)) if found and int(found.group(1)) else None


@lru_cache(maxsize=1024)
def schedule_named(text: str) -> tuple[str, int | None]:
    """The schedule of a cell and the chunks of a stage that it states; "" where it is none that is known.

    >>> schedule_named("1F1B-interleaved (3 chunks)"), schedule_named("ZB-2p"), schedule_named("PipeDream-Flush")
    (('interleaved_1f1b', 3), ('zb_h2', None), ('1f1b', None))
    """
    plain = _plain(text)
    name = next((name for words, name in _SCHEDULES if re.search(words, plain)), "")
    chunks = re.search(r"\b(?:vpp?|v|chunks|virtual stages) ?(\d+)\b|\b(\d+) ?(?:chunks|virtual)", plain)
    number = None if chunks is None else int(next(group for group in chunks.groups() if group))
    return name, number


def recomputed_layers(found: Recompute, layers: int, chunks: int) -> int | None:
    """How many layers of a chunk are recomputed; None: all."""
    if found.share is not None and found.share < 1:
        return max(1, math.ceil(found.share * layers / chunks))
    return found.layers
