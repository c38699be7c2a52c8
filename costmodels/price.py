"""The price of every instruction of a program on a machine, in integer picoseconds.

Prices are pure functions of the machine and of what an instruction does (call, local shapes, bytes, group), and are
kept by that signature, so that a program of millions of instructions needs few of them.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from costmodels.machine import Machine
from costmodels.traffic import Traffic, collective_traffic, plain_call
from plans.errors import TwofoldError
from plans.graph import itemsize
from plans.layout import Layout
from plans.program import GroupProgram, Instruction, Kind
from plans.redistribution.step import Step, StepKind

__all__ = ["Cost", "compute_class", "matrix_shape", "price", "price_step", "price_transfer"]

PS_PER_S = 10**12

_VIEWS = ("reshape",)

_PRODUCTS = ("linear", "matmul", "conv2d")

_UPDATES = {"sgd": (1, 3, 3), "momentum": (3, 8, 5), "adamw": (8, 20, 7)}
"""Optimizer -> (kernels, tensors read or written by them one by one, tensors in and out), without fusion.

Counted from the single-tensor forms of torch.optim: SGD add; momentum mul, add, add; AdamW mul, lerp, mul, addcmul,
sqrt, div, add, addcdiv.
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """The price of an instruction on one rank.

    Args:
        dispatch_ps: host time to issue it.
        work_ps: time on the compute stream; for communication on the links, alone, from its last member's arrival.
        cpu_ps: processor time that every member of a communication spends on its node's shared cores.
    """

    dispatch_ps: int
    work_ps: int
    cpu_ps: int = 0

    @property
    def alone_s(self) -> float:
        """Seconds it takes when nothing else runs and every member has a core."""
        return (self.dispatch_ps + self.work_ps + self.cpu_ps) / PS_PER_S


def price(instruction: Instruction, group: GroupProgram, machine: Machine, num_ranks: int) -> Cost:
    """The price of `instruction` of `group` on a machine that runs `num_ranks` ranks.

    A SEND and its RECV have the same work and processor time: those of the rank with most pieces or bytes. Simulators
    that treat every pair of ranks on its own take `price_transfer`.

    Raises:
        TwofoldError: more ranks than devices, a dtype or call that the machine has no rate for.
    """
    if num_ranks > machine.num_devices:
        raise TwofoldError(
            f"the program runs on {num_ranks} ranks, but machine {machine.name!r} has {machine.num_devices} devices; "
            "plan for fewer devices or load a larger machine"
        )
    if instruction.kind is Kind.COMPUTE:
        flops = instruction.flops if instruction.call.startswith("attention.") else 0  # a causal one does half
        touched = _touched(instruction, group)
        return _compute(machine, instruction.call, instruction.shapes, instruction.dtype, touched, flops)
    if instruction.kind is Kind.COLLECTIVE:
        mesh = instruction.mesh or group.mesh
        tiers = _group_tiers(machine, mesh, instruction.axes)
        size, members = itemsize(instruction.dtype), mesh.size(instruction.axes)
        return _collective(machine, instruction.call, members, instruction.message_bytes, size, tiers)
    if instruction.kind is Kind.WAIT:
        return Cost(_ps(machine, machine.dispatch_s["wait"]), 0)
    return _pieces_cost(machine, instruction)


def price_step(step: Step, shape: tuple[int, ...], dtype: str, machine: Machine) -> Cost:
    """The price of one step of a redistribution of a tensor of the whole `shape` (what the search chooses by)."""
    size = itemsize(dtype)
    before, after = (math.prod(layout.local_shape(shape)) * size for layout in (step.before, step.after))
    if step.kind is StepKind.SLICE:
        return _compute(machine, "slice", (), dtype, 2 * after)
    if step.kind is StepKind.TRANSFER:
        ranks = tuple(sorted({*step.before.mesh.rank_list, *step.after.mesh.rank_list}))
        return _transfer(machine, 1, after, machine.tier(ranks))
    tiers = _group_tiers(machine, step.before.mesh, step.axes)
    return _collective(machine, str(step.kind), step.before.mesh.size(step.axes), max(before, after), size, tiers)


def price_transfer(machine: Machine, src_rank: int, dst_rank: int, size_bytes: int) -> Cost:
    """The price of one piece of `size_bytes` from one rank to another; nothing but its issue if they are the same."""
    if src_rank == dst_rank:
        return _transfer(machine, 0, 0, 0)
    return _transfer(machine, 1, size_bytes, machine.tier((src_rank, dst_rank)))


def compute_class(call: str) -> str:
    """matrix, memory, view or update: what a COMPUTE call is priced and dispatched as.

    >>> [compute_class(call) for call in ("linear.grad1", "linear.grad2", "reshape.forward", "sgd.update", "sum")]
    ['matrix', 'memory', 'view', 'update', 'memory']
    """
    kind, _, part = call.partition(".")
    if part == "update":
        return "update"
    if kind in _VIEWS:
        return "view"
    products = kind in _PRODUCTS and part in ("forward", "grad0", "grad1")
    return "matrix" if products or kind == "attention" else "memory"


