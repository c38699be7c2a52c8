"""The columns of a row of measurements, and the headers that mean them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

__all__ = ["COLUMNS", "COMPOSED", "KINDS_OF_CONTEXT", "column_inside", "column_named", "degree_order", "rank_of"]

COLUMNS = (
    "source", "provenance", "task", "model", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq",
    "global_batch", "micro_batch", "tp", "pp", "dp", "vpp", "cp", "ep", "etp", "schedule", "sequence_parallel",
    "recompute", "zero_level", "gpu_type", "gpu_count", "interconnect", "precision", "compile", "async_tp", "metric",
    "value", "layout_complete", "notes", "experts", "top_k", "expert_ffn", "shared_experts", "capacity",
)  # fmt: skip
"""The columns of a row."""

COMPOSED = (
    "tokens", "nodes", "per_node", "accumulation", "layout", "unit", "year", "offload", "float8", "dp_replicate",
    "dp_shard", "replica_batch", "chunk_layers", "system", "ulysses", "ring",
    "optimizer",
)  # fmt: skip
"""Columns whose cells determine those of others (`interop.measurements.composed`)."""

KINDS_OF_CONTEXT = ("ulysses", "ring")
"""Columns whose product is the degree of context parallelism, where a table has both."""

_NAMES: Mapping[str, tuple[str, ...]] = {
    "source": ("software", "framework", "stack", "library", "reference", "code", "codebase", "system", "backend",
               "trainer", "impl", "implementation", "框架", "实现"),
    "model": ("modelname", "modelnameorpath", "modelid", "modelpath", "network", "modeltype", "size", "params",
              "parameters", "architecture", "modelparams", "benchmark", "workload", "modèle", "模型", "参数",
              "参数量", "规格", "modelparameters", "basemodel", "modelconfig", "modelvariant", "llm", "模型名称",
              "网络", "modell", "モデル", "arch", "parameter", "paramcount", "modelarchitecture", "models", "参数规模",
              "模型规模", "模型参数", "模型参数量", "modelflavor", "flavor", "paramsb",
              "paramsbillions", "modelsizeb", "name"),
    "layers": ("nlayers", "l", "numhiddenlayers", "layer", "depth", "nlayer", "层数", "blocks", "transformerlayers",
               "couches", "nombredecouches"),
    "hidden": ("dmodel", "h", "width", "modeldim", "embeddim", "hiddendim", "embeddingsize", "embeddingdim", "nembd",
               "hiddendimension", "embeddingdimension", "隐藏层大小"),
    "heads": ("attentionheads", "nheads", "a", "attnheads", "nhead"),
    "kv_heads": ("kvheads", "numkeyvalueheads", "querygroups"),
    "ffn": ("intermediatesize", "dff", "mlpsize", "ffnhidden", "ffndim"),
    "vocab": ("vocabulary", "v"),
    "task": ("finetuningtype", "tuningtype", "finetuning", "tuning"),
    "seq": ("seqlen", "encoderseq", "シーケンス長", "séquence", "longueurdeséquence", "系列長", "sequence", "context",
            "s", "sl", "seqs", "blocksize", "ctx", "ctxlen", "序列长度", "序列", "maxlen", "maxlength",
            "seqlentokens", "cutofflen", "cutofflength", "tokenspersample", "tokenspersequence", "samplelength",
            "序列长", "sequencelen", "sequenzlänge", "sequenzlaenge", "kontextlänge", "contextwindow",
            "序列长度tokens", "longueurdesequence", "longueurséquence"),
    "global_batch": ("gbs", "global", "batchglobal", "tailledelot", "taillelot", "lotglobal", "tamañodelote",
                     "globalerbatch", "グローバルバッチ", "グローバルバッチサイズ", "globalbs", "batchtokens",
                     "globalbatchtokens", "batchsizetokens", "tokensperbatch", "batch", "bs", "b",
                     "globalbatchsizetokens", "全局批", "globalbatchsizesamples", "globalbatchsizesequences", "bsz",
                     "gbsz", "minibatch", "globaltrainbatch", "effectivebatch", "globalebatchgröße", "batchgröße",
                     "全局批次", "全局批量", "全局batch", "全局bs", "批大小", "批次大小", "globalbatches",
                     "globalminibatch", "tailledelotglobale", "taillelotglobale"),
    "micro_batch": ("mbs", "micro", "µbatch", "μbatch", "ubatch", "mikrobatch", "microlot", "taillemicrolot",
                    "マイクロバッチ", "マイクロバッチサイズ", "ubs", "microbs", "microbatch", "devicebatchsize",
                    "localbs", "devicetrainmicrobatchsize", "微批", "localbatch", "seqspergpu", "seqsgpu", "lbs",
                    "batchesperdevice", "samplespergpu", "sequencespergpu", "微批次", "单卡批大小", "tokenspergpu",
                    "tailledumicrolot", "µbs", "μbs", "每卡批大小", "每卡batch", "单卡batch", "微批大小", "mbsize"),
    "tp": ("tensorparallel", "tensorparallelism", "t", "tensor", "mp", "modelparallel", "tensormodelparallel",
           "模型并行", "张量并行", "tensormp", "tensormodelparallelism", "gtensor", "tensorpara",
           "tensorparallelways", "tpways", "parallélismetensoriel", "parallelismetensoriel"),
    "pp": ("pipelineparallel", "pipelineparallelism", "p", "pipeline", "pipelinestages", "pipelinestage", "stages",
           "pipelinemodelparallel", "流水线并行", "流水并行", "pipelinemp", "pipelinemodelparallelism",
           "pipelineparallelstages", "pipelinedepth", "流水线", "ppways",
           "parallélismepipeline", "parallélismedepipeline"),
    "dp": ("dataparallel", "dataparallelism", "d", "replicas", "数据并行", "dataparallelreplicas", "gdata", "datamp",
           "dpways"),
    "vpp": ("vp", "virtualstages", "virtualpipeline", "interleavedchunks", "modelchunks", "virtualpipelineparallel",
            "virtualpipelinemodelparallel", "interleave", "virtualpipelinestages", "virtualpipelineparallelism",
            "interleavedstages", "modelchunksperstage", "interleaving", "virtualpp", "layerchunks", "虚拟流水线"),
    "cp": ("contextparallel", "contextparallelism", "ulysses", "ulyssessp", "ringattention", "ringdegree", "ringsize",
           "contextparallelways", "序列并行度", "上下文并行"),
    "ep": ("expertparallel", "expertmodelparallelsize", "expertparallelism", "专家并行"),
    "etp": ("experttensorparallel", "expertmodeltensorparallel", "experttensorparallelism", "experttp", "moetp"),
    "experts": ("nexperts", "moeexperts", "routedexperts", "e"),
    "top_k": ("topk", "moetopk", "routertopk", "expertspertoken", "activeexperts", "k"),
    "expert_ffn": ("moeffn", "moeffnhiddensize", "moeintermediatesize", "expertintermediatesize"),
    "shared_experts": ("nsharedexperts", "shared"),
    "capacity": ("capacityfactor", "moecapacityfactor", "expertcapacityfactor", "cf"),
    "schedule": ("pipelineschedule", "ppschedule", "scheduler", "schedulename", "调度"),
    "sequence_parallel": ("sp", "seqparallel", "sequenceparallelism", "useseqparallel", "sequenceparallelenabled"),
    "recompute": ("activationcheckpointing", "activationcheckpoint", "activationrecomputation", "checkpointing", "ac",
                  "recomputation", "activationrecompute", "gradientcheckpointing", "actckpt", "actcheckpointing",
                  "recomputegranularity", "remat", "rematerialization", "activationckpt", "重计算", "ckptacts",
                  "actsckpt", "gradckpt", "checkpointactivations", "usegradientcheckpointing",
                  "enableactivationcheckpointing", "ckpt", "checkpoint", "recomp", "gradcheckpointing",
                  "actrecompute", "actrecomp", "recomputemode", "recomputemodules", "acmode",
                  "activationcheckpointmode", "重计算策略", "activationrecomputing", "recomputing",
                  "checkpointinggranularity", "activationscheckpointgranularity", "activationrecomputegranularity",
                  "actrecomputation", "recalcul", "recalculdesactivations", "rematpolicy", "rematerializationpolicy"),
    "zero_level": ("zero", "zerostage", "sharding", "shardingstrategy", "optimizersharding", "fsdp", "zerolevel",
                   "distributedoptimizer", "fsdpsharding", "shardingstage", "stage", "usedistributedoptimizer",
                   "distopt", "distributedopt", "zerooptimization", "fsdpstrategy", "fsdpshardingstrategy",
                   "dpstrategy", "dataparallelsharding", "deepspeedstage", "deepspeedzero", "deepspeedzerostage",
                   "dszero", "dsstage", "优化器并行", "optimizerstatesharding", "optimizershardingstage",
                   "optimizersharded"),
    "gpu_type": ("gpu", "device", "accelerator", "hardware", "gputype", "chip", "npu", "devicetype", "gpumodel",
                 "acceleratortype", "instance", "instancetype", "hw", "platform", "machine", "processor",
                 "hardwaretype", "硬件", "acceleratorname", "gputypes", "gerät", "gpuname", "devicename",
                 "hardwarename", "hwname", "硬件型号", "芯片", "设备", "gpumodelname", "nputype", "npuname", "carte",
                 "chiptype", "cardmodel", "devicemodel", "acceleratormodel", "cardtype", "卡型号", "npumodel"),
    "gpu_count": ("gpus", "ngpus", "ngpu", "devices", "worldsize", "nodesxgpus", "nodesgpus", "npus", "accelerators",
                  "gpucount", "chips", "cards", "devicenum", "ranksize", "cluster", "ndevices", "ndev", "world",
                  "nombredegpu", "nombredegpus", "nbgpu", "scale", "scalegpus", "卡数", "集群", "集群规模", "qty",
                  "quantity",
                  "count", "n", "hwcount", "devicecount", "npunum", "gpunum", "cardnum", "cardcount", "设备数量",
                  "设备数", "芯片数", "总卡数", "npu数", "gpu数", "ranks", "processors", "gcds", "anzahl",
                  "gpuanzahl", "anzahlgpus"),
    "interconnect": ("network", "links", "fabric", "internodeinterconnect", "networking", "internode", "link",
                     "internodelink", "nic", "interconnection", "nodeinterconnect", "互联", "互连",
                     "internodenetwork", "internodebandwidth", "networkbandwidth"),
    "precision": ("dtype", "datatype", "mixedprecision", "prec", "精度", "paramsdtype", "computedtype", "amp",
                  "datenformat", "numericformat", "数据类型", "dataformat", "format", "numerics", "präzision",
                  "précision"),
    "compile": ("torchcompile", "compiled"),
    "async_tp": ("asynctp", "asynctensorparallel"),
    "notes": ("comment", "comments", "remarks", "note", "techniques", "optimizations", "config", "mpmode", "kernel",
              "attention", "dispatcher", "routing", "features", "technique", "setup", "setting"),
    "provenance": ("version", "release", "commit", "container"),
    "tokens": ("tokenstrained", "pretrainingtokens", "trainedtokens", "训练tokens"),
    "nodes": ("nnodes", "vms", "hosts", "servers", "instances", "machines", "nodecount", "hostcount", "servercount",
              "instancecount", "machinecount", "nodenum", "节点数", "机器数", "knoten"),
    "per_node": ("gpuspernode", "gpusnode", "trainerdevices", "devicespernode", "nprocpernode", "npuspernode",
                 "ngpuspernode", "每节点卡数", "gpusperserver", "gpusperhost", "acceleratorspernode"),
    "accumulation": ("gradaccum", "gradientaccumulation", "gradientaccumulationsteps", "gas", "ga", "gradaccumsteps",
                     "accumulationsteps", "accum", "updatefreq", "accumsteps", "gradacc", "gradaccsteps", "gasteps",
                     "microbatchnum", "microbatches", "nummicro", "m", "nummicrobatch", "microbatchcount",
                     "microbatchespergpu",
                     "梯度累积", "batchaccum", "batchaccumulation", "gradientaccum", "batchaccumulationperreplica"),
    "layout": ("parallelism", "parallelisation", "parallelconfig", "parallelstrategy", "strategy", "parallelization",
               "mesh", "parallellayout", "parallelisms", "parallel", "parallelcfg", "parallelsettings",
               "parallelsetting", "并行策略", "并行切分", "并行配置", "plugin", "parallelismconfig", "bestconfig",
               "parallelismstrategy", "parallelizationstrategy", "分布式策略", "切分策略", "并行方式",
               "distributedstrategy"),
    "replica_batch": ("batchsizeperdp", "batchperdp", "batchsizeperreplica", "batchperreplica", "batchsizeperdprank",
                      "perreplicabatch"),
    "chunk_layers": ("layerspervirtualpipelinestage", "layerspervirtualstage", "layersperchunk", "layerspervpp",
                     "numlayerspervirtualpipelinestage", "numlayerspervirtualstage"),
    "dp_replicate": ("replicate", "dataparallelreplicate", "hsdpreplicate", "replicagroups"),
    "dp_shard": ("shard", "shardeddataparallel", "dataparallelshard", "hsdpshard", "shardgroup", "shardinggroupsize",
                 "fsdpsize", "fsdpdegree"),
    "year": ("date",),
    "float8": ("fp8", "quantization", "quantisation", "usefp8", "enablefp8", "fp8recipe", "float8recipe"),
    "optimizer": ("optim", "opt", "optimizername", "optimizertype", "优化器"),
    "offload": ("activationcpuoffload", "cpuoffload", "offloading", "optimizeroffload", "activationoffload"),
}  # fmt: skip
"""Column -> other names of it, letters and digits only, the plainest last. `_FILLERS` need no names of their own."""

_FILLERS = "numberof|number|num|total|maximum|max|training|train|sizes?|degrees?|counts?|lengths?|len"
_FILLER = re.compile(rf"\b(?:{_FILLERS}|of|packed)\b|大小|数量")
_GLUED_FILLER = re.compile(rf"^(?:{_FILLERS})|(?:{_FILLERS})$")
"""Words that change nothing about the meaning of a header, as in "num_gpus", "Tensor parallel size" or "hiddensize"."""

_EACH = re.compile(
    r"(?:\bper|/|\beach)[ -]*(?:gpu|device|npu|card|rank|accelerator|chip)s?\b|^per[ -]?(?:gpu|device|rank)\b"
)
"""Words of batches of one device, which are micro-batches."""

_ORDERED = {"tp": "tp", "pp": "pp", "dp": "dp", "fsdp": "dp", "cp": "cp", "ep": "ep", "etp": "etp",
            "vpp": "vpp", "vp": "vpp", "mbs": "micro_batch", "gbs": "global_batch"}  # fmt: skip
"""Words of a header that gives the order of a cell's numbers -> their columns."""

