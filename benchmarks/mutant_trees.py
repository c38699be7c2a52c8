"""Copies of this tree in which tests run with one file changed, and which tests belong to which room."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["ROOMS", "Trees"]

_ROOT = Path(__file__).parents[1]
ROOMS = {  # the tests of a part of the core, and of what is built on it
    "costmodels/fit": "fit rules_fit power calibrate_sections refit machine_catalogue host_file price_forms "
    "network_benchmark",
    "costmodels/machine": "machine_file machine_catalogue network host_file load price fit network_benchmark "
    "simulator_network links power pairs leave_one_out price_forms critical_path "
    "cli_mistakes",
    "costmodels/price": "price clocks power network machine_file load price_forms search_bounds software "
    "simulator_fluid simulator_streams scale fuse operators simulator_folding receives "
    "simulator_predict simulator_contention pairs search_explain",
    "executor/capture": "capture capture_straight capture_blocks capture_repeats recognise capture_modules "
    "sharding sources compiled_step models_on_meta",
    "executor/reference": "reference executor_run mixed_precision evaluate sharding capture_straight "
    "capture_blocks operators_ranks compiled_step",
    "executor/step": "executor_comm executor_interpreter streams in_place executor_run operators_ranks "
    "optimizer_parallel_ranks compiled_step mixed_precision interleave replicas fuse "
    "capture_blocks step_check redistribution_ranks",
    "executor/train": "data initial sources rows training_job replicas checkpoint executor_run evaluate "
    "weights_files clocks reference interleave alike latent experts_ranks sharding "
    "operators_ranks training_watch",
    "plans/degrees": "degrees families cli_flags scale float8 experts latent lowering_alone scale_grid "
    "scale_recompute scale_levels scale_experts scale_stacks search_statement "
    "forecast_blocks cli_mistakes study turns experts_ranks search_turns uniform",
    "plans/lower": "lowering lowering_alone in_place receives interleave optimizer_parallel "
    "operator_bodies fuse executor_run optimizer_parallel_ranks latent experts sharding "
    "plan_file simulator_memory mixed_precision streams simulator_properties replicas "
    "transformer scale search forecast_blocks simulator_folding price_forms "
    "operators_ranks turns uniform compiled_step",
    "plans/model": "transformer families tables lowering scale latent experts search published_tables "
    "operator_bodies optimizer_parallel scale_experts scale_stacks fuse operators sharding "
    "forecast_blocks models_on_meta turns experts_ranks recognise library_transformers",
    "plans/operators": "operators executor_rules tables kernel_numerics redistribution lowering search "
    "experts extensions latent operators_ranks capture sharding",
    "plans/redistribution": "redistribution redistribution_exact redistribution_reshape redistribution_stored "
    "redistribution_fastest redistribution_ranks executor_rules executor_comm "
    "redistribution_dtensor simulator_folding search sharding",
    "plans/schedules": "schedules schedule_orders schedule_torch simulator_pipeline_oracle simulator_memory "
    "simulator_closed_forms simulator_properties forecast_columns simulator_contention "
    "search_bounds scale executor_run",
    "search/devices": "search_bounds scale scale_grid scale_levels scale_stacks scale_recompute "
    "search_statement degrees software scale_order search_turns search_explain "
    "search_weaknesses search_scale",
    "search/operators": "search search_moves search_bounds search_linear search_placements search_exact "
    "search_shapes search_blocks search_statement redistribution_stored operators_ranks "
    "search_ways search_dual",
    "simulator/engine": "simulator_engine simulator_streams simulator_memory simulator_network "
    "simulator_overlap simulator_fluid simulator_folding simulator_check "
    "simulator_deadlock simulator_contention simulator_properties simulator_closed_forms "
    "simulator_longest_path simulator_pipeline_oracle simulator_predict simulator_buffers "
    "clocks receives",
    "simulator/forecast": "forecast_maxplus forecast_columns forecast_blocks scale_grid degrees "
    "simulator_pipeline_oracle scale scale_recompute scale_levels scale_experts "
    "scale_stacks latent float8 study software turns scale_order search_turns "
    "search_explain one_world",
    "simulator/stacks": "scale_stacks software validation float8 scale tables published_tables leave_one_out "
    "host_file peers",
    "simulator/study": "goodput whatif study simulator_jobs cli_mistakes reports_pages whatif_command",
    "simulator/timeline": "simulator_longest_path critical_path simulator_memory simulator_closed_forms "
    "profiler_trace simulator_analysis simulator_buffers simulator_streams "
    "reports_pictures reports_trace links",
}
_COPIED = (
    "plans", "costmodels", "simulator", "search", "executor", "interop", "reports", "twofold", "tests", "benchmarks",
    "examples", "docs", "pyproject.toml",
)  # fmt: skip
_MEMORY_KIB = 16 << 20  # of one process: a mutant may ask for any size
_TAKEN = ("Address already in use", "EADDRINUSE")


class Trees:
    """Copies of the tree, one a worker.

    Args:
        folder: empty; copies and everything that tests write are in it.
        count: copies.
        stop_s: of the monotonic clock; tests that run then are ended.
    """

    def __init__(self, folder: Path, count: int, stop_s: float) -> None:
        self._stop_s, self._takes_s, self._changes, self._lock = stop_s, dict[str, float](), 0, threading.Lock()
        self.failing: list[str] = []
        """Tests, or complete files of them, that fail without a mutant; they are left out."""
        self._free: queue.Queue[Path] = queue.Queue()
        for number in range(count):
            tree = folder / str(number)
            tree.mkdir()
            for part in _COPIED:
                if (_ROOT / part).is_dir():
                    shutil.copytree(_ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(_ROOT / part, tree / part)
            self._free.put(tree)

    def measure(self, paths: set[str]) -> None:
        """Run the tests of these files' rooms without a mutant, and remember how long they take and which fail."""
        files = sorted({name for path in paths for name in _tests(path)}, key=lambda name: -_size(name))

        def run(name: str) -> None:
            tree = self._free.get()
            try:
                begin_s = time.monotonic()
                status, failing, _ = self._run(tree, [name], self._stop_s - begin_s, stop_at_first=False)
                with self._lock:
                    self._takes_s[name] = time.monotonic() - begin_s
                    if status not in (0, 5):  # 5: all are skipped or none is there
                        self.failing += failing or [name]
            except subprocess.TimeoutExpired:
                raise SystemExit(f"--stop came before {name} had run without a mutant") from None
            finally:
                self._free.put(tree)

        with ThreadPoolExecutor(self._free.qsize()) as pool:
            list(pool.map(run, files))
        self.failing.sort()

    def outcome(self, path: str, source: str) -> tuple[str, str]:
        """What tests say of a file with another source, and the test that says it.

        Returns:
            "killed", "survived", "too slow", which is as good as killed, or "unfinished".
        """
        tree = self._free.get()
        try:
            self._write(tree / path, source)
            return self._judged(tree, path)
        finally:
            self._write(tree / path, (_ROOT / path).read_text())
            self._free.put(tree)

    def _judged(self, tree: Path, path: str) -> tuple[str, str]:
        """Tests of several processes may fail by themselves on a busy machine: they must fail twice."""
        stem, doubted = Path(path).stem, list[str]()
        files = sorted(_tests(path), key=lambda name: (stem not in name, self._takes_s[name]))  # the quick ones first
        limit_s = 60 + 3 * sum(self._takes_s[name] for name in files)
        while True:
            left_s = self._stop_s - time.monotonic()
            try:
                status, failing, said = self._run(tree, files, min(limit_s, left_s), without=doubted)
                if status in (0, 5):
                    return "survived", ""
                by = failing[0] if failing else "no test: " + (said.strip().splitlines() or [f"status {status}"])[-1]
                started = "mark.ranks" in (_ROOT / by.partition("::")[0]).read_text() if failing else False
                if not started and not any(sign in said for sign in _TAKEN):
                    return "killed", by
                if not failing or len(doubted) == 3 or self._run(tree, [by], min(limit_s, left_s))[0]:
                    return "killed", by
                doubted.append(by)
            except subprocess.TimeoutExpired:
                return ("too slow", "") if limit_s < left_s else ("unfinished", "")

    def _write(self, path: Path, source: str) -> None:
        path.write_text(source)
        with self._lock:
            self._changes += 1
            os.utime(path, (self._changes, self._changes))  # else a compiled file may be taken for its own

    def _run(
        self,
        tree: Path,
        tests: list[str],
        limit_s: float,
        *,
        stop_at_first: bool = True,
        without: list[str] | None = None,
    ) -> tuple[int, list[str], str]:
        """The status of pytest, the tests that failed, and the end of what was printed."""
        tests = [test for test in tests if test not in self.failing]
        if not tests:
            return 0, [], ""
        scratch, said = tree / "tmp", tree / "said"
        scratch.mkdir()
        hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONHASHSEED": "0"}
        threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS", "NUMEXPR")}
        search = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
        env = os.environ | hidden | threads | {"PYTHONPATH": search, "TMPDIR": str(scratch)}
        command = [sys.executable, "-m", "pytest", "-q", "--tb=line", *(["-x"] if stop_at_first else [])]
        command += ["-o", f"cache_dir={scratch}/cache", "-o", "faulthandler_exit_on_timeout=true"]
        command += [part for test in (*self.failing, *(without or ())) for part in ("--deselect", test)]
        command += tests
        limited = ["sh", "-c", f'ulimit -d {_MEMORY_KIB} 2>/dev/null; exec "$@"', "sh", *command]
        try:
            with said.open("wb") as out, subprocess.Popen(
                limited, cwd=tree, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            ) as run:  # fmt: skip
                try:
                    status = run.wait(max(limit_s, 0.0))
                except subprocess.TimeoutExpired:
                    os.killpg(run.pid, signal.SIGKILL)
                    raise
            failed = scratch / "cache/v/cache/lastfailed"
            failing = list(json.loads(failed.read_text())) if failed.exists() else []
            return status, failing, said.read_text(errors="replace")[-4000:]
        finally:
            _end_all(f"TMPDIR={scratch}".encode())
            shutil.rmtree(scratch, ignore_errors=True)


def _tests(path: str) -> list[str]:
    return [f"tests/test_{name}.py" for name in next(ROOMS[room] for room in ROOMS if path.startswith(room)).split()]


def _size(test: str) -> int:
    return (_ROOT / test).stat().st_size


def _end_all(variable: bytes) -> None:
    """End the processes that tests left, which have this variable in their environment."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if variable in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:  # gone, or of another user
            continue
