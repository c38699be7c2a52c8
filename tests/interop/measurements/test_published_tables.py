"""Tables in the forms in which people publish them: every row is predicted, and what it leaves open is said.

The figures are made up; only the forms are those of papers, guides and repositories.
"""

from __future__ import annotations

import pytest

from interop.measurements import forecasts
from interop.measurements.models import catalogued
from interop.measurements.rows import case_of
from interop.measurements.tables import read_table
from interop.measurements.validation import validate
from plans.errors import TwofoldError
from simulator.forecast import forecast
from tests.interop.measurements.measured_table import assert_read

GUIDE = """
Performance of pre-training, release 25.04

| Model | System | #-GPUs | GBS | MBS | Sequence Length | TP | PP | CP | VP | Precision | Tokens / sec / GPU \
| Model TFLOP / sec / GPU |
|:------|---|-------:|----:|----:|:---:|---|---|---|---|---|---|---|
| **LLAMA3-8B** (NeMo) | DGX-H100 | 8 | 128 | 1 | 8192 | 1 | 1 | 2 | 1 | BF16 | 11,000 | 560 |
| LLAMA3-70B | DGX-H100 | 64 | 128 | 1 | 8192 | 4 | 8 | 1 | 5 | FP8 (per-tensor) | 1,900 | 850 |
"""