_LETTERS = re.compile(r"[(\[]([tpdc](?: ?[,;x/-] ?[tpdc])+)[)\]]|^([tpdc](?: ?[,;x/×-] ?[tpdc])+)$")
"""The same in single letters, as in "Config (t, p, d)" or "P x D"."""

_LONGEST = 200
"""Characters of a header; the patterns take the square of a longer one's length."""

_OF_PARTS = ("dense", "moe", "sparse", "active", "activated", "min", "std")
"""Words in brackets behind headers of other things: "Layers (dense)" are not all layers."""

_SCALE = re.compile(r"\s*[(\[][kmbt][)\]]$")
"""The scale of a column's numbers, as in "Params (B)"."""

_BRACKETS = re.compile(r"\s*[(\[{]([^)\]}]*)[)\]}]\s*|\s*,? in \w+\s*$")


_COUNTED = re.compile(r"\s*(?:#|no\.)[ -]*(?:of )?(?:gpu|npu|device|accelerator|card)\b(?! *type)", re.I)
"""A number of devices, in the singular."""


@lru_cache(maxsize=4096)
def column_named(header: str) -> str:
    """The column that a header means; "" where none is known.

    >>> column_named("Global Batch Size"), column_named("#GPUs"), column_named("Seq. len (tokens)")
    ('global_batch', 'gpu_count', 'seq')
    >>> column_named("Tensor parallel degree"), column_named("Batch per GPU"), column_named("Interleaved stages (VPP)")
    ('tp', 'micro_batch', 'vpp')
    >>> column_named("Batch size (micro)"), column_named("Heads (KV)"), column_named("Size (B)")
    ('micro_batch', 'kv_heads', 'model')
    >>> column_named("#GPU (A800)"), column_named("GPU")
    ('gpu_count', 'gpu_type')
    """
    if len(header) > _LONGEST:
        return ""
    if _COUNTED.match(header):
        return "gpu_count"
    low = _words(header)
    if _LETTERS.search(low):
        return "layout"
    low = _SCALE.sub("", low)
    bare, inside = _BRACKETS.sub("", low), _BRACKETS.search(low)
    words = (inside.group(1) if inside else "") or ""
    for text in (low, f"{words} {bare}" if words else bare, "" if words in _OF_PARTS else bare):
        if column := _column(text):
            return column
    if words in _ORDERED:
        return _ORDERED[words]
    if _order_of_parts(header):
        return "layout"
    if (last := header.rpartition(".")[2]) and last != header and " " not in header:  # "model.micro_batch_size"
        return column_named(last)
    parts = re.findall(r"[a-z]+", low)
    return "layout" if len(parts) > 1 and all(part in (*_ORDERED, "x") for part in parts) else ""


