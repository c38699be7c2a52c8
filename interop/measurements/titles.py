"""Titles above a table that apply to all its rows: the device, the software, the precision, the links, the model."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

from interop.measurements.composed import degrees_in
from interop.measurements.devices import CARDS, UnknownDevice, device_named, devices_meant
from interop.measurements.software import names_part, names_software
from interop.measurements.systems import system_in

__all__ = ["CONDITIONS", "stated_in_titles", "without_conditions"]

CONDITIONS = ("gpu_type", "gpu_count", "precision", "recompute", "compile", "source")
"""Columns that the header of a figure may state."""

_DEVICE = re.compile(
    r"(?:(?<![\d,])(\d{1,3}(?:,\d{3})+|\d+|\b(?:one|two|four|eight|sixteen)) ?(?:x|\u00d7|\*)? ?)?"
    r"(?:(?:nvidia|amd|instinct|ascend|intel|habana|tesla|[dh]gx)[- ])*(?:(?<![a-z0-9])|(?<=\dx))"
    rf"([pg][3-6][a-z]*(?:-b200)?\.\d+xlarge|a[23]-\w+gpu(?:-\dg)?|(?:g?[hb]\d00|a[18]00|h20|v100|mi300x?"
    rf"|(?:ascend[- ]?)?910(?:b\d?|c)|atlas[ -]?\d{{3}}\w?[ -]a[23]|gb[23]00|b300|{CARDS})"
    r"(?:s\b)?(?:[-_ ](?:sxm\d?|pcie|nvl(?! ?\d\d(?! ?gi?b))))*"
    r"(?:[-_ ]?\(?\d{2,3} ?g(?:i?b)?\)?)?(?:[-_ ](?:sxm\d?|pcie))?)"
    r"(?![a-z0-9])",
    re.I,
)
_BEHIND = re.compile(r"\)? *[x\u00d7*] *(\d+)\b(?! ?g)", re.I)
"""A number of devices behind their name: "H200 x 8"."""

_NODES_BEFORE = re.compile(r"(?<![\w.,])(\d{1,4}) ?[x\u00d7*] ?$")
"""Nodes in front of the devices of each: "4 x 8 A100"."""

_OF_A_NODE = re.compile(r" *(?:gpus? ?)?(?:per|/|a|in each|on each|in every)[ -]?(?:compute )?node\b", re.I)
"""Words behind the devices of one node: "four A100 per node"."""

_SPELLED = {"one": "1", "two": "2", "four": "4", "eight": "8", "sixteen": "16"}
_COUNT = re.compile(
    r"(?<![\d,])\b(\d{1,3}(?:,\d{3})+|\d+) ?(?:(?:gpus?|npus?|devices|accelerators|chips|gcds)\b|[卡张])"
    r"(?! *(?:(?:per|/|a|each)[- ]?node|each|per))",
    re.I,
)
_PRECISION = re.compile(
    r"(?<![a-z0-9])(?<!\bno )(?<!\bnot )(?<!\bvs )(?<!\bvs\. )(?<!\bwithout )"
    r"(bf16|fp16|mxfp8|nvfp4|(?:fp8|float8)(?:[-_ ]\(?(?:cs|ds|mx|sc|\w+[- ]?wise)\)?)?|tf32|fp32)(?![a-z0-9])"
    r"(?![- ](?:peak|master|grad|reduc|accum|optim|param|weight|all-?reduce|copy|copies|communic|states|logits|loss))",
    re.I,
)
"""Precisions of a run: not those of its gradients, its states or the peak that a share is of."""

_LINK = re.compile(r"(?:[^.;:()|]|(?<=\d)\.(?=\d))*\d ?-?[gt]b(?:it)?(?:/s|ps)[^.;:()|]*(?:\([^)]*\))?", re.I)
_MODEL = re.compile(
    r"\b((?:meta-)?(?:code|tiny)?llama[- ]?\d?(?:\.\d)?[- ]?\d+(?:\.\d+)?b"
    r"|(?:min|nano)?gpt-?[23]?[- ]?\d+(?:\.\d+)?[bm]|gpt-?2[- ](?:small|medium|large|xl)"
    r"|mixtral[- ]8x\d+b|gpt-?(?:neox|j|oss)[- ]?\d+b|mt-?nlg[- ]?\d+b"
    r"|(?:qwen|mpt|opt|bloom|falcon|mistral|deepseek|gemma|nemotron|yi|baichuan|internlm|pythia|olmo|phi|chatglm|glm"
    r"|starcoder|stablelm|palm)[-\w.]* ?\d+(?:\.\d+)?b\d?"
    r"|deepseek[- ]v[23]|\d+(?:\.\d+)?b(?=[- ](?:parameters?[- ])?models?\b))\b",
    re.I,
)
_NAMED_MODEL = re.compile(r"\W*(?:model|模型)(?: name)?\s*[:\uff1a]\s*([\w.+-]+(?:[ _-][\w.+-]+)*)\s*$", re.I)
"""A line that states the model only, as headings do: "Model: LLAMA3_70B"."""

_FAMILY = re.compile(
    r"\b((?:code)?llama[- ]?[23](?:\.\d)?|llama|gpt-?[23]|qwen[- ]?[123](?:\.\d)?|mistral|opt|bloom|mpt|gemma[- ]?\d?"
    r"|falcon|baichuan2?|internlm2?)\b(?![- ]?\d)",
    re.I,
)
"""Families of models without the number of parameters of one."""

_SEQ = re.compile(
    r"(?:(?:seq|cut-?off)[a-z_]*|context|block[_ ]?size)(?:[- ]len\w*)? *(?:of\b|is\b|[:=])? *(\d[\d,]*k?)\b"
    r"|(?:序列长度?|上下文长?度?) *[:=\uff1a为]? *(\d[\d,]*k?)\b"
    r"|(?:(?<=[,;(] )|(?<=[,;(]))s ?= ?(\d[\d,]*k?)\b|\b(\d+k) (?:context|sequence|tokens(?! *batch))"
    r"|\bat (\d{1,3}k)\b(?! *(?:gpus?|steps?|tok|devices|samples))"
    r"|\bbatch(?: size)?(?: of|[:=])? *\d+ *[x\u00d7] *(\d{3,6})\b",
    re.I,
)
_AGAIN = r"recompute|recomputation|recomputing|recomp\b\.?|checkpointing|ckpt"
_RECOMPUTE = re.compile(
    rf"\b((?:no|full|selective(?: op)?|without|with) (?:activation |gradient )?(?:{_AGAIN}|ac)"
    r"|(?:activation|gradient) checkpointing|sac|(?<=\+ )ac|(?<=, )(?:ckpt|(?:full )?ac(?! ?[=:])))(?![a-z])"
    rf"|\b(?:ac|(?:activation |gradient )?(?:{_AGAIN}))(?: ?[=:] ?| (?=o(?:n|ff)\b))"
    r"(full|selective(?: op)?|none|no|off|on)\b",
    re.I,
)
_RECOMPUTE_FLAGS = re.compile(
    r"recompute[-_]method[ =:]+(block|uniform)\W+(?:--)?recompute[-_]num[-_]layers[ =:]+(\d+)", re.I
)
"""Megatron-LM's flags for blocks that are recomputed."""

