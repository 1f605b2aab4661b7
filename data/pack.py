"""Tokenize text into the shards that train_gpt2.py reads, on all cores.

    python data/pack.py INPUT... --out DIR [--encoding bytes] [--val_fraction 0.1]

An INPUT is a file or a folder. A .jsonl file holds one document per line and a .parquet file one
per row (it needs pyarrow), both in the field --text_field. Any other file is one document in UTF-8.
Files may be compressed as .gz or .xz. Folders are read recursively, without following links.

Documents keep the order of the inputs; the files of a folder are sorted by relative path. Each
document starts with the end-of-text token. A document is held out for validation if the hash of its
name is below --val_fraction. The name is a file's relative path, or the text of a line or row, so
added documents do not move others between the splits. Of up to ten documents, the end is held out
instead: a fraction of all tokens. The same happens if the hash would leave a split empty.

The output is DIR/train_000001.bin..., DIR/val_000000.bin..., DIR/manifest.json and DIR/skipped.txt.
`python data/shards.py DIR` verifies it. The shards of an earlier pack are replaced after all text
has been tokenized. If a pack is killed while it replaces them, DIR/.pack remains and training
refuses the folder: run the same command again. The disk needs room for twice the tokens. Memory use
is constant except for 50 bytes per document.
"""

import argparse
import array
import codecs
import collections
import contextlib
import fcntl
import fnmatch
import gzip
import hashlib
import json
import lzma
import math
import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
from shards import read_manifest, write_shard
from tqdm import tqdm

FEW = 10  # documents, too few to hold out whole ones
SHARD_TOKENS = 100_000_000
CHUNK = 2**20  # bytes of text per task of a thread, and per piece of a long document
# A long document may be cut before a whitespace that follows another character. No encoding of at
# most 65536 ids has a token across that place, so the pieces have the same tokens as the whole.
CUT = re.compile(r"\S(?=[ \t\n\r])")


# -----------------------------------------------------------------------------
# Encodings
class BytesEncoding:
    """The 256 bytes and an end-of-text token, with the methods of tiktoken's that are used."""

    name, n_vocab, eot_token = "bytes", 257, 256

    @staticmethod
    def encode_ordinary(text):
        return list(text.encode())

    @staticmethod
    def decode_single_token_bytes(token):
        return bytes([token])

    @staticmethod
    def encode_to_numpy(text, disallowed_special=()):
        return np.frombuffer(text.encode(), np.uint8)


def get_encoding(name):
    """Return an encoding. Raises ValueError if it is unknown, unavailable or too large."""
    if name == "bytes":
        return BytesEncoding
    try:
        encoding = tiktoken.get_encoding(name)
    except (ValueError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"the encoding {name} is not available ({reason}): give bytes or gpt2, or set "
            f"TIKTOKEN_CACHE_DIR to a folder that has its vocabulary"
        ) from None
    if encoding.n_vocab > 65536:
        raise ValueError(
            f"the encoding {name} has {encoding.n_vocab} ids, but a shard's uint16 has room for "
            f"65536: give bytes, gpt2, r50k_base or p50k_base"
        )
    return encoding


# -----------------------------------------------------------------------------
# Reading: from inputs to pieces of documents, in order
@dataclass
class Piece:
    """A document or a piece of a long one. If it cannot be read, `fault` says why."""

    file: str
    line: int
    text: str
    name: str  # its hash decides whether the document is held out
    starts: bool = True  # whether it is the first piece of its document
    fault: str = ""


def walk(folder, out):
    """Yield (relative path, path) of the files in a folder, except those in out. Raises OSError."""

    def fail(error):
        raise error

    for root, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if Path(root, name).resolve() != out.resolve()]
        for path in (Path(root, name) for name in names):
            if path.is_file() or not path.exists():  # skips pipes; broken links fail when read
                yield path.relative_to(folder).as_posix(), path