def _words(header: str) -> str:
    """A header in lower case with its words apart: "NumParams" and "num_params" are "num params"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])|_+", " ", header.strip()).lower()


def _column(words: str) -> str:
    """The column of a header without brackets."""
    counted = re.sub(r"^(?:#|number|no\.|nr\.)[ -]*(?:of )?", "num ", words)
    for text in (counted, words, _FILLER.sub("", words)):
        if column := _COLUMN_OF.get(_plain(text), ""):
            return column
    glued = _plain(words)
    while (shorter := _GLUED_FILLER.sub("", glued, count=1)) != glued:
        glued = shorter
        if column := _COLUMN_OF.get(glued, ""):
            return column
    base, several = _EACH.subn("", words)
    return "micro_batch" if several and _column(base) in ("global_batch", "micro_batch") else ""


def _plain(text: str) -> str:
    return re.sub(r"[\W_]+", "", text)


_COLUMN_OF: Mapping[str, str] = {
    name: column for column in reversed((*COLUMNS, *COMPOSED)) for name in (*_NAMES.get(column, ()), _plain(column))
}
"""Name -> column; where two columns have it, the first."""


def _order_of_parts(header: str) -> list[str]:
    """The columns of a header's parts, "Micro / global batch"; none if they are not two or more degrees or batches."""
    found = [_column(_words(part)) for part in header.split("/")]
    return found if len(found) > 1 and set(found) <= set(_ORDERED.values()) else []


