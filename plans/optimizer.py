"""The optimizer of a plan: its kind and settings, how it is sharded, and the dtypes of its values.

docs/optimizer-parallel.md describes the levels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real

import msgspec

from plans.errors import TwofoldError, number
from plans.model.graph import Graph, Tensor, itemsize, matches_any, patterns_of_parts

__all__ = ["Optimizer", "ParameterGroup"]

_MOST = {"beta1": 1.0, "beta2": 1.0}
"""Settings that must be below a number, as in torch; all are finite and at least 0."""

_FLOATS = ("float64", "float32", "bfloat16", "float16")


class ParameterGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters that are updated with settings of their own.

    Args:
        parameters: patterns (as in fnmatch) of their names, such as "*bias".
        weight_decay: None: as in the settings of the optimizer.
        lr_scale: factor of the learning rate, also of a scheduled one.

    Raises:
        TwofoldError: no pattern, or a negative or infinite number.

    >>> ParameterGroup(parameters=("*bias", "*norm*"), weight_decay=0.0).lr_scale
    1.0
    """

    parameters: tuple[str, ...]
    weight_decay: float | None = None
    lr_scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.parameters:
            raise TwofoldError("a parameter group has no parameters; list patterns of names, such as '*bias'")
        for name in ("weight_decay", "lr_scale"):
            value = getattr(self, name)
            if value is not None and not 0 <= number(f"{name} of a parameter group", value) < math.inf:
                raise TwofoldError(f"{name} of a parameter group must be finite and at least 0, not {value!r}")


