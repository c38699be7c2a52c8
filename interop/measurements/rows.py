"""Rows of a table of measurements as configurations that can be predicted."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from costmodels.machine.catalogue import load_device
from interop.measurements.case import Beyond, Case, products_of
from interop.measurements.cells import FROM_ABOVE, FROM_TITLE, REMARK, ZERO_BUBBLE, Skip
from interop.measurements.columns import COLUMNS
from interop.measurements.devices import UnknownDevice, device_named, linked_within_node, network_of
from interop.measurements.hybrid import HYBRID
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
)
from interop.measurements.software import (
    COMPOSER,
    borrows,
    counts_recompute,
    keeps_low,
    level_of,
    reduces_low,
    software_of,
)
from interop.measurements.spellings import Recompute, recompute_named, recomputed_layers, schedule_named
from plans.degrees import MEMORY_BOUND, Degrees
from plans.errors import TwofoldError
from plans.model.transformer import TransformerConfig
from plans.optimizer import Optimizer
from plans.schedules.registry import schedule_names
from simulator.stacks import stack_named

__all__ = ["case_of"]

_SHARDS_STATES = r"(?:megatron|mindspore)(?!.*2022)"
"""Stacks whose runs of today keep shards of the optimizer's states, as a rule."""

_DESCRIBED = "measured/readme"
"""References of the notes of our own runs to their model."""

_NARAYANAN = "2104.04473"

_ZERO_BUBBLE_VOCAB = 32_000
"""The zero-bubble experiments use a SentencePiece model; the parameters that their models' names state (1.5B, 6.2B,
14.6B, 28.3B) leave 28,000 to 35,000 entries next to their layers."""


_UNEVEN_BATCH = 0.05
"""Largest relative change of a batch that makes it divide evenly over the replicas and their micro-batches."""


_UNEVEN_LAYERS = 0.1
"""Largest relative change of an assumed number of layers that makes it divide evenly over the stages of a pipeline."""


def case_of(row: Mapping[str, str], number: int, stack: str | None = None) -> Case:
    """The configuration of a row.

    Args:
        row: column -> text; absent columns count as blank.
        number: number of the row.
        stack: the software that ran it; found from the row when None.

    Raises:
        Skip: the row cannot be predicted. The message has the reason.
    """
    return _Reading(row, number, stack).case()


@lru_cache(maxsize=4096)
def _published_settings(model: TransformerConfig) -> dict[str, Any]:
    """Settings in which a published model differs from its family: an output that shares the embedding, wider heads."""
    settings: dict[str, Any] = {"tied": True} if model.tied else {}
    if model.head_dim not in (None, model.hidden / model.num_heads):
        settings["head_dim"] = model.head_dim
    return settings


def _num_parameters(config: TransformerConfig) -> int:
    return config.num_parameters