FORMS = {
    # a guide's Markdown with alignment, bold names and a title above
    "guide.md": (
        GUIDE,
        [{"model": "LLAMA3-8B (NeMo)", "gpu_count": "8", "cp": "2", "metric": "tokens_per_s_per_gpu",
          "value": "11000"},
         {"metric": "tflops_per_gpu", "value": "560"}, {"vpp": "5", "value": "1900"},
         {"precision": "FP8 (per-tensor)"}],
    ),
    # one cell for all degrees, iterations in milliseconds, memory in two units
    "paper.tsv": (
        "Framework\tModel\tHardware\tTP/PP/DP\tBatch size\tmicro-bs\tSeq len\tIter. time (ms)\tPeak mem [GiB]\n"
        "Megatron-LM\tGPT-3 6.7B\t32x A100 80GB SXM\t2/4/4\t128\t2\t2k\t4120.5\t41.5\n",
        [{"tp": "2", "pp": "4", "dp": "4", "gpu_count": "32", "metric": "iteration_time_s",
          "value": "4.1205"}, {"metric": "peak_memory_GiB", "value": "41.5"}],
    ),
    # an Excel export of a country with decimal commas, a title row and empty rows
    "excel.csv": (
        "Results of March;;;;;;;\n;;;;;;;\n"
        "Model;Accelerator;Nodes;GPUs per node;Parallelism;Global batch size;Micro batch size;Step time [s]\n"
        "Llama-2-13B;H100 SXM5;2;8;TP=4, PP=2, DP=2;64;1;3,25\n;;;;;;;\n",
        [{"gpu_count": "16", "tp": "4", "pp": "2", "dp": "2", "value": "3.25", "metric": "iteration_time_s"}],
    ),
    # rates of the whole job, a batch in tokens, layouts in words
    "job.csv": (
        "system,model,gpu,gpus,layout,batch (M tokens),mbs,context length,tokens/sec,max_alloc_gb,notes\n"
        'DeepSpeed ZeRO-3,llama-2-7b,A100-SXM4-40GB,64,"64-way DP, stage 3",1.048576,2,4096,"170,000",31.5,\n',
        [{"global_batch": "256", "dp": "64", "metric": "tokens_per_s_per_gpu", "value": "2656.25"},
         {"metric": "peak_memory_GB", "value": "31.5"}],
    ),
    # a list of runs with units in the cells
    "runs.csv": (
        "Software;Model;Device;Devices;GBS;Grad accum;MBS;Sharding;AC;Throughput;MFU %\n"
        "torchtitan FSDP2;Llama 3.1 8B;NVIDIA H200 141GB HBM3e;8;;2;2;FSDP2 full shard;selective op;"
        "7.1k tokens/s/GPU;41.2 %\n",
        [{"metric": "tokens_per_s_per_gpu", "value": "7100"},
         {"metric": "mfu_percent", "value": "41.2"}],
    ),
    # hidden sizes by their letters, the time of an iteration, samples of the whole job
    "letters.csv": (
        "Year,Framework,L,h,a,s,b,t,p,d,GPU type,s/iter,samples/s\n"
        "2021,Megatron-LM,24,2304,24,2048,512,1,1,32,V100 32GB,33.1,15.5\n",
        [{"layers": "24", "hidden": "2304", "heads": "24", "metric": "iteration_time_s"},
         {"metric": "samples_per_s_per_gpu", "value": "0.484375"}],
    ),
    # long rows of one metric each, named as people do
    "long.csv": (
        "model,gpu,gpu_count,tp,pp,micro_batch,global_batch,seq,metric,unit,value,software\n"
        "gpt 13B,Ascend 910B3,64,8,2,1,64,4096,throughput,tokens/s/device,1250,MindSpeed\n"
        "gpt 13B,Ascend 910B3,64,8,2,1,64,4096,step time,ms,4100,MindFormers 1.3\n",
        [{"metric": "tokens_per_s_per_gpu", "value": "1250"}, {"metric": "iteration_time_s", "value": "4.1"}],
    ),
    # the older terms: degrees in words, hardware FLOPs, figures of all devices
    "hardware.csv": (
        "Code,Network,Accelerators,Accelerator,Tensor-parallel,Pipeline-parallel,Data-parallel,Batch,Microbatch,"
        "Sequence,Recompute,HFU (%),Aggregate PFLOP/s\n"
        "Megatron-DeepSpeed,GPT-3 175B,384,A100 80GB,8,12,4,1536,1,2048,full,51.0,45.2\n",
        [{"metric": "mfu_percent", "value": "51.0"}, {"metric": "tflops_per_gpu", "value": "117.708"}],
    ),
    # several tables under headings that tell the device, the links and the software
    "nodes.md": (
        "# llm-foundry, scripts/train/benchmarking\n\n## A100 80GB with 1600 Gbps node-node interconnect (RoCE)\n\n"
        "| Model | SeqLen (T) | # GPUs | MFU | MicroBatchSize | GlobalBatchSize | GlobalBatchSize (T) | Precision | "
        "MP Mode | Sharding Strategy | Activation Checkpointing | Activation CPUOffload | NumParams |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|\n"
        "| 30b | 2048 | 64 | 51.2 | 8 | 2048 | 4194304 | amp_bf16 | PURE | FULL_SHARD | True | False | 30019254272 |\n"
        "\n## H100 80GB\n\nA list of nothing.\n\n| Name | Colour |\n|---|---|\n| a | b |\n\n"
        "| Model | SeqLen (T) | # GPUs | MFU | MicroBatchSize | GradAccum | Precision | Sharding Strategy |\n"
        "|---|---|---|---|---|---|---|---|\n| 7b | 2048 | 8 | 30.5 | 6 | 2 | amp_fp8 | SHARD_GRAD_OP |\n",
        [{"gpu_type": "A100 80GB", "model": "30b", "global_batch": "2048", "recompute": "True",
          "source": "llm-foundry, scripts/train/benchmarking"},
         {"gpu_type": "H100 80GB", "global_batch": "96", "zero_level": "SHARD_GRAD_OP"}],
    ),
    # one row a run, headers in the first column
    "turned.csv": (
        ",Run A,Run B\nFramework,Megatron-LM,Megatron-LM\nModel,GPT-3 175B,GPT-3 175B\nGPU,A100 80GB,A100 80GB\n"
        "GPUs,96,1536\nTP,8,8\nPP,12,12\nMicro batch,1,1\nGlobal batch,1536,1536\nSeq length,2048,2048\n"
        "TFLOP/s/GPU,140,135\n",
        [{"gpu_count": "96", "value": "140"}, {"gpu_count": "1536", "value": "135"}],
    ),
    "page.html": (
        "<h2>Pre-training on H100 SXM</h2><table><tr><th>Model</th><th>#GPUs</th><th>TP</th><th>MBS</th><th>GBS</th>"
        "<th>Step time (s)</th></tr>\n<tr><td>Llama-2-7B</td><td>8</td><td>2</td><td>1</td><td>64</td><td>3.1</td></tr>"
        "</table>",
        [{"gpu_type": "H100 SXM", "gpu_count": "8", "value": "3.1"}],
    ),
    "paper.tex": (
        r"\begin{table}\caption{Training on A100-80GB with Megatron-LM}\begin{tabular}{l|rr}\toprule "
        r"Model & GPUs & TP & PP & MBS & GBS & Seq & MFU (\%) \\ \midrule "
        r"LLaMA-13B & 64 & 2 & 2 & 1 & 512 & 2048 & \textbf{55.1} \\ \bottomrule\end{tabular}\end{table}",
        [{"gpu_type": "A100-80GB", "model": "LLaMA-13B", "value": "55.1"}],
    ),
    "log.jsonl": (
        '{"model": "Llama-2-7B", "gpu": "H100", "gpus": 16, "layout": {"tp": 2, "pp": 2}, "mbs": 1, "gbs": 64, '
        '"seq": 4096, "step_time_s": 1.6, "framework": "Megatron-LM"}\n',
        [{"tp": "2", "pp": "2", "value": "1.6"}],
    ),
    "columns.txt": (
        "model         gpu       gpus  tp  pp  mbs  gbs  seq   step_time(s)\n"
        "gpt3-13b      A100-80G  64    8   1   1    512 2048   9.2\n",
        [{"gpu_type": "A100-80G", "global_batch": "512", "value": "9.2"}],
    ),
    # a family and its size, clusters as nodes x devices, figures at several sizes of a job
    "ascend.csv": (
        "\u6a21\u578b,Params,Framework,\u786c\u4ef6,Cluster,\u5e8f\u5217\u957f\u5ea6,TP,PP,Precision,"
        "Performance (tokens/s/p),GBS,MBS\nQwen2,72B,MindSpeed-LLM,Atlas 800T A2,8x8,4096,8,4,BF16,310,64,1\n"
        "Mixtral,8x7B,ModelLink,Ascend 910B3,8x8,32768,8,2,BF16,480,32,1\n",
        [{"model": "Qwen2 72B", "gpu_count": "64"}, {"model": "Mixtral 8x7B", "value": "480"}],
    ),
    "sizes.csv": (
        "Framework,Model,GPU,Seq,MBS,Float8,tokens/s/GPU @8 GPUs,tokens/s/GPU (64 GPUs)\n"
        "torchtitan,Llama-3-8B,H100,8192,1,tensorwise,9000,8800\n",
        [{"gpu_count": "8", "precision": "float8 tensorwise", "value": "9000"}, {"gpu_count": "64", "value": "8800"}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_read(tmp_path, name):
    text, wanted = FORMS[name]
    (tmp_path / name).write_text(text)
    assert_read(tmp_path / name, wanted)


@pytest.mark.parametrize("name", FORMS)
def test_every_row_of_every_form_is_predicted(tmp_path, name):
    (tmp_path / name).write_text(FORMS[name][0])
    found = validate(tmp_path / name)
    unpriced = [each["reason"] for each in found.skipped]
    assert not unpriced
    for row in found.rows:
        assert row["low"] < row["predicted"] < row["high"] and row["assumed"]


def test_sizes_of_a_name_are_those_that_were_published(tmp_path):
    """Parameters by the counts that Hugging Face shows for the released weights."""
    counts = {
        "Qwen2-72B": 72.7e9, "Qwen2.5-32B": 32.8e9, "LLaMA 33B": 32.5e9, "Yi-34B": 34.4e9, "MPT-30B": 30.0e9,
        "Falcon-40B": 41.8e9, "Gemma-7B": 8.54e9, "Pythia-6.9b": 6.86e9, "Qwen3-8B": 8.19e9, "DeepSeek-V2": 236e9,
        "InternLM2-20B": 19.9e9, "OLMoE-1B-7B": 6.92e9, "gpt-oss-120b": 117e9, "DBRX": 132e9, "gpt2-medium 355M": 355e6,
        "Llama-3.3-70B-Instruct": 70.6e9, "DeepSeek-V3 671B": 671e9, "Mistral-Small 24B": 23.6e9, "Gemma 3 27B": 27.0e9,
        "OLMo-2-32B": 32.2e9, "LLaMA 70B": 69.0e9,
    }  # fmt: skip
    for name, parameters in counts.items():
        config = catalogued(name)
        assert config.num_parameters == pytest.approx(parameters, rel=0.02), name


def test_an_inner_size_that_is_not_stated_is_that_of_the_family():
    """LLaMA's 13B have 13,824 (its params.json), not four times the width."""
    row = BASE | {"model": "LLaMA 13B", "layers": "40", "hidden": "5120", "heads": "40"}
    assert case_of(row, 1).config.inner == 13_824
    assert case_of(row | {"model": "llama-like 3B", "hidden": "2560", "heads": "20"}, 1).config.inner == 6_912
    assert case_of(row | {"model": "GPT 13B"}, 1).config.inner == 4 * 5120


def test_a_reading_that_does_not_fit_is_no_prediction(tmp_path):
    """GPT-3 175B on 64 devices keeps more than they have, unless it recomputes."""
    row = BASE | {"model": "GPT-3 175B", "tp": "8", "pp": "8", "dp": "1", "gpu_count": "64", "gpu_type": "A100-80GB",
                  "micro_batch": "8", "recompute": "", "value": "20"}  # fmt: skip
    stated = [row | {"recompute": mode} for mode in ("none", "selective", "full")]
    left_open, *each = _table(tmp_path, [row, *stated]).rows
    first = next(found for found in each if found["fits"])
    assert not each[0]["fits"] and left_open["predicted"] == pytest.approx(first["predicted"])
    assert any("the first reading that fits" in told for told in left_open["assumed"])


def test_a_share_of_the_peak_is_of_the_products_that_its_source_counts(tmp_path):
    """Composer divides by the peak of float8, twice that of bf16; others leave it open."""
    row = BASE | {"tp": "1", "pp": "1", "dp": "16", "precision": "amp_fp8", "metric": "mfu_percent", "value": "30"}
    counted, left_open = _table(tmp_path, [row | {"source": name} for name in ("llm-foundry", "FSDP2")]).rows
    narrow = next(each for each in left_open["readings"] if each["cells"] == {"peak": "narrow"})
    assert narrow["predicted"] == pytest.approx(left_open["predicted"] * 989 / 1979, rel=1e-3)
    assert counted["predicted"] < 0.7 * left_open["predicted"]


BASE = {
    "source": "Megatron-LM", "model": "GPT-3 6.7B", "seq": "2048", "global_batch": "64", "micro_batch": "2", "tp": "2",
    "pp": "2", "dp": "4", "recompute": "none", "gpu_type": "H100-SXM5-80GB", "gpu_count": "16", "precision": "bf16",
    "metric": "iteration_time_s", "value": "1.0",
}  # fmt: skip


def _table(folder, rows):
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = ["\t".join(columns)] + ["\t".join(row.get(column, "") for column in columns) for row in rows]
    (folder / "table.tsv").write_text("\n".join(lines))
    return validate(folder / "table.tsv")


@pytest.mark.parametrize(
    ("column", "cell"),
    [("tp", "two"), ("global_batch", "-4"), ("seq", "1e99"), ("hidden", "4096 cm"), ("micro_batch", "1.5"),
     ("value", "fast"), ("precision", "int3"), ("gpu_type", "Abacus"), ("recompute", "purple"),
     ("gpu_count", "17"), ("gpu_count", "1024")],
)  # fmt: skip
def test_a_bad_cell_is_named_and_the_run_continues(tmp_path, column, cell):
    found = _table(tmp_path, [BASE, BASE | {"tp": "4", "pp": "1", column: cell}, BASE | {"micro_batch": "1"}])
    assert [row["row"] for row in found.rows] == [1, 3]
    (bad,) = found.skipped
    assert (bad["row"], bad["column"], bad["value"]) == (2, column, cell)
    assert cell.split()[0] in bad["reason"]


def test_two_columns_of_one_meaning_are_refused_only_where_they_differ(tmp_path):
    path = tmp_path / "twice.csv"
    path.write_text(
        "model,gpu,gpus,seq,mbs,micro batch size,mfu\nllama-3-8b,H100,8,8k,1,1,40\nllama-3-8b,H100,8,8k,1,2,41\n"
    )
    rows = read_table(path)
    assert rows[0]["micro_batch"] == "1"
    found = validate(path)
    assert found.skipped[0]["row"] == 2 and "'1' and '2'" in found.skipped[0]["reason"]


SOFTWARE = (
    "Megatron-LM, arXiv 2104.04473", "Megatron-LM core v0.12 (2025)", "Megatron-DeepSpeed", "DeepSpeed ZeRO-1",
    "DeepSpeed ZeRO stage 2", "DeepSpeed v0.14, ZeRO-3", "DeepSpeed pipeline", "NeMo 24.09", "Megatron-Bridge 0.2",
    "PyTorch FSDP1, 2023", "FSDP2, torch 2.6", "llm-foundry", "MosaicML Composer", "torchtitan 2025", "MindSpeed-LLM",
    "MindFormers / MindSpore 2.4", "GPT-NeoX", "MaxText (JAX)", "Colossal-AI", "nanotron", "Hugging Face", "",
)  # fmt: skip


def test_every_software_is_priced_and_readings_stay_inside_the_interval(tmp_path):
    """Software in its usual names; a model spread by tp and pp, and one that is not."""
    split = BASE | {"zero_level": "1"}
    whole = BASE | {"tp": "1", "pp": "1", "dp": "16"}
    rows = [row | {"source": name} for name in SOFTWARE for row in (split, whole)]
    found = _table(tmp_path, rows)
    assert not found.skipped and len(found.rows) == len(rows)
    for row in found.rows:
        assert any(name in told for told in row["assumed"] for name in (row["stack"], row["source"]))
        for reading in row["readings"]:
            assert row["low"] < reading["predicted"] < row["high"]
    levels = [row["assumed"] for row in found.rows if row["source"].startswith("DeepSpeed ZeRO")]
    assert not any("sharding not stated" in told for assumed in levels for told in assumed)


def test_a_name_of_several_devices_is_priced_as_each(tmp_path):
    found = _table(
        tmp_path, [BASE | {"gpu_type": device} for device in ("Ascend 910B", "910B1", "910B2", "910B3", "910B4")]
    )
    left_open, *each = found.rows
    assert all(left_open["low"] < row["predicted"] < left_open["high"] for row in each if row["fits"])
    assert any("gpu_type not stated: Ascend 910B" in told for told in left_open["assumed"])


def test_degrees_that_are_not_stated_are_the_least_that_fit(tmp_path):
    """Nobody splits a model that fits one device over four."""
    (row,) = _table(tmp_path, [BASE | {"tp": "", "pp": "", "dp": ""}]).rows
    splits = [tuple(reading["cells"].get(name) for name in ("tp", "pp")) for reading in row["readings"]]
    assert "tp not stated: 1, the middle of 2 readings" in row["assumed"]
    assert ("2", "1") in splits and ("4", "1") not in splits


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        # devices before and behind their number, in nodes and in words
        ("Model,GPU,Batch,Seq,Strategy,step time (s)\nLlama-3-8B,H200 x 8,2/GPU,8192,FSDP,2.3\n",
         [{"gpu_count": "8", "micro_batch": "2"}]),
        ("Model,GPU,Batch,Seq,Strategy,step time (s)\nMistral-7B,A100 (80GB) x16,64 (4/GPU),4096,HSDP 2x8,3.2\n",
         [{"gpu_count": "16", "global_batch": "64", "micro_batch": "4", "shards": "8"}]),
        ("Model,Hardware,Parallelism,Batch,Results\n"
         "Llama 2 7B / seq 4096,2 nodes x 8 A100-80GB,TP1-PP1-DP16,GBS 256 / MBS 2,3900 tokens/s/GPU\n",
         [{"gpu_count": "16", "dp": "16", "global_batch": "256", "micro_batch": "2", "value": "3900"}]),
        # one cell for a whole run
        ("| Setup | Throughput |\n|---|---|\n| Llama-2-7B, 8x A100-80GB, FSDP, seq 4096 | 3,200 tok/s/GPU |\n",
         [{"model": "Llama-2-7B", "gpu_type": "A100-80GB", "gpu_count": "8", "seq": "4096"}]),
        # the precision beside a figure, and two figures in a cell
        ("System: DGX-B200, NeMo 25.07\n| Model | GPUs | MBS | TP | Tokens / sec / GPU |\n|---|---|---|---|---|\n"
         "| LLAMA3-70B | 64 | 1 | 2 (FP8-CS) / 1 (FP8-MX) | 3500 (FP8-CS) / 3600 (FP8-MX) |\n"
         "| LLAMA3-8B | 8 | 1 | 1 | 30000 (BF16) |\n",
         [{"tp": "2", "precision": "fp8-cs", "value": "3500"}, {"tp": "1", "precision": "fp8-mx", "value": "3600"},
          {"precision": "bf16", "value": "30000"}]),
        # memory in percent of the device, and without a unit
        ("model,gpu,ngpus,dtype,mbs,zero,mem_used_pct,peak mem\nllama-7b,A100-SXM-80GB,8,bf16,2,2,50%,61000\n",
         [{"metric": "peak_memory_GiB", "value": "39.575"}, {"value": "59.5703125"}]),
        # batches of replicas, steps of accumulation and lengths in other words; models in the columns
        ("|  | 7B | 70B |\n|---|---|---|\n| GPUs | 8 | 64 |\n| GPU | H800 | H800 |\n"
         "| Plugin | Gemini | 3D (tp 4, pp 4) |\n| Batch size per DP | 4 | 16 |\n| TFLOPS/GPU | 410 | 320 |\n",
         [{"model": "7B", "global_batch": "32"}, {"model": "70B"}]),
        ("Model,GPU,#GPU,bsz/gpu,update freq,tokens per sample,wps\nOPT-1.3B,A100-40GB,8,8,2,2048,82000\n",
         [{"micro_batch": "8", "global_batch": "128", "seq": "2048"}]),
        ("model,hardware,B,T,total_batch_size (tokens),ms/step\ngpt2-124M,8X A100 80GB SXM,64,1024,524288,300\n",
         [{"micro_batch": "64", "seq": "1024", "global_batch": "512"}]),
        # model cards of Ascend: a column of another metric, "p" for a device, nodes x devices, BLOOM's 7.1B
        ("| config | SeqLength | metric | phase | performance |\n|---|---|---|---|---|\n"
         "| llama2_7b | 4096 | - | pretrain | 2560 tokens/s/p |\n", [{"gpu_type": "NPU", "value": "2560"}]),
        ("MindSpeed on 910B3\n| Model | Params | Nodes | Throughput tokens/s/NPU |\n|---|---|---|---|\n"
         "| bloom | 7B1 | 2x8 | 2034 |\n", [{"model": "bloom 7B1", "gpu_count": "16"}]),
    ],
)  # fmt: skip
def test_runs_in_other_words(tmp_path, text, wanted):
    path = tmp_path / ("table.md" if "|" in text else "table.csv")
    path.write_text(text)
    assert_read(path, wanted)
    scores = validate(path)
    assert not scores.skipped and len(scores.rows) == len(wanted)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        # the number of parameters that the model cards state; heads of the small ones are tied to the embedding
        ("Llama-3.2-1B", 1.24), ("Llama-3.2-3B", 3.21), ("Qwen2.5-0.5B", 0.494), ("Qwen2.5-1.5B", 1.54),
        ("Qwen2.5-3B", 3.09), ("Qwen3-0.6B", 0.596), ("Qwen3-4B", 4.02), ("SmolLM2-135M", 0.1345), ("SmolLM3-3B", 3.08),
        ("OLMo-1B", 1.18), ("Qwen2.5-7B", 7.62), ("DeepSeek-MoE-16B", 16.4), ("gemma-7b", 8.54), ("bloom-7b1", 7.07),
    ],
)  # fmt: skip
def test_named_models_have_as_many_parameters_as_their_cards_state(name, billions):
    assert catalogued(name).num_parameters / 1e9 == pytest.approx(billions, rel=0.01)
    row = {"model": name, "gpu_type": "H100", "gpu_count": "8", "global_batch": "8", "metric": "mfu_percent",
           "value": "40", "source": "FSDP2", "ep": ""}  # fmt: skip
    assert case_of(row, 1).config.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_table_without_models_beside_one_with_them_is_reported(tmp_path):
    (tmp_path / "table.md").write_text(
        "On 8 H100\n\n| Techniques | TPS/GPU |\n|---|---|\n| FSDP | 5,700 |\n\nLlama 3.1 8B\n\n"
        "| Techniques | TPS/GPU |\n|---|---|\n| FSDP, 8 GPUs of H100 | 5,700 |\n"
    )
    scores = validate(tmp_path / "table.md")
    assert len(scores.rows) == 1 and "no column model" in scores.skipped[0]["reason"]


