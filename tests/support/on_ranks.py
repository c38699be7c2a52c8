"""Runs a function in several gloo processes of this host, once; plans for them are lowered once and not by every rank.

The processes are forked from the server of `tests.support.warm`, which has imported torch and the executor.
"""

import faulthandler
import gc
import os
import pickle
import socket
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from plans.lower import lower
from plans.plan import Plan
from plans.program import Program
from tests.support import warm

TIMEOUT_S = 150  # ranks may wait long where two cores are busy otherwise


def run_on_ranks(work: Callable[[int, Path], None], num_ranks: int, folder: Path, *, joined: bool = True) -> None:
    """Call `work(rank, folder)` on every rank of one gloo group; a failing or hanging rank fails the test.

    With `joined=False` ranks find torchrun's variables in their environment and no group: `work` joins one by itself.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    warm.ensure_running()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))  # for torch's files of errors, which stay
        mp.start_processes(_rank, (num_ranks, work, folder, port, joined), nprocs=num_ranks, start_method="forkserver")


_LOWERED: dict[int, tuple[Plan, Program]] = {}


def lowered(plan: Plan) -> Program:
    """`lower`, once for each plan: a rank runs some of them again and again."""
    if id(plan) not in _LOWERED:
        _LOWERED[id(plan)] = plan, lower(plan)
    return _LOWERED[id(plan)][1]


def keep_plan(plan: Plan, path: Path) -> None:
    """Write a plan and its program for all ranks."""
    path.write_bytes(pickle.dumps((plan, lower(plan))))


def kept_plan(path: Path) -> tuple[Plan, Program]:
    """The plan and the program that `keep_plan` wrote."""
    plan, program = pickle.loads(path.read_bytes())
    return plan, program


def _rank(rank: int, num_ranks: int, work: Callable[[int, Path], None], folder: Path, port: int, joined: bool) -> None:
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    warnings.simplefilter("error")
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    if joined:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks)
    work(rank, folder)
    if joined:
        dist.barrier()
        dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
