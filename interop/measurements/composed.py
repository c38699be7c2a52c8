"""Cells with several values: "TP 8, PP 4", "32x A100", nodes and devices of a node, batches in tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from interop.measurements.headers import degree_order
from interop.measurements.hybrid import HYBRID, hybrid_in, with_hybrid
from interop.measurements.numbers import number
from interop.measurements.spellings import level_named, switch_named

__all__ = ["NO_FSDP", "USUAL_NODE", "BadCell", "degrees_in", "ordered_degrees", "plain_row"]

_WORDS = {
    "tp": r"tp|tensor|model", "pp": r"pp|pipeline", "dp": r"dp|data|fsdp", "cp": r"cp|context", "ep": r"ep|expert",
    "vpp": r"vpp?|interleav\w*|virtual", "micro_batch": r"mbs|micro-?batch", "global_batch": r"gbs",
}  # fmt: skip
"""Column -> words of it in a layout."""

USUAL_NODE = 8
"""Devices of a node where nothing says how many."""

_DEVICES = re.compile(
    r"(\d+)(?: ?[x\u00d7*] ?(\d+)(?= *[x\u00d7* ]))?(?: ?[x\u00d7*] ?| +)(?:nvidia )?(?=([dh]gx[ -])?[a-z]|910)", re.I
)
"""Devices before their name: "64x A100", "128 A100", "1x8 910B", "16 x DGX H100" (of eight)."""

_OFF = ("tp", "pp", "cp", "ep")
"""Degrees that tables write as 0 where they are not used."""

NO_FSDP = "no fsdp"
"""Cell of a sharding level where a column "FSDP" has a 0."""


class BadCell(Exception):
    """A cell that cannot be read.

    Args:
        column: of the row.
        value: the cell.
        reason: why.
    """

    def __init__(self, column: str, value: str, reason: str) -> None:
        super().__init__(reason)
        self.column, self.value = column, value


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
        _fill(made, _layout(layout, headers.get("layout", "")))
    _fill(made, degrees_in(made.get("notes", "")))
    if headers.get("zero_level", "").strip().lower() == "fsdp":
        _fsdp(made)
    narrow = made.pop("float8", "")
    if narrow and switch_named(narrow) is not False:
        made["precision"] = "float8" if switch_named(narrow) else f"float8 {narrow}"
    if switch_named(made.pop("offload", "")):
        made["notes"] = f"{made.get('notes', '')}; offload".strip("; ")
    if own := re.search(r"\b(\d+) nodes?\b", made.get("gpu_type", ""), re.I):
        _fill(made, {"nodes": own.group(1)})
    if found := _DEVICES.match(made.get("gpu_type", "")):
        count = int(found.group(1)) * int(found.group(2) or (USUAL_NODE if found.group(3) else 1))
        _fill(made, {"per_node" if made.get("nodes") and not found.group(3) else "gpu_count": str(count)})
    counted = re.fullmatch(
        r"(\d+) ?(?:nodes?)? ?(?:[x\u00d7*] ?(\d+)?| ?(?=[a-z]+\d))(.*)", made.get("gpu_count", "").lower()
    )
    if counted:  # "8x8", "64 x A100" or "64 A100"
        made["gpu_count"] = str(int(counted.group(1)) * int(counted.group(2) or 1))
        if not counted.group(2):
            _fill(made, {"gpu_type": counted.group(3)})
    nodes, each = made.pop("nodes", ""), made.pop("per_node", "")
    if each:
        made["notes"] = f"{made.get('notes', '')}; {_count('per_node', each)} GPUs per node".strip("; ")
    if nodes and not made.get("gpu_count"):
        per = _count("per_node", each) if each else USUAL_NODE
        made["gpu_count"] = str(_count("nodes", nodes) * per)
    made = _sequence_degree(made)
    made = with_hybrid(made, _product(made, ("tp", "pp", "cp")))
    if not made.get("gpu_count") and made.get("dp"):
        made["gpu_count"] = str(_product(made, ("tp", "pp", "dp", "cp")))
    if year := made.pop("year", ""):
        made["provenance"] = f"{made.get('provenance', '')} {year}".strip()
    _batch(made, headers)
    return made


def _sequence_degree(row: dict[str, str]) -> dict[str, str]:
    """A row whose cell of sequence parallelism is a degree: Ulysses' and ring attention's is one of context
    parallelism, Megatron-LM's is that of tensor parallelism."""
    ways = number(row.get("sequence_parallel", ""))
    if ways is None or ways < 2:
        return row
    if row.get("tp", "") == row["sequence_parallel"]:
        return row | {"sequence_parallel": "y"}
    row.pop("sequence_parallel")
    _fill(row, {"cp": f"{ways:g}"})
    return row


