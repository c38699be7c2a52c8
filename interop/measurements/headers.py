"""Headers of figures: the metric and the unit of a column, in the spellings of published tables."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

__all__ = [
    "METRICS", "Figure", "figure_named", "has_units_in_cells", "is_memory", "is_training_time", "without_devices",
]  # fmt: skip

METRICS = (
    "iteration_time_s", "tokens_per_s_per_gpu", "samples_per_s_per_gpu", "tflops_per_gpu", "mfu_percent",
    "peak_memory_GiB", "peak_memory_GB",
)  # fmt: skip

_LONGEST = 200
"""Characters of a header; the patterns take the square of a longer one's length."""

_ON_DEVICES = re.compile(
    r"[(\[@,]* *(?:@|on|with|for)? *(\d+) *(?:x )?(?:gpus?|npus?|devices|chips|cards|[ahb]\d00s?) *[)\]]?$", re.I
)


def without_devices(header: str) -> tuple[str, str]:
    """A header of a figure without its number of devices, and that number; "" if it states none.

    >>> without_devices("tokens/s/GPU @8 GPUs"), without_devices("tokens/s/GPU")
    (('tokens/s/GPU', '8'), ('tokens/s/GPU', ''))
    """
    found = _ON_DEVICES.search(header) if len(header) <= _LONGEST else None
    return (header[: found.start()].strip(), found.group(1)) if found else (header, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """The metric and unit of a column of figures or a cell.

    Args:
        metric: one of `METRICS`.
        factor: of its unit.
        of_all: whether it is a rate of all devices together.
        inverse: whether it is steps per second, or per another time, which `factor` is the inverse of.
        hardware: whether operations of recomputation count.
        of_node: whether it is a rate of one node.
        tokens: for a training time, the tokens trained in it; 0 if the row's column `tokens` has their number.
        of_memory: whether it is a percentage of the device's memory.
    """

    metric: str
    factor: float = 1.0
    of_all: bool = False
    inverse: bool = False
    hardware: bool = False
    of_node: bool = False
    tokens: float | None = None
    of_memory: bool = False


_DEVICE = r"/(?:gpus?|devices?|chips?|npus?|cards?|accelerators?|dies?|ranks?|procs?|processors?|p)"
_RATES = (
    (rf"(?:tokens?|toks?|tks|t|words)/s(?P<each>{_DEVICE})?|tps(?P<each2>{_DEVICE})?", "tokens_per_s_per_gpu"),
    (rf"(?P<each>(?:tokens?|toks?){_DEVICE}/s|tgs|tpgs|wps(?:{_DEVICE})?)", "tokens_per_s_per_gpu"),
    (rf"(?:samples?|sequences?|seqs?|examples?|images?|imgs?|ex|s)/s(?P<each>{_DEVICE})?", "samples_per_s_per_gpu"),
    (rf"(?P<each>(?:samples?|sequences?|seqs?|examples?){_DEVICE}/s)", "samples_per_s_per_gpu"),
)
_FLOPS = re.compile(
    rf"(?P<what>model|hardware|achieved|effective)?(?P<unit>[gtp])?flop(?(unit)/?s?(?:/s)?|s?/s)(?P<each>{_DEVICE})?(?:/s)?"
)
_OF_EACH = re.compile(rf"(?:throughput|performance|perf|speed)(?P<each>{_DEVICE})(?P<rate>.+)")
_TIMES = {"min": 60.0, "minute": 60.0, "h": 3600.0, "hour": 3600.0, "hr": 3600.0, "day": 86_400.0, "week": 604_800.0}
"""Seconds of the times over which rates are stated."""

_SCALES = {"k": 1e3, "t": 1e3, "m": 1e6, "b": 1e9}
"""Scales of rates by the first letters of their words."""

_STEP = r"(?:iter(?:ation)?s?|steps?|(?:global)?batch|its?)"
_TIME = re.compile(
    rf"(?:avg|average|mean|median|train(?:ing)?|elapsed|e2e|end-?to-?end|wall-?clock)*"
    rf"(?:{_STEP}(?:time|timing|latency|duration)|(?:time|latency)/{_STEP})(?P<unit>s|ms|min)?|(?P<unit2>s|ms|min)/{_STEP}"
    r"|(?:elapsed)?time(?P<unit3>s|ms)|tstep(?P<unit4>s|ms)"
)
_TRAINING = re.compile(
    r"(?:total|training|train|wallclock|elapsed|time|to)*(?P<unit>days?|hours?|hrs?|weeks?)(?:totrain)?"
    r"|(?P<each>gpu|npu|device|card|[ahb]\d00|[ahb]\d00gpu)-?(?P<unit2>hours?|days?)"
    r"(?:/(?P<count>\d*)(?P<power>[mbt])(?:illion)?(?:tokens?|toks?))?"
)
"""A time of training, or the hours of devices for some tokens."""
_MEMORY = re.compile(
    r"(?:peak|max(?:imum)?)?(?:gpu|device|cuda|hbm|active|allocated|reserved|used)*"
    r"(?:mem(?:ory)?|vram|alloc(?:ated)?|reserved|(?<=hbm)|(?<=peak))"
    rf"(?:usage|used|peak|max)?(?:alloc(?:ated)?|reserved|footprint)?(?:{_DEVICE})?"
    rf"(?P<unit>gib|gb|mib|mb|%|percent|pct)(?:{_DEVICE})?"
)
_SHARE = re.compile(
    r"%?(?:bf16|fp16)?(?:[mh]fu|(?:model|hardware|hw)?flop/?s?(?:/s)?(?:util(?:i[sz]ation)?|efficiency))(?:[mh]fu)?(?:percent|pct|%)?"
    r"(?:bf16|fp16|fp8)?|(?:(?:percent(?:age)?|share|%)(?:of)?|of)(?:theoretical|device)?peak(?:flop/?s?(?:/s)?)?"
)
_ALL = r"^(?:aggregate|total|overall|cluster|system|global)d?"
_SECONDS = {"s": 1.0, "ms": 1e-3, "min": 60.0}
_BYTES = {"gib": ("peak_memory_GiB", 1.0), "gb": ("peak_memory_GB", 1.0), "mib": ("peak_memory_GiB", 2.0**-10),
          "mb": ("peak_memory_GB", 1e-3)}  # fmt: skip


@lru_cache(maxsize=4096)
def figure_named(words: str) -> Figure | None:
    """The metric of a header, a metric name or a unit; None if it is unknown.

    >>> figure_named("Tokens / sec / device").metric, figure_named("TFLOP/s/GPU").metric, figure_named("s/iter").factor
    ('tokens_per_s_per_gpu', 'tflops_per_gpu', 1.0)
    >>> figure_named("Step time (ms)").factor, figure_named("samples/s").of_all, figure_named("colour")
    (0.001, True, None)
    >>> figure_named("step_ms").factor
    0.001
    """
    exact = {metric.lower(): metric for metric in METRICS}.get(words.strip().lower())
    if exact is not None:
        return Figure(metric=exact)
    low = _plain_words(words)
    if (qualified := _qualified(low)) is not None:
        return qualified[0]
    plain = re.sub(r"[^a-z0-9/%]+", "", low)
    if found := _TRAINING.fullmatch(plain):
        return _of_training(found)
    of_all = bool(re.search(_ALL, plain))
    plain = re.sub(_ALL, "", plain)
    plain = re.sub(r"^(?:training|train)(?=.)", "", plain)
    if found := _OF_EACH.fullmatch(plain):
        plain = found["rate"] + ("" if re.search(_DEVICE, found["rate"]) else found["each"])
    plain = re.sub(r"^(?:throughput|performance|perf|speed|rate)(?=.)", "", plain)
    if _SHARE.fullmatch(plain):
        return Figure(metric="mfu_percent", hardware="hfu" in plain or plain.startswith(("hardware", "hw")))
    if found := _FLOPS.fullmatch(plain):
        giga = {None: 1e-12, "g": 1e-3, "t": 1.0, "p": 1e3}[found["unit"]]
        whole = found["each"] is None and (of_all or found["unit"] == "p")
        return Figure(metric="tflops_per_gpu", factor=giga, of_all=whole, hardware=found["what"] == "hardware")
    if re.fullmatch(rf"{_STEP}/s", plain):
        return Figure(metric="iteration_time_s", inverse=True)
    if found := _TIME.fullmatch(plain):
        if of_all and found["unit3"]:  # "Total time (s)" of a whole run
            return None
        unit = next((group for group in found.groups() if group), "s")
        return Figure(metric="iteration_time_s", factor=_SECONDS[unit])
    if found := _MEMORY.fullmatch(plain):
        if found["unit"] not in _BYTES:
            return Figure(metric="peak_memory_GiB", of_memory=True)
        metric, factor = _BYTES[found["unit"]]
        return Figure(metric=metric, factor=factor)
    for kilo, factor in (("", 1.0), ("k", 1e3), ("m", 1e6)):
        for pattern, metric in _RATES:
            if found := re.fullmatch(f"{kilo}(?:{pattern})", plain):
                return Figure(metric=metric, factor=factor, of_all=not any(found.groupdict().values()))
    return _in_brackets(low)


def _in_brackets(low: str) -> Figure | None:
    """The figure of a header with brackets, "TGS (tokens/GPU/s)" or "speed (it/s)": theirs, or that before them if both
    name one, of different metrics; None if neither does."""
    found = re.fullmatch(r"(.+?) *[(\[]([^()\[\]]+)[)\]]", low)
    if found is None:
        return None
    outer, inner = figure_named(found[1]), figure_named(found[2])
    is_other = outer is not None and inner is not None and outer.metric != inner.metric
    return outer if is_other else inner or outer


def _of_composer(found: re.Match[str]) -> str:
    """Composer's names of rates (composer/callbacks/speed_monitor.py): "throughput/device/tokens_per_sec"."""
    return f"{found[2]}{'/s' if found[3] else ''}{'/device' if found[1] and found[3] else ''}"


def _of_one_card(found: re.Match[str]) -> str:
    """A header that begins with "of one card", which its unit may say again: "单卡吞吐(tokens/s/p)"."""
    what, unit, end = (part or "" for part in found.groups())
    each = "" if re.search(rf"{_DEVICE}(?![a-z])|/卡", what + unit) else "/card"
    return f"{what}{unit}{each}{end}"


_SPELLINGS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"^(?:perf|train|metrics?|memory)/(?=[a-z]+[_/]|mfu)", ""),  # "perf/mfu"
    (r"^throughput/(device/)?(\w+?)(_per_sec)?$", _of_composer),
    (r" */ *", "/"), (r"\uff08", "("), (r"\uff09", ")"),
    (r"[单每](?:张|个)?(?:卡|npu|gpu)(.*?)([(].*?)?([)])?$", _of_one_card),
    (r"每秒(?:处理)?(?:tokens?|词元)数?", "tokens/s"), (r"每秒(?:处理)?(?:样本|samples?)数?", "samples/s"),
    (r"毫秒", "ms"), (r"秒", "s"), (r"分钟", "min"), (r"小时", "hours"), (r"天", "days"),
    (r"训练(?:总)?(?:耗时|时间|时长|用时)(?=.*(?:hours|days))", "training time "),
    (r"(?:单步|每步|单次)?(?:迭代)?(?:耗时|时间|时长|用时)", "step time "),
    (r"(?:模型)?(?:浮点)?算力利用率", "mfu "),
    (r"显存", "memory"), (r"吞吐量?", "throughput"), (r"性能", "performance"), (r"卡", "card"),
    (r"\bzeit (?:pro|je)\b", "time per"), (r"\b(?:iterations|schritt)zeit\b", "step time"),
    (r"\btemps (?:par|d.une|d') ?(?:it[e\u00e9]ration|[e\u00e9]tape|pas)\b", "step time"), (r"\bjetons?\b", "tokens"),
    (r"\bd[e\u00e9]bit\b", "throughput"), (r"\bm[e\u00e9]moire\b", "memory"),
    (r"\bdurchsatz\b", "throughput"), (r"\bspeicher\b", "memory"),
    (r"seconds?|secs?\b|sec(?![a-z])", "s"), (r" *(?:\u00b1|\+/-).*$", ""), (r"milli-?s\b", "ms"),
    (r"minutes?\b", "min"),
    (r"^(?:our|achieved|measured|observed|average|avg|mean|median)[ _.]+(?=[\w%])", ""),
    (r"^(?:e2e |end-to-end )?((?:step|iter)(?:ation)?) *[(\[] *(m?s|min) *[)\]]$", r"\1 time (\2)"),
    (r"^((?:step|iter)(?:ation)?)_(m?s|min)$", r"\1 time (\2)"),
    (r"(tera|peta|giga)[- ]?(?=flop)", lambda found: found.group()[0]),
    (r"[ _.-]*\bper\b[ _.-]*|[ _]per[ _]", "/"),
    (r"\b(tok\w*?|samples?|seqs?|sequences?)_s(?=_|$)", r"\1/s"),  # "tok_s_gpu"
    (r"(?<=[a-z0-9])_(gpu|npu|device)$", r"/\1"),
    (rf"^({_DEVICE})[ _-]*(.+)$", r"\2\1"),  # "per-GPU TFLOPs"
    (r"^(throughput|performance|speed|.*tim(?:e|ing)) in (\S+)$", r"\1 (\2)"),
    (r"^(.*(?:time|memory)[\w ]*?) */ *(m?s|[gm]i?b)$", r"\1 (\2)"),
    (r"^(.+?)(?:[(\[] *|[ ,_]+)(total|aggregate|all (?:gpus|devices)) *[)\]]?$", r"total \1"),
)  # fmt: skip
"""Words of headers in lower case -> the spelling that the patterns of figures expect, in this order."""


