"""The format of a shard of tokens, and the helpers that the data scripts share.

    python data/shards.py DIR    # verify the shards that data/pack.py wrote into DIR

The command compares the size and the sha256 of every shard with DIR/manifest.json. It exits with
status 1 and one sentence if a shard is damaged, missing or not listed.
"""

import argparse
import hashlib
import itertools
import json
import os
import re
import sys
from pathlib import Path

import numpy as np

SHARD_MAGIC = 20240520
SHARD_VERSION = 1
SHARD_HEADER = 256  # int32 values: magic, version, token count, zeros; then uint16 tokens


def shard_size(path):
    """Return the number of tokens in a shard. Raises ValueError if it is not a whole shard."""
    if not (os.path.isfile(path) and os.access(path, os.R_OK)):  # opening a pipe would hang
        raise ValueError(f"cannot read {path}: give the names of readable files")
    header = np.fromfile(path, np.int32, SHARD_HEADER).tolist()
    tokens, odd_bytes = divmod(os.path.getsize(path) - 4 * SHARD_HEADER, 2)
    if tokens < 1 or odd_bytes or header != [SHARD_MAGIC, SHARD_VERSION, tokens] + [0] * 253:
        raise ValueError(
            f"{path} is damaged, or not a shard of tokens (magic {SHARD_MAGIC}, version "
            f"{SHARD_VERSION}, number of tokens, zeros): fetch or pack it again"
        )
    return tokens


def file_sha256(path):
    """Return the sha256 of a file, 64 hex digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def write_shard(path, tokens, arrays):
    """Write uint16 arrays, `tokens` values in all, as one shard; return its sha256.

    The write is atomic: a temporary file, an fsync, then a rename.
    """
    header = np.zeros(SHARD_HEADER, np.int32)
    header[:3] = SHARD_MAGIC, SHARD_VERSION, tokens
    partial, digest = f"{path}.{os.getpid()}.partial", hashlib.sha256()
    with open(partial, "wb") as file:
        for array in itertools.chain([header], arrays):
            file.write(array)
            digest.update(array)
        assert file.tell() == 4 * SHARD_HEADER + 2 * tokens, (
            "the number of tokens differs from the header's"
        )
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return digest.hexdigest()


def read_manifest(path):
    """Return the manifest that data/pack.py wrote, with its shards added as {name: sha256}.

    Without a manifest, returns only an empty "shards". Raises ValueError if it is damaged.
    """
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        shards = {**manifest["train"]["sha256"], **manifest["val"]["sha256"]}
        if not all(re.fullmatch(r"[\w.-]+\.bin", name) for name in shards):
            raise ValueError(f"it may only list *.bin files, not {[*shards]}")
        if type(manifest["encoding"]) is not str:
            raise ValueError("its encoding must be a string")
    except FileNotFoundError:
        return {"shards": {}}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path} is damaged ({reason}): move it away and run data/pack.py again"
        ) from None
    return {**manifest, "shards": shards}


def verify(folder):
    """Return the manifest of a packed folder. Raises ValueError if its shards are not as listed."""
    path = folder / "manifest.json"
    manifest = read_manifest(path)
    again = "run the same data/pack.py command again"
    if (folder / ".pack").exists():
        raise ValueError(f"{folder} is incomplete, because data/pack.py was interrupted: {again}")
    if not manifest["shards"]:
        raise ValueError(f"{path} does not exist or lists no shard: give a folder pack.py wrote")
    for shard in sorted(folder.glob("*.bin")):
        if shard.name not in manifest["shards"]:
            raise ValueError(
                f"{shard} is not listed in {path}, but training reads it: move it away"
            )
    for name, sha256 in manifest["shards"].items():
        shard_size(folder / name)
        found = file_sha256(folder / name)
        if found != sha256:
            raise ValueError(f"{folder / name} has sha256 {found} instead of {sha256}: {again}")
    return manifest


def main():
    parser = argparse.ArgumentParser(description="Verify the shards that data/pack.py wrote.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder that data/pack.py wrote")
    folder = parser.parse_args().folder
    try:
        manifest = verify(folder)
    except (ValueError, OSError) as error:
        sys.exit(f"data/shards.py: {error}")
    print(f"{folder}: {len(manifest['shards'])} shards are as listed in manifest.json")


if __name__ == "__main__":
    main()
