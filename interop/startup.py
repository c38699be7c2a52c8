"""Configurations that Megatron-LM, torchtitan and FSDP2 cannot run: a table of rules for each.

A rule checks some values (`plans.degrees.rules`), so one table both restricts a search to what a program can run and
checks a finished configuration. `num_micro_batches` is that of one data-parallel rank, `layers` the blocks of every
chunk.

Megatron-LM's checks are in its training/arguments.py, core/transformer/transformer_config.py and
core/pipeline_parallel/schedules.py (core 0.16); torchtitan's in its distributed/parallel_dims.py and
distributed/pipeline_parallel.py (0.2 and 0.3) and in torch/distributed/pipelining/schedules.py; FSDP2's in
torch/distributed/fsdp/_fully_shard (torch 2.11 to 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from plans.degrees import MEMORY_BOUND, ORDER, Degrees
from plans.degrees.rules import ModelSizes, Rule, broken, rules
from plans.errors import TwofoldError

__all__ = [
    "FSDP2", "MEGATRON", "PIPELINE_INSIDE", "TORCHTITAN", "TORCHTITAN_DENSE", "TORCHTITAN_SCHEDULES",
    "TORCHTITAN_SINGLE", "check_rules", "fewer_layers",
    "stages_of",
]  # fmt: skip

PIPELINE_INSIDE = ("tp", "cp", "pp", "dp")
"""Megatron-LM's other order of ranks, --use-tp-pp-dp-mapping."""

TORCHTITAN_SCHEDULES = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved_1f1b": "Interleaved1F1B", "looped_bfs": "LoopedBFS",
    "interleaved_zb": "InterleavedZeroBubble", "zb_v": "ZBVZeroBubble", "dualpipe_v": "DualPipeV",
}  # fmt: skip
"""Our name -> torch's."""

TORCHTITAN_SINGLE = ("1f1b", "gpipe")
"""One stage per rank; all others have two or more."""


def check_rules(
    table: tuple[Rule, ...], degrees: Degrees, model: ModelSizes | None = None, *, seq: int | None = None
) -> None:
    """Raise the errors of a table of rules.

    Args:
        table: of rules.
        degrees: to be run.
        model: its sizes; None: what depends on them is not looked at.
        seq: tokens of a sequence; None: the model's.

    Raises:
        TwofoldError: the sentence of the first rule that is broken.

    >>> check_rules(MEGATRON, Degrees(pp=2, global_batch=4, schedule="interleaved_1f1b", virtual=2))
    >>> check_rules(MEGATRON, Degrees(schedule="gpipe"))
    Traceback (most recent call last):
        ...
    plans.errors.TwofoldError: Megatron-LM has no schedule 'gpipe'; plan with --schedule 1f1b or interleaved_1f1b
    """
    known = {**degrees.values, "global_batch": degrees.global_batch, "num_micro_batches": degrees.num_micro_batches}
    if degrees.layers is None:
        del known["layers"]
    if model is not None:
        known |= {"model": model, "seq": model.seq, "layers": degrees.layers_of(model.num_layers)}
    if seq is not None:
        known["seq"] = seq
    for sentence in broken(table, known):
        raise TwofoldError(sentence)


# -- Megatron-LM


def _m_schedule(schedule: str) -> str | None:
    if schedule in ("1f1b", "interleaved_1f1b"):
        return None
    return f"Megatron-LM has no schedule {schedule!r}; plan with --schedule 1f1b or interleaved_1f1b"


def _m_chunks(virtual: int, pp: int) -> str | None:
    if virtual > 1 and pp == 1:
        return "Megatron-LM has several chunks per rank only with pipeline ranks; plan with --schedule 1f1b"
    return None


