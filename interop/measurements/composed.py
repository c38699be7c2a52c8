"""Cells with several values: "TP 8, PP 4", "32x A100", nodes and devices per node, batches in tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from interop.measurements.batches import BadCell, count_of, fill, product_of, with_batch
from interop.measurements.capacities import CAPACITY, with_capacity
from interop.measurements.columns import degree_order
from interop.measurements.hybrid import HYBRID, hybrid_in, with_hybrid
from interop.measurements.numbers import number
from interop.measurements.pairs import NOTHING
from interop.measurements.precisions import precision_named
from interop.measurements.spellings import level_named, switch_named

__all__ = ["NO_FSDP", "USUAL_NODE", "degrees_in", "ordered_degrees", "plain_row"]

_WORDS = {
    "tp": r"tp|mp|tensor|model|t(?= ?=)", "pp": r"pp|pipeline|p(?= ?=)", "dp": r"dp|data|fsdp|d(?= ?=)",
    "cp": r"cp|context", "ep": r"ep|expert",
    "vpp": r"vpp?|interleav\w*|virtual", "micro_batch": r"mbs|micro-?batch", "global_batch": r"gbs",
    "accumulation": r"gas?|grad\w*[- ]?acc\w*",
}  # fmt: skip
"""Column -> words of it in a layout."""

USUAL_NODE = 8
"""Devices of a node if the number is not stated."""

_DEVICES = re.compile(
    r"(\d+)(?: ?[x\u00d7*] ?(\d+)(?= *[x\u00d7* ]))?(?: ?[卡张])?(?: ?[x\u00d7*] ?| *\(| +)"
    r"(?:nvidia )?(?=([dh]gx[ -])?[a-z]|910)",
    re.I,
)
"""Devices before their name: "64x A100", "128 A100", "1x8 910B", "16 x DGX H100" (of eight)."""

_BEHIND = re.compile(r"\w.*?\)? *[x\u00d7*] *(\d+)(?: *(?:gpus?|npus?|devices|cards))?$", re.I)
"""Devices behind their name: "H200 x 8"."""

_OFF = ("tp", "pp", "cp", "ep")
"""Degrees that tables write as 0 or as a dash where they are not used."""

_NO_DEGREE = ("0", "\u2013", "\u2014")

_WHOLE = ("seq", "global_batch", "gpu_count", "hidden", "ffn", "vocab")
"""Columns of whole numbers, most of which are above 1,000."""

_THOUSANDS = re.compile(r"[1-9]\d{0,2}\.(?!000)\d{3}")
"""A number with a point between its thousands, "4.096"; in "8.000" the zeros may be decimals."""

NO_FSDP = "no fsdp"
"""Cell of a sharding level where a column "FSDP" has a 0."""


def plain_row(row: Mapping[str, str], headers: Mapping[str, str]) -> dict[str, str]:
    """A row whose composed cells are split.

    Args:
        row: column -> cell, the columns of `headers.COMPOSED` among them.
        headers: header of each column, which may have a unit, or the order of a cell's values.

    Raises:
        BadCell: a composed cell that cannot be read.

    >>> plain_row({"layout": "8/4/2", "gpu_type": "64x A100"}, {"layout": "TP/PP/DP"})["pp"]
    '4'
    """
    made = _with_degrees_of_model(row)
    if layout := made.pop("layout", ""):
        degrees = _layout(layout, headers.get("layout", ""))
        if words := degrees.pop("words", ""):  # "Megatron DP": the row's other cells may tell more
            made["notes"] = f"{made.get('notes', '')}; {words}".strip("; ")
        fill(made, degrees)
    if made.get("seq", "").isdigit() and re.search(r"[(\[]k\b|thousand", headers.get("seq", "").lower()):
        made["seq"] += "k"
    for column in _WHOLE:
        in_millions = column == "global_batch" and "tok" in headers.get(column, "").lower()
        if _THOUSANDS.fullmatch(made.get(column, "")) and not in_millions:
            made[column] = made[column].replace(".", "")
    if made.get("zero_level") in ("-", "--", "\u2013", "\u2014"):
        made["zero_level"] = "none"
    for column in ("zero_level", "notes"):
        fill(made, degrees_in(made.get(column, "")))
    if headers.get("zero_level", "").strip().lower() == "fsdp":
        _fsdp(made)
    narrow = made.pop("float8", "")
    if narrow.lower() not in NOTHING and switch_named(narrow) is not False:
        named = precision_named(narrow) is not None or re.search(r"int ?\d", narrow, re.I)
        made["precision"] = "float8" if switch_named(narrow) else narrow if named else f"float8 {narrow}"
    if (count := number(made.get("tokens", ""))) and (
        scale := re.search(r"[(\[]([bt])\b", headers.get("tokens", "").lower())
    ):
        made["tokens"] = f"{count * (1e9 if scale.group(1) == 'b' else 1e12):g}"  # "Tokens (B)"
    if switch_named(made.pop("offload", "")):
        made["notes"] = f"{made.get('notes', '')}; offload".strip("; ")
    _counts_of_devices(made)
    made = _sequence_degree(made)
    made = with_hybrid(made, product_of(made, ("tp", "pp", "cp")))
    if not made.get("gpu_count") and made.get("dp"):
        made["gpu_count"] = str(product_of(made, ("tp", "pp", "dp", "cp")))
    if year := made.pop("year", ""):
        made["provenance"] = f"{made.get('provenance', '')} {year}".strip()
    with_batch(made, headers)
    return with_capacity(made, headers.get(CAPACITY, ""))


def _counts_of_devices(made: dict[str, str]) -> None:
    """Read the number of devices from the cells of devices and nodes.

    Raises:
        BadCell: nodes or devices per node that are no number.
    """
    if own := re.search(r"\b(\d+) nodes?\b", made.get("gpu_type", ""), re.I):
        fill(made, {"nodes": own.group(1)})
    if both := re.match(r"\d+ nodes?,? *(?:[x\u00d7*]|of|with) *(\d+)", made.get("gpu_type", ""), re.I):
        fill(made, {"per_node": both.group(1)})
    elif found := _DEVICES.match(made.get("gpu_type", "")):
        count = int(found.group(1)) * int(found.group(2) or (USUAL_NODE if found.group(3) else 1))
        spread = number(made.get("nodes", ""))
        in_all = found.group(3) or not spread or (count > USUAL_NODE and count % spread == 0)
        fill(made, {"gpu_count" if in_all else "per_node": str(count)})  # "16x A100 (2 nodes)"
    if behind := _BEHIND.search(made.get("gpu_type", "")):  # "A100 (80GB) x 8"
        fill(made, {"gpu_count": behind.group(1)})
    counted = re.fullmatch(
        r"(\d+) ?(?:nodes?)? ?(?:[x\u00d7*] ?(\d+)?| ?(?=[a-z]+\d))(.*)", made.get("gpu_count", "").lower()
    )
    if counted:  # "8x8", "64 x A100" or "64 A100"
        made["gpu_count"] = str(int(counted.group(1)) * int(counted.group(2) or 1))
        if not counted.group(2):
            fill(made, {"gpu_type": counted.group(3)})
    nodes, each = made.pop("nodes", ""), made.pop("per_node", "")
    if named := re.match(r"(\d+) *[x\u00d7*]? *((?:nvidia )?[a-z]{1,5}\d+.*)", each, re.I):  # "4 x V100"
        each = named.group(1)
        fill(made, {"gpu_type": named.group(2)})
    if grid := re.fullmatch(r"(\d+) ?[x\u00d7*] ?(\d+)", nodes):  # "2x8"
        nodes, each = grid.group(1), each or grid.group(2)
    if each:
        made["notes"] = f"{made.get('notes', '')}; {count_of('per_node', each)} GPUs per node".strip("; ")
    if nodes and not made.get("gpu_count"):
        per = count_of("per_node", each) if each else USUAL_NODE
        made["gpu_count"] = str(count_of("nodes", nodes) * per)


def _sequence_degree(row: dict[str, str]) -> dict[str, str]:
    """A row whose cell of sequence parallelism is a degree, or two of both kinds ("8x4"): Ulysses' and ring attention's
    is one of context parallelism, Megatron-LM's is that of tensor parallelism."""
    both = [number(part) for part in re.split(r" *[x\u00d7*] *", row.get("sequence_parallel", ""))]
    ways = math.prod(each for each in both if each) if all(both) else None
    if ways is None or ways < 2:
        return row
    if row.get("tp", "") == row["sequence_parallel"]:
        return row | {"sequence_parallel": "y"}
    row.pop("sequence_parallel")
    fill(row, {"cp": f"{ways:g}"})
    return row


