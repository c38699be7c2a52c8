"""A configuration in a file: twofold's JSON, flags of Megatron-LM, settings of torchtitan, or DTensor placements."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from interop.accelerate import read_fsdp2
from interop.megatron import read_megatron
from interop.placements import read_placements
from interop.startup import check_rules
from interop.torchtitan import read_torchtitan, read_torchtitan_launch, stage_values
from plans.degrees import Degrees, even_layers
from plans.degrees.file import degrees_to_json, values_from_json
from plans.degrees.rules import Rule
from plans.errors import TwofoldError
from plans.figures import FIGURES
from plans.files import write_atomically
from plans.model.transformer import TransformerConfig
from plans.model.transformer.config import Experts, Latent, Rope, Scales
from plans.optimizer import Optimizer
from plans.reading import json_of, read_text

__all__ = ["Statement", "read_statement", "write_statement"]


@dataclass(frozen=True, kw_only=True)
class Statement:
    """The configuration that a file states.

    Args:
        values: degrees, as `Degrees.of` takes them.
        global_batch: sequences of a step.
        seq: tokens of a sequence; None: the model's.
        config: of the model; None where the file does not say.
        num_layers: number of layers of the model for which the file was made; None where it does not say.
        experts: of the model, in the words of `Experts` and "shared_ffn", all shared ones together; None where files of
            its kind do not say.
        stages: torchtitan's layers per stage, and how many fewer the first and the last hold.
        stack: the software for which it was made; None where it does not say.
        assumed: differences of the forecast from the file.
        unread: settings of the file that are ignored.
        rules: of the program that the file is for.
    """

    values: dict[str, Any]
    global_batch: int
    seq: int | None = None
    config: TransformerConfig | None = None
    num_layers: int | None = None
    experts: dict[str, Any] | None = None
    stages: tuple[int | None, int, int] | None = None
    stack: str | None = None
    assumed: tuple[str, ...] = field(default=())
    unread: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()

    def degrees(
        self,
        global_batch: int | None = None,
        *,
        half: bool = True,
        num_layers: int | None = None,
        seq: int | None = None,
    ) -> Degrees:
        """The degrees, under another batch, or for another number of layers or tokens of a sequence, where given.

        Raises:
            TwofoldError: a batch or a number of layers that they cannot take, or the program that the file is for.
        """
        values = dict(self.values)
        if self.stages is not None:
            values |= stage_values(self.values, self.stages, num_layers or self.num_layers)
        if self._spreads_anew(values.get("layers"), num_layers):
            values["layers"] = None
        wide = "float32" if half else None
        found = Degrees.of(
            values, global_batch=self.global_batch if global_batch is None else global_batch,
            optimizer=Optimizer(kind="adamw", settings={"lr": 1e-4}, gradient_dtype=wide, master_dtype=wide),
        )  # fmt: skip
        check_rules(self.rules, found, seq=self.seq if seq is None else seq)
        return found

    def _spreads_anew(self, layers: tuple[int, ...] | None, num_layers: int | None) -> bool:
        """Whether evenly spread layers are stated, for a model of other layers than the one asked for."""
        if layers is None or self.config is None or num_layers in (None, self.config.num_layers):
            return False
        return layers == even_layers(sum(layers), len(layers))

    def model(self, config: TransformerConfig) -> TransformerConfig:
        """A model as this file has it: its layers and the capacity of its experts; the rest must be equal.

        Raises:
            TwofoldError: other experts than stated.
        """
        if self.num_layers is not None:
            config = replace(config, num_layers=self.num_layers)
        if self.experts is None:
            return config
        if (config.experts is None) is not (not self.experts):
            has = "no experts" if config.experts is None else f"{config.experts.num_experts} experts"
            raise TwofoldError(
                f"{config.name} has {has}, the file states {self.experts.get('num_experts', 'none')}; name another "
                "model with --model"
            )
        if config.experts is None:
            return config
        own = asdict(config.experts) | {"shared_ffn": config.experts.num_shared * config.experts.ffn}
        stated = {"shared_ffn": 0, **self.experts}
        wrong = [name for name, value in stated.items() if name != "capacity_factor" and value != own[name]]
        if wrong:
            differences = ", ".join(f"{name} {own[name]}, not {stated[name]}" for name in wrong)
            raise TwofoldError(f"experts of {config.name} have {differences} as the file states; name another model")
        factor = float(self.experts["capacity_factor"])
        return replace(config, experts=replace(config.experts, capacity_factor=factor))


# ------------------------------------------------------------------- our own file

_VERSION = 3

_KEYS = frozenset({"twofold_degrees", "config", "degrees", "global_batch", "stack"})

_BESIDE = frozenset({"machine", *FIGURES})
"""Keys for people to read; no reader uses them."""


def write_statement(
    path: str | os.PathLike[str], config: TransformerConfig, degrees: Degrees, *, stack: str, **beside: Any
) -> Path:
    """Save a configuration as JSON: with the stack it was made for, and its machine and figures for people to read."""
    assert beside.keys() <= _BESIDE, f"no reader would take {beside.keys() - _BESIDE}"
    made = {
        "twofold_degrees": _VERSION,
        "config": {name: value for name, value in asdict(config).items() if name not in ("source",)},
        "degrees": degrees_to_json(degrees),
        "global_batch": degrees.global_batch,
        "stack": stack,
        **beside,
    }  # fmt: skip
    target = Path(path)
    write_atomically(target, (json.dumps(made, indent=1) + "\n").encode())
    return target


def read_statement(path: str | os.PathLike[str]) -> Statement:
    """Read a file of ours or DTensor placements (.json), torchtitan's settings (.toml), or a launch by
    torchtitan, accelerate or Megatron-LM.

    Raises:
        TwofoldError: a file that cannot be read, or has unknown content.
    """
    source = Path(path)
    text = read_text(path, "the file of degrees")
    if source.suffix == ".toml":
        return Statement(**read_torchtitan(text, os.fspath(path)))
    if source.suffix == ".json":
        return _read_own(text, os.fspath(path))
    if "torchtitan.train" in text:
        return Statement(**read_torchtitan_launch(text, os.fspath(path)))
    if "accelerate launch" in text:
        return Statement(**read_fsdp2(text, os.fspath(path)))
    return Statement(**read_megatron(text, os.fspath(path)))


def _read_own(text: str, path: str) -> Statement:
    try:
        found = json_of(text.encode(), path)
        if not isinstance(found, dict):
            raise TwofoldError(f"{path} is not a JSON object with degrees; `twofold plan` writes such files")
        if "placements" in found:
            return Statement(**read_placements(found, path))
        if found["twofold_degrees"] != _VERSION:
            raise TwofoldError(f"{path} is of version {found['twofold_degrees']!r}, not {_VERSION}; plan again")
        _check_keys(found, _KEYS, _BESIDE, f"{path}: keys")
        fields = dict(found["config"])
        fields["rope"] = _made(Rope, fields["rope"], f"{path}: config.rope")
        fields["scales"] = _made(Scales, fields["scales"], f"{path}: config.scales")
        for name, kind in (("experts", Experts), ("latent", Latent)):
            given = fields.get(name)
            fields[name] = None if given is None else _made(kind, given, f"{path}: config.{name}")
        values = values_from_json(found["degrees"], path)
        config, stack = _made(TransformerConfig, fields, f"{path}: config"), found["stack"]
        if not isinstance(stack, str):
            raise TwofoldError(f"{path}: stack is {stack!r}, not a name such as twofold or megatron")
        return Statement(values=values, global_batch=found["global_batch"], seq=config.seq, config=config, stack=stack)
    except TwofoldError:
        raise
    except json.JSONDecodeError as error:
        raise TwofoldError(
            f"{path} is not a complete JSON file (line {error.lineno}: {error.msg}); it may have been cut off; write "
            "it again "
            "with `twofold plan`"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TwofoldError(
            f"{path} states no degrees ({type(error).__name__}: {error}); `twofold plan` writes such files "
            "next to plans"
        ) from None


_T = TypeVar("_T")


def _made(kind: Callable[..., _T], given: Any, where: str) -> _T:
    """A value of a dataclass from a JSON object, whose keys are checked.

    Raises:
        TwofoldError: another kind of value, an unknown key, what the class refuses.
    """
    if not isinstance(given, dict):
        raise TwofoldError(f"{where} is {given!r}, not a JSON object; write the file again with `twofold plan`")
    known = [each.name for each in dataclasses.fields(kind)]  # type: ignore[arg-type]
    if unknown := sorted(given.keys() - set(known)):
        near = difflib.get_close_matches(unknown[0], known, n=1)
        way = f"did you mean {near[0]!r}?" if near else "remove it from the file"
        raise TwofoldError(f"{where}.{unknown[0]} is not a key of such files; {way}")
    try:
        return msgspec.convert(given, kind, from_attributes=True)
    except msgspec.ValidationError as error:
        raise TwofoldError(f"{where}: {error}") from None


def _check_keys(found: dict[str, Any], needed: frozenset[str], also: frozenset[str], what: str) -> None:
    missing, unknown = needed - found.keys(), found.keys() - needed - also
    if missing or unknown:
        faults = [f"{word}: {', '.join(sorted(names))}" for word, names in (("missing", missing), ("unknown", unknown))
                if names]  # fmt: skip
        raise TwofoldError(f"{what} are {', '.join(sorted(needed | also))}; {'; '.join(faults)}")
