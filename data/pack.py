"""Tokenize text into the shards that train_gpt2.py reads, on all cores.

    python data/pack.py INPUT... --out DIR [--encoding bytes] [--val_fraction 0.1]

An INPUT is a file, a folder, or - for standard input. Folders are read recursively. Hidden files
and folders, links to folders, and the logs and weights of runs are left out unless they are named.
A .jsonl file holds one document per line and a .parquet file one per row (it needs pyarrow), both
in the field --text_field. Any other file is one document in UTF-8. Files may end in .gz or .xz.

Documents keep the order of the inputs; the files of a folder are sorted by relative path. Each
document starts with the end-of-text token. With --split_at TEXT, documents are split wherever TEXT
occurs; TEXT and the whitespace around it are removed.

A document is held out for validation if the hash of its name is below --val_fraction. The name is a
file's relative path, or the text of a line, row or part, so added documents do not move others
between the splits. If documents differ so much in size that this holds out less than half or more
than twice the fraction of the tokens, documents are held out in the order of their hashes instead,
except those that would exceed the fraction. If that is less than half of it, too, or if there are
ten documents or fewer, the end of the whole text is held out. With --hash_only, sizes do not count.

The output is DIR/train_000001.bin..., DIR/val_000000.bin... and DIR/manifest.json, which `python
data/shards.py DIR` verifies. The shards of an earlier pack are replaced after all text has been
tokenized. If a pack is killed while it replaces them, DIR/.pack remains and training refuses the
folder: run the same command again. Packing needs disk space for two copies of the tokens, and
memory for two documents (at least 2 MB) per core and 50 bytes for each document packed.
"""

import argparse
import array
import contextlib
import errno
import fcntl
import gzip
import hashlib
import itertools
import json
import lzma
import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))  # Python adds it only without PYTHONSAFEPATH
try:
    import numpy as np
    import tiktoken
    from shards import SHARD_HEADER, SHARD_MAGIC, read_manifest, write_shard
    from tqdm import tqdm
except ModuleNotFoundError as error:
    fix = f"{sys.executable} -m pip install {error.name}"
    sys.exit(f"data/pack.py: {error.name} is not installed: {fix}")

HASH_SPLIT_ABOVE = 10  # if there are more documents than this, whole ones are held out, by hash
SHARD_TOKENS = 100_000_000
BATCH_CHARACTERS = 2**20  # per thread-pool task
END_OF_TEXT = "<|endoftext|>"  # within a text, these characters are packed as plain text
LOG_TITLE = b"Log of train_gpt2.py"  # the start of every log of a run


# ---- Encodings -----------------------------------------------------------------------------------
def get_encoding(name):
    """Return a tiktoken.Encoding. Raises ValueError if it is unknown, unavailable or too large.

    gpt2-N is GPT-2's encoding cut to its first N tokens. It is a byte-pair encoding, too, because a
    merge only uses earlier tokens. Token N ends a text.
    """
    if name == "bytes":
        return tiktoken.Encoding(
            name,
            pat_str=r"[\s\S]{1,64}",  # affects only speed, as no bytes are merged
            mergeable_ranks={bytes([value]): value for value in range(256)},
            special_tokens={END_OF_TEXT: 256},
        )
    if size := re.fullmatch(r"gpt2-(\d+)", name):
        size = int(size[1])
        if not 257 <= size <= 50256:
            raise ValueError(f"{name} must keep between 257 and 50256 tokens, as gpt2-2048 does")
        gpt2 = get_encoding("gpt2")
        ranks = {token: rank for token, rank in gpt2._mergeable_ranks.items() if rank < size}
        special = {END_OF_TEXT: size}
        return tiktoken.Encoding(
            name, pat_str=gpt2._pat_str, mergeable_ranks=ranks, special_tokens=special
        )
    if name not in tiktoken.list_encoding_names():
        raise ValueError(f"tiktoken has no encoding {name}: give bytes, gpt2 or gpt2-2048")
    try:
        encoding = tiktoken.get_encoding(name)
    except (ValueError, OSError) as error:  # neither in the folder nor downloadable
        reason = str(error).splitlines()[0]
        fix = "set TIKTOKEN_CACHE_DIR to a folder that has it"
        raise ValueError(f"cannot download the vocabulary of {name} ({reason}): {fix}") from None
    if encoding.n_vocab > 65536:
        fix = "give bytes, gpt2, r50k_base or p50k_base"
        raise ValueError(f"{name} has {encoding.n_vocab} ids, but shards only hold 65536: {fix}")
    return encoding