class _Reading(Mixtures):
    """One row, read column by column."""

    def __init__(self, row: Mapping[str, str], number: int, stack: str | None) -> None:
        super().__init__(row)
        self.number = number
        self.given_stack = stack
        self.expert_ranks = 1
        self.has_whole_experts = False

    def case(self) -> Case:
        row = self.row
        metric, value, _ = self.measured()
        if self.switch("layout_complete") is False:
            raise Skip("its parallel layout is not stated (layout_complete n)", "layout_complete")
        self.check_task()
        try:
            if not self.text("gpu_type"):
                raise Skip("gpu_type is not stated", "gpu_type")
            device, more = device_named(self.text("gpu_type"))
        except UnknownDevice as error:
            raise Skip(str(error), "gpu_type") from None
        self.assumed += more
        if columns := self.row.get(FROM_TITLE):
            cells_text = ", ".join(f"{column} {self.text(column)!r}" for column in columns.split(", "))
            self.assumed.append(f"from the table's title: {cells_text}")
        if columns := self.row.get(FROM_ABOVE):
            self.assumed.append(f"from the row above: {columns}")
        if remark := self.row.get(REMARK):
            self.assumed.append(remark)
        dtype = self.dtype(device)
        try:
            stacks = (self.given_stack,) if self.given_stack else software_of(self, device)
            stack = self.text("stack") or stacks[0]
            config = self.config(dtype, stack)
            degrees = self.degrees(config, stack)
        except TwofoldError as error:
            raise Skip(str(error)) from None
        gpus = self.count("gpu_count", degrees.num_ranks)
        interconnect, notes = self.text("interconnect"), self.text("notes")
        try:
            if gpus > 1:
                device = linked_within_node(device, self.text("gpu_type"), interconnect, notes)
            network = network_of(interconnect, notes, 4 if device == "gh200" else 8)
        except UnknownDevice as error:
            raise Skip(str(error), "interconnect") from None
        labels = {name: row.get(name, "") for name in COLUMNS if row.get(name)}
        beyond = Beyond(
            most_nodes=self.most_nodes(
                config, stack, self.expert_ranks * (1 if self.has_whole_experts else degrees.tp)
            ),
            expert_ranks=self.expert_ranks,
            whole_experts=self.has_whole_experts, dispatches_float8=self.dispatches_float8(stack),
            reserved={"reserved": True, "allocated": False}.get(self.text("memory")),
            shards=self.shards(degrees, network.devices_per_node or load_device(device).per_node),
        )  # fmt: skip
        group = tuple(
            row.get(name, "")
            for name in ("source", "model", "seq", "precision", "compile", "async_tp", "gpu_type", "gpu_count",
                         "global_batch", "metric")
        )  # fmt: skip
        return Case(
            config=config, degrees=degrees, machine=f"{device}-x{gpus}", network=network, stack=stack, metric=metric,
            value=value, counts_recompute=counts_recompute(self, metric, stack, degrees.recompute),
            assumed=tuple(dict.fromkeys(self.assumed)), group=group, row=self.number, source=self.text("source"),
            labels=labels, other_stacks=stacks[1:], peak=self.peak(metric, stack),
            borrows=not self.given_stack and borrows(self), beyond=beyond,
        )  # fmt: skip

    def peak(self, metric: str, stack: str) -> str:
        """The products whose peak a share of it is of; "" of those of the block's dtype, as torchtitan and Megatron-LM
        count. Composer counts those of the precision (composer/callbacks/speed_monitor.py, GPU_AVAILABLE_FLOPS)."""
        narrow = products_of(stack)
        counts_narrow = narrow == "tf32" or self.text("peak") or re.search(COMPOSER, self.words("source"))
        return narrow if metric == "mfu_percent" and counts_narrow else ""

    # ------------------------------------------------------------------- model and stack

    def config(self, dtype: str, stack: str) -> TransformerConfig:
        """The model: the catalogue's where the name is known, else a family by its name and sizes."""
        name = self.model_name()
        check_decoder(name)
        known = catalogued(name)
        layers, hidden, heads = self.sizes(name, known)
        seq = self.seq(name)
        same = known if known is not None and (hidden, heads) == (known.hidden, known.num_heads) else None
        if same is not None and (same.experts is not None or same.latent is not None) and self.as_catalogued(same):
            return self.mixture(same, layers, seq, dtype)
        if known is not None and known.latent is not None:
            raise Skip(f"model {name!r} has other sizes than the catalogue's mixture {known.name}", "model")
        kv_heads = self.count("kv_heads", same.kv_heads if same else heads)
        tp = self.count("tp", 1)
        if kv_heads < tp <= heads:
            self.assumed.append(f"{kv_heads} key-value heads: one on each of {tp} tensor-parallel ranks")
            kv_heads = tp
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
        if named and not 0.8 < (made := _num_parameters(config)) / named < 1.25:
            self.assumed.append(f"its sizes make {made / 1e9:.3g}e9 parameters, its name says {named / 1e9:g}e9")
        return config

    def model_name(self) -> str:
        """The name of the model; a name that is only a number of parameters refers to the model of the row's source."""
        name, source = self.text("model"), self.words("source")
        if not re.fullmatch(r"[\d.]+ ?[mb]", name.lower()):
            return name
        if family := self.text("family"):
            return f"{family} {name}"
        usual = "MPT" if re.search(COMPOSER, source) else "Llama-3" if "torchtitan" in source else ""
        if not usual:
            return name
        self.assumed.append(f"model {name} of {self.text('source')}: {usual}")
        return f"{usual}-{name}"

    def usual_ffn(self, name: str, hidden: int, heads: int, kv_heads: int) -> int:
        """The inner size of the MLP, of models of the name where it is not stated."""
        wide = {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": 4 * hidden}
        family, _ = family_of(name, has_experts=True, **wide)
        found = usual_ffn(family, hidden)
        if found != 4 * hidden:
            self.assumed.append(f"ffn not stated: {found}")
        return found

    def seq(self, name: str) -> int:
        """Tokens of a sequence; what models of the name are usually trained with where that is not stated."""
        usual = usual_seq(name) or UNNAMED_SEQ
        if not self.text("seq"):
            self.assumed.append(f"sequence not stated: {usual}")
        return self.count("seq", usual)

    def sizes(self, name: str, known: TransformerConfig | None) -> tuple[int, int, int]:
        """Layers, width and heads; as published where they are blank."""
        cells = ("layers", "hidden", "heads")
        published = (known.num_layers, known.hidden, known.num_heads) if known else None
        missing = [cell for cell in cells if not self.text(cell)]
        if missing and published is None:
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
        vocab = -(-stated // parts) * parts
        if not self.text("vocab"):
            self.assumed.append(f"vocabulary not stated: {vocab}")
        elif vocab != stated:
            self.assumed.append(f"vocabulary padded to {vocab}")
        return vocab

    def block_settings(self, family: Family) -> dict[str, Any]:
        """The family's settings of a block, without positions where the notes say so."""
        settings = dict(family.settings)
        if re.search(r"\bno (rope|rotary|positions?)\b", self.words("notes")):
            settings["position"] = "none"
        elif settings.get("position") == "rope" and _DESCRIBED in self.words("notes"):
            settings["position"] = "none"
            self.assumed.append("no rotary positions: the list of a block's parts that its notes refer to has none")
        return settings

    # ------------------------------------------------------------------- layout

    def degrees(self, config: TransformerConfig, stack: str) -> Degrees:
        tp, pp, cp, ep = (self.count(name, 1) for name in ("tp", "pp", "cp", "ep"))
        gpus = self.count("gpu_count", 0)
        dp = self.count("dp", 0)
        if not dp:
            if not gpus or gpus % (tp * pp * cp):
                reason = (
                    f"{gpus} devices are no multiple of {tp * pp * cp}" if gpus else "gpu_count is not stated either"
                )
                raise Skip(f"dp is not stated; {reason}", "gpu_count")
            dp = gpus // (tp * pp * cp)
            self.assumed.append("dp not stated: all devices that tp, pp and cp leave")
        if gpus and dp * tp * pp * cp != gpus:
            raise Skip(f"its degrees need {dp * tp * pp * cp} ranks, but it has {gpus} devices", "gpu_count")
        self.expert_ranks = ep
        self.has_whole_experts = config.experts is not None and self.whole_experts(tp, dp * cp)
        if self.has_whole_experts or cp > 1:
            ep = math.gcd(ep, dp)
        batch = self.batch(dp, pp)
        micro = self.count("micro_batch", batch // dp if batch == dp else 0)
        if not micro:
            raise Skip("micro_batch is not stated", "micro_batch")
        if batch % (dp * micro):
            near = max(1, round(batch / (dp * micro))) * dp * micro
            if abs(near / batch - 1) > _UNEVEN_BATCH:
                raise Skip(f"global_batch {batch} does not divide over dp {dp} x micro_batch {micro}", "global_batch")
            self.assumed.append(f"global_batch {batch} does not divide over dp {dp} x micro_batch {micro}: {near}")
            batch = near
        schedule, virtual = self.schedule(pp, config.num_layers)
        again = self.recompute(stack, has_experts=config.experts is not None)
        level = self.sharding(dp * cp, pp, stack)
        first = Degrees(
            dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, micro_batch=micro, global_batch=batch, schedule=schedule,
            virtual=virtual, recompute=again.mode,
            recompute_layers=recomputed_layers(again, config.num_layers, pp * virtual),
            sequence_parallel=self.sequence_parallel(tp, stack),
            optimizer=self.optimizer(config.dtype, level, stack, accumulates=batch > dp * micro),
        )  # fmt: skip
        chunks, layers = first.num_chunks, config.num_layers
        if layers % chunks and (layers + 2) % chunks == 0:
            each = (layers + 2) // chunks
            counts = [each] * chunks
            counts[0] -= 1
            counts[-1] -= 1
            self.assumed.append("first and last chunk hold one layer fewer")
            return dataclasses.replace(first, layers=tuple(counts))
        if layers % chunks:
            self.assumed.append(f"{layers} layers do not divide over {chunks} chunks: some hold one more")
        return first

    def batch(self, dp: int, pp: int) -> int:
        """Sequences of a step; without a pipeline, where that is not stated, one micro-batch of every replica."""
        if self.text("global_batch") or pp > 1 or not self.text("micro_batch"):
            return self.count("global_batch")
        self.assumed.append("global_batch not stated: one micro-batch of every replica")
        return dp * self.count("micro_batch")

    def sequence_parallel(self, tp: int, stack: str) -> bool:
        mode = re.search(r"(reduce[-_ ]scatter)|all[-_ ]reduce", self.words("sequence_parallel"))  # Nanotron's words
        stated = bool(mode.group(1)) if mode else self.switch("sequence_parallel")
        if stated is None and tp > 1:
            stated = stack not in ("megatron-2022", "zero-bubble")
            self.assumed.append(f"sequence parallelism not stated: {'on' if stated else 'off'} with tensor parallelism")
        return bool(stated) and tp > 1

    def sharding(self, copies: int, pp: int, stack: str) -> int:
        """The optimizer-parallel level of `copies` of the weights; where it is not stated, that of most runs of the
        stack.

        Weights stay gathered between the micro-batches of a pipeline (Grattafiori et al. 2024, arXiv 2407.21783,
        section 3.3.2: "we do not reshard after forward"); torch's stacks know that of themselves.
        """
        usual = 3 if stack.startswith("torch") else 1 if re.match(_SHARDS_STATES, stack) else 0
        usual = usual if copies > 1 else 0
        found = level_of(self)
        if found is None and copies > 1:
            self.assumed.append(f"optimizer sharding not stated: level {usual}")
        if found == 3 and pp > 1 and not stack.startswith("torch"):
            self.assumed.append("weights stay gathered between the micro-batches of a pipeline")
            return 2
        if found == 2 and pp > 1 and re.match(_SHARDS_STATES, stack):
            self.assumed.append("ZeRO-2 of Megatron's layers: its distributed optimizer, gradients reduced once a step")
            found = 1
        return usual if found is None else found

    def shards(self, degrees: Degrees, per_node: int) -> int:
        """The data-parallel ranks that share the weights in hybrid sharding; 0: all of them.

        Where the row does not state them they are those of a node, as in torch (`HYBRID_SHARD` of
        torch/distributed/fsdp/api.py).
        """
        dp, words = degrees.dp, self.words("zero_level", "notes", "source")
        stated = self.count("shards", 0) or (dp // self.count("groups") if self.text("groups") else 0)
        if not stated and not re.search(HYBRID, words):
            return 0
        within = max(1, per_node // (degrees.tp * degrees.cp))
        shards = stated or within
        if dp % shards:
            raise Skip(f"groups of {shards} ranks do not divide dp {dp}", "dp")
        if degrees.optimizer.parallel_level < 3 or shards in (1, dp):
            return 0
        if not stated:
            self.assumed.append(f"hybrid sharding: the weights are shared by the {shards} ranks of a node")
        return shards

    def recompute(self, stack: str, *, has_experts: bool) -> Recompute:
        text = self.text("recompute")
        if not text and _NARAYANAN in self.words("source"):
            self.assumed.append("recomputation not stated: full, which its eq. 3 counts")
            return Recompute(mode="full")
        if not text:
            self.assumed.append("recomputation not stated: none")
            return Recompute(mode="none")
        found = recompute_named(text)
        if found is None:
            raise Skip(f"recompute {text!r} is not modelled; modelled are none, selective, full", "recompute")
        if (
            found.is_open
            and found.mode == "full"
            and has_experts
            and not re.search(r"\bmoe\b(?![-_ ]act)", text.lower())
        ):
            found = dataclasses.replace(found, mode="none")  # of the MLP of the few dense layers
        if found.is_open:
            self.assumed.append(f"recompute {text!r} taken as {found.mode}")
        if found.share is not None:
            self.assumed.append(f"recompute {text!r}: whole blocks, {found.share:.0%} of them")
        if found.mode not in (modes := stack_named(stack).recompute_modes) and found.mode == MEMORY_BOUND:
            found = dataclasses.replace(found, mode=modes[0])
            self.assumed.append(f"recompute {text!r} taken as {found.mode}: norms and activation functions cost little")
        if found.mode == "selective" and stack.startswith("torch"):
            found = dataclasses.replace(found, mode="selective_op")
            self.assumed.append("selective recomputation: torchtitan's, by operator")
        return found

    def schedule(self, pp: int, layers: int) -> tuple[str, int]:
        text, (name, chunks) = self.text("schedule"), schedule_named(self.text("schedule"))
        virtual = chunks or 1
        if self.text("vpp").lower().startswith("max"):
            virtual = -(-layers // pp)
        elif self.text("vpp"):
            virtual = max(1, self.count("vpp", least=0))
        if pp == 1:
            if virtual > 1:
                self.assumed.append(f"vpp {self.text('vpp')} without a pipeline: taken as 1")
            if text and not name:
                self.assumed.append(f"schedule {text!r} without a pipeline: taken as none")
            return "1f1b", 1
        if not text:
            self.assumed.append("schedule not stated: 1F1B")
            name = "1f1b"
        if name and (other := re.search(r"chimera|hanayo|\bwaves?\b", text.lower())):
            self.assumed.append(f"schedule {other.group()!r} is not modelled: taken as interleaved 1F1B")
            virtual = max(virtual, 2)
        if not name:
            raise Skip(f"unknown schedule {text!r}; known are {', '.join(schedule_names())}", "schedule")
        if name == "dualpipe_v" and not re.search(r"v\b", text.lower()):
            self.assumed.append("DualPipe taken as DualPipe-V, which has its bubble with one copy of the weights")
        if virtual > 1 and name == "1f1b":
            name = "interleaved_1f1b"
        if virtual == 1 and name in ("interleaved_1f1b", "interleaved_zb", "looped_bfs"):
            if layers == pp or not self.text("vpp"):
                raise Skip(f"schedule {text!r}, but vpp is not stated", "vpp")
            name = "1f1b"
        return name, virtual

    def optimizer(self, dtype: str, level: int, stack: str, *, accumulates: bool) -> Optimizer:
        """Adam; in mixed precision with float32 master weights, except where everything is said to be in one dtype."""
        settings = {"lr": 1e-4}
        megatron = not stack.startswith("torch")  # fp16 gradients stay in their buffers
        per_step = "step"
        if level >= 2:
            # FSDP2 and Megatron-FSDP keep shards of gradients only, unless told to wait for the last one
            late = accumulates and self.reduces_last()
            per_step = "step" if late else "micro_batch"
            if accumulates and self.count("pp", 1) == 1:
                which = "the last micro-batch only, as its notes say" if late else "every micro-batch, FSDP2's default"
                self.assumed.append(f"gradients reduced in {which}")
        self.assumed.append("optimizer AdamW")
        if dtype == "float32":
            return Optimizer(kind="adamw", settings=settings, parallel_level=level, reduce_every=per_step)
        if not megatron and self.one_dtype():
            self.assumed.append("weights, gradients and states in one precision")
            return Optimizer(kind="adamw", settings=settings, parallel_level=level, reduce_every=per_step)
        low = reduces_low(self)
        kept = dtype if megatron and (dtype == "float16" or keeps_low(self)) else "float32"
        self.assumed.append(
            f"mixed precision: float32 master weights and states, gradients in {kept}, reductions in "
            f"{dtype if low else 'float32'}"
        )
        return Optimizer(
            kind="adamw", settings=settings, parallel_level=level, reduce_every=per_step, gradient_dtype=kept,
            master_dtype="float32", reduce_dtype=dtype if low else None,
        )  # fmt: skip

    def reduces_last(self) -> bool:
        """Whether the row or its notes state that gradients are reduced on the last micro-batch only."""
        words = self.words("notes", "source")
        return _DESCRIBED in words or bool(re.search(r"last micro-?batch|no_sync|set_requires_gradient_sync", words))

    def one_dtype(self) -> bool:
        """Whether a run with torch keeps weights, gradients and states in one dtype, as our own runs do by default."""
        words = self.words("precision", "notes", "source")
        if re.search(COMPOSER, words):  # whose mode PURE keeps float32 shards
            return False
        if re.search(r"mixed|\bamp|master|autocast", words):
            return False
        return bool(re.search(r"\bpure\b|everything|\bown run\b", words))
