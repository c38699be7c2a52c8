"""`Degrees`, which describes how a transformer is parallelised. Its fields are the only list of degrees."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any, get_type_hints

import msgspec

from plans.degrees import groups, rules
from plans.errors import TwofoldError
from plans.optimizer import Optimizer
from plans.schedules import Schedule, chunks_per_rank, make_schedule
from plans.schedules.registry import is_written

__all__ = ["DEGREES", "Degree", "Degrees", "even_layers"]

Check = Callable[[str, Any], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Degree:
    """The declaration of a degree, used wherever degrees are listed: files, command line, tables, search.

    Args:
        name: in Python, in files, and as a pin of the search.
        type: type of its values.
        default: of `Degrees`.
        meaning: what it is; the help of its flag.
        check: gives the sentence about a value that cannot be.
        word: before its value in tables and messages; "" where `plans.degrees.words` has more to say.
        flag: on the command line of a search, without dashes.
        setting: the field of the optimizer that it is; "": a field of `Degrees`.
        is_searched: by searches over degrees; others take what is given, or the default.
    """

    name: str
    type: Any
    default: Any
    meaning: str
    check: Check
    word: str
    flag: str
    setting: str = ""
    is_searched: bool = True

    @property
    def path(self) -> str:
        """The path of its value in `Degrees`."""
        return f"optimizer.{self.setting}" if self.setting else self.name


def _degree(
    default: Any, meaning: str, check: Check, *, word: str = "", flag: str = "", is_searched: bool = True
) -> Any:
    metadata_of = {"meaning": meaning, "check": check, "word": word, "flag": flag, "is_searched": is_searched}
    return field(default=default, metadata=metadata_of)


_ADAMW = Optimizer(kind="adamw", settings={"lr": 1e-4})

_SETTINGS = (
    Degree(
        name="zero", type=int, default=0, meaning="optimizer-parallel level, 0 to 3", check=rules.level,
        word="optimizer level", flag="zero", setting="parallel_level",
    ),
    Degree(
        name="bucket_bytes", type=int, default=_ADAMW.bucket_bytes, check=rules.byte_count, word="bucket bytes",
        meaning="size of the buckets in which gradients are reduced and weights gathered, in bytes; 0: one bucket per "
        "parameter. Not searched; other stacks have their own buckets", flag="bucket_bytes", setting="bucket_bytes",
        is_searched=False,
    ),
)  # fmt: skip
"""Degrees that are settings of the optimizer."""


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """The parallel degrees of a transformer.

    Every field is declared with its meaning; `DEGREES` lists them by name, including those of the optimizer ("zero").
    Equally fast configurations are ranked by the fields in this order, smaller values first.

    Raises:
        TwofoldError: values that are never valid (see `plans.degrees.rules`).

    >>> Degrees(dp=2, tp=4, pp=2, micro_batch=1, global_batch=16).num_micro_batches
    8
    >>> DEGREES["ep"].meaning
    'expert-parallel degree: number of neighbouring data-parallel ranks that share the experts'
    """

    pp: int = _degree(1, "pipeline-parallel degree", rules.whole_number, word="pp")
    tp: int = _degree(1, "tensor-parallel degree", rules.whole_number, word="tp")
    cp: int = _degree(
        1, "context-parallel degree: number of ranks that share a sequence", rules.whole_number, word="cp"
    )
    dp: int = _degree(1, "data-parallel degree", rules.whole_number, word="dp")
    ep: int = _degree(
        1, "expert-parallel degree: number of neighbouring data-parallel ranks that share the experts",
        rules.whole_number, word="ep",
    )  # fmt: skip
    micro_batch: int = _degree(
        1, "samples per micro-batch on one data-parallel rank", rules.whole_number, word="micro-batch"
    )
    schedule: str = _degree("1f1b", "pipeline schedule", rules.name_of_schedule)
    virtual: int = _degree(1, "chunks of the model per pipeline rank", rules.whole_number)
    recompute: str = _degree(
        "none", "what the backward recomputes: none, memory_bound (norms, activation functions, up-projections of "
        "latents), selective (the attention core), selective_op (torchtitan's, by operator) or full (everything but "
        "the input of a block)",
        rules.mode, word="recompute",
    )  # fmt: skip
    recompute_layers: int | None = _degree(
        None, "number of blocks of every chunk that recompute, starting with the first; by default all",
        rules.whole_number,
    )  # fmt: skip
    optimizer: Optimizer = _ADAMW
    sequence_parallel: bool = _degree(
        False, "split the sequence over tp between the tensor-parallel products", rules.flag
    )
    interleave: int = _degree(
        1, "number of slices of a micro-batch that alternate, so that one communicates while another "
        "computes", rules.whole_number,
    )  # fmt: skip
    overlap_pairs: bool = _degree(
        False, "run a forward and the following backward of another chunk at the same time, as in "
        "DualPipe-V", rules.flag,
    )  # fmt: skip
    receives: str = _degree(
        "ahead", "when to receive from other stages: ahead (during the action before the one that needs it) or "
        "needed (when that action begins, as on GPUs). Not searched", rules.receiving, word="receives",
        is_searched=False,
    )  # fmt: skip
    layers: tuple[int, ...] | None = _degree(
        None, "number of blocks of every pipeline chunk, in the order of the model; even by default",
        rules.chunk_counts, flag="stage_layers",
    )  # fmt: skip
    order: tuple[str, ...] = _degree(
        groups.ORDER, "order of the mesh axes over the ranks, innermost first: neighbours along an inner axis are "
        "neighbouring ranks", rules.order,
    )  # fmt: skip
    global_batch: int = 1
    fused: bool = True
    """As `Plan.fused`. Not a degree, and ignored by other software."""

    def __post_init__(self) -> None:
        known = {**self.values, "global_batch": self.global_batch}
        check_values(known)
        for sentence in rules.broken(rules.OF_DEGREES, known):
            raise TwofoldError(sentence)

    @classmethod
    def of(
        cls, values: Mapping[str, Any], *, global_batch: int, optimizer: Optimizer = _ADAMW, fused: bool = True
    ) -> Degrees:
        """Degrees of plain values by name; those that are settings of the optimizer go into `optimizer`.

        Raises:
            TwofoldError: unknown names; what the class refuses.

        >>> Degrees.of({"dp": 2, "zero": 1}, global_batch=2).optimizer.parallel_level
        1
        """
        check_values(values)
        settings = {DEGREES[name].setting: value for name, value in values.items() if DEGREES[name].setting}
        if settings:
            optimizer = msgspec.structs.replace(optimizer, **settings)
        own = {name: value for name, value in values.items() if not DEGREES[name].setting}
        return cls(**own, global_batch=global_batch, optimizer=optimizer, fused=fused)

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """Every degree by its name, those of the optimizer included; all but the global batch."""
        return dict(zip(DEGREES, _ALL(self), strict=True))

    @cached_property
    def rank(self) -> tuple[tuple[bool, Any], ...]:
        """Orders equally good configurations: defaults first, then smaller values, in the order of the fields."""
        usual = {name: degree.default for name, degree in DEGREES.items()}
        if self.layers is not None:
            usual["layers"] = even_layers(sum(self.layers), len(self.layers))
        return tuple((value != usual[name], value or 0) for name, value in self.values.items())

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def width(self) -> int:
        """Ranks of one pipeline rank's group."""
        return self.dp * self.tp * self.cp

    @cached_property
    def strides(self) -> tuple[int, int, int, int]:
        """Distance of neighbours along tp, cp, dp and pp.

        >>> Degrees(dp=2, tp=4, pp=2, global_batch=2, order=("tp", "cp", "pp", "dp")).strides
        (1, 4, 8, 4)
        """
        stride = groups.stride_of(self)
        return stride["tp"], stride["cp"], stride["dp"], stride["pp"]

    def stage_ranks(self, stage: int) -> list[int]:
        """The ranks of a pipeline rank: along dp, then cp, then tp, tp fastest."""
        return groups.stage_ranks(self, stage)

    @property
    def takes_turns(self) -> bool:
        """Whether parts of a step take turns on a rank: slices of a micro-batch, or the two actions of a pair."""
        return self.interleave > 1 or self.overlap_pairs

    @property
    def posts_ahead(self) -> bool:
        """Whether receives are posted one action ahead."""
        return self.receives == "ahead"

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches per step."""
        return self.global_batch // (self.dp * self.micro_batch)

    @cached_property
    def pipeline(self) -> Schedule:
        """The pipeline schedule.

        Raises:
            TwofoldError: it cannot be made for these ranks, micro-batches and chunks.
        """
        given = rules.schedule_virtual(self.schedule, self.virtual)
        return make_schedule(self.schedule, self.pp, self.num_micro_batches, virtual=given)

    @property
    def num_chunks(self) -> int:
        """The number of chunks of the model."""
        if is_written(self.schedule):
            return self.pipeline.num_stages
        return self.pp * (chunks_per_rank(self.schedule) or self.virtual)

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """Blocks of every chunk: those given, or even ones (`even_layers`)."""
        return even_layers(num_layers, self.num_chunks) if self.layers is None else self.layers

    def spelled_out(self, num_layers: int) -> Degrees:
        """The same with the blocks of every chunk stated, so that nothing is left to be read in two ways.

        >>> Degrees(pp=4, global_batch=4).spelled_out(6).layers
        (1, 2, 2, 1)
        """
        return self if self.layers is not None else replace(self, layers=self.layers_of(num_layers))


@lru_cache(maxsize=4096)
def even_layers(num_layers: int, num_chunks: int) -> tuple[int, ...]:
    """Blocks spread evenly over chunks; the remainder goes to chunks in the middle.

    The first chunk has the embedding next to its blocks, the last the head.

    >>> even_layers(6, 4), even_layers(9, 4)
    ((1, 2, 2, 1), (2, 3, 2, 2))
    """
    each, left = divmod(num_layers, num_chunks)
    inner_first = sorted(range(num_chunks), key=lambda chunk: (-min(chunk, num_chunks - 1 - chunk), chunk))
    more = set(inner_first[:left])
    return tuple(each + (chunk in more) for chunk in range(num_chunks))


def _declared() -> dict[str, Degree]:
    types = get_type_hints(Degrees)
    listed: dict[str, Degree] = {}
    for each in fields(Degrees):
        if each.name == "optimizer":
            listed |= {setting.name: setting for setting in _SETTINGS}
        elif each.metadata:
            listed[each.name] = Degree(
                name=each.name, type=types[each.name], default=each.default, meaning=each.metadata["meaning"],
                check=each.metadata["check"], word=each.metadata["word"], flag=each.metadata["flag"] or each.name,
                is_searched=each.metadata["is_searched"],
            )  # fmt: skip
    return listed


DEGREES = _declared()
"""Every degree by its name, in the order of the fields of `Degrees`."""

_ALL = operator.attrgetter(*(degree.path for degree in DEGREES.values()))

_CHECKS: dict[str, tuple[Check, bool]] = {
    name: (degree.check, degree.default is None) for name, degree in DEGREES.items()
} | {"global_batch": (rules.whole_number, False)}
"""Check of one value, and whether it may be None."""


def check_values(values: Mapping[str, Any]) -> None:
    """Refuse invalid values of single degrees.

    Raises:
        TwofoldError: such a value, or a name that is not a degree's.
    """
    for name, value in values.items():
        if name not in _CHECKS:
            raise TwofoldError(f"{name} is not a degree; the degrees are {', '.join(DEGREES)}")
        check, is_optional = _CHECKS[name]
        if (value is not None or not is_optional) and (sentence := check(name, value)):
            raise TwofoldError(sentence)
