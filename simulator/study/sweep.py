"""Computes the points of a study in several processes, on one or several machines, each point once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from plans.errors import TwofoldError, whole_number
from simulator.study.store import Store, key_of

__all__ = ["BACKENDS", "Workers", "sweep"]

BACKENDS = ("sequential", "loky", "dask")

_AT_ONCE = 16
"""Points that a worker is given at a time: about a second of work, little to lose when a study is stopped."""

Evaluate = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The processes that compute the points of a study.

    Args:
        backend: of joblib: loky (processes of this machine), dask (also of others), or sequential (this process).
        jobs: processes; -1 is one for every core. Of Dask: of a local cluster, where no scheduler is named.
        scheduler: address of a Dask scheduler, such as tcp://host:8786.

    Raises:
        TwofoldError: another backend, no process, a scheduler without Dask.
    """

    backend: str = "loky"
    jobs: int = -1
    scheduler: str | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise TwofoldError(f"backend {self.backend!r} is not known; known are {', '.join(BACKENDS)}")
        if self.jobs != -1:
            whole_number("jobs", self.jobs)
        if self.scheduler is not None and self.backend != "dask":
            raise TwofoldError("scheduler needs backend dask; add it, or omit the scheduler")


def sweep(
    points: Sequence[Mapping[str, Any]],
    evaluate: Evaluate,
    *,
    store: Store,
    workers: Workers | None = None,
    is_searched: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """The figures of all points, in their order; those in the store are not computed again.

    Args:
        points: settings of each.
        evaluate: the figures of one; it must be possible to send it to a process.
        store: of earlier results; every result is added when it is available.
        workers: who computes; all cores of this machine by default.
        is_searched: whether `evaluate` searches; such results are stored separately.
        on_progress: called with (points done, points to compute) at the start and after every few of them.

    Raises:
        ModuleNotFoundError: Dask is requested and not installed.
        TwofoldError: a scheduler that does not answer.
    """
    keys = [key_of(settings, is_searched=is_searched) for settings in points]
    wanted = {key: settings for key, settings in zip(keys, points, strict=True) if key not in store}
    tell = on_progress or (lambda done, count: None)
    tell(0, len(wanted))
    for done, (key, figures) in enumerate(_computed(list(wanted.items()), evaluate, workers or Workers(), is_searched)):
        store.add(key, wanted[key], figures)
        tell(done + 1, len(wanted))
    return [store[key] for key in keys]


Keyed = tuple[str, Mapping[str, Any]]


def _computed(
    wanted: list[Keyed], evaluate: Evaluate, workers: Workers, is_searched: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Keys and figures in the order in which they are computed."""
    import joblib

    size = 1 if is_searched else _AT_ONCE
    parts = [wanted[first : first + size] for first in range(0, len(wanted), size)]
    if len(parts) < 2 or workers.backend == "sequential":
        for each in wanted:
            yield from _evaluated([each], evaluate)
        return
    with _at_work(workers):
        for part in joblib.Parallel(return_as="generator_unordered")(
            joblib.delayed(_evaluated)(part, evaluate) for part in parts
        ):
            yield from part


def _evaluated(part: list[Keyed], evaluate: Evaluate) -> list[tuple[str, dict[str, Any]]]:
    return [(key, evaluate(settings)) for key, settings in part]


@contextmanager
def _at_work(workers: Workers) -> Iterator[None]:
    """joblib's backend, and a Dask cluster if one is requested."""
    import joblib

    if workers.backend == "loky":
        with joblib.parallel_config(backend="loky", n_jobs=workers.jobs):
            yield
        return
    from distributed import Client, LocalCluster

    cluster = None
    if workers.scheduler is None:
        count = None if workers.jobs == -1 else workers.jobs
        cluster = LocalCluster(n_workers=count, threads_per_worker=1, dashboard_address=None, host="127.0.0.1")
    try:
        with Client(workers.scheduler if cluster is None else cluster), joblib.parallel_config(backend="dask"):
            yield
    except OSError as error:
        raise TwofoldError(f"the Dask scheduler {workers.scheduler} does not answer: {error}") from None
    finally:
        if cluster is not None:
            cluster.close()
