"""Flags of `twofold whatif`: texts such as 3=1.2 or stage1=h200-x8, and factors with one or several values."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from plans.errors import TwofoldError
from twofold.commands.options import MachineFactors, given
from twofold.commands.values import Above0, AtLeast0, AtLeast1, Limits, flag

if TYPE_CHECKING:
    from costmodels import Machine
    from simulator import WhatIf
    from simulator.study.stragglers import Ranks

__all__ = ["ChangeOptions", "Changes", "FailureOptions", "JobOptions", "Row", "changes_of", "read_devices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeOptions:
    """Changes to single ranks and links.

    Args:
        slow: RANKS=FACTOR: multiply the duration of these ranks' work by FACTOR, e.g. 3=1.2, 0-7=1.05, stage1=1.3 for
            the ranks of a stage, or 1/1000=1.1 for one rank in 1,000.
        jitter: spread of a random factor on every instruction of every rank and step (0.05 is about 5 %).
        seed: random seed of the jitter; 1 by default.
        link: TIER[:RANKS]:CHANGES, e.g. NVLink:bandwidth=0.5, 1:0-7:latency=2, or 0:2~5:failed for one link.
        device: RANKS=MACHINE: replace the devices of these ranks by those of another machine, e.g. 4-7=h200-x8 or
            stage0=a100-80gb-x8.
    """

    slow: tuple[str, ...] = ()
    jitter: tuple[Annotated[float, Limits(at_least=0, at_most=10)], ...] = ()
    seed: AtLeast0 | None = None
    link: tuple[str, ...] = ()
    device: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Placement of the plan, and other jobs on the machine.

    Args:
        beside: PLAN.json=DEVICES: another job that runs at the same time and shares links and processors, e.g.
            other.json=4-7.
        on: devices of this plan, e.g. 0-3,8-11; by default the first ones.
    """

    beside: tuple[str, ...] = ()
    on: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureOptions:
    """Checkpoints and failures.

    Args:
        checkpoint_every: number of steps between checkpoints.
        checkpoint_GBps: bandwidth of one rank to storage, in 10^9 bytes per second; 1 by default.
        checkpoint_async: continue training while a checkpoint is written.
        device_mtbf_hours: mean time between failures of one device.
        restart_s: time from a failure to the next step.
    """

    checkpoint_every: tuple[AtLeast1, ...] = ()
    checkpoint_GBps: tuple[Above0, ...] = ()
    checkpoint_async: bool = False
    device_mtbf_hours: tuple[Above0, ...] = ()
    restart_s: tuple[Annotated[float, Limits(at_least=0)], ...] = ()


_FAILURE_KNOBS = ("checkpoint_every", "checkpoint_GBps", "device_mtbf_hours", "restart_s")

_UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the what-if table.

    Args:
        what_if: all changes of the row.
        beside: whether the other jobs run at the same time.
        title: the changes in words.
    """

    what_if: WhatIf
    beside: bool
    title: str

    @classmethod
    def unchanged(cls) -> Row:
        """Whether nothing is changed and no other job runs."""
        return _row({}, False, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The what-ifs of the command line.

    Args:
        rows: every change on its own, then all of them together; a factor with several values has one row per value.
        first: all changes, with the first value of every factor.
        around: starting point of the sensitivity: `first` without the factor that has several values.
    """

    rows: tuple[Row, ...]
    first: Row
    around: Row


def changes_of(
    factors: MachineFactors, options: ChangeOptions, failures: FailureOptions, beside: Sequence[str], ranks: Ranks
) -> Changes:
    """Parse the flags.

    Args:
        factors, options, failures: the flags.
        beside: other jobs, as given on the command line.
        ranks: number of ranks of the plan.

    Raises:
        TwofoldError: an invalid value, an option without the one it depends on, two factors with several values.
    """
    from simulator.study.whatif import KNOBS

    knobs: dict[str, Sequence[float]] = dict(given(factors))
    knobs |= {name: values for name, values in given(options).items() if name == "jitter"}
    knobs |= {name: values for name, values in given(failures).items() if name in _FAILURE_KNOBS}
    if more := [knob for knob, values in knobs.items() if len(values) > 1][1:]:
        raise TwofoldError(
            f"{flag(more[0])} has several values too; give several values to one option only, or use `twofold study`"
        )
    seed = 1 if options.seed is None else options.seed
    parts = _parts(knobs, options, failures, ranks, seed)
    alone = [values for part in parts for values in part]
    whole = [_merged(chosen) for chosen in itertools.product(*parts)]
    plain: dict[str, Any] = {"seed": seed}
    varied = next((name for name, values in knobs.items() if len(values) > 1), "")
    steady = (
        [part for part in parts if len(part) == 1] if varied in {*KNOBS, "jitter"} else [part[:1] for part in parts]
    )
    wanted = [(values, False) for values in alone] + ([({}, True)] if beside else [])
    if len(parts) + bool(beside) > 1:
        wanted += [(values, bool(beside)) for values in whole]
    rows = {row.title: row for row in (_row(plain | values, with_jobs, beside) for values, with_jobs in wanted)}
    rows.pop(_UNCHANGED, None)
    return Changes(
        rows=tuple(rows.values()), first=_row(plain | whole[0], bool(beside), beside),
        around=_row(plain | _merged([part[0] for part in steady]), bool(beside), beside),
    )  # fmt: skip


