"""The cells of a row that describe its model."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from interop.measurements.cells import OWN_RUNS, ZERO_BUBBLE, Skip
from interop.measurements.mixtures import Mixtures
from interop.measurements.model_names import named_parameters
from interop.measurements.models import (
    UNNAMED_SEQ,
    Family,
    catalogued,
    check_decoder,
    family_of,
    usual_ffn,
    usual_seq,
    usual_sizes,
)  # fmt: skip
from interop.measurements.software import COMPOSER
from plans.errors import TwofoldError
from plans.model.transformer import TransformerConfig

__all__ = ["ModelCells"]

_ZERO_BUBBLE_VOCAB = 32_000
"""The zero-bubble experiments use a SentencePiece model; the parameters that their models' names state (1.5B, 6.2B,
14.6B, 28.3B) leave 28,000 to 35,000 entries next to their layers."""

_PADS_TO_64 = r"nanogpt|llm\.c\b|lit-?gpt"
"""Software that pads GPT-2's vocabulary to a multiple of 64, 50304 (nanoGPT's model.py, llm.c's train_gpt2.py,
LitGPT's config.py)."""

_UNEVEN_LAYERS = 0.1
"""Largest relative change of an assumed number of layers that makes it divide evenly over the stages of a pipeline."""


_SIZES_OF_LLAMA = r"(?:8|70|405) ?b"
"""Numbers of parameters that few other models have."""


@lru_cache(maxsize=4096)
def _published_settings(model: TransformerConfig) -> dict[str, Any]:
    """Settings in which a published model differs from its family: an output that shares the embedding, wider heads."""
    settings: dict[str, Any] = {"tied": True} if model.tied else {}
    if model.head_dim not in (None, model.hidden / model.num_heads):
        settings["head_dim"] = model.head_dim
    return settings