def _fsdp(row: dict[str, str]) -> None:
    """The sharding level, and the data-parallel degree, of a column "FSDP", which holds a switch or a degree."""
    cell = row.get("zero_level", "")
    ways = number(cell)
    if ways is None:
        row["zero_level"] = {True: "3", False: NO_FSDP, None: cell}[switch_named(cell)] if cell else ""
    elif ways == 1 and (number(row.get("gpu_count", "")) or 1) > _product(row, ("tp", "pp", "cp")):
        row["zero_level"] = "3"  # a switch, as in Megatron-Bridge's tables
    else:  # a degree, as torchtitan's and NeMo's tables have it
        row["zero_level"] = "3" if ways > 1 else "0" if ways else NO_FSDP
        _fill(row, _next_to_dp(row, ways))


def _next_to_dp(row: dict[str, str], ways: float) -> dict[str, str]:
    """The data-parallel degree of a row with a degree of FSDP; beside another one it is that of a group (HSDP)."""
    if not ways:
        return {}
    copies, devices = number(row.get("dp", "")), number(row.get("gpu_count", ""))
    if copies and copies > 1 and ways > 1 and devices == copies * ways * _product(row, ("tp", "pp", "cp")):
        row["dp"] = f"{copies * ways:g}"
        return {"shards": f"{ways:g}"}
    return {"dp": f"{ways:g}"}


_DEGREES = re.compile(r"(?<![a-z])(tp|pp|dp|cp|ep|vpp?|fsdp)[ =:]*(\d+)(?![\d.])", re.I)


def degrees_in(words: str) -> dict[str, str]:
    """Degrees that words contain with their numbers; none where two of a kind differ.

    >>> degrees_in("FSDP 32, TP 8"), degrees_in("FSDP2, TP4 PP2"), degrees_in("TP 2 beside TP 4")
    ({'dp': '32', 'tp': '8'}, {'tp': '4', 'pp': '2'}, {})
    """
    plain = re.sub(r"\bfsdp-?[12]\b(?! *[=:])", "", words, flags=re.I)  # versions
    found = [
        ({"fsdp": "dp", "vp": "vpp"}.get(name.lower(), name.lower()), count) for name, count in _DEGREES.findall(plain)
    ]
    return dict(found) if len({name for name, _ in found}) == len(found) else {}


def _with_degrees_of_model(row: Mapping[str, str]) -> dict[str, str]:
    """A row with the degrees that the cell of its model states, as "Mixtral 8x7B (EP=8)", and 1 for degrees of 0."""
    made = {name: "1" if cell == "0" and name in _OFF else cell for name, cell in row.items()}
    name = made.get("model", "")
    if _DEGREES.search(name):
        _fill(made, degrees_in(name))
        made["model"] = _DEGREES.sub("", name).rstrip(" ,;-()[]/")
    return made


def _fill(row: dict[str, str], found: Mapping[str, str]) -> None:
    for column, cell in found.items():
        if not row.get(column):
            row[column] = cell


def _count(column: str, text: str) -> int:
    found = number(re.sub(r"[a-z ]+$", "", text.lower()))
    if found is None or found != int(found) or found < 1:
        raise BadCell(column, text, f"{column} is {text!r}, not a whole number from 1")
    return int(found)


def ordered_degrees(text: str, header: str) -> dict[str, str]:
    """Degrees and batches in the order of a header that names them; none where the header or the cell has others.

    Raises:
        BadCell: another number of values than of names.

    >>> ordered_degrees("8x4", "TP x PP"), ordered_degrees("TP 8", "Parallelism")
    ({'tp': '8', 'pp': '4'}, {})
    """
    order = degree_order(header)
    numbers = re.findall(r"\d+", text)
    if not order or re.search(r"[a-wyz]", text.lower()):
        return {}
    if len(order) != len(numbers):
        raise BadCell("layout", text, f"layout is {text!r}, not {len(order)} numbers as {header!r} says")
    return dict(zip(order, numbers, strict=True))


def _layout(text: str, header: str) -> dict[str, str]:
    """Degrees in a cell: in the order of its header, or each with its name."""
    if ordered := ordered_degrees(text, header):
        return ordered
    found, low = {}, re.sub(r"\bfsdp-?[12]\b(?! *[=:])", "fsdp", text.lower())  # versions, not degrees
    for column, words in _WORDS.items():
        after = re.search(rf"\b(?:{words})[a-z -]*[=:_ ]*(\d+)", low)
        before = re.search(rf"\b(\d+)[ -]*(?:way|x|\u00d7)?[ -]*(?:{words})\b", low)
        if match := before if re.search(r"\d+-?way", low) else after:
            found[column] = match.group(1)
    if level := re.search(rf"zero[- ]?(?:stage)?[- ]?[0-3]|{HYBRID}|fsdp2?|full[_ ]shard|\bddp\b", text.lower()):
        found["zero_level"] = text if level_named(text)[0] is not None else level.group()
    if hybrid := hybrid_in(text):
        found |= hybrid
    elif (copies := re.search(r"(?<!f)\bdp[ =:]*(\d+)", low)) and (ways := re.search(r"\bfsdp[ =:]*(\d+)", low)):
        found |= {"groups": copies.group(1), "shards": ways.group(1)}  # "DP 4, FSDP 8"
        found.pop("dp")
    if not found and level_named(text)[0] is not None:
        found["zero_level"] = text
    if not found:
        raise BadCell("layout", text, f"layout is {text!r}; degrees are written as in 'TP 8, PP 4, DP 2'")
    return found


