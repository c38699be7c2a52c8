"""Mixtures of experts in tables of measurements: experts, their balance, and the transport of tokens to them."""

from __future__ import annotations

import dataclasses
import math
import re

from costmodels.price.power import slowest_of
from interop.measurements.cells import Cells, Skip
from interop.measurements.models import resized
from plans.model.transformer import TransformerConfig
from plans.model.transformer.config import Experts

__all__ = ["A2A", "HAI_LLM", "NODE", "OF_2025", "ONCE", "UNEVEN", "Mixtures"]

UNEVEN = 0.22
"""Standard deviation of experts' loads over their mean: with an auxiliary loss the fullest of 64 has 1.5 to 1.7 times
its share (Wang et al. 2024, arXiv 2408.15664, table 2), 2.4 standard deviations above the mean."""

_USUAL_LIMIT = 4
"""Nodes of a token's experts: DeepSeek-V3's (arXiv 2412.19437, section 2.1.2)."""


A2A = r"all-?to-?all|\ba2a\b|all-?gather"
"""Words of dispatchers that send a token to every expert."""

_FORCED = r"nemo\b|megatron-?bridge"
"""Software whose recipes for measurements balance the experts' loads: moe_router_force_load_balancing, before 2025
MegatronTokenDropCallback with a capacity factor of 1."""

ONCE = r"(?:node|device|group)[- ]limited|deep-?ep|hybrid-?ep|\bflex\b|dualpipe|\bhai-?llm\b"
"""Words of dispatchers that send a token once to each node, and of software and routing that imply one."""

_BEFORE = r"\b(?:nemo|nemo framework)[ :]*2[34]\.\d+|\b202[34]\b"
"""Words of releases before such dispatchers: DeepEP came in February 2025."""

HAI_LLM = r"\bhai-?llm\b"
"""DeepSeek's own software, which routes, overlaps and sends as arXiv 2412.19437 describes."""

OF_2025 = r"deepseek[-_ ]?(v3|r1)|kimi|qwen[-_ ]?3|glm[-_ ]?4\.[5-9]|gpt-?oss|llama[-_ ]?4|minimax|ling-"
"""Mixtures that others than their makers trained after such dispatchers came."""

NODE = 8
"""Devices of most nodes."""

_LIMITED = r"deepseek[-_ ]?(?:v3|r1)|kimi"
"""Models whose routing is limited to groups of experts (n_group and topk_group of their config.json)."""

_NAMED = r"(?<![\d.])(\d+) ?x ?\d+(?:\.\d+)?b|(\d+)[- ]?experts?|\b(\d+)e\b|\bmoe-?(\d+)\b"
"""Words of a model's name that contain the number of experts."""


