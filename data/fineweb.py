"""Download the pretokenized FineWeb shards that train_gpt2.py trains on by default.

    python data/fineweb.py [N]    # validation and the first N training shards (default: 27)

Each shard holds 100M GPT-2 tokens (200 MB); 27 hold the tokens of the whole record. They come from
the public dataset kjj0/fineweb10B-gpt2 through huggingface_hub, which resumes broken downloads and
moves only whole files into data/fineweb10B/. Each is checked against its header, and a finished one
is not fetched again.
"""

import argparse
import os
import sys
from pathlib import Path

from huggingface_hub import hf_hub_download

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from train_gpt2 import shard_size

REPOSITORY = "kjj0/fineweb10B-gpt2"
LAST_SHARD = 103


def fetch(name, folder):
    """Put one shard into folder unless it is there. Raises ValueError if what comes is damaged."""
    path = folder / name
    if not path.exists():
        hf_hub_download(REPOSITORY, name, repo_type="dataset", local_dir=folder)
    try:
        print(f"{path}: {shard_size(path):,} tokens")
    except ValueError:
        os.replace(path, path.with_suffix(".damaged"))
        raise


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("shards", nargs="?", type=int, default=27, metavar="N",
                        help="training shards of 100M tokens (default 27)")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "fineweb10B")
    args = parser.parse_args()
    if not 0 <= args.shards <= LAST_SHARD:
        sys.exit(f"data/fineweb.py: N={args.shards} must be in 0..{LAST_SHARD}")
    names = ["fineweb_val_000000.bin"]
    names += [f"fineweb_train_{i:06d}.bin" for i in range(1, args.shards + 1)]
    try:
        for name in names:
            fetch(name, args.out)
    except Exception as error:  # of the hub's client, of its network library, of the disk
        sys.exit(f"data/fineweb.py: {error}\nRun the same command again: it goes on where it is.")


if __name__ == "__main__":
    main()
