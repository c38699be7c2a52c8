"""Layouts of published tables: merged header cells, records inside records, pairs of figures, conditions in headers.

The figures are made up.
"""

from __future__ import annotations

import pytest

from interop.measurements.devices import Network
from interop.measurements.machines import machine_of
from interop.measurements.models import catalogued
from interop.measurements.rows import case_of
from interop.measurements.tables import read_table
from interop.measurements.titles import stated_in_titles
from interop.measurements.validation import validate
from tests.interop.measurements.measured_table import assert_read

FORMS = {
    # merged header cells, figures of two conditions side by side
    "merged.html": (
        "<h3>GPT models, A100 80GB, Megatron-LM</h3><table><tr><th rowspan=2>Model size<th colspan=2>Parallelism"
        "<th colspan=2>Batch size<th rowspan=2>GPUs<th colspan=2>Time/iter (s)</tr><tr><th>TP<th>PP<th>Global<th>Micro"
        "<th>Full recompute<th>Selective recompute</tr><tr><td>22B<td>8<td>1<td>4<td>4<td>8<td>1.42<td>1.10</table>",
        [{"tp": "8", "pp": "1", "global_batch": "4", "micro_batch": "4", "recompute": "full recompute"},
         {"recompute": "selective recompute", "value": "1.10"}],
    ),
    "merged.tex": (
        r"\begin{table}\caption{Sequence length 4096 on 64 H800 GPUs (bf16). $^\dagger$ our fork.}"
        r"\begin{tabular}{@{}llcccr@{}}\toprule & & \multicolumn{2}{c}{Parallelism} & & TGS \\ \cmidrule(lr){3-4}"
        r"Framework & Model & TP & PP & GBS & (tokens/GPU/s) \\ \midrule "
        r"\multirow{2}{*}{Megatron-LM} & LLaMA-7B & 2 & 1 & 1024 & 10100$^\dagger$ \\ "
        r"& LLaMA-13B & 2 & 2 & 1024 & 5100 \\"
        r"\end{tabular}\end{table}",
        [{"source": "Megatron-LM", "model": "LLaMA-7B", "gpu_count": "64", "tp": "2", "value": "10100"},
         {"source": "Megatron-LM", "model": "LLaMA-13B", "pp": "2", "value": "5100"}],
    ),
    # runs inside an object that says what they share
    "nested.json": (
        '{"software": "NeMo 24.12", "gpu": "H100 SXM", "results": [{"name": "llama3_8b", "num_gpus": 8, "precision": '
        '"fp8", "config": {"tp": 1, "cp": 2, "mbs": 1, "gbs": 128, "seq_length": 8192}, '
        '"perf": {"step_time_ms": 11500}}]}',
        [{"source": "NeMo 24.12", "model": "llama3_8b", "cp": "2", "value": "11.5"}],
    ),
    # two precisions in one row, each with its figure
    "pairs.md": (
        "# Megatron-Bridge 0.2\n\n#### System: DGX-GB200\n\n| Model | #-GPUs | Precision | GBS | MBS | Seq Length "
        "| Tokens / sec / GPU |\n|--|--|--|--|--|--|--|\n| LLAMA3-8B | 8 | FP8-CS (FP8-MX) | 128 | 2 | 8192 | "
        "26000 (25000) |\n",
        [{"precision": "FP8-CS", "value": "26000"}, {"precision": "FP8-MX", "value": "25000"}],
    ),
    # the precision of a figure in its header
    "headed.csv": (
        "gpu,model,seq,mbs,gbs,TFLOPS (BF16),FP8 TFLOPS\n8x B200,Llama3-8B,8192,1,64,800,1100\n",
        [{"precision": "bf16", "gpu_count": "8", "value": "800"}, {"precision": "fp8", "value": "1100"}],
    ),
    # degrees and headers one space apart
    "aligned.txt": (
        "Table 3: DeepSeek-V3, Megatron-Core v0.14, GB200 NVL72, MXFP8\n\n"
        "Config            GPUs  TP PP EP VPP  MBS GBS   Seqlen  TFLOPs/GPU\n"
        "base              256   1  4  64 4    1   8192  4096    1020\n"
        "+ recompute mlp   256   1  4  64 4    1   8192  4096    980\n",
        [{"pp": "4", "ep": "64", "vpp": "4", "global_batch": "8192", "value": "1020"}, {"value": "980"}],
    ),
    # groups of replicas and ranks of a group, in columns and in words
    "hybrid.csv": (
        "model,gpu,gpus,dp_replicate,dp_shard,strategy,mbs,seq,tokens/s/GPU\n"
        "llama-3-8b,H100,32,4,8,,1,8192,7000\nllama-3-8b,H100,32,,,HSDP (4x8),1,8192,7000\n"
        "llama-3-8b,H100,32,,,FSDP (SHARD_GRAD_OP),1,8192,7100\n",
        [{"dp": "32", "shards": "8", "zero_level": "3"}, {"dp": "32", "shards": "8"},
         {"zero_level": "FSDP (SHARD_GRAD_OP)"}],
    ),
    # a column of free words, the unit in a column of its own, devices of each node
    "free.csv": (
        "Experiment,Nodes,bsz,throughput,unit\n"
        "\"Mistral-7B, 8xH100 80GB, FSDP, compile, seq=4096, SAC\",4,64,9,s/iter\n",
        [{"model": "Mistral-7B", "gpu_type": "H100 80GB", "recompute": "sac", "seq": "4096", "compile": "y",
          "global_batch": "64", "value": "9"}],
    ),
    # what is below a table, schedules and levels in a column of methods
    "below.md": (
        "| Devices | Method | Micro-batches | Throughput (samples/s) [± std] |\n|--|--|--|--|\n"
        "| 16 | 1F1B | 32 | 41.6 ± 0.1 |\n| 16 | ZB-H1 | 32 | 44.8 ± 0.1 |\n\n"
        "GPT 6.2B, seq 1024, mbs 3, PP 16, A100 80GB SXM, 1.6 Tb/s InfiniBand\n",
        [{"schedule": "1F1B", "pp": "16", "global_batch": "96", "value": "2.6",
          "interconnect": "GPT 6.2B, seq 1024, mbs 3, PP 16, A100 80GB SXM, 1.6 Tb/s InfiniBand"},
         {"schedule": "ZB-H1", "seq": "1024", "value": "2.8"}],
    ),
    # the model in a column of systems; a rate of each device that its header does not call so
    "systems.csv": (
        "System,# of chips,TP x PP x DP,tps,lbs,max seq,Method\n"
        "\"DGX H100, Llama-3-8B\",16,1 x 1 x 16,6100,1,8192,FSDP\n",
        [{"model": "Llama-3-8B", "gpu_count": "16", "micro_batch": "1", "seq": "8192", "zero_level": "FSDP"}],
    ),
    # switches below a rate, a family in the title
    "switches.html": (
        "<h2>Llama-3.1 pre-training, 4 nodes x 8 H100 SXM, torchtitan, BF16</h2><table><tr><th rowspan=2>Model"
        "<th rowspan=2>Local BS<th rowspan=2>Seq<th colspan=2>Throughput (tok/s/GPU)<th rowspan=2>Peak reserved (GiB)"
        "</tr><tr><th>eager<th>compile</tr><tr><td>8B<td>2<td>8192<td>6,120<td>7,010<td>71.2</table>",
        [{"family": "Llama-3.1", "compile": "n", "gpu_count": "32", "value": "6120"}, {"compile": "y", "value": "7010"},
         {"memory": "reserved", "value": "71.2"}],
    ),
    # degrees in the headers of times
    "degrees.md": (
        "## Step time vs. context (Llama-3-8B, 8 H200, Megatron-Core 0.12, TP 2, bf16, GBS 32)\n\n"
        "| Context | CP=1 | CP=2 |\n|--|--|--|\n| 16K | 2.9 s | 2.8 s |\n",
        [{"cp": "1", "tp": "2", "seq": "16K", "value": "2.9"}, {"cp": "2", "value": "2.8"}],
    ),
    # a trainer named in the heading, and below it the part of torch that it runs
    "parts.md": (
        "# torchtitan, October 2025\n\nLlama 3.1 8B with FSDP2 on 128 H100 (95 GiB), local batch size 2, seq 8192\n\n"
        "| Techniques | TPS/GPU |\n|--|--|\n| FSDP | 5,600 |\n",
        [{"source": "torchtitan, October 2025; Llama 3.1 8B with FSDP2 on 128 H100 (95 GiB), local batch size 2, "
                    "seq 8192", "gpu_type": "H100 (95 GiB)"}],
    ),
    # spreads in columns of their own, degrees in the order of single letters
    "spreads.tex": (
        r"\begin{table}\caption{32 NVIDIA A100-40GB (4 nodes), GPT-3 2.7B, global batch 256, seq 2048, FP16.}"
        r"\begin{tabular}{l r@{$\,\pm\,$}l c}System & \multicolumn{2}{c}{Throughput (samples/s)} & Config $(t,p,d)$ \\"
        r"Megatron-LM & 105.6 & 0.3 & (2,1,16) \\ \textsc{DeepSpeed} ZeRO-3 & 96.2 & 0.6 & (1,1,32) \\"
        r"\end{tabular}\end{table}",
        [{"tp": "2", "dp": "16", "value": "3.3"}, {"tp": "1", "pp": "1", "dp": "32"}],
    ),
    # models in a column of configurations
    "config.csv": (
        "config,phase,stage,accelerator,# NPUs,DP,MP,PP,MBS,GBS,tokens/s/p,Framework,SeqLength\n"
        "llama2_7b,pretrain,1,Ascend 910B2,8,2,1,4,1,64,3800,MindFormers,4096\n",
        [{"model": "llama2_7b", "tp": "1", "pp": "4", "zero_level": "1"}],
    ),
    # batches that differ in case, an instance of a cloud and its device in one title
    "letters.md": (
        "Megatron-LM 2023 on p4de.24xlarge (8x A100 80GB)\n\n"
        "| Params | H | L | a | GPUs | t | p | d | b | B | Time/iter (s) |\n|--|--|--|--|--|--|--|--|--|--|--|\n"
        "| 162.2B | 12288 | 88 | 96 | 64 | 8 | 8 | 1 | 1 | 128 | 30 |\n",
        [{"gpu_type": "A100 80GB", "micro_batch": "1", "global_batch": "128"}],
    ),
    # a data frame's index, underscores for "per"
    "frame.txt": (
        "                model  n_gpus        gpu  tp  pp  seq  gbs  mbs precision  step_time_s  tok_s_gpu\n"
        "0    llama-2-7b-mcore       8  A100-80GB   1   1 4096  128    1      bf16         13.5       4855\n"
        "1   llama-2-13b-mcore      16  A100-80GB   2   1 4096  128    1      bf16         13.4       2446\n",
        [{"model": "llama-2-7b-mcore", "gpu_count": "8"}, {"metric": "tokens_per_s_per_gpu", "value": "4855"},
         {"tp": "2", "metric": "iteration_time_s"}, {"value": "2446"}],
    ),
    # units in a line below the header, "per device" in it
    "units.csv": (
        "System;Model;#GPUs;Seq;Per-device batch;Global batch;Iteration time;Throughput;Memory per GPU (GB)\n"
        ";;;tokens;samples;samples;ms;tokens/s/GPU;\n"
        "Megatron-LM (H100 SXM5);Llama-3-8B;8;8192;1;128;14 500;9 040;62,5\n",
        [{"seq": "8192", "micro_batch": "1", "value": "14.5"}, {"value": "9040"}, {"value": "62.5"}],
    ),
    # devices below figures that span columns
    "spanned.tex": (
        r"\begin{table}\caption{A800-SXM4-80GB, sequence length 4096, global batch size 1024}\begin{tabular}{llrrr}"
        r"\multirow{2}{*}{Model} & \multirow{2}{*}{Method} & \multicolumn{2}{c}{TGS} & MFU (\%) \\ "
        r"& & 64 GPUs & 128 GPUs & 64 GPUs \\ Llama-2-13B & Megatron-LM (TP2 PP2) & 2,350 & 2,290 & 64 \\"
        r"\end{tabular}\end{table}",
        [{"gpu_count": "64", "tp": "2", "value": "2350"}, {"gpu_count": "128", "value": "2290"},
         {"gpu_count": "64", "metric": "mfu_percent"}],
    ),
    # software and precisions in the headers of figures
    "software.csv": (
        "Model,GPU,GPUs,Megatron-LM (tokens/s/GPU),FSDP2 tokens/s/GPU,fp8 (rowwise) FSDP2 tok/s/GPU,seq,gbs,mbs,"
        "precision\n"
        "Llama-2-7B,H100 SXM,32,9000,8800,11000,4096,256,2,bf16\n",
        [{"source": "Megatron-LM (tokens/s/GPU)", "value": "9000"}, {"source": "FSDP2 tokens/s/GPU", "value": "8800"},
         {"precision": "fp8 (rowwise)", "value": "11000"}],
    ),
    # the precision in the cells of devices and models
    "precision.csv": (
        "Framework;Model;GPU;#-GPUs;GBS;MBS;Sequence Length;TP;PP;CP;VP;Tokens / sec / GPU\n"
        "NeMo 25.02;GPT3-175B;DGX H100 (FP8);128;256;1;2048;4;8;1;6;700\n"
        "NeMo 25.02;LLAMA3-8B BF16;DGX H100;8;128;1;8192;1;1;2;1;11000\n",
        [{"precision": "fp8", "model": "GPT3-175B"}, {"precision": "bf16"}],
    ),
    # degrees of 0 and in the model's name, a model with spaces in its name
    "zeros.md": (
        "System: DGX-GB200, Megatron-Bridge 26.02\n\n"
        "| Model | #-GPUs | Precision | GBS | MBS | Seq len | FSDP | TP | PP | EP | Tokens / sec / GPU |\n"
        "|--|--|--|--|--|--|--|--|--|--|--|\n"
        "| GPT OSS 120B (EP=8) | 64 | BF16 | 1280 | 4 | 4096 | 0 | 1 | 1 | | 16000 |\n"
        "| Llama3 8B | 8 | FP8-MX | 128 | 2 | 8192 | 0 | 1 | 0 | 0 | 28000 |\n",
        [{"model": "GPT OSS 120B", "ep": "8"}, {"pp": "1", "ep": "1"}],
    ),
    # the schedule and the dispatcher in a caption
    "caption.tex": (
        r"\begin{table}\caption{MoE models on H800, FP8 block-wise, DeepEP, DualPipe.}\begin{tabular}{lcccccc}"
        r"Model & \#GPUs & PP & EP & GBS & MBS & Tokens/s (total) \\ DeepSeek-V3 & 2048 & 16 & 64 & 15360 & 1 & 2.1M \\"
        r"\end{tabular}\end{table}",
        [{"precision": "fp8 block-wise", "schedule": "dualpipe", "value": str(2.1e6 / 2048)}],
    ),
    "caption.html": (
        "<h3>Runs of March</h3><table><caption>Megatron-LM on Ascend <b>910B3</b>, BF16</caption><tr><th>model<th>n_gpu"
        "<th>TP<th>mbs<th>GBS<th>seq<th>tokens/s/NPU</tr><tr><td>LLaMA2-7B<td>8<td>1<td>1<td>64<td>4096<td>3300</table>",
        [{"gpu_type": "910B3", "precision": "bf16", "gpu_count": "8"}],
    ),
    # the H100 NVL and its memory; NVL72 is a rack of GB200
    "nvl.md": (
        "Llama-2-13B, 4x H100 NVL 94GB, PyTorch FSDP, seq 4096, bf16\n\n| micro batch | s/it |\n"
        "|--|--|\n| 1 | 1.15 |\n",
        [{"gpu_type": "H100 NVL 94GB", "gpu_count": "4"}],
    ),
    # numbers of devices beside sizes, recomputation as a setting
    "counts.md": (
        "Megatron-LM, A100-80GB, seq 2048, batch 512\n\n| Params | TP | PP | mbs | TFLOP/s/GPU |\n|--|--|--|--|--|\n"
        "| 18.4B (128 GPUs) | 8 | 2 | 4 | 143 |\n",
        [{"gpu_count": "128", "global_batch": "512"}],
    ),
    "settings.csv": (
        'config,gbs,seq,tok/s\n"Llama-3.1-8B, 8xH100, FSDP2, bf16, AC=full",64,8192,56000\n'
        '"Llama-3.1-8B, 8xH100, FSDP2, bf16, recompute: none",64,8192,65000\n',
        [{"recompute": "full", "gpu_count": "8"}, {"recompute": "none"}],
    ),
    # a caption below columns of spaces
    "below.txt": (
        "model   gpus  tp  mbs  gas  seq   s/step\nours 7B  8     2   2    16   4096  11.2\n\n"
        "(H100 SXM, megatron-core 0.9, bf16, selective recompute)\n",
        [{"gpu_type": "H100 SXM", "recompute": "selective recompute", "precision": "bf16", "global_batch": "128"}],
    ),
    # words of strategies and notes, nodes beside a device, a batch and its micro-batch
    "words.csv": (
        "Model,Hardware,Strategy,Batch (G/M),Seq,Notes,Samples/s/GPU\n"
        "Llama-2-7B,8xA100-80GB (2 nodes),FSDP + AC + compile,64/4,4096,,0.8\n"
        "GPT-J 6B,16xA100-80GB,ZeRO-3,,2048,batch size 2M tokens and mbs 8,0.9\n",
        [{"gpu_count": "16", "recompute": "ac", "compile": "y", "global_batch": "64", "micro_batch": "4"},
         {"global_batch": "1024", "micro_batch": "8"}],
    ),
    # schedules in the headers, the unit in the cells; links within and between nodes
    "schedules.md": (
        "Megatron-Core, Llama-2-7B, 8 x A100-80G, PP 8, mbs 1, seq 4096, bf16\n\n"
        "| m | 1F1B | Interleaved (v=2) | Interconnect |\n|---|---|---|---|\n"
        "| 8 | 2.75 s | 2.31 s | NVLink 600 GB/s / 200 Gb/s RoCE |\n",
        [{"schedule": "1f1b", "global_batch": "8", "gpu_type": "A100-80G", "value": "2.75"}, {"value": "2.31"}],
    ),
    # Ulysses' degree in the column of sequence parallelism
    "ulysses.csv": (
        "model,gpu,gpus,SP,ZeRO,Batch,Seq Len,ms/step\nllama-2-7b,A100 80GB,16,8,3,2,65536,9900\n",
        [{"cp": "8", "global_batch": "2", "value": "9.9"}],
    ),
    # one column a device, the figure in the title
    "wide.md": (
        "Tokens/s/GPU of Llama-3-8B (seq 8192, FSDP2 + torch.compile, mbs 1, gbs 64)\n\n| precision | 8x A100 80GB | "
        "8x H200 |\n|--|--|--|\n| bf16 | 3,300 | 9,000 |\n| fp8 tensorwise | - | 11,200 |\n",
        [{"gpu_type": "A100 80GB", "micro_batch": "1", "compile": "y", "value": "3300"}, {"gpu_type": "H200"},
         {"precision": "fp8 tensorwise", "gpu_count": "8", "value": "11200"}],
    ),
    # times of whole trainings, ranges, degrees in the notes
    "days.csv": (
        "model,tokens,hardware,# GPUs,framework,training time (days),global batch (tokens),micro batch,seq len,notes\n"
        "Llama-2 7B,2T,H100 80GB,256,Megatron-LM,9.0,4M,2,4096,TP2 PP1\n",
        [{"tp": "2", "metric": "tokens_per_s_per_gpu", "value": str(2e12 / (9 * 86_400 * 256))}],
    ),
    "hours.csv": (
        "model,GPU,H800 hours per 1B tokens,GPUs,mbs,gbs,seq,stack\nLlama-2-7B,H800,27.5,64,1,512,4096,Megatron-LM\n",
        [{"value": str(1e9 / 27.5 / 3600)}],
    ),
    "ranges.md": (
        "Mistral 7B with FSDP2 (torch 2.9) on p5.48xlarge, selective AC\n\nNodes | GPUs | seq | MBS / GBS | "
        "tokens/sec/GPU\n--- | --- | --- | --- | ---\n1 | 8 | 4,096 | 2 / 64 | 9,000\u20139,400\n",
        [{"gpu_type": "p5.48xlarge", "micro_batch": "2", "global_batch": "64", "recompute": "selective ac",
          "value": "9200"}],
    ),
    # MindFormers' own headers, a batch as sequences x tokens
    "mindformers.md": (
        "| 模型 | 规格 | 框架 | 硬件 | 卡数 | 数据并行 | 模型并行 | "
        "流水线并行 | micro_batch_num | batch_size | 序列长度 | 重计算 | 性能(tokens/s/卡) |\n"
        "|--|--|--|--|--|--|--|--|--|--|--|--|--|\n"
        "| Llama2 | 13B | MindFormers | Atlas 800T A2 | 16 | 8 | 1 | 2 | 16 | 2 | 4096 | 是 | 1700 |\n",
        [{"model": "Llama2 13B", "dp": "8", "tp": "1", "pp": "2", "micro_batch": "2", "value": "1700"}],
    ),
    "lengths.md": (
        "FSDP on 8x A100-80GB\n\n| Model | Batch | Time per step |\n|--|--|--|\n"
        "| Llama-2 7B | 8 seqs \u00d7 2048 tokens per GPU | 3.5 s |\n| Llama-2 7B | 4 \u00d7 2048 | 1.9 s |\n",
        [{"micro_batch": "8", "seq": "2048", "value": "3.5"}, {"micro_batch": "4", "seq": "2048"}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_every_layout_is_read_and_predicted(tmp_path, name):
    text, wanted = FORMS[name]
    (tmp_path / name).write_text(text)
    assert_read(tmp_path / name, wanted)
    scores = validate(tmp_path / name)
    assert not scores.skipped and len(scores.rows) == len(wanted)
    for row in scores.rows:
        assert row["low"] < row["predicted"] < row["high"] and 0.05 < row["mfu"] < 0.9


def test_a_rate_that_cannot_be_of_all_devices_is_of_each(tmp_path):
    """900 tokens a second of 256 devices would be a thousandth of their peak; 2 million of each 200 times it."""
    head = "model,gpu,gpus,tp,mbs,gbs,seq,software,"
    run = "llama-3-70b,H100,256,8,1,256,8192,torchtitan,"
    for name, cell in (("Throughput (Tok/Sec)", "900"), ("tokens/s/GPU", "230400")):
        (tmp_path / "table.csv").write_text(f"{head}{name}\n{run}{cell}\n")
        (row,) = validate(tmp_path / "table.csv").rows
        assert row["value"] == pytest.approx(900) and any("the rate is of" in told for told in row["assumed"])


def test_more_memory_than_the_device_has_is_a_wrong_unit(tmp_path):
    """64,000 MiB are 62.5 GiB of 80 GB; 64,000 GB are no device's."""
    head = "model,gpu,gpus,seq,mbs,gbs,software,"
    (tmp_path / "table.csv").write_text(
        f"{head}peak memory (GB),peak memory (MiB)\nllama-3-8b,H100,8,8192,1,64,torchtitan,64000,64000\n"
    )
    scores = validate(tmp_path / "table.csv")
    assert [row["value"] for row in scores.rows] == [62.5] and "the device has 84" in scores.skipped[0]["reason"]


@pytest.mark.parametrize(("rate", "factor", "readings"), [("9600", 8, 1), ("40000", 1, 0), ("1000", 8, 0)])
def test_an_open_rate_is_read_by_shares_of_the_peak_that_runs_reach(tmp_path, rate, factor, readings):
    """Of 8 H100 an 8B model's 9,600 tokens a second are 7 % of their peak, or 58 % of each; 40,000 are 30 % of all, and
    1,000 below 1 % of all. The reading does not depend on the prediction."""
    head = "model,gpu,gpus,seq,mbs,gbs,software,"
    (tmp_path / "table.csv").write_text(f"{head}tokens/s\nllama-3-8b,H100,8,8192,1,64,torchtitan,{rate}\n")
    (row,) = validate(tmp_path / "table.csv").rows
    assert row["value"] == pytest.approx(factor * int(rate) / 8)
    others = [each["predicted"] for each in row["readings"] if "rate" in each["cells"]]
    assert len(others) == readings and all(row["low"] < each < row["high"] for each in others)
    assert all(each == pytest.approx(8 * row["predicted"]) for each in others)
    (tmp_path / "table.csv").write_text(f"{head}total tokens/s\nllama-3-8b,H100,8,8192,1,64,torchtitan,{rate}\n")
    (row,) = validate(tmp_path / "table.csv").rows
    assert row["value"] == pytest.approx(int(rate) / 8)


@pytest.mark.parametrize(
    ("precision", "tflops", "rate", "values", "reasons"),
    [("bf16", "1100", "9100", [9100], ["111% of the device's peak"]), ("", "1100", "9100", [1100, 9100], []),
     ("bf16", "400", "8.1", [400, 8100], []), ("bf16", "0.4", "0.081", [400], ["0.00% of the device's peak"]),
     ("bf16, 10 GbE", "400", "8.1", [400, 8.1], [])],
)  # fmt: skip
def test_figures_that_no_device_reaches_are_skipped_and_far_too_low_ones_are_in_thousands(
    tmp_path, precision, tflops, rate, values, reasons
):
    """An H100 has 989 TFLOP/s in bf16, so 1100 are those of FP8 or none. 8.1 tokens a second of an 8B model are 0.05 %
    of it and 8.1 thousand 50 %; with slow links they may be true."""
    precision, _, link = precision.partition(", ")
    (tmp_path / "table.csv").write_text(
        "model,gpu,gpus,tp,mbs,gbs,seq,precision,interconnect,TFLOPS/GPU,tokens/s/GPU\n"
        f"llama-3-8b,H100,16,1,1,64,8192,{precision},{link},{tflops},{rate}\n"
    )
    scores = validate(tmp_path / "table.csv")
    assert [row["value"] for row in scores.rows] == pytest.approx(values)
    assert [skipped["reason"].partition("would be ")[2] for skipped in scores.skipped] == reasons
    for row in scores.rows:
        is_scaled = row["value"] not in (float(tflops), float(rate))
        assert any("in thousands" in told for told in row["assumed"]) == is_scaled


def test_operations_of_recomputation_count_towards_the_peak(tmp_path):
    """350 TFLOP/s are more than the 312 of an A100, although only three quarters of them are the model's."""
    head = "model,gpu,gpus,tp,mbs,gbs,seq,software,recompute,TFLOPS/GPU\n"
    run = 'gpt3-6.7b,A100,8,8,1,64,2048,"Megatron-LM, arXiv 2104.04473",full,'
    (tmp_path / "table.csv").write_text(f"{head}{run}160\n{run}350\n")
    scores = validate(tmp_path / "table.csv")
    assert len(scores.rows) == 1 and "112% of the device's peak" in scores.skipped[0]["reason"]


def test_figures_of_an_npu_are_of_every_plausible_one_and_references_are_not_its(tmp_path):
    """MindSpeed's tables name no device; a column of references is of another one."""
    (tmp_path / "table.md").write_text(
        "| \u6a21\u578b | \u53c2\u6570 | \u5e8f\u5217 | \u5b9e\u73b0 | \u96c6\u7fa4 | TP | GBS | MBS "
        "| NPU (tokens/s/p) | \u53c2\u8003 (tokens/s/p) |\n|--|--|--|--|--|--|--|--|--|--|\n"
        "| LLaMA2 | 7B | 4K | Mcore | 1x8 | 8 | 128 | 1 | 3900 | 3800 |\n"
    )
    scores = validate(tmp_path / "table.md")
    (row,), (skipped,) = scores.rows, scores.skipped
    assert row["label_seq"] == "4K" and row["stack"] == "megatron" and "another device" in skipped["reason"]
    devices = {reading["cells"].get("gpu_type") for reading in row["readings"]}
    assert len(devices & {f"Ascend 910B{number}" for number in (1, 2, 3, 4)}) == 3 and row["machine"].startswith(
        "ascend"
    )


@pytest.mark.parametrize(
    ("name", "layers", "billions"),
    [
        ("GPT-2 1.5B", 48, 1.5), ("deepseek-v3 16B", 27, 16), ("gpt oss 120b", 36, 117), ("Mistral 7B v0.3", 32, 7.2),
        ("Grok 1 314B", 64, 316), ("GLM-4.5-Air", 46, 106), ("Moonlight-16B-A3B", 27, 16), ("gpt3_20b", 44, 20),
        ("DeepSeek-R1", 61, 671), ("Llama4 17Bx16E", 48, 108), ("Phi-3-medium 14B", 40, 14),
        ("Qwen1.5-MoE-A2.7B", 24, 14.3), ("Mixtral-8x7B", 32, 46.7), ("Llama-4-Maverick-17B-128E", 48, 400),
    ],
)  # fmt: skip
def test_a_name_means_the_model_that_has_its_parameters(name, layers, billions):
    """Numbers of parameters are those that the models' cards state."""
    found = catalogued(name)
    assert found.num_layers == layers and found.num_parameters / 1e9 == pytest.approx(billions, rel=0.05)


def test_heads_that_are_not_stated_divide_over_tensor_parallel_ranks():
    case = case_of(ROW | {"model": "our 8B", "tp": "64", "pp": "1", "gpu_count": "64", "global_batch": "64"}, 1)
    assert case.config.num_heads % 64 == 0 and case.config.hidden % case.config.num_heads == 0


def test_recipes_of_nemo_keep_gradients_in_16_bits_and_balance_experts():
    """grad_reduce_in_fp32 and moe_router_force_load_balancing of its recipes; Megatron-LM's defaults are others."""
    row = ROW | {"model": "Mixtral-8x7B", "tp": "1", "pp": "4", "ep": "8"}
    for source, dtype, places in (("NeMo 25.09", "bfloat16", 1.0), ("Megatron-LM", "float32", None)):
        case = case_of(row | {"source": source}, 1)
        assert case.degrees.optimizer.gradient_dtype == dtype
        assert (case.config.experts.capacity_factor == 1.0) == (places == 1.0)


def test_key_value_heads_are_repeated_for_more_tensor_parallel_ranks():
    """GLM-4 9B has two of them; on eight ranks each computes one."""
    row = {
        "source": "Megatron-LM", "model": "GLM4 9B", "global_batch": "64", "micro_batch": "2", "tp": "8",
        "gpu_type": "H100", "gpu_count": "16", "precision": "bf16", "metric": "iteration_time_s", "value": "1.0",
    }  # fmt: skip
    case = case_of(row, 1)
    assert case.config.num_kv_heads == 8 and any("2 key-value heads" in told for told in case.assumed)


def test_float32_of_a_device_without_tf32_is_read_in_one_way(tmp_path):
    (tmp_path / "table.csv").write_text(
        "model,gpu,gpus,tp,mbs,gbs,seq,software,precision,mfu\n"
        "llama-3-8b,Ascend 910B1,16,2,1,128,8192,MindSpeed,fp32,40\n"
    )
    (row,) = validate(tmp_path / "table.csv").rows
    assert not any("tf32" in str(reading["cells"]) for reading in row["readings"])


ROW = {
    "source": "Megatron-LM", "model": "llama-3-70b", "seq": "8192", "global_batch": "128", "tp": "8", "pp": "4",
    "gpu_type": "H100", "gpu_count": "64", "micro_batch": "1", "precision": "bf16", "metric": "mfu_percent",
    "value": "40",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "check"),
    [
        # the words of precisions, levels and years that rule a reading out
        ({"precision": "fp32 (TF32 off)"}, lambda case: case.stack == "megatron" and not case.other_stacks),
        ({"precision": "fp32"}, lambda case: case.other_stacks == ("megatron-tf32",)),
        ({"zero_level": "1 (BF16Optimizer)"}, lambda case: case.degrees.optimizer.parallel_level == 1),
        ({"source": "Megatron-LM (SC'21)", "gpu_type": "A100"}, lambda case: case.stack == "megatron-2022"),
        ({"source": "Megatron-LM, MLSys 2024", "gpu_type": "A100"}, lambda case: not case.other_stacks),
        # no fused attention before 2023
            ({"source": "DeepSpeed ZeRO-3, 2021", "gpu_type": "A100", "pp": "1", "tp": "1"},
         lambda case: (case.stack, case.other_stacks) == ("megatron-deepspeed-2022", ("torch-2024",))),
        ({"source": "nanoGPT", "pp": "1", "tp": "1", "zero_level": "DDP", "model": "GPT-2 124M"},
         lambda case: case.stack.endswith("-compile")),
        # Megatron-FSDP reduces gradients in every micro-batch and keeps shards of them
        ({"source": "Megatron-Bridge", "pp": "1", "tp": "1", "zero_level": "FSDP", "global_batch": "256"},
         lambda case: case.degrees.optimizer.reduce_every == "micro_batch"),
        # the default kernel of attention of llm-foundry's benchmarks by their year
        *(({"source": source, "pp": "1", "tp": "1", "zero_level": "FSDP", "gpu_type": device},
           lambda case, stacks=stacks: (case.stack, *case.other_stacks) == stacks)
          for source, device, stacks in (
              ("llm-foundry", "A100", ("torch-composer-triton", "torch-composer")),
              ("llm-foundry 2023", "H100", ("torch-composer-triton", "torch-composer")),
              ("llm-foundry", "H100", ("torch-composer", "torch-composer-triton")),
              ("llm-foundry 2024", "A100", ("torch-composer",)))),
        # modules of a mixture's dense layers, and of all its layers
        ({"model": "DeepSeek-V3", "recompute": "mla_up_proj, mlp"}, lambda case: case.degrees.recompute == "none"),
        ({"model": "DeepSeek-V3", "recompute": "moe"}, lambda case: case.degrees.recompute == "full"),
        ({"interconnect": "1x100 Gb/s IB"}, lambda case: case.network.per_device_Bps == 12.5e9 / 8),
        ({"schedule": "VPP2"}, lambda case: case.degrees.virtual == 2),
        ({"recompute": "\u2713 (every 2nd)"}, lambda case: case.degrees.recompute_layers == 10),
        ({"precision": "W8A8 FP8"}, lambda case: case.stack == "megatron-float8"),
        ({"recompute": "partition activations"}, lambda case: case.degrees.recompute == "full"),
        # weights of a pipeline stay gathered, whoever shards them
        ({"source": "ours", "zero_level": "FSDP"}, lambda case: case.degrees.optimizer.parallel_level == 2),
    ],
)  # fmt: skip
def test_words_that_rule_a_reading_out(change, check):
    assert check(case_of(ROW | change, 1))


def test_a_link_whose_owner_is_open_is_read_as_of_a_device_and_of_a_node(tmp_path):
    """100 GbE may be one card of a node; 4x200 Gb/s, and 400 Gb/s, which nodes have of each device, are clear."""
    head = "model,gpu,gpus,dp,seq,gbs,mbs,software,sharding,interconnect,tokens/s/GPU\n"
    head += "llama-2-7b,A100 80GB,64,64,4096,128,2,"
    for link, readings in (("100 GbE", 1), ("4x200 Gb/s HDR", 0), ("100 GbE per GPU", 0), ("400 Gb/s NDR", 0)):
        (tmp_path / "table.csv").write_text(f"{head}FSDP2 torch 2.9,FSDP,{link},3000\n")
        (row,) = validate(tmp_path / "table.csv").rows
        slow = [each for each in row["readings"] if "interconnect" in each["cells"]]
        assert len(slow) == readings and all(each["predicted"] < row["predicted"] / 2 for each in slow), link


def test_mixtures_of_other_software_have_the_interval_of_unmeasured_software(tmp_path):
    """torchtitan's dense models were measured, its mixtures were not."""
    head = "model,gpu,gpus,ep,seq,gbs,mbs,software,precision,recompute,compile,tokens/s/GPU\n"
    rest = "4096,64,1,torchtitan 2025-10,bf16,none,y,9000\n"
    (tmp_path / "table.csv").write_text(f"{head}Mixtral-8x7B,H200,64,8,{rest}llama-3-8b,H200,64,1,{rest}")
    mixture, dense = validate(tmp_path / "table.csv").rows
    assert mixture["low"] / mixture["predicted"] < 0.82 < 0.88 < dense["low"] / dense["predicted"]


def test_tf32_is_a_switch_of_all_products(tmp_path):
    """Also where attention is written out; an A100 multiplies eight times as fast as in float32 (data sheet)."""
    head = "model,gpu,gpus,tp,pp,seq,gbs,mbs,software,precision,tflops/gpu\nGPT 1.3B,A100 40GB,8,1,1,1024,64,4,"
    lines = [f"{head.splitlines()[1]}Megatron-LM 2022,{precision},12" for precision in ("TF32", "fp32 (no TF32)")]
    (tmp_path / "table.csv").write_text("\n".join([head.splitlines()[0], *lines]) + "\n")
    narrow, wide = validate(tmp_path / "table.csv").rows
    assert 3 < narrow["predicted"] / wide["predicted"] < 8


def test_more_than_a_super_node_is_priced_on_the_next_whole_number_of_them():
    machine = machine_of("ascend-910c-x2048", Network())
    assert machine.num_devices == 3 * 768 and [link.ranks for link in machine.links][-2:] == [768, 3 * 768]


def test_a_pipeline_is_not_left_idle_by_a_missing_micro_batch(tmp_path):
    """Of 8 sequences for each replica with 4 stages, micro-batches of 4 and 8 would leave most stages idle."""
    columns = [name for name in ROW if name != "micro_batch"]
    (tmp_path / "table.csv").write_text(f"{','.join(columns)}\n{','.join(ROW[name] for name in columns)}\n")
    (row,) = validate(tmp_path / "table.csv").rows
    sizes = {reading["cells"]["micro_batch"] for reading in row["readings"] if "micro_batch" in reading["cells"]}
    assert not sizes & {"32", "64"} and row["mfu"] > 0.25


def test_only_the_beginning_of_a_very_long_title_is_read():
    found = stated_in_titles(("A100 80GB, ", "H100 SXM " + "a" * 100_000 + " bf16"), ())
    assert found["gpu_type"] == "A100 80GB" and "precision" not in found


def test_marks_of_footnotes_in_markdown_are_escaped_or_raised(tmp_path):
    rows = (
        "| Model | GPUs | TP | MBS | GBS | tok/s/GPU |\n|--|--|--|--|--|--|\n| Llama-3-8B | 8 | 1 | 1 | 64 | 9273 |\n"
    )
    for cell, note in (("8137\\*", "\\* with FP8"), ("8137<sup>1</sup>", "<sup>1</sup> with FP8")):
        path = tmp_path / "footnotes.md"
        path.write_text(f"## H100, Megatron-LM\n\n{rows}| Llama-3-8B | 8 | 2 | 1 | 128 | {cell} |\n\n{note}\n")
        plain, narrow = read_table(path)
        assert "precision" not in plain and narrow["precision"].lower() == "fp8" and narrow["value"] == "8137"


def test_rows_that_add_one_technique_after_another(tmp_path):
    path = tmp_path / "techniques.md"
    path.write_text(
        "torchtitan, Llama 3.1 8B, 8 H100, seq 8192, local batch size 1\n\n"
        "| | TPS/GPU | Peak memory (GiB) |\n|--|--|--|\n"
        "| FSDP | 5,645 | 65.2 |\n| FSDP + torch.compile | 6,482 | 65 |\n| FSDP + compile + float8 | 8137 | 65 |\n"
        "| + async TP | 8532 | |\n"
    )
    rates = [row for row in read_table(path) if row["metric"] == "tokens_per_s_per_gpu"]
    assert [row["value"] for row in rates] == ["5645", "6482", "8137", "8532"]
    assert [row.get("compile", "") for row in rates[:3]] == ["", "y", "y"]
    assert rates[2]["precision"] == "float8" and "precision" not in rates[1]
    assert all("torchtitan" in row["source"] for row in rates)


def test_times_in_minutes_and_seconds(tmp_path):
    path = tmp_path / "minutes.md"
    path.write_text(
        "GPT-3 175B, Megatron-LM, 192 A100-80GB\n\n| TP | PP | micro bs | batch | s/it |\n|--|--|--|--|--|\n"
        "| 8 | 12 | 1 | 1536 | 1m 52s |\n| 8 | 6 | 1 | 1536 | 1 min 52.5 sec |\n"
    )
    assert [float(row["value"]) for row in read_table(path)] == [112, 112.5]
