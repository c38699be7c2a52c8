"""A small realistic case for the tests of reports: a lowered program and made-up times that keep its order.

The clock here is a toy of its own (fixed prices, ranks walk their programs, communication starts when its last member
arrives), so that reports are tested against something that is neither interpreter.
"""

from dataclasses import replace

import numpy as np

from plans.graph import Graph, Operator, Tensor
from plans.layout import Layout
from plans.lower import lower
from plans.plan import Optimizer, Plan, Stage, Strategy
from plans.program import Kind, Program, Scope
from plans.timeline import MemoryPeak, Span, Timeline

US = 10**6


def small_graph(batch: int = 32, sizes: tuple[int, ...] = (784, 512, 512, 1)) -> Graph:
    """Digits through three linear layers with relus to a mean absolute error."""
    tensors: dict[str, Tensor] = {}
    operators: list[Operator] = []

    def tensor(name: str, shape: tuple[int, ...], dtype: str = "float32", kind: str = "activation") -> str:
        tensors[name] = Tensor(name=name, shape=shape, dtype=dtype, kind=kind)
        return name

    def operator(name: str, kind: str, inputs: tuple[str, ...], output: str, module: str) -> str:
        operators.append(Operator(name=name, kind=kind, inputs=inputs, outputs=(output,), module=module))
        return output

    tensor("x", (batch, 1, 28, 28), kind="input")
    tensor("y", (batch,), "int64", "input")
    current = operator("flatten.reshape", "reshape", ("x",), tensor("flat", (batch, sizes[0])), "net.flatten")
    for number, (narrow, wide) in enumerate(zip(sizes, sizes[1:], strict=False), 1):
        weight = tensor(f"layer{number}.weight", (wide, narrow), kind="parameter")
        bias = tensor(f"layer{number}.bias", (wide,), kind="parameter")
        out = tensor(f"layer{number}.out", (batch, wide))
        current = operator(f"layer{number}.linear", "linear", (current, weight, bias), out, f"net.layer{number}")
        if number < len(sizes) - 1:
            out = tensor(f"relu{number}.out", (batch, wide))
            current = operator(f"relu{number}.relu", "relu", (current,), out, f"net.relu{number}")
    operator("loss.reshape", "reshape", ("y",), tensor("y.column", (batch, 1), "int64"), "loss")
    operator("loss.cast", "cast", ("y.column",), tensor("y.float", (batch, 1)), "loss")
    operator("loss.l1_loss", "l1_loss", (current, "y.float"), tensor("loss", ()), "loss")
    return Graph(name="digits", batch_size=batch, tensors=tensors, operators=tuple(operators), loss="loss")


def small_plan() -> Plan:
    """Two stages of 2 x 2 ranks, four micro-batches, sharded optimizer, relus recomputed."""
    graph = small_graph()
    names = [operator.name for operator in graph.operators]
    cut = names.index("layer2.linear")
    rows = ("dp",)
    dims = {
        "flatten.reshape": {"d0": rows},
        "layer1.linear": {"b0": rows, "n": ("tp",)},
        "relu1.relu": {"d0": rows, "d1": ("tp",)},
        "layer2.linear": {"b0": rows, "k": ("tp",)},
        "relu2.relu": {"d0": rows},
        "layer3.linear": {"b0": rows},
        "loss.reshape": {},
        "loss.cast": {"d0": rows},
        "loss.l1_loss": {"d0": rows},
    }
    return Plan(
        graph=graph,
        stages=(
            Stage(mesh=Layout((2, 2), ("dp", "tp"), [0, 1, 2, 3]), operators=tuple(names[:cut])),
            Stage(mesh=Layout((2, 2), ("dp", "tp"), [4, 5, 6, 7]), operators=tuple(names[cut:])),
        ),
        strategies={name: Strategy(dims=each) for name, each in dims.items()},
        num_micro_batches=4,
        recompute=("relu1.relu", "relu2.relu"),
        optimizer=Optimizer(parallel_level=1),
    )


