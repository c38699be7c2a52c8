"""A configuration in words that other programs know: Megatron-LM's flags, torchtitan's settings, and our own JSON file.

Flags as in Megatron-LM's megatron/training/arguments.py of 2025; torchtitan's settings are in `torchtitan`. What a
program has no words for is refused, never rounded to something near.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plans.errors import TwofoldError
from plans.files import write_atomically
from plans.plan import Optimizer
from plans.scale import Degrees
from plans.transformer import TransformerConfig
from plans.transformer.config import Experts, Latent, Rope
from search.scale.torchtitan import check_dense, read_torchtitan, stage_values, torchtitan_toml

__all__ = ["Statement", "megatron_flags", "megatron_text", "read_statement", "torchtitan_toml", "write_statement"]


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What a file states.

    Args:
        values: degrees, as `Degrees` takes them; "zero" is the optimizer's level.
        global_batch: sequences of a step.
        seq: tokens of a sequence; None: the model's.
        config: of the model; None where the file does not say.
        num_layers: of the model for which the file was made; None where it does not say.
        stages: torchtitan's layers per stage, and how many fewer the first and the last hold.
        unread: what the file states beside, of which no notice is taken.
    """

    values: dict[str, Any]
    global_batch: int
    seq: int | None = None
    config: TransformerConfig | None = None
    num_layers: int | None = None
    stages: tuple[int | None, int, int] | None = None
    unread: tuple[str, ...] = ()

    def degrees(self, global_batch: int | None = None, *, half: bool = True, num_layers: int | None = None) -> Degrees:
        """The degrees, under another batch or for another number of layers where given.

        Raises:
            TwofoldError: a batch or a number of layers that they cannot take.
        """
        rest = {name: value for name, value in self.values.items() if name != "zero"}
        if self.stages is not None:
            rest |= stage_values(self.values, self.stages, num_layers or self.num_layers)
        wide = "float32" if half else None
        return Degrees(
            **rest, global_batch=global_batch or self.global_batch,
            optimizer=Optimizer(
                kind="adamw", settings={"lr": 1e-4}, parallel_level=int(self.values.get("zero", 0)),
                gradient_dtype=wide, master_dtype=wide,
            ),
        )  # fmt: skip


# ------------------------------------------------------------------- our own file


def write_statement(path: str | os.PathLike[str], config: TransformerConfig, degrees: Degrees, **more: Any) -> Path:
    """Save a configuration as JSON, with whatever else is worth keeping."""
    made = {
        "twofold_degrees": 1,
        "config": {name: value for name, value in asdict(config).items() if name not in ("source",)},
        "degrees": {
            "dp": degrees.dp, "cp": degrees.cp, "tp": degrees.tp, "pp": degrees.pp, "ep": degrees.ep,
            "micro_batch": degrees.micro_batch, "schedule": degrees.schedule, "virtual": degrees.virtual,
            "recompute": degrees.recompute, "zero": degrees.optimizer.parallel_level,
            "sequence_parallel": degrees.sequence_parallel,
            "layers": None if degrees.layers is None else list(degrees.layers),
        },
        "global_batch": degrees.global_batch,
        **more,
    }  # fmt: skip
    target = Path(path)
    write_atomically(target, (json.dumps(made, indent=1) + "\n").encode())
    return target


def read_statement(path: str | os.PathLike[str]) -> Statement:
    """Read a file of ours (.json), torchtitan's settings (.toml), or a file with Megatron-LM's flags.

    Raises:
        TwofoldError: a file that cannot be read, or says something that has no meaning here.
    """
    source = Path(path)
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TwofoldError(f"cannot read {os.fspath(path)!r}: {error}") from None
    if source.suffix == ".toml":
        return Statement(**read_torchtitan(text, os.fspath(path)))
    if source.suffix == ".json":
        return _read_own(text, os.fspath(path))
    return _read_megatron(text, os.fspath(path))