def column_inside(header: str) -> str:
    """The column of what is in brackets behind a degree or a device, where cells are "8 (3)"; "" if there is none.

    >>> column_inside("PP (VPP)"), column_inside("TP (SP)"), column_inside("PP")
    ('vpp', 'sequence_parallel', '')
    """
    found = re.fullmatch(r"([^()]+?) *\(([^()]+)\)", header.strip())
    if found is None or _column(_words(found[1])) not in (*_ORDERED.values(), "gpu_type"):
        return ""
    return _column(_words(found[2]))


def degree_order(header: str) -> list[str]:
    """The columns whose numbers the cells below a header have, in its order; none where it gives none.

    >>> degree_order("TP x PP"), degree_order("Config (t, p, d)"), degree_order("Parallelism")
    (['tp', 'pp'], ['tp', 'pp', 'dp'], [])
    >>> degree_order("Micro / global batch")
    ['micro_batch', 'global_batch']
    """
    if parts := _order_of_parts(header):
        return parts
    low = header.lower().strip()
    if letters := _LETTERS.search(low):
        return [f"{letter}p" for letter in re.findall(r"[tpdc]", letters.group(1) or letters.group(2))]
    return [_ORDERED[part] for part in re.findall(r"[a-z]+", low) if part in _ORDERED]


def rank_of(header: str) -> int:
    """Which of two headers of one column is the more definite one: the smaller."""
    words = _words(header)
    names = _NAMES.get(column_named(header), ())
    plain = next((each for each in (_plain(words), _plain(_FILLER.sub("", words))) if each in names), "")
    return 0 if header.strip().lower() in COLUMNS else 1 + names.index(plain) if plain else 1 + len(names)
