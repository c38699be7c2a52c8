"""`twofold links`: recorded communication against numbers worked out by hand, in every format that is read."""

import gzip
import json
import re
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

from costmodels import Machine
from costmodels.machine.links import Link
from costmodels.machine.sections import Collective
from interop.link_traces import read_links
from plans.errors import TwofoldError
from tests.support.on_ranks import run_on_ranks
from twofold.cli import main

GB = 10**9


@pytest.fixture
def machine(tmp_path: Path) -> str:
    """Nodes of 4 ranks at 100 GB/s, 10 GB/s between them, and nothing else that costs.

    n ranks pass S bytes round a ring in 2 (n-1)/n S / 100 GB/s (all-reduce) or half of it (all-gather, reduce-scatter);
    a transfer takes S / 100 GB/s.
    """
    plain = Collective(start_s=0.0, link_fraction=1.0, gap=0.0)
    calls = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "transfer")
    links = (
        Link(name="near", ranks=4, latency_s=0.0, bandwidth_Bps=100.0 * GB),
        Link(name="far", ranks=8, latency_s=0.0, bandwidth_Bps=10.0 * GB),
    )
    made = msgspec.structs.replace(
        Machine.load("h200-x16"), name="simple", num_devices=8, devices_per_node=4, links=links,
        collectives=dict.fromkeys(calls, plain),
    )  # fmt: skip
    file = tmp_path / "machine.json"
    made.save(file)
    return str(file)


def kernel(name: str, start_us: float, dur_us: float, **args) -> dict:
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": start_us, "dur": dur_us, "args": args}


def reduced(start_us: float, dur_us: float, count: int, ranks: str = "[0, 1, 2, 3]", **args) -> dict:
    said = {"Collective name": "allreduce", "In msg nelems": count, "Out msg nelems": count, "dtype": "BFloat16",
            "Process Group Ranks": ranks}  # fmt: skip
    return kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", start_us, dur_us, **said, **args)


def trace(folder: Path, rank: int, events: list, groups: list | None = None, **more) -> Path:
    info = {"backend": "nccl", "rank": rank, "world_size": 8, "pg_config": groups or []}
    file = folder / f"rank{rank}.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"distributedInfo": info, "traceEvents": events, **more}).encode()))
    return file


def said(arguments: list[str], capsys) -> dict:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_shortest_time_of_a_rank_counts_and_a_factor_explains_it(machine, tmp_path, capsys):
    """400 MB among 4: 2 x 3/4 x 400 MB / 100 GB/s = 6 ms; it took 8 ms, so the links gave 75 of 100 GB/s."""
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank, early_us in enumerate((0, 500, 2000, 1500)):  # rank 2 came last
        trace(folder, rank, [reduced(10_000 + early_us, 10_000 - early_us, 200_000_000)])
    found = said(["links", str(folder), "--machine", machine], capsys)
    (call,), (tier,) = found["calls"], found["tiers"]
    assert (call["call"], call["size_bytes"], call["num_ranks"], call["times"]) == ("all_reduce", 400_000_000, 4, 1)
    assert (call["seconds"], call["waited_s"]) == (pytest.approx(8e-3), pytest.approx(2e-3))
    assert call["predicted_s"] == pytest.approx(6e-3)
    assert call["bandwidth_factor"] == pytest.approx(0.75, rel=1e-5)
    assert call["bus_Bps"] == pytest.approx(75 * GB)
    assert (tier["name"], tier["number"], tier["bandwidth_factor"]) == ("near", 0, call["bandwidth_factor"])
    assert tier["is_whole"] and tier["is_alone"] and tier["short_extra_s"] is None


def test_tiers_are_separated_and_the_median_counts(machine, tmp_path, capsys):
    """Pairs 0 and 4: 100 MB, 2 x 1/2 x 100 MB / 10 GB/s = 10 ms. Three times 10, 20 and 12.5 ms: factor 0.8."""
    groups = [{"pg_name": "3", "ranks": [0, 4]}]
    files = []
    for rank in (0, 4):
        far = [reduced(1e5 * at, 1e3 * ms, 50_000_000, "[0, ..., 4]") for at, ms in enumerate((10, 20, 12.5))]
        for event in far:
            event["args"]["Process Group Name"] = "3"
        files.append(str(trace(tmp_path, rank, far, groups)))
    found = said(["links", *files, "--machine", machine], capsys)
    (call,), (tier,) = found["calls"], found["tiers"]
    assert (call["tier"], call["times"], tier["name"]) == (1, 3, "far")
    assert (call["seconds"], call["predicted_s"]) == (pytest.approx(12.5e-3), pytest.approx(10e-3))
    assert call["bandwidth_factor"] == pytest.approx(0.8, rel=1e-5)
    assert (tier["measured_s"], tier["predicted_s"]) == (pytest.approx(37.5e-3), pytest.approx(30e-3))


