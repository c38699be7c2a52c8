"""The cells of a row that describe its layout: degrees, batches, schedule, recomputation, sharding."""

from __future__ import annotations

import dataclasses
import math
import re

from interop.measurements import offload
from interop.measurements.cells import OFFLOAD_COLUMNS, OWN_RUNS, Skip
from interop.measurements.hybrid import HYBRID
from interop.measurements.mixtures import Mixtures
from interop.measurements.software import COMPOSER, is_deepseek_v3, keeps_low, level_of, reduces_low
from interop.measurements.spellings import (
    UNMODELLED_SCHEDULES,
    Recompute,
    is_offloaded,
    recompute_named,
    recomputed_layers,
    schedule_named,
)
from interop.measurements.zero_plus import parts_in
from plans.degrees import MEMORY_BOUND, Degrees
from plans.model.transformer import TransformerConfig
from plans.optimizer import Optimizer
from plans.schedules.registry import schedule_names
from simulator.stacks import stack_named

__all__ = ["LayoutCells"]

_SHARDS_STATES = r"(?:megatron|mindspore)(?!.*2022)"
"""Software that shards the states of the optimizer by default."""

_NARAYANAN = "2104.04473"

_LARGE = 30e9
"""Parameters above which torchtitan's train_configs recompute full blocks (llama3_70b.toml, llama3_405b.toml); smaller
ones choose operators (llama3_8b.toml)."""

_UNEVEN_BATCH = 0.05
"""Largest relative change of a batch that makes it divide evenly over the replicas and their micro-batches."""