def _plain_words(words: str) -> str:
    """A header in lower case, in English, with one spelling of units and of "per"."""
    low = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", words).lower() if re.search("Per[A-Z]", words) else words.lower()
    for pattern, spelling in _SPELLINGS:
        low = re.sub(pattern, spelling, low)
    return low.strip()


def _qualified(low: str) -> tuple[Figure | None] | None:
    """The figure of a header with a qualifier: a rate per node, per day, in thousands; None without a qualifier."""
    if found := re.search(r"[ /(\[]+nodes?\b[)\]]?", low):
        figure = figure_named(f"{low[: found.start()]}/device{low[found.end() :]}")
        return (None if figure is None or not figure.metric.endswith("_gpu") else replace(figure, of_node=True),)
    if found := re.search(
        r" *(?:\b(?:for|of|on) |(?<=train) |[(\[](?=[^,]*$))(\d+(?:\.\d+)?) ?([mbt])(?:illion)? tok\w*[)\]]?", low
    ):
        figure = figure_named(low[: found.start()] + low[found.end() :])
        count = float(found[1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[found[2]]
        return (None if figure is None or figure.tokens is None else replace(figure, tokens=count),)
    if found := re.search(r"(?<=/)(min(?:ute)?|h(?:ou)?r?|day)s?\b", low):
        figure = figure_named(f"{low[: found.start()]}s{low[found.end() :]}")
        return (None if figure is None else replace(figure, factor=figure.factor / _TIMES[found[1]]),)
    if found := re.search(r"(?<=hours) *[(\[].*[)\]]$", low):  # "GPU hours (H100-80GB)"
        return (figure_named(low[: found.start()]),)
    if found := re.search(r" *[(\[](k|m|b|thousands?|millions?|billions?)[)\]]$", low):  # "Tokens/day (B)"
        figure = figure_named(low[: found.start()])
        rate = figure is not None and figure.metric in ("tokens_per_s_per_gpu", "samples_per_s_per_gpu")
        return (replace(figure, factor=figure.factor * _SCALES[found[1][0]]) if figure and rate else None,)
    if found := re.fullmatch(r"(?P<behind>.*?)[ (\[]+([hm])fu[)\]]?|([hm])fu[ (\[]+(?P<ahead>.*flop.*?)[)\]]?", low):
        figure = figure_named(found["behind"] or found["ahead"])  # "TFLOPS/GPU (HFU)", "HFU TFLOPs"
        return None if figure is None else (replace(figure, hardware="h" in (found[2], found[3])),)
    return None


def _of_training(found: re.Match[str]) -> Figure:
    unit = (found["unit"] or found["unit2"]).rstrip("s")
    count = float(found["count"] or 1) * {"m": 1e6, "b": 1e9, "t": 1e12}[found["power"]] if found["power"] else 0.0
    return Figure(metric="tokens_per_s_per_gpu", factor=_TIMES[unit], of_all=not found["each"], tokens=count)


def has_units_in_cells(header: str) -> bool:
    """Whether the cells of a header contain their unit."""
    plain = re.sub(r"[^a-z\u4e00-\u9fff]+", "", re.sub(rf"^[gn]pu(?=[ p])|{_DEVICE}$", "", _plain_words(header)))
    return plain in ("throughput", "performance", "perf", "speed", "trainingthroughput", "trainingspeed", "result",
                     "results", "rate", "time") or is_memory(header) or is_training_time(header)  # fmt: skip


def is_training_time(header: str) -> bool:
    """Whether a header names the time of a complete training without a unit.

    >>> is_training_time("Time to train"), is_training_time("Wall-clock time"), is_training_time("Time")
    (True, True, False)
    """
    plain = re.sub(r"[^a-z]+", "", header.lower())
    return (
        re.fullmatch(
            r"(?:(?:total|overall)?train(?:ing)?|total|elapsed|wallclock|wall)(?:time|duration)|timetotrain", plain
        )
        is not None
    )


def is_memory(header: str) -> bool:
    """Whether a header names memory without a unit.

    >>> is_memory("Peak VRAM"), is_memory("Peak memory (GiB)"), is_memory("Memory bound")
    (True, False, False)
    """
    plain = re.sub(r"[^a-z/]+", "", _plain_words(header))
    return _MEMORY.fullmatch(f"{plain}gib") is not None and plain not in ("allocated", "reserved", "alloc")
