"""Groups of options that several commands share. A field is a flag; `twofold COMMAND --help` shows a box per group."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import tyro

from plans.errors import TwofoldError

if TYPE_CHECKING:
    from twofold.console import Console

__all__ = [
    "Command",
    "DegreeOptions",
    "DemoOptions",
    "LaunchOptions",
    "MachineFactors",
    "MachineOption",
    "Output",
    "PlanFile",
    "Values",
    "Word",
    "check_at_least",
    "flag",
    "given",
]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class DegreeOptions:
    """How a transformer is spread. `plan` searches what is not given; `predict` takes the value in brackets.

    Args:
        dp: data-parallel degree [1].
        tp: tensor-parallel degree [1].
        pp: pipeline-parallel degree [1].
        cp: context-parallel degree [1].
        ep: mixtures of experts: over how many of the data-parallel ranks the experts are split [1].
        micro_batch: sequences of a micro-batch on one data-parallel rank [1].
        schedule: of the pipeline [1f1b]. `plan` of other models: a name, or a file (.csv, .txt) with a row of actions
            for every pipeline rank.
        virtual: chunks per pipeline rank [1].
        recompute: none, selective, selective_op or full [none].
        recompute_layers: how many blocks of every chunk recompute, the first ones [all].
        zero: optimizer-parallel level, 0 to 3 [0]; 0 in `plan` of other models.
        stage_layers: blocks of every chunk [spread evenly].
        order: in which ranks count along the axes, the innermost first [tp cp dp pp].
    """

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    micro_batch: int | None = None
    schedule: str | None = None
    virtual: int | None = None
    recompute: str | None = None
    recompute_layers: int | None = None
    zero: int | None = None
    stage_layers: tuple[int, ...] | None = None
    order: tuple[str, ...] | None = None


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
        data: folder with MNIST's IDX files; the shipped digits otherwise.
        emulate: every instruction takes the time that this machine's model says; `verify` predicts with it as well.
        dilate: that time is multiplied by this factor; by default the shortest instruction lasts 50 ms.
        out: folder for results; a temporary one otherwise.
        log_dir: what the ranks print goes to LOG_DIR/1/rank.N/stdout.
        seed: of weights and data order.
        port: of the rendezvous; a free one otherwise.
    """

    steps: int = 100
    data: str | None = None
    emulate: str | None = None
    dilate: float | None = None
    out: str | None = None
    log_dir: str = "log_output"
    seed: int = 1
    port: int | None = None


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


def given(options: Any) -> dict[str, Any]:
    """The options of a group that were given, by name.

    >>> given(DegreeOptions(tp=2, order=("tp", "dp")))
    {'tp': 2, 'order': ('tp', 'dp')}
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
