"""`Model(...).train(...)` inside launched ranks: plan, lower and run a wrapped network.

Every rank runs the user's script. Rank 0 captures the network, searches, and broadcasts the plan as JSON; then all
ranks run the same program. Start the script with `twofold run SCRIPT --devices 8` or with torchrun.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from plans.errors import TwofoldError
from plans.model.graph import Graph
from plans.optimizer import Optimizer
from plans.plan import Plan, Strategy, check_execution, plan_from_json, plan_to_json
from twofold.mindspore.context import ParallelMode
from twofold.mindspore.optimizers import optimizer_of_torch
from twofold.mindspore.wrappers import Wrapped, unwrap

if TYPE_CHECKING:
    from executor.device import Device
    from executor.train.evaluate import Evaluation
    from executor.train.result import RankResult

__all__ = ["LossMonitor", "Model", "RunContext"]

MACHINE_VARIABLE, GRAPHS_VARIABLE, LOGS_VARIABLE = "TWOFOLD_MACHINE", "TWOFOLD_SAVE_GRAPHS", "TWOFOLD_LOG_DIR"
PLANNING_TIMEOUT_S = 900.0  # the other ranks wait while rank 0 plans; a rank that fails is noticed by the launcher


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """The state that a callback receives after a step.

    Args:
        epoch, step: counted from 1; the step within the epoch.
        loss: mean over the batch; None on ranks that do not have it.
        is_last_step: whether it is the last step of the epoch.
        sink_mode: whether the data set is read in sink mode.
    """

    epoch: int
    step: int
    loss: float | None
    is_last_step: bool
    sink_mode: bool


class LossMonitor:
    """Prints `epoch: 1 step: 100, loss is 2.31...` on ranks that have the loss.

    Args:
        per_print_times: print every n-th step. In sink mode the last step of an epoch is always printed, and with the
            default (1) no other.

    Raises:
        TwofoldError: per_print_times below 1.

    >>> monitor = LossMonitor(per_print_times=100)  # for Model.train(..., callbacks=[monitor])
    """

    def __init__(self, per_print_times: int = 1) -> None:
        if isinstance(per_print_times, bool) or not isinstance(per_print_times, int) or per_print_times < 1:
            raise TwofoldError(f"LossMonitor: per_print_times must be an int of at least 1, not {per_print_times!r}")
        self.per_print_times = per_print_times

    def __call__(self, context: RunContext) -> None:
        """Print the loss if this step is due."""
        if context.loss is None:
            return
        due = context.step % self.per_print_times == 0 and not (context.sink_mode and self.per_print_times == 1)
        if due or (context.sink_mode and context.is_last_step):
            print(f"epoch: {context.epoch} step: {context.step}, loss is {context.loss:.9g}", flush=True)


class Model:
    """A wrapped network with its optimizer, ready to train.

    Args:
        network: `AutoParallel`, or `PipelineCell` after `set_auto_parallel_context`.
        optimizer: a torch.optim.SGD or AdamW over the network's parameters, or a `twofold.Optimizer`.
        machine: name or path of the machine to plan for; by default TWOFOLD_MACHINE of the environment, else a shipped
            one.
        execution: "graph" (a step is one launch, if the device supports it) or "eager".

    Raises:
        TwofoldError: a network without a parallel wrapper, an unsupported optimizer.

    >>> network = AutoParallel(WithLossCell(net, loss_fn), parallel_mode="recursive_programming")  # doctest: +SKIP
    >>> Model(network, torch.optim.SGD(net.parameters(), 1e-2)).train(10, dataset)  # doctest: +SKIP
    """

    def __init__(
        self, network: Any, optimizer: Any = None, *, machine: str | os.PathLike[str] | None = None,
        execution: str = "graph",
    ) -> None:  # fmt: skip
        self.wrapped = unwrap(network)
        self.optimizer = _optimizer(optimizer, self.wrapped)
        self.machine = machine
        check_execution(execution)
        self.execution = execution
        self.plan: Plan | None = None
        self.result: RankResult | None = None

    def train(
        self,
        epoch: int,
        train_dataset: Any,
        callbacks: Callable[[RunContext], None] | Sequence[Callable[[RunContext], None]] = (),
        dataset_sink_mode: bool = False,
        *,
        weights_back: bool = True,
    ) -> RankResult:
        """Train on every batch of the data set, `epoch` times.

        Afterwards the network has the trained weights on every rank. It can be used, saved with
        `torch.save(network.state_dict(), path)` on rank 0, evaluated, or trained further.

        Args:
            epoch: number of passes over the data set.
            train_dataset: an `ArrayDataset`, or any sized iterable of (x, y) batches of one shape: full batches with
                full_batch, this rank's part of them without.
            callbacks: called after every step with a `RunContext`.
            dataset_sink_mode: a thread loads batches onto the device before the step needs them.
            weights_back: False does not copy the weights into the network, which must fit the memory of a rank's host;
                the result of rank 0 has the weights by name.

        Raises:
            TwofoldError: not inside launched ranks, an invalid stage configuration, no plan that fits the memory, or an
                error of the search.
        """
        from executor.data.batches import batches_of, placed
        from executor.data.prefetch import Prefetcher
        from executor.train.options import RunOptions
        from executor.train.run import run_rank
        from executor.weights.initial import get_seed
        from executor.weights.models import InitialParameters
        from executor.weights.returned import take_back
        from executor.weights.same_start import check_same_start
        from plans.lower import lower

        if epoch < 1:
            raise TwofoldError(f"train({epoch} epochs): nothing to do")
        device = self._joined(train_dataset)
        plan = self.plan = self._shared_plan(next(iter(train_dataset)), device)
        steps, per_epoch = epoch * len(train_dataset), len(train_dataset)
        observers = [callbacks] if callable(callbacks) else list(callbacks)

        def on_step(step: int, loss: float | None) -> None:
            context = RunContext(
                epoch=step // per_epoch + 1, step=step % per_epoch + 1, loss=loss,
                is_last_step=(step + 1) % per_epoch == 0, sink_mode=dataset_sink_mode,
            )  # fmt: skip
            for callback in observers:
                callback(context)

        check_same_start(self.wrapped.module, device)
        fed = _fed_graph(plan)
        feed: Iterable[dict[str, Any]] = batches_of(fed, _epochs(train_dataset, epoch))
        ahead = Prefetcher(placed(feed, device)) if dataset_sink_mode else None
        try:
            self.result = run_rank(
                lower(plan), plan, feed if ahead is None else ahead,
                InitialParameters(self.wrapped.module, get_seed()), steps, device=device,
                options=RunOptions(on_step=on_step),
            )  # fmt: skip
        finally:
            if ahead is not None:
                ahead.close()
        if weights_back:
            take_back(self.wrapped.module, self.result.weights, device)
        return self.result

    def eval(self, dataset: Any, *, outputs: bool = False) -> Evaluation:
        """Compute the loss of every batch of a data set with the forward alone, on the plan's ranks.

        The plan is that of `train`, or is searched in the same way. There is no dropout.

        Args:
            dataset: as for `train`.
            outputs: whether rank 0 also gets the inputs of the loss, such as logits, for every batch.

        Raises:
            TwofoldError: as `train`.
        """
        from executor.data.batches import batches_of
        from executor.train.evaluate import evaluate
        from executor.weights.initial import get_seed
        from executor.weights.models import InitialParameters

        device = self._joined(dataset)
        if self.plan is None:
            self.plan = self._shared_plan(next(iter(dataset)), device)
        feed = batches_of(_fed_graph(self.plan), dataset)
        parameters = InitialParameters(self.wrapped.module, get_seed())
        return evaluate(self.plan, feed, parameters, device=device, outputs=outputs)

    def _joined(self, dataset: Any) -> Device:
        """Join the other ranks and return this rank's device."""
        from executor.device import pick_device
        from executor.step.groups import connect

        if not isinstance(dataset, Sized):
            raise TwofoldError(
                f"a data set is an iterable of batches with a length, such as a list or a DataLoader, not "
                f"{type(dataset).__name__}"
            )
        if len(dataset) < 1:
            raise TwofoldError("a data set without batches: nothing to do")
        if "WORLD_SIZE" not in os.environ:
            raise TwofoldError(
                "Model.train and Model.eval run inside launched ranks: start the script with `twofold run SCRIPT "
                "--devices 8`"
            )
        device = pick_device("auto")
        device.use()
        connect(device, PLANNING_TIMEOUT_S)
        return device

    def _shared_plan(self, batch: Sequence[Any], device: Device) -> Plan:
        """Make the plan on rank 0 and broadcast it as JSON."""
        from executor.launch.broadcast import broadcast_from_rank_0

        num_ranks = int(os.environ["WORLD_SIZE"])
        if int(os.environ["RANK"]) == num_ranks - 1:  # the rank whose output is streamed
            print("rank 0 captures the network and searches a plan", flush=True)
        return plan_from_json(
            broadcast_from_rank_0(lambda: plan_to_json(self.planned(batch, num_ranks, device.kind)), device)
        )

    def planned(self, batch: Sequence[Any], num_ranks: int, device_kind: str) -> Plan:
        """Search the plan of `train`.

        Args:
            batch: a batch of the data set.
            num_ranks: number of ranks.
            device_kind: "cpu", "cuda" or "npu"; it selects the machine if none is given.

        Raises:
            TwofoldError: see `train`.
        """
        from costmodels import Machine
        from executor.capture.capture import capture
        from executor.stages import assign_stages, configured_stages
        from search import search

        settings, module = self.wrapped.settings, self.wrapped.module
        machine = Machine.load(self.machine or os.environ.get(MACHINE_VARIABLE) or _shipped(device_kind))
        if settings.num_stages < 1 or num_ranks % settings.num_stages:
            raise TwofoldError(f"{settings.num_stages} pipeline stages do not divide {num_ranks} ranks")
        parts = 1 if settings.full_batch else num_ranks // settings.num_stages
        is_batch = isinstance(batch, list | tuple) and all(len(getattr(array, "shape", ())) > 0 for array in batch)
        if not is_batch:
            raise TwofoldError(
                "the data set does not give batches, tuples of arrays with the samples along dim 0: put its samples "
                "together with torch.utils.data.DataLoader(dataset, batch_size=..., drop_last=True)"
            )
        examples = [((len(array) * parts, *array.shape[1:]), str(array.dtype)) for array in batch]
        graph = capture(module, tuple(examples))
        stages = None
        if configured_stages(module, self.wrapped.stage_config):
            stages = assign_stages(graph, module, self.wrapped.stage_config, settings.num_stages)
        pinned = self._pinned(graph, num_ranks // settings.num_stages)
        start_s = time.perf_counter()
        found = search(
            graph, machine, num_devices=num_ranks, num_stages=settings.num_stages, stages=stages,
            num_micro_batches=self.wrapped.num_micro_batches, interleave=self.wrapped.interleave,
            schedule=settings.schedule, pinned=pinned, optimizer=self.optimizer, full_batch=settings.full_batch,
            output_broadcast=settings.output_broadcast, memory_limit_bytes=settings.memory_limit_bytes,
            execution=self.execution, on_progress=_say,
        )  # fmt: skip
        if os.environ.get(GRAPHS_VARIABLE) == "2":
            _save_graphs(graph, found.best)
        print(f"planned in {time.perf_counter() - start_s:.2f} s for machine {machine.name}", flush=True)
        return found.best

    def _pinned(self, graph: Graph, width: int) -> dict[str, Strategy]:
        """The strategies given by `shard`, on stages of `width` ranks."""
        from executor.sharding import given_strategies, sharded_modules

        module, mode = self.wrapped.module, self.wrapped.settings.parallel_mode
        if mode != ParallelMode.SEMI_AUTO and (marked := sharded_modules(module)):
            raise TwofoldError(
                f"shard was called on {', '.join(marked)}, but in parallel_mode={mode!r} the search decides on every "
                "operator; use parallel_mode='semi_auto'"
            )
        num_slices = self.wrapped.num_micro_batches * self.wrapped.interleave
        if graph.batch_size % num_slices:
            return {}  # the search refuses it
        return given_strategies(graph.with_batch(graph.batch_size // num_slices), module, width)


def _say(line: str) -> None:
    print(line, flush=True)


def _shipped(device_kind: str) -> str:
    return {"cpu": "cpu-2core-x8", "cuda": "h200-x8", "npu": "ascend-910b2-x8"}[device_kind]


def _fed_graph(plan: Plan) -> Graph:
    """The graph for the batch that one rank reads: the full batch, or its part."""
    return plan.graph if plan.full_batch else plan.graph.with_batch(
        plan.graph.batch_size // plan.stages[0].mesh.num_ranks
    )  # fmt: skip


def _epochs(dataset: Any, epochs: int) -> Iterator[Sequence[Any]]:
    for number in range(epochs):
        yield from dataset.epoch(number) if hasattr(dataset, "epoch") else dataset


def _save_graphs(graph: Graph, plan: Plan) -> None:
    from reports import save_graph

    folder = Path(os.environ.get(LOGS_VARIABLE, "log_output")) / "graphs"
    save_graph(folder, graph)
    save_graph(folder, graph, plan)


def _optimizer(given: Any, wrapped: Wrapped) -> Optimizer:
    settings = wrapped.settings
    level, threshold = settings.optimizer_level, settings.threshold_bytes
    if given is None:
        raise TwofoldError("Model needs an optimizer, e.g. torch.optim.SGD(net.parameters(), lr=1e-2)")
    # a `twofold.Optimizer` has buckets, dtypes and clipping, too
    planned = given if isinstance(given, Optimizer) else optimizer_of_torch(given, wrapped.module)
    return msgspec.structs.replace(planned, parallel_level=level, threshold_bytes=threshold)
