"""Download the pretokenized FineWeb shards that GPT-2 124M trains on.

    python data/fineweb.py [--shards=27]         # the validation shard and some training shards
    python data/fineweb.py --part=20000000       # the first 20M tokens of the first training shard

A shard holds 100M GPT-2 tokens in 0.2 GB. Record 7 reads 27 training shards. The script asks before
it downloads, unless --yes is given. huggingface_hub retries, resumes and checks the size of what
arrives: a shard gets its name only when it is complete. Complete shards are kept; one that differs
from the original is downloaded again. After an error or an interruption, run the same command
again. A part is kept if its size is right; delete it to download it again.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from huggingface_hub import constants, hf_hub_download, hf_hub_url
from huggingface_hub.utils import build_hf_headers, http_backoff
from pack import HEADER_BYTES, SHARD_TOKENS, write_shard

SOURCE = dict(
    repo_id="kjj0/fineweb10B-gpt2",
    repo_type="dataset",
    revision="889765ea1f903759787add96995d81171b632d0c",
)
VALIDATION = "fineweb_val_000000.bin"
LAST_SHARD = 103
SHARD_BYTES = HEADER_BYTES + 2 * SHARD_TOKENS


def train_shard(number):
    """Return the name of a training shard. Their numbers start at 1."""
    return f"fineweb_train_{number:06d}.bin"


def confirm(size, folder):
    """Ask whether to download this many bytes. Raises ValueError unless the user agrees."""
    size = f"{size / 1e9:.1f} GB" if size >= 10**8 else f"{size / 1e6:.0f} MB"
    question = f"Download {size} of FineWeb into {folder.resolve()}? [y/N] "
    if not (sys.stdin.isatty() and input(question).lower().startswith("y")):
        raise ValueError(
            f"FineWeb ({size}) was not downloaded: pass --yes to download it, or --preset=cpu "
            "to train without FineWeb"
        )


def has_part(folder, count):
    """Return whether a folder holds a shard with the first `count` tokens."""
    path = folder / train_shard(1)
    return path.exists() and path.stat().st_size == HEADER_BYTES + 2 * count


def fetch_part(folder, count):
    """Write the first `count` tokens of the first training shard as a shard of their own."""
    headers = build_hf_headers() | {"Range": f"bytes=0-{HEADER_BYTES + 2 * count - 1}"}
    url = hf_hub_url(filename=train_shard(1), **SOURCE)
    response = http_backoff("GET", url, headers=headers, follow_redirects=True, timeout=60)
    response.raise_for_status()
    tokens = np.frombuffer(response.content, "<u2", offset=HEADER_BYTES)
    if len(tokens) != count:
        raise ValueError(f"{len(tokens)} tokens arrived instead of {count}")
    write_shard(folder / train_shard(1), tokens)


def download(folder, names, part):
    """Download the first `part` tokens of one shard or, if part is 0, the named shards.

    Raises ValueError with one sentence if that fails.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not part:
            for name in names:
                hf_hub_download(filename=name, local_dir=folder, **SOURCE)
        elif not has_part(folder, part):
            fetch_part(folder, part)
    except Exception as error:  # of huggingface_hub, hf_xet, httpx or the disk
        error = error.__cause__ or error  # the cause says more than huggingface_hub's message
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"cannot download FineWeb from {constants.ENDPOINT} into {folder} ({reason}): check "
            "the network, the disk, HF_ENDPOINT and HF_TOKEN, then run the same command again"
        ) from None


def fetch(folder, shards=0, part=0, yes=False):
    """Fill a folder with the validation shard and `shards` training shards, or with a part of one.

    part: the number of tokens, or 0. Asks first, unless `yes` is set or nothing is missing. Raises
    ValueError with one sentence if the user does not agree or the download fails.
    """
    if part:
        names = [train_shard(1)]
        size = 0 if has_part(folder, part) else 2 * part
    else:
        names = [VALIDATION, *map(train_shard, range(1, min(LAST_SHARD, shards) + 1))]
        size = SHARD_BYTES * sum(not (folder / name).exists() for name in names)
    if size and not yes:
        confirm(size, folder)
    download(folder, names, part)
    print(f"{folder} holds {len(names)} shards of FineWeb")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--out", type=Path, help="folder (default: data/fineweb10B, or data/fineweb_part)")
    add("--shards", type=int, default=27, help="at most 103 (default: 27, for record 7)")
    add("--part", type=int, default=0, metavar="TOKENS", help="first tokens of one training shard")
    add("--yes", action="store_true", help="download without asking")
    args = parser.parse_args()
    default = Path("data", "fineweb_part" if args.part else "fineweb10B")
    try:
        fetch(args.out or default, args.shards, args.part, args.yes)
    except ValueError as error:
        sys.exit(f"data/fineweb.py: {error}")
    except (KeyboardInterrupt, EOFError):  # Ctrl-C, or Ctrl-D at the question
        sys.exit("data/fineweb.py: stopped; run the same command again to continue")


if __name__ == "__main__":
    main()
