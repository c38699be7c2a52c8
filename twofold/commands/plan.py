"""`twofold plan`: operators of any graph, or degrees of a transformer by name on accelerators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import tyro

from plans.errors import TwofoldError
from twofold.cli import run_command
from twofold.commands.simulate import schedule_argument

if TYPE_CHECKING:
    from plans.model.graph import Graph
    from twofold.console import Console

__all__ = ["plan"]

Word = Annotated[str, tyro.conf.Positional]


def plan(
    model: Word,
    machine: str,
    devices: int | None = None,
    global_batch: int | None = None,
    seq: int | None = None,
    layers: int | None = None,
    method: str = "search",
    dp: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    cp: int | None = None,
    ep: int | None = None,
    micro_batch: int | None = None,
    schedule: str | None = None,
    virtual: int | None = None,
    recompute: str | None = None,
    recompute_layers: int | None = None,
    zero: int | None = None,
    sequence_parallel: bool | None = None,
    stage_layers: tuple[int, ...] | None = None,
    order: tuple[str, ...] | None = None,
    stack: str = "twofold",
    stages: int | None = None,
    micro_batches: int | None = None,
    widths: str | None = None,
    lr: float = 0.01,
    memory: str | None = None,
    time_limit: float | None = None,
    top_k: int | None = None,
    out: str = "plan.json",
    report: str | None = None,
    export: str | None = None,
    simulate: int = 0,
    explain: bool = False,
    json: bool = False,
) -> int:
    """Search the best plans for a model on a machine and save the best one.

    A transformer by name or config.json on accelerators is searched in degrees, on any number of devices: whatever is
    not given is searched. Any other model is searched operator by operator. Ctrl-C gives the best so far and its gap.

    Args:
        model: package.module:function or file.py:function that gives (module with its loss, example inputs); the name
            of a transformer, such as llama-3-8b; or a Hugging Face config.json.
        machine: shipped machine, such as h100-sxm-x64, or machine file.
        devices: ranks to use; all of the machine's otherwise.
        global_batch: samples of a step; that of the example inputs otherwise, for a transformer one per device.
        seq: tokens of a sample, instead of the transformer's own.
        layers: blocks, instead of the transformer's own.
        method: search; data-parallel, grid or greedy, what one would do without; or operators, a transformer operator
            by operator.
        dp: transformers: fixes the data-parallel degree.
        tp: transformers: fixes the tensor-parallel degree.
        pp: transformers: fixes the pipeline-parallel degree.
        cp: transformers: fixes the context-parallel degree.
        ep: mixtures of experts: fixes over how many of the data-parallel ranks the experts are split.
        micro_batch: transformers: fixes the samples of a micro-batch on a data-parallel rank.
        schedule: of the pipeline: a name, or for other models a file (.csv, .txt) with a row of actions for every
            pipeline rank; 1f1b for other models, unless given.
        virtual: transformers: fixes the chunks per pipeline rank.
        recompute: transformers: fixes it: none, selective, selective_op or full.
        recompute_layers: transformers: fixes how many blocks of every chunk recompute, the first ones.
        zero: optimizer-parallel level; 0 for other models, unless given.
        sequence_parallel: transformers: fixes whether tp splits the sequence where it splits nothing else.
        stage_layers: transformers: fixes the blocks of every chunk.
        order: transformers: fixes the order in which ranks count along the axes, the innermost first: tp cp dp pp.
        stack: transformers: the software that runs it: twofold, torch, torch-compile, megatron or megatron-2022.
        stages: other models: pipeline stages, balanced by compute; 1 unless given.
        micro_batches: other models: into which the batch is cut; 1 unless given.
        widths: other models: devices of every stage, such as 4,2,2; even; or any, which also searches stages and
            micro-batches that are not given and may leave devices idle. Even unless given, if the stages divide them.
        lr: learning rate (SGD for other models).
        memory: limit per device, such as 25GB.
        time_limit: seconds after which the best so far is taken.
        top_k: plans to list, 5 unless given; of a transformer so many are then proven to be the fastest, else the best
            alone is, and the others are what was forecast on the way.
        out: where the best plan goes; a transformer's degrees go beside it, with the ending .degrees.json.
        report: transformers: write the search's report to this HTML file.
        export: transformers: megatron or torchtitan: print the best as that program's settings.
        simulate: transformers: how many of the best are simulated instruction by instruction, which orders them anew.
        explain: print the alternatives as well, and why they lost.
        json: print one JSON object on stdout, progress on stderr.
    """
    from twofold.console import Console

    pins: dict[str, Any] = {
        "dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "micro_batch": micro_batch, "virtual": virtual,
        "recompute": recompute, "recompute_layers": recompute_layers,
        "sequence_parallel": sequence_parallel, "layers": stage_layers, "order": order,
    }  # fmt: skip

    def work() -> tuple[Any, bool]:
        from costmodels import Machine
        from twofold.planning import METHODS, plan_degrees

        say, target = Console(json=json), Machine.load(machine)
        if method not in (*METHODS, "operators"):
            raise TwofoldError(f"--method {method!r} is not known; known are {', '.join(METHODS)}, operators")
        if top_k is not None and top_k < 1:
            raise TwofoldError(f"--top-k {top_k}: it is at least 1")
        if simulate < 0:
            raise TwofoldError(f"--simulate {simulate}: it is at least 0")
        if time_limit is not None and not time_limit > 0:
            raise TwofoldError(f"--time-limit {time_limit}: seconds above 0")
        if method == "operators" or ":" in model or not target.host_async:
            given = [name for name, value in pins.items() if value is not None] + (["export"] if export else [])
            if given:
                raise TwofoldError(
                    f"--{given[0].replace('_', '-')} is for transformers by name or config.json on accelerators; "
                    f"{model!r} on {target.name} is searched operator by operator"
                )
            options = {
                "devices": devices, "global_batch": global_batch, "seq": seq, "layers": layers, "stages": stages,
                "micro_batches": micro_batches, "widths": widths, "time_limit": time_limit,
                "schedule": schedule or "1f1b", "zero": zero or 0, "lr": lr, "memory": memory, "top_k": top_k or 5,
                "out": out, "explain": explain,
            }  # fmt: skip
            return _plan_operators(model, target, options, say), True
        if stages is not None or micro_batches is not None or widths is not None:
            raise TwofoldError(
                "--stages, --widths and --micro-batches are for other models; a transformer takes --pp and others"
            )
        return plan_degrees(
            model, target, devices=devices, global_batch=global_batch, seq=seq, layers=layers, method=method,
            pins=pins | {"schedule": schedule, "zero": zero}, stack=stack, memory=memory, time_limit=time_limit,
            top_k=top_k, out=out, report=report, export=export, simulate=simulate, explain=explain, say=say,
        ), True  # fmt: skip

    return run_command(work, json)


def _plan_operators(model: str, target: Any, options: dict[str, Any], say: Console) -> dict[str, Any]:
    from plans.files import check_writable
    from plans.plan import Optimizer, save_plan
    from reports import plan_table
    from search import search
    from twofold.context import parse_bytes

    check_writable(options["out"])  # before the search
    devices, global_batch, memory = options["devices"], options["global_batch"], options["memory"]
    graph, recompute = _graph_of(
        model, global_batch or devices or target.num_devices, options["seq"], options["layers"]
    )  # fmt: skip
    widths = _widths(options["widths"])
    unless = None if widths == "any" else 1
    found = search(
        graph, target, num_devices=devices, num_stages=unless if options["stages"] is None else options["stages"],
        num_micro_batches=unless if options["micro_batches"] is None else options["micro_batches"], widths=widths,
        time_limit_s=options["time_limit"], on_progress=say.note,
        schedule=schedule_argument(options["schedule"]), recompute=recompute, global_batch=global_batch,
        top_k=options["top_k"], optimizer=Optimizer(settings={"lr": options["lr"]}, parallel_level=options["zero"]),
        memory_limit_bytes=None if memory is None else parse_bytes(memory, "--memory"),
    )  # fmt: skip
    path = save_plan(found.best, options["out"])
    say.say(found.table())
    say.say("")
    say.say(plan_table(found.best).text())
    if options["explain"]:
        say.say(found.explain())
    say.say(f"saved {path}; {found.summary()}")
    plans = [_prediction_of(each) for each in found.plans]
    return {"best": {"file": str(path), **plans[0]}, "plans": plans, **found.to_json()}


def _widths(given: str | None) -> str | tuple[int, ...] | None:
    if given is None or given in ("even", "any"):
        return given
    try:
        return tuple(int(each) for each in given.split(","))
    except ValueError:
        raise TwofoldError(f"--widths {given!r}: even, any, or devices per stage such as 4,2,2") from None


def _graph_of(model: str, batch: int, seq: int | None, layers: int | None) -> tuple[Graph, tuple[str, ...]]:
    """The graph that a model on the command line stands for, and its operators that are marked to be recomputed."""
    if ":" not in model:
        from plans.model.transformer import transformer

        return transformer(model, batch_size=batch, seq=seq, num_layers=layers), ()
    if seq is not None or layers is not None:
        raise TwofoldError(f"--seq and --layers are for transformers by name or config.json, not for {model!r}")
    from executor.capture.capture import capture
    from executor.recompute import marked_operators
    from executor.train.batches import load_model

    module, examples = load_model(model)
    graph = capture(module, examples)
    return graph, tuple(marked_operators(graph, module))


def _prediction_of(plan: Any) -> dict[str, Any]:
    found = plan.prediction
    return {
        "step_s": found.step_s,
        "step_low_s": found.low_s,
        "step_high_s": found.high_s,
        "peak_bytes": found.peak_bytes,
    }
