"""Write and read a configuration as Megatron-LM's flags.

Flags as in Megatron-LM's megatron/training/arguments.py and the guide in its core/transformer/moe, both of late
2025. What they cannot express, and what Megatron-LM refuses, raises an error here; nothing is approximated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from interop.shell_words import is_whole, shell_words
from interop.startup import MEGATRON, PIPELINE_INSIDE, check_rules
from interop.unstated import check_stated_by
from plans.degrees import ORDER, Degrees, check
from plans.errors import TwofoldError
from plans.model.transformer import Scales, TransformerConfig, sizes_of

__all__ = ["check_megatron_model", "megatron_flags", "megatron_words", "read_megatron"]


_STATED = frozenset({
    "dp", "tp", "pp", "cp", "ep", "micro_batch", "schedule", "virtual", "recompute", "recompute_layers", "zero",
    "sequence_parallel", "layers", "order",
})  # fmt: skip
"""Degrees that Megatron-LM has words for, or that are refused with a separate reason."""


def megatron_flags(config: TransformerConfig, degrees: Degrees) -> list[str]:
    """The flags of Megatron-LM that state the layout, the batch, the recomputing, and a mixture's experts.

    Raises:
        TwofoldError: what Megatron-LM has no flag for, or refuses.

    >>> from plans.model.transformer import transformer_config
    >>> flags = megatron_flags(transformer_config("llama-3-8b"), Degrees(dp=4, tp=2, global_batch=8))
    >>> flags[:2]
    ['--tensor-model-parallel-size', '2']
    """
    check(degrees, sizes_of(config))
    check_stated_by("Megatron-LM", _STATED, degrees)
    check_rules(MEGATRON, degrees, sizes_of(config))
    some, level = degrees.recompute_layers, degrees.optimizer.parallel_level
    flags: list[object] = [
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
        method = ("uniform", 1) if some is None else ("block", some)
        flags += [
            "--recompute-granularity",
            "full",
            "--recompute-method",
            method[0],
            "--recompute-num-layers",
            method[1],
        ]
    flags += _order_flags(degrees)
    return [str(each) for each in (*flags, *_expert_flags(config, degrees))]


def _order_flags(degrees: Degrees) -> list[object]:
    """Megatron-LM's orders: tp-cp-ep-dp-pp, and tp-cp-ep-pp-dp."""
    mine, usual = ([axis for axis in order if getattr(degrees, axis) > 1] for order in (degrees.order, ORDER))
    return [] if mine == usual else ["--use-tp-pp-dp-mapping"]


def _expert_flags(config: TransformerConfig, degrees: Degrees) -> list[object]:
    """Flags of experts with a capacity: ep of the data-parallel ranks share the experts, tp splits each expert."""
    experts = config.experts
    if experts is None:
        return []
    flags: list[object] = [
        "--expert-model-parallel-size", degrees.ep, "--expert-tensor-parallel-size", degrees.tp,
        "--num-experts", experts.num_experts, "--moe-router-topk", experts.top_k, "--moe-ffn-hidden-size", experts.ffn,
        "--moe-expert-capacity-factor", experts.capacity_factor, "--moe-pad-expert-input-to-capacity",
        "--moe-token-drop-policy", "position", "--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm",
    ]  # fmt: skip
    if experts.num_shared:
        flags += ["--moe-shared-expert-intermediate-size", experts.num_shared * experts.ffn]
    if experts.num_dense_layers:
        dense = experts.num_dense_layers
        flags += ["--moe-layer-freq", f"([0]*{dense}+[1]*{config.num_layers - dense})"]
    if experts.weights == "all":
        flags.append("--moe-router-pre-softmax")
    return flags


_PLAIN: dict[str, tuple[Any, ...]] = {
    "norm": ("rms", "layer"), "norm_place": ("before",), "qk_norm": ("none", "head"), "position": ("rope", "learned"),
    "first_position": (0,), "token_types": (0,), "causal": (True,), "parallel_residual": (False,),
    "embedding_norm": (False,), "head_transform": (False,), "head_bias": (False,), "latent": (None,),
    "scales": (Scales(),), "ignore_index": (None,),
}  # fmt: skip
"""The properties that a model must have for Megatron-LM's flags."""