def _fsdp(row: dict[str, str]) -> None:
    """The sharding level, and the data-parallel degree, of a column "FSDP", which holds a switch or a degree."""
    cell = row.get("zero_level", "")
    ways = number(cell)
    if ways is None:
        row["zero_level"] = {True: "3", False: NO_FSDP, None: cell}[switch_named(cell)] if cell else ""
    elif ways == 1 and (number(row.get("gpu_count", "")) or 1) > product_of(row, ("tp", "pp", "cp")):
        row["zero_level"] = "3"  # a switch, as in Megatron-Bridge's tables
    else:  # a degree, as torchtitan's and NeMo's tables have it
        row["zero_level"] = "3" if ways > 1 else "0" if ways else NO_FSDP
        fill(row, _next_to_dp(row, ways))


def _next_to_dp(row: dict[str, str], ways: float) -> dict[str, str]:
    """The data-parallel degree of a row with a degree of FSDP; if both are stated, FSDP is the group size of HSDP."""
    if not ways:
        return {}
    copies, devices = number(row.get("dp", "")), number(row.get("gpu_count", ""))
    if copies and copies > 1 and ways > 1 and devices == copies * ways * product_of(row, ("tp", "pp", "cp")):
        row["dp"] = f"{copies * ways:g}"
        return {"shards": f"{ways:g}"}
    return {"dp": f"{ways:g}"}


