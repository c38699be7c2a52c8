"""The module that transformers builds from a config.json, with its own loss.

It is used for models that no `TransformerConfig` can describe. transformers is not a dependency of the project. Only
its own classes are used; no code from a file is run, and nothing is downloaded.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plans.errors import TwofoldError
from plans.model.transformer import read_keys

__all__ = ["has_transformers", "published_model", "shapes_of_published"]

BATCH = 64
"""Samples of the example inputs; `--global-batch` resizes the graph."""

_FEW_LABELS = ("ForSequenceClassification", "ForImageClassification")
_TOKENS = 2048
"""Default number of tokens per sample if the model can read more."""

Shape = tuple[tuple[int, ...], str]


class _WithLoss(nn.Module):
    """The loss that a model of transformers computes from its labels."""

    def __init__(self, net: nn.Module, name: str) -> None:
        super().__init__()
        self.net, self._name = net, name

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.net(**{self._name: inputs}, labels=labels).loss
        return loss


def has_transformers() -> bool:
    """Whether transformers can be imported."""
    from importlib.util import find_spec

    return find_spec("transformers") is not None


def published_model(
    path: str | os.PathLike[str], *, seq: int | None = None, layers: int | None = None
) -> tuple[nn.Module, tuple[Shape, ...]]:
    """The module of a config.json (or of the one in a folder), and the shapes of a batch of inputs and labels.

    Inputs are ids of tokens [batch, seq], or images [batch, channels, side, side]; labels are [batch, seq], or [batch]
    for a class of the full sample.

    Args:
        path: path of the file or its folder.
        seq: tokens of a sample; 2,048 or what the model can read, if that is less, when None.
        layers: blocks, of an encoder and of a decoder alike, instead of the file's.

    Raises:
        TwofoldError: transformers is not installed, does not know the model, or makes no loss of labels for it.
    """
    file, keys = read_keys(path)
    if not isinstance(keys.get("model_type"), str):
        raise TwofoldError(f"{file}: a model configuration has the key 'model_type', such as \"t5\"")
    if not has_transformers():
        raise TwofoldError(f"{file}: the module is built by transformers, which is not installed")
    import transformers

    try:
        config = transformers.AutoConfig.for_model(**{key: keys[key] for key in keys if key != "auto_map"})
        if layers is not None:
            for name in ("num_hidden_layers", "num_decoder_layers"):
                if hasattr(config, name):
                    setattr(config, name, layers)
        config.use_cache = False
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.pad_token_id  # as T5; transformers 5 saves it with generation alone
        net = _class_of(transformers, keys)(config)
    except Exception as error:  # transformers raises errors of many kinds on what a file says
        message = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise TwofoldError(
            f"{file}: transformers {transformers.__version__} cannot build this model ({message})"
        ) from None
    dtype = config.dtype or torch.bfloat16
    shapes = _inputs(config, type(net).__name__, str(dtype).removeprefix("torch."), seq, file)
    name = "pixel_values" if len(shapes[0][0]) == 4 else "input_ids"
    return _WithLoss(net.to(dtype), name), shapes


def shapes_of_published(
    path: str | os.PathLike[str], *, seq: int | None = None, layers: int | None = None
) -> tuple[nn.Module, tuple[Shape, ...]]:
    """As `published_model`, but built on the meta device, where weights take no memory.

    Raises:
        TwofoldError: see `published_model`.
    """
    with torch.device("meta"):
        return published_model(path, seq=seq, layers=layers)


def _class_of(transformers: Any, keys: dict[str, Any]) -> Any:
    """The class that the file names, or one for language modelling."""
    for name in keys.get("architectures") or ():
        if isinstance(found := getattr(transformers, str(name), None), type):
            return found
    kind = transformers.AutoModelForSeq2SeqLM if keys.get("is_encoder_decoder") else transformers.AutoModelForCausalLM
    return kind.from_config


def _inputs(config: Any, kind: str, dtype: str, seq: int | None, file: Path) -> tuple[Shape, Shape]:
    config = config.get_text_config() if hasattr(config, "text_config") else config
    side = getattr(config, "image_size", None)
    per_sample: Shape = ((BATCH,), "int64")
    if side is not None:
        if seq is not None:
            raise TwofoldError(f"{file}: --seq is for text; samples are images of {side} x {side} pixels")
        sides = tuple(side) if isinstance(side, list | tuple) else (side, side)
        return ((BATCH, config.num_channels, *sides), dtype), per_sample
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    tokens = seq or min(_TOKENS, longest or _TOKENS)
    ids: Shape = ((BATCH, tokens), "int64")
    return ids, per_sample if kind.endswith(_FEW_LABELS) else ids
