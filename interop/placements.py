"""A configuration as torch's DTensor placements of a transformer's weights, read from JSON.

    {"mesh": {"dp": 8, "tp": 4}, "global_batch": 64, "micro_batch": 1, "sequence_parallel": true,
     "placements": {"layers.0.attention.wq.weight": ["Shard(dim=0)", "Shard(dim=0)"], ...}}

as a model distributed over a DeviceMesh can print it:

    {"mesh": dict(zip(mesh.mesh_dim_names, mesh.shape)),
     "placements": {name: [repr(each) for each in weight.placements] for name, weight in model.named_parameters()}}

Weights are named as in Meta's or Hugging Face's Llama. A mesh dim that splits columns of some products and rows of the
others is tensor parallel, one that shards every weight along its first dim is fully sharded data parallel, one along
which all are whole is data parallel. Placements do not distinguish context-parallel from data-parallel ranks: a mesh
dim of only the former is named "cp"; one that holds both, such as torchtitan's dp_shard_cp, is to be stated as two.
Ranks count as in torch's mesh: neighbours along its last dim.
"""

from __future__ import annotations

import math
import re
from typing import Any

from plans.degrees import ORDER
from plans.errors import TwofoldError

__all__ = ["read_placements"]

_COLUMNS = frozenset({"wq", "wk", "wv", "w1", "w3", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
_ROWS = frozenset({"wo", "w2", "o_proj", "down_proj"})

_NEEDED = frozenset({"mesh", "placements", "global_batch", "micro_batch"})
_MORE = frozenset({"seq", "recompute", "sequence_parallel", "reshard_after_forward"})

_SPLIT = re.compile(r"(?:_Strided)?S(?:hard)?\((?:dim=)?(\d+)(?:,.*)?\)")


def read_placements(found: dict[str, Any], path: str) -> dict[str, Any]:
    """The fields of a `Statement` that placements give.

    Args:
        found: the JSON object.
        path: path of the file, for messages.

    Raises:
        TwofoldError: keys that are missing or unknown, placements that degrees cannot state.
    """
    sizes, placements = _mesh(found, path)
    kinds = {name: _kind(number, name, placements, len(sizes), path) for number, name in enumerate(sizes)}
    data = {kinds[name] for name, size in sizes.items() if size > 1} - {"tp"}
    if len(data) > 1:
        raise TwofoldError(f"{path}: replicas of shards (hybrid sharding) are not modelled")
    axes = {name: "tp" if kind == "tp" else "cp" if name == "cp" else "dp" for name, kind in kinds.items()}
    degrees = {axis: math.prod(sizes[name] for name in sizes if axes[name] == axis) for axis in ("dp", "cp", "tp")}
    level = 0
    if data == {"shards"}:
        level = 3 if found.get("reshard_after_forward", True) else 2
    return {
        "values": {
            **degrees, "order": _order([axes[name] for name, size in sizes.items() if size > 1], path),
            "micro_batch": _whole(found["micro_batch"], "micro_batch", path),
            "sequence_parallel": bool(found.get("sequence_parallel", False)) and degrees["tp"] > 1,
            "recompute": str(found.get("recompute", "none")), "zero": level,
        },
        "global_batch": _whole(found["global_batch"], "global_batch", path),
        "seq": _whole(found["seq"], "seq", path) if "seq" in found else None,
        "assumed": tuple(
            f"mesh dim {name!r} of {sizes[name]} is {_WORDS[axis]}"
            for name, axis in axes.items() if name != axis and sizes[name] > 1
        ),
    }  # fmt: skip


def _mesh(found: dict[str, Any], path: str) -> tuple[dict[str, int], dict[str, Any]]:
    """The sizes of the mesh dims and the placements of every weight, after all keys have been checked."""
    if wrong := (_NEEDED - found.keys()) | (found.keys() - _NEEDED - _MORE):
        raise TwofoldError(
            f"{path}: keys are {', '.join(sorted(_NEEDED))} and maybe {', '.join(sorted(_MORE))}; wrong or missing: "
            f"{', '.join(sorted(wrong))}"
        )
    mesh, placements = found["mesh"], found["placements"]
    if not isinstance(mesh, dict) or not isinstance(placements, dict) or not mesh or not placements:
        raise TwofoldError(f"{path}: mesh and placements are objects, such as {{'dp': 8}} and {{'wq': ['Shard(0)']}}")
    for name in ("sequence_parallel", "reshard_after_forward"):
        if not isinstance(found.get(name, False), bool):
            raise TwofoldError(f"{path}: {name} is {found[name]!r}, not true or false")
    sizes = {name: _whole(size, f"mesh dim {name!r}", path) for name, size in mesh.items()}
    _check_names(sizes, path)
    return sizes, placements


_WORDS = {"dp": "data parallel", "cp": "context parallel", "tp": "tensor parallel"}


def _check_names(sizes: dict[str, int], path: str) -> None:
    """Refuse mesh dims whose kind of parallelism placements of weights cannot show."""
    for name in sizes:
        parts = name.lower().split("_")
        if {"pp", "ep"} & {*parts}:
            raise TwofoldError(f"{path}: placements over {name} are not read; state those degrees otherwise")
        if name != "cp" and ("cp" in name.lower() or "context" in parts):
            raise TwofoldError(
                f"{path}: placements along mesh dim {name!r} do not state how many ranks are context parallel; use two "
                f'mesh dims, such as "dp": {sizes[name]}, "cp": 1, with a placement for each (only "cp" is read as '
                "context parallel)"
            )


def _order(axes: list[str], path: str) -> tuple[str, ...]:
    """The order of axes, the innermost first, from the axes of the mesh dims with more than one rank."""
    merged = [axis for axis, before in zip(axes, [None, *axes], strict=False) if axis != before]
    if len(set(merged)) < len(merged):
        raise TwofoldError(
            f"{path}: mesh dims taken for {', '.join(axes)}: those of one kind must be next to each other"
        )
    mine = merged[::-1]
    if mine == [axis for axis in ORDER if axis in mine]:
        return ORDER
    return (*mine, *(axis for axis in ORDER if axis not in mine))


def _kind(number: int, dim: str, placements: dict[str, Any], count: int, path: str) -> str:
    """The effect of a mesh dim on the weights: "tp", "shards" or "replicas"."""
    seen: dict[str, str] = {}
    for weight, stated in placements.items():
        parts = weight.split(".")
        if "experts" in parts:
            raise TwofoldError(f"{path}: placements of experts ({weight}) are not read")
        if not isinstance(stated, list) or len(stated) != count:
            raise TwofoldError(f"{path}: {weight} has placements {stated!r}; the mesh has {count} dims")
        names = set(parts)
        role = (
            "columns" if names & _COLUMNS else "rows" if names & _ROWS else "vectors" if "norm" in weight else "tables"
        )
        mine = _placement(stated[number], weight, path)
        if seen.setdefault(role, mine) != mine:
            raise TwofoldError(
                f"{path}: along mesh dim {dim!r} {weight} is {mine}, others of its kind are {seen[role]}; degrees "
                "split all blocks alike"
            )
    if not {"columns", "rows"} <= seen.keys():
        raise TwofoldError(
            f"{path}: placements of products such as wq and wo, or q_proj and o_proj, are needed to tell what mesh dim "
            f"{dim!r} does"
        )
    weights = set(seen.values())
    if weights == {"whole"}:
        return "replicas"
    if weights == {"split along 0"}:
        return "shards"
    if (seen["columns"], seen["rows"], seen.get("vectors", "whole")) == ("split along 0", "split along 1", "whole"):
        return "tp"
    roles_text = ", ".join(f"{role} {mine}" for role, mine in seen.items())
    raise TwofoldError(f"{path}: along mesh dim {dim!r} {roles_text}: neither data, fully sharded nor tensor parallel")


def _placement(stated: object, weight: str, path: str) -> str:
    if stated in ("Replicate()", "R"):
        return "whole"
    found = _SPLIT.fullmatch(stated) if isinstance(stated, str) else None
    if found is None:
        raise TwofoldError(f"{path}: {weight} has the placement {stated!r}; known are Replicate() and Shard(dim=0)")
    return f"split along {found[1]}"


def _whole(value: object, name: str, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TwofoldError(f"{path}: {name} is {value!r}, not a whole number of at least 1")
    return value
