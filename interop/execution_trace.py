"""Reads Chakra execution traces in JSON, one file per rank, as traces of torch's profiler.

Three forms are supported: files of torch's ExecutionTraceObserver (operators, no times); the same linked with a Kineto
trace by `chakra_trace_link` (with kernels and their times); and Chakra nodes as written by its jsonizer, one JSON
object after another (https://github.com/mlcommons/chakra, schema/protobuf/et_def.proto). The last form may have a file
of groups such as {"0": [0, 1]}, in the format of ASTRA-sim.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from interop.profiler_trace import MOST_US, RankTrace, is_rank
from plans.errors import TwofoldError
from plans.reading import json_of, read_json_values

__all__ = ["is_execution_trace", "read_execution_traces"]

_HEAD = 1 << 16
_MARKS = re.compile(
    r'"schema":\s*"[\d.]+-chakra|"type":\s*"(?:COMP|COMM_COLL|COMM_SEND|COMM_RECV|METADATA|MEM_\w+)_NODE"'
)
_GROUPS = re.compile(r'\s*\{\s*"[^"]*":\s*\[[\d\s,]*\]')
_RANK = (re.compile(r"rank[-_]?(\d+)"), re.compile(r"[._](\d+)(?:\.et)?\.json"))
_COLLECTIVES = (
    "all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all", "reduce_scatter",
    "reduce_scatter_block", "barrier",
)  # fmt: skip
"""By the number of Chakra's CollectiveCommType."""

_WORDS = {
    "collective_name": "Collective name", "dtype": "dtype", "in_msg_nelems": "In msg nelems",
    "out_msg_nelems": "Out msg nelems", "pg_name": "Process Group Name", "pg_size": "Group size",
    "global_rank_start": "Global rank start", "global_rank_stride": "Global rank stride",
}  # fmt: skip
"""An attribute of torch's execution trace -> the same in Kineto's."""

_PS_PER_US = 10**6

Node = Mapping[str, Any]
Groups = dict[str, tuple[int, ...]]


def is_execution_trace(text: str) -> bool:
    """Whether a JSON text is one of these, or a file of their groups."""
    return _MARKS.search(text[:_HEAD]) is not None or _GROUPS.match(text) is not None


def read_execution_traces(files: Sequence[Path]) -> tuple[list[RankTrace], list[str]]:
    """The traces of a run, and the facts that they lack.

    Events are kernels; those with no time is known last 0 ps and have "untimed".

    Raises:
        TwofoldError: a file that is missing, truncated or of another form, or that does not contain its rank.
    """
    found: dict[Path, list[Any]] = {}
    for file in files:  # each object by itself, or all of them in one list
        values = read_json_values(file, "the execution trace")
        found[file] = [one for value in values for one in (value if isinstance(value, list) else [value])]
    named: Groups = {}
    for file, values in [*found.items()]:
        if len(values) == 1 and values[0] and all(isinstance(each, list) for each in values[0].values()):
            named |= {name: tuple(ranks) for name, ranks in values[0].items()}
            del found[file]
    traces, is_chakras = [], False
    for file, values in found.items():
        try:
            if "nodes" in values[0]:
                groups = _groups(values[0]["nodes"], file) | named
                events = list(_of_torch(values[0]["nodes"], is_one_group=len(set(groups.values())) == 1))
            else:
                is_chakras = True
                everyone = tuple(range(len(found)))
                events, groups = list(_of_chakra(values)), {"": everyone, "0": everyone} | named
        except (ValueError, KeyError, TypeError, AttributeError, LookupError):
            raise TwofoldError(f"{file}: not a Chakra execution trace in JSON") from None
        traces.append(RankTrace(
            path=file, rank=_rank(file), events=[{"cat": "kernel", **event} for event in events], steps=(), own=None,
            meta={}, groups=groups,
        ))  # fmt: skip
    assumptions = ["comm_size is what a rank sends, of elements of 2 bytes; no group or group 0 is all ranks"]
    return traces, assumptions if is_chakras else []


def _rank(file: Path) -> int:
    for pattern in _RANK:
        if found := pattern.search(file.name):
            return int(found[1])
    raise TwofoldError(f"{file}: an execution trace does not contain its rank; name it rank0.json, rank1.json")


# ------------------------------------------------------------------------------------ torch's