def clocked(program: Program, kind: str = "predicted", num_steps: int = 1, seed: int | None = None) -> Timeline:
    """A timeline of the program under the toy clock; with a seed every price varies by up to 40 %."""
    random = np.random.default_rng(seed) if seed is not None else None

    def price(base: int) -> int:
        return base if random is None else int(base * random.uniform(0.8, 1.4))

    def home(rank: int, token: str | None, batch: int) -> int:
        """The micro-batch of a token, or 0 for one of the whole step."""
        return batch if program.group_of(rank).values[str(token)].scope is Scope.MICRO else 0

    spans: list[Span] = []
    now = dict.fromkeys(range(program.num_ranks), 0)
    for step in range(num_steps):
        walks = {
            rank: [each for each in program.walk(rank)]  # noqa: C416
            for rank in range(program.num_ranks)
        }
        position = dict.fromkeys(walks, 0)
        arrived: dict[tuple[object, ...], dict[int, int]] = {}
        done: dict[tuple[object, ...], int] = {}  # (rank, token, micro-batch) -> end
        sent: dict[tuple[object, ...], int] = {}
        moving = True
        while moving:
            moving = False
            for rank, walk in walks.items():
                while position[rank] < len(walk):
                    block, instruction = walk[position[rank]]
                    id_, start = f"{block.label}/{instruction.name}", now[rank]

                    def span(stream: str, begin: int, end: int, rank=rank, id_=id_, step=step, it=instruction) -> None:
                        spans.append(
                            Span(rank=rank, stream=stream, start_ps=begin, end_ps=end, step=step, id=id_, call=it.call, part=it.part)
                        )  # fmt: skip

                    if instruction.kind is Kind.COMPUTE:
                        end = start + price((20 + instruction.flops // 40_000) * US)
                        span("compute", start, end)
                        now[rank] = end
                    elif instruction.kind is Kind.COLLECTIVE:
                        members = program.group_of(rank).members(instruction, rank)
                        key = (id_, members)
                        arrived.setdefault(key, {})[rank] = start
                        now[rank] = start + 3 * US
                        span("host", start, now[rank])
                        if len(arrived[key]) == len(members):
                            begin = max(arrived[key].values()) + 3 * US
                            end = begin + price((60 + instruction.message_bytes // 8000) * US)
                            for member in members:
                                spans.append(
                                    Span(rank=member, stream="comm", start_ps=begin, end_ps=end, step=step, id=id_,
                                         call=instruction.call, part="C")
                                )  # fmt: skip
                                done[member, instruction.token, home(rank, instruction.token, block.micro_batch)] = end
                    elif instruction.kind is Kind.SEND:
                        end = start + price(50 * US)
                        span("comm", start, end)
                        done[rank, instruction.token, home(rank, instruction.token, block.micro_batch)] = end
                        for piece in instruction.pieces:
                            key = (instruction.channel, block.micro_batch, piece.dst_rank)
                            if piece.src_rank == rank:
                                sent[key] = max(sent.get(key, 0), end)
                    elif instruction.kind is Kind.RECV:
                        pass
                    else:
                        batch = instruction.attrs.get("micro_batch", block.micro_batch)
                        token = str(instruction.waits)
                        end = done.get((rank, token, home(rank, token, batch)))
                        if token.endswith(".recv"):
                            receive = next(
                                each for _, each in walk if each.kind is Kind.RECV and each.token == instruction.waits
                            )
                            end = sent.get((receive.channel, batch, rank))
                        if end is None:
                            break
                        if end > start:
                            span("host", start, end)
                        now[rank] = max(start, end)
                    position[rank] += 1
                    moving = True
        assert all(position[rank] == len(walk) for rank, walk in walks.items())
        now = dict.fromkeys(now, max(now.values()))
    timeline = Timeline.from_spans(spans, kind=kind, num_ranks=program.num_ranks)
    peaks = tuple(
        MemoryPeak(rank=rank, peak_bytes=3_000_000, by_role={"weight": 1_500_000, "gradient": 1_000_000, "activation": 500_000})
        for rank in range(program.num_ranks)
    )
    return replace(timeline, memory=peaks, meta={"command": "toy"})


def small_program() -> Program:
    """The program of `small_plan`."""
    return lower(small_plan())
