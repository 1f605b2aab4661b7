"""Download the pretokenized FineWeb shards that train_gpt2.py trains on by default.

    python data/fineweb.py [N]    # the validation shard and N training shards (default: 27)

A shard holds 100M GPT-2 tokens in 0.2 GB; 27 training shards are enough for the default run.
data/fineweb.json pins the revision of the dataset and lists the sha256 of its files. For a file
that is not listed, the hub gives the sha256. Valid files are kept. The others are downloaded by
huggingface_hub, which retries and resumes. A download replaces a damaged file only after it has
been verified. After an error or an interruption, run the same command again: it downloads the files
that are still missing.
"""

import argparse
import json
import os
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
from shards import file_sha256, shard_size

HERE = Path(__file__).resolve().parent
MANIFEST = json.loads((HERE / "fineweb.json").read_text())
SOURCE = dict(repo_id=MANIFEST["repository"], repo_type="dataset", revision=MANIFEST["revision"])
LAST_SHARD = 103


def expected_sha256(name):
    """Return the listed sha256 of a file, or the hub's if the file is not listed."""
    if name in MANIFEST["sha256"]:
        return MANIFEST["sha256"][name]
    return get_hf_file_metadata(hf_hub_url(filename=name, **SOURCE)).etag


def fetch(name, folder):
    """Download a file unless the folder has it with the right sha256."""
    sha256 = expected_sha256(name)
    if (folder / name).exists():
        if file_sha256(folder / name) == sha256:
            return
        print(f"{folder / name} is damaged: downloading it again", flush=True)
    # Ask for the file first: hf_hub_download tries for six minutes if the hub does not answer.
    get_hf_file_metadata(hf_hub_url(filename=name, **SOURCE), timeout=30)
    staging = folder / ".download"
    # The cache is an empty one, because a file in the user's own cache may be damaged.
    path = hf_hub_download(filename=name, local_dir=staging, cache_dir=staging / "cache", **SOURCE)
    found = file_sha256(path)
    if found != sha256:
        os.unlink(path)
        raise ValueError(f"it arrived with sha256 {found} instead of {sha256}")
    os.replace(path, folder / name)


def fetch_or_explain(name, folder):
    """Call fetch. Raises ValueError with one sentence if that fails for whatever reason."""
    try:
        fetch(name, folder)
    except Exception as error:  # of huggingface_hub, hf_xet, httpx, the disk or our verification
        error = error.__cause__ or error  # "An error happened" hides the cause
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"cannot download {name} from {constants.ENDPOINT} into {folder} ({reason}): check N, "
            f"the network, the disk, HF_ENDPOINT and HF_TOKEN, then run the same command again"
        ) from None


def stop(number, frame):
    """Exit immediately on Ctrl-C, without waiting for the download threads."""
    os.write(2, b"\ndata/fineweb.py: stopped; run the same command again to continue\n")
    os._exit(128 + number)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("shards", nargs="?", type=int, default=27, metavar="N", help="training shards (27)")
    add("--out", type=Path, default=Path("data/fineweb10B"), help="folder (data/fineweb10B)")
    args = parser.parse_args()
    if not 0 <= args.shards <= LAST_SHARD:
        sys.exit(f"data/fineweb.py: N={args.shards} must be between 0 and {LAST_SHARD}")
    signal.signal(signal.SIGINT, stop)
    train = [f"fineweb_train_{i:06d}.bin" for i in range(1, args.shards + 1)]
    names = ["fineweb_val_000000.bin", *train]
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda name: fetch_or_explain(name, args.out), names))
        tokens = sum(shard_size(args.out / name) for name in train)
    except ValueError as error:
        sys.exit(f"data/fineweb.py: {error}")
    shutil.rmtree(args.out / ".download", ignore_errors=True)
    print(f"{len(names)} files in {args.out}: {tokens:,} training tokens")


if __name__ == "__main__":
    main()
