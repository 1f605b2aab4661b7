"""The format of a shard of tokens, and the helpers that the data scripts share.

    python data/shards.py DIR    # verify the shards that data/pack.py wrote into DIR

The command compares the size and the sha256 of every shard with DIR/manifest.json. It exits with
status 1 and one sentence if a shard is damaged, missing or not listed.
"""

import argparse
import fcntl
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
    header, found = np.fromfile(path, np.int32, SHARD_HEADER), os.path.getsize(path)
    if (
        len(header) < SHARD_HEADER
        or tuple(header[:2]) != (SHARD_MAGIC, SHARD_VERSION)
        or header[3:].any()
    ):
        raise ValueError(
            f"{path} is not a shard of tokens (magic {SHARD_MAGIC}, version {SHARD_VERSION}, a "
            f"token count and zeros): make one with data/fineweb.py or data/pack.py"
        )
    tokens = int(header[2])
    expected = 4 * SHARD_HEADER + 2 * tokens
    if tokens < 1 or found != expected:
        raise ValueError(
            f"{path} is damaged: {found:,} bytes, but its header promises {tokens:,} tokens, "
            f"{expected:,} bytes; fetch or pack it again"
        )
    return tokens


def lock(file, sentence):
    """Lock an open file. Raises ValueError(sentence) if another process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(sentence) from None


def file_sha256(path):
    """Return the sha256 of a file, 64 hex digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def write_shard(path, tokens, arrays):
    """Write uint16 arrays of `tokens` values together as one shard; return its sha256.

    The write is atomic: a temporary file, an fsync, then a rename.
    """
    header = np.zeros(SHARD_HEADER, np.int32)
    header[:3] = SHARD_MAGIC, SHARD_VERSION, tokens
    partial, digest = f"{path}.{os.getpid()}.partial", hashlib.sha256()
    with open(partial, "wb") as file:
        for array in itertools.chain([header], arrays):
            file.write(array)
            digest.update(array)
        assert file.tell() == 4 * SHARD_HEADER + 2 * tokens, "other tokens than announced"
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return digest.hexdigest()


# -----------------------------------------------------------------------------
# Manifests
JSON_TYPES = {dict: "an object", int: "an integer", str: "a string"}


def read_json(path, **types):
    """Return the JSON object in a file. Raises ValueError unless its fields have these types."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: it is not JSON ({error})") from None
    check_types(path, found, **types)
    return found


def check_types(where, found, **types):
    """Raise ValueError unless `found`, decoded JSON, is an object whose fields have these types."""
    if type(found) is not dict:
        shown, fields = json.dumps(found)[:80], ", ".join(types)
        raise ValueError(f"{where} is damaged: it holds {shown}, not an object with {fields}")
    for name, expected in types.items():
        value = found.get(name)
        if type(value) is not expected:
            shown = json.dumps(value)[:80]
            raise ValueError(
                f"{where} is damaged: {name} is {shown}, but must be {JSON_TYPES[expected]}"
            )


def check_sums(where, sums):
    """Raise ValueError unless `sums` gives 64 hex digits for each file name."""
    for name, digest in sums.items():
        if not re.fullmatch(r"[\w.-]+\.bin", name):
            raise ValueError(
                f"{where} is damaged: it lists {name!r}, but may only list *.bin files"
            )
        if not (isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)):
            shown = json.dumps(digest)[:80]
            raise ValueError(
                f"{where} is damaged: the sha256 of {name} is {shown}, but must be 64 hex digits"
            )


def read_manifest(path):
    """Return the manifest that data/pack.py wrote, with its shards added as {name: sha256}.

    Without a manifest, returns only an empty "shards". Raises ValueError if it is damaged.
    """
    try:
        manifest = read_json(path, encoding=str, val_below=int, train=dict, val=dict)
        manifest["shards"] = {}
        for split in manifest["train"], manifest["val"]:
            check_types(path, split, tokens=int, bytes=int, sha256=dict)
            check_sums(path, split["sha256"])
            manifest["shards"] |= split["sha256"]
        return manifest
    except FileNotFoundError:
        return {"shards": {}}
    except ValueError as error:
        raise ValueError(f"{error}; move it away and run data/pack.py again") from None


def verify(folder):
    """Return the manifest of a packed folder. Raises ValueError if its shards are not as listed."""
    if (folder / ".pack").exists():
        raise ValueError(
            f"{folder} is incomplete: {folder / '.pack'} exists until data/pack.py has finished; "
            f"run the same data/pack.py command again"
        )
    path = folder / "manifest.json"
    manifest = read_manifest(path)
    if not manifest["shards"]:
        raise ValueError(
            f"{path} does not exist or lists no shard: only a folder that data/pack.py wrote can "
            f"be verified; pack it again (data/fineweb.py verifies its own shards when it runs)"
        )
    for shard in sorted(folder.glob("*.bin")):
        if shard.name not in manifest["shards"]:
            raise ValueError(
                f"{shard} is not listed in {path}, but training could read it: only the listed "
                f"shards may be in the folder; move it away"
            )
    for name, sha256 in manifest["shards"].items():
        shard_size(folder / name)
        found = file_sha256(folder / name)
        if found != sha256:
            raise ValueError(
                f"{folder / name} has sha256 {found}, but {path} lists {sha256}: "
                f"run the same data/pack.py command again"
            )
    return manifest


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder that data/pack.py wrote")
    folder = parser.parse_args().folder
    try:
        manifest = verify(folder)
    except (ValueError, OSError) as error:
        sys.exit(f"data/shards.py: {error}")
    print(f"{folder}: {len(manifest['shards'])} shards are as listed in manifest.json")


if __name__ == "__main__":
    main()