def test_calls_during_kernels_do_not_count_if_others_ran_alone(machine, tmp_path, capsys):
    """Alone 6 ms as predicted; 9 ms with a product beside it for two thirds of the time."""
    for rank in range(4):
        product = kernel("sm90_xmma_gemm_bf16", 20_000, 6_000)
        events = [reduced(0, 6_000, 200_000_000), reduced(17_000, 9_000, 200_000_000), product]
        trace(tmp_path, rank, events)
    files = [str(tmp_path / f"rank{rank}.json.gz") for rank in range(4)]
    first = said(["links", *files, "--machine", machine], capsys)["calls"][0]
    assert (first["times"], first["seconds"], first["is_alone"]) == (2, pytest.approx(6e-3), True)
    assert first["beside"] == pytest.approx(1 / 3)  # the median of 0 and 2/3
    assert first["bandwidth_factor"] == pytest.approx(1, rel=1e-5)
    for rank in range(4):
        trace(tmp_path, rank, [reduced(17_000, 9_000, 200_000_000), kernel("sm90_xmma_gemm_bf16", 20_000, 6_000)])
    (tier,) = said(["links", *files, "--machine", machine], capsys)["tiers"]
    assert not tier["is_alone"] and tier["bandwidth_factor"] == pytest.approx(2 / 3, rel=1e-5)
    assert main(["links", *files, "--machine", machine]) == 0
    shown = capsys.readouterr().out
    assert "Other kernels ran during all calls and slowed them down" in shown
    assert f"twofold whatif plan.json --machine {machine} --link 0:bandwidth=0.67" in shown


def test_a_change_of_links_makes_calls_as_much_shorter_as_their_prices(machine, tmp_path, capsys):
    """8 ms alone and 9 ms beside a product for 6 of them: 17 ms in communication, 8 + 3 ms of it alone. Links twice as
    fast halve the price, so 8.5 and 5.5 ms; the slower tier changes nothing."""
    product = kernel("sm90_xmma_gemm_bf16", 20_000, 6_000)
    files = [
        str(trace(tmp_path, rank, [reduced(0, 8_000, 200_000_000), reduced(17_000, 9_000, 200_000_000), product]))
        for rank in range(4)
    ]
    asked = ["links", *files, "--machine", machine]
    found = said([*asked, "--link", "near:bandwidth=2"], capsys)["mean_rank"]
    assert found["seen"] == pytest.approx({"communication_s": 17e-3, "exposed_s": 11e-3})
    assert found["changed"] == pytest.approx({"communication_s": 8.5e-3, "exposed_s": 5.5e-3})
    assert said([*asked, "--link", "1:bandwidth=2"], capsys)["mean_rank"]["changed"] == found["seen"]
    assert said(asked, capsys)["mean_rank"]["changed"] is None
    assert main([*asked, "--link", "near:bandwidth=2"]) == 0
    assert "With near:bandwidth=2: 8.50 ms in communication, 5.50 ms without" in capsys.readouterr().out


def test_every_collective_has_its_size_and_transfers_their_ends(machine, tmp_path, capsys):
    """All-gather of 4 x 25 MB and reduce-scatter of 100 MB: 3/4 x 100 MB / 100 GB/s; 100 MB to a neighbour: 1 ms."""

    def other(name: str, own: int, made: int, rank: int, **args) -> dict:
        group = {"Global rank start": 0, "Global rank stride": 1, "Group size": 4}
        return kernel("ncclDevKernel_x", 1e5 * len(name), 750, **{"Collective name": name, "In msg nelems": own,
                      "Out msg nelems": made, "dtype": "Float"}, **group, **args)  # fmt: skip

    files = []
    for rank in range(4):
        events = [other("_allgather_base", 6_250_000, 25_000_000, rank),
                  other("_reduce_scatter_base", 25_000_000, 6_250_000, rank), other("barrier", 1, 1, rank)]  # fmt: skip
        if rank < 2:
            ends = {"Dst Rank": 1} if rank == 0 else {"Src Rank": 0}
            events.append(other("send" if rank == 0 else "recv", 25_000_000, 25_000_000, rank, **ends))
        files.append(str(trace(tmp_path, rank, events)))
    found = said(["links", *files, "--machine", machine], capsys)
    calls = {each["call"]: each for each in found["calls"]}
    assert {name: each["size_bytes"] for name, each in calls.items()} == dict.fromkeys(
        ("all_gather", "reduce_scatter", "transfer"), 100_000_000
    )
    assert calls["all_gather"]["predicted_s"] == calls["reduce_scatter"]["predicted_s"] == pytest.approx(0.75e-3)
    assert calls["transfer"]["predicted_s"] == pytest.approx(1e-3)
    assert calls["transfer"]["bandwidth_factor"] == pytest.approx(4 / 3, rel=1e-5)
    assert found["left_out"] == {"barrier, which is not a supported collective": 4}