def test_equal_configurations_are_priced_once(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        forecasts, "forecast", lambda *given, **named: asked.append(given[:2]) or forecast(*given, **named)
    )
    rows = [
        BASE | {"model": "GPT-3 2.7B", "micro_batch": str(size), "value": str(value)}
        for size in (1, 2) for value in range(1, 101)
    ]  # fmt: skip
    assert len(_table(tmp_path, rows).rows) == 200
    assert 2 <= len(asked) == len(set(asked)) < 20


def test_what_is_no_table_is_refused(tmp_path):
    (tmp_path / "a.md").write_text("# Notes\n\nNothing here.\n")
    with pytest.raises(TwofoldError, match="no column"):
        read_table(tmp_path / "a.md")


HEAD = "model,gpu,gpus,mbs,gbs,seq,software,"
RUN = "llama-2-7b,A100 80GB,64,4,256,2048,FSDP,"


@pytest.mark.parametrize(
    ("header", "cell", "metric", "value"),
    [
        ("Throughput per GPU (tokens/s)", "3280", "tokens_per_s_per_gpu", 3280),
        ("Throughput per GPU [TFLOP/s]", "178", "tflops_per_gpu", 178),
        ("throughput per GPU (TFLOP/s/GPU)", "178", "tflops_per_gpu", 178),
        ("Per-GPU TFLOPs", "178", "tflops_per_gpu", 178),
        ("achieved teraFLOP/s per GPU", "178", "tflops_per_gpu", 178),
        ("TFLOPs (total)", "6400", "tflops_per_gpu", 100),
        ("aggregate petaFLOP/s", "6.4", "tflops_per_gpu", 100),
        ("Elapsed time per iteration (ms)", "2500.5", "iteration_time_s", 2.5005),
        ("E2E time per step", "15600ms", "iteration_time_s", 15.6),
        ("step (s)", "9.8", "iteration_time_s", 9.8),
        ("Step Time (s) \u00b1 std", "11.9 \u00b1 0.1", "iteration_time_s", 11.9),
        ("steps/min", "20", "iteration_time_s", 3),
        ("samples/min", "3840", "samples_per_s_per_gpu", 1),
        ("Tokens/day", "18B", "tokens_per_s_per_gpu", 18e9 / 86_400 / 64),
        ("tokens/GPU/day", "0.28B", "tokens_per_s_per_gpu", 0.28e9 / 86_400),
        ("Speed", "2.4M tok/min", "tokens_per_s_per_gpu", 625),
        ("tokens/s/GPU", "11000 +/- 120", "tokens_per_s_per_gpu", 11000),
        ("max mem (GiB)", "61.2GiB", "peak_memory_GiB", 61.2),
        ("max mem (GiB)", "61.2 GB", "peak_memory_GB", 61.2),
        ("memory", "69.98GiB (73.66%)", "peak_memory_GiB", 69.98),
    ],
)
def test_headers_and_cells_of_figures_in_other_words(header, cell, metric, value, tmp_path):
    (tmp_path / "table.csv").write_text(f"{HEAD}{header}\n{RUN}{cell}\n")
    (row,) = read_table(tmp_path / "table.csv")
    assert (row["metric"], float(row["value"])) == (metric, pytest.approx(value, rel=1e-9))


