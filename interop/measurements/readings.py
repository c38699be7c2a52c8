"""Open questions of a row: the cells that could be filled in differently."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from interop.measurements.case import Case
from interop.measurements.cells import ZERO_BUBBLE, Cells, Skip
from interop.measurements.devices import devices_meant
from interop.measurements.mixtures import A2A, NODE, ONCE, UNEVEN
from interop.measurements.models import UNNAMED_SEQ, catalogued, usual_seq
from interop.measurements.software import software_of
from interop.measurements.spellings import schedule_named
from plans.degrees import MEMORY_BOUND

__all__ = ["Filling", "least_split", "needed_fillings", "other_fillings"]

Filling = Mapping[str, str]
"""Readings of a blank cell, by column."""

_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
_VIRTUAL = (2, 3, 4, 6, 8)
_SPLITS = ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4), (8, 8), (8, 16))
"""Tensor and pipeline degrees that are tried for rows that state none; `least_split` chooses from them."""

_SPLITS_OF_MIXTURES = ((1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (2, 8), (2, 16))
"""The same for mixtures of experts, which spread their experts instead of splitting tensors."""

_MOST_READINGS = 4

_MEMORIES = (("A100", 80, 40), ("V100", 32, 16))
"""Devices sold with two sizes of memory: the usual one, and the other."""


def needed_fillings(row: Mapping[str, str]) -> list[Filling]:
    """Values to try for the blank cells that a prediction needs; one empty filling if none is missing.

    These cells are filled: the number of devices, for a rate per device; the device, if several share the name; tensor
    and pipeline degrees, if the row does not state how the model is distributed; the chunks per stage of an interleaved
    schedule; the batch; and the micro-batch, unless the batch is one sample per replica.

    >>> needed_fillings({"global_batch": "8", "dp": "2", "gpu_count": "2"})
    [{'micro_batch': '1'}, {'micro_batch': '2'}, {'micro_batch': '4'}]
    """
    found: list[Filling] = [{}]
    for fillings_of in (_counts, _devices, _splits, _experts, _chunks, _batches):
        most = max(1, _MOST_FILLINGS // len(found))
        found = [
            {**each, **more} for each in found for more in _thinned(fillings_of(Cells({**row, **each})), most) or ({},)
        ]  # fmt: skip
    return found


_MOST_FILLINGS = 64
"""Largest number of fillings of a row."""


def _thinned(fillings: Sequence[Filling], most: int) -> Sequence[Filling]:
    """At most `most` of them, evenly chosen."""
    return fillings[:: max(1, -(-len(fillings) // most))]


def least_split(fillings: Sequence[Filling]) -> list[Filling]:
    """Of the fillings that fit the device, those that split the model least, and those that split it twice as far.

    Models are usually not split further than memory requires, because communication costs time.

    >>> least_split([{"tp": "1", "pp": "1"}, {"tp": "2", "pp": "1"}, {"tp": "8", "pp": "1"}])
    [{'tp': '1', 'pp': '1'}, {'tp': '2', 'pp': '1'}]
    """
    names = ("tp", "pp", "ep", "gpu_count")
    ways = [math.prod(int(filling.get(name, "1")) for name in names) for filling in fillings]
    return [filling for filling, own in zip(fillings, ways, strict=True) if own <= 2 * min(ways)]


def _counts(cells: Cells) -> Sequence[Filling]:
    """Devices of a row that states none and whose figure is of each device: one node, or as many as the model needs."""
    stated = any(cells.text(name) for name in ("gpu_count", "dp", "nodes"))
    if stated or cells.text("metric") == "iteration_time_s":
        return []
    least = max(NODE, math.prod(_count(cells, name) or 1 for name in ("tp", "pp", "cp")))
    return [{"gpu_count": str(least * times)} for times in (1, 4, 32)]


def _chunks(cells: Cells) -> Sequence[Filling]:
    schedule, chunks = schedule_named(cells.text("schedule"))
    if cells.text("vpp") or cells.text("chunk_layers") or chunks or not schedule.startswith(("interleaved", "looped")):
        return []
    stages, layers = _count(cells, "pp"), _count(cells, "layers")
    counts = [each for each in _VIRTUAL if stages and layers % (stages * each) == 0][:_MOST_READINGS]
    return [{"vpp": str(count)} for count in counts or _VIRTUAL[:1]]


def _devices(cells: Cells) -> Sequence[Filling]:
    """The devices of a name that is that of several; of a row that names none, those that its software runs on."""
    ascend = re.search(_ASCEND, cells.words("source", "notes")) is not None
    named = cells.text("gpu_type") or ("Ascend 910B" if ascend else "")
    return [{"gpu_type": device} for device in devices_meant(named)]


_ASCEND = r"mindspeed|modellink|mindformers|mindspore|\bcann\b"
"""Software of Ascend devices."""


def _splits(cells: Cells) -> Sequence[Filling]:
    """Tensor and pipeline degrees, if they are not stated and the software has no usual ones."""
    if any(cells.text(name) for name in ("tp", "pp", "dp", "cp", "zero_level")) or not _splits_by_hand(cells.row):
        return []
    gpus = _count(cells, "gpu_count")
    usual = _SPLITS_OF_MIXTURES if _is_mixture(cells) else _SPLITS
    scheduled = cells.text("schedule").lower() not in ("", "none", "no", "no pipeline")
    splits = (*usual, (1, gpus)) if scheduled else usual
    least = 2 if scheduled else 1  # only a pipeline has a schedule
    return [
        {"tp": str(tp), "pp": str(pp)} for tp, pp in splits if gpus > 1 and pp >= least and gpus % (tp * pp) == 0
    ]  # fmt: skip


def _experts(cells: Cells) -> Sequence[Filling]:
    """Ranks that share the experts of a mixture too large for one device, where they are not stated."""
    if cells.text("ep") or not _is_mixture(cells):
        return []
    return [{"ep": str(ranks)} for ranks in (1, NODE, 4 * NODE, 8 * NODE)]


def _is_mixture(cells: Cells) -> bool:
    known = catalogued(cells.text("model"))
    return known is not None and known.experts is not None


def _splits_by_hand(row: Mapping[str, str]) -> bool:
    """Whether its software leaves the degrees to whoever runs it, so that there are no usual ones."""
    try:
        return software_of(Cells({**row, "precision": ""}), "")[0].startswith("mega")
    except Skip:
        return False


def _batches(cells: Cells) -> Sequence[Filling]:
    """Micro-batches of a row that states none, and batches: a multiple of what fills a pipeline, where there is one.

    What torchtitan's tables call the batch of a device is cut into as many micro-batches as a pipeline has ranks unless
    told otherwise (torchtitan of 2024, parallelisms/pipelining_utils.py, pipeline_parallel_microbatches).
    """
    micro, ways, stages = _count(cells, "micro_batch"), _replicas(cells), _count(cells, "pp") or 1
    if cells.text("micro_batch") and not micro:
        return []
    if not cells.text("global_batch"):
        if micro and ways and (several := _count(cells, "accumulation")):
            return [{"global_batch": str(micro * ways * several)}]
        if micro and ways and stages > 1 and _cuts_batches(cells):
            return [{"global_batch": str(micro * ways), "micro_batch": str(max(1, micro // stages))}]
        return _global_batches(micro, ways, stages)
    if micro and stages > 1 and _cuts_batches(cells):
        return [{"micro_batch": str(max(1, micro // stages))}]
    samples = _samples_of_a_replica(cells)
    if micro or samples <= 1:
        return []
    # fewer micro-batches than stages would leave most of them idle
    busy = [size for size in _MICRO_BATCHES if samples % size == 0 and samples // size >= stages] or [1]
    return [{"micro_batch": str(size)} for size in busy[:_MOST_READINGS]]


def _global_batches(micro: int, ways: int, stages: int) -> Sequence[Filling]:
    """Batches of a row that states none: one micro-batch of a replica, or several for each stage of a pipeline."""
    if not ways or (stages == 1 and micro):
        return []
    sizes = _MICRO_BATCHES[: _MOST_READINGS if stages == 1 and not micro else 1]
    several = [1] if stages == 1 else [stages * times for times in (2, 4, 8, 16)]
    pairs = [(micro or size, number) for number in several for size in sizes]
    return [{"global_batch": str(size * number * ways), "micro_batch": str(size)} for size, number in pairs]


def other_fillings(
    row: Mapping[str, str], case: Case, *, stack_is_given: bool, is_split: bool = False
) -> Iterator[Filling]:  # fmt: skip
    """Other fillings of the cells that `case` assumes, one at a time.

    Args:
        row: as it was read.
        case: made of it.
        stack_is_given: whether the caller says which software ran it.
        is_split: whether the tensor and pipeline degrees of `row` are assumed.
    """
    cells = Cells(row)
    if ZERO_BUBBLE in cells.words("source"):  # its script states what its tables leave blank
        return
    yield from _of_blank_cells(cells, case)
    for stack in case.other_stacks:  # torch's parts split a model where the row says so
        yield {"stack": stack, "tp": "1", "pp": "1"} if is_split and stack.startswith("torch") else {"stack": stack}
    yield from _of_words(cells, case)
    torch = case.stack.startswith("torch") and not case.stack.startswith("torch-composer")
    if not stack_is_given and torch and not cells.text("compile") and not case.stack.endswith("-compile"):
        yield {"compile": "y"}
    if not (cells.text("vpp") or cells.text("chunk_layers") or cells.text("schedule")) and case.degrees.pp > 1:
        few = case.degrees.num_micro_batches < 2 * case.degrees.pp  # whose bubble makes interleaving likely
        for chunks in (2, 4) if few else (2,):
            places = chunks * case.degrees.pp
            if case.config.num_layers % places == 0 or (case.config.num_layers + 2) % places == 0:
                yield {"schedule": "interleaved", "vpp": str(chunks)}


def _of_blank_cells(cells: Cells, case: Case) -> Iterator[Filling]:
    degrees = case.degrees
    for column, values in _OPEN.items():
        if not cells.text(column):
            yield from ({column: value} for value in values(case))
    if degrees.pp > 1 and _cuts_batches(cells):
        samples = degrees.global_batch // degrees.dp
        sizes = [size for size in _MICRO_BATCHES if samples % size == 0 and size != degrees.micro_batch]
        yield from ({"micro_batch": str(size)} for size in sizes[: _MOST_READINGS - 1])


def _of_words(cells: Cells, case: Case) -> Iterator[Filling]:
    """What words leave open: the balance of experts, whose peak a share is of, the memory of a device, and
    recomputation of parts of a block."""
    if any(remark.startswith("no token dropped") for remark in case.assumed):
        yield from ({"imbalance": str(uneven)} for uneven in (0, 2 * UNEVEN))
    if case.config.experts is not None and re.match("megatron(?!.*2022)", case.stack):
        yield from _dispatchers(cells, case)
    if _may_fold(cells, case):
        yield {"etp": "1"}
    if case.metric == "mfu_percent" and case.peak == "" and re.search(r"float8|mxfp8|nvfp4", case.stack):
        yield {"peak": "narrow"}
    if any(_OF_EACH.search(remark) for remark in case.network.assumed) and not _WHOSE.search(
        cells.text("interconnect")
    ):
        yield {"interconnect": f"{cells.text('interconnect')} per node"}  # a card of a node, not of a device
    for kind, usual, other in _MEMORIES:
        if f"memory of the {kind} not stated: {usual} GB" in case.assumed:
            yield {"gpu_type": cells.text("gpu_type").lower().replace(kind.lower(), f"{kind} {other}GB")}
    if any(remark.startswith("recompute ") and " taken as " in remark for remark in case.assumed):
        yield from ({"recompute": mode} for mode in _recompute(case))


def _dispatchers(cells: Cells, case: Case) -> Iterator[Filling]:
    """The other dispatcher of experts on several nodes, if the row does not state one: one that sends a token to a node
    once, or one that sends it to every expert."""
    ways = 1 if case.beyond.whole_experts else case.degrees.tp
    words = cells.words("notes", "provenance", "source", "routing", "schedule")
    if case.beyond.expert_ranks * ways > NODE and not re.search(rf"{A2A}|{ONCE}", words):
        yield {"routing": "alltoall" if case.beyond.most_nodes else "flex"}


def _may_fold(cells: Cells, case: Case) -> bool:
    """Whether it is open if tensor parallelism splits experts: Megatron-core can leave them whole."""
    is_open = case.beyond.expert_ranks > 1 and not case.beyond.whole_experts and not cells.text("etp")
    return is_open and case.degrees.tp > 1 and re.match("megatron(?!.*2022)", case.stack) is not None


_OF_EACH = re.compile(r"read as (?:[1-9]\d?|1\d\d|200) Gb/s of each device")
"""Links of up to 200 Gb/s, which a node may have one of."""

_WHOSE = re.compile(r"\b(?:per|each|/) ?-?(?:gpu|node|device|npu|card|server)|\d ?[x\u00d7*]|node", re.I)
"""Words that say whose a link is."""


def _recompute(case: Case) -> tuple[str, ...]:
    """Modes of recomputation; those of norms and activation functions alone are usual for mixtures only."""
    own = (MEMORY_BOUND,) if case.config.experts is not None and re.match(_RECOMPUTES_NORMS, case.stack) else ()
    return tuple(
        mode for mode in ("none", *own, "selective", "full") if mode != case.degrees.recompute.removesuffix("_op")
    )


_RECOMPUTES_NORMS = r"megatron(?!-deepspeed|-2022)"
"""Stacks that recompute norms and activation functions (--recompute-modules)."""


def _sequence_parallel(case: Case) -> tuple[str, ...]:
    if case.degrees.tp == 1:
        return ()
    return ("n",) if case.degrees.sequence_parallel else ("y",)


def _level(case: Case) -> tuple[str, ...]:
    if case.degrees.dp * case.degrees.cp == 1:
        return ()
    usual = (0, 2, 3) if case.stack.startswith("torch") else (0, 1)
    return tuple(str(level) for level in usual if level != case.degrees.optimizer.parallel_level)


def _ep(case: Case) -> tuple[str, ...]:
    """Ranks of a node that share the experts, where a mixture's row does not state them."""
    if case.config.experts is None:
        return ()
    ranks = math.gcd(case.degrees.dp * case.degrees.cp, case.config.experts.num_experts, NODE)
    return (str(ranks),) if ranks > 1 else ()