_RECOMPUTED = re.compile(r"\b(?:recomp\w*|checkpoint\w*|ckpt|uniform|block|every|per)\b[^;|]{0,12}$", re.I)
"""Words in front of a number of layers that are recomputed, or of each stage."""

_ASYNC_TP = re.compile(r"\basync(?:hronous)?[- ]?(?:tp|tensor)", re.I)
_NO_SEQUENCE_PARALLEL = re.compile(
    r"\b(?:no|without) (?:sequence[- ]parallel\w*|sp)\b|\b(?:sequence[- ]parallel\w*|sp)[ =:]+(?:off|false)\b", re.I
)
_NODES = re.compile(r"\b(\d+) (?:nodes?|servers?|hosts?) *(?:[x\u00d7*]|of|with) *(\d+)(?=[x\u00d7]|\b)", re.I)
_SCHEDULE = re.compile(
    r"\b(interleaved(?: 1f1b)?(?: \(?v ?= ?\d+)?|1f1b(?:-i)?|zb-?h[12]|zb-?[12]p|zb-?v|dualpipe(?:-?v)?|gpipe)\b", re.I
)
_ROUTING = re.compile(r"\b(?:deep-?ep|hybrid-?ep|flex dispatcher|\w+-limited routing|force\w*[- ]balanc\w+)\b", re.I)
_EAGER = re.compile(r"^eager$|\b(?:without|no|w/o) (?:torch[. ])?compile\b", re.I)
_COMPILED = re.compile(r"torch[. ]compile\b|\+ ?compile\b|(?:^|[,;] ?)compiled?(?=$|[,;])", re.I)


