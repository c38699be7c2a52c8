"""The forward of a plan alone, on the plan's ranks, with its loss and the inputs of the loss.

An evaluation is a separate plan: the same graph with weights as constants, with running statistics and without dropout.
Without gradients a step consists of its forwards, so lowering and execution need no special case.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from executor.data.batches import as_read
from executor.device import Device
from executor.kernels.context import torch_dtype
from executor.step.code import Code
from executor.step.groups import Groups
from executor.step.interpreter import Batch, Interpreter
from executor.weights.copied import copy_weights
from executor.weights.initial import as_array
from executor.weights.module_weights import as_graph
from plans.errors import TwofoldError
from plans.layout import TensorLayout
from plans.lower import lower
from plans.lower.loss import loss_operator
from plans.model.graph import Attr, Graph, Operator
from plans.optimizer import Optimizer
from plans.plan import Plan
from plans.program import Program

__all__ = ["Evaluation", "Evaluator", "evaluate", "evaluation_plan", "is_classifier"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """The outcome of an evaluation.

    Args:
        losses: of every batch, the mean over its samples; on all ranks.
        outputs: inputs of the loss, such as logits, for every batch: rows of the full batch, on rank 0 if they were
            asked for; else empty.
        accuracy: of a classifier (`is_classifier`) the share of samples whose largest logit is that of the label,
            without samples that the loss ignores; None for other models.
    """

    losses: tuple[float, ...]
    outputs: tuple[npt.NDArray[Any], ...] = ()
    accuracy: float | None = None

    @property
    def loss(self) -> float:
        """The mean over the batches."""
        return float(np.mean(self.losses))


def is_classifier(graph: Graph) -> bool:
    """Whether the loss is the cross entropy of one row of logits and one whole number for every sample.

    >>> from plans.model.transformer import transformer
    >>> is_classifier(transformer("gpt2", num_layers=1))
    False
    """
    loss = loss_operator(graph)
    if loss.kind != "cross_entropy":
        return False
    logits, labels = (graph.tensors[name] for name in loss.inputs[:2])
    return (
        len(logits.shape) == 2 and labels.shape == logits.shape[:1] == (graph.batch_size,) and labels.dtype == "int64"
    )


def evaluation_plan(plan: Plan) -> Plan:
    """The plan of the forward alone.

    >>> from plans.layout import Layout
    >>> from plans.model.mlp import mlp_graph
    >>> from plans.plan import Stage
    >>> graph = mlp_graph([8, 4, 2], 16)
    >>> stage = Stage(mesh=Layout((1,), ("dp",)), operators=tuple(each.name for each in graph.operators))
    >>> program = lower(evaluation_plan(Plan(graph=graph, stages=(stage,))))
    >>> {line.part for group in program.groups for _, line in group.walk() if line.call != "load"}
    {'F'}
    """
    return msgspec.structs.replace(
        plan, graph=_untrained(plan.graph), optimizer=Optimizer(), recompute=(), overlap_pairs=False,
        memory_limit_bytes=None, execution="eager", fused=False, output_broadcast=True,
        redistributions=(), prediction=None,
    )  # fmt: skip


def _untrained(graph: Graph) -> Graph:
    tensors = {
        name: msgspec.structs.replace(tensor, kind="constant") if tensor.kind == "parameter" else tensor
        for name, tensor in graph.tensors.items()
    }
    operators = tuple(
        msgspec.structs.replace(operator, attrs=operator.attrs | _evaluated(operator)) for operator in graph.operators
    )
    return msgspec.structs.replace(graph, tensors=tensors, operators=operators)


def _evaluated(operator: Operator) -> dict[str, Attr]:
    """The settings of an operator that an evaluation changes."""
    if operator.kind == "assign" or (operator.kind == "batch_statistics" and len(operator.inputs) > 1):
        return {"frozen": True}
    return {"p": 0.0} if "p" in operator.attrs else {}


def evaluate(
    plan: Plan,
    feed: Iterable[Batch],
    parameters: Mapping[str, Any],
    *,
    device: Device,
    outputs: bool = False,
    timeout_s: float = 60.0,
) -> Evaluation:
    """Run the forward of a plan on every batch, on this rank; all ranks of the plan must call it.

    Args:
        plan: as for training. Values that the optimizer's level shards are complete here: a rank holds the weights that
            its strategies give it.
        feed: name of an input -> rows, as for `run_rank`.
        parameters: name in the module -> full array of a weight or constant.
        device: device of this rank; the default process group has been joined, unless the plan has one rank.
        outputs: whether rank 0 collects the inputs of the loss.
        timeout_s: after which a rank that waits for another one gives up.

    Raises:
        TwofoldError: bad input, no batch.
    """
    evaluator = Evaluator(plan, parameters, device, timeout_s)
    found = evaluator.run(feed, outputs=outputs)
    evaluator.close()
    return found


class Evaluator:
    """The forward of a plan on this rank, ready to run. All ranks of the plan create one and call the same methods.

    Args:
        plan: as for training.
        parameters: name in the module -> full array of a weight or constant.
        device: device of this rank.
        timeout_s: after which a rank that waits for another one gives up.
    """

    def __init__(self, plan: Plan, parameters: Mapping[str, Any], device: Device, timeout_s: float = 60.0) -> None:
        forward = evaluation_plan(plan)
        program = lower(forward)
        alone = program.num_ranks == 1
        self._groups = None if alone else Groups(program, device, timeout_s)
        self._graph, self._loss = forward.graph, loss_operator(forward.graph)
        rank = 0 if alone else dist.get_rank()
        self._forward = _Forward(program, rank, device, self._groups, self._loss.name)
        self._forward.set_parameters(as_graph(plan.graph, parameters))
        self._predicted = _Read.of(plan, _index_of_model(plan))
        self._labels = _Read.of(plan, 1) if is_classifier(plan.graph) else None

    def take(self, program: Program, training: Interpreter) -> None:
        """Copy the current weights and running statistics of training."""
        copy_weights(program, training, self._forward)

    def run(self, feed: Iterable[Batch], *, outputs: bool = False) -> Evaluation:
        """Compute the loss of every batch, and the values that rank 0 collects.

        Raises:
            TwofoldError: no batch.
        """
        losses, found, right = [], [], torch.zeros(2, dtype=torch.int64)  # of how many
        for batch in as_read(self._graph, feed):
            loss, parts = self._forward.evaluate(batch)
            losses.append(loss)
            if not outputs and self._labels is None:
                continue
            predicted = self._predicted.gathered(self._forward, parts)
            labels = None if self._labels is None else self._labels.gathered(self._forward, parts)
            if predicted is not None and outputs:
                found.append(predicted)
            if predicted is not None and labels is not None:
                kept = labels != self._loss.attrs.get("ignore_index", -100)
                hits = (predicted.argmax(axis=1) == labels)[kept]
                right += torch.tensor([hits.sum(), hits.size])
        if not losses:
            raise TwofoldError("the data have no batch to evaluate; give at least one")
        right = right.to(self._forward.device.torch_device)
        if self._labels is not None and self._groups is not None:
            dist.broadcast(right, 0)
        hits_in_all, counted = right.tolist()
        return Evaluation(
            losses=tuple(losses), outputs=tuple(found), accuracy=hits_in_all / counted if counted else None
        )  # fmt: skip

    def close(self) -> None:
        """Close the groups."""
        if self._groups is not None:
            dist.barrier()  # nobody closes a connection that another still reads from
            self._groups.close()


def _index_of_model(plan: Plan) -> int:
    """The index of the input of the loss that comes from the model."""
    graph = plan.slice_graph
    trained = graph.needs_gradient()
    return next(at for at, name in enumerate(loss_operator(graph).inputs) if name in trained)


class _Forward(Interpreter):
    """A rank that keeps the inputs of the loss operator."""

    def __init__(self, program: Program, rank: int, device: Device, groups: Groups | None, loss: str) -> None:
        super().__init__(program, rank, device, groups)
        self._loss_name = loss

    @torch.inference_mode()
    def evaluate(self, batch: Batch) -> tuple[float, dict[int, tuple[Tensor, ...]]]:
        """The loss of a batch, and of every slice all that the loss reads here."""
        read: dict[int, tuple[Tensor, ...]] = {}
        micro_batches = {slot: micro_batch for (_, micro_batch), slot in self._slots.items()}

        def run(code: Code) -> None:
            line = code.instruction
            if line.operator == self._loss_name and line.call.endswith(".forward"):
                number, count = line.attrs.get("slice", (0, 1))
                values = tuple(self._env[slot].clone() for slot in code.reads)
                read[(micro_batches[code.reads[0]] or 0) * count + number] = values
            code.run()

        self.begin(self.checked(batch))
        self.issue(run)
        self.device.synchronize()
        loss = self.end()
        assert loss is not None  # output_broadcast
        return float(loss), read


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """The loss's input number `index`, of one slice in `layout`."""

    index: int
    shape: tuple[int, ...]
    dtype: str
    layout: TensorLayout
    num_slices: int

    @classmethod
    def of(cls, plan: Plan, index: int) -> _Read:
        graph = plan.slice_graph
        loss = loss_operator(graph)
        strategy = plan.strategy(loss)
        mesh = strategy.mesh or plan.stages[plan.stage_of()[loss.name]].mesh
        tensor = graph.tensors[loss.inputs[index]]
        return cls(
            index=index, shape=tensor.shape, dtype=tensor.dtype, num_slices=plan.num_slices,
            layout=graph.spec(loss).input_layout(index, mesh, strategy.dims),
        )  # fmt: skip

    @torch.inference_mode()
    def gathered(self, forward: _Forward, parts: Mapping[int, tuple[Tensor, ...]]) -> npt.NDArray[Any] | None:
        """The rows of the full batch on rank 0, None elsewhere; each region comes from the lowest rank that has it."""
        rank, device = forward.rank, forward.device
        owners: dict[tuple[tuple[int, int], ...], int] = {}
        for member in sorted(self.layout.mesh.rank_list):
            owners.setdefault(self.layout.region(member, self.shape), member)
        local = (self.num_slices, *self.layout.local_shape(self.shape))
        whole = torch.empty((self.num_slices, *self.shape), dtype=torch_dtype(self.dtype)) if rank == 0 else None
        for region, owner in owners.items():
            mine = torch.stack([parts[number][self.index] for number in sorted(parts)]) if rank == owner else None
            if whole is None:
                if mine is not None:
                    dist.send(mine, 0)
                continue
            if mine is None:
                mine = torch.empty(local, dtype=whole.dtype, device=device.torch_device)
                dist.recv(mine, owner)
            whole[(slice(None), *(slice(*ends) for ends in region))] = mine.cpu()
        if whole is None:
            return None
        return as_array(whole.flatten(0, 1))
