"""Flags of `twofold whatif` as changes: texts such as 3=1.2 or stage1=h200-x8, and knobs with one value or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from plans.errors import TwofoldError
from twofold.commands.options import MachineFactors, Values, flag, given

if TYPE_CHECKING:
    from costmodels import Machine
    from plans.plan import Plan
    from simulator import WhatIf

__all__ = ["ChangeOptions", "Changes", "FailureOptions", "JobOptions", "changes_of", "read_devices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeOptions:
    """Changes to single ranks and links.

    Args:
        slow: RANKS=FACTOR: multiplies the duration of the ranks' own work, e.g. 3=1.2, 0-7=1.05, or stage1=1.3 for the
            ranks of a stage.
        jitter: spread of such factors, drawn anew for every rank, step and instruction (0.05 is about 5 %).
        seed: of the jitter; 1 by default.
        link: TIER[:RANKS]:CHANGES, e.g. NVLink:bandwidth=0.5, 1:0-7:latency=2, or 0:2~5:failed for one link.
        device: RANKS=MACHINE: ranks with the device of another machine, e.g. 4-7=h200-x8 or stage0=a100-80gb-x8.
    """

    slow: tuple[str, ...] = ()
    jitter: Values = ()
    seed: int | None = None
    link: tuple[str, ...] = ()
    device: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Where on the machine, and beside what.

    Args:
        beside: PLAN.json=DEVICES: another job at the same time, e.g. other.json=4-7; it shares links and processors.
        on: devices of this plan, e.g. 0-3,8-11, where they are not the first ones.
    """

    beside: tuple[str, ...] = ()
    on: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureOptions:
    """Checkpoints and failures.

    Args:
        checkpoint_every: steps between checkpoints.
        checkpoint_GBps: of one rank, in 10^9 bytes a second; 1 by default.
        checkpoint_async: training goes on while a checkpoint is written.
        device_mtbf_hours: mean time between failures of one device.
        restart_s: from a failure to the next step.
    """

    checkpoint_every: tuple[int, ...] = ()
    checkpoint_GBps: Values = ()
    checkpoint_async: bool = False
    device_mtbf_hours: Values = ()
    restart_s: Values = ()


_FAILURE_KNOBS = ("checkpoint_every", "checkpoint_GBps", "device_mtbf_hours", "restart_s")

_NEEDS = {"checkpoint_GBps": "checkpoint_every", "restart_s": "device_mtbf_hours"}
"""Knobs that say more about another one, and mean nothing without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The what-ifs that the flags ask for.

    Args:
        first: with every knob at its first value.
        shared: what all of `varied` have in common.
        also: knobs of one value that mean something only with the varied one, in words.
        varied: title -> the what-if with one value of the knob that has several; empty where none has.
        around: from where the sensitivity turns the knobs.
    """

    first: WhatIf
    shared: WhatIf
    also: tuple[str, ...]
    varied: dict[str, WhatIf]
    around: WhatIf

    @property
    def shared_stands_alone(self) -> bool:
        """Whether `shared` is a what-if by itself; failures are none without the checkpoints that are varied."""
        return bool(self.varied) and self.around == self.shared


def changes_of(factors: MachineFactors, options: ChangeOptions, failures: FailureOptions, plan: Plan) -> Changes:
    """What the flags ask for.

    Raises:
        TwofoldError: a text that cannot be read, a knob without the one it belongs to, two knobs with several values.
    """
    from costmodels import Machine
    from simulator import LinkChange, WhatIf
    from simulator.study.whatif import KNOBS

    knobs: dict[str, Sequence[float]] = dict(given(factors))
    knobs |= {name: values for name, values in given(options).items() if name == "jitter"}
    knobs |= {name: values for name, values in given(failures).items() if name in _FAILURE_KNOBS}
    if more := [knob for knob, values in knobs.items() if len(values) > 1][1:]:
        raise TwofoldError(f"{flag(more[0])} has several values too; one knob at a time is varied")
    fixed = WhatIf(
        slowdown=_slowdown(options.slow, plan), links=tuple(map(LinkChange.parse, options.link)),
        devices=_devices(options.device, Machine, plan), seed=1 if options.seed is None else options.seed,
    )  # fmt: skip
    blocking = not failures.checkpoint_async
    single = {name: values[0] for name, values in knobs.items() if len(values) == 1}
    name = next((knob for knob, values in knobs.items() if len(values) > 1), "")
    several = knobs.get(name, ())
    first = _with_values(fixed, single | ({name: several[0]} if name else {}), blocking)
    # settings that mean nothing without the varied one are said with it
    alone = {knob: value for knob, value in single.items() if not name or _NEEDS.get(knob) != name}
    shared = _with_values(fixed, alone, blocking)
    sign = "x" if name in KNOBS else ""
    return Changes(
        first=first, shared=shared,
        also=tuple(f"{knob.replace('_', ' ')} {value:g}" for knob, value in single.items() if knob not in alone),
        varied={
            f"{name.replace('_', ' ')} {sign}{value:g}": _with_values(fixed, single | {name: value}, blocking)
            for value in several
        },
        # of several factors on the machine none is the one to look around; checkpoints need one
        around=shared if name in {*KNOBS, "jitter"} else first,
    )  # fmt: skip


