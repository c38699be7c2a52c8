"""Temporary folders of launchers that were killed go with the next launch; those in use stay."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from executor.launch.temporary import temporary_folder

HOLDS = """
from executor.launch.temporary import temporary_folder
with temporary_folder() as folder:
    print(folder, flush=True)
    input()
"""


def test_what_a_killed_launcher_left_is_removed_and_what_is_in_use_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    launchers = [
        subprocess.Popen([sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    killed, used = (Path(each.stdout.readline().strip()) for each in launchers)
    (killed / "results").mkdir()
    foreign = tmp_path / "twofold-notes"
    foreign.mkdir()
    for folder in (killed, used, foreign):
        os.utime(folder, (0, 0))
    launchers[0].send_signal(signal.SIGKILL)
    launchers[0].communicate()
    with temporary_folder() as own:
        assert sorted(tmp_path.iterdir()) == sorted([used, foreign, Path(own)])
    launchers[1].communicate("\n")
    assert list(tmp_path.iterdir()) == [foreign] and launchers[1].returncode == 0