# ---- Reading: from inputs to documents, in order -------------------------------------------------
@dataclass
class Document:
    place: str  # file:line
    text: str
    name: str  # its hash decides whether the document is held out
    fault: str  # why it cannot be packed, or an empty string


def walk(folder, out):
    """Yield (relative path, path) of files, hidden folders and links to folders; skip out.

    Raises OSError.
    """

    def fail(error):
        raise error

    for root, folders, names in os.walk(folder, onerror=fail):
        hidden = [name for name in folders if name.startswith(".")]
        visible = [name for name in folders if name not in hidden]
        folders[:] = [name for name in visible if Path(root, name).resolve() != out.resolve()]
        links = [name for name in folders if Path(root, name).is_symlink()]  # not followed
        for path in (Path(root, name) for name in names + hidden + links):
            yield path.relative_to(folder).as_posix(), path


def is_left_out(path):
    """Return whether a path in a folder is hidden, not a file, or a log or weights of a run."""
    if path.name.startswith((".", "events.out.tfevents.")):
        return True
    if path.exists() and not path.is_file():  # a link to a folder or a pipe, for example
        return True  # but a broken link fails when it is read
    with contextlib.suppress(OSError), open(path, "rb") as file:
        head = file.read(len(LOG_TITLE))
        return head == LOG_TITLE or (path.suffix == ".pt" and head.startswith(b"PK"))
    return False


def list_files(inputs, pattern, exclude, out):
    """Return [(name, path)] of all input files, in order, and the paths that are left out.

    Raises ValueError if there are none.
    """
    files, left_out = [], []
    for path in map(Path, inputs):
        if str(path) == "-":
            files.append(("-", Path("/dev/stdin")))
            continue
        if not path.exists():
            raise ValueError(f"{path} is neither a file nor a folder: give one that exists")
        if not (path.is_file() or path.is_dir()):  # reading a pipe would hang
            raise ValueError(f"{path} is not a regular file: save its content as one")
        if path.resolve() == out.resolve():
            raise ValueError(f"--out={out} is an input, too: give another folder")
        if path.is_dir():
            before = len(files)
            for name, file in sorted(walk(path, out)):
                is_link = file.is_symlink() and file.is_dir()  # which may hold files that match
                if (file.match(pattern) or is_link) and name not in exclude:
                    if is_left_out(file):
                        left_out.append(str(file))
                    else:
                        files.append((name, file))
            if len(files) == before:
                fix = f"give other inputs or another --pattern (left out: {left_out[:3]})"
                raise ValueError(f"no file matches {pattern!r} in {path}: {fix}")
        else:
            files.append((path.name, path))
    return files, left_out


def read_text(file, text_field):
    """Yield (1, text) of a file that is one document; bytes if it is not text."""
    content = file.read()
    try:
        yield 1, content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError:
        yield 1, content


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
    rows = (row for batch in batches for row in batch.to_pylist())
    for number, row in enumerate(rows, start=1):
        text = row.get(text_field)
        yield number, text if isinstance(text, str) else None


def read_shard(file, path):
    """Yield (number, text) of the documents in a shard of tokens, such as FineWeb's.

    The encoding is that of the manifest beside the shard, else GPT-2's. Raises ValueError if the
    shard is incomplete or holds other tokens.
    """
    encoding = get_encoding(read_manifest(path.parent / "manifest.json").get("encoding", "gpt2"))
    header = np.frombuffer(file.read(4 * SHARD_HEADER), "<i4").tolist()
    tokens = np.frombuffer(file.read(), "<u2")
    if header[:1] != [SHARD_MAGIC] or header[2:3] != [len(tokens)]:
        raise ValueError("it is not a complete shard of tokens")
    if tokens.max() > encoding.eot_token:
        raise ValueError(f"it has token {tokens.max()}, which {encoding.name} lacks")
    starts = np.flatnonzero(tokens == encoding.eot_token)
    documents = [part[part != encoding.eot_token] for part in np.split(tokens, starts)]
    for number, document in enumerate(filter(len, documents), start=1):
        yield number, encoding.decode(document.tolist())


def fault_of(text, text_field):
    """Return why a text cannot be packed, or an empty string."""
    if isinstance(text, bytes):
        fix = "save it as text in UTF-8, or see what kind of file it is"
        return f"is not text in UTF-8 (it begins with {text[:20]}): {fix}"
    if not isinstance(text, str):
        return f"has no string field {text_field!r} (see --text_field), or is not JSON in UTF-8"
    if not text:
        return "is empty"
    if "\0" in text:
        return "contains a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return "contains an unpaired surrogate"
    return ""


