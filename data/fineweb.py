"""Download the pretokenized FineWeb shards that a run of train_gpt2.py reads by default.

    python data/fineweb.py [--name=value ...]    # the validation shard and what these settings need
    python data/fineweb.py --shards=N            # the validation shard and N training shards
    python data/fineweb.py --part=20000000       # the first 20M tokens of the first training shard

A shard holds 100M GPT-2 tokens in 0.2 GB. The default run needs 27 training shards. The script asks
before it downloads, unless --yes is given. data/fineweb.json pins the revision of the dataset and
lists the sha256 of its files. For a file that is not listed, the hub gives the sha256. Valid files
are kept. The others are downloaded by huggingface_hub, which retries and resumes. A download
replaces a damaged file only after it has been verified. After an error or an interruption, run the
same command again: it downloads the files that are still missing.

The sha256 of a part is not known in advance. It is checked for its length and its tokens only.
"""

import argparse
import json
import math
import os
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))  # absent if PYTHONSAFEPATH is set
import numpy as np
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.utils import build_hf_headers, http_backoff
from shards import SHARD_HEADER, SHARD_MAGIC, file_sha256, shard_size, write_shard

HERE = Path(__file__).resolve().parent
MANIFEST = json.loads((HERE / "fineweb.json").read_text())
SOURCE = dict(repo_id=MANIFEST["repository"], repo_type="dataset", revision=MANIFEST["revision"])
LAST_SHARD = 103
SHARD_TOKENS = 100_000_000
PART = "fineweb_train_000001.bin"  # of which --part downloads the beginning
END_OF_TEXT = 50256  # the largest token


def shards_for(settings):
    """Return how many training shards a run with these command-line settings reads."""
    sys.path.append(str(HERE.parent))
    from train_gpt2 import parse_args  # slow to import

    run = parse_args(settings)
    tokens = run.num_iterations * run.batch_size * run.sequence_length + 1  # 1: the last target
    return min(LAST_SHARD, math.ceil(tokens / SHARD_TOKENS))


def confirm(size, folder):
    """Ask whether to download this many bytes. Raises ValueError unless the user agrees."""
    size = f"{size / 1e9:.1f} GB" if size >= 10**8 else f"{size / 1e6:.0f} MB"
    size += " of FineWeb"
    answer = ""
    if sys.stdin and sys.stdin.isatty():  # None if closed
        print(f"Download {size} into {folder.resolve()}? [y/N] ", end="", flush=True)
        answer = sys.stdin.readline()
    if not answer.lower().startswith("y"):
        raise ValueError(
            f"{size} were not downloaded: pass --yes to download them, or --preset=text or "
            f"--preset=cpu to train without FineWeb"
        )


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


def fetch_part(name, folder, tokens):
    """Download the first tokens of a shard, and write them as a shard of their own."""
    size = 4 * SHARD_HEADER + 2 * tokens
    headers = build_hf_headers() | {"Range": f"bytes=0-{size - 1}"}
    url = hf_hub_url(filename=name, **SOURCE)
    response = http_backoff("GET", url, headers=headers, follow_redirects=True, timeout=60)
    response.raise_for_status()
    content = response.content[:size]  # a server without ranges sends all
    found = np.frombuffer(content[4 * SHARD_HEADER :], "<u2")
    is_shard = content.startswith(SHARD_MAGIC.to_bytes(4, "little"))
    if not is_shard or len(found) != tokens or found.max() > END_OF_TEXT:
        raise ValueError("what arrived is not the beginning of a shard of GPT-2's tokens")
    write_shard(folder / name, tokens, [found])


def fetch_or_explain(name, folder, part=None):
    """Call fetch or fetch_part. Raises ValueError with one sentence if that fails.

    part: number of tokens to fetch, or None for the whole file.
    """
    try:
        if part is None:
            fetch(name, folder)
        else:
            fetch_part(name, folder, part)
    except Exception as error:  # of huggingface_hub, hf_xet, httpx, the disk or our verification
        error = error.__cause__ or error  # "An error happened" hides the cause
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"cannot download {name} from {constants.ENDPOINT} into {folder} ({reason}): check "
            f"the network, the disk, HF_ENDPOINT and HF_TOKEN, then run the same command again"
        ) from None


def stop(number, frame):
    """Exit immediately on Ctrl-C, without waiting for the download threads."""
    os.write(2, b"\ndata/fineweb.py: stopped; run the same command again to continue\n")
    os._exit(128 + number)


def main():
    signal.signal(signal.SIGINT, stop)
    if sys.stdout:  # for an ASCII-only terminal
        sys.stdout.reconfigure(errors="backslashreplace")
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--shards", type=int, metavar="N", help="training shards, instead of settings of a run")
    add("--out", type=Path, default=Path("data/fineweb10B"), help="folder (data/fineweb10B)")
    add("--part", type=int, metavar="TOKENS", help="first tokens of one training shard, no others")
    add("--yes", action="store_true", help="download without asking")
    args, settings = parser.parse_known_args()
    if args.shards is not None and settings:
        parser.error(f"--shards replaces the settings of a run: leave out {' '.join(settings)}")
    try:
        if args.part is not None:
            if not 1 <= args.part <= SHARD_TOKENS:
                raise ValueError(f"--part={args.part} must be between 1 and {SHARD_TOKENS}")
            if not args.yes:
                confirm(2 * args.part, args.out)
            args.out.mkdir(parents=True, exist_ok=True)
            fetch_or_explain(PART, args.out, args.part)
            print(f"{args.out / PART}: {args.part:,} training tokens")
            return
        shards = shards_for(settings) if args.shards is None else args.shards
        if not 0 <= shards <= LAST_SHARD:
            raise ValueError(f"--shards={shards} must be between 0 and {LAST_SHARD}")
        train = [f"fineweb_train_{i:06d}.bin" for i in range(1, shards + 1)]
        names = ["fineweb_val_000000.bin", *train]
        missing = sum(not (args.out / name).exists() for name in names)
        if missing and not args.yes:
            confirm(missing * MANIFEST["bytes"], args.out)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda name: fetch_or_explain(name, args.out), names))
        tokens = sum(shard_size(args.out / name) for name in train)
    except (ValueError, OSError) as error:
        sys.exit(f"data/fineweb.py: {error}")
    shutil.rmtree(args.out / ".download", ignore_errors=True)
    print(f"{len(names)} files in {args.out}: {tokens:,} training tokens")


if __name__ == "__main__":
    main()
