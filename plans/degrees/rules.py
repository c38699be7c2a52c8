"""Rules for possible degrees. Each mistake has one message: the problem, the arithmetic, and a valid value.

A rule is a function whose parameters are the values that it checks, by name. It returns its message, or None if the
values are valid. A rule applies only if all parameters without a default are known, so the same rules check a complete
`Degrees` and a few pinned values.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from plans.degrees.groups import ORDER
from plans.errors import TwofoldError
from plans.plan import RECEIVES, slices_refused
from plans.schedules import chunks_per_rank, make_schedule
from plans.schedules.pairs import overlapped_pairs
from plans.schedules.registry import is_written

__all__ = [
    "MEMORY_BOUND", "OF_DEGREES", "OF_DEVICES", "OF_MODELS", "OF_PLANS", "RECOMPUTE_MODES", "ModelSizes", "Rule",
    "broken", "byte_count", "chunk_counts", "flag", "level", "mode", "name_of_schedule", "order", "receiving", "rules",
    "schedule_virtual", "tied_head", "unpredicted", "whole_number",
]  # fmt: skip

MEMORY_BOUND = "memory_bound"
"""The recompute mode that no other software has."""

RECOMPUTE_MODES = ("none", MEMORY_BOUND, "selective", "selective_op", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of a transformer that degrees must divide.

    Args:
        name: for messages.
        num_layers: blocks; 0 where the pipeline is not cut between blocks.
        seq: tokens of a sample.
        num_heads, kv_heads: heads of queries, and of keys and values.
        inner: rows of a plain MLP; 0: no block has one.
        hidden: features between blocks.
        vocab: rows of the table of embeddings.
        num_experts, expert_inner: of a mixture of experts; 0: there is none.
        tied: whether the head shares its weights with the embedding.
    """

    name: str
    num_layers: int
    seq: int
    num_heads: int
    kv_heads: int
    inner: int
    hidden: int
    vocab: int
    num_experts: int = 0
    expert_inner: int = 0
    tied: bool = False


# ------------------------------------------------------------------- single values


def whole_number(name: str, value: object) -> str | None:
    """A count of ranks, samples or chunks."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        return f"{name} must be a whole number of at least 1, not {value!r}"
    return None


def byte_count(name: str, value: object) -> str | None:
    """Check a number of bytes."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return f"{name} must be a whole number of bytes (0: none), not {value!r}"
    return None


def level(name: str, value: object) -> str | None:
    """Check an optimizer-parallel level."""
    if isinstance(value, bool) or value not in (0, 1, 2, 3):
        return f"{name} must be 0, 1, 2 or 3, not {value!r}"
    return None


def mode(name: str, value: object) -> str | None:
    """Check a recompute mode."""
    return None if value in RECOMPUTE_MODES else f"{name} must be one of {', '.join(RECOMPUTE_MODES)}, not {value!r}"


def receiving(name: str, value: object) -> str | None:
    """When tensors of other stages are received."""
    return None if value in RECEIVES else f"{name} must be {' or '.join(RECEIVES)}, not {value!r}"


def flag(name: str, value: object) -> str | None:
    """Check a boolean."""
    return None if isinstance(value, bool) else f"{name} must be true or false, not {value!r}"


def name_of_schedule(name: str, value: object) -> str | None:
    """Check the name of a schedule."""
    if not isinstance(value, str):
        return f"{name} must be the name of a schedule, such as 1f1b, not {value!r}"
    return _refused(lambda: chunks_per_rank(value))


def chunk_counts(name: str, value: object) -> str | None:
    """Check the numbers of blocks of the chunks."""
    if not isinstance(value, tuple) or not value or not all(type(count) is int and count >= 0 for count in value):
        return f"{name} must list the blocks of every pipeline chunk, such as (8, 8, 8, 8), not {value!r}"
    if empty := [chunk for chunk in range(1, len(value) - 1) if not value[chunk]]:
        return (
            f"{name} {value} leaves nothing for chunk {empty[0]}: only the first chunk, which has the embedding, and "
            "the last, which has the head, may have no blocks"
        )
    return None


