"""Runs a function in several gloo processes of this host, once, and hands back what each of them saved.

The processes are forked from one server that has imported torch and the executor: importing them again in every rank
would take longer than what most tests run. The server computes nothing, so it has no threads that a fork would lose.
"""

import faulthandler
import os
import warnings
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_S = 150  # ranks may wait long where two cores are busy otherwise
IMPORTED_ONCE = ["torch", "torch.distributed", "executor.train.run", "executor.capture", "search", "pytest", "scipy.sparse"]

forkserver.set_forkserver_preload(IMPORTED_ONCE)


def run_on_ranks(work: Callable[[int, Path], None], num_ranks: int, folder: Path) -> None:
    """Call `work(rank, folder)` on every rank of one gloo group; a failing or hanging rank fails the test."""
    mp.start_processes(_rank, (num_ranks, work, folder), nprocs=num_ranks, start_method="forkserver")


def _rank(rank: int, num_ranks: int, work: Callable[[int, Path], None], folder: Path) -> None:
    warnings.simplefilter("error")
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", LOCAL_WORLD_SIZE=str(num_ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks)
    work(rank, folder)
    dist.barrier()
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
