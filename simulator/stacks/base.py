"""The base of all stacks: twofold's own executor, one kernel per instruction at the machine's dispatch times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from costmodels import Machine
from costmodels.machine.sections import Interval
from costmodels.price.instruction import price_compute
from costmodels.widths import OTHER_LONGER, OTHER_SOFTWARE, SOFTWARE, TORCH_HOST
from plans.degrees import MEMORY_BOUND, RECOMPUTE_MODES, Degrees
from plans.errors import TwofoldError
from plans.model.graph import itemsize
from plans.model.transformer import TransformerConfig
from plans.optimizer import Optimizer
from simulator.lines import COMPUTE, Line
from simulator.stacks.footprint import Footprint
from simulator.stacks.products import RECIPES, Recipe
from simulator.stacks.steps import Kernel, Shape, Step

__all__ = ["PieceSizes", "Stack", "exchanged_share"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSizes:
    """Facts that a stack's memory depends on, besides the tensors of a piece.

    Args:
        arrival_bytes: of the tensor between blocks, on one rank.
        logits: elements of the logits of one micro-batch on one rank.
        item_bytes: of an element of activations.
        ways: tensor-parallel degree.
        recompute: mode of recomputation.
        scores: elements of the scores of attention of one micro-batch on one rank.
        split_sequence: whether the sequence is split between tensor-parallel products.
        gate_bytes: of the activation function's output in a gated MLP, of one micro-batch on one rank.
        combined_bytes: of the outputs of experts that a token's output is a weighted sum of, of one micro-batch.
        drops: whether its blocks drop activations at random, which leaves masks.
        foreign_bytes: of the keys and values of other ranks of context parallelism that a block's template gathers.
    """

    arrival_bytes: int
    logits: int
    item_bytes: int
    ways: int
    recompute: str
    scores: int = 0
    split_sequence: bool = False
    gate_bytes: int = 0
    combined_bytes: int = 0
    drops: bool = False
    foreign_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A software stack: the kernels it runs for an instruction, their host times, and its features.

    Other code uses a stack's fields and methods, never its name or class. A stack is based on its source code and on
    micro-benchmarks, never on reported rows. One rule of memory (DistributedDataParallel's copy of gradients) was seen
    in our own measured steps of small models.

    Args:
        name: its name for users.
        overlaps_sends: whether a stage continues while its tensor is sent and received.
        gathers_again: whether sequence parallelism drops the gathered input of a product and gathers it again for the
            weight gradient.
        step_s: host seconds of a step outside its instructions (zeroing gradients, hooks, logging).
        fetch_s: host seconds before every forward for its data, for which the host waits for the device; 0: none.
        gathers_ahead: whether the gathers of a step begin with it, before the tensor of the stage before arrives.
        chip_spread: standard deviation of the logarithm of a chip's rate among equal ones: chips that work in lockstep
            run at the pace of the slowest.
        hides_experts: whether the messages of experts run during the compute of another micro-batch (Megatron-core's
            --overlap-moe-expert-parallel-comm, DualPipe; `simulator.estimate.exchanges`).
        gathered_item_bytes: of an element of weights in the gathers of level 3; 0: as its dtype has.
        reduced_item_bytes: of an element of gradients in their reduction; 0: as its dtype has.
        gathers_in_node: whether the backward gathers weights from copies within a node.
        exchanged: share of the bytes of messages of experts that are sent, below 1 where a token goes to each node once
            (`exchanged_share`).
        is_measured: whether steps of it were measured; else its interval is that of software predicted as another one.
        reserved: whether memory is the reserved memory of the allocator, not the allocated memory.
        copies_shards: whether gathered weights are copied out of a flat buffer and gradients into one.
        holds_gradients: whether gradients have buffers from the start of a step to its end; else they come while the
            first backward frees activations.
        runs_programs: whether it is twofold's executor, which runs lowered programs as they are: the machine's rules
            for its calls hold (`Compute.rules`).
        rearranges: whether `arranged` changes anything.
        adds_memory: whether `memory` adds anything to a rank's tensors.
        products: the name of the precision of a block's products (of `RECIPES`); "": the block's own.
        recipes: the library whose recipes they are.
        narrows: whether it has that library's narrow products; TF32 is every software's.
        host: whose times to issue a block are taken (`costmodels.price.torch_hosts.host_s`); "": those of the stack.
        splits_evenly: whether ranks of context parallelism have parts of a sequence with equally many keys
            (`simulator.stacks.ring`); else consecutive parts, of which the last has most.
        recomputes_some: recompute modes that some blocks of a chunk may have while its other blocks keep everything.
    """

    name: str = "twofold"
    overlaps_sends: bool = True
    gathers_again: bool = False
    step_s: float = 0.0
    fetch_s: float = 0.0
    gathers_ahead: bool = True
    copies_shards: bool = False
    holds_gradients: bool = False
    reserved: bool = False
    hides_experts: bool = False
    gathered_item_bytes: float = 0.0
    reduced_item_bytes: float = 0.0
    gathers_in_node: bool = False
    exchanged: float = 1.0
    is_measured: bool = True
    chip_spread: float = 0.0
    runs_programs: bool = True
    rearranges: bool = False
    adds_memory: bool = False
    splits_evenly: bool = False
    recomputes_some: tuple[str, ...] = tuple(mode for mode in RECOMPUTE_MODES if mode != "none")
    host: str = ""
    products: str = ""
    recipes: str = "torchao"
    narrows: bool = False

    def multiplies_in(self, products: str) -> bool:
        """Whether the linear layers of its blocks can multiply in a precision of `RECIPES`."""
        known = () if self.runs_programs else RECIPES[self.recipes]
        return products in known and (self.narrows or products == "tf32")

    @property
    def recipe(self) -> Recipe | None:
        """The operands of narrow products; None if a block's products are as wide as the rest."""
        return RECIPES[self.recipes][self.products] if self.products else None

    def on(self, machine: Machine) -> Stack:
        """The stack as it runs on a machine's devices."""
        return self

    def without_host(self) -> Stack:
        """The stack as if its host took no time; itself where its kernels are not apart from its host."""
        return self

    def gathers_each_forward(self, degrees: Degrees) -> bool:
        """Whether weights are gathered in every forward, not once a step; of degrees as they are run."""
        return degrees.optimizer.parallel_level >= 3

    def as_run(self, degrees: Degrees) -> Degrees:
        """The degrees as the stack applies them, if it differs from what they state.

        Raises:
            TwofoldError: a recompute mode that the software does not have, or that it applies to all blocks of a chunk
                where the degrees state a number of them.
        """
        if degrees.recompute not in self.recompute_modes:
            *others, last = self.recompute_modes
            raise TwofoldError(
                f"{self.name} does not recompute {degrees.recompute!r}; give recompute {', '.join(others)} or {last}"
            )
        # software without any such mode recomputes every k-th block, which is stated as a number of blocks
        if degrees.recompute_layers is not None and self.recomputes_some:
            if reason := self.refuses_some(degrees.recompute):
                raise TwofoldError(reason)
        return degrees

    def refuses_some(self, recompute: str | None) -> str | None:
        """Why some blocks of a chunk cannot recompute while the others keep everything; None if they can.

        Args:
            recompute: the mode; None: any.

        >>> Stack(name="all", recomputes_some=("full",)).refuses_some("selective")
        'all applies recompute selective to all blocks of a chunk, not to some of them; set recompute to full, or omit \
recompute_layers'
        """
        some = self.recomputes_some
        if recompute in some or (recompute is None and some):
            return None
        what = f"recompute {recompute}" if recompute else "any recompute mode"
        way_out = f"set recompute to {' or '.join(some)}, or omit recompute_layers" if some else "omit recompute_layers"
        return f"{self.name} applies {what} to all blocks of a chunk, not to some of them; {way_out}"

    @property
    def unexplained(self) -> Interval | None:
        """Errors of its steps in addition to those of their prices; None: as for this executor (`Machine.interval`)."""
        if self.runs_programs:
            return None
        return SOFTWARE if self.is_measured else OTHER_SOFTWARE

    def longer_on(self, machine: Machine) -> float:
        """Share by which the device's work takes longer than the prices of its parts, in the median of measured steps;
        of software that was not measured that of steps predicted as other software."""
        return 0.0 if self.runs_programs or self.is_measured else OTHER_LONGER

    def known_to(self, machine: Machine) -> Machine:
        """The machine with the spreads that its prices have under this stack: those of hosts that issue blocks of
        torch, and of narrow products."""
        if self.runs_programs:
            return machine
        spreads = {**machine.spreads, "dispatch": TORCH_HOST}
        if self.recipe is not None and self.recipe.spread:
            spreads["matrix"] = math.hypot(machine.spreads.get("matrix", 0.0), self.recipe.spread)
        return msgspec.structs.replace(machine, spreads=spreads)

    def assumptions(self, config: TransformerConfig, degrees: Degrees) -> tuple[str, ...]:
        """The assumptions about the software that the run did not state, in words."""
        return (f"software {self.name}",)

    def _common_assumptions(self, degrees: Degrees) -> tuple[str, ...]:
        own = f"software {self.name}:"
        notes = [f"{own} the slowest of equal chips sets the pace: they vary by {self.chip_spread:.1%}"]
        if not (self.runs_programs or self.is_measured):
            how = "as measured steps predicted as other software in the median"
            notes.append(f"{own} {OTHER_LONGER:.1%} longer than its parts, {how}")
        if self.recipe is not None:
            notes.append(f"{own} {self.recipe.words}")
        if degrees.pp > 1 and not self.waits_for_sends(degrees):
            notes.append(f"{own} transfers slow down concurrent compute at the rates measured within a node")
        return tuple(notes)

    @property
    def recompute_modes(self) -> tuple[str, ...]:
        """The supported recompute modes."""
        return tuple(mode for mode in RECOMPUTE_MODES if self.runs_programs or mode != MEMORY_BOUND)

    def dispatch_ps(self, machine_ps: int, call: str, part: str) -> int:
        """Host time of one operation, given that of twofold's executor in the machine file."""
        return machine_ps

    def block_host_s(
        self, degrees: Degrees, part: str, *, reduces: bool, config: TransformerConfig | None = None
    ) -> float | None:
        """Host seconds of one block's part where they are known as a whole; None: the sum of its operations."""
        return None

    def end_host_s(self, piece: str, degrees: Degrees, part: str) -> float | None:
        """Host seconds of a part of the embedding or the head where known as a whole; None: as of `block_host_s`."""
        return None

    def arranged(self, steps: Sequence[Step], ways: int) -> Sequence[Step]:
        """The kernels and messages of a body, of `ways` tensor-parallel ranks, as the stack has them."""
        return steps

    def footprint(self, piece: str, found: Footprint, sizes: PieceSizes) -> Footprint:
        """The bytes of a piece's activations, given those with every tensor freed after its last use."""
        return found

    def unknown_bytes(self, config: TransformerConfig, degrees: Degrees) -> tuple[int, int]:
        """Bytes by which a rank may hold less and more, by code around the stack that differs from run to run."""
        return 0, 0

    def reserves_gradients(self, degrees: Degrees) -> bool:
        """Whether gradients never come where activations were, because memory is reserved for them apart."""
        return False

    def message_bytes(self, optimizer: Optimizer, members: int, item_bytes: int, largest_bytes: int) -> int:
        """The bytes of one message of gradients or weights between `members` copies; 0: one message per piece.

        Args:
            largest_bytes: of the largest tensor, which is not cut.
        """
        if optimizer.parallel_level >= 3 or not optimizer.bucket_bytes:
            return 0
        return max(optimizer.bucket_bytes, largest_bytes)

    def whole_bytes(self, pieces: Mapping[str, int]) -> int:
        """Bytes of full weights at level 3, given those of every piece: one computes, the next is gathered.

        In twofold's programs one of the two is a block, where there is any.
        """
        largest = max(pieces.values())
        blocks = [size for piece, size in pieces.items() if piece not in ("embedding", "head")]
        return largest + (max(blocks, default=largest) if self.runs_programs else largest)

    def sharded_at_head_bytes(self, pieces: Mapping[str, int]) -> int:
        """Of `whole_bytes`, bytes of weights that are not gathered while the loss is computed."""
        return 0

    def steps_together(self, degrees: Degrees) -> bool:
        """Whether the ranks of a pipeline begin every step together.

        A rank of twofold's executor begins a step when its own last one is over.
        """
        return not self.runs_programs

    def waits_for_sends(self, degrees: Degrees) -> bool:
        """Whether a stage waits until the tensor that it sent has arrived."""
        return not self.overlaps_sends

    def synchronises(self, degrees: Degrees) -> bool:
        """Whether the host waits for the device at every transfer between stages."""
        return False

    def kernels(
        self, call: str, shapes: Sequence[Shape], dtype: str, touched_bytes: int, part: str
    ) -> Sequence[Kernel]:
        """The kernels that the stack runs for one instruction; none where a neighbour's kernel does it too."""
        return (Kernel(call=call, shapes=tuple(shapes), dtype=dtype, touched_bytes=touched_bytes),)

    def update_lines(
        self, sizes: Sequence[int], dtype: str, optimizer: Optimizer, num_shards: int, machine: Machine
    ) -> list[Line]:
        """The update of parameters of `sizes` local elements, of which a rank keeps one shard each, and the copy of
        their master weights.
        """
        elements, own = sum(-(-size // num_shards) for size in sizes), optimizer.updates_in(dtype)
        if not elements:
            return []
        moved = {f"{optimizer.kind}.update": update_bytes(dtype, optimizer)}
        if optimizer.has_master(dtype):
            moved[f"{optimizer.kind}.update"] -= itemsize(dtype)
            moved["store"] = itemsize(own) + itemsize(dtype)
        lines = []
        for call, item_bytes in moved.items():
            shapes = ((elements,),) * (1 if call == "store" else _UPDATED * len(sizes))
            cost = price_compute(machine, call, shapes, own, elements * item_bytes, 0, self.runs_programs)
            lines.append(Line(COMPUTE, self.dispatch_ps(cost.dispatch_ps, "update", "U"), cost.work_ps, "memory"))
        return lines

    def memory(
        self, roles: dict[str, int], degrees: Degrees, outputs_bytes: int = 0, received_bytes: int = 0
    ) -> dict[str, int]:
        """The memory of a rank by role, with the additions of the stack.

        Args:
            roles: bytes by role.
            degrees: how the model is spread.
            outputs_bytes: of the model's output of one micro-batch, on the rank that makes it.
            received_bytes: that come from other stages for one micro-batch, activations and gradients.
        """
        return roles


def exchanged_share(top_k: int, nodes: int, per_node: int, most_nodes: int) -> float:
    """Bytes that leave a rank for experts, over those of one copy for each chosen expert.

    DeepEP and HybridEP send a token once to every place that has some of its experts: to every node, where it is
    forwarded, or to every rank if all are on one node (DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.2; deep_ep's
    Buffer.get_dispatch_layout). k random choices have n (1 - (1 - 1/n)^k) of n places, and no more nodes than
    node-limited routing allows. Forwarding within nodes is taken to be no bottleneck.

    Args:
        top_k: experts of a token.
        nodes: that the ranks of the experts are on.
        per_node: ranks of experts on a node.
        most_nodes: that the routing allows a token.

    >>> exchanged_share(8, 8, 8, 4), round(exchanged_share(8, 8, 8, 8), 2), round(exchanged_share(8, 1, 8, 8), 2)
    (0.5, 0.66, 0.66)
    """
    places = nodes if nodes > 1 else per_node
    visited = places * (1 - (1 - 1 / places) ** top_k)
    return min(visited, most_nodes if nodes > 1 else places, top_k) / top_k


_UPDATED = 7
"""Operands and results of AdamW's update of one parameter."""


def update_bytes(dtype: str, optimizer: Optimizer) -> int:
    """Bytes per element of an update's operands: weight and states in and out, gradient in, the low weight out."""
    own, states = itemsize(optimizer.updates_in(dtype)), optimizer.num_states
    moved = 2 * own + itemsize(optimizer.accumulates_in(dtype))
    moved += 2 * states * itemsize(optimizer.keeps_states_in(dtype))
    return moved + (itemsize(dtype) if optimizer.has_master(dtype) else 0)
