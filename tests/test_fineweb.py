"""data/fineweb.py, tested against a local hub that can stall, fail or send wrong content."""

import hashlib
import http.server
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
import time

import fineweb
import pytest
from conftest import ROOT, write_shard

NAMES = ["fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"]
TARGET = NAMES[1]  # the file that meets the fault
SIZE = 101_024  # bytes of every file
CUT = 40_000  # bytes of TARGET after which a fault may close or stall the connection


class Handler(http.server.BaseHTTPRequestHandler):
    """The part of the hub that the client needs. The first GET of TARGET meets the fault."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        hub, (*_, revision, name) = self.server, self.path.split("/")
        if name not in hub.files or revision != "f" * 40:
            return self.send_error(404)
        content = b"x" * SIZE if hub.fault == "wrong content" else hub.files[name]
        if hub.ranges and "Range" in self.headers:  # such as "bytes=0-1023"
            content = content[: int(self.headers["Range"].rpartition("-")[2]) + 1]
            self.send_response(206)
        else:
            self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(hub.files[name]).hexdigest()}"')
        self.send_header("X-Repo-Commit", revision)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        fault = hub.fault if name == TARGET and TARGET not in hub.downloads else ""
        hub.downloads.append(name)
        if not fault:
            content = content if "Range" in self.headers else hub.files[name]
        end = CUT if fault in ("cut", "silence") else len(content)
        self.wfile.write(content[:end])
        if fault == "silence":
            hub.go_on.wait(60)
        self.close_connection = end == CUT

    do_HEAD = do_GET

    def log_message(self, *arguments):
        pass


class Hub(http.server.ThreadingHTTPServer):
    """A hub of three shards, and a copy of data/fineweb.py whose manifest lists two of them."""

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.out = folder, folder / "fineweb10B"
        self.fault, self.downloads, self.go_on = "", [], threading.Event()
        self.ranges = True  # whether a part of a file can be asked for
        self.files = {
            name: write_shard(folder / name, range(i, i + 50_000)).read_bytes()
            for i, name in enumerate(NAMES)
        }
        sums = {name: hashlib.sha256(self.files[name]).hexdigest() for name in NAMES[:2]}
        manifest = {"repository": "me/mine", "revision": "f" * 40, "sha256": sums, "bytes": 10**9}
        (folder / "fineweb.json").write_text(json.dumps(manifest))
        for name in "fineweb.py", "shards.py":
            shutil.copy(ROOT / "data" / name, folder)

    def start(self, shards=2, port=None, options=("--yes",), stdin=subprocess.DEVNULL):
        """Start the copy of data/fineweb.py; return the process."""
        endpoint = f"http://127.0.0.1:{port or self.server_port}"
        settings = dict(
            HF_ENDPOINT=endpoint, HF_HOME=str(self.folder / "home"), NO_PROXY="127.0.0.1"
        )
        command = [sys.executable, self.folder / "fineweb.py", "--out", self.out, *options]
        if shards is not None:
            command.append(f"--shards={shards}")
        pipes = dict(stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return subprocess.Popen(command, env={**os.environ, **settings}, **pipes)

    def run(self, **options):
        """Run the copy to its end; return (exit code, stdout, stderr)."""
        process = self.start(**options)
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


def test_only_missing_or_damaged_files_are_downloaded_and_a_cut_connection_is_retried(hub):
    hub.fault = "cut"
    code, stdout, stderr = hub.run()
    assert code == 0, stderr
    assert "3 files in " in stdout and "100,000 training tokens" in stdout
    assert hub.contents() == hub.files
    assert sorted(hub.downloads) == sorted([*NAMES, TARGET])
    hub.fault = ""
    hub.downloads.clear()
    assert hub.run(shards=1, port=9)[0] == 0  # listed files are verified without the hub
    for name in NAMES[1:]:  # a listed file and one whose sha256 the hub gives
        (hub.out / name).write_bytes(hub.files[name][:-1] + b"?")
    code, stdout, stderr = hub.run()
    assert code == 0 and all(f"{name} is damaged" in stdout for name in NAMES[1:]), stderr
    assert hub.contents() == hub.files and sorted(hub.downloads) == sorted(NAMES[1:])


@pytest.mark.parametrize("fault", ["gone", "wrong content"])
def test_fault_12_a_file_is_only_replaced_by_a_verified_one(hub, fault):
    hub.out.mkdir()
    (hub.out / TARGET).write_bytes(b"damaged")
    hub.fault = fault
    if fault == "gone":
        del hub.files[TARGET]
    code, _, stderr = hub.run()
    sentence = stderr.rpartition("data/fineweb.py: ")[2]
    assert code == 1 and "run the same command again" in sentence, stderr
    assert sentence.count("\n") == 1 and "Traceback" not in stderr, stderr
    contents = hub.contents()
    assert contents.pop(TARGET) == b"damaged"
    assert contents.items() <= hub.files.items()


def test_an_interrupted_download_stops_at_once_and_can_be_continued(hub):
    hub.fault = "silence"
    process = hub.start()
    while TARGET not in hub.downloads and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130 and "run the same command again" in stderr
    assert TARGET not in hub.contents()
    hub.fault = ""
    assert hub.run()[0] == 0 and hub.contents() == hub.files
    assert sorted(os.listdir(hub.out)) == sorted(NAMES)


@pytest.mark.parametrize("answer", [None, "n\n", "y\n"])
def test_a_download_needs_consent_on_a_terminal_or_yes(hub, answer):
    """The question names the size of the missing files only."""
    hub.out.mkdir()
    (hub.out / TARGET).write_bytes(hub.files[TARGET])
    stdin = subprocess.DEVNULL
    if answer is not None:
        terminal, stdin = pty.openpty()
        os.write(terminal, answer.encode())
    code, stdout, stderr = hub.run(options=(), stdin=stdin)
    assert (f"Download 2.0 GB of FineWeb into {hub.out}?" in stdout) == (answer is not None)
    if answer == "y\n":
        assert code == 0 and hub.contents() == hub.files
        assert sorted(hub.downloads) == sorted([NAMES[0], NAMES[2]])
        assert hub.run(options=())[0] == 0  # nothing is missing, so there is no question
    else:
        assert code == 1 and "pass --yes" in stderr and not hub.downloads


@pytest.mark.parametrize(
    "settings, shards",
    [
        ([], 27),
        (["--preset=modern"], 6),
        (["--num_iterations=3"], 1),
        (["--batch_size=10", "--sequence_length=10000", "--num_iterations=999"], 1),
        (["--batch_size=10", "--sequence_length=10000", "--num_iterations=1000"], 2),
        (["--num_iterations=100000", "--allow_repeat=True"], 103),
    ],
)
def test_a_run_gets_the_shards_that_it_needs(settings, shards):
    """A run reads one more token than its steps have inputs."""
    assert fineweb.shards_for(settings) == shards


def test_invalid_arguments_are_refused(hub):
    for shards, options, sentence in [
        (104, (), "--shards=104 must be between 0 and 103"),
        (1, ("--seed=1",), "leave out --seed=1"),
    ]:
        code, _, stderr = hub.run(shards=shards, options=options)
        assert code > 0 and sentence in stderr and not hub.downloads


@pytest.mark.parametrize("ranges", [True, False])
def test_a_part_of_a_shard_is_a_shard_of_its_own(hub, ranges):
    """Also from a server that ignores the range and sends the whole file."""
    hub.ranges = ranges
    code, stdout, stderr = hub.run(shards=None, options=("--yes", "--part=1000"))
    assert code == 0 and "1,000 training tokens" in stdout, stderr
    content = hub.contents()
    assert list(content) == [TARGET] and len(content[TARGET]) == 1024 + 2000
    assert content[TARGET][1024:] == hub.files[TARGET][1024:3024]
    assert fineweb.shard_size(hub.out / TARGET) == 1000
    code, _, stderr = hub.run(shards=None, options=("--part=1000",))
    assert code == 1 and "MB of FineWeb were not downloaded: pass --yes" in stderr


@pytest.mark.parametrize("fault", ["gone", "wrong content"])
def test_a_part_that_cannot_be_right_is_refused(hub, fault):
    hub.fault = fault
    if fault == "gone":
        del hub.files[TARGET]
    code, _, stderr = hub.run(shards=None, options=("--yes", "--part=1000"))
    assert code == 1 and "run the same command again" in stderr and "Traceback" not in stderr
    assert hub.contents() == {}
