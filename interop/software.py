"""The software that a plan is made for: what it supports, its costs, and its launch scripts."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from interop.accelerate import fsdp2_words
from interop.megatron import check_megatron_model, megatron_words
from interop.startup import FSDP2, MEGATRON, TORCHTITAN, TORCHTITAN_DENSE
from interop.torchtitan import torchtitan_flavor, torchtitan_toml, torchtitan_words
from plans.degrees import Degrees
from plans.degrees.rules import Rule
from plans.errors import TwofoldError
from plans.model.transformer import TransformerConfig

__all__ = ["Software", "software_named", "software_names"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """A program that trains models, at one version.

    Args:
        name: its name for users.
        version: that its table was read from.
        source: source of its flags.
        stack: whose costs a forecast takes (`simulator.stacks`).
        runs: first words of the names of stacks that it can also be forecast as; (): of all.
        rules: a configuration that breaks one cannot be run.
        check_model: refuses models that it cannot express.
        words: words of the command that launches a model with degrees, given how many ranks a node has.
        settings: settings of a model with degrees, for software that reads them from a file instead.
        ending: of the file in which it is launched, or its settings stand.
    """

    name: str
    version: str = ""
    source: str = ""
    stack: str
    runs: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    check_model: Callable[[TransformerConfig], object] | None = None
    words: Callable[[TransformerConfig, Degrees, int], list[str]] | None = None
    settings: Callable[[TransformerConfig, Degrees], str] | None = None
    ending: str = ".sh"

    def costs_of(self, stack: str | None) -> str:
        """The stack whose costs a forecast takes.

        Args:
            stack: name of the one that is asked for; None: the software's own.

        Raises:
            TwofoldError: the software runs other kernels than that stack.

        >>> software_named("torchtitan").costs_of("torchtitan-compile")
        'torchtitan-compile'
        """
        if stack is None:
            return self.stack
        if self.runs and stack.partition("-")[0] not in self.runs:
            raise TwofoldError(
                f"--stack {stack}: {self.name} does not run as that software; omit --stack, or name one that begins "
                f"with {' or '.join(self.runs)}"
            )
        return stack

    def launch(self, config: TransformerConfig, degrees: Degrees, ranks_per_node: int) -> str | None:
        """A shell script that runs a model with degrees, or the settings; None: `twofold run` does, given the plan.

        Raises:
            TwofoldError: a model that the software cannot express.
        """
        if self.settings is not None:
            return self.settings(config, degrees)
        if self.words is None:
            return None
        return (
            f"# {config.name} for {self.name} {self.version}, written by `twofold plan`: num_layers = "
            f"{config.num_layers}, WORLD_SIZE={degrees.num_ranks}\n# flags as in {self.source}\n"
            f"{_folded(self.words(config, degrees, min(ranks_per_node, degrees.num_ranks)))}\n"
        )


def _folded(words: list[str]) -> str:
    """A command with every flag on a separate line, with its value."""
    lines = [words[0]]
    for before, word in pairwise(words):
        is_value = not word.startswith("--") and before.startswith("--")
        lines.append(f"{lines.pop()} {shlex.quote(word)}" if is_value else shlex.quote(word))
    return " \\\n  ".join(lines)


_SOFTWARE = (
    Software(name="twofold", stack="twofold"),
    Software(
        name="torchtitan", version="0.3.0", stack="torchtitan", runs=("torchtitan", "torch"),
        rules=TORCHTITAN + TORCHTITAN_DENSE,
        source="torchtitan 0.3.0 on the package index: config/configs.py, distributed, models/llama3",
        check_model=torchtitan_flavor, words=torchtitan_words,
    ),
    Software(
        name="torchtitan", version="0.2.2", stack="torchtitan", runs=("torchtitan", "torch"), rules=TORCHTITAN,
        ending=".toml", settings=torchtitan_toml,
        source="torchtitan 0.2.2 on the package index: config/job_config.py, distributed",
    ),
    Software(
        name="megatron", version="0.16.1", stack="megatron", runs=("megatron",), rules=MEGATRON,
        source="megatron-core 0.16.1 on the package index; Megatron-LM's megatron/training/arguments.py",
        check_model=check_megatron_model, words=megatron_words,
    ),
    Software(
        name="fsdp2", version="1.15.0", stack="torch", runs=("torch",), rules=FSDP2,
        source="accelerate 1.15.0 on the package index: commands/launch.py; torch.distributed.fsdp.fully_shard",
        words=fsdp2_words,
    ),
)  # fmt: skip


def software_names() -> tuple[str, ...]:
    """The names that `software_named` accepts, with their versions."""
    return tuple(f"{software.name}@{software.version}" if software.version else software.name for software in _SOFTWARE)


def software_named(name: str) -> Software:
    """The software of a name, of the newest version that is known unless one is given.

    Raises:
        TwofoldError: an unknown name, or another version than the one that is known.

    >>> software_named("torchtitan@0.3.0").stack, software_named("megatron").version
    ('torchtitan', '0.16.1')
    """
    short, _, version = name.partition("@")
    versions = [software for software in _SOFTWARE if software.name == short]
    if not versions:
        near = difflib.get_close_matches(short, [software.name for software in _SOFTWARE], n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise TwofoldError(f"--for {name!r} is not known; {hint}known are {', '.join(software_names())}")
    found = next((software for software in versions if version in ("", software.version)), None)
    if found is None:
        known = " and ".join(version.version for version in versions)
        raise TwofoldError(f"--for {name!r}: the flags of {short} are known for version {known}; name one of these")
    return found