def test_tps_of_torchtitan_is_of_a_device_and_of_others_of_all(tmp_path):
    """torchtitan's logs name tokens a second of a device so; read as of all devices it is 64 times too little."""
    (tmp_path / "table.csv").write_text(f"{HEAD}tps\n{RUN.replace('FSDP', 'torchtitan')}5762\n{RUN}5760\n")
    assert [float(row["value"]) for row in read_table(tmp_path / "table.csv")] == [5762, 90]


@pytest.mark.parametrize(
    ("header", "row", "cells"),
    [
        # the version of FSDP is no degree
        ("gpu,Parallelism,gbs,mbs", "8x H100-80GB SXM,FSDP2,64,1", {"gpu_count": "8", "dp": None}),
        ("gpu,gpus,Parallelism,gbs,mbs", "H100,16,FSDP=8 TP2,64,1", {"dp": "8", "tp": "2"}),
        # a degree in a column "fsdp" is one, not a level
        ("gpu,gpus,fsdp,gbs,mbs", "H100,64,64,64,1", {"zero_level": "3", "dp": "64"}),
        ("gpu,gpus,fsdp,gbs,mbs", "H100,64,full_shard,64,1", {"zero_level": "full_shard"}),
        # 4M tokens of sequences of 4096 are 1024 of them
        ("gpu,gpus,tp,pp,global batch (tokens),mbs", "A100,512,8,4,4M,1", {"global_batch": "1024"}),
        ("gpu,gpus,Batch tokens,mbs", "A100,64,262144,1", {"global_batch": "64"}),
        ("gpu,gpus,dp,grad acc,mbs", "A100,64,64,2,4", {"global_batch": "512"}),
        # MindFormers' names
        ("gpu,gpus,data_parallel,model_parallel,pipeline_stage,gbs,micro_batch_num", "910B2,64,2,8,4,128,16",
         {"dp": "2", "tp": "8", "pp": "4"}),
    ],
)  # fmt: skip
def test_layouts_and_batches_in_other_words(header, row, cells, tmp_path):
    (tmp_path / "table.csv").write_text(f"model,seq,{header},step time\nllama-2-7b,4096,{row},15 s\n")
    (found,) = read_table(tmp_path / "table.csv")
    assert {name: found.get(name) for name in cells} == cells and float(found["value"]) == 15
    assert validate(tmp_path / "table.csv").rows


