"""Megatron-LM: fused elementwise kernels, and gradients accumulated inside the weight product."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from costmodels import Machine
from costmodels.price.free_calls import FREE_CALLS
from costmodels.price.instruction import price_compute
from costmodels.price.torch_hosts import host_s
from costmodels.widths import CHIP_SPREAD
from plans.degrees import MEMORY_BOUND, Degrees
from plans.model.transformer import TransformerConfig
from plans.optimizer import Optimizer
from simulator.lines import COMPUTE, Line
from simulator.stacks.base import PieceSizes, Stack, update_bytes
from simulator.stacks.footprint import Footprint
from simulator.stacks.kernels import elementwise, unfused_attention
from simulator.stacks.steps import Kernel, Message, Shape, Step

__all__ = ["CORE_HOST_FACTORS", "FETCH_S", "Megatron"]

_FREE = FREE_CALLS | {"accumulate", "add.forward"}
"""Also free are the sum of the residual, which is inside the fused bias, dropout and add, and accumulation, which is
inside the product that makes a weight's gradient."""

CORE_HOST_FACTORS = (2.7, 1.5)
"""Host time of a layer of Megatron-Core 0.16.1, forward and backward, over that of plain torch modules on the same H200
host, in the median of four runs (benchmarks/devices/megatron_host.py). They ran without Transformer Engine, whose
modules are assumed to take as long."""

_PRODUCT_HOST_S = 11e-6
"""Host time of a matrix product alone (the same data), from which the weight-gradient part is computed."""

_MESSAGE_HOST_S = 30e-6
"""Host time of a collective in eager torch (kind collective, small messages back to back)."""

_SPLIT_HOST = {False: (0.0, 0.6), True: (0.2, 1.1)}
"""Whether along the sequence too -> the host time that tensor parallelism adds to a layer, forward and backward, over
that of plain torch modules: layers of Megatron-Core that two ranks split, with their gradients' hooks, less those of
one rank (benchmarks/results/megatron_host_h200*.json, medians of four runs). Assumed of older releases."""


FETCH_S = 2 * _MESSAGE_HOST_S + 11 * 7e-6
"""Megatron-LM until 2023, on every stage and chunk before a forward. Two messages: the sizes of the batch and the batch
are broadcast. Eleven operators: sizes to the device and back (`.cpu()`, for which the host waits), data to the device
and joined (core/tensor_parallel/data.py); tokens and labels made contiguous; ones, tril and a comparison for the mask,
ones for the loss's mask, arange for positions (training/utils.py). An operator takes 7 us, as the cheap ones of
benchmarks/data do (stack torch); that every run issues all of them is assumed."""


