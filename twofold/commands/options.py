"""Groups of options that several commands share. A field is a flag; `twofold COMMAND --help` shows a box per group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import tyro

from plans.degrees import DEGREES
from plans.errors import TwofoldError

if TYPE_CHECKING:
    from twofold.console import Console

__all__ = [
    "Command",
    "DegreeOptions",
    "DemoOptions",
    "FileOutput",
    "LaunchOptions",
    "MachineFactors",
    "MachineOption",
    "Output",
    "PinOptions",
    "PlanFile",
    "Values",
    "Word",
    "check_at_least",
    "flag",
    "given",
]

T = TypeVar("T")

PlanFile = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN.json")]
Word = Annotated[str, tyro.conf.Positional]
Values = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What is printed.

    Args:
        json: print one JSON object on stdout, progress on stderr. A step has the keys step_s, exposed_comm_s,
            bubble_fraction and peak_bytes (defined in docs/what-if.md).
    """

    json: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOutput(Output):
    """What is printed, and what may be replaced.

    Args:
        force: replace files that twofold did not write.
    """

    force: bool = False


class Command(Protocol):
    """A command line that has been read."""

    @property
    def output(self) -> Output:
        """What is printed."""

    def run(self, say: Console) -> tuple[dict[str, Any], bool]:
        """Do the work; returns the JSON object, and whether all that was checked holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOption:
    """Where the plan runs.

    Args:
        machine: shipped machine, such as h100-sxm-x64, or machine file.
    """

    machine: str


_FOR_OTHER_MODELS = {
    "schedule": "; other models: a name, or a file (.csv, .txt) with a row of actions for every pipeline rank [1f1b]",
    "zero": "; other models: 0 unless given",
}
"""What a flag of `twofold plan` means for models that are searched operator by operator."""


def _with_flags(*, pinned: bool) -> Callable[[type[T]], type[T]]:
    """Gives a class of options a flag for every degree, with its meaning as the help.

    Args:
        pinned: a flag that is not given is None, instead of the degree's default.
    """

    def decorate(options: type[T]) -> type[T]:
        for degree in DEGREES.values():
            meaning = degree.meaning + (_FOR_OTHER_MODELS.get(degree.name, "") if pinned else "")
            kind = degree.type | None if pinned else degree.type
            options.__annotations__[degree.flag] = Annotated[kind, tyro.conf.arg(help=meaning)]
            setattr(options, degree.flag, None if pinned else degree.default)
        return dataclass(frozen=True, kw_only=True)(options)

    return decorate


@_with_flags(pinned=False)
class DegreeOptions:
    """How a transformer is spread: a flag for every degree of `plans.degrees`."""

    @property
    def values(self) -> dict[str, Any]:
        """Every degree by its name."""
        return {name: getattr(self, degree.flag) for name, degree in DEGREES.items()}


@_with_flags(pinned=True)
class PinOptions:
    """How a transformer is spread; what is not given is searched."""

    @property
    def pins(self) -> dict[str, Any]:
        """The degrees that are given, by name."""
        values = {name: getattr(self, degree.flag) for name, degree in DEGREES.items()}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFactors:
    """Changes to the whole machine, as factors on what its file says.

    Args:
        bandwidth: on the bandwidth of all links, e.g. --bandwidth 0.5 1 2.
        latency: on the latency of all links and the fixed parts of communication.
        compute: on the arithmetic rates of devices.
        memory: on the memory bandwidth of devices.
        dispatch: on the host time to issue an instruction.
    """

    bandwidth: Values = ()
    latency: Values = ()
    compute: Values = ()
    memory: Values = ()
    dispatch: Values = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """How the ranks are started.

    Args:
        steps: training steps of a plan.
        data: random; digits (those shipped), or a folder with MNIST's IDX files; a folder of images with a folder for
            each class; file.npz with an array of rows for each input; tokens.npy or tokens.idx; package.module:function
            or file.py:function that gives an iterable of batches or a dataset of torch.
            By default digits where the inputs are such images and labels, else random.
        emulate: every instruction takes the time that this machine's model says; `verify` predicts with it as well.
        dilate: that time is multiplied by this factor; by default the shortest instruction lasts 50 ms.
        out: folder for results; a temporary one otherwise.
        log_dir: what the ranks print goes to LOG_DIR/1/rank.N/stdout.
        seed: of weights and data order.
        port: of the rendezvous; a free one otherwise.
        execution: graph (a step is one launch, where the device can) or eager, instead of what the plan says.
        fused: --no-fused leaves memory-bound instructions apart that the plan joins.
        profile: number of steps for which every rank writes a trace of torch's profiler into OUT.
        timeout: seconds for the whole launch; no limit otherwise, but ranks that stop moving are found.
    """

    steps: int = 100
    data: str | None = None
    emulate: str | None = None
    dilate: float | None = None
    out: str | None = None
    log_dir: str = "log_output"
    seed: int = 1
    port: int | None = None
    execution: str | None = None
    fused: bool = True
    profile: int = 0
    timeout: float | None = None

    def ran(self, execution: str, fallback: str) -> str | None:
        """What to say of how steps ran: only where it is not what was asked for."""
        if execution == "graph":
            return f"steps were replayed but for instructions that the host issued: {fallback}" if fallback else None
        if fallback or self.execution != "graph":
            return f"steps ran eagerly: {fallback}" if fallback else None
        return "steps ran eagerly: this device records no launches, or the run had too few steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Which example, and how it is run.

    Args:
        case: multiple_mix (hybrid parallel), advanced_operator_parallel (layouts) or multiple_copy (slices).
        steps: training steps (one pass over the shipped digits has 156).
        epochs: passes over the data set, instead of steps.
        data: folder with MNIST's IDX files; 5,000 shipped digits otherwise.
        machine: machine file to plan with, instead of calibrating this machine now.
        out: results go to OUT/CASE.
        log_dir: what the ranks print goes to LOG_DIR/1/rank.N/stdout.
        seed: of weights and data order.
        port: of the rendezvous; a free one otherwise.
        timeout: seconds for the run on processes.
    """

    case: str = "multiple_mix"
    steps: int = 156
    epochs: int | None = None
    data: str | None = None
    machine: str | None = None
    out: str = "runs"
    log_dir: str = "log_output"
    seed: int = 1
    port: int | None = None
    timeout: float | None = None


def given(options: Any) -> dict[str, Any]:
    """The options of a group that have a value, by name.

    >>> "port" in given(LaunchOptions()), given(LaunchOptions(port=29500))["port"]
    (False, 29500)
    """
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    return {name: value for name, value in values.items() if value not in (None, ())}


def flag(name: str) -> str:
    """An option as it is written on the command line.

    >>> flag("global_batch")
    '--global-batch'
    """
    return f"--{name.replace('_', '-')}"


def check_at_least(name: str, value: float | None, least: int) -> None:
    """Refuse a number that is too small.

    Raises:
        TwofoldError: it is below `least`.
    """
    if value is not None and value < least:
        raise TwofoldError(f"{flag(name)} {value}: it is at least {least}")