def stated_in_titles(titles: Sequence[str], columns: Collection[str]) -> dict[str, str]:
    """Cells for columns that a table lacks, from the nearest line that contains them.

    A line with two devices, precisions or models states none of them. If the nearest software is a part of others
    ("with FSDP2"), the software of a line further away is put before it.

    >>> found = stated_in_titles(("A100 80GB with 1600 Gbps node-node interconnect (RoCE)",), ())
    >>> found["gpu_type"], found["interconnect"]
    ('A100 80GB', 'A100 80GB with 1600 Gbps node-node interconnect (RoCE)')
    """
    found: dict[str, str] = {}
    for title in titles:
        for column, cell in _stated_in(title).items():
            if column == "source" and column in found and names_part(found[column]) and not names_part(cell):
                found[column] = f"{cell}; {found[column]}"
            elif column == "gpu_type" and column in found and _is_closer(cell, found[column]):
                found[column] = cell
            elif column not in columns:
                found.setdefault(column, cell)
    return found


def _is_closer(device: str, other: str) -> bool:
    """Whether a name states the memory of a device that the other name leaves open."""
    short = re.sub(r"\W+", "", other.lower())
    return re.search(r"\d ?g", other.lower()) is None and re.match(
        rf"{short}\W+.*\d ?g", device.lower()
    ) is not None  # fmt: skip


def without_conditions(header: str) -> str:
    """A header without its words of devices and precisions.

    >>> without_conditions("FP8 tokens/s/GPU"), without_conditions("H100 80GB (TFLOP/s)")
    ('tokens/s/GPU', '(TFLOP/s)')
    """
    return _PRECISION.sub("", _DEVICE.sub("", header)).strip(" -_,:")


_SINGLE: Mapping[str, re.Pattern[str]] = {
    "schedule": _SCHEDULE,
    "precision": _PRECISION,
    "model": _MODEL,
    "family": _FAMILY,
    "seq": _SEQ,
    "recompute": _RECOMPUTE,
    "micro_batch": re.compile(
        r"\b(?:mbs|micro[- ]?batch(?:[- ]size)?|local batch(?:[- ]size)?|per_device_train_batch_size)"
        r"(?: of|[:=])? *(\d+)\b"
        r"|\b(?:bsz?|batch(?:[- ]size)?)(?: of|[:=])? *(\d+) *(?:per|/) ?(?:gpu|device|npu|card)"
        r"|(?:微批|(?:单卡|每卡)批)(?:次|量)?(?:大小)? *[:=\uff1a为]? *(\d+)",
        re.I,
    ),
    "accumulation": re.compile(r"\bgrad(?:ient)?[_ ]acc\w*(?:[_ ]steps)?(?: of|[:=])? *(\d+)\b", re.I),
    "layers": re.compile(r"\b(?:n_?)?(?:num_)?layers? ?[=:] ?(\d+)\b|\b(\d+)(?: transformer)?[- ]layers?\b", re.I),
    "experts": re.compile(r"\b(\d+)(?: routed)? experts\b(?! *(?:per|/|a|for|active|chosen|of|on))", re.I),
    "top_k": re.compile(r"\btop-(\d{1,2})\b(?= *(?:[,;)+&]|rout|gat|$))", re.I),
    "shared_experts": re.compile(r"\b(\d+) shared(?: experts?)?\b", re.I),
    "vocab": re.compile(r"\bvocab(?:ulary)?(?:[- _]size)?(?: of|[ =:])+(\d{4,})\b", re.I),
    "expert_ffn": re.compile(r"\b(?:expert|moe) (?:ffn|mlp|intermediate)(?:[- _]\w+)?(?: of|[ =:])+(\d{3,})\b", re.I),
    "ffn": re.compile(
        r"(?<!expert )(?<!moe )\b(?:ffn|intermediate)(?:[- _](?:hidden|size|dim\w*))*(?: of|[ =:])+(\d{3,})\b", re.I
    ),
    "hidden": re.compile(r"\bn?_?hidden(?:[- _](?:size|dim\w*))?(?: of|[ =:])+(\d{3,})\b", re.I),
    "heads": re.compile(r"\b(?:n_?(?:um_)?)?heads?[ =:]+(\d+)\b|\b(\d+)(?: attention)? heads\b", re.I),
    "global_batch": re.compile(
        r"\b(?:gbs|bs|(?<!micro[- ])(?<!local[- ])(?<!mini[- ])batch(?:[- ]size)?)(?: of|[:=])? *(\d+)\b"
        r"(?!\.\d| *(?:per|/|k\b|m\b|tok|[x\u00d7]))"
        r"|\b(?:gbs|batch(?:[- ]size)?)(?: of| has| is|[:=])? *(\d+(?:\.\d+)?[km]? tok\w*)"
        r"|\b(\d+(?:\.\d+)?[km]?[- ]tok\w*)[- ](?:global )?batch(?:es)?\b"
        r"|\bbatch(?:[- ]size)?(?: of|[:=])? *(\d+)(?= *[x\u00d7] *\d{3,6}\b)"
        r"|全局批(?:次|量)?(?:大小)? *[:=\uff1a为]? *(\d+)",
        re.I,
    ),
}
"""Column -> its words. A title with different values for a column states nothing about it."""

