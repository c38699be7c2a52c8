"""DTensor placements as degrees: as torch itself writes them, in their orders, and what they cannot say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import Replicate, Shard

from interop.statement import Statement, read_statement
from plans.errors import TwofoldError

COLUMNS = ("layers.0.attention.wq.weight", "layers.1.mlp.gate_proj.weight")
ROWS = ("layers.0.attention.wo.weight", "layers.1.mlp.down_proj.weight")
NORMS = ("layers.0.attention_norm.weight", "norm.weight")
EVERY, SPLIT = (*COLUMNS, *ROWS, *NORMS), {**dict.fromkeys(COLUMNS, Shard(0)), **dict.fromkeys(ROWS, Shard(1))}


def stated(tmp_path: Path, mesh: dict[str, int], *dims: dict[str, Any], **more: Any) -> Statement:
    """One mapping of weights to placements per mesh dim; what it leaves out is replicated."""
    placements = {name: [repr(dim.get(name, Replicate())) for dim in dims] for name in EVERY}
    made = {"mesh": mesh, "placements": placements, "global_batch": 32, "micro_batch": 2, **more}
    (tmp_path / "spread.json").write_text(json.dumps(made))
    return read_statement(tmp_path / "spread.json")


def test_fully_sharded_with_tensor_parallel(tmp_path: Path) -> None:
    shards = dict.fromkeys(EVERY, Shard(0))
    found = stated(tmp_path, {"dp": 4, "tp": 2}, shards, SPLIT, sequence_parallel=True).degrees()
    assert (found.dp, found.tp, found.pp, found.optimizer.parallel_level, found.sequence_parallel) == (4, 2, 1, 3, True)
    kept = stated(tmp_path, {"dp": 4}, shards, reshard_after_forward=False)
    assert kept.degrees().optimizer.parallel_level == 2


def test_strided_shards_are_shards(tmp_path: Path) -> None:
    """As FSDP2 places what tensor parallelism has split already."""
    shards = {**dict.fromkeys(EVERY, Shard(0)), **dict.fromkeys(COLUMNS, Strided())}
    assert stated(tmp_path, {"dp": 4, "tp": 2}, shards, SPLIT).degrees().optimizer.parallel_level == 3


class Strided:
    def __repr__(self) -> str:
        return "_StridedShard(dim=0, sf=2)"


def test_replicas_context_and_batch(tmp_path: Path) -> None:
    found = stated(tmp_path, {"dp": 4, "cp": 2, "tp": 2}, {}, {}, SPLIT, seq=2048, recompute="full")
    degrees = found.degrees()
    assert (degrees.dp, degrees.cp, degrees.tp, degrees.optimizer.parallel_level) == (4, 2, 2, 0)
    assert (degrees.micro_batch, degrees.num_micro_batches, degrees.recompute, found.seq) == (2, 4, "full", 2048)


@pytest.mark.parametrize(
    ("mesh", "dims", "more", "message"),
    [
        ({"dp": 2, "tp": 2, "fsdp": 2}, [{}, SPLIT, {}], {}, "must be next to each other"),
        ({"dp_shard_cp": 4}, [{}], {}, 'use two mesh dims, such as "dp": 4, "cp": 1'),
        ({"context_ranks": 4}, [{}], {}, "how many ranks are context parallel"),
        ({"dp_shard_mod_ep": 4}, [{}], {}, "over dp_shard_mod_ep"),
        ({"a": 2, "b": 4}, [{}, dict.fromkeys(EVERY, Shard(0))], {}, "hybrid"),
        ({"dp": 4}, [dict.fromkeys(COLUMNS, Shard(1))], {}, "neither data"),
        ({"dp": 4}, [{COLUMNS[0]: Shard(0)}], {}, "others of its kind"),
        ({"dp": 4, "tp": 2}, [{}], {}, "the mesh has 2 dims"),
        ({"pp": 4}, [{}], {}, "over pp"),
        ({"dp": 0}, [{}], {}, "mesh dim 'dp' is 0"),
        ({"dp": 4}, [{}], {"micro_batch": "two"}, "micro_batch is 'two'"),
        ({"dp": 4}, [{}], {"notes": 1}, "wrong or missing: notes"),
        ({"dp": 4}, [{}], {"sequence_parallel": "yes"}, "not true or false"),
        ({"dp": 4}, [{COLUMNS[0]: "Partial(sum)"}], {}, "known are Replicate"),
    ],
)
def test_what_degrees_cannot_state_is_refused(
    mesh: dict[str, int], dims: list[dict[str, Any]], more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(TwofoldError, match=message):
        stated(tmp_path, mesh, *dims, **more)


def test_placements_of_norms_alone_are_insufficient(tmp_path: Path) -> None:
    made = {"mesh": {"dp": 2}, "placements": {"norm.weight": ["R"]}, "global_batch": 8, "micro_batch": 1}
    (tmp_path / "spread.json").write_text(json.dumps(made))
    with pytest.raises(TwofoldError, match="are needed"):
        read_statement(tmp_path / "spread.json")


@pytest.mark.parametrize(
    ("mesh", "dims", "strides"),
    [
        ({"dp": 4, "cp": 2, "tp": 2}, [{}, {}, SPLIT], {"dp": 4, "cp": 2, "tp": 1}),
        ({"cp": 2, "dp": 4}, [{}, {}], {"cp": 4, "dp": 1}),
        ({"tp": 2, "dp": 4}, [SPLIT, {}], {"tp": 4, "dp": 1}),
        ({"cp": 2, "dp": 4, "tp": 2}, [{}, {}, SPLIT], {"cp": 8, "dp": 2, "tp": 1}),
        ({"cp": 1, "dp": 4, "tp": 2}, [{}, {}, SPLIT], {"dp": 2, "tp": 1}),
        ({"cp": 2, "nodes": 2, "dp": 2}, [{}, {}, {}], {"cp": 4, "dp": 1}),
    ],
)
def test_ranks_count_as_in_the_mesh(
    mesh: dict[str, int], dims: list[dict[str, Any]], strides: dict[str, int], tmp_path: Path
) -> None:
    """Neighbours along a mesh dim are as far apart as the mesh dims after it are large together."""
    found = stated(tmp_path, mesh, *dims).degrees()
    assert {axis: found.strides[("tp", "cp", "dp").index(axis)] for axis in strides} == strides
    assert found.num_ranks == math.prod(mesh.values())


def test_guessed_roles_of_mesh_dims_are_reported(tmp_path: Path) -> None:
    assert not stated(tmp_path, {"dp": 2, "cp": 2, "tp": 2}, {}, {}, SPLIT).assumed
    assert not stated(tmp_path, {"dp": 2, "tp": 1}, {}, {}).assumed
    told = stated(tmp_path, {"dp_shard": 2, "cp": 2, "model": 2}, {}, {}, SPLIT).assumed
    assert told == ("mesh dim 'dp_shard' of 2 is data parallel", "mesh dim 'model' of 2 is tensor parallel")
