"""Checkpoints and failures: the share of time that is lasting progress.

Failures occur at a constant rate (exponential times between them, mean M for the complete machine), also while a
checkpoint is written and during a restart. With work w between checkpoints, a blocking write d and a restart R, the
expected time from one checkpoint to the next is

    M exp(R / M) (exp((w + d) / M) - 1)

(J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
Systems 22, 2006). To first order the best w is sqrt(2 d M) (J. W. Young, "A first order approximation to the optimum
checkpoint interval", Communications of the ACM 17, 1974); Daly's higher order estimate adds two terms.

An asynchronous write of length d overlaps with the following work; until it ends, a failure falls back to the previous
checkpoint. The next checkpoint waits for it and then delays the work by a stall s, in which values are copied. Without
a failure, a = s + max(w, d) passes from one durable checkpoint to the next. A failure costs R, the work w + s since the
durable checkpoint, and the write d behind it. The same renewal argument gives

    M exp((R + w + s + d) / M) (1 - exp(-a / M)),

which for d = s = 0 is the formula above. `sampled_goodput` simulates both with a seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from plans.errors import TwofoldError, number, whole_number

__all__ = ["Checkpoints", "Failures", "Goodput", "best_interval_s", "goodput", "sampled_goodput"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """A checkpoint every `every_steps` steps; each rank writes its weights and optimizer states.

    Args:
        every_steps: number of steps between checkpoints.
        write_Bps: write bandwidth of one rank.
        blocking: whether training waits for the checkpoint. Otherwise a checkpoint waits until the previous one is
            written.
        size_bytes: largest number of bytes that a rank writes; None: from the simulation.
        stall_s: time for which a checkpoint that is not blocking delays training: its copy, and on shared cores its
            computing.

    Raises:
        TwofoldError: figures that are not above 0.

    >>> Checkpoints(every_steps=100, write_Bps=1e9).blocking
    True
    """

    every_steps: int
    write_Bps: float
    blocking: bool = True
    size_bytes: int | None = None
    stall_s: float = 0.0

    def __post_init__(self) -> None:
        whole_number("the number of steps between checkpoints", self.every_steps)
        number("write_Bps of checkpoints", self.write_Bps, above=0)
        if self.size_bytes is not None:
            whole_number("size_bytes of checkpoints", self.size_bytes, least=0)
        if number("stall_s of checkpoints", self.stall_s) < 0:
            raise TwofoldError(f"stall_s must be at least 0, not {self.stall_s}")

    def __str__(self) -> str:
        how = "blocking" if self.blocking else "asynchronous"
        return f"checkpoint every {self.every_steps} steps ({how}, {self.write_Bps / 1e9:g} GB/s a rank)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Failures of devices; each stops all ranks.

    Args:
        device_mtbf_s: mean time between failures of one device; n devices fail n times as often.
        restart_s: time from a failure to the first step after it, including loading the checkpoint.

    Raises:
        TwofoldError: a mean time that is not above 0, a restart below 0.

    >>> str(Failures(device_mtbf_s=5000 * 3600, restart_s=300))
    'a device fails every 5000 h, restart 300 s'
    """

    device_mtbf_s: float
    restart_s: float = 0.0

    def __post_init__(self) -> None:
        number("device_mtbf_s, the mean time between failures,", self.device_mtbf_s, above=0)
        if number("restart_s", self.restart_s) < 0:
            raise TwofoldError(f"restart_s must be at least 0, not {self.restart_s}")

    def __str__(self) -> str:
        return f"a device fails every {self.device_mtbf_s / 3600:g} h, restart {self.restart_s:g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Goodput: the share of time that is lasting progress.

    Args:
        step_s: of a step when nothing fails and nothing is written.
        effective_step_s: mean time per step that lasts: checkpoints, lost work and restarts included.
        checkpoint_s: of writing one.
        best_every_steps: Daly's best number of steps between blocking checkpoints, where there are failures.
    """

    step_s: float
    effective_step_s: float
    checkpoint_s: float = 0.0
    best_every_steps: int | None = None

    @property
    def fraction(self) -> float:
        """Step time over effective step time: 1 is the best."""
        return self.step_s / self.effective_step_s if self.effective_step_s else 1.0


def goodput(
    step_s: float,
    num_devices: int,
    *,
    checkpoints: Checkpoints | None,
    failures: Failures | None,
    checkpoint_bytes: int = 0,
) -> Goodput:
    """The expected goodput of endless training, in closed form (see the module).

    Args:
        step_s: of one step, from one to the next.
        num_devices: that can fail.
        checkpoints: when and how they are written.
        failures: how often and with which restart.
        checkpoint_bytes: of the rank that writes most, where `checkpoints` does not say.

    Raises:
        TwofoldError: failures without checkpoints: no work would ever last; failures so frequent that none lasts.

    >>> found = goodput(
    ...     2.0, 100, checkpoints=Checkpoints(every_steps=300, write_Bps=1e9),
    ...     failures=Failures(device_mtbf_s=100 * 86400.0, restart_s=300.0), checkpoint_bytes=30 * 10**9,
    ... )
    >>> round(found.fraction, 4), found.best_every_steps
    (0.9456, 1128)
    """
    whole_number("num_devices", num_devices)
    if checkpoints is None:
        if failures is not None:
            raise TwofoldError(
                "failures without checkpoints lose all work; give the interval and the speed of checkpoints"
            )
        return Goodput(step_s=step_s, effective_step_s=step_s)
    size = checkpoint_bytes if checkpoints.size_bytes is None else checkpoints.size_bytes
    write_s, steps = size / checkpoints.write_Bps, checkpoints.every_steps
    work_s, stall_s = steps * step_s, 0.0 if checkpoints.blocking else checkpoints.stall_s
    passed_s = work_s + write_s if checkpoints.blocking else stall_s + max(work_s, write_s)
    if failures is None:
        return Goodput(step_s=step_s, effective_step_s=passed_s / steps, checkpoint_s=write_s)
    mean_s = failures.device_mtbf_s / num_devices
    try:
        if checkpoints.blocking:
            passed_s = mean_s * math.exp(failures.restart_s / mean_s) * math.expm1(passed_s / mean_s)
        else:
            lost = math.exp((failures.restart_s + work_s + stall_s + write_s) / mean_s)
            passed_s = -mean_s * lost * math.expm1(-passed_s / mean_s)
    except OverflowError:
        raise TwofoldError(
            f"{num_devices} devices fail every {mean_s:.3g} s, but {work_s + write_s:.3g} s pass from one checkpoint "
            f"to the next and {failures.restart_s:.3g} s in a restart: almost no progress is kept; write checkpoints "
            "more often"
        ) from None
    best = None if step_s == 0 or not checkpoints.blocking else max(1, round(best_interval_s(write_s, mean_s) / step_s))
    return Goodput(
        step_s=step_s, effective_step_s=passed_s / steps, checkpoint_s=write_s, best_every_steps=best
    )  # fmt: skip


def best_interval_s(write_s: float, mean_s: float) -> float:
    """The work between blocking checkpoints that wastes least (Daly's higher order estimate, 2006).

    Args:
        write_s: of one checkpoint.
        mean_s: between failures of the complete machine.

    >>> round(best_interval_s(60.0, 86400.0) / 60)
    53
    """
    if write_s >= 2 * mean_s:
        return mean_s
    part = write_s / (2 * mean_s)
    return math.sqrt(2 * write_s * mean_s) * (1 + math.sqrt(part) / 3 + part / 9) - write_s


def sampled_goodput(
    step_s: float,
    num_devices: int,
    *,
    checkpoints: Checkpoints,
    failures: Failures,
    checkpoint_bytes: int = 0,
    num_checkpoints: int = 10_000,
    seed: int,
) -> Goodput:
    """The same played out failure by failure until `num_checkpoints` are durable; equal seeds, equal results."""
    whole_number("num_devices", num_devices)
    size = checkpoint_bytes if checkpoints.size_bytes is None else checkpoints.size_bytes
    write_s, work_s = size / checkpoints.write_Bps, checkpoints.every_steps * step_s
    stall_s = 0.0 if checkpoints.blocking else checkpoints.stall_s
    mean_s = failures.device_mtbf_s / num_devices
    draw = np.random.default_rng(seed)
    passed_s, durable = 0.0, 0
    while durable < num_checkpoints:  # from a (re)start at the last durable checkpoint to the next failure
        failure_s = float(draw.exponential(mean_s))
        now_s, written_s = 0.0, None  # when work continues, and when the checkpoint under way is durable
        while True:
            begin_s = stall_s + (now_s + work_s if written_s is None else max(now_s + work_s, written_s))
            if written_s is not None and written_s <= failure_s:
                durable += 1
                if durable == num_checkpoints:
                    passed_s += written_s
                    break
            if failure_s < begin_s or (written_s is not None and failure_s < written_s):
                passed_s += failure_s
                while (again_s := float(draw.exponential(mean_s))) < failures.restart_s:  # fails while it restarts
                    passed_s += again_s
                passed_s += failures.restart_s
                break
            written_s = begin_s + write_s
            now_s = written_s if checkpoints.blocking else begin_s
    num_steps = num_checkpoints * checkpoints.every_steps
    return Goodput(step_s=step_s, effective_step_s=passed_s / num_steps, checkpoint_s=write_s)
