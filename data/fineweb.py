"""Download the pretokenized FineWeb shards that train_gpt2.py trains on by default.

    python data/fineweb.py [N]    # validation and the first N training shards (default: 27)

A shard holds 100M GPT-2 tokens in 0.2 GB; 27 hold the tokens of the whole record. They come from
the dataset, at the revision, that data/fineweb.json names, through huggingface_hub's client.
Bytes gather in OUT/*.partial: after a cut, a stop or a kill the same command goes on from them. A
file gets its final name only when it is whole and has the sha256 that data/fineweb.json lists, or
else the hub tells; from then on it is checked, not fetched. A run that cannot do this ends with
one sentence and exit code 1 (130 or 143 when stopped).
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import sys
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from huggingface_hub import constants, get_hf_file_metadata, get_session, hf_hub_url
from huggingface_hub.errors import HTTPError  # httpx's own: the base of all its network errors
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent))
from shards import file_sha256, lock, shard_size

HERE = Path(__file__).resolve().parent
LAST_SHARD = 103
STEP_TOKENS = 524_288  # of a training step of the record, as in train_gpt2.py
COPIES = 3  # of a file that come wrong before giving up
TRIES = 6  # connections in a row, all broken or too slow, before giving up
# The environment can change these three; the tests use it to wait less.
SLOW_RATE = float(os.environ.get("FINEWEB_SLOW_RATE", "10e3"))  # bytes/s: below, a connection
SLOW_SECONDS = float(os.environ.get("FINEWEB_SLOW_SECONDS", "30"))  # is dropped after this time
BACKOFF = float(os.environ.get("FINEWEB_BACKOFF", "1"))  # seconds, doubled with every failure
GO_ON = "then run the same command again: it goes on where it is"


def leave(code, sentence):
    """End the process at once: its threads may sit in a read, and partial files can stay as is."""
    line_end = "\n" * sys.stderr.isatty()  # of the progress bar
    os.write(2, f"{line_end}data/fineweb.py: {sentence}\n".encode())
    os._exit(code)


def notice(text):
    """Print a line above the progress bar, flushed because `leave` flushes nothing."""
    tqdm.write(text)
    sys.stdout.flush()


class Shard:
    """One file of the dataset: where it comes from, where it goes and what it must be."""

    def __init__(self, name, folder, manifest):
        repository, revision = manifest["repository"], manifest["revision"]
        self.name, self.path, self.partial = name, folder / name, folder / f"{name}.partial"
        self.origin = f"{repository} at revision {revision}"
        self.url = hf_hub_url(repository, name, repo_type="dataset", revision=revision)
        self.listed = manifest["sha256"].get(name)
        self.notes = folder / f"{name}.sha256"  # the hub's sum, where the manifest lists none
        self.sha256 = self.listed or self.recall()
        self.size = manifest.get("bytes") if self.listed else None

    def recall(self):
        """Return the sum that an earlier run had from the hub, so that a check needs no network."""
        with contextlib.suppress(OSError):
            sha256, _, origin = self.notes.read_text().strip().partition("  ")
            return sha256 if origin == self.origin else None

    def held(self):
        """Return how many bytes of the file are here."""
        for path in (self.partial, self.path):  # in this order: the one may become the other
            with contextlib.suppress(FileNotFoundError):
                return path.stat().st_size
        return 0

    def right(self, path):
        """Tell whether path is this file, whole and unchanged; report and delete it if not."""
        found = file_sha256(path)
        if found == self.sha256:
            shard_size(path)  # its ValueError is final: the dataset itself is wrong
            return True
        size = path.stat().st_size
        self.fault = f"{path} ({size:,} bytes) has sha256 {found}, not {self.sha256}"
        notice(f"{self.fault}: deleted, to be fetched again")
        path.unlink()
        return False

    def check(self):
        """Learn what the file must be; delete a finished or partial one that cannot be it.

        The hub is asked about a file that must be fetched or that the manifest does not list.
        """
        if self.path.exists():
            if self.sha256 is None:
                self.ask()
            if self.right(self.path):
                self.partial.unlink(missing_ok=True)
                self.size = self.held()
                return
        self.ask()
        if self.held() > self.size:
            self.partial.unlink()

    def ask(self):
        """Ask the hub for size and sum. Raises ValueError where they are not the manifest's."""
        told = self.persist(lambda: get_hf_file_metadata(self.url))
        sha256 = told.etag if re.fullmatch("[0-9a-f]{64}", told.etag or "") else None
        for what, found, wanted in ("sha256", sha256, self.sha256), ("size", told.size, self.size):
            if len({found, wanted} - {None}) != 1:
                raise ValueError(
                    f"the {what} of {self.name} is {found} at {constants.ENDPOINT} and {wanted} in "
                    f"the manifest: set HF_ENDPOINT to the right hub, or mend the manifest"
                )
        self.sha256, self.size = self.sha256 or sha256, self.size or told.size

    def persist(self, attempt):
        """Return attempt(), repeated after network errors: ConnectionError after TRIES in a row.

        A try that brought bytes faster than SLOW_RATE was progress and starts the count anew.
        """
        failures, best = 0, self.held()
        while True:
            started = time.monotonic()
            try:
                return attempt()
            except (HTTPError, TimeoutError, EOFError) as error:
                reason, asked = self.explain(error)
            gained = self.held() - best
            best += max(gained, 0)  # bytes that come again are no progress
            progress = gained > SLOW_RATE * (time.monotonic() - started)
            failures = 0 if progress else failures + 1
            if failures == TRIES:
                raise ConnectionError(
                    f"{self.name} does not come from {constants.ENDPOINT} in {TRIES} tries "
                    f"({reason}): check the network, {GO_ON}"
                )
            pause = max(asked, BACKOFF * 2**failures / 2)
            notice(f"{self.name}: {reason}; next try in {pause:g} s")
            time.sleep(pause)

    def explain(self, error):
        """Return (why a try failed, seconds the hub asks to wait). ValueError if it is final."""
        response = getattr(error, "response", None)
        if response is None:
            return str(error) or type(error).__name__, 0
        code, headers = response.status_code, response.headers
        if code < 500 and code not in (408, 416, 429):
            raise ValueError(
                f"{constants.ENDPOINT} gives no {self.name} of {self.origin} (HTTP status {code}): "
                f"ask for fewer shards, or mend the manifest, HF_ENDPOINT or HF_TOKEN"
            )
        limit = headers.get("RateLimit", "") if code == 429 else ""  # '"api";r=0;t=55'
        asked = re.search(r"\d+$", headers.get("Retry-After", limit))
        return f"HTTP status {code}", min(int(asked[0]), 300) if asked else 0

    def transfer(self):
        """Add what one connection brings. Raises HTTPError and what `receive` does."""
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        if self.held():
            headers["Range"] = f"bytes={self.held()}-"
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT  # seconds of silence
        with get_session().stream("GET", self.url, headers=headers, timeout=timeout) as response:
            if response.status_code in (200, 416):  # the hub ignores or refuses the Range
                self.partial.unlink(missing_ok=True)
            hf_raise_for_status(response)
            with open(self.partial, "ab") as file:
                self.receive(response.iter_bytes(), file)

    def receive(self, pieces, file):
        """Write the pieces of one connection. Raises EOFError, and TimeoutError if it is slow."""
        position = mark = file.tell()
        marked = time.monotonic()
        for piece in pieces:
            file.write(piece)
            file.flush()  # a kill must not cost what has come
            position, now = position + len(piece), time.monotonic()
            if position >= self.size:
                return
            if now - marked > SLOW_SECONDS:
                if position - mark < SLOW_RATE * (now - marked):
                    raise TimeoutError(f"below {SLOW_RATE:g} bytes/s for {SLOW_SECONDS:g} s")
                mark, marked = position, now
        raise EOFError(f"it ended at {position:,} of {self.size:,} bytes")

    def fetch(self):
        """Bring the right whole file to its final name. Raises ValueError if it comes wrong."""
        for _ in range(COPIES):
            if self.held() < self.size:
                self.persist(self.transfer)
            if self.right(self.partial):
                with open(self.partial, "rb+") as file:
                    os.fsync(file.fileno())
                if not self.listed:
                    self.notes.write_text(f"{self.sha256}  {self.origin}\n")
                os.replace(self.partial, self.path)
                return
        raise ValueError(
            f"{self.name} came wrong {COPIES} times ({self.fault}): something between the hub and "
            f"here changes it; try another network, or later"
        )