_OWN = frozenset(
    {"dp", "cp", "tp", "pp", "ep", "micro_batch", "schedule", "virtual", "recompute", "zero", "sequence_parallel",
     "layers"}
)  # fmt: skip


def _read_own(text: str, path: str) -> Statement:
    try:
        found = json.loads(text)
        assert found["twofold_degrees"] == 1
        fields = dict(found["config"])
        fields["rope"] = Rope(**fields["rope"])
        fields["experts"] = None if fields.get("experts") is None else Experts(**fields["experts"])
        fields["latent"] = None if fields.get("latent") is None else Latent(**fields["latent"])
        values = dict(found["degrees"])
        if wrong := values.keys() ^ _OWN:
            raise TwofoldError(
                f"{path}: degrees are {', '.join(sorted(_OWN))}; wrong or missing: {', '.join(sorted(wrong))}"
            )
        level = values["zero"]
        if isinstance(level, bool) or level not in (0, 1, 2, 3):
            raise TwofoldError(f"{path}: zero is {level!r}; optimizer-parallel levels are 0, 1, 2 and 3")
        values["layers"] = None if values["layers"] is None else tuple(values["layers"])
        config = TransformerConfig(**fields)
        return Statement(values=values, global_batch=found["global_batch"], seq=config.seq, config=config)
    except TwofoldError:
        raise
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise TwofoldError(
            f"{path} states no degrees ({type(error).__name__}: {error}); `twofold plan` writes such files beside plans"
        ) from None


# ------------------------------------------------------------------- Megatron-LM


def megatron_flags(config: TransformerConfig, degrees: Degrees) -> list[str]:
    """The flags of Megatron-LM that state the layout, the batch and the recomputing.

    Raises:
        TwofoldError: what Megatron-LM has no flag for.

    >>> from plans.transformer import transformer_config
    >>> flags = megatron_flags(transformer_config("llama-3-8b"), Degrees(dp=4, tp=2, global_batch=8))
    >>> flags[:2]
    ['--tensor-model-parallel-size', '2']
    """
    check_dense(config)
    if degrees.schedule not in ("1f1b", "interleaved_1f1b"):
        raise TwofoldError(
            f"Megatron-LM has no schedule {degrees.schedule!r}; plan with --schedule 1f1b or interleaved_1f1b"
        )
    if degrees.recompute == "selective_op":
        raise TwofoldError("Megatron-LM cannot recompute by operator; plan with --recompute none, selective or full")
    level = degrees.optimizer.parallel_level
    if level >= 2 and degrees.pp > 1:
        raise TwofoldError(
            f"Megatron-LM shards gradients and weights (level {level}) only without pipeline stages; plan with --zero 1"
        )
    flags = [
        "--tensor-model-parallel-size", degrees.tp, "--pipeline-model-parallel-size", degrees.pp,
        "--context-parallel-size", degrees.cp, "--micro-batch-size", degrees.micro_batch,
        "--global-batch-size", degrees.global_batch, "--seq-length", config.seq, "--num-layers", config.num_layers,
    ]  # fmt: skip
    if degrees.sequence_parallel:
        flags.append("--sequence-parallel")
    counts = degrees.layers_of(config.num_layers)
    if len(set(counts)) > 1:
        stages = ["t" * count for count in counts]
        stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
        flags += ["--pipeline-model-parallel-layout", "|".join(stages)]
    elif degrees.virtual > 1:
        flags += ["--num-layers-per-virtual-pipeline-stage", counts[0]]
    if level == 1:
        flags.append("--use-distributed-optimizer")
    elif level >= 2:
        strategy = "optim_grads" if level == 2 else "optim_grads_params"
        flags += ["--use-distributed-optimizer", "--use-megatron-fsdp", "--data-parallel-sharding-strategy", strategy]
    if degrees.recompute == "selective":
        flags += ["--recompute-granularity", "selective"]
    elif degrees.recompute == "full":
        flags += ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1]
    return [str(each) for each in flags]


