"""`twofold predict`: predict step time and memory of a transformer for given degrees."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from plans.degrees import DEGREES
from plans.errors import TwofoldError
from twofold.commands.degree_options import DegreeOptions
from twofold.commands.options import FileOutput, MachineFactors, MachineOption, Word, given
from twofold.commands.values import AtLeast1, HtmlFile, flag

if TYPE_CHECKING:
    from twofold.console import Console

__all__ = ["Predict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Predict:
    """Predict step time and memory of a transformer for given degrees, on any number of devices.

    Args:
        model: a name such as llama-3-8b, or a Hugging Face config.json.
        global_batch: sequences per step; by default one micro-batch per data-parallel and pipeline rank.
        seq: tokens per sequence; by default the model's.
        layers: number of blocks; by default the model's.
        precision: dtype of weights and activations: bfloat16, float16 or float32; by default the model's.
        mixed_precision: float32 gradients, master weights and optimizer states with half-precision weights; on by
            default.
        capacity_factor: places at an expert over an even share of a sample's choices, or dropless: a place for every
            token; by default the model's.
        stack: software that runs the step: twofold, torch, torch-compile, torch-2024, torch-2024-compile, torchtitan,
            torchtitan-compile, torchtitan-async, megatron, megatron-2022, megatron-deepspeed, mindspore, zero-bubble.
            megatron and the compiled ones take a suffix for the precision of linears: -float8, -float8-current,
            -float8-rowwise, -float8-block, -mxfp8, -nvfp4; all take -tf32.
        host: file of `twofold calibrate --host` with the host's times to issue kernels.
        execution: for twofold's executor: graph (one launch per step, the default) or eager.
        fused: for twofold's executor: fuse runs of memory-bound instructions into single kernels; on by default.
        report: write the figures, where time and memory go and what limits them to this HTML file.
    """

    model: Word
    target: MachineOption
    global_batch: AtLeast1 | None = None
    seq: AtLeast1 | None = None
    layers: AtLeast1 | None = None
    precision: str | None = None
    mixed_precision: bool = True
    capacity_factor: str | None = None
    stack: str = "twofold"
    host: str | None = None
    execution: str | None = None
    fused: bool = True
    report: HtmlFile | None = None
    degrees: DegreeOptions = field(default_factory=DegreeOptions)
    factors: MachineFactors = field(default_factory=MachineFactors)
    output: FileOutput = field(default_factory=FileOutput)

    def run(self, console: Console) -> tuple[dict[str, Any], bool]:
        """Forecast the configuration."""
        from plans.model.transformer import config_remarks
        from simulator.study.point import configured
        from twofold.commands.forecasts import show_forecast

        what, what_if = configured(self._settings())
        for remark in config_remarks(self.model, seq=self.seq, capacity_factor=self.capacity_factor):
            console.print(remark)
        return show_forecast(
            what.config, what.degrees, what_if.machine(what.machine), what.stack, console, self.report
        ), True

    def _settings(self) -> dict[str, Any]:
        """The given options, by the names of settings."""
        factors = given(self.factors)
        if several := [name for name, values in factors.items() if len(values) > 1]:
            raise TwofoldError(
                f"{flag(several[0])} has several values, but predict takes one; use `twofold whatif` or `twofold study`"
            )
        flags = [degree.flag for degree in DEGREES.values()]
        settings = {name: getattr(self, name) for name in _OPTIONS} | dict(
            zip(flags, self.degrees.values.values(), strict=True)
        )
        settings |= {"machine": self.target.machine} | {name: values[0] for name, values in factors.items()}
        return {name: value for name, value in settings.items() if value is not None}


_OPTIONS = (
    "model",
    "global_batch",
    "seq",
    "layers",
    "precision",
    "mixed_precision",
    "capacity_factor",
    "stack",
    "host",
    "execution",
    "fused",
)
