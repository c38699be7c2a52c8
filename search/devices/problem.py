"""What is asked: a transformer, devices, a batch, and what the user has fixed already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from costmodels import Machine
from plans.degrees import Degrees, check_order, check_recompute_layers
from plans.errors import TwofoldError
from plans.model.transformer import TransformerConfig
from plans.model.transformer.recompute import RECOMPUTE_MODES
from plans.plan import Optimizer
from plans.schedules import chunks_per_rank, make_schedule
from simulator.forecast import Stack

__all__ = ["Pins", "Problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """Degrees that the user fixes; None is searched.

    >>> Pins(tp=8, recompute="none").given
    {'tp': 8, 'recompute': 'none'}
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
    sequence_parallel: bool | None = None
    layers: tuple[int, ...] | None = None
    order: tuple[str, ...] | None = None

    @property
    def given(self) -> dict[str, Any]:
        """What is fixed."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) is not None}

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "ep", "micro_batch", "virtual"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise TwofoldError(f"{name} is pinned to {value!r}; it is a whole number of at least 1")
        if self.zero is not None and self.zero not in range(4):
            raise TwofoldError(f"zero is pinned to {self.zero!r}; optimizer-parallel levels are 0, 1, 2 and 3")
        if self.recompute is not None and self.recompute not in RECOMPUTE_MODES:
            raise TwofoldError(f"recompute is pinned to {self.recompute!r}; it is one of {', '.join(RECOMPUTE_MODES)}")
        check_recompute_layers(self.recompute, self.recompute_layers)
        if self.order is not None:
            check_order(self.order)
        if self.schedule is not None:
            fixed = chunks_per_rank(self.schedule)
            if self.virtual is not None and fixed is not None and self.virtual != fixed:
                raise TwofoldError(
                    f"schedule {self.schedule!r} has {fixed} chunk(s) per rank, but virtual is pinned to {self.virtual}"
                )


_MOST_PER_DEVICE = 2**14
"""Sequences of a step: schedules grow with them."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model to be spread over devices.

    Args:
        config: of a transformer.
        machine: whose compute runs behind the host.
        num_devices: all are used.
        global_batch: sequences of a step.
        pins: what is fixed.
        stack: the software that runs it.
        memory_limit_bytes: of a device; by default the machine's memory without what its runtime takes. A hard limit.
        optimizer: its kind and dtypes; the level is searched.

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

    def __post_init__(self) -> None:
        for name in ("num_devices", "global_batch"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise TwofoldError(f"{name} is {value!r}; it is a whole number of at least 1")
        most = _MOST_PER_DEVICE * self.num_devices
        if self.global_batch > most:
            raise TwofoldError(
                f"a global batch of {self.global_batch} sequences on {self.num_devices} devices: at most {most} are "
                f"searched, {_MOST_PER_DEVICE} per device; a step of several such batches takes so many times as long"
            )
        machine = self.machine
        if not machine.host_async:
            raise TwofoldError(
                f"machine {machine.name!r} computes on its hosts; this search is for devices behind a host: give a "
                "model as file.py:function, or an accelerator such as h100-sxm-x64"
            )
        if self.num_devices > machine.num_devices:
            node = machine.links[0].ranks if machine.links else 8
            larger = f"{machine.name.rpartition('-x')[0] or 'h100-sxm'}-x{-(-self.num_devices // node) * node}"
            raise TwofoldError(
                f"{self.num_devices} devices are asked for, machine {machine.name!r} has {machine.num_devices}; name a "
                f"larger one, such as {larger}"
            )
        if self.num_devices > 1 and not machine.links:
            raise TwofoldError(f"machine {machine.name!r} has no links; {self.num_devices} devices need some")
        if self.memory_limit_bytes is not None and self.memory_limit_bytes < 1:
            raise TwofoldError(f"the memory limit is {self.memory_limit_bytes} bytes; it is at least 1")
        if self.optimizer is None:
            wide = "float32" if self.config.dtype in ("bfloat16", "float16") else None
            made = Optimizer(kind="adamw", settings={"lr": 1e-4}, gradient_dtype=wide, master_dtype=wide)
            object.__setattr__(self, "optimizer", made)
        self._check_pins()

    def _check_pins(self) -> None:
        pins, config = self.pins, self.config
        product, names = 1, []
        for name in ("dp", "tp", "pp", "cp"):
            value = getattr(pins, name)
            if value is not None:
                product *= value
                names.append(f"{name}={value}")
        if self.num_devices % product or (len(names) == 4 and product != self.num_devices):
            raise TwofoldError(
                f"{' x '.join(names)} = {product} devices cannot make up {self.num_devices}; change a pin or --devices"
            )
        experts = 1 if config.experts is None else config.experts.num_experts
        if pins.ep is not None and experts % pins.ep:
            told = "has no experts" if config.experts is None else f"has {experts} experts"
            raise TwofoldError(f"{config.name} {told}, which ep={pins.ep} cannot split")
        if pins.ep is not None and pins.dp is not None and pins.dp % pins.ep:
            raise TwofoldError(f"ep={pins.ep} must divide dp={pins.dp}: experts are split over data-parallel ranks")
        if pins.dp is not None and pins.dp > self.global_batch:
            raise TwofoldError(
                f"a global batch of {self.global_batch} cannot feed dp={pins.dp}: every data-parallel rank needs at "
                "least one sequence; raise the batch or lower dp"
            )
        each = (pins.dp or 1) * (pins.micro_batch or 1)
        if self.global_batch % each:
            raise TwofoldError(
                f"a global batch of {self.global_batch} does not divide by dp({pins.dp or 1}) x "
                f"micro_batch({pins.micro_batch or 1}) = {each}"
            )
        if pins.sequence_parallel and pins.tp == 1:
            raise TwofoldError("sequence_parallel is pinned, but tp=1 leaves nothing to split; pin tp above 1")
        if pins.layers is not None:
            if sum(pins.layers) != config.num_layers or min(pins.layers) < 0:
                raise TwofoldError(
                    f"layers {list(pins.layers)} add up to {sum(pins.layers)}; {config.name} has {config.num_layers}"
                )
            if pins.pp is None:
                raise TwofoldError("layers are pinned for every chunk, so pp must be pinned too")
            virtual = pins.virtual or (chunks_per_rank(pins.schedule) if pins.schedule else None) or 1
            if len(pins.layers) != pins.pp * virtual:
                raise TwofoldError(
                    f"{len(pins.layers)} counts of layers are pinned, but pp={pins.pp} with {virtual} chunk(s) per "
                    f"rank makes {pins.pp * virtual} chunks"
                )
        if pins.schedule is not None and pins.pp is not None and pins.dp is not None and pins.micro_batch is not None:
            count = self.global_batch // (pins.dp * pins.micro_batch)
            free = chunks_per_rank(pins.schedule) is None
            make_schedule(pins.schedule, pins.pp, count, virtual=(pins.virtual or 2) if free else None)

    @property
    def limit_bytes(self) -> int:
        """What a device may hold."""
        own = self.machine.room_bytes
        return own if self.memory_limit_bytes is None else min(own, self.memory_limit_bytes)

    def at_level(self, level: int) -> Optimizer:
        """The optimizer with a parallel level."""
        import msgspec

        assert self.optimizer is not None
        return msgspec.structs.replace(self.optimizer, parallel_level=level)

    def changed(self, **values: Any) -> Problem:
        """The same with other values.

        Raises:
            TwofoldError: see the class.
        """
        return replace(self, **values)

    def degrees(self, values: Mapping[str, Any]) -> Degrees:
        """Degrees of plain values; "zero" is the optimizer's level."""
        rest = {name: value for name, value in values.items() if name != "zero"}
        return Degrees(**rest, global_batch=self.global_batch, optimizer=self.at_level(int(values.get("zero", 0))))
