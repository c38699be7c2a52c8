"""The problem: a transformer, devices, a batch, and the degrees that the user has fixed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import msgspec

from costmodels import Machine
from costmodels.utilization import mfu
from plans.degrees import DEGREES, Degrees, check, check_stated
from plans.degrees.rules import OF_PLANS, Rule, broken
from plans.errors import TwofoldError
from plans.model.transformer import NO_MODE, Recognised, TransformerConfig, sizes_of
from plans.optimizer import Optimizer
from search.request import check_devices
from simulator.stacks import Stack

__all__ = ["Pins", "Problem"]

_EXCESS, _LARGEST_EXCESS = 0.02, 0.05
"""By how much formulas of memory may exceed the peak of a program, usually and at most."""


@dataclass(frozen=True, init=False)
class Pins:
    """Degrees that the user fixes, by name (see `plans.degrees.DEGREES`); fields that are None or absent are searched.

    Raises:
        TwofoldError: values that no `Degrees` can have, or that contradict each other.

    >>> pins = Pins(tp=8, recompute="none")
    >>> pins.given, pins.tp, pins.dp
    ({'tp': 8, 'recompute': 'none'}, 8, None)
    """

    given: dict[str, Any]

    def __init__(self, **pins: Any) -> None:
        fixed = {name: value for name, value in pins.items() if value is not None}
        check_stated(fixed)
        object.__setattr__(self, "given", {name: fixed[name] for name in DEGREES if name in fixed})

    def __getattr__(self, name: str) -> Any:
        if name in DEGREES:
            return self.given.get(name)
        raise AttributeError(f"{name} is not a degree; degrees are {', '.join(DEGREES)}")

    @property
    def takes_turns(self) -> bool:
        """Whether slices or pairs are asked for."""
        return self.given.get("interleave", 1) > 1 or self.given.get("overlap_pairs", False)

    def changed(self, **pins: Any) -> Pins:
        """The same with other pins; None frees one.

        >>> Pins(tp=8, dp=2).changed(dp=None, pp=4).given
        {'pp': 4, 'tp': 8}
        """
        return Pins(**{**self.given, **pins})


MAX_VIRTUAL = 8
"""Chunks per pipeline rank of schedules that take any number."""

_MOST_PER_DEVICE = 2**14
"""Sequences of a step: schedules grow with them."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model to be spread over devices.

    Args:
        config: of a transformer.
        recognised: the module that it was recognised in, whose names plans have; None: those of `transformer`. What has
            no plan is not in the space of a module.
        machine: whose compute runs behind the host.
        num_devices: all are used.
        global_batch: sequences of a step.
        pins: what is fixed; unless recompute is, the checkpoints of a module fix it.
        stack: the software that runs it.
        memory_limit_bytes: for the tensors on a device, a hard limit; by default `Machine.room_bytes`.
        optimizer: its kind and dtypes; the level is searched.
        rules: of the software that runs it (`interop.startup`); a configuration that breaks one is not in the space.
        fused: False leaves runs of memory-bound instructions apart; they are fused only where the machine gains by it.

    Raises:
        TwofoldError: counts below 1, a batch of more than 16384 sequences per device, more devices than the machine
            has, a machine whose hosts compute or that has no links, pins that contradict each other or the devices and
            the batch.
    """

    config: TransformerConfig
    machine: Machine
    num_devices: int
    global_batch: int
    pins: Pins = Pins()
    stack: Stack = field(default_factory=Stack)
    memory_limit_bytes: int | None = None
    optimizer: Optimizer | None = None
    fused: bool = True
    recognised: Recognised | None = None
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_devices", "global_batch"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise TwofoldError(f"{name} must be a whole number of at least 1, not {value!r}")
        most = _MOST_PER_DEVICE * self.num_devices
        if self.global_batch > most:
            raise TwofoldError(
                f"a global batch of {self.global_batch} sequences on {self.num_devices} devices: at most {most} are "
                f"searched, {_MOST_PER_DEVICE} per device; a step of several such batches takes proportionally longer"
            )
        machine = self.machine
        if not machine.host_async:
            raise TwofoldError(
                f"machine {machine.name!r} computes on its hosts; this search is for accelerators: give a "
                "model as file.py:function, or an accelerator such as h100-sxm-x64"
            )
        check_devices(machine, self.num_devices)
        if self.memory_limit_bytes is not None and self.memory_limit_bytes < 1:
            raise TwofoldError(f"the memory limit must be at least 1 byte, not {self.memory_limit_bytes}")
        if self.optimizer is None:
            wide = "float32" if self.config.dtype in ("bfloat16", "float16") else None
            made = Optimizer(kind="adamw", settings={"lr": 1e-4}, gradient_dtype=wide, master_dtype=wide)
            object.__setattr__(self, "optimizer", made)
        self._pin_checkpoints()
        self._check_pins()

    def mfu(self, step_s: float) -> float:
        """Model FLOPs utilization of a step (`costmodels.utilization`)."""
        return mfu(
            self.config, self.machine, sequences=self.global_batch, num_devices=self.num_devices, step_s=step_s
        )  # fmt: skip

    def _pin_checkpoints(self) -> None:
        """Unless recompute is pinned, use the module's own recomputation."""
        if self.recognised is None or not self.recognised.graph.recompute or self.pins.recompute is not None:
            return
        if self.recognised.recompute is None:
            raise TwofoldError(
                f"{self.recognised.graph.name} {NO_MODE}; pin recompute to search its degrees all the same"
            )
        every = self.config.num_layers if self.pins.recompute_layers is None else self.pins.recompute_layers
        pins = self.pins.changed(recompute=self.recognised.recompute, recompute_layers=every)
        object.__setattr__(self, "pins", pins)

    def _check_recompute_layers(self) -> None:
        """Refuse a number of blocks that recompute where the software recomputes either all blocks or none.

        Chunks of no more blocks than that recompute all of them.
        """
        pins = self.pins
        ranks = self.num_devices if pins.pp is None else pins.pp
        fewest = -(-self.config.num_layers // (1 if ranks == 1 else ranks * MAX_VIRTUAL))  # blocks of a chunk
        if pins.recompute_layers is None or pins.recompute_layers >= fewest:
            return
        if reason := self.stack.refuses_some(pins.recompute):
            raise TwofoldError(reason)

    def _check_pins(self) -> None:
        pins, model = self.pins, sizes_of(self.config)
        axes = {name: pins.given[name] for name in ("dp", "tp", "pp", "cp") if name in pins.given}
        product = math.prod(axes.values())
        check_stated(
            pins.given | {"global_batch": self.global_batch}, model, num_devices=self.machine.num_devices,
            machine=self.machine.name,
        )  # fmt: skip
        if self.num_devices % product or (len(axes) == 4 and product != self.num_devices):
            shown = " x ".join(f"{name}={value}" for name, value in axes.items())
            raise TwofoldError(
                f"{shown} = {product} devices cannot make up {self.num_devices}; change a pin or --devices"
            )
        if pins.sequence_parallel and pins.tp == 1:
            raise TwofoldError("sequence_parallel is pinned, but tp=1 leaves nothing to split; pin tp above 1")
        if pins.takes_turns and not self.stack.runs_programs:
            raise TwofoldError(f"only twofold supports slices and pairs; omit them for {self.stack.name}")
        if reason := self.refused(**pins.given):
            raise TwofoldError(reason)
        self._check_recompute_layers()
        if pins.layers is not None and pins.pp is None:
            raise TwofoldError("layers are pinned for every chunk, so pp must be pinned too")

    def refused(self, **known: Any) -> str | None:
        """Why the software cannot run a partly known configuration (values by name); None if it can."""
        return next(broken(self._every_rule, {**self._always_known, **known}), None)

    @cached_property
    def _every_rule(self) -> tuple[Rule, ...]:
        """Those of the software, and of twofold's plans where they are run."""
        return (*self.rules, *OF_PLANS) if self.stack.runs_programs else self.rules

    @cached_property
    def _always_known(self) -> dict[str, Any]:
        """Values that rules look at and that are not degrees."""
        return {"model": sizes_of(self.config), "seq": self.config.seq, "global_batch": self.global_batch}

    @property
    def limit_bytes(self) -> int:
        """Bytes available for tensors on a device."""
        given = self.memory_limit_bytes
        return self.machine.room_bytes if given is None else min(self.machine.free_bytes, given)

    @property
    def fuses(self) -> bool:
        """Whether its programs fuse runs of memory-bound instructions."""
        return self.fused and self.machine.fuses

    def memory_limit(self, *, pp: int, count: int, level: int) -> int:
        """The peak by formula from which on a configuration surely does not fit.

        Formulas exceeded the peaks of programs by at most 1.6 % in 165 random configurations, and by more with few
        micro-batches, and where full weights are there for their use only (level 3).
        """
        if not self.stack.runs_programs:
            return self.limit_bytes
        excess = _EXCESS if level < 3 and count >= 2 * pp else _LARGEST_EXCESS
        return int(self.limit_bytes / (1.0 - excess))

    def at_level(self, level: int) -> Optimizer:
        """The optimizer with a parallel level and the settings that are pinned."""
        assert self.optimizer is not None
        settings = {DEGREES[name].setting: value for name, value in self._pinned_settings.items()}
        return msgspec.structs.replace(self.optimizer, **{**settings, "parallel_level": level})

    @property
    def _pinned_settings(self) -> dict[str, Any]:
        """Pinned degrees that are settings of the optimizer."""
        return {name: value for name, value in self.pins.given.items() if DEGREES[name].setting}

    def changed(self, **values: Any) -> Problem:
        """The same with other values.

        Raises:
            TwofoldError: see the class.
        """
        return replace(self, **values)

    def degrees(self, values: Mapping[str, Any]) -> Degrees:
        """Degrees of plain values by name, the blocks of every chunk stated: what is proven has one reading.

        Raises:
            TwofoldError: layers that are not given and cannot be spread evenly; values that contradict each other; a
                configuration that the software cannot run.
        """
        assert self.optimizer is not None
        given = {name: value for name, value in self.pins.given.items() if not DEGREES[name].is_searched}
        values = {**self._pinned_settings, **given, **values}
        made = Degrees.of(values, global_batch=self.global_batch, optimizer=self.optimizer, fused=self.fuses)
        if made.layers is None:
            check(made, sizes_of(self.config))
        made = made.spelled_out(self.config.num_layers)
        if sentence := self.refused(**made.values, num_micro_batches=made.num_micro_batches):
            raise TwofoldError(sentence)
        return made