class Mixtures(Cells):
    """The cells of a row that describe experts."""

    def as_catalogued(self, known: TransformerConfig) -> bool:
        """Whether the cells of a mixture's sizes are those of the catalogue; its vocabulary may be padded."""
        assert known.experts is not None or known.latent is not None
        widths = {known.inner} | ({known.experts.ffn} if known.experts is not None else set())
        heads = {known.kv_heads} | ({1} if known.latent is not None else set())
        return (
            self.count("ffn", known.inner) in widths
            and self.count("kv_heads", known.kv_heads) in heads
            and known.vocab <= self.count("vocab", known.vocab) <= 1.02 * known.vocab
        )

    def mixture(self, known: TransformerConfig, layers: int, seq: int, dtype: str) -> TransformerConfig:
        """A mixture of experts from the catalogue."""
        assert known.experts is not None
        self.assumed.append(f"experts as published ({known.source})")
        experts = dataclasses.replace(known.experts, capacity_factor=self.places(known.experts.num_experts))
        kv_heads = self.on_every_rank(known.kv_heads, known.num_heads)
        return resized(known, num_layers=layers, seq=seq, dtype=dtype, experts=experts, num_kv_heads=kv_heads)

    def on_every_rank(self, kv_heads: int, heads: int) -> int:
        """Key-value heads of a model, of which every tensor-parallel rank has one."""
        tp = self.count("tp", 1)
        if not kv_heads < tp <= heads:
            return kv_heads
        self.assumed.append(f"{kv_heads} key-value heads: one on each of {tp} tensor-parallel ranks")
        return tp

    def experts(self, name: str, known: TransformerConfig | None, ffn: int) -> Experts | None:
        """The experts that a row gives in columns or in its model's name; None if it gives none."""
        named = re.search(_NAMED, name.lower())
        usual = int(next(group for group in named.groups() if group)) if named else None
        if known is not None and known.experts is not None:
            usual = known.experts.num_experts
        if not self.text("experts") and usual is None:
            return None
        count = self.count("experts", usual)
        if count == 1:
            return None
        if not self.text("top_k"):
            self.assumed.append(f"experts for a token not stated: {min(2, count)}")
        return Experts(
            num_experts=count, top_k=self.count("top_k", min(2, count)), ffn=self.count("expert_ffn", ffn),
            num_shared=self.count("shared_experts", 0, least=0), capacity_factor=self.places(count),
        )  # fmt: skip

    def places(self, experts: int) -> float:
        """Slots per expert relative to an even share: the capacity factor or, if no token is dropped, the load of the
        fullest rank, for which the others wait.
        """
        words = self.words("notes", "capacity")
        stated = re.search(r"(?:capacity[- _]?factor|\bcf)[ :=]*(\d+(?:\.\d+)?)", words)
        if stated := stated or re.match(r"(\d+(?:\.\d+)?)(?= |$)", self.text("capacity")):
            factor = float(stated.group(1))
            if not 0.1 <= factor <= 16:
                raise Skip(f"capacity is {stated.group()!r}, no factor from 0.1 to 16", "capacity")
            return factor
        ranks = self.count("ep", 1)
        if re.search(r"force\w*[- ]?(load[- ]?)?balanc|uniform rout|random rout|evenly loaded", words) or ranks == 1:
            return 1.0
        if re.search(_FORCED, self.words("source", "provenance")):
            self.assumed.append("experts evenly loaded: so do the recipes with which NeMo and Megatron-Bridge measure")
            return 1.0
        uneven = float(self.text("imbalance") or UNEVEN)
        factor = 1 + slowest_of(ranks) * uneven / math.sqrt(max(1, experts // ranks))
        self.assumed.append(
            f"no token dropped; loads of experts vary by {uneven:.0%}, so the fullest of {ranks} ranks has "
            f"{factor:.2f} times its share"
        )
        return factor

    def whole_experts(self, tp: int, data_ranks: int) -> bool:
        """Whether tensor parallelism of `tp` ranks splits no expert; the others are spread over them.

        If the row does not state it, Megatron-core splits experts as it splits the rest (arguments.py,
        expert_tensor_parallel_size). The recipes of NeMo 25 and Megatron-Bridge for mixtures set it to 1.

        Args:
            tp: the tensor-parallel degree.
            data_ranks: ranks of data and context parallelism.
        """
        ep, ways, words = self.count("ep", 1), self.count("etp", 0), self.words("source", "provenance")
        if tp == 1 or ways == 1:
            return tp > 1
        if not ways and data_ranks % ep and data_ranks * tp % ep == 0:
            self.assumed.append(f"ep {ep} spans tensor-parallel ranks: no expert is split (arXiv 2504.14960)")
            return True
        if not ways and ep > 1 and re.search(_FORCED, words) and not re.search(_BEFORE, words):
            self.assumed.append("experts not split by tp: so are those of the recipes of NeMo and Megatron-Bridge")
            return True
        if ways not in (0, tp):
            self.assumed.append(f"etp {ways} taken as {tp}, the tensor-parallel degree")
        return False

    def dispatches_float8(self, stack: str) -> bool:
        """Whether tokens are sent to experts in 8 bits: HAI-LLM's are (arXiv 2412.19437, section 3.3.3)."""
        words = self.words("source", "provenance", "notes")
        found = "float8" in stack and re.search(HAI_LLM, self.words("source", "provenance")) is not None
        found |= re.search(r"fp8[- ]?(dispatch|all-?to-?all|a2a|comm)|dispatch\w* in fp8", words) is not None
        if found:
            self.assumed.append("tokens are sent to experts in 8 bits and come back in 16")
        return found

    def most_nodes(self, config: TransformerConfig, stack: str, ranks: int) -> int:
        """Largest number of nodes of a token's experts if it is sent once per node; 0 if it is sent once per expert.

        Dispatchers that send a token once per node are DeepEP and Megatron-core's flex, which the recipes of
        Megatron-Bridge and NeMo choose (moe_flex_dispatcher_backend) and Megatron-core recommends where experts are on
        several nodes (the readme of megatron/core/transformer/moe). Routing limited to some nodes implies one.

        Args:
            config: the model.
            stack: the software.
            ranks: that share the experts or have parts of one.
        """
        words = self.words("notes", "provenance", "source", "capacity", "routing")
        limited = re.search(r"(?:node|device|group)[- ]limited(?: routing)?(?:[^\d;]{0,12}(\d+))?", words)
        once = bool(re.search(ONCE, f"{words} {self.words('schedule')}"))
        usual = bool(re.search(_FORCED, words))
        if not once and not usual and ranks > NODE and re.search(OF_2025, self.words("model")):
            usual = re.match(r"megatron(?!.*2022)", stack) is not None
        once |= usual and not re.search(rf"{A2A}|{_BEFORE}", words)
        if config.experts is None or self.count("ep", 1) == 1 or not once:
            return 0
        most = int(limited.group(1) or _USUAL_LIMIT) if limited else config.experts.top_k
        if not limited and re.search(_LIMITED, self.words("model")):
            most = _USUAL_LIMIT
        self.assumed.append(f"a token is sent to each node of its experts once, to at most {most}")
        return max(1, most)