def test_the_memory_of_an_h100_nvl_may_be_stated(tmp_path):
    (tmp_path / "table.csv").write_text(f"{HEAD}step time\n{RUN.replace('A100 80GB', 'H100 NVL 94GB')}2.5 s\n")
    assert validate(tmp_path / "table.csv").rows[0]["machine"].startswith("h100-nvl")


def test_rows_are_duplicates_only_if_all_their_figures_are_equal(tmp_path):
    """Two runs may need the same memory; the output names rows as they are numbered in the table."""
    path = tmp_path / "table.csv"
    path.write_text(
        f"{HEAD}step time (s),memory (GB)\n{RUN}3.1,40\n{RUN}3.2,40\n{RUN}3.1,40\n{RUN},\n"
        f"{RUN.replace('64', 'many')}3,40\n"
    )
    found = validate(path)
    assert [row["row"] for row in found.rows] == [1, 1, 2, 2]
    assert [(each["row"], each["column"], each["value"]) for each in found.skipped] == [
        (3, "", ""), (4, "value", ""), (5, "gpu_count", "many")
    ]  # fmt: skip


MORE_FORMS = {
    # number and name of devices in one cell, nodes by their product, "none" for no degree
    "Model,GPUs,TP,PP,MBS,GBS,Seq,s/step\nLlama-2-7B,16 x DGX H100,8,none,1,256,4096,3\n":
        {"gpu_count": "128", "gpu_type": "16 x DGX H100", "metric": "iteration_time_s"},
    "Model,Cluster,TP,MBS,GBS,Seq,time (s)\nLlama-2-7B,1x8 910B,8,1,64,4096,7\n":
        {"gpu_count": "8", "metric": "iteration_time_s", "value": "7"},
    "Model,GPU,GPUs,TP,MBS,GBS,Seq,s/step\nLlama-2-7B,910B,8,8,1,64,4096,7\n":
        {"gpu_type": "910B", "gpu_count": "8"},
    # a rate of a node of four devices
    "Model,GPU,Nodes,GPUs/node,MBS,GBS,Seq,tokens/s/node\nLlama-2-7B,H200,2,4,1,64,4096,40000\n":
        {"metric": "tokens_per_s_per_gpu", "value": "10000", "gpu_count": "8"},
}  # fmt: skip
"""Table -> cells of its row."""


