"""The schedules by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from plans.extensions import load_extensions
from plans.schedules.errors import ScheduleError
from plans.schedules.looped import gpipe, interleaved_1f1b, looped_bfs, one_f_one_b
from plans.schedules.phases import MAX_CHUNKS, looped_placement, v_placement
from plans.schedules.schedule import Schedule
from plans.schedules.v_shaped import dualpipe_v, v_half, v_min, zb_v
from plans.schedules.validate import validate
from plans.schedules.zero_bubble import interleaved_zb, zb_h1, zb_h2

__all__ = ["Form", "chunks_per_rank", "declare_schedule", "form_of", "is_written", "make_schedule", "schedule_names"]


class Form(NamedTuple):
    """Properties that all schedules of one name share, however many micro-batches they have."""

    is_v: bool
    """Whether chunks lie down the ranks and up again (`v_placement`) instead of in loops (`looped_placement`)."""
    is_split: bool
    """Whether backwards are split into input and weight gradients."""

    def placement(self, num_ranks: int, num_chunks: int) -> tuple[int, ...]:
        """The rank of every chunk, with `num_chunks` of them per rank."""
        return v_placement(num_ranks) if self.is_v else looped_placement(num_ranks, num_chunks)


class _Entry(NamedTuple):
    make: Callable[..., Schedule]
    num_chunks: int | None
    """Chunks per rank; None if the caller chooses."""
    form: Form | None = None


_LOOPED, _LOOPED_SPLIT = Form(is_v=False, is_split=False), Form(is_v=False, is_split=True)
_V_SPLIT = Form(is_v=True, is_split=True)

_SCHEDULES = {
    "1f1b": _Entry(one_f_one_b, 1, _LOOPED),
    "dualpipe_v": _Entry(dualpipe_v, 2, _V_SPLIT),
    "gpipe": _Entry(gpipe, 1, _LOOPED),
    "interleaved_1f1b": _Entry(interleaved_1f1b, None, _LOOPED),
    "interleaved_zb": _Entry(interleaved_zb, None, _LOOPED_SPLIT),
    "looped_bfs": _Entry(looped_bfs, None, _LOOPED),
    "v_half": _Entry(v_half, 2, _V_SPLIT),
    "v_min": _Entry(v_min, 2, _V_SPLIT),
    "zb_h1": _Entry(zb_h1, 1, _LOOPED_SPLIT),
    "zb_h2": _Entry(zb_h2, 1, _LOOPED_SPLIT),
    "zb_v": _Entry(zb_v, 2, _V_SPLIT),
}

# Other people's names of the same schedules, without case and punctuation: torch's classes, the papers' short forms.
_ALIASES = {
    "interleavedzerobubble": "interleaved_zb",
    "zb1p": "zb_h1",
    "zb2p": "zb_h2",
    "zbvzerobubble": "zb_v",
    "vzb": "zb_v",
}


def schedule_names() -> tuple[str, ...]:
    """The names that `make_schedule` knows, sorted."""
    return tuple(sorted(_SCHEDULES))


def chunks_per_rank(name: str) -> int | None:
    """Number of chunks per rank in the named schedule; None if the caller or a text decides.

    Raises:
        ScheduleError: an unknown name.

    >>> chunks_per_rank("1f1b"), chunks_per_rank("ZB-V"), chunks_per_rank("interleaved_1f1b")
    (1, 2, None)
    """
    return None if is_written(name) else _SCHEDULES[_known_name(name)].num_chunks


def form_of(name: str) -> Form | None:
    """The form of the named schedule, before it is made; None for schedules of one's own and written ones.

    Raises:
        ScheduleError: an unknown name.

    >>> form_of("zb_v"), form_of("1f1b").placement(2, 1)
    (Form(is_v=True, is_split=True), (0, 1))
    """
    return None if is_written(name) else _SCHEDULES[_known_name(name)].form


def make_schedule(name: str, num_ranks: int, num_micro_batches: int, *, virtual: int | None = None) -> Schedule:
    """The named or written schedule. Equal arguments give the same object: schedules are values and are kept.

    Args:
        name: one of `schedule_names()`; case, "-" and "_" do not matter, and the names of the classes of
            torch.distributed.pipelining mean the same. Or the text of a schedule (`Schedule.from_text`), which is
            validated.
        num_ranks: pipeline ranks (groups of devices), p.
        num_micro_batches: m.
        virtual: chunks per rank, v. Must be given for schedules that take any number of them; the others have
            one, or two if V-shaped, and refuse another number.

    Raises:
        ScheduleError: an unknown name, or a combination that the schedule cannot do; the message names valid values. A
            text that is not a schedule, cannot run, or is for other ranks, micro-batches or chunks.

    >>> make_schedule("1F1B", 2, 4).placement
    (0, 1)
    >>> make_schedule("interleaved_1f1b", 2, 4, virtual=2).placement
    (0, 1, 0, 1)
    """
    counts = {"num_ranks": num_ranks, "num_micro_batches": num_micro_batches}
    counts |= {} if virtual is None else {"virtual": virtual}
    if wrong := [f"{what}={count!r}" for what, count in counts.items() if not isinstance(count, int)]:
        raise ScheduleError(f"schedule {name[:60]!r} of {', '.join(wrong)}: give whole numbers")
    if is_written(name):
        return _written(name, num_ranks, num_micro_batches, virtual)
    return _make(_known_name(name), num_ranks, num_micro_batches, virtual)


def is_written(name: str) -> bool:
    """Whether this is the text of a schedule rather than the name of one.

    >>> is_written("1f1b"), is_written("0F0,0B0")
    (False, True)
    """
    return "," in name or "\n" in name


@lru_cache(maxsize=64)
def _written(text: str, num_ranks: int, num_micro_batches: int, virtual: int | None) -> Schedule:
    schedule = Schedule.from_text(text)
    validate(schedule)
    wanted = (num_ranks, num_micro_batches, num_ranks * (virtual or schedule.num_stages // num_ranks))
    found = (schedule.num_ranks, schedule.num_micro_batches, schedule.num_stages)
    if found != wanted:
        form = "{} pipeline ranks, {} micro-batches and {} stages"
        raise ScheduleError(
            f"the written schedule {schedule.name!r} is for {form.format(*found)}; the plan has {form.format(*wanted)}"
        )
    return schedule


@lru_cache(maxsize=256)
def _make(name: str, num_ranks: int, num_micro_batches: int, virtual: int | None) -> Schedule:
    make, num_chunks, _ = _SCHEDULES[name]
    if num_chunks is None:
        if virtual is None:
            raise ScheduleError(f"schedule {name!r} needs the number of chunks per rank, e.g. virtual=2")
        if not 1 <= virtual <= MAX_CHUNKS:
            raise ScheduleError(f"schedule {name!r} with virtual={virtual}: give 1 to {MAX_CHUNKS} chunks per rank")
        return make(num_ranks, num_micro_batches, virtual)
    if virtual not in (None, num_chunks):
        chunks = "one chunk" if num_chunks == 1 else f"{num_chunks} chunks"
        others = ", ".join(other for other, entry in sorted(_SCHEDULES.items()) if entry.num_chunks in (None, virtual))
        raise ScheduleError(
            f"schedule {name!r} has {chunks} per rank and cannot take virtual={virtual}; these can: {others}"
        )
    return make(num_ranks, num_micro_batches)


def declare_schedule(name: str, make: Callable[..., Schedule], *, num_chunks: int | None = 1) -> None:
    """Add a separate schedule.

    Args:
        name: name in plans and commands.
        make: called with the numbers of pipeline ranks and micro-batches, and of chunks per rank where any will do.
        num_chunks: per rank; None: any, the caller chooses.

    Raises:
        ScheduleError: there is one of this name.
    """
    if _plain(name) in map(_plain, _SCHEDULES):
        raise ScheduleError(f"schedule {name!r} already exists; use another name")
    _SCHEDULES[name] = _Entry(make, num_chunks)
    _known_name.cache_clear()


@lru_cache(maxsize=64)
def _known_name(name: str) -> str:
    known = {_plain(known): known for known in _SCHEDULES} | _ALIASES
    if _plain(name) not in known:
        load_extensions()
        known = {_plain(known): known for known in _SCHEDULES} | _ALIASES
    if _plain(name) in known:
        return known[_plain(name)]
    close = difflib.get_close_matches(_plain(name), known, n=2, cutoff=0.6)
    suggestion = " or ".join(dict.fromkeys(repr(known[key]) for key in close))
    hint = f"did you mean {suggestion}? " if suggestion else ""
    raise ScheduleError(f"unknown schedule {name!r}; {hint}known are {', '.join(schedule_names())}")


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")
