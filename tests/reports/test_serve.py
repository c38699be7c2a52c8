"""`twofold serve`: a folder of reports on this computer."""

import functools
import http.client
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from plans.errors import TwofoldError
from reports.folder import reports_in
from reports.page import Page
from twofold.cli import main
from twofold.report_server import server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "inner folder").mkdir()
    Page(kind="plan", title="A < B", sections=[]).write(tmp_path / "inner folder" / "a&b #1.html")
    Page(kind="validation", title="Rows", sections=[]).write(tmp_path / "rows.html")
    (tmp_path / "other.html").write_text("<title>not ours</title>")
    (tmp_path / "secret.txt").write_text("secret")
    return tmp_path


def test_the_list_leads_to_every_report_and_to_nothing_else(folder):
    assert {(each.kind, each.title) for each in reports_in(folder)} == {("plan", "A < B"), ("validation", "Rows")}
    with server(folder, 0) as serving:
        host, port = serving.server_address[:2]
        assert host == "127.0.0.1"
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{port}/"
        listed = urllib.request.urlopen(address).read().decode()
        assert 'href="inner%20folder/a%26b%20%231.html">A &lt; B</a>' in listed and "not ours" not in listed
        assert "A &lt; B" in urllib.request.urlopen(f"{address}inner%20folder/a%26b%20%231.html").read().decode()
        for path in ("secret.txt", "other.html", "../rows.html", "inner%20folder/"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(address + path)
            assert refused.value.code == 404
            refused.value.close()
        asked = (("HEAD", "secret.txt", "localhost", 501), ("HEAD", "rows.html", "localhost", 501),
                 ("GET", "rows.html", "elsewhere.example", 403), ("GET", "", f"elsewhere.example:{port}", 403),
                 ("GET", "rows.html", "localhost:8080", 200), ("GET", "", "127.0.0.1", 200))  # fmt: skip
        for method, path, name, code in asked:
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request(method, f"/{path}", headers={"Host": name})
            assert connection.getresponse().status == code, (method, path, name)
            connection.close()
        serving.shutdown()


def test_other_folders_are_refused_in_one_line(folder, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for path, said in ((tmp_path / "none", "is not a folder"), (tmp_path / "empty", "no report in")):
        assert main(["serve", str(path)]) == 2
        assert said in capsys.readouterr().err
    assert main(["serve", str(folder), "--port", "70000"]) == 2
    assert "--port must be at most 65,535" in capsys.readouterr().err
    with server(folder, 0) as taken, pytest.raises(TwofoldError, match="--port"):
        server(folder, taken.server_address[1])


def test_ctrl_c_ends_it(folder):
    command = [sys.executable, "-m", "twofold", "serve", str(folder), "--port", "0", "--no-open"]
    # A shell lets what it starts in the background ignore Ctrl-C, and this test with it.
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard
    ) as process:
        try:
            assert process.stdout is not None and "http://127.0.0.1:" in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, "")