@pytest.mark.parametrize(("start_us", "base_ns"), [(1.759e15, 0), (4.6e12, 1_790_857_026_000_000_000), (7e11, 0)])
def test_times_since_1970_have_more_picoseconds_than_64_bits(start_us, base_ns, tmp_path):
    """As torch writes them: microseconds since 1970, or a base in nanoseconds; a product runs beside for 2/3."""
    events = [reduced(start_us + 1e4 * at, 9_000, 1000) for at in range(3)]
    products = [kernel("sm90_xmma_gemm_bf16", start_us + 1e4 * at + 3_000, 6_000) for at in range(3)]
    both = [kernel("elementwise", start_us + 1e4 * at + 3_000, 6_000) for at in range(3)]  # at the same time
    file = trace(tmp_path, 0, events + products + both, baseTimeNanoseconds=base_ns)
    assert [each.beside for each in read_links([file]).calls] == pytest.approx([2 / 3] * 3, abs=1e-4)


def test_a_group_without_a_list_is_that_of_all_ranks(tmp_path):
    """As torch's pg_config_info writes it; kernels list their ranks in short."""
    groups = [{"pg_name": "0", "ranks": [], "group_size": 8}, {"pg_name": "3", "ranks": [0, 4]}]
    (call,) = read_links([
        trace(tmp_path, 0, [reduced(0, 9, 1000, "[0, 1, ..., 7]", **{"Process Group Name": "0"})], groups)
    ]).calls  # fmt: skip
    assert call.ranks == tuple(range(8))
    with pytest.raises(TwofoldError, match="without the ranks of its group"):  # of which of the two is not said
        read_links([trace(tmp_path, 0, [reduced(0, 9, 1000, "[0, 1, ..., 7]")], groups)])


def test_gloo_names_types_as_c_does_and_groups_of_equal_ranks_are_one(tmp_path):
    """Events as torch 2.13 writes them for gloo: no name of a group, two groups of the same two ranks."""

    def gloo(name: str, dims: list, kind: str) -> dict:
        args = {"Input Dims": dims, "Input type": [kind]}
        return {"ph": "X", "cat": "user_annotation", "name": f"gloo:{name}", "ts": 0, "dur": 5, "args": args}

    events = [gloo("all_reduce", [[10, 100]], "c10::BFloat16"), gloo("broadcast", [[500]], "long int")]
    events.append({**gloo("barrier", [], ""), "args": {}})
    groups = [{"pg_name": name, "ranks": [0, 1], "pg_size": 2} for name in ("0", "1")]
    found = read_links([trace(tmp_path, 0, events, groups)])
    assert [(each.call, each.size_bytes, each.ranks) for each in found.calls] == [
        ("all_reduce", 2000, (0, 1)), ("broadcast", 4000, (0, 1)),
    ]  # fmt: skip
    assert found.skipped == {"barrier, which is not a supported collective": 1}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"In msg nelems": "x"}, "all_reduce of x and 9 elements"),
        ({"In msg nelems": None}, "all_reduce of None and 9 elements"),
        ({"Out msg nelems": -9}, "all_reduce of 9 and -9 elements"),
        ({"Process Group Ranks": [-1, 2]}, "without the ranks of its group"),
        ({"Process Group Ranks": ["a", 2]}, "without the ranks of its group"),
        ({"Process Group Ranks": "[0, 0]"}, "without the ranks of its group"),
        ({"Process Group Ranks": "", "Group size": 10**9, "Global rank start": 0, "Global rank stride": 1},
         "without the ranks of its group"),
        ({"dtype": [1]}, r"of dtype '\[1\]'"),
    ],
)  # fmt: skip
def test_kernels_with_wrong_metadata_are_left_out_with_the_reason(changed, says, tmp_path):
    event = reduced(0, 9, 9)
    event["args"] |= changed
    assert len(read_links([trace(tmp_path, 0, [event, reduced(20, 9, 9)])]).calls) == 1
    with pytest.raises(TwofoldError, match=says):
        read_links([trace(tmp_path, 0, [event])])


@pytest.mark.parametrize(
    ("changed", "says"),
    [({"dur": -1}, "not a trace"), ({"ts": 1e30}, "not a trace"), ({"dur": 1e300}, "not a trace"),
     ({"args": None}, "without the size of their message"), ({"args": {"External id": [1]}}, "without the size")],
)  # fmt: skip
def test_events_that_no_run_has(changed, says, tmp_path):
    with pytest.raises(TwofoldError, match=says):
        read_links([trace(tmp_path, 0, [reduced(0, 9, 9) | changed])])


