"""Download the pretokenized FineWeb shards that GPT-2 124M trains on.

    python data/fineweb.py [--shards=27]         # the validation shard and some training shards
    python data/fineweb.py --part=20000000       # the first 20M tokens of the first training shard

A shard holds 100M GPT-2 tokens in 0.2 GB. Record 7 reads 27 training shards. The script asks before
it downloads shards that are missing, unless --yes is given. A shard gets its name only when it is
complete, and one that was changed afterwards is downloaded again. After an error or an
interruption, run the same command again: it continues with the shard that was interrupted, while a
part starts again.
"""

import argparse
import contextlib
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
    shown_size = f"{size / 1e9:.1f} GB" if size >= 10**8 else f"{size / 1e6:.0f} MB"
    agrees = False
    if sys.stdin.isatty():
        question = f"Download {shown_size} of FineWeb into {folder.resolve()}? [y/N] "
        agrees = input(question).lower().startswith("y")
    if not agrees:
        raise ValueError(
            f"FineWeb ({shown_size}) was not downloaded: run the same command again with --yes, or "
            "train without FineWeb (bash run.sh --preset=cpu)"
        )


@contextlib.contextmanager
def errors_in_one_sentence(folder):
    """Turn any error of a download into a ValueError with one sentence."""
    try:
        yield
    except Exception as error:  # huggingface_hub, hf_xet, httpx and the disk raise many kinds
        error = error.__cause__ or error  # the cause says more than huggingface_hub's message
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"cannot download FineWeb from {constants.ENDPOINT} into {folder} ({reason}): check "
            "the network, the disk, HF_ENDPOINT and HF_TOKEN, then run the same command again"
        ) from None


def fetch_shards(folder, count, yes=False):
    """Fill a folder with the validation shard and the first `count` training shards.

    Asks first if one is missing, unless `yes` is set. Raises ValueError with one sentence if the
    user does not agree or the download fails.
    """
    names = [VALIDATION, *map(train_shard, range(1, count + 1))]
    missing = [name for name in names if not (folder / name).exists()]
    if missing and not yes:
        confirm(SHARD_BYTES * len(missing), folder)
    with errors_in_one_sentence(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            hf_hub_download(filename=name, local_dir=folder, **SOURCE)
    print(f"{folder} holds {len(names)} shards of FineWeb")


def fetch_part(folder, count, yes=False):
    """Write the first `count` tokens of the first training shard as a shard of their own.

    Asks first, unless `yes` is set. Raises ValueError with one sentence if the user does not
    agree, the download fails, or the folder holds another shard of this name.
    """
    path = folder / train_shard(1)
    size = HEADER_BYTES + 2 * count
    if path.exists():
        if path.stat().st_size != size:
            raise ValueError(
                f"{path} does not hold {count:,} tokens: move or delete it, then run the same "
                "command again"
            )
    else:
        if not yes:
            confirm(size, folder)
        headers = build_hf_headers() | {"Range": f"bytes=0-{size - 1}"}
        url = hf_hub_url(filename=path.name, **SOURCE)
        with errors_in_one_sentence(folder):
            folder.mkdir(parents=True, exist_ok=True)
            response = http_backoff("GET", url, headers=headers, follow_redirects=True, timeout=60)
            response.raise_for_status()
            tokens = np.frombuffer(response.content, "<u2", offset=HEADER_BYTES)
            if len(tokens) != count:
                raise ValueError(f"{len(tokens)} tokens arrived instead of {count}")
            write_shard(path, tokens)
    print(f"{folder} holds the first {count:,} tokens of FineWeb")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--out", type=Path, help="folder (default: data/fineweb10B, or data/fineweb_part)")
    add("--shards", type=int, default=27, help="at most 103 (default: 27, for record 7)")
    add("--part", type=int, metavar="TOKENS", help="first tokens of one training shard")
    add("--yes", action="store_true", help="download without asking")
    args = parser.parse_args()
    if not 0 <= args.shards <= LAST_SHARD:
        parser.error(f"--shards={args.shards} must be from 0 to {LAST_SHARD}")
    if args.part is not None and not 1 <= args.part <= SHARD_TOKENS:
        parser.error(f"--part={args.part} must be from 1 to {SHARD_TOKENS}, the tokens of a shard")
    try:
        if args.part is None:
            fetch_shards(args.out or Path("data", "fineweb10B"), args.shards, args.yes)
        else:
            fetch_part(args.out or Path("data", "fineweb_part"), args.part, args.yes)
    except ValueError as error:
        sys.exit(f"data/fineweb.py: {error}")
    except (KeyboardInterrupt, EOFError):  # Ctrl-C, or Ctrl-D at the question
        sys.exit("data/fineweb.py: stopped; run the same command again to continue")


if __name__ == "__main__":
    main()
