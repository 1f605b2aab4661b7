"""Tokenize text into the shards that train_gpt2.py reads, on all cores.

    python data/pack.py INPUT... --out DIR [--encoding bytes] [--val_fraction 0.1]

An INPUT is a file or a folder, which is read recursively without following links to folders. A
.jsonl file holds one document per line and a .parquet file one per row (it needs pyarrow), both in
the field --text_field. Any other file is one document in UTF-8. Files may end in .gz or .xz.

Documents keep the order of the inputs; the files of a folder are sorted by relative path. Each
document starts with the end-of-text token. A document is held out for validation if the hash of its
name is below --val_fraction. The name is a file's relative path, or the text of a line or row, so
added documents do not move others between the splits. If there are ten documents or fewer, or if
the hash would leave a split empty, the end of the whole text is held out instead.

The output is DIR/train_000001.bin..., DIR/val_000000.bin... and DIR/manifest.json, which `python
data/shards.py DIR` verifies. The shards of an earlier pack are replaced after all text has been
tokenized. If a pack is killed while it replaces them, DIR/.pack remains and training refuses the
folder: run the same command again. Packing needs disk space for two copies of the tokens. In
memory, it keeps two documents (or 2 MB of short ones) per core and 50 bytes per document.
"""

import argparse
import array
import contextlib
import fcntl
import gzip
import hashlib
import itertools
import json
import lzma
import os
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
from shards import read_manifest, write_shard
from tqdm import tqdm

FEW = 10  # with this many documents or fewer, the end of the text is held out, not whole documents
SHARD_TOKENS = 100_000_000
BATCH = 2**20  # characters of text per thread-pool task


# ---- Encodings -----------------------------------------------------------------------------------
def get_encoding(name):
    """Return a tiktoken.Encoding. Raises ValueError if it is unknown, unavailable or too large."""
    if name == "bytes":
        return tiktoken.Encoding(
            name,
            pat_str=r"[\s\S]{1,64}",  # affects only speed, as no bytes are merged
            mergeable_ranks={bytes([value]): value for value in range(256)},
            special_tokens={"<|endoftext|>": 256},
        )
    if name not in tiktoken.list_encoding_names():
        raise ValueError(f"tiktoken has no encoding {name}: give bytes or gpt2")
    try:
        encoding = tiktoken.get_encoding(name)
    except (ValueError, OSError) as error:  # neither in the folder nor downloadable
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"set TIKTOKEN_CACHE_DIR to a folder with the vocabulary of {name}: it could not be "
            f"downloaded ({reason})"
        ) from None
    if encoding.n_vocab > 65536:
        raise ValueError(
            f"the encoding {name} has {encoding.n_vocab} ids, but a shard's uint16 has room for "
            f"65536: give bytes, gpt2, r50k_base or p50k_base"
        )
    return encoding


# ---- Reading: from inputs to documents, in order -------------------------------------------------
@dataclass
class Document:
    place: str  # file:line
    text: str
    name: str  # its hash decides whether the document is held out
    fault: str  # why it cannot be packed, or an empty string


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
        if not path.exists():
            raise ValueError(f"{path} is neither a file nor a folder: give one that exists")
        if not (path.is_file() or path.is_dir()):  # reading a pipe would hang
            raise ValueError(f"{path} is not a regular file: save its content as one")
        if path.resolve() == out.resolve():
            raise ValueError(f"--out={out} is an input, too: give another folder")
        if path.is_dir():
            for name, file in sorted(walk(path, out)):
                if file.match(pattern) and name not in exclude:
                    files.append((name, file))
        else:
            files.append((path.name, path))
    if not files:
        raise ValueError(f"no file matches {pattern!r}: give other inputs or another --pattern")
    return files


def read_text(file, text_field):
    """Yield (1, text) of a file that is one document."""
    yield 1, file.read().decode()


