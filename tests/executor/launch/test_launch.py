"""Launching ranks: what reaches them, where their output goes, and how everything ends when one of them fails.

Most scripts wait for files that other processes write, never for a time to pass.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from executor.launch import job_main
from executor.launch.job import Job, Task
from executor.launch.launch import WORKER_MAIN, Follow, LaunchResult, Nodes, launch
from executor.launch.rank_failures import RankFailed, RunFailed, RunTimedOut, first_failure, timed_out
from executor.launch.rank_logs import JobFolder, LineReader, fresh_folders
from executor.launch.worker_main import AGENT_PID, is_lost_peer, report_exception
from executor.user_code import UserCodeError, running_user_code
from plans.errors import TrainingStopped, TwofoldError

TOKEN = "TWOFOLD_TEST_TOKEN"
PATIENCE_S = 60
HANG = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
def hang():
    signal.signal(signal.SIGTERM, lambda *_: None)  # as a rank inside a collective: deaf to it
    print("hanging", flush=True)
    while True:
        time.sleep(1)
"""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def write(body: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(HANG + textwrap.dedent(body))
        return path

    return write


@pytest.fixture
def job(tmp_path: Path) -> JobFolder:
    return JobFolder(log_dir=tmp_path / "log_output")


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment that marks all processes of a test; at its end no process and no temporary file may be left."""
    token, temporary = uuid.uuid4().hex, tmp_path / "temporary"
    temporary.mkdir()
    yield {TOKEN: token, "TMPDIR": str(temporary)}
    assert processes_with(token) == []
    # torch keeps what it compiled there for the next process
    assert [each for each in temporary.iterdir() if not each.name.startswith("torchinductor_")] == []


def processes_with(token: str) -> list[str]:
    """The command lines of all running processes with the token in their environment (zombies have none)."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{TOKEN}={token}".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has just ended, or belongs to somebody else
    return found


# One rank under its guard, without torchrun: what it leaves behind.


def start_rank(
    job: JobFolder, path: Path, env: dict[str, str], rank: int = 0, local_ranks: range | None = None,
    main: Path = WORKER_MAIN,
) -> subprocess.Popen[bytes]:  # fmt: skip
    local_ranks = local_ranks or range(rank, rank + 1)
    command = [sys.executable, str(main), "rank", str(job.path), "script", str(path)]
    numbers = {"RANK": rank, "LOCAL_RANK": rank - local_ranks.start, "LOCAL_WORLD_SIZE": len(local_ranks)}
    stated = {AGENT_PID: str(os.getpid())} | {name: str(number) for name, number in numbers.items()}
    return subprocess.Popen(command, env=os.environ | env | stated, start_new_session=True)


def run_rank(job: JobFolder, path: Path, env: dict[str, str]) -> int:
    return start_rank(job, path, env).wait(PATIENCE_S)


def test_a_rank_begins_when_all_of_its_machine_have_started(script, job, env):
    """One that connects while the agent still forks can make the next one hang forever."""
    look = script("""
        from pathlib import Path
        folder = Path(os.environ["TWOFOLD_RANK_FOLDER"]).parent
        print(*sorted(path.parent.name for path in folder.glob("*/pids.json")))
        """)
    first = start_rank(job, look, env, rank=2, local_ranks=range(2, 4))
    wait_until(lambda: job.read(2, "pids.json") is not None)
    second = start_rank(job, look, env, rank=3, local_ranks=range(2, 4))
    assert first.wait(PATIENCE_S) == second.wait(PATIENCE_S) == 0
    assert job.stdout(2).read_text() == job.stdout(3).read_text() == "rank.2 rank.3\n"


def test_a_rank_that_waits_for_another_to_start_can_be_ended(script, job, env):
    guard = start_rank(job, script("print('begun')"), env, local_ranks=range(2))
    wait_until(lambda: job.read(0, "pids.json") is not None)
    guard.terminate()
    assert guard.wait(PATIENCE_S) == 128 + signal.SIGKILL
    assert job.read(0, "end.json")["told_to_end"] and job.stdout(0).read_text() == ""


def test_a_rank_waits_for_others_only_so_long(script, job, env, tmp_path):
    """A guard that was stopped before it wrote its number must not keep the others forever."""
    quick = tmp_path / "worker_main.py"
    quick.write_text(WORKER_MAIN.read_text().replace("START_WAIT_S = 30.0", "START_WAIT_S = 0.1"))
    guard = start_rank(job, script("print('begun')"), env, local_ranks=range(2), main=quick)
    assert guard.wait(PATIENCE_S) == 0 and job.stdout(0).read_text() == "begun\n"


def test_a_guard_that_cannot_write_ends_with_its_rank(script, job, env):
    """Else all ranks would wait for its number."""
    folder = job.path / "rank.0"
    (folder / "pids.json.new").mkdir(parents=True)  # as on a full disk: no such file can be made
    assert run_rank(job, script("print('begun')"), env) == 1
    assert "cannot write" in (folder / "stderr").read_text() and (folder / "stdout").read_text() == ""


def test_a_guard_ends_if_its_agent_dies_while_it_writes_how_its_rank_ended(script, job, env, tmp_path):
    """It ignores the agent's signal then, and torchrun would let it wait for the guards of other ranks."""
    faulty, waits = tmp_path / "worker_main.py", tmp_path / "waits"
    writes = '    write_json(os.path.join(folder, "end.json"), end)\n'
    runs = "            run_guard(sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5:])\n"
    kills = "    os.kill(agent_pid, 9)\n    while os.getppid() == agent_pid:\n        time.sleep(0.01)\n"
    text = WORKER_MAIN.read_text()
    assert writes in text and runs in text
    faulty.write_text(
        text.replace(writes, kills + writes).replace(runs, f"{runs}            open({str(waits)!r}, 'w')\n")
    )
    agent = "import os, subprocess, sys\nos.environ[sys.argv[1]] = str(os.getpid())\nsubprocess.run(sys.argv[2:])"
    command = [sys.executable, "-c", agent, AGENT_PID, sys.executable, str(faulty), "rank", str(job.path), "script"]
    numbers = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    ran = subprocess.run([*command, str(script("print('done')"))], env=os.environ | env | numbers, check=False)
    assert ran.returncode == -signal.SIGKILL
    guard = job.read(0, "pids.json")["guard"]
    wait_until(lambda: not Path(f"/proc/{guard}").exists())
    assert job.read(0, "end.json")["code"] == 0 and not waits.exists()


@pytest.mark.parametrize("ending", ["", "sys.exit()", "sys.exit(0)", "os._exit(0)"])
def test_a_rank_that_ends_well_is_no_failure(ending, script, job, env):
    assert run_rank(job, script(ending), env) == 0
    assert first_failure(job, [0]) is None


@pytest.mark.parametrize(
    ("ending", "headline"),
    [
        ("sys.exit(3)", "ended with exit code 3"),
        ("sys.exit('no data here')", "ended with exit code 1: no data here"),
        ("os._exit(5)", "ended with exit code 5"),
        ("raise KeyError('w')", "failed: KeyError: 'w'"),
        ("import no_such_module", "failed: ModuleNotFoundError: No module named 'no_such_module'"),
        ("x = = 1", "failed: SyntaxError: invalid syntax"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("os.kill(os.getppid(), signal.SIGTERM); hang()", "was terminated by SIGTERM"),
        ("raise ConnectionResetError('peer')", "lost its connection to another rank"),
    ],
)
def test_the_failure_states_how_the_rank_ended(ending, headline, script, job, env):
    assert run_rank(job, script(ending), env) != 0
    failure = first_failure(job, [0])
    assert failure is not None
    assert failure.headline.startswith(headline)


def test_the_traceback_shows_the_users_frames_only(script, job, env):
    path = script("def step():\n    return 1 / 0\nstep()")
    run_rank(job, path, env)
    story = first_failure(job, [0]).story
    assert story in job.stderr(0).read_text()
    assert [line.split(",")[0].strip() for line in story.splitlines() if "File" in line] == [f'File "{path}"'] * 2
    assert story.startswith("Traceback") and story.endswith("ZeroDivisionError: division by zero\n")


def test_a_segmentation_fault_leaves_its_python_stack(script, job, env):
    path = script("def step():\n    os.kill(os.getpid(), signal.SIGSEGV)\nstep()")
    run_rank(job, path, env)
    message = str(first_failure(job, [0]).error(job))
    assert f'File "{path}", line' in message and "in step" in message


def test_forgotten_process_groups_are_left(script, job, env):
    body = """
        import types
        fake = types.SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True)
        fake.destroy_process_group = lambda: print("left")
        sys.modules["torch.distributed"] = fake
    """
    run_rank(job, script(body), env)
    assert job.stdout(0).read_text() == "left\n"


def test_the_script_runs_as_python_would_run_it(script, job, env, tmp_path):
    (tmp_path / "signal.py").write_text("")  # next to the script: it may hide the standard library's for the script
    (tmp_path / "helper.py").write_text("value = 7")
    path = tmp_path / "main.py"
    body = """
        import os, sys, helper, signal
        print(__name__, __file__, sys.modules["__main__"].__file__, sys.path[0], helper.value)
    """
    path.write_text(textwrap.dedent(body))
    assert run_rank(job, path, env) == 0
    assert job.stdout(0).read_text().split() == ["__main__", str(path), str(path), str(tmp_path), "7"]


def test_the_cause_is_separated_from_its_consequences(script, job, env):
    """Rank 0 only lost its peer, first by time; rank 1 was ended; rank 2 has an error of its own, the last by time."""
    assert run_rank(job, script("raise ConnectionResetError('reset by peer')"), env) == 1
    guard = start_rank(job, script("hang()"), env, rank=1)
    wait_until(lambda: job.stdout(1).exists() and "hanging" in job.stdout(1).read_text())
    guard.terminate()
    guard.wait()
    assert first_failure(job, [0, 1]).rank == 0
    start_rank(job, script("sys.exit(4)"), env, rank=2).wait()
    assert first_failure(job, [0, 1, 2]).rank == 2


def test_a_rank_ended_with_its_whole_group_is_no_failure_of_its_own(script, job, env):
    """torchrun sends SIGTERM to the guard's group; the rank would leave with a code of its own if it heard it."""
    body = """
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        print("hanging", flush=True)
        while True:
            time.sleep(0.01)
    """
    guard = start_rank(job, script(body), env)
    wait_until(lambda: job.stdout(0).exists() and "hanging" in job.stdout(0).read_text())
    os.killpg(guard.pid, signal.SIGTERM)
    guard.wait(PATIENCE_S)
    assert first_failure(job, [0]).headline == "was terminated by SIGTERM"


def test_a_guard_that_was_killed_is_known_by_its_exit_code(script, job, env):
    assert run_rank(job, script("raise ConnectionResetError('reset by peer')"), env) == 1
    failure = first_failure(job, [0, 1, 2], {0: 1, 1: -signal.SIGTERM, 2: -signal.SIGKILL})
    assert (failure.rank, failure.headline[:21]) == (2, "was killed by SIGKILL")


def test_a_timeout_names_running_ranks_their_place_and_last_output(script, job, env):
    assert run_rank(job, script("print('done')"), env) == 0
    path = script("print('epoch 3')\nhang()")
    guard = start_rank(job, path, env, rank=1)
    wait_until(lambda: job.stdout(1).exists() and "hanging" in job.stdout(1).read_text())
    message = str(timed_out(job, [0, 1, 2], 5.0))
    guard.terminate()
    guard.wait()
    first, *others = message.splitlines()
    assert first == "the run did not end within 5 s: ranks 1, 2 still running; rank 0 ended with exit code 0"
    assert others[0].startswith(f"  rank 1 is in hang ({path} line ") and "last line: hanging" in others[0]
    assert others[1] == "  rank 2 had not started"


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:19376"), True),  # gloo, torch 2.13
        (RuntimeError("Read error [127.0.0.1]:2: Connection reset by peer"), True),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), True),
        (RuntimeError("Read error [10.0.0.2]:2: No route to host"), True),
        (RuntimeError("Write timeout [10.0.0.2]:2"), True),
        (RuntimeError("The client socket has timed out after 60000ms while trying to connect to (10.0.0.2, 1)."), True),
        (BrokenPipeError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"), False),
        (ValueError("connection closed by peer"), False),
    ],
)
def test_a_lost_peer_is_recognised_by_its_message(error, is_lost):
    assert is_lost_peer(error) is is_lost
    outer = ValueError("step failed")
    outer.__cause__ = error
    assert is_lost_peer(outer) is is_lost
    inner = KeyError("own error")
    error.__context__ = inner  # the connection broke while the own error was being handled
    assert is_lost_peer(error) is False


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (ConnectionResetError("the server of the data has gone"), False),
        (RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:19376"), True),
    ],
)
def test_a_lost_connection_of_the_users_data_is_no_lost_peer(error, is_lost):
    with pytest.raises(UserCodeError) as raised, running_user_code("data 'train.py:batches'"):
        raise error
    assert is_lost_peer(raised.value) is is_lost