def list_files(inputs, pattern, exclude, out):
    """Return [(name, path)] of all input files, in order. Raises ValueError if there are none."""
    files = []
    for path in map(Path, inputs):
        if path.is_dir() and path.resolve() == out.resolve():
            raise ValueError(f"--out={out} is an input, too: give another folder")
        elif path.is_dir():
            for name, file in sorted(walk(path, out)):
                if fnmatch.fnmatch(file.name, pattern) and name not in exclude:
                    files.append((name, file))
        elif path.exists():
            files.append((path.name, path))
        else:
            raise ValueError(f"{path} is neither a file nor a folder: give existing ones")
    if not files:
        raise ValueError(f"no file matches {pattern!r}: give other inputs or another --pattern")
    return files


def read_lines(file, text_field):
    """Yield (line number, text, fault) of the lines of JSON."""
    for number, line in enumerate(file, start=1):
        text, fault = None, ""
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = row.get(text_field) if isinstance(row, dict) else None
        except (ValueError, RecursionError):
            fault = "is not JSON in UTF-8"
        yield number, text, fault


def read_rows(file, text_field):
    """Yield (row number, text, no fault) of the rows of a parquet file."""
    from pyarrow import parquet

    number = 0
    for batch in parquet.ParquetFile(file).iter_batches(batch_size=100, columns=[text_field]):
        for text in batch.column(text_field).to_pylist():
            number += 1
            yield number, text, ""


def read_text(file, text_field):
    """Yield (line number, piece, fault) of a text, cut before a whitespace."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, text, more = 1, "", True
    while more:
        more = file.read(CHUNK)
        try:
            text += decoder.decode(more, final=not more)
        except UnicodeDecodeError as error:
            line += text.count("\n") + error.object[: error.start].count(b"\n")
            yield line, "", "is not UTF-8"
            return
        cuts = [match.end() for match in CUT.finditer(text, max(0, len(text) - 4096))]
        cut = (cuts[-1] if cuts else 0) if more else len(text)
        if cut:
            yield line, text[:cut], ""
            line, text = line + text.count("\n", 0, cut), text[cut:]


def fault_of(text, text_field):
    """Return why a text cannot be packed, or an empty string."""
    if not isinstance(text, str):
        return f"has no text {text_field!r}"
    if not text:
        return "is empty"
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return "is not Unicode"
    return ""


OPEN = {".gz": gzip.open, ".xz": lzma.open}
READERS = {".jsonl": read_lines, ".ndjson": read_lines, ".parquet": read_rows}


def read_pieces(file, path, text_field):
    """Yield the Pieces of a file. If the rest of the file is unreadable, the last one says so."""
    base, compression = os.path.splitext(file)
    if compression not in OPEN:
        base, compression = file, ""
    reader = READERS.get(os.path.splitext(base)[1].lower(), read_text)
    line, begun = 0, False  # whether the last piece belongs to the next one's document
    try:
        with OPEN.get(compression, open)(path, "rb") as content:
            for line, text, fault in reader(content, text_field):
                fault = fault or fault_of(text, text_field)
                name = file if reader is read_text else text
                yield Piece(file, line, "" if fault else text, name, not begun, fault)
                begun = reader is read_text
        if line == 0 and reader is read_text:
            yield Piece(file, 1, "", file, fault="is empty")
    except ImportError:
        raise ValueError(f"{path} needs a package: pip install pyarrow") from None
    except Exception as error:  # of the disk or a library: the file is damaged or gone
        reason = (str(error) or type(error).__name__).splitlines()[0]
        yield Piece(file, line + 1, "", file, not begun, f"cannot be read on ({reason})")


# -----------------------------------------------------------------------------
# Encoding: from pieces to one file of tokens
def batches(pieces):
    """Yield lists of pieces with together about CHUNK bytes of text."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= CHUNK:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_batch(batch, encoding):
    """Return [(piece, key, tokens)]: the hash of the document's name, and a uint16 array."""
    encoded = []
    for piece in batch:
        if piece.fault:
            encoded.append((piece, 0, None))
            continue
        digest = hashlib.sha256(piece.name.encode("utf-8", "surrogateescape")).digest()
        tokens = encoding.encode_to_numpy(piece.text, disallowed_special=()).astype(np.uint16)
        if piece.starts:
            tokens = np.insert(tokens, 0, encoding.eot_token)
        encoded.append((piece, int.from_bytes(digest[:4], "big"), tokens))
    return encoded