@pytest.mark.parametrize(
    "info", [{"rank": [1]}, {"rank": "a"}, {"rank": -1}, {"rank": 1.5}, {"rank": True}, {"rank": 2**40}], ids=str
)
def test_a_rank_that_is_none_is_refused_in_a_line(info, tmp_path):
    file = tmp_path / "rank0.json"
    file.write_text(json.dumps({"distributedInfo": info, "traceEvents": [reduced(0, 9, 9)]}))
    with pytest.raises(TwofoldError, match=r"rank0\.json: distributedInfo\.rank is .*not a rank"):
        read_links([file])


@pytest.mark.parametrize(
    "groups", [None, {"a": 1}, ["a"], [{"pg_name": "0", "ranks": "ab"}], [{"ranks": [0]}]], ids=str
)
def test_groups_that_cannot_be_read_are_not_there(groups, tmp_path):
    file = tmp_path / "rank0.json"
    info = {"rank": 0, "pg_config": groups}
    file.write_text(json.dumps({"distributedInfo": info, "traceEvents": [reduced(0, 9, 9)]}))
    assert read_links([file]).calls[0].ranks == (0, 1, 2, 3)


def test_sizes_may_be_at_the_operator_that_issued_the_kernel(machine, tmp_path):
    issued = {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "ts": 0, "dur": 5, "pid": 1, "tid": 1,
              "args": {**reduced(0, 1, 1000)["args"], "External id": 12}}  # fmt: skip
    bare = kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", 10, 20, **{"External id": 12})
    (call,) = read_links([trace(tmp_path, 0, [issued, bare])]).calls
    assert (call.size_bytes, call.ranks, call.num_unseen, call.seconds) == (2000, (0, 1, 2, 3), 3, pytest.approx(2e-5))


def test_a_rank_without_a_trace_makes_times_a_bound(machine, tmp_path, capsys):
    """Of three calls of a single rank the shortest has waited least."""
    events = [reduced(1e5 * at, 1e3 * ms, 200_000_000) for at, ms in enumerate((9, 7.5, 30))]
    found = said(["links", str(trace(tmp_path, 0, events)), "--machine", machine], capsys)
    assert (found["calls"][0]["seconds"], found["tiers"][0]["is_whole"]) == (pytest.approx(7.5e-3), False)


def test_short_messages_give_seconds(machine, tmp_path, capsys):
    """With 50 us to start, 2 kB hang on no bandwidth: 62 us are 12 us more, but for the 0.03 us of its bytes."""
    made = msgspec.json.decode(Path(machine).read_bytes())
    made["collectives"]["all_reduce"]["start_s"] = 5e-5
    Path(machine).write_text(json.dumps(made))
    files = [str(trace(tmp_path, rank, [reduced(0, 62, 1000)])) for rank in range(4)]
    (tier,) = said(["links", *files, "--machine", machine], capsys)["tiers"]
    assert tier["bandwidth_factor"] is None
    assert tier["short_extra_s"] == pytest.approx(12e-6 - 2 * 3 / 4 * 2000 / (100 * GB), abs=1e-11)


TABLE = """# Collective test starting: all_gather_perf
# nThread 1 nGpus 4 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20
#  Rank  0 Group  0 Pid  1 on  node device  0 [0000:07:00] NVIDIA H100
#  Rank  1 Group  0 Pid  1 on  node device  1 [0000:0a:00] NVIDIA H100
#  Rank  2 Group  0 Pid  1 on  node device  2 [0000:47:00] NVIDIA H100
#  Rank  3 Group  0 Pid  1 on  node device  3 [0000:4d:00] NVIDIA H100
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
   100000000       6250000     float    none      -1   1000.0  100.00   75.00      0    990.0  101.01   75.76      0
   200000000      12500000     float    none      -1   1500.0  133.33  100.00      0   1500.0  133.33  100.00      0
# Avg bus bandwidth    : 87.9
"""


def test_a_table_of_nccl_tests(machine, tmp_path, capsys):
    """3/4 x 100 MB / 100 GB/s = 0.75 ms, and 1.5 ms for twice as much; the table's busbw is ours."""
    file = tmp_path / "out.txt"
    file.write_text(TABLE)
    found = said(["links", str(file), "--machine", machine], capsys)
    by_size = {each["size_bytes"]: each for each in found["calls"]}
    assert [by_size[size]["bandwidth_factor"] for size in (10**8, 2 * 10**8)] == pytest.approx([0.75, 1.0], rel=1e-5)
    assert [by_size[size]["bus_Bps"] / GB for size in (10**8, 2 * 10**8)] == pytest.approx([75, 100])
    (tier,) = found["tiers"]
    assert (tier["low"], tier["high"]) == (pytest.approx(0.75, rel=1e-5), pytest.approx(1.0, rel=1e-5))