def _m_groups(
    virtual: int, pp: int, num_micro_batches: int, global_batch: int = 0, dp: int = 1, micro_batch: int = 1
) -> str | None:
    if virtual == 1 or pp == 1 or num_micro_batches % pp == 0:
        return None
    ways = [*_micro_batch(global_batch // dp, micro_batch, lambda each: each % pp == 0), "--schedule 1f1b"]
    return (
        f"Megatron-LM interleaves chunks only where the pipeline ranks divide the micro-batches, not "
        f"{num_micro_batches} on {pp} ranks; plan with {', or '.join(ways)}"
    )


def _m_sequence(seq: int, cp: int) -> str | None:
    if cp == 1 or seq % (2 * cp) == 0:
        return None
    return (
        f"Megatron-LM splits a sequence into 2 x {cp} parts for {cp} context-parallel ranks, which {seq} tokens "
        f"do not divide into; plan with --cp 1, or --seq {_next(seq, 2 * cp)}"
    )


def _m_kv_heads(model: ModelSizes, tp: int) -> str | None:
    if model.kv_heads % tp == 0:
        return None
    return (
        f"Megatron-LM's tp divides the heads of keys and values, {model.kv_heads}; tp {tp} does not: plan with --tp "
        f"{math.gcd(model.kv_heads, tp)}"
    )


def _m_recompute(recompute: str, recompute_layers: int | None = None) -> str | None:
    if recompute in (MEMORY_BOUND, "selective_op"):
        return "Megatron-LM cannot recompute by operator; plan with --recompute none, selective or full"
    if recompute_layers is not None and recompute != "full":
        return (
            f"Megatron-LM recomputes some blocks of a stage only as a whole, not {recompute!r}; plan with --recompute "
            "full, or without --recompute-layers"
        )
    return None


def _m_level(zero: int, pp: int) -> str | None:
    if zero >= 2 and pp > 1:
        return (
            f"Megatron-LM shards gradients and weights (level {zero}) only without pipeline stages; plan with --zero 1"
        )
    return None


def _m_order(order: tuple[str, ...], dp: int, cp: int, tp: int, pp: int, ep: int) -> str | None:
    used = {axis for axis, size in (("dp", dp), ("cp", cp), ("tp", tp), ("pp", pp)) if size > 1}
    mine, usual, inside = ([axis for axis in axes if axis in used] for axes in (order, ORDER, PIPELINE_INSIDE))
    if mine == usual or (mine == inside and ep == 1):
        return None
    return (
        f"Megatron-LM cannot place ranks in the order {'-'.join(mine)}{' with experts shared out' if ep > 1 else ''}; "
        f"plan with --order {' '.join(ORDER)}"
    )


def _m_experts(model: ModelSizes, tp: int, sequence_parallel: bool) -> str | None:
    if model.num_experts and tp > 1 and not sequence_parallel:
        return (
            "Megatron-LM trains experts with tensor parallelism only where the sequence is split, too; plan with "
            "--sequence-parallel, or --tp 1"
        )
    return None


MEGATRON = rules(
    _m_schedule, _m_chunks, _m_groups, _m_sequence, _m_kv_heads, _m_recompute, _m_level, _m_order, _m_experts
)

# -- torchtitan


def _t_schedule(schedule: str, pp: int) -> str | None:
    if pp == 1 and schedule != "1f1b":
        return (
            f"torchtitan has schedules of pipeline ranks only, not {schedule!r} on one rank; plan with --schedule 1f1b"
        )
    if schedule not in TORCHTITAN_SCHEDULES:
        return f"torchtitan has no schedule {schedule!r}; plan with one of {', '.join(TORCHTITAN_SCHEDULES)}"
    return None


def _t_micro_batches(
    schedule: str, pp: int, num_micro_batches: int, global_batch: int = 0, dp: int = 1, micro_batch: int = 1
) -> str | None:
    if schedule != "1f1b" or num_micro_batches >= pp:
        return None
    ways = _micro_batch(global_batch // dp, micro_batch, lambda each: each >= pp) or [
        f"--global-batch {dp * pp} --micro-batch 1"
    ]
    return (
        f"torchtitan's 1F1B needs as many micro-batches as stages, {num_micro_batches} are fewer than {pp}; plan with "
        f"{', or '.join([*ways, '--schedule gpipe'])}"
    )


def _t_sequence(seq: int, tp: int, cp: int) -> str | None:
    parts = tp * 2 * cp
    if seq % parts == 0:
        return None
    return (
        f"torchtitan splits a sequence into tp x 2 cp = {parts} parts, which {seq} tokens do not divide into; "
        f"plan with --seq {_next(seq, parts)}, or other --tp and --cp"
    )


def _t_level(zero: int, dp: int, cp: int, tp: int, pp: int) -> str | None:
    if zero == 1 and dp * cp > 1:
        return "torchtitan cannot shard optimizer states alone (level 1); plan with --zero 0, 2 or 3"
    if zero == 0 and cp > 1:
        return "torchtitan shards weights over context-parallel ranks; plan with --zero 2 or 3, or --cp 1"
    if zero == 0 and dp > 1 and tp * pp > 1:
        return (
            "torchtitan replicates weights (level 0) only without tensor and pipeline parallelism; plan with --zero 2 "
            "or 3"
        )
    return None


def _t_split(tp: int, sequence_parallel: bool) -> str | None:
    if tp > 1 and not sequence_parallel:
        return "torchtitan splits the sequence wherever it splits tensors; plan with --sequence-parallel True"
    return None


def _t_recompute(recompute: str, recompute_layers: int | None = None) -> str | None:
    if recompute in (MEMORY_BOUND, "selective"):
        return "torchtitan recomputes by operator or all; plan with --recompute selective_op or full"
    if recompute_layers is not None:
        return "torchtitan recomputes in all blocks or in every k-th one; plan without --recompute-layers"
    return None


def _t_order(order: tuple[str, ...], dp: int, cp: int, tp: int, pp: int) -> str | None:
    return _usual_order("torchtitan", order, dp, cp, tp, pp)


def _t_experts(ep: int, zero: int) -> str | None:
    if ep > 1 and not zero:
        return "torchtitan shares experts out among ranks that shard weights; plan with --zero 2 or 3, or --ep 1"
    return None


def _t_stages(layers: tuple[int, ...], pp: int, schedule: str, virtual: int) -> str | None:
    if pp == 1:
        return None
    fewer = fewer_layers(layers)
    if fewer is None:
        return (
            f"torchtitan's stages are equal but for fewer layers on the first and the last, not {list(layers)}; pin "
            "others with --stage-layers"
        )
    effective = sum(layers) + sum(fewer)
    each = -(-effective // len(layers))
    usual = 1 if schedule in TORCHTITAN_SINGLE else 2
    if -(-effective // each) == len(layers) or virtual == usual:
        return None
    return (
        f"torchtitan makes {-(-effective // each)} stages of {each} layers, not {len(layers)}; plan with --virtual "
        f"{usual}, or pin others with --stage-layers"
    )


def fewer_layers(layers: tuple[int, ...]) -> tuple[int, int] | None:
    """The numbers of layers that torchtitan's first and last stage must have less to give these; None if impossible.

    >>> fewer_layers((7, 9, 9, 7)), fewer_layers((9, 7, 9, 7))
    ((2, 2), None)
    """
    most = range(max(layers) + 1)
    pairs = [
        (first, last) for first in most for last in most if stages_of(sum(layers), len(layers), first, last) == layers
    ]
    return min(pairs, key=lambda pair: ((sum(layers) + sum(pair)) % len(layers) > 0, sum(pair), pair), default=None)


def stages_of(num_layers: int, count: int, first: int, last: int) -> tuple[int, ...] | None:
    """torchtitan's blocks per stage: embedding and head count as `first` and `last` layers, and the first stages take
    the rest; None where they cannot be filled."""
    share, rest = divmod(num_layers + first + last, count)
    if count == 1:
        return (num_layers,)
    if share == 0 or max(first, last) > share:
        return None
    counts = [share + (stage < rest) for stage in range(count)]
    counts[0] -= first
    counts[-1] -= last
    return tuple(counts)


def _t_dense(model: ModelSizes, tp: int) -> str | None:
    if model.num_experts and tp > 1:
        return (
            "torchtitan 0.3.0 shares experts out over tensor-parallel ranks and splits none of them, which degrees "
            "cannot state; plan with --tp 1"
        )
    return None


TORCHTITAN = rules(
    _t_micro_batches, _t_sequence, _t_level, _t_split, _t_recompute, _t_order, _t_schedule, _t_experts, _t_stages
)
TORCHTITAN_DENSE = rules(_t_dense)
"""Since 0.3.0, whose expert mesh takes ranks of tp (distributed/parallel_dims.py)."""

# -- FSDP2


def _f_alone(dp: int | None = None, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1) -> str | None:
    for name, size in (("tp", tp), ("pp", pp), ("cp", cp), ("ep", ep)):
        if size > 1:
            return f"fully_shard alone is data parallelism; plan with --{name} 1, or for torchtitan"
    return None


def _f_level(zero: int, dp: int) -> str | None:
    if dp > 1 and zero not in (2, 3):
        return f"fully_shard shards weights and gradients, not level {zero}; plan with --zero 2 or 3"
    return None


def _f_recompute(recompute: str, recompute_layers: int | None = None) -> str | None:
    if recompute not in ("none", "full") or recompute_layers is not None:
        return "accelerate recomputes whole blocks, and all of them; plan with --recompute none or full"
    return None


def _f_schedule(schedule: str) -> str | None:
    return None if schedule == "1f1b" else "fully_shard alone has no pipeline; plan with --schedule 1f1b"


FSDP2 = rules(_f_alone, _f_level, _f_recompute, _f_schedule)


def _usual_order(program: str, order: tuple[str, ...], dp: int, cp: int, tp: int, pp: int) -> str | None:
    used = {axis for axis, size in (("dp", dp), ("cp", cp), ("tp", tp), ("pp", pp)) if size > 1}
    mine, usual = ([axis for axis in axes if axis in used] for axes in (order, ORDER))
    if mine == usual:
        return None
    return f"{program} cannot place ranks in the order {'-'.join(mine)}; plan with --order {' '.join(ORDER)}"


def _micro_batch(share: int, micro_batch: int, fits: Callable[[int], bool]) -> list[str]:
    """A flag with the largest micro-batch whose number of micro-batches satisfies `fits`; empty if there is none."""
    sizes = (size for size in range(micro_batch, 0, -1) if share % size == 0)
    found = next((size for size in sizes if share and fits(share // size)), None)
    return [] if found is None else [f"--micro-batch {found}"]


def _next(count: int, divisor: int) -> int:
    return -(-count // divisor) * divisor
