"""Groups of options that several commands share. Every field is a flag."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import tyro

from plans.errors import TwofoldError
from twofold.commands.values import Above0, AtLeast0, AtLeast1, Factor, Port

if TYPE_CHECKING:
    from executor.launch.nodes import Nodes
    from twofold.console import Console

__all__ = [
    "Command",
    "DemoOptions",
    "Factors",
    "FileOutput",
    "LaunchOptions",
    "MachineFactors",
    "MachineOption",
    "Output",
    "PlanFile",
    "Word",
    "given",
]

PlanFile = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN.json")]
Word = Annotated[str, tyro.conf.Positional]
Factors = tuple[Factor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Output.

    Args:
        json: print one JSON object on stdout and progress on stderr (its keys: docs/what-if.md).
    """

    json: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOutput(Output):
    """Output and files.

    Args:
        force: replace files that twofold did not write.
    """

    force: bool = False


class Command(Protocol):
    """A parsed command line."""

    @property
    def output(self) -> Output:
        """Its output options."""

    def run(self, console: Console) -> tuple[dict[str, Any], bool]:
        """Run the command. Returns the JSON object, and whether all checks passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOption:
    """Machine.

    Args:
        machine: name of a shipped machine, such as h100-sxm-x64, or a machine file.
    """

    machine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFactors:
    """Factors on the figures of the machine file.

    Args:
        bandwidth: factor on the bandwidth of all links, e.g. --bandwidth 0.5 1 2.
        latency: factor on the latency of all links and the fixed costs of communication.
        compute: factor on the arithmetic rates of devices.
        memory: factor on the memory bandwidth of devices.
        dispatch: factor on the host time to issue an instruction.
    """

    bandwidth: Factors = ()
    latency: Factors = ()
    compute: Factors = ()
    memory: Factors = ()
    dispatch: Factors = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Several machines. Start the same command on each, with its own --node.

    Args:
        nodes: number of machines.
        node: index of this machine, from 0.
        master: address of node 0.
        port: port on node 0 at which ranks meet; with several nodes the next port is used too. A single machine picks
            a free one.
    """

    nodes: AtLeast1 = 1
    node: AtLeast0 = 0
    master: str = "127.0.0.1"
    port: Port | None = None

    @property
    def stated(self) -> Nodes:
        """As the launcher takes them.

        Raises:
            TwofoldError: there is no node of that number.
        """
        from executor.launch.nodes import Nodes

        if self.node >= self.nodes:
            raise TwofoldError(f"--node must be 0 to {self.nodes - 1} with --nodes {self.nodes}, not {self.node}")
        return Nodes(num_nodes=self.nodes, node_rank=self.node, master_addr=self.master, port=self.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Launching ranks.

    Args:
        steps: number of training steps.
        data: training data: random, digits (shipped), a folder with MNIST's IDX files, a folder of images with a
            subfolder per class, file.npz with an array per input, tokens.npy, tokens.idx, or a function
            (package.module:function or file.py:function) that returns batches or a torch dataset. The default is digits
            for models of such images and labels, otherwise random.
        emulate: make every instruction take its predicted time on this machine; `verify` also predicts with it.
        dilate: factor on the emulated times; by default the shortest instruction lasts 50 ms.
        out: folder for results; by default a temporary one.
        log_dir: folder for the output of the ranks (LOG_DIR/1/rank.N/stdout).
        seed: random seed of weights and data order.
        execution: graph (a step is one launch, if the device supports it) or eager; by default that of the plan.
        fused: fuse runs of memory-bound instructions into single kernels; on by default.
        profile: number of steps that every rank records with torch's profiler; the traces are written to OUT.
        timeout: time limit of the launch in seconds. Without it, only ranks that hang are stopped.
    """

    steps: AtLeast1 = 100
    data: str | None = None
    emulate: str | None = None
    dilate: Above0 | None = None
    out: str | None = None
    log_dir: str = "log_output"
    seed: AtLeast0 = 1
    execution: str | None = None
    fused: bool = True
    profile: AtLeast0 = 0
    timeout: Above0 | None = None

    def ran(self, execution: str, fallback: str) -> str | None:
        """A message if the steps did not run as requested, otherwise ""."""
        if execution == "graph":
            return f"steps were replayed except for instructions issued by the host: {fallback}" if fallback else None
        if fallback or self.execution != "graph":
            return f"steps ran eagerly: {fallback}" if fallback else None
        return "steps ran eagerly: this device cannot record launches, or the run had too few steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The example and its settings.

    Args:
        case: multiple_mix (hybrid parallel), advanced_operator_parallel (layouts) or multiple_copy (slices).
        steps: number of training steps (one pass over the shipped digits has 156).
        epochs: number of passes over the data set, instead of steps.
        data: folder with MNIST's IDX files; by default 5,000 shipped digits.
        machine: machine file to plan with; by default this machine is calibrated.
        out: folder for results, which go to OUT/CASE.
        log_dir: folder for the output of the ranks (LOG_DIR/1/rank.N/stdout).
        seed: random seed of weights and data order.
        port: port of the rendezvous; by default a free one.
        timeout: time limit of the run in seconds.
    """

    case: str = "multiple_mix"
    steps: AtLeast1 = 156
    epochs: AtLeast1 | None = None
    data: str | None = None
    machine: str | None = None
    out: str = "runs"
    log_dir: str = "log_output"
    seed: AtLeast0 = 1
    port: Port | None = None
    timeout: Above0 | None = None


def given(options: Any) -> dict[str, Any]:
    """The options of a group that have a value, by name.

    >>> "out" in given(LaunchOptions()), given(LaunchOptions(out="runs"))["out"]
    (False, 'runs')
    """
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    return {name: value for name, value in values.items() if value not in (None, ())}