def matrix_shape(call: str, shapes: tuple[tuple[int, ...], ...]) -> tuple[int, int, int]:
    """(m, n, k) of a matrix product: rows and columns of the result and the length of the sums.

    The batch of a batched product counts as rows, a window of a convolution as part of the sums; attention is taken as
    one product of its queries and keys that does the work of all its products.

    Args:
        call: the forward of a linear, matmul, conv2d or attention, or one of its gradients ("linear.grad0" of
            (g[b.., n], w[n, k]), "linear.grad1" of (g[b.., n], x[b.., k]), and so on).
        shapes: local shapes, inputs first.

    >>> matrix_shape("linear.grad1", ((2, 4, 6), (2, 4, 5), (6, 5)))
    (6, 5, 8)
    >>> matrix_shape("matmul.forward", ((3, 4, 5), (3, 5, 6), (3, 4, 6)))
    (12, 6, 5)
    """
    kind, _, part = call.partition(".")
    first, second = shapes[0], shapes[1]
    if kind == "attention":
        queries, keys, values = shapes[:3] if part == "forward" else shapes[1:4]
        depth = queries[-1] + values[-1]  # q k^T, and the weights times v
        return math.prod(queries[:-1]), keys[-2], depth if part == "forward" else depth * 7 // 2
    if kind == "conv2d":
        return _convolution_shape(part, shapes)
    if kind == "matmul":
        made = shapes[-1] or (1,)
        length = first[-1] if part == "forward" else made[-1] if part == "grad0" else second[-1]
        work = math.prod(made if part == "forward" else first) * length
        rows = math.prod(made[:-1])
        return rows, made[-1], work // (rows * made[-1])
    rows = math.prod(first[:-1])
    if part == "forward":
        return rows, second[0], first[-1]
    if part == "grad0":
        return rows, second[1], first[-1]
    return first[-1], second[-1], rows


def _convolution_shape(part: str, shapes: tuple[tuple[int, ...], ...]) -> tuple[int, int, int]:
    """Windows as rows (im2col): y = windows w, d windows = g w, dw = g windows."""
    channels, *window_dims = shapes[-1] if part == "grad1" else shapes[1]
    window = math.prod(window_dims)
    made = shapes[-1] if part == "forward" else shapes[0]
    rows = made[0] * math.prod(made[2:])
    return {
        "forward": (rows, channels, window), "grad0": (rows, window, channels), "grad1": (channels, window, rows),
    }[part]  # fmt: skip


# -- compute -----------------------------------------------------------------------------------------------------------


def _touched(instruction: Instruction, group: GroupProgram) -> int:
    """Bytes read and written; a value that is written in place counts twice, as it is moved both ways."""
    names = (*instruction.inputs, *instruction.outputs)
    if names and all(name in group.values for name in names):
        return sum(group.values[name].span_bytes for name in names)
    return sum(math.prod(shape) for shape in instruction.shapes) * itemsize(instruction.dtype)