@pytest.mark.parametrize("time", ["nan", "inf", "-5", "0", "N/A"])
def test_a_row_of_a_table_without_a_time_is_left_out(time, machine, tmp_path, capsys):
    file = tmp_path / "out.txt"
    file.write_text(TABLE.replace("1000.0", time))
    found = said(["links", str(file), "--machine", machine], capsys)
    assert len(found["calls"]) == 1 and found["left_out"] == {"the row of 6250000 elements of float": 1}


LOG = "".join(
    f"node:1:2 [0] NCCL INFO {call} sendbuff 0x7 recvbuff 0x7 {what} op 0 root 0 comm 0x5 [nranks=4] stream 0x5\n"
    for call, what in (
        ("AllReduce: opCount a", "count 1000 datatype 9"), ("ReduceScatter: opCount b", "count 250 datatype 7"),
        ("Send: opCount c", "count 5 datatype 7"),
    )
)  # fmt: skip
"""Lines as NVIDIA/nccl issue 1238 shows them: bfloat16 is type 9, float32 type 7."""


def test_a_log_of_nccl_has_sizes_and_no_times(machine, tmp_path, capsys):
    file = tmp_path / "nccl.log"
    file.write_text(LOG + LOG)  # what is said twice happened once
    found = said(["links", str(file), "--machine", machine], capsys)
    assert {(each["call"], each["size_bytes"], each["times"], each["seconds"]) for each in found["calls"]} == {
        ("all_reduce", 2000, 1, None), ("reduce_scatter", 4000, 1, None),
    }  # fmt: skip
    assert found["tiers"] == [] and found["left_out"] == {"Send of 4 ranks": 1} and found["assumed"]


def told(process: str, device: int, text: str) -> str:
    return f"{process}:9 [{device}] NCCL INFO {text}\n"


def joined(name: str, address: str, rank: int, size: int, end: str) -> str:
    return f"{name} comm {address} rank {rank} nranks {size} cudaDev 0 nvmlDev 0 busId 7000 {end}"