@pytest.mark.parametrize("text", MORE_FORMS)
def test_devices_and_rates_in_other_forms(tmp_path, text):
    (tmp_path / "a.csv").write_text(text)
    (row,) = read_table(tmp_path / "a.csv")
    assert MORE_FORMS[text].items() <= row.items()
    assert len(validate(tmp_path / "a.csv").rows) == 1


def test_runs_without_a_time_or_of_adapters_are_listed_with_the_reason(tmp_path):
    (tmp_path / "a.csv").write_text(
        "model,gpu,gpus,method,mbs,gbs,seq,s/step,MFU\nLlama-2-7B,H100,8,full,4,64,4096,OOM,-\n"
        "Llama-2-7B,H100,8,QLoRA,1,64,4096,2,\nLlama-2-7B,H100,8,full,1,64,4096,4,-\n"
    )
    found = validate(tmp_path / "a.csv")
    assert [row["reason"].split(";")[0] for row in found.skipped] == [
        "nothing was measured: 'OOM'", "its task has 'qlora'"
    ]  # fmt: skip
    assert [row["row"] for row in found.rows] == [3]


def test_runs_out_of_memory_are_compared_with_the_predicted_peak(tmp_path):
    """7e9 parameters need 112 GB of weights, gradients and states on one device, and 14 GB of it on each of eight."""
    (tmp_path / "a.csv").write_text(
        "model,gpu,gpus,strategy,mbs,gbs,seq,recompute,s/step\nLlama-2-7B,A100 80GB,8,DDP,1,8,1024,full,OOM\n"
        "Llama-2-7B,A100 80GB,8,FSDP,1,8,1024,full,OOM\nLlama-2-7B,A100 80GB,8,FSDP,1,8,1024,full,1.2\n"
        "Llama-2-7B,GTX 1080,8,DDP,1,8,1024,full,OOM\n"
    )
    found = validate(tmp_path / "a.csv")
    assert [(each["row"], each["agrees"]) for each in found.out_of_memory] == [(1, True), (2, False)]
    assert found.out_of_memory[0]["predicted"] > 112 > 86 > found.out_of_memory[0]["room"] > 75
    assert [each["row"] for each in found.skipped] == [1, 2, 4]


def test_a_precision_in_the_notes_and_experts_over_tensor_parallel_ranks_are_assumed():
    row = {"model": "Mixtral 8x22B", "gpu_type": "H100", "gpu_count": "128", "tp": "4", "pp": "8", "ep": "8",
           "micro_batch": "1", "global_batch": "256", "seq": "4096", "metric": "mfu_percent", "value": "40",
           "source": "Megatron-Core", "notes": "EP folded into TP; linears in FP8 blockwise"}  # fmt: skip
    case = case_of(row, 1)
    assert "block" in case.stack and case.degrees.ep == 4
    assert case.beyond.whole_experts and case.beyond.expert_ranks == 8
    assert {
        "precision of the notes: fp8 blockwise",
        "ep 8 spans tensor-parallel ranks: no expert is split (arXiv 2504.14960)",
    } <= {*case.assumed}
    assert "float8" not in case_of(row | {"ep": "4", "notes": "without FP8"}, 1).stack