def _parts(
    knobs: Mapping[str, Sequence[float]], options: ChangeOptions, failures: FailureOptions, ranks: Ranks, seed: int
) -> list[list[dict[str, Any]]]:
    """The arguments of `WhatIf` for every single change."""
    from simulator import LinkChange

    _slow_ranks(options.slow, ranks)  # no rank twice
    devices = _devices(options.device, ranks)
    parts: list[list[dict[str, Any]]] = [
        [{name: value} for value in values] for name, values in knobs.items() if name not in _FAILURE_KNOBS
    ]
    parts += [[{"slowdown": _slow_ranks([text], ranks)}] for text in options.slow]
    parts += [[{"links": (LinkChange.parse(text),)}] for text in options.link]
    parts += [[{"devices": device}] for device in devices]
    lasting = {name: values for name, values in knobs.items() if name in _FAILURE_KNOBS}
    if lasting:
        values = itertools.product(*lasting.values())
        parts.append(
            [_lasting(dict(zip(lasting, value, strict=True)), not failures.checkpoint_async) for value in values]
        )
    return parts


def _merged(changes: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Several changes as one."""
    arguments: dict[str, Any] = {}
    for change in changes:
        for name, value in change.items():
            if name in ("slowdown", "devices"):
                arguments[name] = {**arguments.get(name, {}), **value}
            else:
                arguments[name] = (*arguments.get(name, ()), *value) if name == "links" else value
    return arguments


def _row(values: Mapping[str, Any], with_jobs: bool, beside: Sequence[str]) -> Row:
    from simulator import WhatIf

    what_if = WhatIf(**values)
    words = [] if what_if.is_none else [str(what_if)]
    words += [f"beside {text.replace('=', ' on ')}" for text in beside] if with_jobs else []
    return Row(what_if=what_if, beside=with_jobs, title=", ".join(words) or _UNCHANGED)


def _lasting(values: Mapping[str, float], blocking: bool) -> dict[str, Any]:
    """Checkpoints and failures."""
    from simulator import Checkpoints, Failures

    found: dict[str, Any] = {}
    if "checkpoint_every" in values:
        found["checkpoints"] = Checkpoints(
            every_steps=int(values["checkpoint_every"]), write_Bps=1e9 * values.get("checkpoint_GBps", 1.0),
            blocking=blocking,
        )  # fmt: skip
    elif "checkpoint_GBps" in values:
        raise TwofoldError("--checkpoint-GBps needs --checkpoint-every, the steps between checkpoints")
    if "device_mtbf_hours" in values:
        found["failures"] = Failures(
            device_mtbf_s=3600 * values["device_mtbf_hours"], restart_s=values.get("restart_s", 0.0)
        )
    elif "restart_s" in values:
        raise TwofoldError("--restart-s needs --device-mtbf-hours, the mean time between failures of a device")
    return found


def read_devices(text: str, option: str) -> tuple[int, ...]:
    """Devices such as 0-3,8-11.

    Raises:
        TwofoldError: something else; the message names the option.
    """
    from simulator.engine.link_change import read_ranks

    try:
        return read_ranks(text)
    except ValueError:
        raise TwofoldError(f"cannot read {option}; write devices as 0-3,8-11") from None


def _slow_ranks(texts: Sequence[str], ranks: Ranks) -> dict[int, float]:
    """Rank -> factor of --slow."""
    from simulator.study.stragglers import slow_ranks

    return slow_ranks(texts, ranks, "--slow")


def _devices(texts: Sequence[str], ranks: Ranks) -> list[dict[int, Machine]]:
    """For every --device the machine of each rank."""
    from costmodels import Machine

    return [
        dict.fromkeys(named, Machine.load(machine))
        for _, named, machine in ranks.given(texts, "--device", "device", "4-7=h200-x8")
    ]