_KEEPS_CASE = ("model", "family")

_LONGEST = 1_000
"""Characters of a title or cell that are searched for words; what is longer describes no run."""


@lru_cache(maxsize=4096)
def _stated_in(title: str) -> Mapping[str, str]:
    title = re.sub(r"\bw/(?!o\b) ?", "with ", title[:_LONGEST].replace("w/o", "without"))
    stated = _devices(title)
    for column, pattern in _SINGLE.items():
        cells = [next(filter(None, found.groups())) for found in pattern.finditer(title) if not _is_part(column, found)]
        if len({cell.lower() for cell in cells}) == 1:
            stated[column] = cells[-1] if column in _KEEPS_CASE else cells[-1].lower()
    if flags := _RECOMPUTE_FLAGS.search(title):
        stated["recompute"] = f"{flags[1]} ({flags[2]})"
    if "schedule" in stated and (chunks := re.search(r"\bv ?= ?(\d+)\b", title)):
        stated["vpp"] = chunks[1]
    if len(links := _LINK.findall(title)) == 1:
        stated["interconnect"] = links[0].strip()
    if _ROUTING.search(title):
        stated["notes"] = title
    if _EAGER.search(title):
        stated["compile"] = "n"
    elif _COMPILED.search(title) and not re.search(r"\b(without|no|w/o) torch", title, re.I):
        stated["compile"] = "y"
    if named := _NAMED_MODEL.match(title):
        stated["model"] = named.group(1).strip()
    if _ASYNC_TP.search(title):
        stated["async_tp"] = "y"
    if _NO_SEQUENCE_PARALLEL.search(title):
        stated["sequence_parallel"] = "n"
    stated |= degrees_in(title)
    if names_software(title):
        stated["source"] = title
    return stated


def _is_part(column: str, found: re.Match[str]) -> bool:
    """Whether a number of layers is of those that are recomputed together: "full recompute (uniform, 1 layer)"."""
    return column == "layers" and _RECOMPUTED.search(found.string[: found.start()]) is not None


def _catalogued(device: str) -> str:
    """The catalogue's name of a device, which an instance of a cloud shares: "p5.48xlarge (8x H100)"."""
    try:
        return device_named(device)[0]
    except UnknownDevice:
        return device.lower()


def _devices(title: str) -> dict[str, str]:
    """The device of a title, and how many."""
    stated: dict[str, str] = {}
    found = sorted(_DEVICE.finditer(title), key=lambda match: match.group(1) is not None)  # counted ones last
    devices = {_catalogued(match.group(2)): match for match in found}
    for name in [name for name in devices if devices_meant(name)]:  # "Atlas 800T A2, 910B3"
        if any(_catalogued(member) in devices for member in devices_meant(name)):
            del devices[name]
    if len(devices) == 1:
        (match,) = devices.values()
        device = re.sub(r"(?<=\d\d\d)s\b", "", match.group(2))
        stated["gpu_type"] = device if "(" in device else device.rstrip(")")
        behind = _BEHIND.match(title[match.end() :])
        if match.group(1) and _OF_A_NODE.match(title[match.end() :]):
            stated["per_node"] = _SPELLED.get(match.group(1).lower(), match.group(1))
        elif count := match.group(1) or (behind and behind.group(1)):
            stated["gpu_count"] = _SPELLED.get(count.lower(), count.replace(",", ""))
            if (before := _NODES_BEFORE.search(title[: match.start()])) and stated["gpu_count"].isdigit():
                stated["gpu_count"] = str(int(before.group(1)) * int(stated["gpu_count"]))
    if len(counts := set(_COUNT.findall(title))) == 1:
        stated.setdefault("gpu_count", counts.pop().replace(",", ""))
    if re.search(r"\bsingle[- ](?:gpu|npu|device|card)\b", title, re.I):
        stated.setdefault("gpu_count", "1")
    if len(nodes := _NODES.findall(title)) == 1:
        stated["gpu_count"] = str(int(nodes[0][0]) * int(nodes[0][1]))
    if (system := system_in(title)) is not None:
        stated.setdefault("gpu_type", system.device)
        stated.setdefault("per_node", str(system.per_node))
        if system.link_Gbps:
            stated.setdefault("interconnect", f"{system.link_Gbps:.4g} Gb/s per GPU")
    return stated