class Optimizer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The optimizer, its sharding over the data-parallel group, and its dtypes.

    Args:
        kind: "sgd", "momentum" or "adamw".
        settings: learning rate and others, e.g. {"lr": 0.01}.
        parallel_level: what is sharded: 0 nothing; 1 optimizer states and master weights; 2 gradients too; 3 weights
            too, which are gathered block by block for each use (table in docs/optimizer-parallel.md).
        threshold_bytes: parameters smaller than this are not sharded.
        bucket_bytes: size up to which parameters are reduced and gathered together (25 MiB as in torch's
            DistributedDataParallel); at level 3 a bucket is a block. 0: one bucket per parameter.
        prefetch: for level 3: number of blocks by which a gather is issued ahead of its compute.
        reduce_every: for levels 2 and 3: "micro_batch": reduce after each backward and accumulate shards; "step":
            accumulate full gradients and reduce them once.
        gradient_dtype: dtype of accumulated gradients; None: as the weight.
        reduce_dtype: dtype of gradients while they are reduced; None: as accumulated.
        master_dtype: dtype of master weights, from which the weights of the graph are rounded; None: no master weights.
        state_dtype: dtype of the optimizer states; None: as the updated weights.
        clip_norm: largest norm of all gradients; None: no clipping.
        groups: parameters with settings of their own; of several groups that match a name, the first one counts.

    Raises:
        TwofoldError: an unknown name, or an invalid setting, level or size.

    >>> megatron = Optimizer(kind="adamw", gradient_dtype="float32", master_dtype="float32")
    >>> megatron.bytes_per_element("bfloat16")  # weight 2, gradient 4, master 4, states 8
    18
    >>> Optimizer(kind="adamw").bytes_per_element("bfloat16")
    8
    """

    kind: str = "sgd"
    settings: dict[str, float] = msgspec.field(default_factory=lambda: {"lr": 0.01})
    parallel_level: int = 0
    threshold_bytes: int = 64 * 1024
    bucket_bytes: int = 25 * 2**20
    prefetch: int = 1
    reduce_every: str = "micro_batch"
    gradient_dtype: str | None = None
    reduce_dtype: str | None = None
    master_dtype: str | None = None
    state_dtype: str | None = None
    clip_norm: float | None = None
    groups: tuple[ParameterGroup, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("sgd", "momentum", "adamw"):
            raise TwofoldError(f"optimizer {self.kind!r} is not known; known: sgd, momentum, adamw")
        known = {"lr", "weight_decay"} | {
            "sgd": set(), "momentum": {"momentum", "dampening", "nesterov"}, "adamw": {"beta1", "beta2", "eps"}
        }[self.kind]  # fmt: skip
        if unknown := set(self.settings) - known:
            raise TwofoldError(f"optimizer {self.kind!r} has no setting {sorted(unknown)}; it has {sorted(known)}")
        for name, value in self.settings.items():
            most = _MOST.get(name, math.inf)
            if not isinstance(value, Real) or not 0 <= value < most:
                below = "" if most == math.inf else f" and below {most:g}"
                raise TwofoldError(f"optimizer setting {name} must be at least 0{below}, not {value!r}")
        if "lr" not in self.settings:
            raise TwofoldError(f"optimizer {self.kind!r} needs a learning rate: settings {{'lr': 0.01}}")
        if self.parallel_level not in range(4):
            raise TwofoldError(f"optimizer parallel level {self.parallel_level} is not known; levels are 0, 1, 2 and 3")
        if self.bucket_bytes < 0 or self.prefetch < 0:
            raise TwofoldError(
                f"bucket_bytes={self.bucket_bytes} and prefetch={self.prefetch} must not be negative; 0 means none"
            )
        if self.reduce_every not in ("micro_batch", "step"):
            raise TwofoldError(f"reduce_every {self.reduce_every!r} is not known: micro_batch or step")
        for name in ("gradient_dtype", "reduce_dtype", "master_dtype", "state_dtype"):
            if (dtype := getattr(self, name)) not in (None, *_FLOATS):
                raise TwofoldError(f"{name} {dtype!r} is not known: {', '.join(_FLOATS)}")
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise TwofoldError(f"clip_norm must be finite and above 0, not {self.clip_norm}; None disables clipping")

    def __hash__(self) -> int:
        return hash((self.kind, tuple(sorted(self.settings.items())), *msgspec.structs.astuple(self)[2:]))

    def settings_of(self, parameter: str) -> dict[str, float]:
        """The settings of a parameter's update.

        >>> biases = ParameterGroup(parameters=("*bias",), weight_decay=0.0)
        >>> Optimizer(kind="adamw", groups=(biases,)).settings_of("head.bias")
        {'lr': 0.01, 'weight_decay': 0.0}
        """
        found = dict(self.settings)
        group = next((each for each in self.groups if matches_any(parameter, each.parameters)), None)
        if group is not None and group.weight_decay is not None:
            found["weight_decay"] = group.weight_decay
        if group is not None and group.lr_scale != 1:
            found["lr_scale"] = group.lr_scale
        return found

    def for_parts(self, graph: Graph) -> Optimizer:
        """This optimizer with groups that match the parameters of a graph by the names of its module."""
        groups = [
            msgspec.structs.replace(each, parameters=patterns_of_parts(graph, each.parameters)) for each in self.groups
        ]
        return msgspec.structs.replace(self, groups=tuple(groups))

    @property
    def num_states(self) -> int:
        """The number of optimizer state tensors per parameter."""
        return {"sgd": 0, "momentum": 1, "adamw": 2}[self.kind]

    @property
    def reduced_per_micro_batch(self) -> bool:
        """Whether sharded gradients are reduced after each backward."""
        return self.parallel_level >= 2 and self.reduce_every == "micro_batch"

    def accumulates_in(self, dtype: str) -> str:
        """The dtype in which the gradients of a weight of `dtype` are accumulated."""
        return self.gradient_dtype or dtype

    def reduces_in(self, dtype: str) -> str:
        """The dtype in which the gradients of a weight of `dtype` are reduced."""
        return self.reduce_dtype or self.accumulates_in(dtype)

    def updates_in(self, dtype: str) -> str:
        """The dtype of the weight that the optimizer updates: the master weight's where there is one."""
        return self.master_dtype or dtype

    def keeps_states_in(self, dtype: str) -> str:
        """The dtype of the optimizer states of a weight of `dtype`."""
        return self.state_dtype or self.updates_in(dtype)

    def bytes_per_element(self, dtype: str) -> int:
        """Bytes of weight, accumulated gradient, master weight and states per element of a weight that is not cut."""
        held = [dtype, self.accumulates_in(dtype)] + self.num_states * [self.keeps_states_in(dtype)]
        held += [self.updates_in(dtype)] * self.has_master(dtype)
        return sum(itemsize(each) for each in held)

    def bytes_of(self, parameters: Iterable[Tensor]) -> int:
        """Bytes of the weights, gradients, master weights and states of parameters, not sharded."""
        return sum(tensor.num_elements * self.bytes_per_element(tensor.dtype) for tensor in parameters)

    def has_master(self, dtype: str) -> bool:
        """Whether a weight of `dtype` has a master weight next to it."""
        return self.updates_in(dtype) != dtype