# The logs.


def test_lines_are_read_once_and_whole(tmp_path):
    path = tmp_path / "stdout"
    path.write_bytes(b"")
    reader = LineReader(path)
    with path.open("ab", buffering=0) as log:
        log.write("one\r\ntw\u00f6".encode()[:-1])
        assert list(reader.lines()) == ["one"]
        log.write("\u00f6".encode()[-1:] + b"\n\nlast")
        assert list(reader.lines()) == ["tw\u00f6", ""]
    assert list(reader.lines(last=True)) == ["last"]
    assert list(reader.lines(last=True)) == []
    reader.close()


def write_old_logs(job: JobFolder) -> None:
    for rank in (0, 7):
        job.rank(rank).mkdir(parents=True)
        job.stdout(rank).write_text("old")
    (job.path / "notes.txt").write_text("mine")


def test_new_logs_replace_all_old_ones_and_nothing_else(job):
    write_old_logs(job)
    with fresh_folders(job, range(2), keep_others=False):
        assert sorted(path.name for path in job.path.iterdir()) == ["notes.txt", "rank.0", "rank.1"]
        assert job.stdout(0).read_text() == ""


def test_another_machines_logs_stay(job):
    write_old_logs(job)
    with fresh_folders(job, range(2), keep_others=True):
        assert (job.stdout(0).read_text(), job.stdout(7).read_text()) == ("", "old")