OPEN = {".gz": gzip.open, ".xz": lzma.open}
READERS = {
    ".jsonl": read_lines,
    ".jsonlines": read_lines,
    ".ndjson": read_lines,
    ".parquet": read_rows,
    ".bin": read_shard,
}


def endings_of(file):
    """Return the endings of a file's name in lower case: (".jsonl", ".gz"), or (".txt", "")."""
    base, compression = os.path.splitext(file)
    if compression.lower() not in OPEN:
        base, compression = file, ""
    return os.path.splitext(base)[1].lower(), compression.lower()


def read_documents(file, path, text_field="text", split_at=None):
    """Yield the Documents of a file. If reading fails midway, the last one has that fault."""
    ending, compression = endings_of(file)
    reader = READERS.get(ending, read_text)
    line = 0  # the last that was read
    try:
        with OPEN.get(compression, open)(path, "rb") as content:
            for line, text in reader(content, path if reader is read_shard else text_field):
                place = f"{file}:{line}"
                fault = fault_of(text, text_field)
                if not fault and ending in (".json", ".csv", ".tsv"):
                    fix = "convert it to .jsonl, or rename it to .txt to pack it as it is"
                    fault = f"is {ending}: {fix}"
                if fault:
                    yield Document(place, "", file, fault)
                elif split_at is None:
                    yield Document(place, text, file if reader is read_text else text, "")
                else:
                    for part in filter(None, map(str.strip, text.split(split_at))):
                        yield Document(place, part, part, "")
    except ImportError:
        fix = f"{sys.executable} -m pip install pyarrow"
        raise ValueError(f"{path} needs a package: {fix}") from None
    except Exception as error:  # the disk or a library raised it: the file is damaged or gone
        reason = (str(error) or type(error).__name__).splitlines()[0]
        yield Document(f"{file}:{line + 1}", "", file, f"cannot be read further ({reason})")


