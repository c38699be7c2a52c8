"""The model given on the command line: a transformer by name or file, or a module, which may be recognised as one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plans.errors import TwofoldError

if TYPE_CHECKING:
    from torch import nn

    from plans.model.graph import Graph
    from plans.model.transformer import Recognised, TransformerConfig

__all__ = ["GivenModel", "given_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenModel:
    """The model of a command.

    Args:
        word: the text on the command line.
        transformer: its configuration; None if it is not a supported transformer.
        graph: graph of a module; None for names and files.
        recognised: the module as a transformer, if it is one.
        unknown: the reason why it is not searched as a transformer, or None.
        remark: a message about how the module was built, or None.
    """

    word: str
    transformer: TransformerConfig | None
    graph: Graph | None = None
    recognised: Recognised | None = None
    unknown: str | None = None
    remark: str | None = None

    @property
    def config(self) -> TransformerConfig:
        """Its transformer configuration."""
        assert self.transformer is not None, self.word
        return self.transformer

    def at_batch(self, batch: int) -> Graph:
        """The graph (of a transformer by name: for this batch size)."""
        if self.graph is not None:
            return self.graph
        from plans.model.transformer import transformer

        return transformer(self.config, batch_size=batch)


def given_model(
    word: str, seq: int | None = None, layers: int | None = None, precision: str | None = None,
    capacity_factor: str | None = None,
) -> GivenModel:  # fmt: skip
    """Load a model.

    Args:
        word: a name, a config.json, or package.module:function or file.py:function.
        seq, layers, precision, capacity_factor: as of `transformer_config`; None keeps those of the transformer.

    Raises:
        TwofoldError: an unknown name, a module that cannot be loaded or captured, any of these of a module.
    """
    from plans.model.transformer import NotModelled, transformer_config

    if word.endswith(".py"):
        raise TwofoldError(f"{word}: name the function that makes the model too, such as {word}:build")
    if ":" not in word:
        try:
            config = transformer_config(
                word, seq=seq, num_layers=layers, precision=precision, capacity_factor=capacity_factor
            )
            return GivenModel(word=word, transformer=config)
        except NotModelled as error:
            for name, value in (("--precision", precision), ("--capacity-factor", capacity_factor)):
                if value is not None:
                    raise TwofoldError(f"{name} is for transformers that can be described; {error}") from None
            return _published(word, seq, layers, error)
    if any(value is not None for value in (seq, layers, precision, capacity_factor)):
        raise TwofoldError(
            "--seq, --layers, --precision and --capacity-factor are for transformers by name or config.json, not for "
            f"{word!r}"
        )
    from executor.weights.models import load_shapes

    module, examples, real = load_shapes(word)
    remark = None if real is None else (
        f"{word} was built with its weights in memory, because it cannot be built on the meta device ({real})"
    )  # fmt: skip
    return _captured(word, module, examples, remark)


def _published(word: str, seq: int | None, layers: int | None, error: TwofoldError) -> GivenModel:
    """Build the module with transformers from a config.json that no `TransformerConfig` can describe.

    Raises:
        TwofoldError: transformers is not installed, or the module cannot be built or captured.
    """
    from executor.weights.published import has_transformers, shapes_of_published

    if not has_transformers():
        raise TwofoldError(f"{error}; install transformers to plan the module that it builds") from None
    module, shapes = shapes_of_published(word, seq=seq, layers=layers)
    inputs = " and ".join(f"{dtype} {list(shape)}" for shape, dtype in shapes)
    why = str(error).split("; ")[0]
    return _captured(word, module, shapes, f"{why}. Planning the module that transformers builds, with {inputs}")


def _captured(word: str, module: nn.Module, examples: tuple[Any, ...], remark: str | None) -> GivenModel:
    from executor.capture.capture import capture
    from plans.model.transformer import NO_MODE, recognise

    graph = capture(module, examples)
    try:
        found = recognise(graph)
    except TwofoldError as error:
        return GivenModel(word=word, transformer=None, graph=graph, unknown=str(error), remark=remark)
    if found.recompute is None:
        unknown = f"{graph.name} {NO_MODE}"
        return GivenModel(word=word, transformer=None, graph=graph, unknown=unknown, remark=remark)
    return GivenModel(word=word, transformer=found.config, graph=graph, recognised=found, remark=remark)