def in_threads(workers, function, shards, tick=lambda: None):
    """Call function on all shards, and tick while it goes on; raise the first error at once."""
    pool = ThreadPoolExecutor(workers)
    waiting = {pool.submit(function, shard) for shard in shards}
    while waiting:
        done, waiting = wait(waiting, timeout=0.2, return_when=FIRST_EXCEPTION)
        tick()
        for future in done:
            future.result()


def read_manifest(path):
    """Return the manifest at path. Raises ValueError if it is none."""
    try:
        manifest = json.loads(path.read_text())
        if {"repository", "revision", "sha256"} <= manifest.keys():
            return manifest
    except (OSError, ValueError, AttributeError):
        pass
    raise ValueError(
        f"{path} is no manifest with repository, revision and sha256: see the one of "
        f"FineWeb, data/fineweb.json"
    )


def require_room(shards, folder):
    """Raise ValueError unless the disk has room for all bytes that are not here."""
    ends = list(itertools.accumulate(shard.size - shard.held() for shard in shards))
    free = shutil.disk_usage(folder).free
    if ends[-1] > free:
        fitting = max(sum(end <= free for end in ends) - 1, 0)
        raise ValueError(
            f"{ends[-1] / 1e9:,.2f} GB are to come, but the disk of {folder} has {free / 1e9:,.2f} "
            f"GB free, enough for N={fitting}: ask for fewer shards, or name a folder on another "
            f"disk with --out"
        )