def test_logs_that_are_being_written_are_not_replaced(script, job):
    with fresh_folders(job, range(1), keep_others=False):
        job.stdout(0).write_text("running")
        with pytest.raises(TwofoldError, match=r"another run is still writing its logs to .*log_output/1"):
            launch(script(""), num_ranks=3, log_dir=job.log_dir)
        assert job.stdout(0).read_text() == "running"
    with fresh_folders(job, range(1), keep_others=False):
        assert job.stdout(0).read_text() == ""


# Bad input: nothing starts, nothing changes.


def test_a_busy_port_is_named_and_the_old_logs_stay(script, job):
    write_old_logs(job)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(TwofoldError, match=rf"port {port} is in use; choose another port, or omit it"):
            launch(script(""), num_ranks=2, log_dir=job.log_dir, nodes=Nodes(port=port))
    assert job.stdout(7).read_text() == "old"


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"target": "no_such.py"}, r"script 'no_such\.py' does not exist"),
        ({"num_ranks": 0}, "0 ranks cannot be shared evenly by 1 nodes"),
        ({"num_ranks": 10**39}, "ranks on one machine; at most 1,024 can be started"),
        ({"num_ranks": 3, "nodes": Nodes(num_nodes=2)}, "3 ranks cannot be shared evenly by 2 nodes"),
        ({"nodes": Nodes(num_nodes=2, node_rank=2, port=29500, join_s=0.1)}, "node_rank 2 must be in 0 to 1"),
        ({"nodes": Nodes(num_nodes=2)}, "num_nodes is 2: state the port"),
        ({"nodes": Nodes(port=70000)}, "port 70000 must be in 1 to 65535"),
        ({"timeout_s": 0.0}, "timeout_s must be above 0"),
        ({"follow": Follow(print, rank=2)}, "rank 2 to follow is not a rank of this machine: 0 to 1"),
        ({"log_dir": "train.py"}, r"cannot write logs to train\.py/1: .*; choose another log directory"),
    ],
)
def test_bad_input_names_itself(stated, message, script, tmp_path, monkeypatch):
    path = script("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TwofoldError, match=message):
        launch(**({"target": path, "num_ranks": 2} | stated))
    assert list(tmp_path.iterdir()) == [path]


# Whole launches.


@pytest.fixture(scope="module")
def good_run(tmp_path_factory) -> tuple[LaunchResult, list[tuple[int, str]]]:
    folder = tmp_path_factory.mktemp("good")
    body = """
        import os, sys
        rank = int(os.environ["RANK"])
        print(rank, sys.argv[1:], [os.environ[name] for name in ("WORLD_SIZE", "OMP_NUM_THREADS", "EXTRA")])
        print("to stderr", rank, file=sys.stderr)
        for number in range(20_000):
            print(number, 100 * "x")
        print("no line end", end="")
        sys.exit(0)
    """
    path = folder / "train.py"
    path.write_text(textwrap.dedent(body))
    heard: list[tuple[int, str]] = []
    result = launch(
        path,
        num_ranks=3,
        args=["--name", "two words", "$$x ${local_rank}"],
        log_dir=folder / "log_output",
        env={"EXTRA": "yes", "OMP_NUM_THREADS": "2"},
        follow=Follow(lambda rank, line: heard.append((rank, line))),
    )
    return result, heard


@pytest.mark.ranks
@pytest.mark.new_interpreters
def test_every_rank_gets_the_arguments_and_writes_its_own_logs(good_run):
    result, _ = good_run
    for rank in result.ranks:
        first, *_ = result.job.stdout(rank).read_text().splitlines()
        assert first == f"{rank} {['--name', 'two words', '$$x ${local_rank}']} {['3', '2', 'yes']}"
        assert result.job.stderr(rank).read_text() == f"to stderr {rank}\n"


@pytest.mark.ranks
def test_the_last_ranks_lines_are_heard_to_the_very_last(good_run):
    result, heard = good_run
    assert heard == [(2, line) for line in result.job.stdout(2).read_text().split("\n")]
    assert heard[-1] == (2, "no line end") and len(heard) == 20_002


@pytest.mark.ranks
def test_one_rank_that_raises_ends_all_with_its_error(script, job, env):
    """The others are deaf to SIGTERM, and one of them has started a process of its own."""
    body = """
        if rank == 0:
            import subprocess
            subprocess.Popen([sys.executable, "-c", "import time; print('child', flush=True); time.sleep(1000)"])
        if rank != 1:
            hang()
        while any("hanging" not in open(f"{sys.argv[1]}/rank.{other}/stdout").read() for other in (0, 2)):
            time.sleep(0.01)
        raise ValueError("labels out of range")
    """
    start_s = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 failed: ValueError: labels out of range; its log: ") as failure:
        launch(script(body), num_ranks=3, args=[str(job.path)], log_dir=job.log_dir, env=env)
    assert time.monotonic() - start_s < PATIENCE_S
    assert processes_with(env[TOKEN]) == []
    assert (failure.value.rank, failure.value.exit_code) == (1, 1)
    assert str(job.stderr(1)) in str(failure.value) and "Traceback" in str(failure.value)


@pytest.mark.ranks
def test_a_killed_guard_is_named_although_others_lost_their_connection_first(script, job, env):
    body = """
        folder = sys.argv[1]
        if rank == 2:
            for other in (0, 1):
                while not os.path.exists(f"{folder}/rank.{other}/error.json"):
                    time.sleep(0.01)
            os.kill(os.getppid(), signal.SIGKILL)
            hang()
        raise ConnectionResetError("reset by peer")
    """
    with pytest.raises(RankFailed, match=r"rank 2 was killed with its guard, process \d+"):
        launch(script(body), num_ranks=3, args=[str(job.path)], log_dir=job.log_dir, env=env)


@pytest.mark.ranks
def test_the_first_cause_is_reported_although_its_consequence_came_first(script, job, env):
    """Rank 1 raises, closes its connections, and takes long to do so: rank 0 has failed before rank 1 can say why."""
    body = """
        folder = sys.argv[1]
        def wait_for(path):
            while not os.path.exists(path):
                time.sleep(0.01)
        if rank == 0:
            wait_for(f"{folder}/closed")
            raise ConnectionResetError("reset by peer")
        if rank == 1:
            try:
                raise ValueError("the cause")
            finally:
                open(f"{folder}/closed", "w").close()
                wait_for(f"{folder}/rank.0/error.json")
        hang()
    """
    with pytest.raises(RankFailed, match="rank 1 failed: ValueError: the cause"):
        launch(script(body), num_ranks=3, args=[str(job.path)], log_dir=job.log_dir, env=env)


@pytest.mark.ranks
def test_a_rank_that_does_not_join_is_named_not_those_that_wait_for_it(script, job, env):
    body = """
        import datetime
        import torch.distributed as dist
        if rank == 1:
            time.sleep(600)
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
    """
    with pytest.raises(RankFailed, match=r"rank 1 did not join the others within 3 s is in .*train\.py") as failed:
        launch(script(body), num_ranks=3, log_dir=job.log_dir, env=env)
    assert failed.value.rank == 1


@pytest.mark.ranks
def test_torchrun_that_was_killed_is_named_although_a_rank_lost_its_connection_first(script, job, env):
    body = """
        if rank == 0:
            raise ConnectionResetError("reset by peer")
        if rank == 1:
            while not os.path.exists(f"{sys.argv[1]}/rank.0/error.json"):
                time.sleep(0.01)
            torchrun = int(open(f"/proc/{os.getppid()}/stat").read().rsplit(")", 1)[1].split()[1])
            os.kill(torchrun, signal.SIGKILL)
        hang()
    """
    with pytest.raises(RunFailed, match="torchrun, which runs the ranks, ended with signal SIGKILL"):
        launch(script(body), num_ranks=2, args=[str(job.path)], log_dir=job.log_dir, env=env)
    assert processes_with(env[TOKEN]) == []


@pytest.mark.ranks
def test_time_that_is_up_ends_all(script, job, env):
    with pytest.raises(RunTimedOut, match=r"did not end within 0\.3 s: ranks 0, 1 still running"):
        launch(script("hang()"), num_ranks=2, log_dir=job.log_dir, env=env, timeout_s=0.3)
    assert processes_with(env[TOKEN]) == []


@pytest.mark.ranks
def test_an_exception_of_the_listener_ends_all(script, job, env):
    def interrupt(rank: int, line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(script("hang()"), num_ranks=2, log_dir=job.log_dir, env=env, follow=Follow(interrupt))
    assert processes_with(env[TOKEN]) == []


@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_launcher_is_the_end_of_the_ranks(number, script, job, env):
    code = f"""
from executor.launch.launch import launch
launch({str(script("hang()"))!r}, num_ranks=2, log_dir={str(job.log_dir)!r})
"""
    root = str(WORKER_MAIN.parents[1])
    launcher = subprocess.Popen([sys.executable, "-c", code], env=os.environ | env, cwd=root, stderr=subprocess.DEVNULL)
    wait_until(lambda: all(job.stdout(r).exists() and "hanging" in job.stdout(r).read_text() for r in (0, 1)))
    launcher.send_signal(number)
    assert launcher.wait(PATIENCE_S) == (143 if number == signal.SIGTERM else -number)
    if number == signal.SIGKILL:
        wait_until(lambda: not processes_with(env[TOKEN]))  # nobody is left to wait for: the kernel ends them in turn


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("fault", "headline"),
    [
        ("os.kill(os.getpid(), 9)", "rank 1 was killed by SIGKILL"),
        ("raise OSError(11, 'no process')", "rank 1 ended with exit code 1"),
        ("os.kill(os.getpid(), 19)", "rank 1 had not started"),
    ],
)
def test_a_guard_that_ends_before_writing_its_number(fault, headline, script, tmp_path, env, monkeypatch):
    """The others wait for it and are ended with it; none of them is the cause, and nothing is left."""
    faulty = tmp_path / "worker_main.py"
    line = "    if not write_json(os.path.join(folder, PIDS)"
    begun = f'    if os.environ["RANK"] == "1":\n        {fault}\n{line}'
    text = WORKER_MAIN.read_text()
    assert line in text
    faulty.write_text(text.replace(line, begun))
    monkeypatch.setattr("executor.launch.launch.WORKER_MAIN", faulty)
    timeout_s = 4 if "19" in fault else None
    with pytest.raises(RunFailed, match=headline):
        launch(script("hang()"), num_ranks=3, log_dir=tmp_path / "logs", env=env, timeout_s=timeout_s)


@pytest.mark.ranks
def test_two_nodes_make_one_job(script, tmp_path, env):
    """As on two machines that share a folder: each launch starts its own ranks and leaves the other's logs alone."""
    body = (
        """print(*(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")))"""
    )
    path = script(body)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    results: dict[int, LaunchResult] = {}

    def run(node_rank: int) -> None:
        results[node_rank] = launch(
            path,
            num_ranks=2,
            nodes=Nodes(num_nodes=2, node_rank=node_rank, port=port),
            log_dir=tmp_path / "logs",
            env=env,
        )

    other = threading.Thread(target=run, args=(1,))
    other.start()
    run(0)
    other.join()
    assert [results[node].ranks for node in (0, 1)] == [range(1), range(1, 2)]
    for rank in (0, 1):
        assert results[rank].job.stdout(rank).read_text() == f"{rank} 2 0 127.0.0.1 {port}\n"


@pytest.mark.ranks
@pytest.mark.new_interpreters
def test_a_rank_killed_inside_a_gloo_collective_is_the_one_named(script, job, env):
    body = """
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(4))
    """
    with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL"):
        launch(script(body), num_ranks=2, log_dir=job.log_dir, env=env)
    assert processes_with(env[TOKEN]) == []


def test_a_checkpoint_that_a_lost_peer_left_unwritten_is_no_reason_to_stop_for_good(tmp_path, monkeypatch):
    monkeypatch.setattr("executor.launch.worker_main.LOST_PEER_WAIT_S", 0.0)
    stopped = TrainingStopped("a checkpoint in 'out' cannot be written")
    stopped.__cause__ = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:60266")
    report_exception(str(tmp_path), stopped)
    content = json.loads((tmp_path / "error.json").read_text())
    assert content["lost_peer"] and not content["refusal"]


def test_connections_stay_open_until_an_error_is_reported(monkeypatch):
    left = []
    monkeypatch.setattr(job_main, "load_job", lambda path: Job(tasks=(Task(plan="", out="out", steps=1),)))
    monkeypatch.setattr(job_main, "connect", lambda device, timeout_s: True)
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: left.append("left"))
    monkeypatch.setattr(job_main, "_run", lambda task, job: {}["the cause"])
    with pytest.raises(KeyError, match="the cause"):
        job_main.main(["job.json"])
    assert left == []
    monkeypatch.setattr(job_main, "_run", lambda task, job: None)
    assert job_main.main(["job.json"]) == 0 and left == ["left"]


def test_an_error_of_user_code_is_told_with_the_users_frames_only(tmp_path, capsys):
    with pytest.raises(UserCodeError) as raised, running_user_code("data 'train.py:batches'"):
        {}["images"]
    assert report_exception(str(tmp_path), raised.value) == 1
    content = json.loads((tmp_path / "error.json").read_text())
    assert content["error"].startswith("data 'train.py:batches' raised KeyError: 'images'") and not content["refusal"]
    first, frame, *_, last = content["traceback"].splitlines()
    assert first.startswith("Traceback") and __file__ in frame and last == "KeyError: 'images'"
    assert "user_code.py" not in content["traceback"] + capsys.readouterr().err