class LayoutCells(Mixtures):
    """The cells of a row that describe its layout."""

    def degrees(self, config: TransformerConfig, stack: str) -> Degrees:
        """The layout of the row.

        Args:
            config: the model.
            stack: the software that ran it.

        Raises:
            Skip: a degree is missing, or they do not multiply to the number of devices.
        """
        tp, pp, cp, ep = (self.count(name, 1) for name in ("tp", "pp", "cp", "ep"))
        dp = self.replicas(tp, pp, cp, ep)
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
        batch = self.in_rounds(batch, dp * micro, pp if virtual > 1 else 1)
        again = self.recompute(stack, config)
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

    def in_rounds(self, batch: int, each: int, pp: int) -> int:
        """A batch whose micro-batches an interleaved schedule can take in rounds of `pp`: it, or the nearest one.

        Args:
            batch: sequences.
            each: sequences of one micro-batch of every replica.
            pp: stages; 1 if the schedule is not interleaved.
        """
        near = max(1, round(batch / (each * pp))) * each * pp
        if near != batch and abs(near / batch - 1) <= _UNEVEN_BATCH:
            self.assumed.append(f"global_batch {batch} is no whole number of rounds over {pp} stages: {near}")
            return near
        return batch

    def replicas(self, tp: int, pp: int, cp: int, ep: int) -> int:
        """The data-parallel degree; tables count the ranks of context or expert parallelism in it, or not.

        Raises:
            Skip: it does not follow from the row, or the degrees do not multiply to the number of devices.
        """
        gpus, dp, split = self.count("gpu_count", 0), self.count("dp", 0), tp * pp * cp
        if not dp:
            if not gpus or gpus % split:
                reason = f"{gpus} devices are no multiple of {split}" if gpus else "gpu_count is not stated either"
                raise Skip(f"dp is not stated; {reason}", "gpu_count")
            self.assumed.append("dp not stated: all devices that tp, pp and cp leave")
            return gpus // split
        if not gpus or dp * split == gpus:
            return dp
        if dp * tp * pp == gpus and dp % cp == 0:
            self.assumed.append(f"dp {dp} counts the ranks of context parallelism: {dp // cp}")
            return dp // cp
        if dp * split * ep == gpus:
            self.assumed.append(f"dp {dp} does not count the ranks of expert parallelism: {dp * ep}")
            return dp * ep
        raise Skip(f"its degrees need {dp * split} ranks, but it has {gpus} devices", "gpu_count")

    def batch(self, dp: int, pp: int) -> int:
        """Sequences of a step; by default, without a pipeline, one micro-batch of every replica."""
        if self.text("global_batch") or pp > 1 or not self.text("micro_batch"):
            return self.count("global_batch")
        self.assumed.append("global_batch not stated: one micro-batch of every replica")
        return dp * self.count("micro_batch")

    def sequence_parallel(self, tp: int, stack: str) -> bool:
        mode = re.search(r"(reduce[-_ ]scatter)|all[-_ ]reduce", self.words("sequence_parallel"))  # Nanotron's words
        words = re.fullmatch(r"(?:megatron[- ]?)?(?:sp|tp)", self.text("sequence_parallel").lower())
        stated = bool(mode.group(1)) if mode else words is not None or self.switch("sequence_parallel")
        if stated is None and tp > 1:
            stated = stack not in ("megatron-2022", "zero-bubble")
            self.assumed.append(f"sequence parallelism not stated: {'on' if stated else 'off'} with tensor parallelism")
        return bool(stated) and tp > 1

    def sharding(self, copies: int, pp: int, stack: str) -> int:
        """The optimizer-parallel level; by default the one that most runs of the software have.

        Pipelines keep weights gathered between micro-batches (Grattafiori et al. 2024, arXiv 2407.21783, section 3.3.2:
        "we do not reshard after forward"). The stacks of torch model that themselves.

        Args:
            copies: ranks that hold the same weights.
            pp: pipeline stages.
            stack: the software.
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
        """The number of data-parallel ranks that share the weights in hybrid sharding; 0 if all of them do.

        By default these are the ranks of a node, as in torch (`HYBRID_SHARD` in torch/distributed/fsdp/api.py).
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

    def zero_plus(self, degrees: Degrees) -> tuple[str, ...]:
        """The parts of ZeRO++ that are on."""
        found = parts_in(self.words("zero_level", "notes", "source"))
        if not found or degrees.optimizer.parallel_level < 3:
            return ()
        self.assumed.append(f"ZeRO++ ({', '.join(found)}): smaller messages; the time to quantise is not modelled")
        return found

    def offloaded(self, degrees: Degrees) -> tuple[str, ...]:
        """What DeepSpeed keeps in the memory of the host."""
        said = [text for column in OFFLOAD_COLUMNS if is_offloaded(text := self.text(column))]
        level = degrees.optimizer.parallel_level
        if not said or not level:
            return ()
        found = offload.parts_in("; ".join(said), level)
        self.assumed.append(f"offloaded to the host: {' and '.join(found)}; its usual host's memory and links")
        return found

    def recompute(self, stack: str, config: TransformerConfig) -> Recompute:
        """The recomputation of the row.

        Raises:
            Skip: it is not modelled.
        """
        text = self.text("recompute")
        if not text and _NARAYANAN in self.words("source"):
            self.assumed.append("recomputation not stated: full, which its eq. 3 counts")
            return Recompute(mode="full")
        if not text and is_deepseek_v3(self):
            self.assumed.append("norms, activation functions and up-projections recomputed (arXiv 2412.19437, 3.2.3)")
            return Recompute(mode=MEMORY_BOUND)
        if not text and stack.startswith("torchtitan") and re.search("torchtitan(?!;)", self.words("source")):
            mode = "full" if config.num_parameters > _LARGE else "selective_op"
            self.assumed.append(f"recomputation not stated: {mode}, as in torchtitan's train_configs")
            return Recompute(mode=mode)
        if not text:
            self.assumed.append("recomputation not stated: none")
            return Recompute(mode="none")
        found = recompute_named(text)
        if found is None:
            raise Skip(f"recompute {text!r} is not modelled; modelled are none, selective, full", "recompute")
        if (
            found.is_open
            and found.mode == "full"
            and config.experts is not None
            and not re.search(r"\bmoe\b(?![-_ ]act)", text.lower())
        ):
            found = dataclasses.replace(found, mode="none")  # of the MLP of the few dense layers
        if found.is_open:
            self.assumed.append(f"recompute {text!r} taken as {found.mode}")
        if found.share is not None:
            self.assumed.append(f"recompute {text!r}: whole blocks, {found.share:.0%} of them")
        if found.mode == "selective_op" and not stack.startswith("torch"):
            found = dataclasses.replace(found, mode="selective")
            self.assumed.append(f"recompute {text!r} taken as the attention core")
        if found.mode not in (modes := stack_named(stack).recompute_modes) and found.mode == MEMORY_BOUND:
            found = dataclasses.replace(found, mode=modes[0])
            self.assumed.append(f"recompute {text!r} taken as {found.mode}: norms and activation functions cost little")
        if found.mode == "selective" and stack.startswith("torch"):
            found = dataclasses.replace(found, mode="selective_op")
            self.assumed.append("selective recomputation: torchtitan's, by operator")
        return found

    def schedule(self, pp: int, layers: int) -> tuple[str, int]:
        """The name of the schedule and the chunks of a stage.

        Raises:
            Skip: the schedule is unknown, or its chunks are not stated.
        """
        text, (name, chunks) = self.text("schedule"), schedule_named(self.text("schedule"))
        virtual = chunks or 1
        if self.text("vpp").lower().startswith("max"):
            virtual = -(-layers // pp)
        elif self.text("vpp"):
            virtual = max(1, self.count("vpp", least=0))
        elif each := self.count("chunk_layers", 0):
            virtual = max(1, layers // (pp * each))
        if pp == 1:
            if virtual > 1:
                self.assumed.append(f"vpp {self.text('vpp')} without a pipeline: taken as 1")
            if text and not name:
                self.assumed.append(f"schedule {text!r} without a pipeline: taken as none")
            return "1f1b", 1
        if not text:
            name = "dualpipe_v" if is_deepseek_v3(self) else "1f1b"
            self.assumed.append(f"schedule not stated: {'DualPipe' if is_deepseek_v3(self) else '1F1B'}")
        if name and UNMODELLED_SCHEDULES.search(text):
            self.assumed.append(f"schedule {text!r} is not modelled: taken as {name}")
            virtual = max(virtual, 2) if name == "interleaved_1f1b" else virtual
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
        """AdamW, with float32 master weights in mixed precision, unless the row says that everything has one dtype."""
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
        kept = dtype if keeps_low(self) or (megatron and dtype == "float16") else "float32"
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
        return OWN_RUNS in words or bool(re.search(r"last micro-?batch|no_sync|set_requires_gradient_sync", words))

    def one_dtype(self) -> bool:
        """Whether a run with torch keeps weights, gradients and states in one dtype, as our own runs do by default."""
        words = self.words("precision", "notes", "source")
        if re.search(COMPOSER, words):  # whose mode PURE keeps float32 shards
            return False
        if re.search(r"mixed|\bamp|master|autocast", words):
            return False
        return bool(re.search(r"\bpure\b|everything|\bown run\b", words))