# ---- Encoding: from documents to one file of tokens ----------------------------------------------
def batches(documents):
    """Yield consecutive documents in lists of BATCH_CHARACTERS or more; the last may be shorter."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    yield batch


def tokens_of(document, encoding):
    """Return the tokens of a document after an end-of-text token; sets its fault on failure."""
    try:
        tokens = encoding.encode_to_numpy(document.text, disallowed_special=())
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # tiktoken's panics are not subclasses of Exception
        reason = (str(error) or type(error).__name__).splitlines()[0]
        document.fault = f"cannot be tokenized ({reason}), often because of long runs of blanks"
        tokens = np.array([])
    return np.insert(tokens.astype(np.uint16), 0, encoding.eot_token)


def encode(documents, encoding):
    """Yield (document, tokens) in order. All cores share the work: tiktoken releases the GIL."""

    def encode_batch(batch):
        return [tokens_of(document, encoding) for document in batch]

    remaining = batches(documents)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while window := list(itertools.islice(remaining, 2 * os.cpu_count())):
            for batch, arrays in zip(window, pool.map(encode_batch, window)):
                yield from zip(batch, arrays)


def tokenize(documents, encoding, file, skip_bad):
    """Write the tokens of all documents, one after the other, into a file.

    Returns (number of tokens of each document, hash of each document's name, all faults, number of
    occurrences of END_OF_TEXT). Raises ValueError at the first fault unless skip_bad is set.
    """
    lengths, name_hashes, faults, separators = array.array("q"), array.array("q"), [], 0
    hidden = None if sys.stderr else True  # None: unless stderr is a terminal
    progress = tqdm(unit=" tokens", unit_scale=True, disable=hidden)
    for document, tokens in encode(documents, encoding):
        if document.fault:
            faults.append(f"{document.place} {document.fault}")
            if skip_bad:
                continue
            options = "--skip_bad, or for a folder --pattern or --exclude"
            raise ValueError(f"{faults[0]}; correct it, or pass {options}")
        digest = hashlib.sha256(document.name.encode("utf-8", "surrogateescape")).digest()
        separators += document.text.count(END_OF_TEXT)
        lengths.append(len(tokens))
        name_hashes.append(int.from_bytes(digest[:4], "big"))
        file.write(tokens)
        progress.update(len(tokens))
    progress.close()
    return np.array(lengths), np.array(name_hashes), faults, separators


# ---- Layout: from one file of tokens to shards ---------------------------------------------------
def up_to(wanted, lengths, name_hashes):
    """Return a mask of documents with at most `wanted` tokens: in the order of their hashes.

    Those that would exceed it are passed over.
    """
    chosen = np.zeros(len(lengths), bool)
    for i in np.argsort(name_hashes, kind="stable").tolist():
        if lengths[i] <= wanted:
            chosen[i] = True
            wanted -= lengths[i]
    return chosen


def choose(lengths, name_hashes, val_fraction, hash_only=False):
    """Return the training and the validation split, each as (N, 2) spans of positions."""
    ends = np.cumsum(lengths)
    spans = np.stack([ends - lengths, ends], axis=1)
    total, num_documents = int(ends[-1]), len(lengths)
    wanted = val_fraction * total
    if num_documents > HASH_SPLIT_ABOVE:
        by_hash = name_hashes < val_fraction * 2**32
        for held_out in by_hash, up_to(wanted, lengths, name_hashes):
            is_close = wanted / 2 <= lengths[held_out].sum() <= 2 * wanted
            if (is_close or hash_only) and held_out.any() and not held_out.all():
                return spans[~held_out], spans[held_out]
    # The fraction is one of the text, without the end-of-text token of each document.
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
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(f"another pack.py is writing to {folder}: wait until it ends") from None
    except OSError as error:  # some network file systems have no locks
        print(f"warning: {folder} is not locked ({error.strerror}): start only one pack.py there")
    try:
        yield
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
    files, left_out = list_files(args.inputs, args.pattern, args.exclude, args.out)
    documents = (
        document
        for file in files
        for document in read_documents(*file, args.text_field, args.split_at)
    )
    with open(staging / "tokens", "wb") as file:
        lengths, name_hashes, faults, plain = tokenize(documents, encoding, file, args.skip_bad)
    if not len(lengths):
        raise ValueError(f"no text in {', '.join(args.inputs)}: give other inputs")
    train, val = choose(lengths, name_hashes, args.val_fraction, args.hash_only)
    tokens = np.asarray(np.memmap(staging / "tokens", np.uint16, "r"))  # slices of it are faster
    manifest = {
        "encoding": args.encoding,
        "vocab_size": encoding.n_vocab,
        "source": args.inputs,
        "documents": len(lengths),
        "skipped": faults,
        "left_out": left_out,
        "separators": plain,
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
    help = "bytes, gpt2, gpt2-N (its first N tokens) or another encoding of tiktoken"
    add("--encoding", default="bytes", help=help)
    add("--val_fraction", default=0.1, type=float, help="fraction to hold out (0.1)")
    add("--hash_only", action="store_true", help="hold out by the hash, whatever the size")
    add("--text_field", default="text", help="field of a JSON line or a parquet row (text)")
    add("--split_at", metavar="TEXT", help=f"split documents here, for example at '{END_OF_TEXT}'")
    add("--pattern", default="*", help="in folders, read only files whose names match")
    add("--exclude", default=[], nargs="*", help="relative paths to leave out")
    add("--skip_bad", action="store_true", help="leave out bad documents; manifest.json lists them")
    args = parser.parse_args(argv)
    if not 0 <= args.val_fraction < 1:
        raise ValueError(f"--val_fraction={args.val_fraction} must be at least 0 and less than 1")
    if args.split_at == "":
        raise ValueError(f"--split_at is empty: give a separator, such as '{END_OF_TEXT}'")
    return args


def main(argv=None):
    try:
        args = parse_args(argv)
        manifest = pack_and_publish(args)
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: too many threads
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            error = f"{args.out} has no space for the tokens (twice, while it is packed): free some"
        sys.exit(
            f"data/pack.py: {error}".replace("\n", " ")
        )  # a file's name may have several lines
    except KeyboardInterrupt:
        os.write(2, b"data/pack.py: stopped; run the same command to start over\n")
        sys.exit(130)
    skipped = len(manifest["skipped"])
    print(f"{manifest['documents']:,} documents in {args.encoding}; {skipped:,} skipped")
    if left_out := len(manifest["left_out"]):
        kinds = "hidden, a link to a folder, or a log or weights of a run"
        print(f"left out: {left_out:,} ({kinds}; see manifest.json)")
    if separators := manifest["separators"]:
        print(
            f"warning: the texts contain {END_OF_TEXT} {separators:,} times, packed as plain text; "
            f"--split_at '{END_OF_TEXT}' splits them into documents there"
        )
    total = manifest["train"]["tokens"] + manifest["val"]["tokens"]
    for split in "train", "val":
        part = manifest[split]
        share = f"{part['tokens'] / total:.1%} of all"
        print(f"{split}: {part['tokens']:,} tokens ({share}), {len(part['sha256'])} shards")


if __name__ == "__main__":
    main()
