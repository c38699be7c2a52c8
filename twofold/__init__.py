"""twofold: search a parallel plan, simulate it, and run the same program with PyTorch.

Names are imported on first use, so `import twofold` is fast and needs neither torch nor matplotlib.

>>> import twofold as tf
>>> tf.Layout((2, 2), ("dp", "mp"))("dp", "mp").split_counts
(2, 2)
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "AutoParallel": "twofold.mindspore.wrappers",
    "Checkpoints": "simulator.study.goodput",
    "Failures": "simulator.study.goodput",
    "Graph": "plans.model.graph",
    "Layout": "plans.layout",
    "LinkChange": "simulator.engine.link_change",
    "LossMonitor": "twofold.mindspore.training",
    "MAELoss": "executor.train.losscell",
    "Machine": "costmodels.machine.machine",
    "MicroBatchInterleaved": "twofold.mindspore.wrappers",
    "Model": "twofold.mindspore.training",
    "Optimizer": "plans.optimizer",
    "ParallelMode": "twofold.mindspore.context",
    "Pipeline": "twofold.mindspore.wrappers",
    "PipelineCell": "twofold.mindspore.wrappers",
    "Plan": "plans.plan",
    "Program": "plans.program",
    "Timeline": "plans.timeline",
    "TrainingJob": "executor.launch.train_job",
    "TransformerConfig": "plans.model.transformer",
    "TwofoldError": "plans.errors",
    "WhatIf": "simulator.study.whatif",
    "WithLossCell": "executor.train.losscell",
    "calibrate": "twofold.calibration.calibrate",
    "capture": "executor.capture.capture",
    "critical_path": "simulator.timeline.critical_path",
    "forecast": "simulator.forecast",
    "initializer": "executor.weights.initial",
    "load_plan": "plans.plan",
    "lower": "plans.lower",
    "no_init_parameters": "executor.weights.initial",
    "outcome": "simulator.predict",
    "predict": "simulator.study.point",
    "recompute": "executor.recompute",
    "run": "executor.launch.run_plan",
    "save_plan": "plans.plan",
    "search": "search.search",
    "set_auto_parallel_context": "twofold.mindspore.context",
    "set_memory": "twofold.mindspore.context",
    "set_seed": "executor.weights.initial",
    "shard": "executor.sharding",
    "simulate": "simulator.predict",
    "study": "twofold.studies",
    "train": "twofold.elastic",
    "transformer": "plans.model.transformer",
    "uniform_plan": "search.uniform",
    "validate": "interop.measurements.validation",
    "verify": "executor.reference.verification",
}

__all__ = [
    "AutoParallel",
    "Checkpoints",
    "Failures",
    "Graph",
    "Layout",
    "LinkChange",
    "LossMonitor",
    "MAELoss",
    "Machine",
    "MicroBatchInterleaved",
    "Model",
    "Optimizer",
    "ParallelMode",
    "Pipeline",
    "PipelineCell",
    "Plan",
    "Program",
    "Timeline",
    "TrainingJob",
    "TransformerConfig",
    "TwofoldError",
    "WhatIf",
    "WithLossCell",
    "calibrate",
    "capture",
    "critical_path",
    "forecast",
    "initializer",
    "load_plan",
    "lower",
    "no_init_parameters",
    "outcome",
    "predict",
    "recompute",
    "run",
    "save_plan",
    "search",
    "set_auto_parallel_context",
    "set_memory",
    "set_seed",
    "shard",
    "simulate",
    "study",
    "train",
    "transformer",
    "uniform_plan",
    "validate",
    "verify",
]


def _check_packages() -> None:
    """Raise an error if a file such as the user's search.py would be imported instead of one of our packages.

    Raises:
        ImportError: one of our packages is shadowed or missing.
    """
    for package in ("plans", "costmodels", "simulator", "search", "interop", "executor", "reports"):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.submodule_search_locations is None or not _is_ours(spec.origin, package):
            where = "is not there" if spec is None else f"is {spec.origin or spec.name}, which is not twofold's"
            raise ImportError(
                f"twofold's package {package!r} {where}; rename that file or folder, or start Python with -P"
            )


def _is_ours(origin: str | None, package: str) -> bool:
    """Whether a package is in the same folder as this one."""
    return origin is not None and Path(origin).parent.resolve() == Path(__file__).resolve().parents[1] / package


_check_packages()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"twofold has no {name!r}")
    from plans.shown import show_by

    show_by(_notebook)
    try:
        value = getattr(importlib.import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise ImportError(f"twofold.{name} needs torch: pip install 'twofold[torch]'") from error
        raise
    globals()[name] = value
    return value


def _notebook() -> Any:
    """The module that displays results in notebooks."""
    return importlib.import_module("reports.notebook")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