def _of_torch(nodes: Sequence[Node], *, is_one_group: bool) -> Iterator[dict[str, Any]]:
    """Kernels with their times where any are linked, else the communication that was issued."""
    by_id = {node["id"]: node for node in nodes}
    kernels = [node for node in nodes if node.get("cat") == "kernel"]
    for number, node in enumerate(kernels or sorted(nodes, key=lambda node: node["id"])):
        facts, name = _facts(node), node["name"]
        if kernels:
            length = node.get("inclusive_dur") or node.get("exclusive_dur") or 0
            ends = {"Src Rank": node.get("src_rank"), "Dst Rank": node.get("dst_rank")}
            facts |= {side: rank for side, rank in ends.items() if rank is not None}
            yield {"name": name, "args": facts, **_timed(node["ts"], length)}
        elif name == "record_param_comms" or name.startswith("gloo:"):
            if is_one_group:  # the peer is numbered in its group, which operators do not name
                facts |= _peer(by_id.get(node["ctrl_deps"], {}))
            yield {"name": name.replace("record_param_comms", "nccl"), "args": facts, **_untimed(number)}


def _facts(node: Node) -> dict[str, Any]:
    """The facts about a communication in Kineto's words; for gloo the shapes and types of its tensors."""
    attributes = {each["name"]: each["value"] for each in node["attrs"]}
    facts = {word: attributes[name] for name, word in _WORDS.items() if name in attributes}
    if "pg_name" in node:
        facts["Process Group Name"] = node["pg_name"]
    shapes, types = node["inputs"]["shapes"], node["inputs"]["types"]
    return facts | {"Input Dims": shapes, "Input type": [re.sub(r"Tensor\((.*)\)", r"\1", each) for each in types]}


def _peer(node: Node) -> dict[str, int]:
    """The other end of a transfer: the third input of c10d::send (tensors, group, dst, tag) and c10d::recv_."""
    side = {"c10d::send": "Dst Rank", "c10d::recv_": "Src Rank"}.get(node.get("name", ""))
    return {side: int(node["inputs"]["values"][2])} if side else {}


def _groups(nodes: Sequence[Node], file: Path) -> Groups:
    """Name of a process group -> its ranks; torch lists none of a group of all ranks."""
    group_texts = [node["inputs"]["values"] for node in nodes if node["name"] == "## process_group:init ##"]
    listed = json_of(group_texts[0][0].encode(), str(file)) if group_texts else []
    sizes = [each.get("group_size", each.get("pg_size", 0)) for each in listed]
    groups = {}
    for each, size in zip(listed, sizes, strict=True):
        ranks = tuple(map(int, each["ranks"]))
        if not (is_rank(size) and all(map(is_rank, ranks))):
            raise ValueError(f"a process group of {size} ranks")
        if ranks or size == max(sizes):
            groups[str(each["pg_name"])] = ranks or tuple(range(size))
    return groups


def _timed(start_us: float, length_us: float) -> dict[str, Any]:
    """The times of an event.

    Raises:
        ValueError: times that no run has.
    """
    if not (abs(start_us) <= MOST_US and 0 <= length_us <= MOST_US):
        raise ValueError(f"an event at {start_us} us of {length_us} us")
    return {"start_ps": round(start_us * _PS_PER_US), "end_ps": round((start_us + length_us) * _PS_PER_US)}


def _untimed(number: int) -> dict[str, Any]:
    """The n-th event without a time: only the order is known."""
    return {"start_ps": number, "end_ps": number, "untimed": True}


# ----------------------------------------------------------------------------------- Chakra's


def _of_chakra(nodes: Sequence[Node]) -> Iterator[dict[str, Any]]:
    for number, node in enumerate(nodes):
        if "type" not in node:  # the metadata before the nodes
            continue
        start, length = (float(node.get(name, 0)) for name in ("startTimeMicros", "durationMicros"))
        when = _timed(start, length) if length else _untimed(number)
        if node["type"].startswith("COMM_"):
            yield {"name": "nccl " + node["name"], "args": _facts_of_chakra(node), **when}
        elif node["type"] == "COMP_NODE" and length:
            yield {"name": node["name"], "args": {}, **when}


def _facts_of_chakra(node: Node) -> dict[str, Any]:
    attributes = {each["name"]: _value(each) for each in node.get("attr", [])}
    facts = {"dtype": "bfloat16", "In msg nelems": -(-int(attributes["comm_size"]) // 2)}
    if node["type"] == "COMM_COLL_NODE":
        facts["Collective name"] = _COLLECTIVES[int(attributes.get("comm_type", 0))]
    elif node["type"] == "COMM_SEND_NODE":
        facts |= {"Collective name": "send", "Dst Rank": int(attributes["comm_dst"])}
    else:
        facts |= {"Collective name": "recv", "Src Rank": int(attributes["comm_src"])}
    return facts | {"Process Group Name": str(attributes.get("pg_name", ""))}


def _value(attribute: Mapping[str, Any]) -> Any:
    return next((value for name, value in attribute.items() if name not in ("name", "docString")), None)