def check_megatron_model(config: TransformerConfig) -> None:
    """Refuse models that Megatron-LM's flags do not state.

    Raises:
        TwofoldError: with the first field that has no flag.
    """
    for name, values in _PLAIN.items():
        if getattr(config, name) not in values:
            raise TwofoldError(
                f"{config.name}: no flag of Megatron-LM is known here for {name} {getattr(config, name)!r}; plan for "
                "another software"
            )
    if config.embedding_dropout != config.dropout:
        raise TwofoldError(f"{config.name}: Megatron-LM has one dropout rate for the embedding and the attention")
    biases = (config.qkv_bias, config.out_bias, config.mlp_bias)
    if biases not in ((False,) * 3, (True,) * 3, (True, False, False)):
        raise TwofoldError(f"{config.name}: Megatron-LM adds biases to all products, to none, or to those of the heads")
    if (config.gated, config.activation) not in ((True, "silu"), (False, "gelu")):
        gated = "gated " if config.gated else ""
        raise TwofoldError(f"{config.name}: {gated}{config.activation} is not an MLP that Megatron-LM's flags describe")
    if config.position == "rope" and (config.rope.scaling, config.rope.angles) != ("none", "base"):
        raise TwofoldError(f"{config.name}: Megatron-LM has no flags for scaled rotary angles, or angles from a module")
    if config.experts is not None and config.experts.shared_gate:
        raise TwofoldError(f"{config.name}: Megatron-LM has no flag for the gate of shared experts")


def _model_flags(config: TransformerConfig) -> list[str]:
    """The sizes and parts of a model; the vocabulary is not padded, and the null tokenizer adds one token to it."""
    flags: list[object] = [
        "--hidden-size", config.hidden, "--ffn-hidden-size", config.ffn, "--num-attention-heads", config.num_heads,
        "--kv-channels", config.head_dim, "--max-position-embeddings", config.seq,
        "--normalization", "RMSNorm" if config.norm == "rms" else "LayerNorm", "--norm-epsilon", config.norm_eps,
        "--attention-dropout", config.attention_dropout, "--hidden-dropout", config.dropout,
        "--tokenizer-type", "NullTokenizer", "--vocab-size", config.vocab - 1, "--make-vocab-size-divisible-by", 1,
    ]  # fmt: skip
    if config.kv_heads < config.num_heads:
        flags += ["--group-query-attention", "--num-query-groups", config.kv_heads]
    if config.position == "rope":
        flags += ["--position-embedding-type", "rope", "--rotary-base", int(config.rope.base)]
        flags += ["--rotary-percent", config.rope.fraction] if config.rope.fraction < 1 else []
    else:
        flags += ["--position-embedding-type", "learned_absolute"]
    switches = {
        "--swiglu": config.gated, "--qk-layernorm": config.qk_norm == "head",
        "--disable-bias-linear": not config.mlp_bias,
        "--add-qkv-bias": config.qkv_bias and not config.mlp_bias,
        "--untie-embeddings-and-output-weights": not config.tied,
        "--bf16": config.dtype == "bfloat16", "--fp16": config.dtype == "float16",
    }  # fmt: skip
    return [str(each) for each in (*flags, *(name for name, is_on in switches.items() if is_on))]


