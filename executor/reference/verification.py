"""Verifies a run against single-process training, its planned communication and its prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from executor.launch.nodes import ONE_NODE, refusing
from executor.launch.run_plan import RunResult, run
from executor.reference.check import Check
from plans.errors import TwofoldError
from plans.plan import Plan
from plans.timeline import Timeline

__all__ = ["Verification", "check_run", "verify"]

FIRST_STEPS = 8
FIRST_LOSS_LIMIT = 2e-6
LOSS_LIMIT = 1e-4
WEIGHTS_LIMIT = 1e-5
NUM_NUDGES = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Verification:
    """The result of a verification.

    Args:
        run: the run.
        predicted: the simulated timeline, or None.
        loss_max_rel_diff: over all steps, against single-process training.
        loss_first_rel_diff: over the first 8 steps.
        weights_max_rel_diff: norm of the difference over norm, the worst tensor.
        worst_weight: its name.
        reference_losses: of single-process training.
        undetermined: weights that are left out of these, because single-process training itself moves them as far
            when its initial weights change in the last digit only (Adam with gradients that are zero but for rounding,
            such as those of the bias of an attention's keys): name -> norm of the difference over norm.
    """

    run: RunResult
    predicted: Timeline | None
    loss_max_rel_diff: float
    loss_first_rel_diff: float
    weights_max_rel_diff: float
    worst_weight: str
    reference_losses: tuple[float, ...]
    undetermined: Mapping[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether everything that does not depend on how busy this machine is held."""
        return all(check.passed for check in self.exact_checks())

    def checks(self) -> list[Check]:
        """Everything that was checked, the step time included."""
        return self.exact_checks() + self.timing_checks()

    def exact_checks(self) -> list[Check]:
        """Loss, weights, communication and memory."""
        steps = len(self.run.losses)
        first = min(FIRST_STEPS, steps)
        one = "against single-process training, relative"
        found = [
            Check(name=f"loss, first {first} steps", value=self.loss_first_rel_diff, high=FIRST_LOSS_LIMIT, detail=one),
            Check(name=f"loss, all {steps} steps", value=self.loss_max_rel_diff, high=LOSS_LIMIT, detail=one),
            Check(
                name="final weights", value=self.weights_max_rel_diff, high=WEIGHTS_LIMIT,
                detail=f"norm of the difference over norm, worst: {self.worst_weight}",
            ),
        ]  # fmt: skip
        if self.undetermined:
            found.append(
                Check(
                    name="weights determined by rounding", value=max(self.undetermined.values()), informs=True,
                    detail=f"rounding moves them as far in a single process: {_listed(self.undetermined)}",
                )
            )  # fmt: skip
        if self.run.collectives_match is not None:
            total = sum(self.run.num_communications)
            detail = "kind, bytes, group and count of " + f"{total} messages and collectives a step, all ranks together"
            if not self.run.collectives_match:
                detail = "; ".join(self.run.differences[:3])
            found.append(
                Check(name="executed communication = planned", value=self.run.collectives_match, detail=detail)
            )
        if self.predicted is not None:
            peak = max(self.run.peak_bytes)
            expected = max((memory_peak.values_bytes for memory_peak in self.predicted.memory), default=0)
            found.append(
                Check(
                    name="peak memory of a rank", value=float(peak), high=float(expected), unit="B",
                    detail="values of the program, measured in step 1; the prediction adds messages in flight",
                )
            )  # fmt: skip
            if measured := max(self.run.device_peak_bytes):
                found.append(
                    Check(
                        name="peak memory of a device", value=float(measured), unit="B", informs=True,
                        detail="allocated by torch, including communication buffers and workspaces",
                    )
                )  # fmt: skip
        return found

    def timing_checks(self) -> list[Check]:
        """The step time against the interval of the prediction; it informs, and fails nothing."""
        if self.predicted is None:
            return []
        measured, predicted = self.run.step_s, self.predicted.step_interval_s
        return [
            Check(
                name=f"step time, {self.run.timeline.kind}", value=measured, low=self.predicted.low_s,
                high=self.predicted.high_s, unit="s", informs=True,
                detail=f"predicted {predicted * 1e3:.1f} ms, {abs(100 * (predicted / measured - 1)):.1f} % too "
                f"{'short' if predicted < measured else 'long'}; limits: 90 % interval",
            )
        ]  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """The numbers, for scripts."""
        return {
            "loss_max_rel_diff": self.loss_max_rel_diff,
            "loss_first_rel_diff": self.loss_first_rel_diff,
            "weights_max_rel_diff": self.weights_max_rel_diff,
            "undetermined_weights": sorted(self.undetermined),
            "collectives_match": self.run.collectives_match,
            "predicted_step_s": None if self.predicted is None else self.predicted.step_interval_s,
            "predicted_low_s": None if self.predicted is None else self.predicted.low_s,
            "predicted_high_s": None if self.predicted is None else self.predicted.high_s,
            "measured_step_s": self.run.step_s,
            "kind": self.run.timeline.kind,
            "steps": len(self.run.losses),
            "peak_bytes": max(self.run.peak_bytes),
            "device_peak_bytes": max(self.run.device_peak_bytes),
            "plan_digest": self.run.plan_digest,
            "passed": self.passed,
        }


def check_run(
    result: RunResult, *, model: str, data: str | Sequence[Any] = "digits", seed: int, predicted: Timeline | None
) -> Verification:
    """Compare a run with single-process training of the same model on the same data (as for `run`).

    Raises:
        TwofoldError: the run has no model to train in one process.
    """
    from executor.data.sources import Source
    from executor.reference.reference import Reference, compare_losses, compare_weights, train_reference
    from executor.weights.models import load_model

    _check_model(model)
    plan, steps = result.plan, len(result.losses)
    module, _ = load_model(model, seed)
    order = [tensor.name for tensor in plan.graph.tensors.values() if tensor.kind == "input"]
    source = Source(data=data, seed=seed)

    def in_one_process(nudge: int | None = None) -> Reference:
        return train_reference(
            module, ([batch[name] for name in order] for batch in source.batches(plan.graph, steps)),
            optimizer=plan.optimizer, num_steps=steps, num_micro_batches=plan.num_slices, seed=seed,
            graph=plan.graph, nudge=nudge,
        )  # fmt: skip

    reference = in_one_process()
    losses = [float(loss) for loss in result.losses]
    weights: Mapping[str, np.ndarray] = result.weights
    trained = {
        plan.graph.of_module(tensor) for tensor in plan.graph.parameters
    } | plan.graph.updated  # what the loss does not depend on stays as it is
    expected = {name: weight for name, weight in reference.weights.items() if name in trained}
    weight = compare_weights(weights, expected)
    undetermined: dict[str, float] = {}
    if weight.max_rel_diff > WEIGHTS_LIMIT:
        moved: dict[str, float] = {}
        for nudge in range(NUM_NUDGES):
            weights_then = in_one_process(nudge).weights
            then = compare_weights({name: weights_then[name] for name in expected}, expected).rel_diffs
            moved = {name: max(each, moved.get(name, 0.0)) for name, each in then.items()}
        undetermined = rounding_decides(weight.rel_diffs, moved)
        decided = [name for name in expected if name not in undetermined]
        if decided:
            weight = compare_weights(*({name: each[name] for name in decided} for each in (weights, expected)))
        else:
            undetermined = {}
    return Verification(
        run=result,
        predicted=predicted,
        loss_max_rel_diff=compare_losses(losses, reference.losses).max_rel_diff,
        loss_first_rel_diff=compare_losses(losses[:FIRST_STEPS], reference.losses[:FIRST_STEPS]).max_rel_diff,
        weights_max_rel_diff=weight.max_rel_diff,
        worst_weight=weight.where,
        reference_losses=tuple(reference.losses),
        undetermined=undetermined,
    )


def _listed(names: Mapping[str, float]) -> str:
    shown = sorted(names, key=lambda name: -names[name])[:3]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def rounding_decides(found: Mapping[str, float], moved: Mapping[str, float]) -> dict[str, float]:
    """Which of the differences `found` are beyond the limit, and no more than three times what nudges have `moved`.

    >>> rounding_decides({"bias": 2e-3, "weight": 2e-3, "fine": 1e-7}, {"bias": 1e-3, "weight": 1e-6, "fine": 1.0})
    {'bias': 0.002}
    """
    return {name: each for name, each in found.items() if WEIGHTS_LIMIT < each <= 3 * moved[name]}


def verify(
    plan: Plan,
    *,
    model: str,
    predicted: Timeline | None = None,
    steps: int = 100,
    data: Any = "digits",
    seed: int = 0,
    **options: Any,
) -> Verification:
    """Run a plan and compare it with single-process training and with its prediction.

    Args:
        plan: the plan to run.
        model: "package.module:function" or "file.py:function" that returns the module of the plan.
        predicted: a simulated timeline of the plan, to compare times and memory with.
        steps: number of training steps.
        data: as for `run`.
        seed: random seed of initial weights and data order.
        options: as for `run`.

    Raises:
        TwofoldError: as `run`, and when no model is given.

    >>> verification = verify(plan, model="my_model.py:build", steps=20)  # doctest: +SKIP
    >>> verification.loss_max_rel_diff  # doctest: +SKIP
    1.2e-07
    """
    from executor.data.sources import read_batches

    with refusing(options.get("nodes", ONE_NODE)):
        _check_model(model)
        if plan.step_check is not None:
            raise TwofoldError(
                "verify does not support skipped steps, and this plan has loss_scale or spike; "
                "verify a plan without step_check"
            )
        if not isinstance(data, str):  # read once, for the ranks and for the one process
            data = read_batches(plan.graph, data, steps, seed)
    result = run(plan, steps=steps, data=data, model=model, seed=seed, **options)
    return check_run(result, model=model, data=data, seed=seed, predicted=predicted)


def _check_model(model: str) -> None:
    if not model:
        raise TwofoldError("verify needs the model, as package.module:function or file.py:function")
