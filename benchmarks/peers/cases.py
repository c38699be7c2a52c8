"""A plan that this executor and torch's parts run, and the work in its step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from benchmarks.peers.configs import MODELS
from costmodels import Machine
from plans.degrees import Degrees
from plans.model.transformer import TransformerConfig, transformer
from plans.optimizer import Optimizer, ParameterGroup
from plans.plan import Plan
from search import uniform_plan

__all__ = ["Case", "model_flops"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One plan that both sides run.

    Args:
        model: of `MODELS`.
        batch: sequences of a step, of all devices together.
        degrees: as `tf.uniform_plan` takes them.
        reduce_every: as in `plans.optimizer.Optimizer`.
        compiles: whether the peer is measured with torch.compile too where only a chosen part is.
        products: precision of the products in blocks, as `simulator.stacks.products.RECIPES` of torchao names it; ""
            is the model's own. Only the peer has others, always with torch.compile.
        parts: whose parts the peer is made of: "torch", or "megatron" for Megatron-Core's layers, schedules and
            optimizer.
    """

    model: str
    batch: int
    degrees: Mapping[str, Any] = field(default_factory=dict)
    reduce_every: str = "micro_batch"
    compiles: bool = False
    products: str = ""
    parts: str = "torch"

    @property
    def config(self) -> TransformerConfig:
        """The model's sizes."""
        return MODELS[self.model]

    @property
    def ranks(self) -> int:
        """Devices it takes."""
        return int(self.degree("dp") * self.degree("tp") * self.degree("pp"))

    @property
    def name(self) -> str:
        """Words of the model, the batch and the degrees, for tables and flags."""
        short = {
            "micro_batch": "mb", "zero": "level", "sequence_parallel": "sp", "schedule": "", "virtual": "x",
            "recompute": "",
        }  # fmt: skip
        said = [f"{short.get(key, key)}{'' if value is True else value}" for key, value in self.degrees.items()]
        more = [*(["once"] if self.reduce_every == "step" else []), *([self.products] if self.products else [])]
        more += [self.parts] if self.parts != "torch" else []
        return "-".join([self.model, f"b{self.batch}", *said, *more])

    def degree(self, name: str) -> int:
        """dp, tp, pp or virtual; 1 unless stated."""
        return int(self.degrees.get(name, 1))

    @property
    def optimizer(self) -> Optimizer:
        """AdamW in the dtype of the weights, gradients and reductions too; in single precision beside Megatron."""
        wider: Mapping[str, Any] = {}
        if self.parts == "megatron":
            undecayed = ParameterGroup(parameters=("*norm.weight", "*bias"), weight_decay=0.0)
            wider = {"gradient_dtype": "float32", "master_dtype": "float32", "groups": (undecayed,)}
        return Optimizer(kind="adamw", settings={"lr": 1e-4}, reduce_every=self.reduce_every, **wider)

    def machine(self, device: str = "h200") -> Machine:
        """As many devices of the catalogue as the case has ranks."""
        return Machine.load(f"{device}-x{self.ranks}")

    def plan(self) -> Plan:
        """The plan, as both sides read it."""
        graph = transformer(self.config, batch_size=self.batch)
        return uniform_plan(graph, self.machine(), optimizer=self.optimizer, **self.degrees)

    def degrees_value(self) -> Degrees:
        """The same degrees, as forecasts take them."""
        optimizer = msgspec.structs.replace(self.optimizer, parallel_level=self.degrees.get("zero", 0))
        return Degrees.of(dict(self.degrees), global_batch=self.batch, optimizer=optimizer)


def model_flops(config: TransformerConfig, batch: int) -> float:
    """Floating-point operations of one step, without recomputation.

    6 per parameter of a product and token, and 6 layers batch heads head_dim seq^2 of causal attention, half of what a
    whole score matrix takes (Narayanan et al. 2021, arXiv 2104.04473, appendix). A mixture counts the chosen experts.
    """
    tables = config.vocab * config.hidden + (config.seq * config.hidden if config.position == "learned" else 0)
    products = config.num_active_parameters - tables
    wide = config.num_heads * config.head_size
    return 6.0 * batch * config.seq * (products + config.num_layers * wide * config.seq)