def megatron_words(config: TransformerConfig, degrees: Degrees, ranks_per_node: int) -> list[str]:
    """The words of a command that trains a model by Megatron-LM's pretrain_gpt.py, on made-up data.

    Raises:
        TwofoldError: what Megatron-LM has no flag for, or refuses.
    """
    check_megatron_model(config)
    return [
        "torchrun", "--nnodes", str(-(-degrees.num_ranks // ranks_per_node)), "--nproc-per-node", str(ranks_per_node),
        "pretrain_gpt.py", *_model_flags(config), *megatron_flags(config, degrees), "--mock-data",
        "--train-iters", "100", "--lr", "1e-4",
    ]  # fmt: skip


# ------------------------------------------------------------------- reading

_MODEL = frozenset(
    {"hidden-size", "ffn-hidden-size", "num-attention-heads", "kv-channels", "max-position-embeddings", "normalization",
     "norm-epsilon", "attention-dropout", "hidden-dropout", "tokenizer-type", "vocab-size",
     "make-vocab-size-divisible-by", "group-query-attention", "num-query-groups", "position-embedding-type",
     "rotary-base", "rotary-percent", "qk-layernorm", "disable-bias-linear", "add-qkv-bias", "mock-data", "train-iters",
     "lr"}
)  # fmt: skip
"""Flags of the model, which is named next to them, and of data and rates, which change no step."""

_SIZES = {
    "tensor-model-parallel-size": "tp", "pipeline-model-parallel-size": "pp", "context-parallel-size": "cp",
    "micro-batch-size": "micro_batch", "expert-model-parallel-size": "ep",
}  # fmt: skip

_ON = frozenset(
    {"sequence-parallel", "use-distributed-optimizer", "use-megatron-fsdp", "bf16", "fp16", "use-flash-attn", "swiglu",
     "untie-embeddings-and-output-weights", "overlap-grad-reduce", "overlap-param-gather", "moe-grouped-gemm",
     "moe-pad-expert-input-to-capacity", "moe-router-pre-softmax", "use-tp-pp-dp-mapping"}
)  # fmt: skip

_READ = frozenset(
    {*_SIZES, "global-batch-size", "seq-length", "num-layers", "world-size", "nproc-per-node", "nnodes",
     "data-parallel-sharding-strategy", "recompute-granularity", "recompute-method", "recompute-num-layers",
     "num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank", "pipeline-model-parallel-layout",
     "expert-tensor-parallel-size", "num-experts", "moe-router-topk", "moe-ffn-hidden-size", "moe-layer-freq",
     "moe-expert-capacity-factor", "moe-token-drop-policy", "moe-token-dispatcher-type",
     "moe-shared-expert-intermediate-size", "moe-router-num-groups", "moe-router-group-topk"}
)  # fmt: skip

_REFUSED = frozenset(
    {"rampup-batch-size", "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers",
     "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split",
     "hierarchical-context-parallel-sizes", "use-torch-fsdp2", "optimizer-cpu-offload",
     "num-distributed-optimizer-instances", "encoder-tensor-model-parallel-size", "recompute-modules",
     "moe-layer-recompute", "distribute-saved-activations", "moe-shared-expert-overlap",
     "overlap-moe-expert-parallel-comm", "mtp-num-layers", "cpu-offloading", "fine-grained-activation-offloading"}
)  # fmt: skip
"""Flags that change the step, and that degrees cannot state."""

_LAYOUT = re.compile(r"parallel|pipeline|recompute|stage|microbatch|micro-batch|offload")
"""An unknown flag with one of these words may change the layout, so it is refused."""

_HARMLESS = re.compile(r"^(no-)?(distributed-(backend|timeout)|data-parallel-random|deterministic)")


def read_megatron(text: str, path: str) -> dict[str, Any]:
    """The fields of a `Statement` that flags give.

    Raises:
        TwofoldError: no such flags, or what has no meaning here.
    """
    flags = _flags(text, path)
    values: dict[str, Any] = {
        mine: _whole(flags[theirs], theirs, path) for theirs, mine in _SIZES.items() if theirs in flags
    }
    for needed in ("global-batch-size", "micro-batch-size"):
        if needed not in flags:
            raise TwofoldError(f"{path} has no --{needed}")
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
                f"{path}: --data-parallel-sharding-strategy must be one of {', '.join(strategies)}, not {strategy!r}"
            )
        values["zero"] = strategies[strategy]
    layers = _whole(flags["num-layers"], "num-layers", path) if "num-layers" in flags else None
    values |= _stages(flags, layers, values.get("pp", 1), path)
    values |= _recompute(flags, values, layers, path)
    if "use-tp-pp-dp-mapping" in flags:
        if values.get("ep", 1) > 1:
            raise TwofoldError(
                f"{path}: --use-tp-pp-dp-mapping puts ranks that share experts out inside the pipeline, which degrees "
                "cannot express"
            )
        values["order"] = PIPELINE_INSIDE
    experts, assumed = _experts(flags, values, layers, path)
    return {
        "values": values, "global_batch": _whole(flags["global-batch-size"], "global-batch-size", path),
        "seq": _whole(flags["seq-length"], "seq-length", path) if "seq-length" in flags else None,
        "num_layers": layers, "experts": experts, "assumed": assumed, "rules": MEGATRON, "stack": "megatron",
        "unread": tuple(f"--{name}" for name in flags if name not in _READ | _ON | _MODEL),
    }  # fmt: skip


def _flags(text: str, path: str) -> dict[str, list[str]]:
    flags: dict[str, list[str]] = {}
    name = ""
    for word in shell_words(text, path):
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("_", "-")
            flags[name] = [value] if value else []
        elif name:
            flags[name].append(word)
    if not flags:
        raise TwofoldError(f"{path} has no flags such as --tensor-model-parallel-size 8; nor is it .json or .toml")
    for name in flags:
        unknown = name not in _READ | _ON | _MODEL and not _HARMLESS.search(name)
        if name in _REFUSED or (unknown and _LAYOUT.search(name)):
            raise TwofoldError(
                f"{path}: --{name} cannot be expressed in degrees; remove it if it does not change the layout"
            )
    return flags


def _world_size(flags: dict[str, list[str]], text: str, path: str) -> int:
    if "world-size" in flags:
        return _whole(flags["world-size"], "world-size", path)
    if found := re.search(r"\bWORLD_SIZE=(\d+)", text):
        return _whole([found[1]], "world-size", path)
    if "nproc-per-node" in flags:  # torchrun's words; the script and its flags follow the last one
        nodes = _whole(flags.get("nnodes", ["1"])[:1], "nnodes", path)
        return nodes * _whole(flags["nproc-per-node"][:1], "nproc-per-node", path)
    raise TwofoldError(
        f"{path} has no --world-size; add it, or a line such as WORLD_SIZE=8: the number of processes is not "
        "a flag of Megatron-LM"
    )


def _recompute(flags: dict[str, list[str]], values: dict[str, Any], layers: int | None, path: str) -> dict[str, Any]:
    """Method "uniform" with 1 keeps the input of every block, "block" with n recomputes the first n of every chunk."""
    granularity = (flags.get("recompute-granularity") or ["none"])[0]
    if granularity not in ("none", "selective", "full"):
        raise TwofoldError(f"{path}: --recompute-granularity must be selective or full, not {granularity!r}")
    if granularity != "full":
        return {"recompute": granularity}
    method = (flags.get("recompute-method") or ["uniform"])[0]
    count = _whole(flags.get("recompute-num-layers", ["1"]), "recompute-num-layers", path)
    if (method, count) == ("uniform", 1):
        return {"recompute": "full"}
    if method != "block":
        raise TwofoldError(
            f"{path}: --recompute-method {method} --recompute-num-layers {count} cannot be expressed in degrees; only "
            "uniform with 1, which keeps the input of every block, or block"
        )
    most = None
    if "layers" in values:
        most = max(values["layers"])
    elif layers is not None:
        most = -(-layers // (values.get("pp", 1) * values.get("virtual", 1)))
    return {"recompute": "full", "recompute_layers": None if most is not None and count >= most else count}


def _stages(flags: dict[str, list[str]], layers: int | None, pp: int, path: str) -> dict[str, Any]:
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
    pattern = "".join(words)
    text = re.sub(r"[\s,]", "", pattern)
    text = re.sub(r"\(([^()]*)\)\*(\d{1,4})", lambda found: found[1] * int(found[2]), text)
    text = re.sub(r"([EtL|])\*(\d{1,4})", lambda found: found[1] * int(found[2]), text)
    if not re.fullmatch(r"Et*(\|t*)*L", text):
        raise TwofoldError(
            f"{path}: --pipeline-model-parallel-layout {pattern!r} is not E, blocks t in stages between |, L at the end"
        )
    return tuple(stage.count("t") for stage in text.split("|"))


def _experts(
    flags: dict[str, list[str]], values: dict[str, Any], layers: int | None, path: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The fields of `Experts` that the flags state, and what is assumed."""
    if "num-experts" not in flags:
        if values.get("ep", 1) > 1:
            raise TwofoldError(f"{path}: --expert-model-parallel-size {values['ep']} without --num-experts")
        return {}, ()
    found: dict[str, Any] = {"num_experts": _whole(flags["num-experts"], "num-experts", path)}
    found["top_k"] = _whole(flags.get("moe-router-topk", ["2"]), "moe-router-topk", path)
    if "moe-ffn-hidden-size" in flags:
        found["ffn"] = _whole(flags["moe-ffn-hidden-size"], "moe-ffn-hidden-size", path)
    if "moe-shared-expert-intermediate-size" in flags:
        name = "moe-shared-expert-intermediate-size"
        found["shared_ffn"] = _whole(flags[name], name, path)
    tensor = flags.get("expert-tensor-parallel-size", [str(values.get("tp", 1))])
    if _whole(tensor, "expert-tensor-parallel-size", path) != values.get("tp", 1):
        raise TwofoldError(
            f"{path}: --expert-tensor-parallel-size {tensor[0]} is not the tensor-parallel degree, "
            f"{values.get('tp', 1)}; experts that are split differently cannot be expressed in degrees"
        )
    found["num_dense_layers"] = _dense_layers(flags, layers, path)
    kind = (flags.get("moe-token-dispatcher-type") or ["alltoall"])[0]
    if kind != "alltoall":
        raise TwofoldError(f"{path}: --moe-token-dispatcher-type {kind} is not modelled; only alltoall")
    assumed: tuple[str, ...] = ()
    if "moe-expert-capacity-factor" in flags:
        found["capacity_factor"] = _number(flags["moe-expert-capacity-factor"], "moe-expert-capacity-factor", path)
    else:
        assumed += ("no --moe-expert-capacity-factor: experts that drop no token are forecast with even shares",)
        found["capacity_factor"] = 1.0
    if "moe-router-group-topk" in flags or "moe-router-num-groups" in flags:
        assumed += ("--moe-router-num-groups and --moe-router-group-topk: tokens are forecast to go to any rank",)
    return found, assumed


def _dense_layers(flags: dict[str, list[str]], layers: int | None, path: str) -> int:
    """Number of first layers without experts, from 1 (none) or a list such as ([0]*1+[1]*27)."""
    pattern = "".join(flags.get("moe-layer-freq", ["1"]))
    if pattern == "1":
        return 0
    plain = re.fullmatch(r"\(?(?:\[0\](?:\*(\d{1,4}))?\+)?\[1\](?:\*(\d{1,4}))?\)?", re.sub(r"[\s'\"]", "", pattern))
    if plain is None:
        raise TwofoldError(
            f"{path}: --moe-layer-freq {pattern!r} is not ([0]*dense+[1]*others): only first layers may lack experts"
        )
    dense = 0 if "[0]" not in pattern else int(plain[1] or 1)
    if layers is not None and dense + int(plain[2] or 1) != layers:
        raise TwofoldError(f"{path}: --moe-layer-freq {pattern!r} is not for {layers} layers")
    return dense


def _whole(words: Sequence[str], name: str, path: str) -> int:
    if len(words) != 1 or not is_whole(words[0]) or int(words[0]) < 1:
        raise TwofoldError(f"{path}: --{name} is {' '.join(words)!r}, not a whole number of at least 1")
    return int(words[0])


def _number(words: Sequence[str], name: str, path: str) -> float:
    try:
        value = float(words[0]) if len(words) == 1 else 0.0
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise TwofoldError(f"{path}: --{name} is {' '.join(words)!r}, not a number above 0")
    return value