def logs_of_four(folder: Path, call: str, *, split: str = "commId 0xab{colour} - Init START") -> list[str]:
    """Logs of 4 ranks, of which 0 and 2, and 1 and 3, have a communicator of their own; lines as NCCL 2.19 to 2.27
    print them."""
    files = []
    for rank in range(4):
        who, colour = f"host{rank // 2}:{70 + rank}", rank % 2
        lines = [
            told(who, 0, joined("ncclCommInitRank", "0x1", rank, 4, "commId 0xaa - Init START")),
            told(who, 0, joined("ncclCommInitRank", "0x1", rank, 4, "commId 0xaa - Init COMPLETE")),
            told(who, 0, joined("ncclCommSplit", "0x2", rank // 2, 2, split.format(colour=colour))),
            told(
                who, 0, f"AllReduce: opCount 0 sendbuff 0x7 recvbuff 0x7 {call} root 0 comm 0x1 [nranks=4] stream 0x5"
            ),
            *[
                told(
                    who,
                    0,
                    f"AllGather: opCount 0 sendbuff 0x7 recvbuff 0x8 {call} root 0 comm 0x2 [nranks=2] stream 0x5",
                )
            ]
            * 2,
        ]
        if rank == 1:
            lines.append(
                told(who, 0, f"Send: opCount 0 sendbuff 0x7 recvbuff (nil) {call} root 1 comm 0x2 [nranks=2] x")
            )
        if rank == 3:
            lines.append(
                told(who, 0, f"Recv: opCount 0 sendbuff (nil) recvbuff 0x7 {call} root 0 comm 0x2 [nranks=2] x")
            )
        file = folder / f"nccl.{rank}.log"
        file.write_text("".join(lines))
        files.append(str(file))
    return files


@pytest.mark.parametrize(
    "split",
    ["commId 0xab{colour} - Init START", "parent 0x1 splitCount 1 color {colour} key 0- Init START",
     "parent 0x1 color {colour} key 0 commId 0xab{colour} - Init START"],
)  # fmt: skip
def test_logs_of_all_ranks_give_groups_and_count_each_call_once(split, tmp_path):
    """1000 bfloat16; with opCount at 0 throughout, as NCCL 2.27 prints it on a single node."""
    files = logs_of_four(tmp_path, "count 1000 datatype 9 op 0", split=split)
    found = read_links(files)
    seen = sorted((each.call, each.size_bytes, each.ranks) for each in found.calls)
    assert seen == sorted([
        ("all_reduce", 2000, (0, 1, 2, 3)), *[("all_gather", 4000, ranks) for ranks in ((0, 2), (1, 3))] * 2,
        ("transfer", 2000, (1, 3)),
    ])  # fmt: skip
    assert not found.skipped and not found.assumed and found.source == "4 logs of NCCL, which have no times"
    folder = tmp_path / "logs"
    folder.mkdir()
    for file in files:
        Path(file).rename(folder / Path(file).name)
    assert read_links([folder]) == found


def test_logs_without_commid_identify_communicators_of_all_ranks(tmp_path):
    """Lines as NCCL 2.10 to 2.16 print them, with two communicators of all ranks."""
    files = []
    for rank in range(4):
        call = "sendbuff 0x7 recvbuff 0x7 count 1000 datatype 9 op 0 root"
        lines = [
            f"comm 0xa{rank} rank {rank} nranks 4 cudaDev {rank} busId 7000 - Init COMPLETE",
            f"comm 0xb{rank} rank {rank} nranks 4 cudaDev {rank} busId 7000 - Init COMPLETE",
            f"AllReduce: opCount 1 {call} 0 comm 0xa{rank} [nranks=4] stream 0x5",
            f"AllGather: opCount 1 {call} 0 comm 0xb{rank} [nranks=4] stream 0x5",
            f"Send: opCount 2 {call} {(rank + 1) % 4} comm 0xa{rank} [nranks=4] stream 0x5",
        ]
        files.append(tmp_path / f"nccl.{rank}.log")
        files[-1].write_text("".join(told(f"host:{80 + rank}", rank, line) for line in lines))
    found = read_links(files)
    everyone = (0, 1, 2, 3)
    assert sorted((each.call, each.ranks) for each in found.calls) == sorted(
        [("all_reduce", everyone), ("all_gather", everyone), *(("transfer", (at, (at + 1) % 4)) for at in everyone)]
    )
    assert not found.assumed


def test_logs_of_some_ranks_list_assumptions(tmp_path):
    found = read_links(logs_of_four(tmp_path, "count 1000 datatype 9 op 0")[:2])
    assert {each.ranks for each in found.calls} == {(0, 1, 2, 3), (0, 1)}
    assert "some of their ranks have no log" in found.assumed[0] and found.skipped == {"Send of 2 ranks": 1}
    (tmp_path / "again.log").write_text(told("host0:70", 0, joined("x", "0x1", 3, 4, "commId 0xaa - Init START"))
                                        + (tmp_path / "nccl.0.log").read_text())  # fmt: skip
    with pytest.raises(TwofoldError, match="host0:70 is rank 3 and rank 0 of one communicator"):
        read_links([tmp_path / "again.log"])


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("nranks=4", "nranks=3000000000000", "no communication of a known size"),  # no line of NCCL
        ("count 1000 ", "count 10000000000000000 ", "no communication of a known size"),
        ("root 0", "root 4", "node:1 names rank 4 of a communicator of 4 ranks"),
    ],
)
def test_numbers_that_no_log_of_nccl_has_are_refused(before, after, message, tmp_path):
    (tmp_path / "nccl.log").write_text(LOG.splitlines()[0].replace(before, after))
    with pytest.raises(TwofoldError, match=message):
        read_links([tmp_path / "nccl.log"])


def observed(rank: int, folder: Path) -> None:
    """What torch itself writes of an all-reduce, an all-gather and a transfer."""
    observer = torch.profiler.ExecutionTraceObserver()
    observer.register_callback(str(folder / f"rank{rank}.json"))
    values, gathered = torch.ones(1000), torch.empty(2000)
    observer.start()
    dist.all_reduce(values)
    dist.all_gather(list(gathered.chunk(2)), values)
    (dist.send if rank == 0 else dist.recv)(values, 1 - rank)
    observer.stop()
    observer.unregister_callback()


@pytest.mark.ranks
def test_execution_traces_of_torch(tmp_path):
    run_on_ranks(observed, 2, tmp_path)
    found = read_links([tmp_path / f"rank{rank}.json" for rank in range(2)])
    assert [(each.call, each.size_bytes, each.ranks, each.seconds) for each in found.calls] == [
        ("all_reduce", 4000, (0, 1), None), ("all_gather", 8000, (0, 1), None), ("transfer", 4000, (0, 1), None),
    ]  # fmt: skip
    assert found.source == "2 Chakra execution traces" and not found.skipped


