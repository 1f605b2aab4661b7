"""data/fineweb.py against a small hub on this machine, and against the faults of a real one."""

import contextlib
import hashlib
import http.server
import json
import os
import re
import resource
import signal
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
# Runs data/fineweb.py and shortens the pauses between its tries to a hundredth.
FASTER = """
import runpy, sys, time
sleep, sys.argv = time.sleep, sys.argv[1:]
time.sleep = lambda seconds: sleep(seconds / 100)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Handler(http.server.BaseHTTPRequestHandler):
    """The part of the hub that the client needs. Its first requests for TARGET meet a fault."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        hub, name = self.server, self.path.rpartition("/")[2]
        if name not in hub.files:  # a request that huggingface_hub makes on its own
            return self.head(404, {"Content-Length": 0})
        method, times, change = hub.fault
        turn = sum(request[:2] == (self.command, name) for request in hub.requests)
        start = int(re.search(r"\d+", self.headers.get("Range", "0"))[0])
        hub.requests.append((self.command, name, start))
        change = change if (method, name) == (self.command, TARGET) and turn < times else {}
        if "status" in change:
            return self.head(change["status"], {"Content-Length": 0})
        content = change.get("content", hub.files[name])
        etag = change.get("etag", hashlib.sha256(hub.files[name]).hexdigest())
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": "f" * 40}
        headers["Content-Length"] = len(content) - start
        self.head(206 if start else 200, headers)
        if self.command == "GET":
            with contextlib.suppress(OSError):  # the client is gone
                self.wfile.write(content[start : change.get("bytes")])
            hub.go_on.wait(change.get("silence", 0))
            self.close_connection = "bytes" in change

    do_HEAD = do_GET

    def head(self, status, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()

    def log_message(self, *arguments):
        pass


class Hub(http.server.ThreadingHTTPServer):
    """A hub of three shards, which notes its requests: (method, file, first byte asked)."""

    fault = ("", 0, {})

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.out, self.requests, self.go_on = folder / "out", [], threading.Event()
        self.files = {
            name: write_shard(folder / name, range(i, i + 50_000)).read_bytes()
            for i, name in enumerate(NAMES)
        }
        self.manifest = folder / "manifest.json"
        self.write_manifest(NAMES)

    def write_manifest(self, names, **fields):
        sums = {name: hashlib.sha256(self.files[name]).hexdigest() for name in names}
        fields = {"bytes": SIZE, "sha256": sums, **fields}
        fields = {"repository": "me/mine", "revision": "f" * 40, **fields}
        self.manifest.write_text(json.dumps(fields))

    def start(self, *arguments, shards=2, preexec_fn=None, **environment):
        """Start data/fineweb.py on this hub; return the process."""
        script = [sys.executable, "-c", FASTER, ROOT / "data" / "fineweb.py"]
        arguments = [str(shards), "--out", self.out, "--manifest", self.manifest, *arguments]
        settings = {
            "HF_ENDPOINT": f"http://127.0.0.1:{self.server_port}",
            "HF_HOME": self.out.parent / "home",
            "NO_PROXY": "127.0.0.1,localhost",
            "HF_HUB_DOWNLOAD_TIMEOUT": "1",
            **environment,
        }
        return subprocess.Popen(
            [*script, *arguments],
            env={**os.environ, **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=preexec_fn,
        )

    def run(self, *arguments, **options):
        """Run data/fineweb.py to its end; return (exit code, stdout, last line of stderr)."""
        return self.finish(self.start(*arguments, **options))

    def finish(self, process):
        try:
            stdout, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
        assert "Traceback" not in stderr, stderr
        if process.returncode == 0:  # and nothing else is left
            assert sorted(os.listdir(self.out)) == sorted([".lock", *NAMES])
            assert self.contents() == self.files
        return process.returncode, stdout, stderr.rpartition("data/fineweb.py: ")[2]

    def contents(self):
        return {path.name: path.read_bytes() for path in self.out.glob("*.bin")}

    def gets(self):
        """Return the names of the files that were downloaded, in order."""
        return [name for method, name, _ in self.requests if method == "GET"]


@pytest.fixture
def hub(tmp_path):
    with Hub(tmp_path) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.go_on.set()
        server.shutdown()


def test_only_missing_files_are_downloaded(hub):
    code, stdout, stderr = hub.run()
    assert code == 0, stderr
    assert "3 files in " in stdout and "100,000 training tokens, enough for 0 steps" in stdout
    assert sorted(hub.gets()) == sorted(NAMES)
    hub.requests.clear()
    assert hub.run()[0] == 0 and not hub.requests  # verifying listed files needs no network
    (hub.out / TARGET).unlink()
    assert hub.run()[0] == 0 and hub.gets() == [TARGET]


def test_the_hub_gives_the_sha256_of_a_file_that_is_not_listed(hub):
    hub.write_manifest([NAMES[0], NAMES[2]])
    assert hub.run()[0] == 0
    (hub.out / TARGET).write_bytes(b"x" * SIZE)
    code, stdout, _ = hub.run()
    assert code == 0 and f"{TARGET} has sha256" in stdout and hub.gets().count(TARGET) == 2


PASSING = {  # method, number of requests that meet the fault, the fault
    "connection cut": ("GET", 1, {"bytes": CUT}),
    "silence": ("GET", 1, {"bytes": CUT, "silence": 9}),
    "503": ("GET", 1, {"status": 503}),
    "503 for HEAD": ("HEAD", 2, {"status": 503}),
    "wrong content": ("GET", 1, {"content": b"x" * SIZE}),
}


@pytest.mark.parametrize("fault", PASSING)
def test_a_passing_fault_needs_no_second_run(hub, fault):
    hub.fault = PASSING[fault]
    code, _, stderr = hub.run()
    assert code == 0, stderr


LASTING = {  # method, the fault, files in the manifest, what is said; HEAD: before any download
    "404": ("HEAD", {"status": 404}, NAMES, r"1\.bin cannot be downloaded .*404.*check N"),
    "no sum": ("HEAD", {"etag": "0" * 40}, NAMES[:1], r"sha256 of .*1\.bin is 0{40} .*64 hex"),
    "another sum": ("HEAD", {"etag": "0" * 64}, NAMES, r"is 0{64} at .*, but must be \w{64}: set"),
    "503": ("GET", {"status": 503}, NAMES, r"1\.bin cannot .*503.*run the same command again"),
    "short": ("GET", {"content": b"x" * CUT}, NAMES, r"1\.bin cannot be downloaded .*3 tries"),
    "wrong": ("GET", {"content": b"x" * SIZE}, NAMES, r"arrives with sha256 \w{64}, but must have"),
}


@pytest.mark.parametrize("fault", LASTING)
def test_a_lasting_fault_ends_in_a_sentence(hub, fault):
    method, change, listed, message = LASTING[fault]
    hub.fault = (method, 99, change)
    hub.write_manifest(listed)
    code, _, stderr = hub.run()
    assert code == 1 and re.search(message, stderr) and stderr.count("\n") == 1, stderr
    assert method == "GET" or not hub.gets()
    assert TARGET not in hub.contents() and hub.contents().items() <= hub.files.items()


@pytest.mark.parametrize("fault", ["no hub", "404", "wrong", None])
def test_fault_12_a_file_is_only_replaced_by_a_verified_one(hub, fault):
    assert hub.run()[0] == 0
    damaged = hub.files[TARGET][:-1] + b"?"
    (hub.out / TARGET).write_bytes(damaged)
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9"} if fault == "no hub" else {}
    method, change, *_ = LASTING.get(fault, ("", {}))
    hub.fault = (method, 99, change)
    code, stdout, stderr = hub.run(**environment)
    assert re.search(r"1\.bin has sha256 \w{64}, but must have \w{64}: downloading", stdout)
    assert code == (1 if fault else 0), stderr
    expected = {**hub.files, TARGET: damaged} if fault else hub.files
    assert hub.contents() == expected


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_goes_on_and_leaves_nothing(hub, kill):
    hub.fault = ("GET", 1, {"bytes": CUT, "silence": 60})
    process = hub.start(HF_HUB_DOWNLOAD_TIMEOUT="60")
    others = {name: content for name, content in hub.files.items() if name != TARGET}
    while hub.contents() != others or TARGET not in hub.gets():
        time.sleep(0.02)
    began = time.monotonic()
    process.send_signal(kill)
    code, _, stderr = hub.finish(process)
    assert time.monotonic() - began < 5
    if kill == signal.SIGKILL:
        assert code == -kill
    else:
        assert code == 128 + kill and stderr == "stopped; run the same command again to go on\n"
    assert hub.contents() == others
    hub.fault = ("", 0, {})
    hub.requests.clear()
    assert hub.run()[0] == 0 and hub.gets() == [TARGET]


def test_a_second_run_is_refused_while_the_first_goes_on(hub):
    hub.fault = ("GET", 1, {"bytes": CUT, "silence": 60})
    first = hub.start(HF_HUB_DOWNLOAD_TIMEOUT="60")
    while TARGET not in hub.gets():
        time.sleep(0.02)
    code, _, stderr = hub.run()
    assert code == 1 and "another run downloads into" in stderr and "--out" in stderr
    hub.go_on.set()
    assert hub.finish(first)[0] == 0


def test_a_full_disk_is_one_sentence(hub):
    def full():  # a limit on the size of every file stands in for it
        resource.setrlimit(resource.RLIMIT_FSIZE, (CUT, CUT))

    code, _, stderr = hub.run(preexec_fn=full)
    assert code == 1 and re.search(r"cannot write into .*\(File too large\)", stderr), stderr
    assert not hub.contents() and hub.run()[0] == 0


def test_a_file_that_is_no_shard_is_not_published(hub):
    hub.files[TARGET] = b"x" * SIZE
    hub.write_manifest(NAMES)
    code, _, stderr = hub.run()
    assert code == 1 and re.search(r"1\.bin is not a shard of tokens", stderr), stderr
    assert TARGET not in hub.contents()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"sha256": None}, "sha256 is null, but must be an object; restore it"),
        ({"sha256": {TARGET: None}}, "1.bin is null, but must be 64 hex digits; restore it"),
        ({"bytes": "1"}, 'bytes is "1", but must be an integer; restore it'),
        ({"revision": None}, "revision is null, but must be a string; restore it"),
        ({"bytes": 10**18}, "3 missing files need 3,000,000,000.00 GB, but the disk of"),
    ],
)
def test_fault_14_a_manifest_that_cannot_work_is_one_sentence(hub, fields, sentence):
    hub.write_manifest(NAMES, **fields)
    code, _, stderr = hub.run()
    assert code == 1 and sentence in stderr and stderr.count("\n") == 1, stderr
    assert not hub.requests and not hub.contents()


def test_what_cannot_work_is_refused_at_once(hub):
    def refusal(*arguments, **options):
        code, _, stderr = hub.run(*arguments, **options)
        assert code == 1 and not hub.gets()
        return stderr

    assert re.search(
        r"cannot be downloaded from http://127\.0\.0\.1:9 .*refused.*check N, the network",
        refusal(HF_ENDPOINT="http://127.0.0.1:9"),
    )
    assert "N=104 must be in 0..103" in refusal(shards=104)
    assert "--workers=0" in refusal("--workers", "0")
    hub.manifest.write_text("[]")
    assert "manifest.json is damaged: it holds []" in refusal()
    hub.manifest.unlink()
    assert "No such file" in refusal()
    hub.manifest.write_text((ROOT / "data" / "fineweb.json").read_text())
    hub.out = hub.manifest
    assert re.search(r"cannot write into .*manifest\.json \(File exists\)", refusal())


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
        with pytest.raises(ValueError, match=r"cannot read|is not a file"):
            shard_size(tmp_path / "none.bin")
