"""The format of a shard of tokens, and what all that read and write files here have in common."""

import fcntl
import hashlib
import itertools
import os

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
    """Hold an open file alone, or raise ValueError(sentence) because another process does."""
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

    It appears under its name only when it is whole and on the disk.
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