def megatron_text(config: TransformerConfig, degrees: Degrees) -> str:
    """The flags, after a comment with what is none of them: the number of processes."""
    return f"# WORLD_SIZE={degrees.num_ranks}\n{shlex.join(megatron_flags(config, degrees))}"


_MEGATRON = {
    "tensor-model-parallel-size": "tp", "pipeline-model-parallel-size": "pp", "context-parallel-size": "cp",
    "micro-batch-size": "micro_batch",
}  # fmt: skip

_MEGATRON_ON = frozenset(
    {"sequence-parallel", "use-distributed-optimizer", "use-megatron-fsdp", "bf16", "fp16", "use-flash-attn", "swiglu",
     "untie-embeddings-and-output-weights", "overlap-grad-reduce", "overlap-param-gather"}
)  # fmt: skip

_MEGATRON_READ = frozenset(
    {*_MEGATRON, "global-batch-size", "seq-length", "num-layers", "world-size", "nproc-per-node", "nnodes",
     "data-parallel-sharding-strategy", "recompute-granularity", "recompute-method", "recompute-num-layers",
     "num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank", "pipeline-model-parallel-layout"}
)  # fmt: skip

_MEGATRON_REFUSED = (
    "expert-model-parallel-size", "num-experts", "rampup-batch-size", "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers", "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split", "hierarchical-context-parallel-sizes", "use-torch-fsdp2",
    "optimizer-cpu-offload", "num-distributed-optimizer-instances", "encoder-tensor-model-parallel-size",
)  # fmt: skip


def _read_megatron(text: str, path: str) -> Statement:
    lines = (line.partition("#")[0].strip().removesuffix("\\") for line in text.splitlines())
    try:
        words = shlex.split(" ".join(lines))
    except ValueError as error:
        raise TwofoldError(f"{path} is no shell script: {error}") from None
    flags: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("_", "-")
            flags[name] = [value] if value else []
        elif name:
            flags[name].append(word)
    if not flags:
        raise TwofoldError(f"{path} has no flags such as --tensor-model-parallel-size 8; nor is it .json or .toml")
    for refused in _MEGATRON_REFUSED:
        if refused in flags:
            raise TwofoldError(f"{path}: --{refused} cannot be stated in degrees of a dense transformer")
    values: dict[str, Any] = {
        mine: _whole(flags[theirs], theirs, path) for theirs, mine in _MEGATRON.items() if theirs in flags
    }
    for needed in ("global-batch-size", "micro-batch-size"):
        if needed not in flags:
            raise TwofoldError(f"{path} does not state --{needed}")
    world = _world_size(flags, text, path)
    rest = values.get("tp", 1) * values.get("pp", 1) * values.get("cp", 1)
    if world % rest:
        raise TwofoldError(f"{path}: tp x pp x cp = {rest} does not divide --world-size {world}")
    values["dp"] = world // rest
    values["sequence_parallel"] = "sequence-parallel" in flags and values.get("tp", 1) > 1
    values["zero"] = 1 if "use-distributed-optimizer" in flags else 0
    if "use-megatron-fsdp" in flags:
        strategies = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
        strategy = (flags.get("data-parallel-sharding-strategy") or ["no_shard"])[0]
        if strategy not in strategies:
            raise TwofoldError(
                f"{path}: --data-parallel-sharding-strategy {strategy!r} is none of {', '.join(strategies)}"
            )
        values["zero"] = strategies[strategy]
    granularity = (flags.get("recompute-granularity") or ["none"])[0]
    if granularity not in ("none", "selective", "full"):
        raise TwofoldError(f"{path}: --recompute-granularity {granularity!r} is none of selective, full")
    values["recompute"] = granularity
    layers = _whole(flags["num-layers"], "num-layers", path) if "num-layers" in flags else None
    values |= _megatron_stages(flags, layers, values.get("pp", 1), path)
    seq = _whole(flags["seq-length"], "seq-length", path) if "seq-length" in flags else None
    unread = tuple(f"--{name}" for name in flags if name not in _MEGATRON_READ | _MEGATRON_ON)
    return Statement(
        values=values, global_batch=_whole(flags["global-batch-size"], "global-batch-size", path), seq=seq,
        num_layers=layers, unread=unread,
    )  # fmt: skip


