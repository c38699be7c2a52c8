"""Small graphs and plans drawn at random, all of them valid: what lowering has to get right.

Sizes are odd, even and divisible by three; meshes have one or two axes and permuted ranks; stages have unequal widths;
operators are split along any dims that divide, some on a mesh of their own; tensors are read by several operators, on
the same stage and on others.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from plans.errors import TwofoldError
from plans.layout import Layout
from plans.model.graph import Graph, Operator, Tensor
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage, Strategy
from plans.schedules import ScheduleError, make_schedule, schedule_names

WIDTHS = (3, 4, 6, 8, 12)
MESHES = (((1,), "a"), ((2,), "a"), ((3,), "a"), ((4,), "a"), ((2, 2), "ab"), ((2, 3), "ab"), ((3, 2), "ab"))
SETTINGS = {
    "sgd": {"lr": 0.1, "weight_decay": 0.03},
    "momentum": {"lr": 0.1, "momentum": 0.8},
    "adamw": {"lr": 0.01, "weight_decay": 0.1},
}


@dataclass
class GraphMaker:
    """Writes a graph operator by operator."""

    batch: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    operators: list[Operator] = field(default_factory=list)

    def tensor(self, name: str, shape: tuple[int, ...], kind: str, dtype: str = "float32") -> str:
        self.tensors[name] = Tensor(name=name, shape=shape, kind=kind, dtype=dtype)
        return name

    def apply(self, kind: str, *inputs: str, shape: tuple[int, ...] | None = None, dtype: str = "float32") -> str:
        name = f"t{len(self.operators)}"
        self.tensor(name, self.tensors[inputs[0]].shape if shape is None else shape, "activation", dtype)
        self.operators.append(Operator(name=f"{name}.{kind}", kind=kind, inputs=inputs, outputs=(name,)))
        return name

    def linear(self, x: str, width: int, bias: bool = True) -> str:
        *batch, before = self.tensors[x].shape
        name = f"w{len(self.operators)}"
        inputs = [x, self.tensor(name, (width, before), "parameter")]
        if bias:
            inputs.append(self.tensor(f"{name}b", (width,), "parameter"))
        return self.apply("linear", *inputs, shape=(*batch, width))

    def graph(self, loss: str) -> Graph:
        return Graph(
            name="random", batch_size=self.batch, tensors=self.tensors, operators=tuple(self.operators), loss=loss
        )


def random_graph(draw: random.Random, batch: int) -> Graph:
    """One to four linear layers with activations, residual sums, products and tied weights between them."""
    make = GraphMaker(batch)
    width = draw.choice(WIDTHS)
    if draw.random() < 0.3:
        cube = make.tensor("x", (batch, 2, width), "input")
        value = cube if draw.random() < 0.5 else make.apply("reshape", cube, shape=(batch, 2 * width))
    else:
        value = make.tensor("x", (batch, width), "input")
    made = [value]
    for _ in range(draw.randint(1, 4)):
        shape = make.tensors[value].shape
        value = make.linear(value, draw.choice((*WIDTHS, shape[-1])), bias=draw.random() < 0.7)
        made.append(value)
        for _ in range(draw.randint(0, 2)):
            value = _between(draw, make, made, value)
            made.append(value)
    if make.tensors[value].shape[1:-1] and draw.random() < 0.5:
        value = make.apply("reshape", value, shape=(batch, make.tensors[value].num_elements // batch))
    return make.graph(_loss(draw, make, value))


def _between(draw: random.Random, make: GraphMaker, made: list[str], value: str) -> str:
    shape = make.tensors[value].shape
    same = [name for name in made if make.tensors[name].shape == shape]
    kind = draw.choice(("relu", "relu", "gelu", "silu", "abs", "residual", "residual", "scale", "tied", "cast"))
    if kind == "residual":
        return make.apply(draw.choice(("add", "sub", "mul")), *draw.sample([value, draw.choice(same)], 2))
    if kind == "scale":  # a trained vector, repeated over the batch
        vector = draw.choice((shape[-1:], (1, shape[-1]), (1,)))
        name = make.tensor(f"v{len(make.operators)}", vector, "parameter")
        return make.apply(draw.choice(("add", "mul")), value, name)
    if kind == "tied":
        square = [name for name, tensor in make.tensors.items() if tensor.shape == (shape[-1], shape[-1])]
        square = [name for name in square if make.tensors[name].kind == "parameter"]
        return make.apply("linear", value, draw.choice(square), shape=shape) if square else make.apply("relu", value)
    return make.apply(kind, value)


def _loss(draw: random.Random, make: GraphMaker, value: str) -> str:
    shape = make.tensors[value].shape
    kind = draw.choice(("l1_loss", "mse_loss", "cross_entropy"))
    if kind == "cross_entropy":
        return make.apply(kind, value, make.tensor("y", shape[:-1], "input", "int64"), shape=())
    if draw.random() < 0.5:
        return make.apply(kind, value, make.tensor("y", shape, "input"), shape=())
    flat = make.tensor("y", (shape[0], make.tensors[value].num_elements // shape[0]), "input", "int64")
    label = make.apply("reshape", flat, shape=shape, dtype="int64")
    return make.apply(kind, value, make.apply("cast", label), shape=())


def random_plan(seed: int) -> Plan:
    """A plan that `Plan` accepts; the same for the same seed."""
    draw = random.Random(seed)
    while True:
        num_micro_batches = draw.choice((1, 2, 3, 4))
        graph = random_graph(draw, draw.choice((12, 24)) * num_micro_batches)
        try:
            stages, schedule = _stages(draw, graph, num_micro_batches)
        except ScheduleError:
            continue
        micro = graph.with_batch(graph.batch_size // num_micro_batches)
        mesh_of = {name: stage.mesh for stage in stages for name in stage.operators}
        kind = draw.choice(tuple(SETTINGS))
        names = [operator.name for operator in graph.operators]
        try:
            return Plan(
                graph=graph,
                stages=stages,
                strategies={
                    operator.name: _strategy(draw, micro, operator, mesh_of[operator.name])
                    for operator in micro.operators
                    if draw.random() < 0.9
                },
                num_micro_batches=num_micro_batches,
                schedule=schedule,
                recompute=tuple(name for name in names[:-1] if draw.random() < draw.choice((0.0, 0.5))),
                optimizer=_optimizer(seed, kind, draw.randint(0, 1), draw.choice((1, 100))),
                full_batch=draw.random() < 0.6,
                output_broadcast=draw.random() < 0.4,
            )
        except TwofoldError:
            continue


def _optimizer(seed: int, kind: str, low_level: int, threshold_bytes: int) -> Optimizer:
    """Any level with any buckets; drawn apart, so that the rest of a plan does not depend on it.

    dtypes are given other names only: what computes with them is exact, and sees where something is not cast.
    """
    draw = random.Random(f"optimizer of {seed}")
    master, states, gradients, reduced = (draw.choice((None, None, "float64", "bfloat16")) for _ in range(4))
    return Optimizer(
        kind=kind,
        settings=SETTINGS[kind],
        parallel_level=draw.choice((low_level, 2, 3)),
        threshold_bytes=threshold_bytes,
        bucket_bytes=draw.choice((0, 0, 200, 2**20)),
        prefetch=draw.randint(0, 2),
        reduce_every=draw.choice(("micro_batch", "step")),
        master_dtype=master,
        state_dtype=states,
        gradient_dtype=gradients,
        reduce_dtype=reduced,
        clip_norm=draw.choice((None, None, 0.3)),
    )


def _stages(draw: random.Random, graph: Graph, num_micro_batches: int) -> tuple[tuple[Stage, ...], str]:
    num_groups = draw.randint(1, 3)
    name = draw.choice(schedule_names())
    virtual = 1 if name in ("gpipe", "1f1b", "zb_h1", "zb_h2") else 2
    if name in ("interleaved_1f1b", "interleaved_zb", "looped_bfs"):
        virtual = draw.choice((2, 3))
    num_stages = num_groups * virtual
    placement = make_schedule(name, num_groups, num_micro_batches, virtual=virtual).placement
    cuts = _cuts(draw, graph, num_stages, placement)
    meshes, first = [], 0
    shapes = [draw.choice(MESHES) for _ in range(num_groups)]
    everyone = list(range(sum(Layout(sizes, tuple(names)).num_ranks for sizes, names in shapes)))
    if draw.random() < 0.5:
        draw.shuffle(everyone)
    for sizes, names in shapes:
        count = Layout(sizes, tuple(names)).num_ranks
        meshes.append(Layout(sizes, tuple(names), everyone[first : first + count]))
        first += count
    names = [operator.name for operator in graph.operators]
    bounds = [0, *cuts, len(names)]
    stages = []
    for number in range(num_stages):
        mesh = meshes[placement[number]]
        if draw.random() < 0.3 and mesh.num_ranks == 4:
            mesh = Layout(*draw.choice((((4,), ("a",)), ((2, 2), ("b", "c")))), mesh.rank_list)
        stages.append(Stage(mesh=mesh, operators=tuple(names[bounds[number] : bounds[number + 1]])))
    return tuple(stages), name


def _cuts(draw: random.Random, graph: Graph, num_stages: int, placement: tuple[int, ...]) -> list[int]:
    """Where stages end: each has an operator, the last has the loss, readers of a parameter share their ranks."""
    names = [operator.name for operator in graph.operators]
    if len(names) < num_stages:
        raise ScheduleError("too few operators")
    cuts = sorted(draw.sample(range(1, len(names)), num_stages - 1))
    owner: dict[str, int] = {}
    for position, operator in enumerate(graph.operators):
        group = placement[sum(cut <= position for cut in cuts)]
        for name in operator.inputs:
            if graph.tensors[name].kind == "parameter" and owner.setdefault(name, group) != group:
                raise ScheduleError(f"{name} is read by two groups")
    return cuts


def _strategy(draw: random.Random, micro: Graph, operator: Operator, mesh: Layout) -> Strategy:
    own = None
    if draw.random() < 0.15:
        ranks = list(mesh.rank_list)
        if draw.random() < 0.5:
            draw.shuffle(ranks)
        sizes, names = draw.choice([(sizes, names) for sizes, names in MESHES if _count(sizes) == len(ranks)])
        own = mesh = Layout(sizes, tuple(names), ranks)
    spec = micro.spec(operator)
    dims: dict[str, tuple[str, ...]] = {}
    for axis in draw.sample(mesh.alias_name, len(mesh.alias_name)):
        fits = [dim for dim in sorted(spec.splittable) if spec.sizes[dim] % mesh.size((*dims.get(dim, ()), axis)) == 0]
        if fits and draw.random() < 0.8:
            dim = draw.choice(fits)
            dims[dim] = (*dims.get(dim, ()), axis)
    return Strategy(dims=dims, mesh=own)


def _count(sizes: tuple[int, ...]) -> int:
    return sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