def encode(pieces, encoding):
    """Yield encode_batch's results in order, from all cores: tiktoken releases the GIL."""
    workers, waiting = os.cpu_count(), collections.deque()
    pool = ThreadPoolExecutor(workers)
    try:
        for batch in batches(pieces):
            waiting.append(pool.submit(encode_batch, batch, encoding))
            if len(waiting) > 2 * workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def tokenize(pieces, encoding, file, skip_bad):
    """Write the tokens of all documents, one after the other, into a file.

    Returns (tokens of each document, key of each document, faulty pieces). Raises ValueError at the
    first fault unless skip_bad is set.
    """
    lengths, keys, faulty = array.array("Q"), array.array("Q"), []
    progress = tqdm(unit=" tokens", unit_scale=True, disable=None)  # None: only on a terminal
    for piece, key, tokens in encode(pieces, encoding):
        if piece.fault and not skip_bad:
            raise ValueError(
                f"{piece.file}:{piece.line} {piece.fault}: correct it, give another --text_field, "
                f"leave out the file with --exclude or all bad documents with --skip_bad"
            )
        if piece.fault:
            faulty.append(piece)
            if not piece.starts:  # the earlier pieces of this document are dropped, too
                file.seek(-2 * lengths.pop(), os.SEEK_END)
                file.truncate()
                keys.pop()
            continue
        if piece.starts:
            lengths.append(0)
            keys.append(key)
        lengths[-1] += len(tokens)
        file.write(tokens)
        progress.update(len(tokens))
    progress.close()
    return np.array(lengths, np.int64), np.array(keys, np.int64), faulty


# -----------------------------------------------------------------------------
# Layout: from one file of tokens to shards
def choose(lengths, keys, val_fraction):
    """Return the training and the validation split, each as (N, 2) spans of positions."""
    ends = np.cumsum(lengths)
    spans = np.stack([ends - lengths, ends], axis=1)
    held_out = keys < math.ceil(val_fraction * 2**32)
    if len(keys) > FEW and held_out.any() and not held_out.all():
        return spans[~held_out], spans[held_out]
    total = int(ends[-1])
    text = total - len(keys)  # without the end-of-text tokens
    held = text - int(text * (1 - val_fraction))
    if held == text:
        raise ValueError("all text is held out and none is left for training: lower --val_fraction")
    return np.array([[0, total - held]]), np.array([[total - held, total]])


def shard_arrays(tokens, spans):
    """Yield the tokens of all spans in arrays of SHARD_TOKENS, the last of which may be smaller."""
    parts, size = [], 0
    for start, end in spans:
        while size + end - start >= SHARD_TOKENS:
            cut = start + SHARD_TOKENS - size
            yield np.concatenate([*parts, tokens[start:cut]])
            parts, size, start = [], 0, cut
        parts.append(tokens[start:end])
        size += end - start
    if size:
        yield np.concatenate(parts)


def text_bytes(counts, encoding):
    """Return how many bytes of text the tokens stand for, given how often each one occurs."""
    size = 0
    for token in np.flatnonzero(counts).tolist():
        if token != encoding.eot_token:
            size += int(counts[token]) * len(encoding.decode_single_token_bytes(token))
    return size


def write_split(folder, split, number, arrays, encoding):
    """Write arrays of tokens as shards, numbered from `number`; return the manifest's entry."""
    sums, counts = {}, np.zeros(encoding.n_vocab, np.int64)
    for i, tokens in enumerate(arrays, start=number):
        name = f"{split}_{i:06d}.bin"
        sums[name] = write_shard(folder / name, len(tokens), [tokens])
        for start in range(0, len(tokens), CHUNK):
            counts += np.bincount(tokens[start : start + CHUNK], minlength=encoding.n_vocab)
    return {"tokens": int(counts.sum()), "bytes": text_bytes(counts, encoding), "sha256": sums}


