"""What a model on the command line stands for: a transformer by name or file, or a module, which may be one."""

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
    """A model.

    Args:
        word: as it was given.
        transformer: its configuration; None where it is no transformer of known form.
        graph: of a module; None for names and files.
        recognised: the module as a transformer, if it is one.
        unknown: why it is not searched as one; None where it is.
        remark: how the module was built, for the user; None: nothing to say.
    """

    word: str
    transformer: TransformerConfig | None
    graph: Graph | None = None
    recognised: Recognised | None = None
    unknown: str | None = None
    remark: str | None = None

    @property
    def config(self) -> TransformerConfig:
        """The transformer that it is."""
        assert self.transformer is not None, self.word
        return self.transformer

    def at_batch(self, batch: int) -> Graph:
        """The graph; of a transformer by name for a batch of this size."""
        if self.graph is not None:
            return self.graph
        from plans.model.transformer import transformer

        return transformer(self.config, batch_size=batch)


def given_model(word: str, seq: int | None, layers: int | None) -> GivenModel:
    """The model that a word stands for.

    Args:
        word: a name, a config.json, or package.module:function or file.py:function.
        seq, layers: tokens of a sample and blocks, instead of the transformer's own.

    Raises:
        TwofoldError: an unknown name, a module that cannot be loaded or captured, seq or layers of a module.
    """
    from plans.model.transformer import NotModelled, transformer_config

    if ":" not in word:
        try:
            return GivenModel(word=word, transformer=transformer_config(word, seq=seq, num_layers=layers))
        except NotModelled as error:
            return _published(word, seq, layers, error)
    if seq is not None or layers is not None:
        raise TwofoldError(f"--seq and --layers are for transformers by name or config.json, not for {word!r}")
    from executor.train.models import load_shapes

    module, examples, real = load_shapes(word)
    remark = None if real is None else (
        f"{word} was built with its weights in memory: it cannot be built on the meta device, where they take none "
        f"({real})"
    )  # fmt: skip
    return _captured(word, module, examples, remark)


def _published(word: str, seq: int | None, layers: int | None, error: TwofoldError) -> GivenModel:
    """The module that transformers builds from a config.json which no `TransformerConfig` can say.

    Raises:
        TwofoldError: transformers is not installed, or the module cannot be built or captured.
    """
    from executor.train.published import has_transformers, shapes_of_published

    if not has_transformers():
        raise TwofoldError(f"{error}; with transformers installed, the module that it builds is planned") from None
    module, shapes = shapes_of_published(word, seq=seq, layers=layers)
    inputs = " and ".join(f"{dtype} {list(shape)}" for shape, dtype in shapes)
    why = str(error).split("; ")[0]
    return _captured(word, module, shapes, f"{why}. The module that transformers builds is planned, with {inputs}")


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