@dataclass(frozen=True, kw_only=True)
class Megatron(Stack):
    """The kernels of Megatron-LM's transformer layer (Narayanan et al. 2021, arXiv 2104.04473, section 4.2: fused bias
    and GeLU, fused bias, dropout and add, fused scale, mask and softmax).

    Args:
        flash_attention: one kernel for the attention core (from 2023 on), or the products written out.
        overlaps_interleaved: whether the interleaved schedule sends during the compute (since 2023, unless
            --no-overlap-p2p-communication).
        overlaps_split: whether schedules with split backward do (the runtime of the zero-bubble repository).
        waits_for_device: whether the host waits for the device after a batch of sends.
        recomputes_norms: whether it has a mode that recomputes norms and activation functions (since 2025).
        weights_early: whether the weights of routing multiply what goes into the last product of an expert, so that its
            output is not kept (since 2025, megatron/core/transformer/moe/experts.py, TEGroupedMLP).
        sinks_graph: whether the device has the complete graph of a step, so that the host issues nothing (MindSpore's
            sunk graphs, Megatron-core's --enable-cuda-graph).
        host_factors: the host's time for a layer's forward and backward, over those of plain torch modules.
        holds_gradients: as in `Stack`: they are views of buffers that are made with the model
            (megatron/core/distributed/param_and_grad_buffer.py).
    """

    name: str = "megatron"
    chip_spread: float = CHIP_SPREAD
    runs_programs: bool = False
    splits_evenly: bool = True
    adds_memory: bool = True
    rearranges: bool = True
    recomputes_some: tuple[str, ...] = ("full",)  # --recompute-method block is for full blocks
    recipes: str = "engine"
    gathers_again: bool = True
    flash_attention: bool = True
    overlaps_interleaved: bool = True
    overlaps_split: bool = True
    waits_for_device: bool = True
    recomputes_norms: bool = False
    weights_early: bool = False
    sinks_graph: bool = False
    host: str = "quiet"
    host_factors: tuple[float, float] = (1.0, 1.0)
    holds_gradients: bool = True

    def without_host(self) -> Stack:
        """See `Stack`."""
        return replace(self, sinks_graph=True, fetch_s=0.0)

    def assumptions(self, config: TransformerConfig, degrees: Degrees) -> tuple[str, ...]:
        """See `Stack`."""
        own = f"software {self.name}:"
        forward_s, backward_s = self._layer_host_s()
        attention = "one fused kernel" if self.flash_attention else "written out (products, softmax, dropout)"
        notes = [
            f"{own} attention {attention}, other kernels fused as in arXiv 2104.04473, section 4.2",
            f"{own} host {forward_s * 1e6:.0f} and {backward_s * 1e6:.0f} us for a block's forward and backward, "
            f"from those of plain torch modules on {'quiet hosts of H200' if self.host == 'quiet' else self.host}",
        ]
        if config.experts is not None:
            notes.append(
                f"{own} experts as grouped products, tokens permuted in one pass and sent before they are gathered"
            )
        if degrees.dp * degrees.cp > 1:
            notes.append(f"{own} gradients and weights in buckets of 40e6 parameters, or 1e6 for each copy")
        if self.fetch_s:
            notes.append(
                f"{own} the host waits for the device and takes {self.fetch_s * 1e6:.0f} us before every forward"
            )
        if degrees.pp > 1:
            waits = "waits for what it sent" if self.waits_for_sends(degrees) else "computes beside its sends"
            notes.append(f"{own} a stage {waits} ({degrees.schedule})")
            if not self.steps_together(degrees):
                notes.append(f"{own} ranks begin a step before the last one is validated")
        return *notes, *self._common_assumptions(degrees)

    @property
    def recompute_modes(self) -> tuple[str, ...]:
        """The attention core or full layers (--recompute-granularity); today also norms and activation functions
        (--recompute-modules layernorm moe_act)."""
        return ("none", MEMORY_BOUND, "selective", "full") if self.recomputes_norms else ("none", "selective", "full")

    def message_bytes(self, optimizer: Optimizer, members: int, item_bytes: int, largest_bytes: int) -> int:
        """Buckets of 40e6 parameters, more where there are more copies than 40, so that latencies do not rule
        (megatron/core/distributed/distributed_data_parallel.py, bucket_size)."""
        if optimizer.parallel_level >= 3:
            return 0
        return max(item_bytes * max(40_000_000, 1_000_000 * members), largest_bytes)

    def waits_for_sends(self, degrees: Degrees) -> bool:
        """1F1B sends and receives in one batch and waits for it (megatron/core/pipeline_parallel/schedules.py)."""
        if degrees.schedule.startswith("zb"):
            return not self.overlaps_split
        return not (self.overlaps_interleaved and degrees.virtual > 1)

    def steps_together(self, degrees: Degrees) -> bool:
        """The zero-bubble repository validates an update after the next step has begun (its section 4)."""
        return not degrees.schedule.startswith("zb")

    def synchronises(self, degrees: Degrees) -> bool:
        """After such a batch the host waits for the device (p2p_communication.py, batch_p2p_sync)."""
        return self.waits_for_device and self.waits_for_sends(degrees)

    def dispatch_ps(self, machine_ps: int, call: str, part: str) -> int:
        """See `Stack`."""
        return 0 if self.sinks_graph else machine_ps

    def block_host_s(
        self, degrees: Degrees, part: str, *, reduces: bool, config: TransformerConfig | None = None
    ) -> float | None:
        """Measured on tiny layers; more where ranks split them."""
        if self.sinks_graph:
            return 0.0
        forward, backward = self._layer_host_s()
        if degrees.tp > 1:
            plain_s, more = host_s(self.host, "plain"), _SPLIT_HOST[bool(degrees.sequence_parallel)]
            forward, backward = forward + more[0] * plain_s[0], backward + more[1] * plain_s[1]
        if part == "F":
            return forward
        if part == "W":
            return 4 * _PRODUCT_HOST_S
        if part == "I":
            backward -= 4 * _PRODUCT_HOST_S
        return backward + (forward if degrees.recompute == "full" else 0.0)

    def _layer_host_s(self) -> tuple[float, float]:
        """The forward and backward of a layer that is not split."""
        forward, backward = host_s(self.host, "plain")
        return forward * self.host_factors[0], backward * self.host_factors[1]

    def kernels(
        self, call: str, shapes: Sequence[Shape], dtype: str, touched_bytes: int, part: str
    ) -> Sequence[Kernel]:
        """See `Stack`."""
        if call in _FREE:
            return ()
        shape = tuple(shapes)
        kind, _, which = call.partition(".")
        if kind == "attention":
            if not self.flash_attention:
                return unfused_attention(call, shape, dtype)
            name = call if which == "forward" else "attention.backward"
            return (Kernel(call=name, shapes=shape, dtype=dtype, touched_bytes=touched_bytes),)
        if kind in ("rms_norm", "layer_norm") and which not in ("forward", "grad0"):
            return ()  # one backward kernel for all three gradients
        if kind == "dropout":  # with bias and residual; its mask is a byte
            return (elementwise("add.forward", math.prod(shape[0]), dtype, 2 if which == "forward" else 1, 1),)
        if kind == "linear" and which == "grad2":
            return ()  # the bias's gradient comes out of the fused kernel behind it
        if kind == "sum":
            each = elementwise("add.forward", math.prod(shape[-1]), dtype, 2, 1)
            return (each,) if len(shape) < 4 else ()  # queries, keys and values come from one product
        if kind in ("dispatch", "combine"):
            return (self._permutation(shape, dtype),)
        if kind == "embedding" and which == "grad1":
            return (Kernel(call="embedding.grad0", shapes=shape, dtype=dtype, touched_bytes=touched_bytes),)
        if kind == "cross_entropy" and which in ("forward", "grad0"):
            return self._loss(which, math.prod(shape[0]))
        return (Kernel(call=call, shapes=shape, dtype=dtype, touched_bytes=touched_bytes),)

    @staticmethod
    def _permutation(shapes: tuple[Shape, ...], dtype: str) -> Kernel:
        """Tokens brought into the order of experts, or back, in one pass (--moe-permute-fusion)."""
        moved = sum(math.prod(shape) for shape in shapes)
        return elementwise("add.forward", moved, dtype, 1, 0)

    @staticmethod
    def _loss(which: str, logits: int) -> Sequence[Kernel]:
        """Passes over logits in float: the largest is found, subtracted, exponentials, their sum, the division; the
        gradient is made in place of the kept softmax (megatron/core/tensor_parallel/cross_entropy.py)."""
        reads, writes = (5, 3) if which == "forward" else (1, 1)
        return (elementwise("add.forward", logits, "float32", reads, writes),)

    def arranged(self, steps: Sequence[Step], ways: int) -> Sequence[Step]:
        """Tokens travel to experts as parts of the sequence, and are gathered for the tensor-parallel parts of an
        expert there; the gathered tokens are kept for the weight gradient
        (megatron/core/transformer/moe/token_dispatcher.py, MoEAlltoAllTokenDispatcher)."""
        sent = [step.size_bytes for step in steps if isinstance(step, Message) and step.is_exchange]
        if ways == 1 or not sent:
            return steps
        return _gathered_behind(_gathered_once(steps, max(sent)), min(sent), ways)

    def footprint(self, piece: str, found: Footprint, sizes: PieceSizes) -> Footprint:
        """The bytes of a layer according to Korthikanti et al. 2022 (arXiv 2205.05198, section 4): s b h (34 + 5 a s /
        h) on one device. Beside the tensors of the template that is two masks of a byte, the softmax, its mask and its
        dropped-out copy where they are written out; with sequence parallelism gathered inputs are dropped. Without
        dropout there are no masks of a byte, and a gated MLP keeps its two products only, from which the fused backward
        computes the activation function again (megatron/core/fusions/fused_bias_swiglu.py, SwiGLUFunction).

        A split backward keeps inputs and output gradients of the products only, 32 s b h (Qi et al. 2024, arXiv
        2401.10241, table 1); ours keeps what the gradients of the norms need as well.
        """
        if piece == "head":
            # cast and subtraction each make a copy, of which the last is kept; the gradient is made in place
            low = sizes.item_bytes * sizes.logits
            return replace(found, forward=found.kept + 4 * sizes.logits + low, backward=low + 2 * sizes.arrival_bytes)
        if piece != "block":
            return found
        extra = largest = 0
        if sizes.recompute == MEMORY_BOUND:  # the template keeps neither
            extra = sizes.arrival_bytes if sizes.drops else 0
        elif sizes.recompute != "full":
            extra = (sizes.arrival_bytes if sizes.drops else 0) - sizes.gate_bytes
            if sizes.ways > 1 and sizes.split_sequence and self.gathers_again:
                extra -= 2 * (sizes.ways - 1) * sizes.arrival_bytes
        if self.weights_early and sizes.recompute != "full":
            extra -= sizes.combined_bytes
        extra -= self._narrower_bytes(sizes)
        if not self.flash_attention:
            written_out = (2 * sizes.item_bytes + 1) * sizes.scores
            extra += written_out if sizes.recompute == "none" else 0
            largest = 2 * sizes.item_bytes * sizes.scores + (0 if sizes.recompute == "none" else written_out)
        return replace(
            found, kept=found.kept + extra, forward=found.forward + extra, backward=found.backward + largest,
            kept_for_weights=max(
                0, found.kept_for_weights - 4 * sizes.arrival_bytes - self._narrower_bytes(replace(sizes, recompute=""))
            ),
        )  # fmt: skip

    def _narrower_bytes(self, sizes: PieceSizes) -> int:
        """Bytes by which the inputs of narrow products are smaller, which are kept as they were multiplied (Transformer
        Engine, pytorch/module/linear.py): those behind norms and activation functions and those of experts. Attention
        keeps its output itself."""
        if self.recipe is None or self.recipe.item_bytes >= sizes.item_bytes or sizes.recompute == "full":
            return 0
        kept = sizes.combined_bytes  # as large as what experts receive
        if sizes.recompute != MEMORY_BOUND:
            kept += 2 * sizes.arrival_bytes + sizes.gate_bytes
        return round((1 - self.recipe.item_bytes / sizes.item_bytes) * kept)

    def memory(
        self, roles: dict[str, int], degrees: Degrees, outputs_bytes: int = 0, received_bytes: int = 0
    ) -> dict[str, int]:
        """cuBLAS's workspace; the float copies of the gradients, made for the update when activations are gone."""
        roles = {**roles, "buffer": roles.get("buffer", 0) + _WORKSPACE_BYTES}
        if degrees.optimizer.gradient_dtype == "float16":
            copies = 2 * roles["gradient"]
            if copies > roles["activation"]:
                roles["buffer"] += copies - roles["activation"]
        return roles

    def update_lines(
        self, sizes: Sequence[int], dtype: str, optimizer: Optimizer, num_shards: int, machine: Machine
    ) -> list[Line]:
        """Apex's multi-tensor Adam, one pass over all parameters of a piece, and the passes over gradients before it.

        Gradients are clipped by their norm, which reads them and then scales them. Those in fp16, of a scaled loss, are
        first copied to float32 and divided by the scale, which finds infinities (core/optimizer/optimizer.py,
        MixedPrecisionOptimizer.prepare_grads and step_with_ready_grads; --clip-grad is 1 by default).
        """
        elements = sum(-(-size // num_shards) for size in sizes)
        if not elements:
            return []
        passes = _CLIPPED_BYTES + (_UNSCALED_BYTES if dtype == "float16" else ())
        lines = []
        for moved in passes:
            cost = price_compute(machine, "add.forward", ((elements,),), "float32", elements * moved)
            lines.append(Line(COMPUTE, self.dispatch_ps(cost.dispatch_ps, "update", "U"), cost.work_ps, "memory"))
        call = "adamw.fused" if optimizer.kind == "adamw" else f"{optimizer.kind}.update"
        cost = price_compute(
            machine, call, ((elements,),), optimizer.updates_in(dtype), elements * update_bytes(dtype, optimizer)
        )
        return [*lines, Line(COMPUTE, self.dispatch_ps(cost.dispatch_ps, "update", "U"), cost.work_ps, "memory")]


def _gathered_behind(steps: Sequence[Step], part_bytes: int, ways: int) -> list[Step]:
    """Messages of gathered tokens to experts as messages of parts, each gathered when it has arrived."""
    result: list[Step] = []
    gathers: dict[int, Message] = {}
    for step in steps:
        if isinstance(step, Message) and step.is_exchange and step.size_bytes == ways * part_bytes:
            gathers[step.token] = replace(step, call="all_gather", axes=("tp",), token=-1)
            step = replace(step, size_bytes=part_bytes)
        result.append(step)
        if isinstance(step, Message) and step.call == "wait" and step.token in gathers:
            result.append(gathers.pop(step.token))
    return result


def _gathered_once(steps: Sequence[Step], whole_bytes: int) -> list[Step]:
    """The steps without the gather of experts' inputs in the backward, which follows the last message of tokens."""
    last = max(place for place, step in enumerate(steps) if isinstance(step, Message) and step.is_exchange)
    again = {
        step.token for step in steps[last:]
        if isinstance(step, Message) and step.call == "all_gather" and step.size_bytes >= whole_bytes
    }  # fmt: skip
    kept = steps[:last], [step for step in steps[last:] if not (isinstance(step, Message) and step.token in again)]
    return [*kept[0], *kept[1]]


_CLIPPED_BYTES = (4, 8)
"""Bytes per gradient of the passes that take the norm and scale."""

_UNSCALED_BYTES = (6, 8)
"""Of those that make a float32 copy of fp16 gradients and divide it by the scale of the loss."""

_WORKSPACE_BYTES = 32 * 2**20