# -----------------------------------------------------------------------------
# Packing
@contextlib.contextmanager
def locked(folder):
    """Lock a folder. Raises ValueError if another pack holds the lock."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another pack writes into {folder}: wait for its end") from None
        yield
    finally:
        os.close(descriptor)


def earlier_shards(out):
    """Return the shards that out/manifest.json lists. Raises ValueError if there are others."""
    listed = set(read_manifest(out / "manifest.json")["shards"])
    present = {path.name for path in [*out.glob("train_*.bin"), *out.glob("val_*.bin")]}
    if present - listed:
        names = ", ".join(sorted(present - listed))
        raise ValueError(f"{out} holds {names}, which no pack wrote: move them, or change --out")
    return listed


def publish(staging, out, old):
    """Replace the `old` shards in out by the files in staging.

    out/.pack exists from before the first change until the last file is in place. At any moment,
    the manifest in out lists all shards that are there.
    """
    (out / ".pack").mkdir(exist_ok=True)
    for name in old:
        (out / name).unlink(missing_ok=True)
    os.replace(staging / "manifest.json", out / "manifest.json")
    for path in sorted(staging.iterdir()):
        os.replace(path, out / path.name)
    shutil.rmtree(out / ".pack")


def pack(args, staging):
    """Write the shards and manifest.json of all inputs into staging; return the manifest."""
    encoding = get_encoding(args.encoding)
    files = list_files(args.inputs, args.pattern, args.exclude, args.out)
    pieces = (piece for file in files for piece in read_pieces(*file, args.text_field))
    with open(staging / "tokens", "w+b") as file:
        lengths, keys, faulty = tokenize(pieces, encoding, file, args.skip_bad)
    if not len(lengths):
        raise ValueError(f"no text in {', '.join(args.inputs)}: give other inputs")
    train, val = choose(lengths, keys, args.val_fraction)
    tokens = np.asarray(np.memmap(staging / "tokens", np.uint16, "r"))
    manifest = {
        "encoding": args.encoding,
        "vocab_size": encoding.n_vocab,
        "source": args.inputs,
        "documents": len(lengths),
        "skipped": len(faulty),
        "train": write_split(staging, "train", 1, shard_arrays(tokens, train), encoding),
        "val": write_split(staging, "val", 0, shard_arrays(tokens, val), encoding),
    }
    (staging / "tokens").unlink()
    with open(staging / "skipped.txt", "w", encoding="utf-8", errors="surrogateescape") as file:
        for piece in faulty:
            file.write(f"{piece.file}:{piece.line} {piece.fault}\n")
    (staging / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest


def pack_and_publish(args):
    """Pack all inputs into args.out; return the manifest."""
    args.out.mkdir(parents=True, exist_ok=True)
    with locked(args.out):
        old, staging = earlier_shards(args.out), args.out / ".pack_next"
        shutil.rmtree(staging, ignore_errors=True)  # of a pack that was killed
        staging.mkdir()
        try:
            manifest = pack(args, staging)
            publish(staging, args.out, old)
        finally:
            shutil.rmtree(staging)
    return manifest


def parse_args(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="file or folder")
    add("--out", required=True, type=Path, help="folder for the shards")
    add("--encoding", default="bytes", help="bytes, gpt2 or another encoding of tiktoken")
    add("--val_fraction", default=0.1, type=float, help="fraction to hold out (0.1)")
    add("--text_field", default="text", help="field of a JSON line or a parquet row")
    add("--pattern", default="*", help="only read files of a folder whose names match")
    add("--exclude", default=[], nargs="*", help="relative paths to leave out")
    add("--skip_bad", action="store_true", help="leave out documents that cannot be read")
    args = parser.parse_args(argv)
    if not 0 <= args.val_fraction <= 1:
        raise ValueError(f"--val_fraction={args.val_fraction} must be in 0..1: correct it")
    return args


def main(argv=None):
    try:
        args = parse_args(argv)
        manifest = pack_and_publish(args)
    except (ValueError, OSError) as error:
        sys.exit(f"data/pack.py: {error}")
    except KeyboardInterrupt:
        os.write(2, b"data/pack.py: stopped; the same command starts again\n")
        sys.exit(130)
    print(f"{manifest['documents']:,} documents in {args.encoding}")
    for split in "train", "val":
        part = manifest[split]
        print(
            f"{split}: {part['tokens']:,} tokens, {part['bytes']:,} bytes of text, "
            f"{len(part['sha256'])} shards"
        )
    if manifest["skipped"]:
        print(f"skipped: {manifest['skipped']:,} documents, named in {args.out / 'skipped.txt'}")


if __name__ == "__main__":
    main()
