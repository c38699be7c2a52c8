"""Plans from files: a plan file, or a file with a transformer's degrees, from which the plan is made."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from costmodels import Machine
from interop.statement import Statement, read_statement
from plans.degrees import Degrees, check
from plans.degrees.plan import plan_of
from plans.errors import TwofoldError
from plans.model.transformer import TransformerConfig, transformer, transformer_config
from plans.plan import Plan, load_plan
from plans.reading import read_json

__all__ = ["configuration", "read_degrees", "read_plan", "states_degrees"]


class _Keys(msgspec.Struct):
    """The keys that identify a file of degrees."""

    twofold_degrees: Any = None
    placements: Any = None


def states_degrees(path: str | os.PathLike[str]) -> bool:
    """Whether a file states degrees, and is not a plan file."""
    path = Path(path)
    if path.suffix != ".json":
        return path.suffix == ".toml"
    keys = read_json(path, "the plan file", _Keys)
    return keys.twofold_degrees is not None or keys.placements is not None


def read_plan(path: str | os.PathLike[str], machine: Machine) -> tuple[Plan, tuple[str, ...]]:
    """The plan of a file.

    Args:
        path: a plan file, or a file of degrees as `interop.statement.read_statement` takes it.
        machine: for which a plan of degrees is made.

    Returns:
        the plan, and what was assumed to make it.

    Raises:
        TwofoldError: a file that cannot be read, or degrees with no plan can be made.
    """
    if not states_degrees(path):
        return load_plan(path), ()
    config, degrees, notes = read_degrees(path, machine)
    return plan_of(degrees, transformer(config, batch_size=degrees.global_batch)), notes


def read_degrees(path: str | os.PathLike[str], machine: Machine) -> tuple[TransformerConfig, Degrees, tuple[str, ...]]:
    """The model and the degrees of a file that states them.

    Args:
        path: path of the file.
        machine: that they are for.

    Returns:
        the model, its degrees, and what was assumed.

    Raises:
        TwofoldError: a file that cannot be read, degrees that cannot be on the machine.
    """
    statement = read_statement(path)
    config, degrees = configuration(statement, os.fspath(path))
    check(degrees, num_devices=machine.num_devices, machine=machine.name)
    notes = [f"assumed: {each}" for each in statement.assumed]
    notes += [f"ignored: {', '.join(statement.unread)}"] if statement.unread else []
    if statement.stack not in (None, "twofold"):
        notes.append(f"{os.fspath(path)} is for {statement.stack}; here it is predicted for twofold")
    return config, replace(degrees, fused=machine.fuses), tuple(notes)


def configuration(
    statement: Statement,
    path: str,
    *,
    model: str | None = None,
    global_batch: int | None = None,
    seq: int | None = None,
) -> tuple[TransformerConfig, Degrees]:
    """The model and the degrees that a file states, or for another model, batch or sequence where given.

    Args:
        statement: of the file.
        path: path of the file, for messages.
        model: name or config.json, with the layers and experts that the file states.
        global_batch: sequences of a step.
        seq: tokens of a sequence.

    Raises:
        TwofoldError: no model, one with other experts than stated, a batch that does not divide.
    """
    if model is not None:
        config = statement.model(transformer_config(model, seq=statement.seq if seq is None else seq))
    elif statement.config is not None:
        config = statement.config if seq is None else replace(statement.config, seq=seq)
    else:
        raise TwofoldError(f"{path} does not say which model it is for; add --model, such as --model llama-3-8b")
    half = config.dtype in ("bfloat16", "float16")
    return config, statement.degrees(global_batch, half=half, num_layers=config.num_layers, seq=config.seq)