def _world_size(flags: dict[str, list[str]], text: str, path: str) -> int:
    if "world-size" in flags:
        return _whole(flags["world-size"], "world-size", path)
    if found := re.search(r"\bWORLD_SIZE=(\d+)", text):
        return _whole([found[1]], "world-size", path)
    if "nproc-per-node" in flags:  # torchrun's words; the script and its flags follow the last one
        nodes = _whole(flags.get("nnodes", ["1"])[:1], "nnodes", path)
        return nodes * _whole(flags["nproc-per-node"][:1], "nproc-per-node", path)
    raise TwofoldError(
        f"{path} does not state --world-size; add it, or a line with WORLD_SIZE=8, say: the number of processes is no "
        "flag of Megatron-LM"
    )


def _megatron_stages(flags: dict[str, list[str]], layers: int | None, pp: int, path: str) -> dict[str, Any]:
    """Chunks per rank, schedule and layers."""
    if "pipeline-model-parallel-layout" in flags:
        counts = _layout(flags["pipeline-model-parallel-layout"], path)
        if len(counts) % pp:
            raise TwofoldError(f"{path}: {len(counts)} stages of --pipeline-model-parallel-layout on {pp} ranks")
        if layers not in (None, sum(counts)):
            raise TwofoldError(
                f"{path}: --pipeline-model-parallel-layout has {sum(counts)} layers, --num-layers is {layers}"
            )
        return _chunked(len(counts) // pp) | {"layers": counts}
    if "num-virtual-stages-per-pipeline-rank" in flags and pp > 1:
        name = "num-virtual-stages-per-pipeline-rank"
        return _chunked(_whole(flags[name], name, path))
    if "num-layers-per-virtual-pipeline-stage" not in flags or pp == 1:
        return {}
    if layers is None:
        raise TwofoldError(f"{path}: --num-layers-per-virtual-pipeline-stage needs --num-layers")
    each = _whole(flags["num-layers-per-virtual-pipeline-stage"], "num-layers-per-virtual-pipeline-stage", path)
    if layers % (each * pp):
        raise TwofoldError(f"{path}: {layers} layers do not divide by {pp} stages of {each}")
    return _chunked(layers // (each * pp))


def _chunked(virtual: int) -> dict[str, Any]:
    return {"virtual": virtual, "schedule": "interleaved_1f1b" if virtual > 1 else "1f1b"}


def _layout(words: Sequence[str], path: str) -> tuple[int, ...]:
    """Blocks of every stage of a layout such as "Et*3|(tt|)*5,tL": E the embedding, t a block, L the loss."""
    told = "".join(words)
    text = re.sub(r"[\s,]", "", told)
    text = re.sub(r"\(([^()]*)\)\*(\d{1,4})", lambda found: found[1] * int(found[2]), text)
    text = re.sub(r"([EtL|])\*(\d{1,4})", lambda found: found[1] * int(found[2]), text)
    if not re.fullmatch(r"Et*(\|t*)*L", text):
        raise TwofoldError(
            f"{path}: --pipeline-model-parallel-layout {told!r} is not E, blocks t in stages between |, L at the end"
        )
    return tuple(stage.count("t") for stage in text.split("|"))


def _whole(words: Sequence[str], name: str, path: str) -> int:
    if len(words) != 1 or not words[0].isdigit() or int(words[0]) < 1:
        raise TwofoldError(f"{path}: --{name} is {' '.join(words)!r}, not a whole number of at least 1")
    return int(words[0])