@lru_cache(maxsize=65_536)
def _compute(
    machine: Machine, call: str, shapes: tuple[tuple[int, ...], ...], dtype: str, touched: int, flops: int = 0
) -> Cost:
    kind, rates, kernels = compute_class(call), machine.compute, 1
    if kind == "update":
        kernels, passes, operands = _update(call)
        touched = touched * passes // operands
    dispatch_ps = _ps(machine, kernels * machine.dispatch_s[kind])
    if kind == "view":
        return Cost(dispatch_ps, 0)
    memory_s = touched / (rates.memory_Bps * rates.memory_efficiency)
    if kind == "matrix":
        m, n, k = matrix_shape(call, shapes)
        work_s = matrix_s(machine, (m, n, max(1, flops // (2 * m * n)) if flops else k), dtype, touched)
    else:
        # one pass over the operands; the arithmetic of these calls is a few operations an element
        elements = touched / itemsize(dtype)
        work_s = max(memory_s, elements / _rate(machine, "vector_flops_per_s", dtype))
    return Cost(dispatch_ps, _ps(machine, max(work_s, kernels * rates.kernel_s)))


def _update(call: str) -> tuple[int, int, int]:
    try:
        return _UPDATES[call.removesuffix(".update")]
    except KeyError:
        raise TwofoldError(f"the optimizer update {call!r} has no price; priced are {', '.join(_UPDATES)}") from None


def matrix_s(machine: Machine, shape: tuple[int, int, int], dtype: str, touched: int) -> float:
    """Seconds of a matrix product alone (see `Compute`), before the least time of a kernel and `host_scale`."""
    m, n, k = shape
    rates = machine.compute
    saturation = (1 + rates.half_rows / max(1, min(m, n))) * (1 + rates.half_depth / max(1, k))
    arithmetic_s = 2 * m * n * k / (_rate(machine, "matrix_flops_per_s", dtype) * rates.matrix_efficiency) * saturation
    memory_s = touched / (rates.memory_Bps * rates.memory_efficiency)
    longer, shorter = max(arithmetic_s, memory_s), min(arithmetic_s, memory_s)
    if longer == 0:
        return 0.0
    return float(longer * (1 + (shorter / longer) ** rates.sharpness) ** (1 / rates.sharpness))


def _rate(machine: Machine, name: str, dtype: str) -> float:
    table: dict[str, float] = getattr(machine.compute, name)
    if dtype in table:
        return table[dtype]
    if dtype.startswith(("float", "bfloat")):
        raise TwofoldError(
            f"machine {machine.name!r} has no {name} for {dtype!r}, only for {', '.join(table)}; "
            "use one of these dtypes or calibrate the machine for it"
        )
    return min(table.values())  # integers and booleans are only moved and compared


# -- communication -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _group_tiers(machine: Machine, mesh: Layout, axes: tuple[str, ...]) -> tuple[int, int]:
    """The slowest tier that groups along `axes` use, and the fewest members of a group below one of its domains."""
    groups = mesh.groups(axes)
    tier = max(machine.tier(members) for members in groups)
    if tier == 0:
        return 0, 1
    below = machine.links[tier - 1].ranks
    return tier, min(min(Counter(rank // below for rank in members).values()) for members in groups)


@lru_cache(maxsize=65_536)
def _collective(
    machine: Machine, call: str, members: int, size_bytes: int, item_bytes: int, tiers: tuple[int, int]
) -> Cost:
    kind = plain_call(call)
    if kind not in machine.collectives or kind == "transfer":
        raise TwofoldError(f"the collective {call!r} has no price; priced are {', '.join(sorted(machine.collectives))}")
    traffic = collective_traffic(call, members, size_bytes, item_bytes, machine.library)
    return _communication(machine, kind, traffic, tiers, num_peers=members - 1)


def _pieces_cost(machine: Machine, instruction: Instruction) -> Cost:
    moved = [piece for piece in instruction.pieces if not piece.is_local]
    if not instruction.pieces:
        return _transfer(machine, 1, instruction.message_bytes, len(machine.links) - 1)
    if not moved:
        return _transfer(machine, 0, 0, 0)
    item_bytes = itemsize(instruction.dtype)
    sizes: Counter[tuple[str, int]] = Counter()
    counts: Counter[tuple[str, int]] = Counter()
    for piece in moved:
        for end in (("src", piece.src_rank), ("dst", piece.dst_rank)):
            sizes[end] += piece.num_elements * item_bytes
    for src, dst in {(piece.src_rank, piece.dst_rank) for piece in moved}:  # the pieces for one peer go as one message
        counts.update((("src", src), ("dst", dst)))
    tier = max(machine.tier((piece.src_rank, piece.dst_rank)) for piece in moved)
    return _transfer(machine, max(counts.values()), max(sizes.values()), tier)


@lru_cache(maxsize=65_536)
def _transfer(machine: Machine, messages: int, size_bytes: int, tier: int) -> Cost:
    traffic = Traffic(messages=messages, hops=min(1, messages), moved_bytes=size_bytes, size_bytes=size_bytes)
    return _communication(machine, "transfer", traffic, (tier, 1), num_peers=max(1, messages))


def _communication(machine: Machine, kind: str, traffic: Traffic, tiers: tuple[int, int], num_peers: int) -> Cost:
    """`tiers`: the tier, and how many members of a group leave the domain below together, each by its own link."""
    dispatch_ps = _ps(machine, machine.dispatch_s["transfer" if kind == "transfer" else "collective"])
    if traffic.messages == 0:
        return Cost(dispatch_ps, 0)
    tier, together = tiers
    model, link = machine.collectives[kind], machine.links[tier]
    bandwidth_Bps = link.reach_Bps(num_peers) * together  # rings run through the NICs of all members of a node at once
    if tier:
        bandwidth_Bps = min(bandwidth_Bps, machine.links[tier - 1].reach_Bps(num_peers))
    work_s = model.start_s + traffic.hops * (model.hop_s + link.latency_s)
    work_s += traffic.moved_bytes / (bandwidth_Bps * model.link_fraction)
    work_s += traffic.size_bytes / model.copy_Bps if model.copy_Bps else 0.0
    cpu_s = model.cpu_start_s + traffic.messages * model.cpu_message_s
    cpu_s += traffic.moved_bytes / model.cpu_Bps if model.cpu_Bps else 0.0
    return Cost(dispatch_ps, _ps(machine, work_s), _ps(machine, cpu_s))


def _ps(machine: Machine, seconds: float) -> int:
    return round(seconds * machine.host_scale * PS_PER_S)
