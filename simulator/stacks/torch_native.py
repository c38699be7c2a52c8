"""torch's own parallel modules, eager or with torch.compile on every block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from costmodels import Machine
from costmodels.price.free_calls import FREE_CALLS
from costmodels.price.instruction import price_compute
from costmodels.price.torch_hosts import (
    CHECKPOINT_S,
    DTENSOR_END_HOST_S,
    ENTRY_HOST_S,
    PIPELINE_PASS,
    ROTARY_HOST_S,
    SEQUENCE_PARALLEL,
    SPLIT_BACKWARD,
    UPDATE_HOST_S,
    host_s,
)
from costmodels.widths import CHIP_SPREAD, OTHER_LONGER
from plans.degrees import Degrees
from plans.model.graph import itemsize
from plans.model.transformer import TransformerConfig
from plans.optimizer import Optimizer
from plans.timeline import PS_PER_S
from simulator.lines import COMPUTE, Line
from simulator.stacks.base import PieceSizes, Stack, update_bytes
from simulator.stacks.dtensor_steps import (
    along_sequence,
    beside_products,
    is_loss,
    loss_as_logits,
    own_reductions,
    split_loss,
    whole_loss,
)
from simulator.stacks.footprint import Footprint
from simulator.stacks.kernels import elementwise
from simulator.stacks.steps import Kernel, Shape, Step

__all__ = ["TorchNative"]

_FLASH_2_SHARE = 0.35
"""Share of a Hopper device's peak that FlashAttention-2, torch's default kernel there until 2025, reaches (Shah et al.
2024, arXiv 2407.08608, abstract); the machines' figures are of cuDNN's."""

_CUDNN_SHARE = (0.57, 0.555)
"""Share of an H200's peak that cuDNN's kernel was measured to reach, forward and backward (benchmarks/data,
attention)."""

_TRITON_TIMES = (1.4, 2.0)
"""How many times as long as FlashAttention-2 the FlashAttention in Triton takes, forward and backward (Dao 2023, arXiv
2307.08691, section 4.1: 1.3 to 1.5, and 2)."""

_CLIP_ENTRIES = 4
"""Passes over a parameter in clip_grad_norm_: its gradient for the norm, the norm, the norm in a stack, the gradient
scaled."""

_HALF_LOSS = (4 / 14, 8 / 22)
"""Bytes that a loss moves for each logit in half precision over those with float copies, forward and backward: without,
log-softmax reads and writes 2 + 2, the gradient of the picked ones writes 2, that of log-softmax 4 + 2; with, a cast
moves 2 + 4 and later 4 + 2, and all the others are of float (torch.nn.functional.cross_entropy)."""

_COMPILED_LOSS = (4 / 14, 4 / 22)
"""The same of a loss that Inductor makes one kernel each way, which store the logits' gradient only: forward reads
logits twice, backward reads them and writes their gradient."""

_ROTARY_MOVES = 5
"""Tensors that rotary positions written out read, and as many that they write, forward and backward. x cos + (-x2, x1)
sin: a negation of a half, a concatenation, two products and a sum (Hugging Face's apply_rotary_pos_emb). As complex
numbers: x is made float, multiplied and made half again, 6 + 8 + 6 bytes an element (torchtitan's apply_rotary_emb).
Calibration measures both (`executor.calibrate.kernels`)."""


@dataclass(frozen=True, kw_only=True)
class TorchNative(Stack):
    """The kernels that torch's eager mode launches for a transformer, and those that Inductor leaves of them.

    Args:
        compiled: torch.compile of each block: chains of element-wise operations and the norms around them are one
            kernel; embedding, head and loss stay eager.
        fused_norm: whether a norm is one kernel (torch 2.8 and later) or written out.
        update: the optimizer's form: "fused" (one kernel over all tensors) or "foreach".
        flash_2: whether attention is FlashAttention-2 rather than cuDNN's; on Hopper devices.
        triton_attention: whether attention is FlashAttention of 2022 in Triton rather than FlashAttention-2.
        complex_rotary: whether rotary positions are products of complex numbers in float.
        loss_parallel: whether the loss is computed on logits split over tensor-parallel ranks; else they are gathered.
        float_loss: whether the loss makes float copies of the logits, or keeps their dtype.
        one_kernel_loss: whether the loss of logits that are not split is one kernel each way, compiled or fused.
        holds_logits: whether the logits stay alive during the backward, as they do where the caller's variable does.
        keeps_outputs: whether a pipeline keeps the outputs of all micro-batches for the caller (`return_outputs` of a
            schedule's step, torch's default).
        one_input: whether the products that share an input get it as one distributed tensor, so that its gradient is
            reduced once; else every product reduces its own (ColwiseParallel without PrepareModuleInput).
        clips: whether gradients are clipped by their global norm.
        async_tp: whether gathers and scatters of tensor parallelism continue in pieces next to the products next to
            them.
    """

    name: str = "torch"
    chip_spread: float = CHIP_SPREAD
    runs_programs: bool = False
    recomputes_some: tuple[str, ...] = ("selective", "selective_op", "full")
    rearranges: bool = True
    adds_memory: bool = True
    splits_evenly: bool = True
    compiled: bool = False
    fused_norm: bool = True
    update: str = "fused"
    flash_2: bool = False
    triton_attention: bool = False
    complex_rotary: bool = False
    loss_parallel: bool = False
    float_loss: bool = True
    one_kernel_loss: bool = False
    holds_logits: bool = True
    keeps_outputs: bool = True
    one_input: bool = False
    async_tp: bool = False
    host: str = "quiet"
    clips: bool = False
    gathers_ahead: bool = (
        False  # a forward's gathers wait for what the stream did before it (FSDPState._root_pre_forward)
    )
    copies_shards: bool = True  # FSDP2's copy-in and copy-out (fsdp/_fully_shard/_fsdp_collectives.py)

    def assumptions(self, config: TransformerConfig, degrees: Degrees) -> tuple[str, ...]:
        """See `Stack`."""
        own = f"software {self.name}:"
        host = "Inductor's kernels at a machine's dispatch" if self.compiled else (
            f"a block's dispatch as measured on {self.host}" if self.host != "quiet" else
            "a block's dispatch as measured on four quiet hosts of H200, for each entry their median"
        )  # fmt: skip
        notes = [f"{own} host: {host}"]
        if self.flash_2:
            notes.append(f"{own} attention is FlashAttention-2 at {_FLASH_2_SHARE:.0%} of the peak (arXiv 2407.08608)")
        if self.triton_attention:
            notes.append(f"{own} attention is FlashAttention in Triton, as Composer's was in 2023")
        if config.norm == "rms" and not (self.fused_norm or self.compiled):
            notes.append(f"{own} RMS norms written out")
        if config.position == "rope" and self.complex_rotary:
            notes.append(f"{own} rotary positions as products of complex float numbers")
        if degrees.optimizer.kind == "adamw":
            notes.append(f"{own} AdamW in its {self.update} form")
        if degrees.tp > 1:
            notes.append(f"{own} loss on {'split' if self.loss_parallel else 'gathered'} logits")
            notes.append(
                f"{own} {'one reduction' if self.one_input else 'one reduction each'} for products of one input"
            )
        if degrees.optimizer.parallel_level and degrees.dp * degrees.cp > 1:
            often = "again in every forward" if self.gathers_each_forward(degrees) else "once a step"
            notes.append(f"{own} FSDP2: weights gathered {often}, shards copied in and out of flat buffers")
        if self.as_run(degrees) is not degrees:
            notes.append(f"{own} weights stay gathered and gradients whole until a stage's last backward")
        if self.holds_logits:
            notes.append(f"{own} the caller's variable holds the logits during the backward")
        if self.reserved:
            ratio = _RESERVED[self._kind(degrees)]
            notes.append(f"{own} memory is what is reserved: {ratio:.2f} times what is allocated, as in own steps")
        copies = "makes float copies of the logits" if self.float_loss else "is made of the logits as they are"
        notes.append(
            f"{own} the loss {'is one kernel each way' if self.one_kernel_loss and degrees.tp == 1 else copies}"
        )
        if config.experts is not None:
            notes.append(f"{own} experts as grouped products, tokens permuted in one pass: assumed")
        if self.clips:
            notes.append(f"{own} gradients are clipped by their norm")
        return *notes, *self._common_assumptions(degrees)

    def _common_assumptions(self, degrees: Degrees) -> tuple[str, ...]:
        longer = f"software {self.name}: kernels take longer in steps than alone, like twofold's own"
        return (*([longer] if self.is_measured else []), *super()._common_assumptions(degrees))

    def on(self, machine: Machine) -> Stack:
        """Without the slower attention where the machine's figures are those of FlashAttention-2 already."""
        known = machine.compute.attention
        return replace(self, flash_2=False) if self.flash_2 and known is not None and known.kernel != "cudnn" else self

    def as_run(self, degrees: Degrees) -> Degrees:
        """Stages of torch's pipelines keep gathered weights and full gradients until their last backward.

        Before that, the runtime lets FSDP2 neither shard weights again nor reduce gradients
        (torch/distributed/pipelining/stage.py, backward_maybe_with_nosync); torchtitan does not shard weights after a
        forward of a stage either (models/llama3/infra/parallelize.py, apply_fsdp, the default policy). Sharding weights
        after every forward of a stage ("always") is not modelled.
        """
        degrees = super().as_run(degrees)
        optimizer = degrees.optimizer
        if degrees.pp == 1 or optimizer.parallel_level < 2:
            return degrees
        return replace(degrees, optimizer=msgspec.structs.replace(optimizer, parallel_level=2, reduce_every="step"))

    def gathers_each_forward(self, degrees: Degrees) -> bool:
        """FSDP2 shards weights again after a backward (FSDPParamGroup.reshard_after_backward); but see `as_run`."""
        return degrees.optimizer.parallel_level >= 2 and degrees.pp == 1

    def longer_on(self, machine: Machine) -> float:
        """As in `Stack`. Kernels of torch's parts take as much longer in steps as those of twofold's executor
        (`costmodels.widths.STEP_LONGER`)."""
        return machine.compute.longer_in_steps if self.is_measured else OTHER_LONGER

    def block_host_s(
        self, degrees: Degrees, part: str, *, reduces: bool, config: TransformerConfig | None = None
    ) -> float | None:
        """Measured on one block of tiny sizes, so that the device idles (see `torch_hosts.py`)."""
        if self.compiled or part not in ("F", "B", *SPLIT_BACKWARD):
            return None
        kind = self._kind(degrees)
        if kind.startswith("fsdp2") and not reduces:
            kind += "_accumulate"
        forward, backward = host_s(self.host, kind)
        if kind == "dtensor" and degrees.sequence_parallel:
            forward, backward = forward * SEQUENCE_PARALLEL[0], backward * SEQUENCE_PARALLEL[1]
        if config is not None and config.position != "rope":
            forward, backward = forward - ROTARY_HOST_S[0], backward - ROTARY_HOST_S[1]
        if part == "F":
            return forward + (CHECKPOINT_S[0] if degrees.recompute != "none" else 0)
        if part in SPLIT_BACKWARD:
            backward *= SPLIT_BACKWARD[part]
            if part == "W":
                return backward
        return backward + (forward + CHECKPOINT_S[1] if degrees.recompute != "none" else 0)

    def dispatch_ps(self, machine_ps: int, call: str, part: str) -> int:
        """As in `Stack`, with the pipeline's runtime beside every message between stages."""
        if call != "transfer":
            return machine_ps
        return machine_ps + round(PIPELINE_PASS * sum(host_s(self.host, "plain")) * PS_PER_S)

    @staticmethod
    def _kind(degrees: Degrees) -> str:
        """The measured parallel module that runs a block."""
        if degrees.tp > 1:
            return "dtensor"
        if degrees.dp * degrees.cp > 1:
            return {0: "ddp", 3: "fsdp2_reshard"}.get(degrees.optimizer.parallel_level, "fsdp2")
        return "plain"

    def end_host_s(self, piece: str, degrees: Degrees, part: str) -> float | None:
        """Tensor-parallel embedding and head: a row-wise module, a column-wise one whose output is gathered."""
        if self.compiled or degrees.tp == 1 or part not in ("F", "B") or piece not in DTENSOR_END_HOST_S:
            return None
        return DTENSOR_END_HOST_S[piece][part == "B"]

    def kernels(
        self, call: str, shapes: Sequence[Shape], dtype: str, touched_bytes: int, part: str
    ) -> Sequence[Kernel]:
        """See `Stack`."""
        if call in FREE_CALLS:
            return ()
        shape = tuple(shapes)
        kind, _, which = call.partition(".")
        if kind == "attention":
            forward = which == "forward"
            times = _CUDNN_SHARE[not forward] / _FLASH_2_SHARE if self.flash_2 else 1.0
            times *= _TRITON_TIMES[not forward] if self.triton_attention else 1.0
            name = call if forward else "attention.backward"
            return (
                *self._repeated(shape[1] if forward else shape[2], shape[0], dtype),
                Kernel(call=name, shapes=shape, dtype=dtype, touched_bytes=touched_bytes, times=times),
            )
        if kind == "rope" and (self.complex_rotary or not self.compiled):
            # Inductor leaves complex operators to eager (_inductor/lowering.py)
            form = "rope_by_complex" if self.complex_rotary else "rope_by_hand"
            return (elementwise(f"{form}.{which}", math.prod(shape[0]), dtype, _ROTARY_MOVES, _ROTARY_MOVES),)
        if kind == "accumulate":  # in place, into the gradient that the first micro-batch left
            return (elementwise("add_.forward", math.prod(shape[0]), dtype, 2, 1),)
        if kind == "sum":  # autograd adds gradients of one tensor as they come, two at a time
            each = elementwise("add.forward", math.prod(shape[-1]), dtype, 2, 1)
            return (len(shape) - 2) * (each,)
        if kind in ("rms_norm", "layer_norm"):
            return self._norm(call, shape, dtype, touched_bytes)
        if kind == "embedding" and which == "grad1":
            return (Kernel(call="embedding.grad0", shapes=shape, dtype=dtype, touched_bytes=touched_bytes),)
        if kind in ("cast", "cross_entropy"):
            return self._loss(kind, which, shape, dtype)
        if self.compiled and kind in ("silu", "gelu", "mul", "rope", "dropout", "add"):
            return self._compiled(call, shape, dtype, touched_bytes)
        if kind == "mul" and which.startswith("grad"):
            return (elementwise("mul.forward", math.prod(shape[0]), dtype, 2, 1),)
        return (Kernel(call=call, shapes=shape, dtype=dtype, touched_bytes=touched_bytes),)

    def _repeated(self, keys: Shape, queries: Shape, dtype: str) -> Sequence[Kernel]:
        """Keys and values made as many heads as queries before attention, where a model does so."""
        if not self.complex_rotary or math.prod(keys[:-2]) == math.prod(queries[:-2]):
            return ()
        moved = math.prod(keys) + math.prod(queries[:-2]) * keys[-2] * keys[-1]
        return 2 * (elementwise("add.forward", moved, dtype, 1, 0),)

    def _loss(self, kind: str, which: str, shapes: tuple[Shape, ...], dtype: str) -> Sequence[Kernel]:
        """The loss of logits in half precision that are made float: measured as a whole, cast and all. Here as of
        bfloat16; `arranged` knows in what the logits are."""
        if kind == "cast":  # counted with the loss
            return ()
        elements, forward = math.prod(shapes[0]), which == "forward"
        call, writes = ("cross_entropy.forward", 0) if forward else ("cross_entropy.grad0", 1)
        made = elementwise(call, elements, "bfloat16", 1, writes, shapes[0])
        if self.one_kernel_loss:
            return (replace(made, times=_COMPILED_LOSS[not forward]),)
        return (made if self.float_loss else replace(made, times=_HALF_LOSS[not forward]),)

    def _norm(self, call: str, shapes: tuple[Shape, ...], dtype: str, touched: int) -> Sequence[Kernel]:
        """Forward and backward of a norm; the gradients of x and of the weight come from one kernel."""
        which = call.partition(".")[2]
        if which not in ("forward", "grad0"):
            return ()
        elements = math.prod(shapes[0])
        if self.compiled:  # Inductor joins it with the sum before it: the sum's output is not read again
            reads = 1 if which == "forward" else 2
            return (elementwise(call, elements, dtype, reads, 1, shapes[0]),)
        if self.fused_norm or not call.startswith("rms"):  # a layer norm has had a separate kernel since torch 1.0
            return (Kernel(call=call, shapes=shapes, dtype=dtype, touched_bytes=touched),)
        return (Kernel(call=f"rms_norm_by_hand.{which}", shapes=shapes, dtype=dtype, touched_bytes=touched),)

    def _compiled(self, call: str, shapes: tuple[Shape, ...], dtype: str, touched: int) -> Sequence[Kernel]:
        """The remaining element-wise operations: tensors between two of them are neither written nor read."""
        kind, _, which = call.partition(".")
        elements = math.prod(shapes[0])
        if kind in ("silu", "gelu"):
            return ()  # inside the product that follows or precedes it
        if kind == "mul":
            if which == "forward":
                return (elementwise("mul.forward", elements, dtype, 2, 1),)
            return (elementwise("mul.forward", elements, dtype, 3, 2),) if which == "grad0" else ()
        if kind == "add":
            return (elementwise("add.forward", elements, dtype, 2, 1),)
        return (Kernel(call=call, shapes=shapes, dtype=dtype, touched_bytes=touched),)

    def update_lines(
        self, sizes: Sequence[int], dtype: str, optimizer: Optimizer, num_shards: int, machine: Machine
    ) -> list[Line]:
        """One multi-tensor kernel over all parameters of a piece."""
        elements = sum(-(-size // num_shards) for size in sizes)
        if not elements:
            return []
        call = f"{optimizer.kind}.{self.update}" if optimizer.kind == "adamw" else f"{optimizer.kind}.update"
        cost = price_compute(
            machine, call, ((elements,),), optimizer.updates_in(dtype), elements * update_bytes(dtype, optimizer)
        )
        host_s = cost.dispatch_ps / PS_PER_S
        lines = []
        if optimizer.kind == "adamw":
            form = 1 if num_shards > 1 else 0
            host_s = len(sizes) * UPDATE_HOST_S[self.update][form]
            size = elements * itemsize(optimizer.accumulates_in(dtype))
            if dtype == "float16":  # GradScaler.unscale_ divides gradients by the scale and finds infinities
                unscaled = price_compute(machine, "add.forward", ((elements,),), "float32", 2 * size)
                lines.append(Line(COMPUTE, 0, unscaled.work_ps, "memory"))
            if self.clips:
                each = price_compute(machine, "add.forward", ((elements,),), "float32", size)
                again = price_compute(machine, "add.forward", ((elements,),), "float32", 2 * size)
                clip_s = len(sizes) * _CLIP_ENTRIES * ENTRY_HOST_S * form
                lines += [Line(COMPUTE, round(clip_s * PS_PER_S), each.work_ps + again.work_ps, "memory")]
        dispatch = self.dispatch_ps(round(host_s * PS_PER_S), "update", "U")
        return [*lines, Line(COMPUTE, dispatch, cost.work_ps, "memory")]

    def arranged(self, steps: Sequence[Step], ways: int) -> Sequence[Step]:
        """Tensor-parallel messages as DTensor's modules send them (torch/distributed/tensor/parallel/style.py)."""
        steps = loss_as_logits(steps)
        if ways > 1:
            if self.one_kernel_loss:  # only on whole logits
                steps = [
                    replace(step, times=1.0) if isinstance(step, Kernel) and is_loss(step) else step for step in steps
                ]
            steps = along_sequence(beside_products(steps, ways) if self.async_tp else steps)
            steps = split_loss(steps) if self.loss_parallel else whole_loss(list(steps), ways)
            steps = steps if self.one_input else own_reductions(steps)
        return steps

    def unknown_bytes(self, config: TransformerConfig, degrees: Degrees) -> tuple[int, int]:
        """The change of memory if the caller computes the loss: less, if no variable holds the logits and the loss is
        made in half precision (its log-softmax, that one's gradient and the logits' gradient are then no float copies);
        more, if the float copy of the logits is held. A pipeline whose caller asks for no outputs, as torchtitan's does
        since the end of 2025 (train.py, return_outputs=False), keeps those of one micro-batch only."""
        if not self.float_loss:
            return 0, 0
        elements, low = degrees.micro_batch * config.seq // degrees.cp * config.vocab, itemsize(config.dtype)
        outputs = 0
        if degrees.pp > 1 and self.keeps_outputs:
            ways = degrees.tp if self.loss_parallel else 1
            outputs = (degrees.num_micro_batches - 1) * elements * low // ways
        if not self.holds_logits or (self.one_kernel_loss and degrees.tp == 1):  # which makes none of these copies
            return outputs, 0
        return outputs + elements * (low + 3 * (4 - low)), elements * 4

    def reserves_gradients(self, degrees: Degrees) -> bool:
        """FSDP2 allocates reduced gradients on the stream that reduces them, whose reserved memory no other stream uses
        (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_reduce)."""
        return self.reserved and degrees.dp * degrees.cp > 1 and degrees.optimizer.parallel_level >= 2

    def message_bytes(self, optimizer: Optimizer, members: int, item_bytes: int, largest_bytes: int) -> int:
        """FSDP2 gathers and reduces a block at once, DistributedDataParallel in buckets that full tensors fill."""
        if optimizer.parallel_level:
            return 0
        return super().message_bytes(optimizer, members, item_bytes, largest_bytes)

    def whole_bytes(self, pieces: Mapping[str, int]) -> int:
        """The root keeps its own parameters whole from forward to backward; one block computes, one is gathered."""
        return sum(size * (2 if piece == "block" else 1) for piece, size in pieces.items())

    def sharded_at_head_bytes(self, pieces: Mapping[str, int]) -> int:
        """A block is sharded again after its forward, and the first is gathered for the backward when the gradient of
        the logits is there (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, post_forward, pre_backward).
        Blocks are gathered on a stream of their own, whose reserved memory no other stream uses
        (_fsdp_collectives.py, foreach_all_gather)."""
        return (1 if self.reserved else 2) * pieces.get("block", 0)

    def footprint(self, piece: str, found: Footprint, sizes: PieceSizes) -> Footprint:
        """Autograd keeps saved tensors until the node's backward has run.

        The loss: logits in float, their log-softmax (kept), its gradient and the logits' gradient, all in float or all
        in half precision, and the half-precision logits where the caller holds them. On split logits it is written out
        (`dtensor_steps.split_loss`), with one more float tensor alive at the peak of either way.
        """
        if piece == "block":
            return self._block_footprint(found, sizes)
        if piece != "head":
            return found
        elements = sizes.logits * (1 if self.loss_parallel else sizes.ways)
        low = elements * sizes.item_bytes if sizes.item_bytes < 4 else 0
        kept = found.kept - 4 * sizes.logits + 4 * elements
        held = low if self.holds_logits else 0
        if self.one_kernel_loss and sizes.ways == 1:
            own = elements * sizes.item_bytes  # the logits, whose gradient is as large
            kept += own - 4 * elements
            return replace(found, kept=kept, forward=kept, backward=own + 2 * sizes.arrival_bytes)
        if not self.float_loss:
            kept += low - 4 * elements
            return replace(
                found, kept=kept + held, forward=kept + low, backward=low + max(low, 2 * sizes.arrival_bytes)
            )
        written_out = 4 * elements if self.loss_parallel and sizes.ways > 1 else 0
        return replace(
            found, kept=kept + held, forward=kept + low + 4 * elements + written_out,
            backward=max(found.backward, 8 * elements + written_out), weights=found.weights,
        )  # fmt: skip

    def _block_footprint(self, found: Footprint, sizes: PieceSizes) -> Footprint:
        """Eager selection by operator keeps the output of a block's last product, although nothing needs it again.

        A compiled block keeps only what its backward reads, and not the activation function's output in a gated MLP,
        which the kernel that multiplies it computes again (torch/_functorch/partitioners.py): of 21 compiled Llama-like
        models on H200 and H100 that was the difference to eager ones (benchmarks/results/peers_*).

        A split backward releases nothing before the weight gradients: the gradients of inputs are computed with
        `retain_graph`, and the last product, from which its weight gradient starts, holds the graph of all before it
        (torch/distributed/pipelining/_backward.py, stage_backward_input).
        """
        more = 0
        if self.compiled:
            more -= sizes.gate_bytes if sizes.recompute in ("none", "selective") else 0
        elif sizes.recompute == "selective_op":
            more += sizes.arrival_bytes
        return replace(
            found, kept=found.kept + more, forward=found.forward + more,
            kept_for_weights=found.kept_for_weights + found.released,
            backward=max(found.backward, found.unreleased),
        )  # fmt: skip

    def memory(
        self, roles: dict[str, int], degrees: Degrees, outputs_bytes: int = 0, received_bytes: int = 0
    ) -> dict[str, int]:
        """The memory of torch's parallel modules besides a rank's tensors.

        DistributedDataParallel's buckets hold every gradient once more, since gradient_as_bucket_view is off; steps of
        small decoders show one copy more (kind step in benchmarks/data: 12.9 GB against 10.7 GB with FSDP2). A
        pipeline keeps the outputs of all micro-batches where it gives them to the caller (PipelineStage.output_chunks),
        else those whose backward has not ended (PipelineStage.fwd_cache, backward_one_chunk).
        cuBLAS's workspace is 32 MiB (kind allocation). A stage has a buffer for what it receives in every micro-batch
        (PipelineStage, _setup_forward_recv_info and _setup_backward_recv_info); those of micro-batches under way are
        among its activations.
        """
        extra = _WORKSPACE_BYTES
        if degrees.dp > 1 and not degrees.optimizer.parallel_level:
            extra += 2 * roles["gradient"]
        if degrees.pp > 1:
            alive = degrees.num_micro_batches if degrees.schedule == "gpipe" else 1
            outputs = degrees.num_micro_batches if self.keeps_outputs else alive
            extra += (outputs - alive * self.holds_logits) * outputs_bytes  # held ones are among the activations
            extra += (degrees.num_micro_batches - alive) * received_bytes
        if self.reserved:
            # where no micro-batch follows, gradients come while activations go
            alive = sum(size for role, size in roles.items() if role != "gradient" or degrees.num_micro_batches > 1)
            extra += round((_RESERVED[self._kind(degrees)] - 1) * (alive + extra))
        return {**roles, "buffer": roles.get("buffer", 0) + extra}


_WORKSPACE_BYTES = 32 * 2**20

_RESERVED = {"plain": 1.06, "ddp": 1.06, "dtensor": 1.175, "fsdp2": 1.16, "fsdp2_reshard": 1.16}
"""Memory reserved by torch's allocator over the most that was allocated, in our steps of decoders on 2 and 4 H200 (kind
step, figures reserved_bytes and peak_bytes): 1.06 and 1.06, 1.20 and 1.15, 1.12 to 1.20; plain as DDP."""