def order(name: str, value: object) -> str | None:
    """Check an order of axes."""
    if not isinstance(value, tuple) or sorted(map(str, value)) != sorted(ORDER):
        return f"{name} must list {', '.join(ORDER)} once each, innermost first, such as {' '.join(ORDER)}"
    return None


# ------------------------------------------------------------------- degrees with each other


def _recompute_layers(recompute: str, recompute_layers: int | None) -> str | None:
    if recompute == "none" and recompute_layers is not None:
        return (
            f"recompute_layers {recompute_layers} sets how many blocks of a chunk recompute, but recompute is none; "
            "set recompute, for example to full"
        )
    return None


def _expert_ranks(dp: int, ep: int) -> str | None:
    if dp % ep:
        return (
            f"dp {dp} is not a multiple of ep {ep}: {dp} % {ep} != 0, and experts are split over data-parallel ranks; "
            f"{_next('ep', dp, ep)}"
        )
    return None


def _batch(global_batch: int, dp: int = 1, micro_batch: int = 1) -> str | None:
    at_once = dp * micro_batch
    if global_batch % at_once:
        return (
            f"a global batch of {global_batch} does not divide by dp({dp}) * micro_batch({micro_batch}) = {at_once}: "
            f"{global_batch} % {at_once} != 0; the next valid batch is {math.ceil(global_batch / at_once) * at_once}"
        )
    return None


def _slices(interleave: int, micro_batch: int) -> str | None:
    return slices_refused(micro_batch, interleave)


def _chunks(schedule: str, virtual: int) -> str | None:
    fixed = chunks_per_rank(schedule)
    if fixed is None or virtual in (1, fixed):
        return None
    return _refused(lambda: make_schedule(schedule, fixed, fixed, virtual=virtual))


def _layers(layers: tuple[int, ...] | None, pp: int, schedule: str = "", virtual: int = 1) -> str | None:
    if layers is None or is_written(schedule):
        return None
    if not schedule:  # which is searched
        return (
            None
            if len(layers) % pp == 0
            else f"layers {layers} has {len(layers)} numbers, which is not a multiple of pp {pp}"
        )
    each = chunks_per_rank(schedule) or virtual
    if len(layers) != pp * each:
        own, every = (f"{count} chunk{'s' * (count != 1)}" for count in (each, pp * each))
        return f"layers {layers} has {len(layers)} numbers, but pp {pp} with {own} each makes {every}"
    return None


def _schedule(
    schedule: str, pp: int, global_batch: int, dp: int, micro_batch: int, virtual: int | None = None
) -> str | None:
    if chunks_per_rank(schedule) is None and virtual is None:
        virtual = 2  # the fewest
    count = global_batch // (dp * micro_batch)
    return _refused(lambda: make_schedule(schedule, pp, count, virtual=schedule_virtual(schedule, virtual)))


def _pairs(
    overlap_pairs: bool, schedule: str, pp: int, global_batch: int, dp: int, micro_batch: int, virtual: int
) -> str | None:
    if not overlap_pairs:
        return None
    count = global_batch // (dp * micro_batch)

    def find() -> None:
        made = make_schedule(schedule, pp, count, virtual=schedule_virtual(schedule, virtual))
        if not any(overlapped_pairs(made)):
            raise TwofoldError(
                f"overlap_pairs: schedule {schedule!r} of pp {pp} and {count} micro-batches runs no forward next to a "
                "backward of another chunk; use dualpipe_v and more micro-batches"
            )

    return _refused(find)


def schedule_virtual(schedule: str, virtual: int | None) -> int | None:
    """The chunks per rank as `make_schedule` takes them: 1 leaves it to schedules that have a separate number."""
    return None if virtual == 1 and (is_written(schedule) or chunks_per_rank(schedule) is not None) else virtual


# ------------------------------------------------------------------- degrees and a model


def _heads(model: ModelSizes, tp: int) -> str | None:
    return _split(model, "query heads", model.num_heads, "tp", tp)


