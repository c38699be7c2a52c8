"""Cells with several values: "TP 8, PP 4", "32x A100", nodes and devices per node, batches in tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from interop.measurements.batches import BadCell, count_of, fill, product_of, with_batch
from interop.measurements.capacities import CAPACITY, with_capacity
from interop.measurements.columns import KINDS_OF_CONTEXT, degree_order
from interop.measurements.counts import count_devices
from interop.measurements.hybrid import HYBRID, hybrid_in, with_hybrid
from interop.measurements.numbers import number
from interop.measurements.pairs import NOTHING
from interop.measurements.precisions import precision_named
from interop.measurements.spellings import level_named, switch_named

__all__ = ["NO_FSDP", "degrees_in", "ordered_degrees", "plain_row"]

_WORDS = {
    "tp": r"tp|mp|tensor|model|t(?= ?=)", "pp": r"pp|pipeline|p(?= ?=)", "dp": r"dp|data|fsdp|d(?= ?=)",
    "cp": r"cp|context", "ep": r"ep|expert",
    "vpp": r"vpp?|interleav\w*|virtual", "micro_batch": r"mbs|micro-?batch", "global_batch": r"gbs",
    "accumulation": r"gas?|grad\w*[- ]?acc\w*",
}  # fmt: skip
"""Column -> words of it in a layout."""

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
    kinds = [count_of("cp", made.pop(name)) for name in KINDS_OF_CONTEXT if made.get(name)]
    fill(made, {"cp": str(math.prod(kinds))} if kinds else {})
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
    if re.search(r"megatron[- ]?fsdp|custom[- ]fsdp", f"{made.get('source', '')} {made.get('notes', '')}", re.I):
        fill(made, {"zero_level": "FSDP"})
    if headers.get("zero_level", "").strip().lower() == "fsdp":
        _fsdp(made)
    _with_words(made, headers.get("offload", ""))
    if (count := number(made.get("tokens", ""))) and (
        scale := re.search(r"[(\[]([bt])\b", headers.get("tokens", "").lower())
    ):
        made["tokens"] = f"{count * (1e9 if scale.group(1) == 'b' else 1e12):g}"  # "Tokens (B)"
    count_devices(made)
    made = _sequence_degree(made)
    made = with_hybrid(made, product_of(made, ("tp", "pp", "cp")))
    if not made.get("gpu_count") and made.get("dp"):
        made["gpu_count"] = str(product_of(made, ("tp", "pp", "dp", "cp")))
    if year := made.pop("year", ""):
        made["provenance"] = f"{made.get('provenance', '')} {year}".strip()
    with_batch(made, headers)
    return with_capacity(made, headers.get(CAPACITY, ""))


def _with_words(made: dict[str, str], header: str) -> None:
    """Replace the cells of a row about 8-bit products, the optimizer and offloading, which has a header, by a precision
    and notes."""
    narrow = made.pop("float8", "")
    if narrow.lower() not in NOTHING and switch_named(narrow) is not False:
        named = precision_named(narrow) is not None or re.search(r"int ?\d", narrow, re.I)
        made["precision"] = "float8" if switch_named(narrow) else narrow if named else f"float8 {narrow}"
    if optimizer := made.pop("optimizer", ""):
        is_level = level_named(optimizer)[0] is not None and switch_named(optimizer) is None
        fill(made, {"zero_level": optimizer} if is_level else {})
        made["notes"] = f"{made.get('notes', '')}; optimizer {optimizer}".strip("; ")
    if words := _offloading(made.pop("offload", ""), header):
        made["notes"] = f"{made.get('notes', '')}; {words}".strip("; ")


def _offloading(cell: str, header: str) -> str:
    """Words about what a cell says is offloaded, and where to; "" if it says nothing."""
    is_on = switch_named(cell)
    if is_on is False or (is_on is None and cell.lower() in NOTHING):
        return ""
    what = header.lower().replace("_", " ") if "offload" in header.lower() else "offload"
    return what if is_on else f"{what} {cell}"


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


_DEGREES = re.compile(
    r"(?<![a-z])(tp|pp|dp|cp|ep|etp|vpp?|fsdp|[tpd](?==))(?:[ _]?(?:size|degree))?"
    r"(?:[ =:_]*(\d+)(?![\d.])| ?\((?!20[12]\d\))(\d+)\))",
    re.I,
)
"""A degree with its name: "TP 8", "tp_size=8", "TP (8)"."""

_VERSIONS = re.compile(r"\bfsdp-?[12]\b(?! *[=:])", re.I)
"""FSDP1 and FSDP2, whose digits are no degrees."""

_LETTERS = re.compile(r"(?:[tpdcev]\d+[-_ ,x\u00d7]*){2,}", re.I)
"""Degrees named by their letters alone: "T2P2D8"."""

_WAYS = re.compile(r"\b(\d+)[- ]way (tp|pp|dp|cp|ep|mp|tensor|model|pipeline|data|context|expert)\b", re.I)


_DEGREE_OF = {
    "fsdp": "dp", "vp": "vpp", "t": "tp", "p": "pp", "d": "dp", "mp": "tp", "tensor": "tp", "model": "tp",
    "pipeline": "pp", "data": "dp", "context": "cp", "expert": "ep",
}  # fmt: skip
"""Names of degrees in words -> their columns."""


def degrees_in(words: str) -> dict[str, str]:
    """The degrees in words such as "TP4 PP2"; none if two of them differ.

    >>> degrees_in("FSDP 32, TP 8"), degrees_in("FSDP2 (64) x TP4 PP2"), degrees_in("TP 2 beside TP 4")
    ({'dp': '32', 'tp': '8'}, {'dp': '64', 'tp': '4', 'pp': '2'}, {})
    """
    plain = _VERSIONS.sub("fsdp", words)
    named = [(name, count or other) for name, count, other in _DEGREES.findall(plain)]
    found = [
        (_DEGREE_OF.get(name.lower(), name.lower()), count)
        for name, count in (*named, *(found[::-1] for found in _WAYS.findall(plain)))
    ]
    return dict(found) if len({name for name, _ in found}) == len(found) else {}


def _with_degrees_of_model(row: Mapping[str, str]) -> dict[str, str]:
    """A row with the degrees in the cell of its model, as "Mixtral 8x7B (EP=8)", and with plain degrees: 1 for 0."""
    made = {name: "1" if cell in _NO_DEGREE and name in _OFF else cell for name, cell in row.items()}
    for name in _OFF:
        if (remark := re.fullmatch(r"(\d+) *\(([A-Za-z][^()\d]*)\)", made.get(name, ""))) is not None:  # "1 (FSDP)"
            made[name] = remark[1]
            fill(made, {"zero_level": remark[2]} if level_named(remark[2])[0] is not None else {})
    for name in (*_OFF, "dp", "vpp"):
        made |= _without_its_name(name, made.get(name, ""))
    name = made.get("model", "")
    if _DEGREES.search(name):
        fill(made, degrees_in(name))
        made["model"] = _DEGREES.sub("", name).rstrip(" ,;-()[]/")
    return made


_OWN_NAME = re.compile(r"[a-z][a-z .=:_-]*?(\d+)(?:-?way)?|(\d+)[ -]?way [a-z -]+", re.I)
_KINDS_OF_SEQUENCES = re.compile(r"(\d+) ?[x\u00d7*] ?(\d+) *\([a-z ,+x\u00d7/-]+\)", re.I)


def _without_its_name(name: str, cell: str) -> dict[str, str]:
    """The cell of a degree without words around its number: "Ulysses 8", "TP=4", "8-way tensor"; of Ulysses and ring
    attention together their product."""
    if own := _OWN_NAME.fullmatch(cell):
        return {name: own[1] or own[2]}
    if name == "cp" and (both := _KINDS_OF_SEQUENCES.fullmatch(cell)):
        return {name: str(int(both[1]) * int(both[2]))}
    return {}


def ordered_degrees(text: str, header: str) -> dict[str, str]:
    """Degrees and batches of a cell in the order that its header names; none if the header or the cell has others.

    A dash stands for a degree that is not used. Degrees with names may follow.

    Raises:
        BadCell: another number of values than of names.

    >>> ordered_degrees("8x4", "TP x PP"), ordered_degrees("TP 8", "Parallelism")
    ({'tp': '8', 'pp': '4'}, {})
    >>> ordered_degrees("1/4/-", "TP/PP/VP"), ordered_degrees("2/4 (EP8)", "TP/PP")
    ({'tp': '1', 'pp': '4'}, {'tp': '2', 'pp': '4', 'ep': '8'})
    """
    order = degree_order(header)
    named = degrees_in(text) if order else {}
    bare = (_DEGREES.sub("", text) if named else text).lower().replace("n/a", "-").strip(" ,;()[]")
    if not order or not bare or re.search(r"[a-wyz]", bare):
        return {}
    parts = [part.strip() for part in re.split(r"[/,;x\u00d7|]", bare)]
    if len(parts) != len(order) or any(re.fullmatch(r"\d+|[-\u2013\u2014]", part) is None for part in parts):
        parts = re.findall(r"\d+", re.sub(r"(?<=\d),(?=\d{3}\b)", "", bare))
    if len(order) != len(parts):
        raise BadCell("layout", text, f"layout is {text!r}, not {len(order)} numbers as {header!r} says")
    return {name: part for name, part in zip(order, parts, strict=True) if part.isdigit()} | named


def _layout(text: str, header: str) -> dict[str, str]:
    """Degrees in a cell: in the order of its header, or each with its name."""
    if named := re.fullmatch(r"\(([a-z, ]+)\) *= *(\([\d, ]+\))", text.strip(), re.I):  # "(t, p, d) = (8, 8, 1)"
        text, header = named.group(2), f"({named.group(1)})"
    if ordered := ordered_degrees(text, header):
        return ordered
    if _LETTERS.fullmatch(text.strip()):
        return {{"v": "vpp"}.get(name, f"{name}p"): count for name, count in re.findall(r"([a-z])(\d+)", text.lower())}
    found, low = {}, _VERSIONS.sub("fsdp", text.lower()).replace("_", " ")
    if behind := re.findall(r"(\d+) ?\(?(tp|pp|dp|cp|ep)\)?(?![a-z\d])", low):  # "4(TP) x 4(PP)", "4TP/4PP"
        if not _DEGREES.search(low):
            return {name: count for count, name in behind}
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
    if not found and not re.search(r"\d(?!d\b)", low):  # "2D + async TP", "3D"
        found["words"] = text
    if not found:
        raise BadCell("layout", text, f"layout is {text!r}; degrees are written as in 'TP 8, PP 4, DP 2'")
    return found