_DEGREES = re.compile(r"(?<![a-z])(tp|pp|dp|cp|ep|etp|vpp?|fsdp|[tpd](?==))[ =:]*(\d+)(?![\d.])", re.I)


_WAYS = re.compile(r"\b(\d+)-way (tp|pp|dp|cp|ep)\b", re.I)


def degrees_in(words: str) -> dict[str, str]:
    """The degrees in words such as "TP4 PP2"; none if two of them differ.

    >>> degrees_in("FSDP 32, TP 8"), degrees_in("FSDP2, TP4 PP2"), degrees_in("TP 2 beside TP 4")
    ({'dp': '32', 'tp': '8'}, {'tp': '4', 'pp': '2'}, {})
    """
    plain = re.sub(r"\bfsdp-?[12]\b(?! *[=:])", "", words, flags=re.I)  # versions
    found = [
        ({"fsdp": "dp", "vp": "vpp", "t": "tp", "p": "pp", "d": "dp"}.get(name.lower(), name.lower()), count)
        for name, count in (*_DEGREES.findall(plain), *(found[::-1] for found in _WAYS.findall(plain)))
    ]
    return dict(found) if len({name for name, _ in found}) == len(found) else {}


def _with_degrees_of_model(row: Mapping[str, str]) -> dict[str, str]:
    """A row with the degrees in the cell of its model, as "Mixtral 8x7B (EP=8)", and with plain degrees: 1 for 0."""
    made = {name: "1" if cell in _NO_DEGREE and name in _OFF else cell for name, cell in row.items()}
    for name in _OFF:
        if (remark := re.fullmatch(r"(\d+) *\(([A-Za-z][^()\d]*)\)", made.get(name, ""))) is not None:  # "1 (FSDP)"
            made[name] = remark[1]
            fill(made, {"zero_level": remark[2]} if level_named(remark[2])[0] is not None else {})
    name = made.get("model", "")
    if _DEGREES.search(name):
        fill(made, degrees_in(name))
        made["model"] = _DEGREES.sub("", name).rstrip(" ,;-()[]/")
    return made


def ordered_degrees(text: str, header: str) -> dict[str, str]:
    """Degrees and batches of a cell in the order that its header names; none if the header or the cell has others.

    Raises:
        BadCell: another number of values than of names.

    >>> ordered_degrees("8x4", "TP x PP"), ordered_degrees("TP 8", "Parallelism")
    ({'tp': '8', 'pp': '4'}, {})
    """
    order = degree_order(header)
    numbers = re.findall(r"\d+", re.sub(r"(?<=\d),(?=\d{3}\b)", "", text))
    if not order or re.search(r"[a-wyz]", text.lower()):
        return {}
    if len(order) != len(numbers):
        raise BadCell("layout", text, f"layout is {text!r}, not {len(order)} numbers as {header!r} says")
    return dict(zip(order, numbers, strict=True))


def _layout(text: str, header: str) -> dict[str, str]:
    """Degrees in a cell: in the order of its header, or each with its name."""
    if named := re.fullmatch(r"\(([a-z, ]+)\) *= *(\([\d, ]+\))", text.strip(), re.I):  # "(t, p, d) = (8, 8, 1)"
        text, header = named.group(2), f"({named.group(1)})"
    if ordered := ordered_degrees(text, header):
        return ordered
    found, low = {}, re.sub(r"\bfsdp-?[12]\b(?! *[=:])", "fsdp", text.lower())  # versions, not degrees
    for column, words in _WORDS.items():
        after = re.search(rf"(?<![a-z])(?:{words})(?:(?!bf|fp|tf|float|zero|stage)[a-z -])*[=:_ ]*(\d+)", low)
        before = re.search(rf"(?<![\w-])(\d+)[ -]*(?:way|x|\u00d7)?[ -]*(?:{words})\b", low)
        if match := before if re.search(r"\d+-?way", low) else after:
            found[column] = match.group(1)
    if level := re.search(rf"zero[-_ =:]*(?:stage)?[-_ =:]*[0-3]|{HYBRID}|fsdp2?|full[_ ]shard|\bddp\b", text.lower()):
        found["zero_level"] = text if level_named(text)[0] is not None else level.group()
    if hybrid := hybrid_in(text):
        found |= hybrid
        if {"groups", "shards"} <= hybrid.keys():
            found.pop("dp", None)
    elif (copies := re.search(r"(?<![a-z])dp[ =:]*(\d+)", low)) and (
        ways := re.search(r"(?<![a-z])fsdp[ =:]*(\d+)", low)
    ):
        found |= {"groups": copies.group(1), "shards": ways.group(1)}  # "DP 4, FSDP 8"
        found.pop("dp")
    if not found and re.search("[a-z]", low) and level_named(text)[0] is not None:
        found["zero_level"] = text
    if not found and not re.search(r"\d", text):
        found["words"] = text
    if not found:
        raise BadCell("layout", text, f"layout is {text!r}; degrees are written as in 'TP 8, PP 4, DP 2'")
    return found