def linked(rank: int, length_us: float) -> dict:
    """An execution trace of torch with the kernels of a Kineto trace, as chakra_trace_link writes it."""
    inputs = {"values": [], "shapes": [], "types": []}
    said = {"collective_name": "allreduce", "dtype": "BFloat16", "in_msg_nelems": 200_000_000,
            "out_msg_nelems": 200_000_000, "pg_name": "7", "pg_size": 4, "global_rank_start": 0,
            "global_rank_stride": 1}  # fmt: skip
    attributes = [{"name": name, "type": "uint64", "value": value} for name, value in said.items()]
    groups = json.dumps([{"pg_name": "7", "ranks": [0, 1, 2, 3], "group_size": 4}])
    first = {"id": 3, "name": "## process_group:init ##", "ctrl_deps": 2, "attrs": [],
             "inputs": {"values": [groups], "shapes": [[]], "types": ["String"]}}  # fmt: skip
    issued = {"id": 9, "name": "record_param_comms", "ctrl_deps": 2, "attrs": attributes, "inputs": inputs}
    ran = {"cat": "kernel", "name": "ncclDevKernel_AllReduce", "ts": 500, "inclusive_dur": length_us, "stream": 7}
    return {"schema": "1.1.1-chakra.0.0.4", "nodes": [first, issued, {**issued, "id": 10, **ran}]}


@pytest.mark.parametrize(("before", "after"), [("1000", "1e308"), ('group_size\\": 4', 'group_size\\": 4294967296')])
def test_execution_traces_that_no_run_has_are_refused(before, after, tmp_path):
    text = json.dumps(linked(0, 1000))
    assert before in text
    (tmp_path / "rank0.json").write_text(text.replace(before, after))
    with pytest.raises(TwofoldError, match="not a Chakra execution trace"):
        read_links([tmp_path / "rank0.json"])


def test_linked_execution_traces_have_times(machine, tmp_path, capsys):
    """As kernels of a profile do: 8 ms instead of 6 on the rank that came last."""
    for rank, length_us in enumerate((9_000, 8_000, 8_500, 9_500)):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(linked(rank, length_us)))
    files = [str(tmp_path / f"rank{rank}.json") for rank in range(4)]
    (call,) = said(["links", *files, "--machine", machine], capsys)["calls"]
    assert (call["size_bytes"], call["num_ranks"], call["seconds"]) == (400_000_000, 4, pytest.approx(8e-3))
    assert (call["waited_s"], call["bandwidth_factor"]) == (pytest.approx(1.5e-3), pytest.approx(0.75, rel=1e-5))


def test_nodes_of_chakra_and_a_file_of_groups(machine, tmp_path, capsys):
    """Objects one after another, 64-bit numbers as texts, as protobuf writes JSON; 100 MB all-reduced by ranks 4 to 7:
    2 x 3/4 x 100 MB / 100 GB/s = 1.5 ms; gathered by all 8: 7 times 8 MB that each sends, over 10 GB/s."""
    folder = tmp_path / "chakra"
    folder.mkdir()
    for rank in range(8):

        def attribute(name: str, value: object, kind: str = "int64Val") -> dict:
            return {"name": name, kind: str(value)}

        nodes: list[dict] = [{"version": "0.0.4"}, {"id": "1", "name": "f", "type": "COMP_NODE", "durationMicros": "5"}]
        if rank >= 4:
            nodes.append({
                "id": "2", "name": "reduce", "type": "COMM_COLL_NODE", "startTimeMicros": "10",
                "durationMicros": "3000", "attr": [attribute("comm_type", 0), attribute("comm_size", 10**8),
                                                   attribute("pg_name", "1", "stringVal")],
            })  # fmt: skip
        nodes.append({"id": "3", "name": "gather", "type": "COMM_COLL_NODE",
                      "attr": [attribute("comm_type", 2), attribute("comm_size", 8 * 10**6)]})  # fmt: skip
        (folder / f"trace.{rank}.json").write_text("\n".join(json.dumps(node, indent=2) for node in nodes))
    (folder / "comm_group.json").write_text(json.dumps({"1": [4, 5, 6, 7]}))
    found = said(["links", str(folder), "--machine", machine], capsys)
    calls = {each["call"]: each for each in found["calls"]}
    assert (calls["all_reduce"]["num_ranks"], calls["all_reduce"]["seconds"]) == (4, pytest.approx(3e-3))
    assert calls["all_reduce"]["predicted_s"] == pytest.approx(1.5e-3)
    assert (calls["all_gather"]["num_ranks"], calls["all_gather"]["seconds"]) == (8, None)
    assert calls["all_gather"]["size_bytes"] == 64 * 10**6
    assert "comm_size is what a rank sends" in found["assumed"][0]