class ModelCells(Mixtures):
    """The cells of a row that describe its model: name, sizes, vocabulary, experts."""

    def config(self, dtype: str, stack: str) -> TransformerConfig:
        """The model: catalogued or published if its name is known, otherwise of its family with the sizes of the row.

        Raises:
            Skip: a size that is missing or not a number, or experts that are not stated.
            TwofoldError: an architecture that is not modelled.
        """
        name = self.model_name()
        try:
            check_decoder(name)
        except TwofoldError as error:
            raise Skip(str(error), "model") from None
        known = catalogued(name)
        layers, hidden, heads = self.sizes(name, known)
        seq = self.seq(name)
        same = known if known is not None and (hidden, heads) == (known.hidden, known.num_heads) else None
        if same is not None and (same.experts is not None or same.latent is not None) and self.as_catalogued(same):
            return self.mixture(same, layers, seq, dtype)
        if known is not None and known.latent is not None:
            raise Skip(f"model {name!r} has other sizes than the catalogue's mixture {known.name}", "model")
        kv_heads = self.count("kv_heads", same.kv_heads if same else heads)
        kv_heads = self.on_every_rank(kv_heads, heads)
        ffn = self.count("ffn", same.inner if same else 4 * hidden)
        if not self.text("ffn") and same is None:
            ffn = self.usual_ffn(name, hidden, heads, kv_heads)
        experts = self.experts(name, known, ffn)
        if self.count("ep", 1) > 1 and experts is None:
            raise Skip(f"ep {self.text('ep')} without experts in its model", "ep")
        family, reason = family_of(
            name, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, has_experts=experts is not None
        )
        vocab = self.vocab(known.vocab if known else family.vocab, stack)
        self.assumed.append(reason)
        dropout = 0.1 if family.dropout and stack in ("megatron-2022", "zero-bubble") else 0.0
        settings = self.block_settings(family) | ({} if same is None else _published_settings(same))
        if dropout:
            self.assumed.append("dropout and attention dropout of 0.1, Megatron-LM's defaults")
        config = TransformerConfig(
            name=name, num_layers=layers, hidden=hidden, num_heads=heads, num_kv_heads=kv_heads, ffn=ffn, vocab=vocab,
            seq=seq, dtype=dtype, dropout=dropout, attention_dropout=dropout, experts=experts, **settings,
        )  # fmt: skip
        named = named_parameters(name)
        if named and not 0.8 < (made := config.num_parameters) / named < 1.25:
            self.assumed.append(f"its sizes make {made / 1e9:.3g}e9 parameters, its name says {named / 1e9:g}e9")
        return config

    def model_name(self) -> str:
        """The name of the model; a name that is only a number of parameters refers to the model of the row's source."""
        name, source = self.text("model"), self.words("source")
        if not re.fullmatch(r"[\d.]+ ?[mb]", name.lower()):
            return name
        if family := self.text("family"):
            return f"{family} {name}"
        of_llama = re.fullmatch(_SIZES_OF_LLAMA, name.lower()) and not self.text("hidden")
        usual = "MPT" if re.search(COMPOSER, source) else "Llama-3" if "torchtitan" in source or of_llama else ""
        if not usual:
            return name
        of_source = f" of {self.text('source')}" if source else ""
        self.assumed.append(f"model {name}{of_source}: {usual}")
        return f"{usual}-{name}"

    def usual_ffn(self, name: str, hidden: int, heads: int, kv_heads: int) -> int:
        """The inner size of the MLP, by the family of the model, for a row that does not state it."""
        wide = {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": 4 * hidden}
        family, _ = family_of(name, has_experts=True, **wide)
        found = usual_ffn(family, hidden)
        if found != 4 * hidden:
            self.assumed.append(f"ffn not stated: {found}")
        return found

    def seq(self, name: str) -> int:
        """Tokens of a sequence; by default the length with which the model is usually trained."""
        usual = usual_seq(name) or UNNAMED_SEQ
        if not self.text("seq"):
            self.assumed.append(f"sequence not stated: {usual}")
        return self.count("seq", usual)

    def sizes(self, name: str, known: TransformerConfig | None) -> tuple[int, int, int]:
        """Layers, width and heads; blank cells are filled from the published model."""
        cells = ("layers", "hidden", "heads")
        published = (known.num_layers, known.hidden, known.num_heads) if known else None
        missing = [cell for cell in cells if not self.text(cell)]
        if len(missing) == len(cells) and published is None and named_parameters(name) is None:
            raise Skip(f"model {name!r} is not known, and neither its name nor the row states its sizes", "model")
        if missing == ["heads"] and published is None:
            width = self.count("hidden")
            published = (0, 0, max(1, width // 128))
            self.assumed.append(f"heads not stated: {published[2]}, of about 128 features")
        elif missing and published is None:
            published = self.divided(usual_sizes(name))
            self.assumed.append(f"{', '.join(missing)} not stated: {published}, of models with as many parameters")
        elif missing and known is not None:
            self.assumed.append(f"{', '.join(missing)} of {known.name} as published ({known.source})")
        layers, hidden, heads = (
            self.count(cell, usual) for cell, usual in zip(cells, published or (None, None, None), strict=True)
        )
        tp = self.count("tp", 1)
        if not self.text("heads") and known is None and (hidden % heads or heads % tp):
            counts = [count for count in range(1, hidden + 1) if hidden % count == count % tp == 0]
            if counts:
                heads = min(counts, key=lambda count: abs(hidden / count - 128))
                self.assumed.append(f"heads not stated: {heads}, of about 128 features")
        return layers, hidden, heads

    def divided(self, sizes: tuple[int, int, int] | None) -> tuple[int, int, int] | None:
        """Usual sizes with as many layers as divide evenly over the pipeline stages, where that changes little."""
        if sizes is None:
            return None
        layers, hidden, heads = sizes
        stages = self.count("pp", 1)
        near = max(1, round(layers / stages)) * stages
        return (near if abs(near / layers - 1) < _UNEVEN_LAYERS else layers), hidden, heads

    def vocab(self, usual: int, stack: str) -> int:
        """Entries of the vocabulary; Megatron-LM pads it (--make-vocab-size-divisible-by), torch splits it unevenly."""
        stated = self.count("vocab", _ZERO_BUBBLE_VOCAB if ZERO_BUBBLE in self.words("source") else usual)
        parts = self.count("tp", 1) * (1 if stack.startswith("torch") else 128)
        if re.search(_PADS_TO_64, self.words("source", "notes")):
            parts = 64
        vocab = -(-stated // parts) * parts
        if not self.text("vocab"):
            self.assumed.append(f"vocabulary not stated: {vocab}")
        elif vocab != stated:
            self.assumed.append(f"vocabulary padded to {vocab}")
        return vocab

    def block_settings(self, family: Family) -> dict[str, Any]:
        """The settings of a block of the family; no positions if the notes say so."""
        settings = dict(family.settings)
        if said := re.search(r"\b(?:(no) )?(?:swi|ge|re)?glu\b|\bgelu\b", self.words("notes")):
            settings["gated"] = not (said[1] or said[0] == "gelu")
        if re.search(r"\bno (rope|rotary|positions?)\b", self.words("notes")):
            settings["position"] = "none"
        elif settings.get("position") == "rope" and OWN_RUNS in self.words("notes"):
            settings["position"] = "none"
            self.assumed.append("no rotary positions: the list of a block's parts that its notes refer to has none")
        return settings
