"""One point of a study: settings by name, and the figures that follow from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from costmodels.machine.machine import Machine
from costmodels.price.replay import executing
from plans.degrees import DEGREES, Degrees, describe
from plans.errors import TwofoldError
from plans.figures import FIGURES
from plans.model.transformer import TransformerConfig, transformer_config
from plans.optimizer import Optimizer
from simulator.engine.link_change import LinkChange
from simulator.forecast import Forecast
from simulator.predict import Outcome
from simulator.stacks import Stack, on_host, stack_named
from simulator.study.axes import AXES, check_settings
from simulator.study.configured import Configured
from simulator.study.goodput import Checkpoints, Failures, Goodput, goodput
from simulator.study.spares import waiting_share
from simulator.study.stragglers import Ranks, slow_ranks
from simulator.study.whatif import KNOBS, WhatIf

__all__ = ["COLUMNS", "Search", "configured", "figures_of_point", "predict"]

Settings = Mapping[str, Any]

Search = Callable[[TransformerConfig, Mapping[str, Any], Machine, Stack, int, int], Degrees]
"""The fastest degrees for (model, pinned degrees, machine, software, devices, global batch)."""

COLUMNS: Mapping[str, str] = {
    "step_s": FIGURES["step_s"].definition,
    "step_low_s": "lower end of its 90 % interval",
    "step_high_s": "upper end",
    "tokens_per_s": "of all devices, with checkpoints, failures and spares",
    "goodput": "share of the time that is lasting progress",
    "effective_step_s": "step time with checkpoints, lost work, restarts and waits for repairs",
    "exposed_comm_s": FIGURES["exposed_comm_s"].definition,
    "bubble_fraction": FIGURES["bubble_fraction"].definition,
    "peak_bytes": FIGURES["peak_bytes"].definition,
    "fits": "whether it fits into the memory of a device",
    "num_devices": "that the step runs on, without spares",
    "checkpoint_s": "of writing one checkpoint",
    "best_checkpoint_every": "steps between blocking checkpoints that waste least (Daly 2006)",
    "price_per_1e9_tokens": "of all devices and spares, in the currency of price_per_device_hour",
    "degrees": "parallel degrees",
    "refused": "why there is no prediction",
}
"""The figures of a point and their meaning."""


def figures_of_point(settings: Settings, search: Search | None = None) -> dict[str, Any]:
    """The figures of a point; one that cannot be has `refused` alone, with the reason.

    Args:
        settings: by the names of `AXES`.
        search: finds the degrees that are not given; None: those have their defaults.

    >>> found = figures_of_point({"model": "llama-3-8b", "machine": "h200-x8", "tp": 8, "global_batch": 8})
    >>> 0 < found["step_s"] < 5, found["degrees"]
    (True, 'tp 8, micro-batch 1 x 8, 1f1b, recompute none, optimizer level 0')
    """
    try:
        return _figures(settings, search)
    except TwofoldError as error:
        return {"refused": str(error)}


def predict(model: str, machine: str, **settings: Any) -> Forecast:
    """Predict step time and memory of a transformer for given degrees, as `twofold predict` does.

    Args:
        model: a name such as llama-3-8b, or a config.json.
        machine: a shipped machine, or a machine file.
        settings: settings by the names of `AXES`: degrees, batch, sequence, software, factors on the machine.

    Raises:
        TwofoldError: settings that are unknown or invalid, or that belong to a study: slow ranks, failures, prices.

    >>> predict("llama-3-8b", "h200-x8", tp=8, global_batch=8).peak_bytes > 16e9
    True
    """
    asked = {"model": model, "machine": machine, **settings}
    if further := [name for name in asked if name.partition(".")[0] in _OF_STUDIES]:
        raise TwofoldError(f"{further[0]} is a setting of studies, not of a forecast: use tf.study or `twofold study`")
    what, what_if = configured(asked)
    return what.forecast(what_if)


_OF_STUDIES = tuple(AXES)[tuple(AXES).index("slow") :]
"""Settings that come after those of a forecast in `AXES`."""


def configured(settings: Settings, search: Search | None = None) -> tuple[Configured, WhatIf]:
    """The configuration of a point on its machine, and what is changed; checkpoints and failures are not in it.

    Raises:
        TwofoldError: settings that are unknown or cannot be.
    """
    check_settings(settings)
    for name in ("model", "machine"):
        if name not in settings:
            raise TwofoldError(f"no {name} is given; state {name} in the base, or as an axis")
    config = _config(settings)
    stack = stack_named(settings.get("stack", "twofold"))
    what_if = _what_if(settings)
    machine, stack = on_host(_machine(settings, stack), stack, settings.get("host"))
    degrees = _degrees(settings, config, machine, what_if, stack, search)
    if settings.get("slow", "none") != "none":
        what_if = replace(what_if, slowdown=slow_ranks(settings["slow"].split(), Ranks.of(degrees)))
    return Configured(config=config, degrees=degrees, machine=machine, stack=stack), what_if


def _figures(settings: Settings, search: Search | None) -> dict[str, Any]:
    what, what_if = configured(settings, search)
    seen, machine = what.outcome(what_if), what.machine
    left = _goodput(settings, what, seen)
    num_devices, spares = what.degrees.num_ranks, settings.get("spares", 0)
    tokens = what.degrees.global_batch * what.config.seq
    figures = {
        "step_s": seen.step_s, "step_low_s": seen.low_s, "step_high_s": seen.high_s,
        "tokens_per_s": tokens / left.effective_step_s, "goodput": left.fraction,
        "effective_step_s": left.effective_step_s, "exposed_comm_s": seen.exposed_comm_s,
        "bubble_fraction": seen.bubble_fraction, "peak_bytes": seen.peak_bytes,
        "fits": seen.peak_bytes <= machine.room_bytes, "num_devices": num_devices,
        "degrees": describe(what.degrees),
    }  # fmt: skip
    if left.checkpoint_s:
        figures |= {"checkpoint_s": left.checkpoint_s, "best_checkpoint_every": left.best_every_steps}
    if "price_per_device_hour" in settings:
        if settings["price_per_device_hour"] < 0:
            raise TwofoldError(f"price_per_device_hour must be at least 0, not {settings['price_per_device_hour']:g}")
        hours = (num_devices + spares) * left.effective_step_s / 3600
        figures["price_per_1e9_tokens"] = settings["price_per_device_hour"] * hours / tokens * 1e9
    return {name: figures[name] for name in COLUMNS if name in figures}


def _config(settings: Settings) -> TransformerConfig:
    model = settings["model"]
    return _known_config(
        model, _written(model), settings.get("seq"), settings.get("layers"), settings.get("precision"),
        settings.get("capacity_factor"),
    )  # fmt: skip


@lru_cache(maxsize=256)
def _known_config(
    model: str, written: tuple[int, int], seq: int | None, layers: int | None, precision: str | None,
    capacity_factor: str | None,
) -> TransformerConfig:  # fmt: skip
    return transformer_config(model, seq=seq, num_layers=layers, precision=precision, capacity_factor=capacity_factor)


def _machine(settings: Settings, stack: Stack) -> Machine:
    """The machine with the host times of the execution, before changes."""
    name, devices = settings["machine"], settings.get("devices")
    if devices is not None and (named := re.fullmatch(r"(.+)-x\d+", name)) and not name.endswith(".json"):
        name = f"{named[1]}-x{devices}"
    machine, execution = _loaded(name, _written(name)), settings.get("execution")
    if stack.runs_programs:
        return executing(machine, execution or "graph")
    if execution is not None:
        raise TwofoldError(f"execution is for twofold's executor; omit it for {stack.name}")
    return machine


@lru_cache(maxsize=256)
def _loaded(name: str, written: tuple[int, int]) -> Machine:
    return Machine.load(name)


def _written(name: str) -> tuple[int, int]:
    """Time of writing and size of a file, so that a changed file is read again; zeros for other names."""
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        return 0, 0
    found = path.stat()
    return found.st_mtime_ns, found.st_size


def _what_if(settings: Settings) -> WhatIf:
    """Factors on the complete machine and on tiers of links."""
    factors: dict[str, Any] = {name: float(settings[name]) for name in KNOBS if name in settings}
    links: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        stem, dot, tier = name.partition(".")
        if dot and stem in KNOBS and value != 1:
            links.setdefault(tier, {})[stem] = float(value)
    changes = tuple(
        LinkChange(tier=int(tier) if tier.isdecimal() else tier, **changed) for tier, changed in links.items()
    )
    return WhatIf(**factors, links=changes)


def _degrees(
    settings: Settings, config: TransformerConfig, machine: Machine, what_if: WhatIf, stack: Stack,
    search: Search | None,
) -> Degrees:  # fmt: skip
    values: dict[str, Any] = {}
    for degree in DEGREES.values():
        if degree.flag in settings:
            value = settings[degree.flag]
            values[degree.name] = tuple(value) if isinstance(value, list) else value
    devices, batch = settings.get("devices"), settings.get("global_batch")
    fused = settings.get("fused", True) and machine.fuses
    if search is not None:
        count = machine.num_devices if devices is None else devices
        changed = what_if.machine(machine)
        return search(config, values, changed, stack, count, count if batch is None else batch)
    if devices is not None and "dp" not in values:
        others = [(name, values.get(name, 1)) for name in ("tp", "cp", "pp")]
        width = others[0][1] * others[1][1] * others[2][1]
        if devices % width:
            degrees_text = " x ".join(f"{name} {value}" for name, value in others)
            raise TwofoldError(f"{devices} devices cannot be spread over {degrees_text}: {devices} % {width} != 0")
        values["dp"] = devices // width
    elif devices is not None:
        given = values["dp"] * values.get("tp", 1) * values.get("cp", 1) * values.get("pp", 1)
        if given != devices:
            raise TwofoldError(f"the degrees use {given} devices, not {devices}; leave out dp or devices")
    if batch is None:
        batch = values.get("dp", 1) * values.get("micro_batch", 1) * values.get("pp", 1)
    is_half = config.dtype in ("bfloat16", "float16")
    wide = "float32" if settings.get("mixed_precision", True) and is_half else None
    optimizer = Optimizer(kind="adamw", settings={"lr": 1e-4}, gradient_dtype=wide, master_dtype=wide)
    return Degrees.of(values, global_batch=batch, optimizer=optimizer, fused=fused)


def _goodput(settings: Settings, what: Configured, seen: Outcome) -> Goodput:
    """The goodput with checkpoints, failures and spares."""
    checkpoints, failures = _checkpoints(settings, seen.step_s), _failures(settings)
    left = goodput(
        seen.step_s, what.degrees.num_ranks, checkpoints=checkpoints, failures=failures,
        checkpoint_bytes=0 if checkpoints is None else what.checkpoint_bytes,
    )  # fmt: skip
    if "spares" in settings or "repair_hours" in settings:
        if failures is None or "repair_hours" not in settings:
            raise TwofoldError("spares need mtbf_hours (time between failures) and repair_hours")
        waits = waiting_share(
            settings.get("spares", 0), what.degrees.num_ranks, device_mtbf_s=failures.device_mtbf_s,
            repair_s=3600 * settings["repair_hours"],
        )  # fmt: skip
        left = replace(left, effective_step_s=left.effective_step_s / (1 - waits))
    return left


def _checkpoints(settings: Settings, step_s: float) -> Checkpoints | None:
    every, minutes = settings.get("checkpoint_every"), settings.get("checkpoint_minutes")
    if every is not None and minutes is not None:
        raise TwofoldError("checkpoint_every and checkpoint_minutes set the same quantity; give one of them")
    if minutes is not None:
        if not minutes > 0:
            raise TwofoldError(f"checkpoint_minutes must be above 0, not {minutes!r}")
        every = max(1, round(60 * minutes / step_s))
    if every is None:
        for name in ("checkpoint_GBps", "checkpoint_async"):
            if name in settings:
                raise TwofoldError(f"{name} needs checkpoint_every or checkpoint_minutes, the time between checkpoints")
        return None
    return Checkpoints(
        every_steps=every, write_Bps=1e9 * settings.get("checkpoint_GBps", 1.0),
        blocking=not settings.get("checkpoint_async", False),
    )  # fmt: skip


def _failures(settings: Settings) -> Failures | None:
    hours = [value for name, value in settings.items() if name.partition(".")[0] == "mtbf_hours"]
    if not hours:
        if "restart_s" in settings:
            raise TwofoldError("restart_s needs mtbf_hours, the mean time between failures of a device")
        return None
    if bad := [value for value in hours if not value > 0]:
        raise TwofoldError(f"mtbf_hours must be above 0, not {bad[0]!r}")
    return Failures(device_mtbf_s=3600 / sum(1 / value for value in hours), restart_s=settings.get("restart_s", 0.0))