def read_lines(file, text_field):
    """Yield (line number, text) for each line of JSON; the text is None if it is missing."""
    for number, line in enumerate(file, start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            yield number, row.get(text_field) if isinstance(row, dict) else None


def read_rows(file, text_field):
    """Yield (row number, text) of the rows of a parquet file."""
    from pyarrow import parquet

    batches = parquet.ParquetFile(file).iter_batches(batch_size=100, columns=[text_field])
    yield from enumerate((text for batch in batches for text in batch[text_field].to_pylist()), 1)


def fault_of(text, text_field):
    """Return why a text cannot be packed, or an empty string."""
    if not isinstance(text, str):
        return f"is not JSON with a string field {text_field!r}"
    if not text:
        return "is empty"
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return "contains an unpaired surrogate"
    return ""


OPEN = {".gz": gzip.open, ".xz": lzma.open}
READERS = {".jsonl": read_lines, ".ndjson": read_lines, ".parquet": read_rows}


def read_documents(file, path, text_field):
    """Yield the Documents of a file. If reading fails midway, the last one has that fault."""
    base, compression = os.path.splitext(file)
    if compression not in OPEN:
        base, compression = file, ""
    reader = READERS.get(os.path.splitext(base)[1].lower(), read_text)
    line = 0
    try:
        with OPEN.get(compression, open)(path, "rb") as content:
            for line, text in reader(content, text_field):
                fault = fault_of(text, text_field)
                name = file if reader is read_text else text
                yield Document(f"{file}:{line}", "" if fault else text, name, fault)
    except ImportError:
        raise ValueError(f"{path} needs a package: pip install pyarrow") from None
    except UnicodeDecodeError:
        fix = f"`iconv -f LATIN1 -t UTF-8 {shlex.quote(str(path))} > NEW` converts Latin-1"
        fault = "is not in UTF-8" if compression else f"is not in UTF-8 ({fix})"
        yield Document(f"{file}:{line + 1}", "", file, fault)
    except Exception as error:  # the disk or a library raised it: the file is damaged or gone
        reason = (str(error) or type(error).__name__).splitlines()[0]
        yield Document(f"{file}:{line + 1}", "", file, f"cannot be read further ({reason})")


# ---- Encoding: from documents to one file of tokens ----------------------------------------------
def batches(documents):
    """Yield consecutive documents in lists of at least BATCH characters; the last may be short."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    yield batch


def encode(documents, encoding):
    """Yield (document, tokens) in order. All cores share the work: tiktoken releases the GIL."""

    def encode_batch(batch):
        texts = (document.text for document in batch)
        arrays = (encoding.encode_to_numpy(text, disallowed_special=()) for text in texts)
        return [np.insert(array.astype(np.uint16), 0, encoding.eot_token) for array in arrays]

    remaining = batches(documents)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while window := list(itertools.islice(remaining, 2 * os.cpu_count())):
            for batch, arrays in zip(window, pool.map(encode_batch, window)):
                yield from zip(batch, arrays)


def tokenize(documents, encoding, file, skip_bad):
    """Write the tokens of all documents, one after the other, into a file.

    Returns (number of tokens of each document, hash of each document's name, all faults). Raises
    ValueError at the first fault unless skip_bad is set.
    """
    lengths, name_hashes, faults = array.array("q"), array.array("q"), []
    progress = tqdm(unit=" tokens", unit_scale=True, disable=None)  # None: only on a terminal
    for document, tokens in encode(documents, encoding):
        if document.fault:
            faults.append(f"{document.place} {document.fault}")
            if skip_bad:
                continue
            options = "--text_field, --exclude or --skip_bad"
            raise ValueError(f"{faults[0]}: correct it, or pass {options} (see --help)")
        digest = hashlib.sha256(document.name.encode("utf-8", "surrogateescape")).digest()
        lengths.append(len(tokens))
        name_hashes.append(int.from_bytes(digest[:4], "big"))
        file.write(tokens)
        progress.update(len(tokens))
    progress.close()
    return np.array(lengths), np.array(name_hashes), faults


# ---- Layout: from one file of tokens to shards ---------------------------------------------------
def choose(lengths, name_hashes, val_fraction):
    """Return the training and the validation split, each as (N, 2) spans of positions."""
    ends = np.cumsum(lengths)
    spans = np.stack([ends - lengths, ends], axis=1)
    held_out = name_hashes < val_fraction * 2**32
    if len(name_hashes) > FEW and held_out.any() and not held_out.all():
        return spans[~held_out], spans[held_out]
    total, num_documents = int(ends[-1]), len(lengths)
    cut = num_documents + int((total - num_documents) * (1 - val_fraction))
    return np.array([[0, cut]]), np.array([[cut, total]])


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


def write_split(folder, split, number, arrays):
    """Write arrays of tokens as shards, numbered from `number`; return the manifest's entry."""
    sums, size = {}, 0
    for i, tokens in enumerate(arrays, start=number):
        name = f"{split}_{i:06d}.bin"
        sums[name] = write_shard(folder / name, len(tokens), [tokens])
        size += len(tokens)
    return {"tokens": size, "sha256": sums}


# ---- Packing -------------------------------------------------------------------------------------
@contextlib.contextmanager
def locked(folder):
    """Lock a folder. Raises ValueError if another pack holds the lock."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ValueError(f"another pack.py is writing to {folder}: wait until it ends") from None
    finally:
        os.close(descriptor)


def earlier_shards(out):
    """Return the shards that out/manifest.json lists. Raises ValueError if there are others."""
    listed = set(read_manifest(out / "manifest.json")["shards"])
    foreign = sorted({path.name for path in out.glob("*.bin")} - listed)
    if foreign:
        raise ValueError(f"{out} holds {foreign}, not from pack.py: move them, or change --out")
    return listed


def publish(staging, out, old):
    """Replace the `old` shards in out with the files in staging.

    out/.pack is made before the first change and removed after the last. At any moment,
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
    documents = (document for file in files for document in read_documents(*file, args.text_field))
    with open(staging / "tokens", "wb") as file:
        lengths, name_hashes, faults = tokenize(documents, encoding, file, args.skip_bad)
    if not len(lengths):
        raise ValueError(f"no text in {', '.join(args.inputs)}: give other inputs")
    train, val = choose(lengths, name_hashes, args.val_fraction)
    tokens = np.asarray(np.memmap(staging / "tokens", np.uint16, "r"))
    manifest = {
        "encoding": args.encoding,
        "vocab_size": encoding.n_vocab,
        "source": args.inputs,
        "documents": len(lengths),
        "skipped": faults,
        "train": write_split(staging, "train", 1, shard_arrays(tokens, train)),
        "val": write_split(staging, "val", 0, shard_arrays(tokens, val)),
    }
    (staging / "tokens").unlink()
    (staging / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest


def pack_and_publish(args):
    """Pack all inputs into args.out; return the manifest."""
    args.out.mkdir(parents=True, exist_ok=True)
    with locked(args.out):
        old = earlier_shards(args.out)
        staging = args.out / ".pack_next"
        shutil.rmtree(staging, ignore_errors=True)  # left by a pack that was killed
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
    add("--pattern", default="*", help="in folders, read only files whose names match")
    add("--exclude", default=[], nargs="*", help="relative paths to leave out")
    add("--skip_bad", action="store_true", help="leave out bad documents; manifest.json lists them")
    args = parser.parse_args(argv)
    if not 0 <= args.val_fraction < 1:
        raise ValueError(f"--val_fraction={args.val_fraction} must be at least 0 and less than 1")
    return args


def main(argv=None):
    try:
        args = parse_args(argv)
        manifest = pack_and_publish(args)
    except (ValueError, OSError) as error:
        sys.exit(f"data/pack.py: {error}")
    except KeyboardInterrupt:
        os.write(2, b"data/pack.py: stopped; run the same command to start over\n")
        sys.exit(130)
    skipped = len(manifest["skipped"])
    print(f"{manifest['documents']:,} documents in {args.encoding}; {skipped:,} skipped")
    for split in "train", "val":
        part = manifest[split]
        print(f"{split}: {part['tokens']:,} tokens, {len(part['sha256'])} shards")


if __name__ == "__main__":
    main()