def fetch_all(shards, workers):
    """Fetch shards under one progress bar, which shows what is on the disk."""

    def held():
        return sum(shard.held() for shard in shards)

    total, quiet = sum(shard.size for shard in shards), not (shards and sys.stderr.isatty())
    with tqdm(total=total, initial=held(), unit="B", unit_scale=True, disable=quiet) as bar:
        in_threads(workers, Shard.fetch, shards, lambda: bar.update(held() - bar.n))


def download(count, folder, workers, manifest):
    """Put validation and the first `count` training shards into folder; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"fineweb_train_{i:06d}.bin" for i in range(1, count + 1)]
    shards = [Shard(name, folder, manifest) for name in ["fineweb_val_000000.bin", *names]]
    with open(folder / ".lock", "w") as file:
        lock(
            file,
            f"another run downloads into {folder}: wait for its end, or name another folder "
            f"with --out",
        )
        in_threads(workers, Shard.check, shards)
        require_room(shards, folder)
        fetch_all([shard for shard in shards if not shard.path.exists()], workers)
    return [shard.path for shard in shards]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "shards",
        nargs="?",
        type=int,
        default=27,
        metavar="N",
        help="training shards of 100M tokens (default 27)",
    )
    parser.add_argument("--out", type=Path, default=HERE / "fineweb10B", help="folder")
    parser.add_argument("--workers", type=int, default=4, help="files at once (default 4)")
    parser.add_argument(
        "--manifest",
        type=Path,
        default=HERE / "fineweb.json",
        help="of another dataset with files of these names",
    )
    args = parser.parse_args()
    stopped = f"stopped; {args.out} keeps what has come: run the same command again to go on"
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: leave(128 + number, stopped))
    try:
        if not 0 <= args.shards <= LAST_SHARD:
            raise ValueError(f"N={args.shards} must be in 0..{LAST_SHARD}")
        if args.workers < 1:
            raise ValueError(f"--workers={args.workers} must be at least 1")
        paths = download(args.shards, args.out, args.workers, read_manifest(args.manifest))
    except (ValueError, ConnectionError) as error:
        leave(1, error)
    except OSError as error:  # of the disk
        leave(
            1,
            f"cannot write into {args.out} ({error.strerror or error}), which keeps what has "
            f"come: mend this or name another folder with --out, {GO_ON}",
        )
    validation, *train = map(shard_size, paths)
    print(
        f"{len(paths)} files, {validation + sum(train):,} tokens in {args.out}: enough for "
        f"{max(sum(train) - 1, 0) // STEP_TOKENS:,} steps of {STEP_TOKENS:,} tokens"
    )


if __name__ == "__main__":
    main()
