"""How the work of one pipeline stage is split and run: the key of most tables of the search over degrees."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

from costmodels import Group

__all__ = [
    "StageConfig",
    "in_any_order",
    "in_any_place",
    "in_order",
    "with_one_backward",
    "without_experts",
    "without_recompute",
]


@dataclass(frozen=True, slots=True, order=True)
class StageConfig:
    """How the work of one pipeline stage is split and run.

    Args:
        tp, cp, ep, sequence_parallel, micro_batch, recompute: as in `plans.degrees.Degrees`.
        split: whether the backward is split into input and weight gradients.
        tier_override: the link tiers of the groups inside a stage, where they differ from the conventional order's.
        order: order of the axes; needed for the optimizer's communication and for transfers between stages. () stands
            for any order with the same tiers inside a stage.
    """

    tp: int
    cp: int
    sequence_parallel: bool
    micro_batch: int
    recompute: str
    split: bool
    ep: int = 1
    tier_override: tuple[tuple[str, Group], ...] = ()
    order: tuple[str, ...] = ()
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        values = (
            self.tp, self.cp, self.sequence_parallel, self.micro_batch, self.recompute, self.split, self.ep,
            self.tier_override, self.order,
        )  # fmt: skip
        object.__setattr__(self, "_hash", hash(values))  # a key of many dictionaries

    def __hash__(self) -> int:
        return self._hash


@lru_cache(maxsize=65_536)
def in_order(stage: StageConfig, order: tuple[str, ...]) -> StageConfig:
    """The same stage with an order of the axes."""
    return replace(stage, order=order)


@lru_cache(maxsize=65_536)
def in_any_order(stage: StageConfig) -> StageConfig:
    """The same stage for all orders of the axes with these tiers inside a stage."""
    return replace(stage, order=()) if stage.order else stage


@lru_cache(maxsize=65_536)
def in_any_place(stage: StageConfig) -> StageConfig:
    """The same stage for all placements: memory does not depend on them."""
    return replace(stage, order=(), tier_override=()) if stage.order or stage.tier_override else stage


@lru_cache(maxsize=65_536)
def without_recompute(stage: StageConfig) -> StageConfig:
    """The same stage with every activation kept."""
    return replace(stage, recompute="none")


@lru_cache(maxsize=65_536)
def with_one_backward(stage: StageConfig) -> StageConfig:
    """The same stage with a backward in one part, which its forward does not depend on."""
    return replace(stage, split=False) if stage.split else stage


@lru_cache(maxsize=65_536)
def without_experts(stage: StageConfig) -> StageConfig:
    """The same stage for pieces that have no experts: they do not depend on ep."""
    tiers = tuple((name, group) for name, group in stage.tier_override if name != "ep")
    return replace(stage, ep=1, tier_override=tiers) if stage.ep > 1 else stage