def _with_values(fixed: WhatIf, values: dict[str, float], blocking: bool) -> WhatIf:
    """The fixed changes with a value for each knob."""
    from simulator import Checkpoints, Failures

    checkpoints = failures = None
    if "checkpoint_every" in values:
        checkpoints = Checkpoints(
            every_steps=int(values["checkpoint_every"]), write_Bps=1e9 * values.get("checkpoint_GBps", 1.0),
            blocking=blocking,
        )  # fmt: skip
    elif "checkpoint_GBps" in values:
        raise TwofoldError("--checkpoint-GBps needs --checkpoint-every, the steps between checkpoints")
    if "device_mtbf_hours" in values:
        failures = Failures(device_mtbf_s=3600 * values["device_mtbf_hours"], restart_s=values.get("restart_s", 0.0))
    elif "restart_s" in values:
        raise TwofoldError("--restart-s needs --device-mtbf-hours, the mean time between failures of a device")
    factors: dict[str, Any] = {name: value for name, value in values.items() if name not in _FAILURE_KNOBS}
    return replace(fixed, checkpoints=checkpoints, failures=failures, **factors)


def read_devices(text: str, option: str) -> tuple[int, ...]:
    """Devices such as 0-3,8-11.

    Raises:
        TwofoldError: something else; the message names the option.
    """
    from simulator.engine.link_change import read_ranks

    try:
        return read_ranks(text)
    except ValueError:
        raise TwofoldError(f"cannot read {option}; devices look like 0-3,8-11") from None


def _slowdown(texts: Sequence[str], plan: Plan) -> dict[int, float]:
    factors: dict[int, float] = {}
    for text in texts:
        ranks, factor = _assignment(text, "--slow", "3=1.2", plan)
        if again := [rank for rank in ranks if rank in factors]:
            raise TwofoldError(f"--slow {text}: rank {again[0]} has a factor already; give one for each rank")
        try:
            factors |= dict.fromkeys(ranks, float(factor))
        except ValueError:
            raise TwofoldError(f"--slow {text}: {factor!r} is not a number") from None
    return factors


def _devices(texts: Sequence[str], machines: type[Machine], plan: Plan) -> dict[int, Machine]:
    devices: dict[int, Machine] = {}
    for text in texts:
        ranks, name = _assignment(text, "--device", "4-7=h200-x8", plan)
        if again := [rank for rank in ranks if rank in devices]:
            raise TwofoldError(f"--device {text}: rank {again[0]} has a device already; give one for each rank")
        devices |= dict.fromkeys(ranks, machines.load(name))
    return devices


def _assignment(text: str, option: str, example: str, plan: Plan) -> tuple[tuple[int, ...], str]:
    """The ranks, given as such or as "stage1" or "stage0-2", and the text behind the equals sign."""
    from simulator.engine.link_change import read_ranks

    ranks, _, value = text.partition("=")
    try:
        if not ranks.startswith("stage"):
            return read_ranks(ranks), value
        numbers = read_ranks(ranks.removeprefix("stage"))
    except ValueError:
        raise TwofoldError(f"cannot read {option} {text}; it looks like {option} {example}") from None
    if absent := [number for number in numbers if not 0 <= number < len(plan.stages)]:
        raise TwofoldError(f"{option} {text}: the plan's stages are 0 to {len(plan.stages) - 1}, not {absent[0]}")
    members = [rank for number in numbers for rank in plan.stages[number].mesh.rank_list]
    return tuple(dict.fromkeys(members)), value
