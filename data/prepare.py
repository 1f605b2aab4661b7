"""Prepare the data of a run: `python data/prepare.py [modern] [--name=value ...] [--yes]`.

The settings are those of train_gpt2.py or, after the word `modern`, of train_modern.py. The folder
of train_files decides what to do:

    data/torch_sources    packs the Python files of the installed PyTorch, as bytes
    data/small            downloads 20M GPT-2 tokens of FineWeb (40 MB) and encodes their text with
                          the first 2,048 tokens of GPT-2's vocabulary
    data/fineweb10B       downloads the shards that the run needs, each 0.2 GB
    any other folder      nothing: it holds the user's own data

Data that are already there are kept. You are asked before a download, unless --yes is given.
"""

import math
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "records" / "modern")]

import fineweb  # noqa: E402
import pack  # noqa: E402
import torch  # noqa: E402

import train_gpt2  # noqa: E402

TORCH_SOURCES = Path("data", "torch_sources")
SMALL = Path("data", "small")
FINEWEB = Path("data", "fineweb10B")


def read_settings(argv):
    """Return the settings of a run."""
    if argv[:1] != ["modern"]:
        return train_gpt2.parse_args(argv)
    import train_modern

    return train_gpt2.parse_args(argv[1:], train_modern.RECIPE)


def shards_for(args):
    """Return how many training shards of FineWeb a run reads."""
    inputs = args.num_iterations * args.batch_size * args.sequence_length
    shards = math.ceil((inputs + 1) / pack.SHARD_TOKENS)  # the last input has a target, too
    return min(shards, fineweb.LAST_SHARD)


def pack_torch_sources():
    """Pack the sources of PyTorch, except the file that differs between builds."""
    folder = str(Path(torch.__file__).parent)
    files = ["--pattern", "*.py", "--exclude", "version.py"]
    options = ["--encoding", "bytes", "--val_fraction", "0.02", "--by_name"]
    pack.main([folder, *files, *options, "--out", str(TORCH_SOURCES)])


def pack_small(yes):
    """Download a part of FineWeb and pack it."""
    folder = Path("data", "fineweb_part")
    fineweb.fetch_part(folder, 20_000_000, yes)
    shard = str(folder / fineweb.train_shard(1))
    pack.main([shard, "--encoding", "gpt2-2048", "--val_fraction", "0.02", "--out", str(SMALL)])


def prepare(argv, yes):
    """Prepare the data of the run with these arguments."""
    for folder in TORCH_SOURCES, SMALL:
        if (folder / ".pack").exists():  # pack.py was killed while it replaced our shards
            shutil.rmtree(folder)
    args = read_settings(argv)
    folder = Path(args.train_files).parent
    if folder == TORCH_SOURCES and not (folder / "manifest.json").exists():
        pack_torch_sources()
    elif folder == SMALL and not (folder / "manifest.json").exists():
        pack_small(yes)
    elif folder == FINEWEB:
        if args.device != "cpu" and torch.cuda.device_count() == 0:
            raise ValueError(
                "no GPU was found, and these settings are for GPUs: on a CPU, a run takes months. "
                "Try `bash run.sh` or `bash run.sh modern --preset=small`, or pass --device=cpu"
            )
        fineweb.fetch_shards(folder, shards_for(args), yes)


def main(argv):
    try:
        prepare([argument for argument in argv if argument != "--yes"], "--yes" in argv)
    except (ValueError, OSError) as error:
        sys.exit(f"data/prepare.py: {error}")
    except (KeyboardInterrupt, EOFError):  # Ctrl-C, or Ctrl-D at a question
        sys.exit("data/prepare.py: stopped; run the same command again to continue")


if __name__ == "__main__":
    main(sys.argv[1:])