_BATCH = re.compile(r"(train[ _]?)?(batch|bsz?)([ _]?size)?")
"""A header that leaves open whose batch it is."""


def _batch(row: dict[str, str], headers: Mapping[str, str]) -> None:
    """The batch in sequences: of tokens where its header or cell says so, of accumulated micro-batches where blank."""
    _batch_of_lengths(row)
    text, header = row.get("global_batch", ""), headers.get("global_batch", "").lower()
    accumulation = row.pop("accumulation", "")
    is_open = not header or _BATCH.fullmatch(header) is not None
    if text and accumulation and not row.get("micro_batch") and is_open:
        row["micro_batch"] = row.pop("global_batch")  # beside a number of micro-batches it is the size of one
        text = ""
    ways = _replicas(row) if text and not row.get("micro_batch") and not accumulation else 0
    if ways and is_open and (number(text) or ways) < ways:  # fewer than replicas: of each of them
        row["micro_batch"] = row.pop("global_batch")
        text = ""
    if text and re.search(r"tok|\(t\)", header + text.lower()):
        row["global_batch"] = str(_sequences(text, header, row.get("seq", "")))
    elif not text and accumulation and row.get("micro_batch"):
        ways = _replicas(row)
        if ways:
            row["global_batch"] = str(
                _count("accumulation", accumulation) * _count("micro_batch", row["micro_batch"]) * ways
            )


def _sequences(text: str, header: str, length: str) -> int:
    """The sequences of a batch in tokens.

    Raises:
        BadCell: no number of tokens, or an unknown length of a sequence.
    """
    seq = number(length)
    if seq is None and (kilo := re.fullmatch(r"(\d+) ?k", length.lower())):
        seq = 1024.0 * int(kilo.group(1))
    tokens = number(re.sub(r"[ -]*tok\w*$", "", text.lower()))
    if tokens is None or not seq:
        raise BadCell("global_batch", text, f"global_batch is {text!r} tokens, and seq is {length!r}")
    unit = re.search(r"\b(m(?:illions?)?|k)\b", header) if "tok" in header else None
    scale = 1.0 if unit is None else 1e3 if unit.group() == "k" else 1e6
    return max(1, round(_binary(tokens * scale, _thousands(seq)) / _thousands(seq)))


_LENGTHS = re.compile(r"(\d+) ?(?:seqs?|sequences|samples)? ?[x\u00d7*] ?(\d[\d,]*k?) ?(?:tokens|toks?)?(.*)", re.I)
"""Sequences and their length: "8 seqs x 2048 tokens per GPU"."""


def _batch_of_lengths(row: dict[str, str]) -> None:
    """Split a batch that states the length of its sequences, or its micro-batch as "512/1"; one "per GPU" is a
    micro-batch."""
    if both := re.fullmatch(r"(\d+) ?/ ?(\d+)", row.get("global_batch", "")):
        row["global_batch"] = str(max(map(int, both.groups())))
        _fill(row, {"micro_batch": str(min(map(int, both.groups())))})
    for column in ("global_batch", "micro_batch"):
        found = _LENGTHS.fullmatch(row.get(column, "").strip())
        if found is None or (number(found[2]) or 0) < _SHORTEST:
            continue
        _fill(row, {"seq": found[2]})
        row[column] = found[1]
        if column == "global_batch" and re.search(r"(?:per|/|each) ?(?:gpu|device|npu|card)", found[3], re.I):
            row.pop(column)
            _fill(row, {"micro_batch": found[1]})


_SHORTEST = 128
"""Tokens of the shortest sequence of a batch that states it."""


def _thousands(seq: float) -> float:
    """A sequence of "4k" is one of 4096."""
    return seq / 1000 * 1024 if seq % 1000 == 0 and seq / 1000 in (1, 2, 4, 8, 16, 32, 64, 128) else seq


def _binary(tokens: float, seq: float) -> float:
    """Tokens of a batch: "4M" of sequences of 4096 are 4 x 2^20, for a batch has whole sequences."""
    for unit, binary in ((1e6, 2.0**20), (1e3, 1024.0)):
        if tokens % seq and tokens % (unit / 2) == 0 and tokens / unit * binary % seq == 0:
            return tokens / unit * binary
    return tokens


def _replicas(row: Mapping[str, str]) -> int:
    if row.get("dp"):
        return _count("dp", row["dp"])
    split = _product(row, ("tp", "pp", "cp"))
    return _count("gpu_count", row["gpu_count"]) // split if row.get("gpu_count") else 0


def _product(row: Mapping[str, str], names: Sequence[str]) -> int:
    return math.prod(_count(name, row[name]) if row.get(name) else 1 for name in names)