def _seq(case: Case) -> tuple[str, ...]:
    known = usual_seq(case.config.name)
    if known == UNNAMED_SEQ:  # models of before 2023, which were rarely trained with longer ones
        return ()
    return tuple(
        str(seq) for seq in (2048, 4096, 8192) if seq != case.config.seq and (known is None or seq <= 2 * known)
    )


_OPEN: Mapping[str, Callable[[Case], tuple[str, ...]]] = {
    "seq": _seq, "ep": _ep,
    "recompute": _recompute, "sequence_parallel": _sequence_parallel, "zero_level": _level,
}  # fmt: skip
"""Column -> what else a blank cell could mean."""


def _cuts_batches(cells: Cells) -> bool:
    return "torchtitan" in cells.words("source")


def _samples_of_a_replica(cells: Cells) -> int:
    """Micro-batches of one step; 0 if unknown."""
    batch, ways = _count(cells, "global_batch"), _replicas(cells)
    return round(batch / ways) if ways else 0


def _replicas(cells: Cells) -> int:
    split = (_count(cells, "tp") or 1) * (_count(cells, "pp") or 1) * (_count(cells, "cp") or 1)
    return _count(cells, "dp") or _count(cells, "gpu_count") // split


def _count(cells: Cells, name: str) -> int:
    """A cell's number; 0 where it is blank or none."""
    try:
        return cells.count(name, 0)
    except Skip:
        return 0
