"""Every fault a download can meet: data/fineweb.py against a small hub on this machine."""

import contextlib
import hashlib
import http.server
import json
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import fineweb
import pytest
import shards
from conftest import ROOT, write_shard

import train_gpt2

NAMES = ["fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"]
TARGET = NAMES[1]  # the file that meets the fault
SIZE = 101_024  # bytes of every file
CUT = 40_000


class Handler(http.server.BaseHTTPRequestHandler):
    """As much of the hub's file service as the client needs, with a fault where a test wants one.

    A fault is (method, number of requests it hits, what is otherwise than usual).
    """

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        hub, name = self.server, self.path.rpartition("/")[2]
        method, times, other = hub.fault
        asked = int(re.search(r"\d+", self.headers.get("Range", "0"))[0])
        if name not in hub.files:  # such as requests of the client's own
            return self.head(404, {"Content-Length": 0})
        if hub.storage and self.command == "GET" and "resolve" in self.path:
            return self.head(302, {"Location": hub.storage + name, "Content-Length": 0})
        turn = sum(request[:2] == (self.command, name) for request in hub.requests)
        hub.requests.append((self.command, name, asked))
        other = other if (method, name) == (self.command, TARGET) and turn < times else {}
        content = other.get("content", hub.files[name])
        if "status" in other or asked >= len(content):
            status, headers = other.get("status", 416), other.get("headers", {})
            return self.head(status, {"Content-Length": 0, **headers})
        start = 0 if "ignore_range" in other else asked
        digest = other.get("etag", hashlib.sha256(hub.files[name]).hexdigest())
        linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": other.get("size", len(content))}
        if hub.storage and self.command == "HEAD":
            return self.head(302, {"Location": hub.storage + name, "Content-Length": 7, **linked})
        self.head(206 if start else 200, {"Content-Length": len(content) - start, **linked})
        if self.command == "GET":
            self.send(content[start:], other)

    do_HEAD = do_GET

    def head(self, status, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()

    def send(self, body, other):
        body = body[: other.get("bytes")]
        step = other.get("drip", len(body))  # bytes every 0.02 s
        with contextlib.suppress(OSError):  # the client is gone
            for start in range(0, len(body), step):
                self.wfile.write(body[start : start + step])
                self.server.sent.append(len(body[start : start + step]))
                time.sleep(0.02 if "drip" in other else 0)
            if "silence" in other:
                self.server.go_on.wait(other["silence"])
            if "reset" in other:  # lingering for 0 s: an RST instead of a FIN
                time.sleep(0.1)
                self.connection.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
        self.close_connection = "bytes" in other

    def log_message(self, *arguments):
        pass


class Hub(http.server.ThreadingHTTPServer):
    """A hub of three shards; it counts requests (method, file, first byte asked) and bytes sent."""

    fault = ("", 0, {})
    storage = None  # where the files are, if not at the hub itself

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.out, self.requests, self.sent = folder / "out", [], []
        self.go_on = threading.Event()  # ends a silence
        self.files = {
            name: write_shard(folder / name, range(i, i + 50_000)).read_bytes()
            for i, name in enumerate(NAMES)
        }
        self.manifest = folder / "manifest.json"
        self.write_manifest([])

    def write_manifest(self, names):
        """Write the manifest with the sums of these files."""
        sums = {name: hashlib.sha256(self.files[name]).hexdigest() for name in names}
        self.manifest.write_text(
            json.dumps(
                {"repository": "me/mine", "revision": "f" * 40, "bytes": SIZE, "sha256": sums}
            )
        )

    def start(self, *arguments, shards=2, preexec_fn=None, **environment):
        """Start data/fineweb.py on this hub; return the process."""
        command = [sys.executable, ROOT / "data" / "fineweb.py", str(shards), "--out", self.out]
        settings = {
            "HF_ENDPOINT": f"http://127.0.0.1:{self.server_port}",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": self.out.parent / "home",
            "NO_PROXY": "127.0.0.1,localhost",
            "HF_HUB_DOWNLOAD_TIMEOUT": "2",
            "FINEWEB_SLOW_SECONDS": "0.3",
            "FINEWEB_BACKOFF": "0.02",
            **environment,
        }
        return subprocess.Popen(
            [*command, "--manifest", self.manifest, *arguments],
            env={**os.environ, **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=preexec_fn,
        )

    def run(self, *arguments, **options):
        """Run data/fineweb.py to its end; return (exit code, stdout, stderr)."""
        return self.finish(self.start(*arguments, **options))

    def finish(self, process):
        try:
            stdout, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
        for path in self.out.glob("*.bin"):  # whatever happened: nothing wrong under a final name
            assert path.read_bytes() == self.files[path.name]
        sentence = r"data/fineweb\.py: .*\n" if process.returncode > 0 else ""
        assert re.fullmatch(sentence, stderr), stderr
        return process.returncode, stdout, stderr

    def handle_error(self, *arguments):
        pass  # a client that left

    def starts(self):
        """Return the first bytes asked in the downloads of the file with the fault."""
        return [start for method, name, start in self.requests if (method, name) == ("GET", TARGET)]

    def gets(self):
        """Return the number of downloads of any file."""
        return sum(method == "GET" for method, *_ in self.requests)

    def partial(self):
        """Wait for the first half of the file with the fault; return its partial file."""
        path = self.out / f"{TARGET}.partial"
        deadline = time.monotonic() + 30
        while not path.exists() or path.stat().st_size < CUT:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return path


@pytest.fixture
def hub(tmp_path):
    with Hub(tmp_path) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.go_on.set()
        server.shutdown()


@pytest.mark.parametrize(("listed", "storage"), [([], False), ([], True), (NAMES, False)])
def test_shards_come_once(hub, listed, storage):
    hub.write_manifest(listed)
    if storage:  # on another host, as big files of the real hub are
        hub.storage = f"http://localhost:{hub.server_port}/storage/"
    code, stdout, _ = hub.run()
    assert code == 0 and "3 files, 150,000 tokens" in stdout and "enough for 0 steps" in stdout
    notes = [f"{name}.sha256" for name in NAMES if name not in listed]
    assert sorted(path.name for path in hub.out.iterdir()) == sorted([".lock", *NAMES, *notes])
    assert hub.gets() == 3 and sum(hub.sent) == 3 * SIZE
    hub.requests.clear()
    assert hub.run()[0] == 0
    assert not hub.requests  # a machine without network can check what it has


# fault: (method, requests hit, what is otherwise), bytes in .partial, first bytes asked (...: any)
MENDED = {
    "connection cut": (("GET", 1, {"bytes": CUT}), 0, [0, CUT]),
    "cut every time": (("GET", 99, {"bytes": CUT}), 0, [0, CUT, 2 * CUT]),
    "connection reset": (("GET", 1, {"bytes": CUT, "reset": 1}), 0, [0, ...]),
    "slow once": (("GET", 1, {"drip": 9}), 0, [0, ...]),
    "silence": (("GET", 1, {"bytes": CUT, "silence": 9}), 0, [0, CUT]),
    "429": (("GET", 1, {"status": 429, "headers": {"Retry-After": 1}}), 0, [0, 0]),
    "429, limit": (("GET", 1, {"status": 429, "headers": {"RateLimit": "r=0;t=1"}}), 0, [0, 0]),
    "503 on HEAD": (("HEAD", 2, {"status": 503}), 0, [0]),
    "416": (("GET", 1, {"status": 416}), CUT, [CUT, 0]),
    "Range ignored": (("GET", 1, {"ignore_range": 1}), CUT, [CUT]),
    "wrong once": (("GET", 1, {"content": b"x" * SIZE}), 0, [0, 0]),
    "wrong partial": (("GET", 0, {}), SIZE, [0]),
    "partial too long": (("GET", 0, {}), SIZE + 1, [0]),
}


@pytest.mark.parametrize("fault", MENDED)
def test_a_passing_fault_is_mended(hub, fault):
    hub.fault, held, starts = MENDED[fault]
    hub.out.mkdir()
    right = hub.files[TARGET] if held < SIZE else bytes(2 * SIZE)
    (hub.out / f"{TARGET}.partial").write_bytes(right[:held])
    code, stdout, stderr = hub.run()
    assert code == 0, stderr
    assert ("429" in fault) == ("next try in 1 s" in stdout)  # as the hub asked
    assert len(hub.starts()) == len(starts) and len(list(hub.out.glob("*.bin"))) == 3
    assert all(wanted in (found, ...) for found, wanted in zip(hub.starts(), starts))
    if starts == [0, CUT]:
        assert sum(hub.sent) == 3 * SIZE  # no byte came twice


# fault: (method, requests hit, what is otherwise), files in the manifest, downloads, the message
SENTENCES = {
    "404": (
        ("HEAD", 99, {"status": 404}),
        [],
        0,
        r"gives no .*1\.bin of me/mine at revision f{40} \(HTTP status 404\): ask for fewer",
    ),
    "404 on GET": (("GET", 99, {"status": 404}), NAMES, None, r"HTTP status 404"),
    "503 forever": (
        ("GET", 99, {"status": 503}),
        [],
        None,
        r"1\.bin does not come .*6 tries .HTTP status 503\): check .* same command",
    ),
    "429 forever": (("HEAD", 99, {"status": 429}), [], 0, r"6 tries .HTTP status 429"),
    "slow forever": (("GET", 99, {"drip": 9}), [], None, r"below 10000 bytes/s for 0\.3 s"),
    "short forever": (("GET", 99, {"content": b"x" * CUT}), [], None, r"1\.bin does not come"),
    "wrong forever": (
        ("GET", 99, {"content": b"x" * SIZE}),
        [],
        None,
        r"1\.bin came wrong 3 times .*has sha256 \w{64}, not \w{64}.*try another",
    ),
    "another sum": (
        ("HEAD", 99, {"etag": "0" * 64}),
        NAMES,
        0,
        r"the sha256 of .*1\.bin is 0{64} at http.* and \w{64} in the manifest: set",
    ),
    "another size": (("HEAD", 99, {"size": 7}), NAMES, 0, r"size of .*1\.bin is 7 at .*101024"),
    "no sum": (("HEAD", 99, {"etag": "0" * 40}), [], 0, r"the sha256 of .* is None at .* and None"),
    "no room": (
        ("HEAD", 99, {"size": 10**18}),
        [],
        0,
        r"1,000,000,000\.00 GB are to come, but the disk of .* has [\d,.]+ GB free, enough "
        r"for N=0: ask for fewer shards, or name a folder on another disk with --out",
    ),
}


@pytest.mark.parametrize("fault", SENTENCES)
def test_a_lasting_fault_ends_in_a_sentence(hub, fault):
    hub.fault, listed, gets, message = SENTENCES[fault]
    hub.write_manifest(listed)
    code, _, stderr = hub.run()
    assert code == 1 and re.search(message, stderr), stderr
    assert gets is None or hub.gets() == gets
    assert not (hub.out / TARGET).exists()


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_is_resumed(hub, kill):
    hub.fault = ("GET", 1, {"bytes": CUT, "silence": 60})
    process = hub.start(HF_HUB_DOWNLOAD_TIMEOUT="60")
    partial, began = hub.partial(), time.monotonic()
    process.send_signal(kill)
    code, _, stderr = hub.finish(process)
    assert time.monotonic() - began < 5 and partial.stat().st_size == CUT
    if kill == signal.SIGKILL:
        assert code == -kill
    else:
        assert code == 128 + kill and re.search("stopped; .* keeps .* same command", stderr)
    assert not (hub.out / TARGET).exists()
    hub.fault = ("", 0, {})
    assert hub.run()[0] == 0 and hub.starts() == [0, CUT]


def test_a_second_run_is_refused_while_the_first_goes_on(hub):
    hub.fault = ("GET", 1, {"bytes": CUT, "silence": 60})
    first = hub.start(HF_HUB_DOWNLOAD_TIMEOUT="60")
    hub.partial()
    code, _, stderr = hub.run()
    assert code == 1 and "another run downloads into" in stderr and "--out" in stderr
    hub.go_on.set()
    assert hub.finish(first)[0] == 0


def test_a_full_disk_keeps_what_has_come(hub):
    def full():  # a limit on every file's size stands in for it
        resource.setrlimit(resource.RLIMIT_FSIZE, (CUT, CUT))

    code, _, stderr = hub.run(preexec_fn=full, shards=0)
    assert code == 1 and re.search(r"cannot write into .*\(File too large\).*keeps", stderr), stderr
    assert (hub.out / f"{NAMES[0]}.partial").stat().st_size == CUT
    assert hub.run()[0] == 0 and ("GET", NAMES[0], CUT) in hub.requests


def test_a_file_damaged_later_is_fetched_again(hub):
    assert hub.run()[0] == 0
    (hub.out / TARGET).write_bytes(b"x" * SIZE)
    hub.requests.clear()
    code, stdout, _ = hub.run()
    assert code == 0 and re.search(r"1\.bin .* has sha256 \w+, not \w+: deleted", stdout)
    assert hub.starts() == [0] and hub.gets() == 1


def test_a_file_that_is_no_shard_gets_no_final_name(hub):
    hub.files[TARGET] = b"x" * SIZE
    code, _, stderr = hub.run()
    assert code == 1 and re.search(r"1\.bin\.partial is not a shard of tokens", stderr)
    assert not (hub.out / TARGET).exists()


def test_the_tools_and_the_training_script_agree(tmp_path):
    args = train_gpt2.Hyperparameters()
    assert args.batch_size * args.sequence_length == fineweb.STEP_TOKENS
    right = write_shard(tmp_path / "s.bin", range(9)).read_bytes()
    damaged = [right[:-1], right + b"\0\0", right[:500], right[:8] + bytes(4) + right[12:1024]]
    damaged += [right[:i] + b"\7" + right[i + 1 :] for i in (0, 4, 8, 1023)]
    for shard_size in shards.shard_size, lambda path: train_gpt2.check_shard(path)[0]:
        (tmp_path / "s.bin").write_bytes(right)
        assert shard_size(tmp_path / "s.bin") == 9
        for content in damaged:
            (tmp_path / "s.bin").write_bytes(content)
            with pytest.raises(ValueError, match=r"shard of tokens|damaged"):
                shard_size(tmp_path / "s.bin")
        with pytest.raises(ValueError, match="cannot read"):
            shard_size(tmp_path / "none.bin")


def test_what_cannot_work_is_refused_at_once(hub):
    def refusal(*arguments, **options):
        code, _, stderr = hub.run(*arguments, **options)
        assert code == 1 and hub.gets() == 0
        return stderr

    assert re.search(
        r"does not come from http://127\.0\.0\.1:9 .*refused.*check the network",
        refusal(HF_ENDPOINT="http://127.0.0.1:9"),
    )
    assert "N=104 must be in 0..103" in refusal(shards=104)
    assert "--workers=0" in refusal("--workers", "0")
    hub.manifest.write_text("[]")
    assert "manifest.json is no manifest" in refusal()
    hub.manifest.write_text((ROOT / "data" / "fineweb.json").read_text())
    assert re.search(r"the sha256 of .* is \w{64} at http.* and 5b95c8e0", refusal(shards=0))
    hub.out = hub.manifest
    assert re.search(r"cannot write into .*manifest\.json \(File exists\)", refusal())