def _kv_heads(model: ModelSizes, tp: int) -> str | None:
    heads = model.kv_heads
    if heads % tp and tp % heads:
        fits = _next("tp", heads, tp) if tp < heads else f"the next valid tp is {math.ceil(tp / heads) * heads}"
        return (
            f"{model.name}: {heads} heads of keys and values and tp {tp}: one must be a multiple of the other; {fits}"
        )
    return None


def _mlp(model: ModelSizes, tp: int) -> str | None:
    return _split(model, "rows of an MLP", model.inner, "tp", tp) if model.inner else None


def _vocabulary(model: ModelSizes, tp: int) -> str | None:
    if model.vocab % tp:
        padded = -(-model.vocab // (128 * tp)) * 128 * tp
        return (
            f"{model.name}: a vocabulary of {model.vocab} cannot be split over tp {tp}: {model.vocab} % {tp} != 0; pad "
            f"it, as Megatron-LM does: dataclasses.replace(config, vocab={padded})"
        )
    return None


def _sequence(model: ModelSizes, cp: int = 1, tp: int = 1, sequence_parallel: bool = False) -> str | None:
    parts = cp * (tp if sequence_parallel else 1)
    if model.seq % parts == 0:
        return None
    ways = [f"{name} {count}" for name, count in (("cp", cp), ("tp", tp if sequence_parallel else 1)) if count > 1]
    return (
        f"{model.name}: {model.seq} tokens per sample cannot be split over {' x '.join(ways)}: {model.seq} % {parts} "
        f"!= 0; the next valid length is {math.ceil(model.seq / parts) * parts}"
    )


def _has_experts(model: ModelSizes, ep: int) -> str | None:
    return f"{model.name} has no experts to split over ep {ep}" if ep > 1 and not model.num_experts else None


def _experts(model: ModelSizes, ep: int) -> str | None:
    return _split(model, "experts", model.num_experts, "ep", ep) if model.num_experts else None


def _whole_samples(model: ModelSizes, cp: int) -> str | None:
    if model.num_experts and cp > 1:
        return f"{model.name}: experts need complete samples, but cp {cp} splits them; use cp 1"
    return None


def _expert_rows(model: ModelSizes, tp: int) -> str | None:
    return _split(model, "rows of an expert", model.expert_inner, "tp", tp) if model.num_experts else None


def _expert_features(model: ModelSizes, tp: int) -> str | None:
    return _split(model, "features of an expert's output", model.hidden, "tp", tp) if model.num_experts else None


def _all_layers(model: ModelSizes, layers: tuple[int, ...] | None) -> str | None:
    if layers is not None and model.num_layers and sum(layers) != model.num_layers:
        return f"layers {layers} add up to {sum(layers)}; {model.name} has {model.num_layers} blocks"
    return None


def _enough_layers(
    model: ModelSizes, pp: int, schedule: str, virtual: int, layers: tuple[int, ...] | None = None
) -> str | None:
    each = chunks_per_rank(schedule) or virtual
    if layers is None and not is_written(schedule) and 0 < model.num_layers < pp * each:
        return (
            f"{model.name}: {model.num_layers} blocks cannot fill {pp * each} chunks (pp {pp} x {each} per rank); use "
            "fewer chunks, or give layers with zeros for the first or the last chunk"
        )
    return None


def unpredicted(model: ModelSizes, tp: int, sequence_parallel: bool) -> str | None:
    """Degrees that plans support, but forecasts do not."""
    if sequence_parallel and tp > model.kv_heads > 1:
        return (
            f"{model.name}: sequence parallelism with tp {tp} above the {model.kv_heads} key-value heads is not "
            f"supported by forecasts; use tp {model.kv_heads}, or no sequence parallelism"
        )
    return None


def tied_head(model: ModelSizes, pp: int, schedule: str, virtual: int = 1) -> str | None:
    """Degrees that forecasts support, but plans do not: a tied head on another rank than the embedding."""
    if pp == 1 or not model.tied:
        return None
    made = make_schedule(schedule, pp, 2 * pp, virtual=schedule_virtual(schedule, virtual))
    if made.placement[0] != made.placement[-1]:
        return (
            f"{model.name}: the head shares its weights with the embedding, but with pp {pp} and schedule {schedule!r} "
            "they are on different ranks; use a V-shaped schedule such as zb_v, or untie the head: "
            "tf.transformer(..., tied=False)"
        )
    return None


# ------------------------------------------------------------------- degrees and devices


def _devices(num_devices: int, machine: str, dp: int = 1, cp: int = 1, tp: int = 1, pp: int = 1) -> str | None:
    axes = {"dp": dp, "cp": cp, "tp": tp, "pp": pp}
    if (num_ranks := math.prod(axes.values())) > num_devices:
        shown = " * ".join(f"{name}({size})" for name, size in axes.items() if size > 1)
        return (
            f"{shown} = {num_ranks} ranks; machine {machine!r} has {num_devices} devices: lower a degree, or use a "
            "larger machine"
        )
    return None


# ------------------------------------------------------------------- how rules are applied


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule with the names of its parameters; `needed` are those without a default."""

    sentence: Callable[..., str | None]
    names: tuple[str, ...]
    needed: frozenset[str]
    values: Callable[[Mapping[str, Any]], tuple[Any, ...]]

    def apply(self, known: Mapping[str, Any]) -> str | None:
        """The rule's message about known values; None if they satisfy it, or if too little is known."""
        try:
            values = self.values(known)
        except KeyError:
            if not self.needed <= known.keys():
                return None
            return self.sentence(**{name: known[name] for name in self.names if name in known})
        return self.sentence(*values)


def rules(*sentences: Callable[..., str | None]) -> tuple[Rule, ...]:
    """A table of rules, each a function of the values that it looks at."""
    listed = []
    for sentence in sentences:
        parameters = inspect.signature(sentence).parameters.values()
        needed = frozenset(parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty)
        names = tuple(parameter.name for parameter in parameters)
        listed.append(Rule(sentence, names, needed, _values_of(names)))
    return tuple(listed)


def _values_of(names: tuple[str, ...]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Get the values of these names as a tuple (`itemgetter` returns a tuple for several names only)."""
    return operator.itemgetter(*names) if len(names) > 1 else lambda known: (known[names[0]],)


OF_DEGREES = rules(_recompute_layers, _expert_ranks, _batch, _slices, _chunks, _layers)
OF_DEVICES = rules(_devices)
OF_MODELS = rules(
    _schedule, _pairs, _heads, _kv_heads, _mlp, _vocabulary, _sequence, _has_experts, _experts, _whole_samples,
    _expert_rows, _expert_features, _all_layers, _enough_layers,
)  # fmt: skip
OF_PLANS = rules(tied_head)


def broken(rules: Iterable[Rule], known: Mapping[str, Any]) -> Iterator[str]:
    """The sentences of the rules that known values break.

    >>> next(broken(OF_DEGREES, {"global_batch": 24, "dp": 5}))
    'a global batch of 24 does not divide by dp(5) * micro_batch(1) = 5: 24 % 5 != 0; the next valid batch is 25'
    """
    for rule in rules:
        if sentence := rule.apply(known):
            yield sentence


def _split(model: ModelSizes, what: str, size: int, name: str, count: int) -> str | None:
    if size % count == 0:
        return None
    return (
        f"{model.name}: {size} {what} cannot be split over {name} {count}: {size} % {count} != 0; "
        f"{_next(name, size, count)}"
    )


def _next(name: str, size: int, count: int) -> str:
    """The next larger degree that divides a size, or the largest."""
    larger = next((degree for degree in range(count + 1, size + 1) if size % degree == 0), size)
    return f"the {'next' if larger > count else 'largest'} valid {name} is {larger}"


def _refused(make: Callable[[], object]) -> str | None:
    try:
        make()
    except TwofoldError as error:
        return str(error)
    return None