def test_with_the_plan_of_a_run_a_change_of_links_is_simulated(tmp_path, capsys):
    """Traces of links that are half as fast; with the plan the answer is that of simulating on such a machine."""
    fast, slow = Machine.load("h100-sxm-x8"), tmp_path / "slow.json"
    msgspec.structs.replace(fast, name="slow", links=(fast.links[0].scaled(0.5, 1.0), *fast.links[1:])).save(slow)
    plan, traces = str(tmp_path / "plan.json"), str(tmp_path / "traces")
    degrees = ["--global-batch", "2", "--devices", "4", "--tp", "2", "--pp", "2", "--micro-batch", "1"]
    degrees += ["--schedule", "1f1b", "--recompute", "none", "--zero", "0"]
    assert main(["plan", "llama-3-8b", "--layers", "2", "--machine", str(slow), *degrees, "--out", plan]) == 0
    assert main(["simulate", plan, "--machine", str(slow), "--no-fold", "--rank-traces", traces]) == 0
    capsys.readouterr()
    asked = ["links", traces, "--machine", "h100-sxm-x8", "--link", "0:bandwidth=2"]
    found = said([*asked, "--plan", plan], capsys)["simulated"]
    steps = {}
    for name in (str(slow), "h100-sxm-x8"):
        steps[name] = said(["simulate", plan, "--machine", name], capsys)["step_s"]
    assert found["seen"]["step_s"] == pytest.approx(steps[str(slow)], rel=1e-3)
    assert found["changed"]["step_s"] == pytest.approx(steps["h100-sxm-x8"], rel=1e-3)
    assert main(asked) == 0 and "--plan PLAN simulates it" in capsys.readouterr().out
    assert main([*asked, "--plan", plan]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"Simulated on the links as measured \(NVLink:bandwidth=0\.(5|50\d+|499\d+)\): step", shown)
    assert "Simulated with 0:bandwidth=2: step" in shown


def test_a_plan_of_fewer_ranks_is_refused(machine, tmp_path, capsys):
    plan = str(tmp_path / "plan.json")
    degrees = ["--global-batch", "2", "--devices", "2", "--tp", "2"]
    assert main(["plan", "llama-3-8b", "--layers", "1", "--machine", machine, *degrees, "--out", plan]) == 0
    file = trace(tmp_path, 0, [reduced(0, 8_000, 1000)])
    capsys.readouterr()
    assert main(["links", str(file), "--machine", machine, "--plan", plan]) == 2
    assert "rank 3 communicates in the traces" in capsys.readouterr().err


def test_traces_that_simulate_writes_give_the_links_that_it_simulated(tmp_path, capsys):
    """A machine whose NVLink is half as fast, read beside the one that it was made of."""
    fast, slow = Machine.load("h100-sxm-x8"), tmp_path / "slow.json"
    msgspec.structs.replace(fast, name="slow", links=(fast.links[0].scaled(0.5, 1.0), *fast.links[1:])).save(slow)
    plan = ["plan", "llama-3-8b", "--layers", "1", "--machine", str(slow), "--global-batch", "2", "--tp", "8", "--dp",
            "1", "--pp", "1", "--micro-batch", "1", "--schedule", "1f1b"]  # fmt: skip
    assert main([*plan, "--out", str(tmp_path / "plan.json")]) == 0
    traces = str(tmp_path / "traces")
    asked = ["simulate", str(tmp_path / "plan.json"), "--machine", str(slow), "--no-fold", "--rank-traces", traces]
    assert main(asked) == 0
    capsys.readouterr()
    (tier,) = said(["links", traces, "--machine", "h100-sxm-x8"], capsys)["tiers"]
    assert tier["bandwidth_factor"] == pytest.approx(0.5, rel=1e-3)
    assert tier["is_whole"] and tier["is_alone"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "hello", "a table of nccl-tests with its lines of ranks, or a log"),
        ("a.txt", TABLE.replace("Collective test starting: all_gather_perf", ""), "it does not say which test ran"),
        ("rank0.json", '{"traceEvents": []}', "no communication of a known size"),
        ("rank0.json", "{}", "not a trace of torch's profiler"),
        (
            "rank0.json",
            '{"schema": "1.1.1-chakra.0.0.4", "nodes": [{"id": 1}]}',
            "not a Chakra execution trace in JSON",
        ),
        ("rank0.json", '{"schema": "1.1.1-chakra.0.0.4", "nodes": [', "not a complete JSON file"),
        ("one.json", '{"schema": "1.1.1-chakra.0.0.4", "nodes": []}', "does not contain its rank"),
    ],
)
def test_files_without_communication_are_refused_in_one_line(name, text, message, machine, tmp_path, capsys):
    file = tmp_path / name
    file.write_text(text)
    assert main(["links", str(file), "--machine", machine]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_ranks_and_links_that_the_machine_has_not(machine, tmp_path, capsys):
    file = trace(tmp_path, 0, [reduced(0, 9, 1000, "[0, 9]")])
    assert main(["links", str(file), "--machine", machine]) == 2
    assert "rank 9 is used" in capsys.readouterr().err
    assert main(["links", str(file), "--machine", "torus-4x4x4"]) == 2
    assert "are a graph" in capsys.readouterr().err
    with pytest.raises(TwofoldError, match="both belong to rank 0"):
        read_links([file, file])
