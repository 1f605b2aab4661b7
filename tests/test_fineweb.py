"""data/fineweb.py, tested against a local hub that can stall, fail or close the connection."""

import hashlib
import http.server
import os
import pty
import signal
import subprocess
import sys
import threading
import time

import fineweb
import numpy as np
import prepare
import pytest
from conftest import ROOT, write_shard

NAMES = ["fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"]
TARGET = NAMES[1]  # the file that meets the fault
TWO_SHARDS = ["--shards=2"]


class Handler(http.server.BaseHTTPRequestHandler):
    """The part of the hub that the client needs. The first GET of TARGET meets the fault."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        hub, (*_, revision, name) = self.server, self.path.split("/")
        if name not in hub.files or revision != fineweb.SOURCE["revision"]:
            return self.send_error(404)
        content = hub.files[name]
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", revision)
        if "Range" in self.headers:  # such as bytes=0-1023 or bytes=1024-
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            content = content[int(first) : int(last or len(content)) + 1]
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        fault = hub.fault if name == TARGET and TARGET not in hub.downloads else ""
        hub.downloads.append(name)
        self.wfile.write(content[:40_000] if fault else content)
        if fault == "silence":
            hub.go_on.wait(60)
        self.close_connection = bool(fault)

    do_HEAD = do_GET

    def log_message(self, *arguments):
        pass


class Hub(http.server.ThreadingHTTPServer):
    """A hub of three small shards."""

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.out = folder, folder / "fineweb10B"
        self.fault, self.downloads, self.go_on = "", [], threading.Event()
        self.files = {
            name: write_shard(folder / name, range(i, i + 50_000)).read_bytes()
            for i, name in enumerate(NAMES)
        }

    def start(self, *options, port=None, stdin=subprocess.DEVNULL):
        """Start data/fineweb.py; return the process."""
        endpoint = f"http://127.0.0.1:{port or self.server_port}"
        home = str(self.folder / "home")
        environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": home, "NO_PROXY": "*"}
        command = [sys.executable, ROOT / "data" / "fineweb.py", "--out", self.out, *options]
        pipes = dict(stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        # A test suite that runs in the background ignores SIGINT, and so would this process.
        heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
        return subprocess.Popen(command, env=environment, preexec_fn=heed, **pipes)

    def run(self, *options, **changes):
        """Run data/fineweb.py to its end; return (exit code, stdout, stderr)."""
        process = self.start(*options, **changes)
        stdout, stderr = process.communicate(timeout=60)
        return process.returncode, stdout, stderr

    def contents(self):
        return {path.name: path.read_bytes() for path in self.out.glob("*.bin")}


@pytest.fixture
def hub(tmp_path):
    with Hub(tmp_path) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.go_on.set()
        server.shutdown()


def test_only_missing_or_changed_files_are_downloaded_and_a_cut_connection_is_retried(hub):
    hub.fault = "cut"
    code, stdout, stderr = hub.run("--yes", *TWO_SHARDS)
    assert code == 0 and "holds 3 shards" in stdout, stderr
    assert hub.contents() == hub.files
    assert sorted(hub.downloads) == sorted([*NAMES, TARGET])
    hub.fault = ""
    hub.downloads.clear()
    assert hub.run(*TWO_SHARDS, port=9)[0] == 0  # complete: without a question or the hub
    (hub.out / TARGET).write_bytes(hub.files[TARGET][:-2])
    os.utime(hub.out / TARGET, (time.time() + 9, time.time() + 9))
    assert hub.run("--yes", *TWO_SHARDS)[0] == 0
    assert hub.contents() == hub.files and hub.downloads == [TARGET]


@pytest.mark.parametrize("options", [TWO_SHARDS, ["--part=1000"]])
def test_a_file_that_cannot_be_downloaded_is_one_sentence(hub, options):
    del hub.files[TARGET]
    code, _, stderr = hub.run("--yes", *options)
    sentence = stderr.rpartition("data/fineweb.py: ")[2]
    assert code == 1 and "run the same command again" in sentence, stderr
    assert sentence.count("\n") == 1 and "Traceback" not in stderr, stderr
    assert hub.contents().items() <= hub.files.items()


def test_an_interrupted_download_stops_at_once_and_can_be_continued(hub):
    hub.fault = "silence"
    process = hub.start("--yes", *TWO_SHARDS)
    while TARGET not in hub.downloads and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 1 and "run the same command again" in stderr
    assert TARGET not in hub.contents()
    assert hub.run("--yes", *TWO_SHARDS)[0] == 0 and hub.contents() == hub.files


@pytest.mark.parametrize("answer", [None, "n\n", "y\n"])
def test_a_download_needs_consent_on_a_terminal_or_yes(hub, answer):
    """The question names the size of the missing files only."""
    hub.out.mkdir()
    (hub.out / TARGET).write_bytes(hub.files[TARGET])
    stdin = subprocess.DEVNULL
    if answer is not None:
        terminal, stdin = pty.openpty()
        os.write(terminal, answer.encode())
    code, stdout, stderr = hub.run(*TWO_SHARDS, stdin=stdin)
    assert (f"Download 0.4 GB of FineWeb into {hub.out}?" in stdout) == (answer is not None)
    if answer == "y\n":
        assert code == 0 and hub.contents() == hub.files
        assert sorted(hub.downloads) == sorted([NAMES[0], NAMES[2]])
    else:
        assert code == 1 and "again with --yes" in stderr and not hub.downloads


@pytest.mark.parametrize(
    "settings, shards",
    [
        ([], 27),
        (["modern"], 6),
        (["modern", "--preset=modern_24gb", "--num_iterations=762"], 2),
        (["--num_iterations=3"], 1),
        (["--batch_size=10", "--sequence_length=10000", "--num_iterations=999"], 1),
        (["--batch_size=10", "--sequence_length=10000", "--num_iterations=1000"], 2),
    ],
)
def test_a_run_gets_the_shards_that_it_needs(settings, shards):
    """A run reads one more token than its steps have inputs."""
    assert prepare.shards_for(prepare.read_settings(settings)) == shards


def test_a_part_of_a_shard_is_a_shard_of_its_own(hub):
    code, _, stderr = hub.run("--part=1000")
    assert code == 1 and " MB) was not downloaded: run the same command again with" in stderr
    assert hub.run("--yes", "--part=1000")[0] == 0
    expected = write_shard(hub.folder / "expected", np.arange(1, 1001)).read_bytes()
    assert hub.contents() == {TARGET: expected}
    assert hub.run("--part=1000", port=9)[0] == 0  # complete: without a question or the hub
    code, _, stderr = hub.run("--yes", "--part=50001")
    assert code == 1 and f"{TARGET} does not hold 50,001 tokens: move or delete it" in stderr
    assert hub.contents() == {TARGET: expected}
    (hub.out / TARGET).unlink()
    code, _, stderr = hub.run("--yes", "--part=50001")
    assert code == 1 and "50000 tokens arrived instead of 50001" in stderr
    assert hub.contents() == {}


@pytest.mark.parametrize("option", ["--shards=-1", "--shards=104", "--part=0", "--part=100000001"])
def test_a_wrong_number_is_refused(option, hub):
    code, _, stderr = hub.run("--yes", option)
    assert code == 2 and f"{option} must be from " in stderr and not hub.downloads
