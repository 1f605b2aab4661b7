"""Download the pretokenized FineWeb shards that train_gpt2.py trains on by default.

    python data/fineweb.py [N]    # the validation shard and N training shards (default: 27)

A shard holds 100M GPT-2 tokens in 0.2 GB; 27 training shards hold the tokens of the whole record.
data/fineweb.json names the dataset, its revision and the sha256 of its files. The hub itself gives
the sha256 of a file that is not listed there. Files that exist and have the right sha256 are kept;
only the others are downloaded, by huggingface_hub. A file gets its name after it has been verified,
and a damaged file stays until its replacement has been verified. After an error or an interruption,
run the same command again: it downloads the files that are still missing.
"""

import argparse
import os
import re
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url

sys.path.insert(0, str(Path(__file__).resolve().parent))
from shards import check_sums, file_sha256, lock, read_json, shard_size

HERE = Path(__file__).resolve().parent
LAST_SHARD = 103
STEP_TOKENS = 524_288  # per training step of the record, as in train_gpt2.py
PAUSES = 1, 5, 0  # seconds after each failed try; huggingface_hub has its own retries within a try


def read_manifest(path):
    """Return the manifest at path. Raises ValueError if it is missing or damaged."""
    try:
        manifest = read_json(path, repository=str, revision=str, bytes=int, sha256=dict)
        check_sums(path, manifest["sha256"])
        return manifest
    except (OSError, ValueError) as error:
        raise ValueError(f"{error}; restore it, for example by git checkout") from None


def persist(name, attempt):
    """Return attempt(), which may fail twice. Raises ValueError if it still fails."""
    for pause in PAUSES:
        try:
            return attempt()
        except Exception as error:  # of huggingface_hub, hf_xet, httpx or our verification
            if isinstance(error, OSError) and error.errno:  # the disk
                raise
            error = error.__cause__ or error  # "An error happened" hides the cause
            reason = (str(error) or type(error).__name__).splitlines()[0]
        time.sleep(pause)
    raise ValueError(
        f"{name} cannot be downloaded from {constants.ENDPOINT} after {len(PAUSES)} tries "
        f"({reason}): check N, the network, HF_ENDPOINT and HF_TOKEN, then run the same command "
        f"again; finished files are kept"
    )


def hub_sha256(name, manifest):
    """Return the sha256 that the hub gives for a file. Raises ValueError if the hub is silent."""
    repository, revision = manifest["repository"], manifest["revision"]
    url = hf_hub_url(repository, name, repo_type="dataset", revision=revision)
    sha256 = persist(name, lambda: get_hf_file_metadata(url).etag)
    listed = manifest["sha256"].get(name, sha256)
    if sha256 != listed or not re.fullmatch("[0-9a-f]{64}", sha256 or ""):
        raise ValueError(
            f"the sha256 of {name} is {sha256} at {constants.ENDPOINT}, but must be "
            f"{listed if listed != sha256 else '64 hex digits'}: set HF_ENDPOINT to the right "
            f"hub, or correct the manifest"
        )
    return sha256


def download(name, sha256, folder, manifest):
    """Download a file, verify it and move it to the folder. Raises ValueError if it is wrong."""
    staging = folder / ".download"
    path = hf_hub_download(
        manifest["repository"],
        name,
        repo_type="dataset",
        revision=manifest["revision"],
        cache_dir=staging / "cache",  # an empty one: the user's cache may hold a damaged copy
        local_dir=staging,
    )
    found = file_sha256(path)
    if found != sha256:
        os.unlink(path)
        raise ValueError(f"it arrives with sha256 {found}, but must have {sha256}")
    shard_size(path)
    os.replace(path, folder / name)


def is_right(path, sha256):
    """Return whether a file exists and has this sha256. Prints a line if it is damaged."""
    if not path.exists():
        return False
    found = file_sha256(path)
    if found != sha256:
        print(
            f"{path} has sha256 {found}, but must have {sha256}: downloading it again", flush=True
        )
    return found == sha256


def require_space(files, size, folder):
    """Raise ValueError if the disk has no room for so many files of `size` bytes."""
    free = shutil.disk_usage(folder).free
    if files * size > free:
        raise ValueError(
            f"{files} missing files need {files * size / 1e9:,.2f} GB, but the disk of {folder} "
            f"has {free / 1e9:,.2f} GB free, enough for {free // size} files: ask for fewer "
            f"shards, or name a folder on another disk with --out"
        )


def fetch(names, folder, workers, manifest):
    """Download the files that are missing or damaged in the folder. Raises ValueError, OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    ask_hub = partial(hub_sha256, manifest=manifest)
    with open(folder / ".lock", "w") as file, ThreadPoolExecutor(workers) as pool:
        lock(file, f"another run downloads into {folder}: wait for its end, or give another --out")
        shutil.rmtree(folder / ".download", ignore_errors=True)  # of an interrupted run
        unlisted = [name for name in names if name not in manifest["sha256"]]
        sums = {**manifest["sha256"], **dict(zip(unlisted, pool.map(ask_hub, unlisted)))}
        right = pool.map(lambda name: is_right(folder / name, sums[name]), names)
        missing = [name for name, is_there in zip(names, right) if not is_there]
        require_space(len(missing), manifest["bytes"], folder)
        list(pool.map(ask_hub, missing))  # fails before the first download
        jobs = [partial(download, name, sums[name], folder, manifest) for name in missing]
        list(pool.map(persist, missing, jobs))
        shutil.rmtree(folder / ".download", ignore_errors=True)


def stop(number, frame):
    """End the process at a signal without waiting for the downloads of its threads."""
    os.write(2, b"\ndata/fineweb.py: stopped; run the same command again to go on\n")
    os._exit(128 + number)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("shards", nargs="?", type=int, default=27, metavar="N", help="training shards (27)")
    add("--out", type=Path, default=HERE / "fineweb10B", help="folder for the shards")
    add("--workers", type=int, default=4, help="files to download at a time (4)")
    add("--manifest", type=Path, default=HERE / "fineweb.json", help="list of another dataset")
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        if not 0 <= args.shards <= LAST_SHARD:
            raise ValueError(f"N={args.shards} must be in 0..{LAST_SHARD}: ask for fewer shards")
        if args.workers < 1:
            raise ValueError(f"--workers={args.workers} must be at least 1: give 1 or more")
        train = [f"fineweb_train_{i:06d}.bin" for i in range(1, args.shards + 1)]
        names = ["fineweb_val_000000.bin", *train]
        fetch(names, args.out, args.workers, read_manifest(args.manifest))
    except ValueError as error:
        sys.exit(f"data/fineweb.py: {error}")
    except OSError as error:
        sys.exit(
            f"data/fineweb.py: cannot write into {args.out} ({error.strerror or error}): free or "
            f"repair the disk, or give another --out, then run the same command again"
        )
    tokens = sum(shard_size(args.out / name) for name in train)
    print(
        f"{len(names)} files in {args.out}: {tokens:,} training tokens, enough for "
        f"{max(tokens - 1, 0) // STEP_TOKENS:,} steps of {STEP_TOKENS:,} tokens"
    )


if __name__ == "__main__":
    main()
