"""Pipeline stages by the names of modules: `stage_config`, or a `pipeline_stage` attribute (the older form)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from plans.errors import TwofoldError
from plans.model.graph import Graph, Operator

__all__ = ["assign_stages", "configured_stages", "covers"]

_ATTRIBUTE = "pipeline_stage"


def covers(path: str, inner: str) -> bool:
    """Whether the module at `inner` is the one at `path` or a part of it.

    >>> covers("layers.1", "layers.1.mlp"), covers("layers.1", "layers.10")
    (True, False)
    """
    return not path or inner == path or inner.startswith(f"{path}.")


def configured_stages(module: nn.Module, stage_config: Mapping[str, int] | None = None) -> dict[str, int]:
    """module path -> stage, from the `pipeline_stage` attributes of its parts and from `stage_config`, which wins.

    Raises:
        TwofoldError: a name that is not a submodule (the error lists them), a stage that is not an int of at least 0.
    """
    names = [path for path, _ in module.named_modules(remove_duplicate=False) if path]
    for path in stage_config or {}:
        if path not in names:
            raise TwofoldError(
                f"stage_config names {path!r}, which is not a submodule of {type(module).__name__}; its submodules are "
                f"{', '.join(names)}"
            )
    parts = {path: getattr(module.get_submodule(path), _ATTRIBUTE, None) for path in names}
    found = {path: stage for path, stage in parts.items() if stage is not None} | dict(stage_config or {})
    for path, stage in found.items():
        if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
            raise TwofoldError(f"the stage of {path!r} is {stage!r}; it must be an int of at least 0")
    return found


def assign_stages(
    graph: Graph, module: nn.Module, stage_config: Mapping[str, int] | None, num_stages: int
) -> tuple[tuple[str, ...], ...]:
    """The operators of every stage, in order.

    An operator belongs to the stage of its module, or of the closest module around it that has one. Without any, it
    joins the latest stage among the operators that make its inputs (the loss, say); where those have none either, the
    earliest stage among the operators that read its output (a flatten in front of the first layer).

    Args:
        graph: captured from `module`.
        module: whose parts are named.
        stage_config: path of a submodule -> stage; None or {}: the parts' `pipeline_stage` attributes alone.
        num_stages: every stage from 0 to num_stages - 1 must get an operator.

    Raises:
        TwofoldError: see `configured_stages`; no stages named although there are several, a stage beyond the last, a
            stage without operators, or an operator that reads what a later stage makes.

    >>> from executor.capture.capture import capture
    >>> from executor.train.losscell import MAELoss, WithLossCell
    >>> cell = WithLossCell(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)), MAELoss())
    >>> graph = capture(cell, ((8, 4), (8, 1)))
    >>> assign_stages(graph, cell, {"_backbone.0": 0, "_backbone.2": 1}, 2)
    (('_backbone.0.linear', '_backbone.1.relu'), ('_backbone.2.linear', '_loss_fn.l1_loss'))
    """
    if isinstance(num_stages, bool) or not isinstance(num_stages, int) or num_stages < 1:
        raise TwofoldError(f"the number of stages is {num_stages!r}; it must be an int of at least 1")
    configured = configured_stages(module, stage_config)
    if num_stages > 1 and not configured:
        names = ", ".join(path for path, _ in module.named_modules() if path)
        raise TwofoldError(
            f"{num_stages} stages need stage_config={{submodule: stage}}; the submodules of {type(module).__name__} "
            f"are {names}"
        )
    for path, stage in configured.items():
        if stage >= num_stages:
            raise TwofoldError(f"{path!r} is put into stage {stage}, but there are {num_stages}: 0 to {num_stages - 1}")
    stages = _stages(graph, configured)
    _check_forward(graph, stages)
    result = tuple(
        tuple(operator.name for operator in graph.operators if stages[operator.name] == stage)
        for stage in range(num_stages)
    )
    for stage, operators in enumerate(result):
        if not operators:
            shown = ", ".join(f"{path!r}: {number}" for path, number in configured.items())
            raise TwofoldError(
                f"no operator of {graph.name} is in stage {stage} of {num_stages}; configured are {shown}"
            )
    return result


def _stages(graph: Graph, configured: Mapping[str, int]) -> dict[str, int]:
    producers, consumers = graph.producers(), graph.consumers()
    stages = {
        operator.name: stage for operator in graph.operators if (stage := _own_stage(operator, configured)) is not None
    }
    for operator in graph.operators:
        if operator.name not in stages:
            before = [producers[name].name for name in operator.inputs if name in producers]
            if known := [stages[name] for name in before if name in stages]:
                stages[operator.name] = max(known)
    for operator in reversed(graph.operators):
        if operator.name not in stages:
            after = [reader.name for name in operator.outputs for reader in consumers[name]]
            stages[operator.name] = min((stages[name] for name in after), default=0)
    return stages


def _own_stage(operator: Operator, configured: Mapping[str, int]) -> int | None:
    around = [path for path in configured if covers(path, operator.module)]
    return configured[max(around, key=len)] if around else None


def _check_forward(graph: Graph, stages: Mapping[str, int]) -> None:
    producers = graph.producers()
    for operator in graph.operators:
        for name in operator.inputs:
            if name in producers and stages[producers[name].name] > stages[operator.name]:
                maker = producers[name]
                raise TwofoldError(
                    f"stages run backwards: {operator.name!r} in stage {stages[operator.name]} reads what "
                    f"{maker.name!r} in stage {stages[maker.name]} makes; a module's stage must not be earlier than "
                    f"those before it"
                )
