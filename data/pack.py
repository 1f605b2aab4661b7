"""Tokenize text into the shards that train_gpt2.py reads, on all cores.

    python data/pack.py INPUT... --out DIR [--encoding bytes] [--val_tokens N | --val_fraction F]

An INPUT is a file, a folder, or - for standard input. A .jsonl file holds one document per line, a
.parquet file one per row (it needs pyarrow), both in the field --text_field. Any other file is one
document in UTF-8. Files may be compressed as .gz, .xz or .zst (which needs zstandard). Folders are
read recursively, without following links and without DIR.

Documents keep the order of the inputs; the files of a folder are sorted by relative path.
--shuffle_seed shuffles all documents. Each document starts with the end-of-text token. A document
is held out for validation if the hash of its name is below a threshold. The name is a file's
relative path, or the text of a line or row, so added documents do not move others between the
splits. With --val_tokens the threshold is the lowest at which the validation split has more than N
tokens. It never falls when documents are added and packed into the same DIR. Of a single text, and
of up to ten documents, the end is held out instead: a fraction F of all tokens, or N + 1 tokens. So
it is where the threshold would leave a split empty.

The output is DIR/train_000001.bin..., DIR/val_000000.bin..., DIR/skipped.txt and, last,
DIR/manifest.json. It does not depend on the number of workers. `python data/shards.py DIR` verifies
it. Unfinished files wait in DIR/.pack and take about twice the space of the shards. Shards beside a
.pack are incomplete: run the same command again, which continues after a kill at any moment.
(Beside a complete set of shards, .pack is named .pack_next until the first shard is replaced.)
Memory use is constant except for about 120 bytes per document.
"""

import argparse
import codecs
import collections
import concurrent.futures
import fnmatch
import gzip
import hashlib
import io
import itertools
import json
import lzma
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent))
from shards import file_sha256, lock, read_manifest, write_shard

FEW = 10  # documents, too few to hold out whole ones
CHUNK = 2**20  # bytes of text per task of a worker, and per piece of a long document
# A long document may be cut before a whitespace that follows another character. No encoding of at
# most 65536 ids has a token across that place, so the pieces have the same tokens as the whole.
CUT = re.compile(r"\S(?=[ \t\n\r])")
# Input of a worker, starting at `line` of the file `name`. The content depends on the form:
#   jsonl: lines, as bytes              text: a document or a piece of one, as str
#   parquet: rows, as a list            bad: the reason why the file cannot be read
# `first` is false for all but the first piece of a document.
Block = collections.namedtuple("Block", "name line form content first")
FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}  # any other: text
# The tokens at positions first to last - 1 of the documents in this order.
Part = collections.namedtuple("Part", "order first last")
PIECE = np.dtype(
    [  # a row of a .rows file: a document, or a piece of one
        ("tokens", "u4"),
        ("bytes", "u4"),
        ("key", "u4"),
        ("text", "u8"),
        ("first", "?"),
        ("bad", "?"),
    ]
)


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
    except OSError as error:
        raise ValueError(
            f"the vocabulary of {name} cannot be downloaded ({type(error).__name__}): set "
            f"TIKTOKEN_CACHE_DIR to a folder that has it, or use --encoding bytes"
        ) from None
    except ValueError as error:
        known = tiktoken.list_encoding_names()
        reason = (
            f"the vocabulary of {name} is damaged ({error})"
            if name in known
            else (f"unknown encoding {name!r}: give bytes or one of {', '.join(known)}")
        )
        raise ValueError(reason) from None
    if encoding.n_vocab > 65536:
        raise ValueError(
            f"encoding {name} has {encoding.n_vocab} ids, but a shard's uint16 has room for 65536: "
            f"give gpt2, r50k_base, p50k_base or bytes"
        )
    return encoding


# -----------------------------------------------------------------------------
# Reading: from inputs to blocks, in order
class Bad(Exception):
    """Raised for a document that cannot be read: Bad(line, reason)."""


class MissingPackage(ValueError):
    """Raised for a format whose optional package is not installed."""


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
    """Return [(name, path)], with None for standard input. Raises ValueError without any input."""
    files = []
    for given in inputs:
        path = Path(given)
        if given == "-":
            files.append((given, None))
        elif path.is_dir() and path.resolve() == out.resolve():
            raise ValueError(f"--out={out} is an input, too: give another folder")
        elif path.is_dir():
            files += [
                (name, file)
                for name, file in sorted(walk(path, out))
                if fnmatch.fnmatch(file.name, pattern) and name not in exclude
            ]
        elif path.exists():
            files.append((path.name, path))
        else:
            raise ValueError(f"{given} is neither a file nor a folder: give existing ones, or -")
    if not files:
        raise ValueError(
            f"no file matches {pattern!r} in {', '.join(inputs)}: give another --pattern"
        )
    for name, path in files:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"the file name {os.fsencode(path)!r} is not UTF-8: rename it"
            ) from None
    return files


class ZstdFile(io.RawIOBase):
    """A reader of .zst files that raises EOFError at a truncation; zstandard's own does not."""

    def __init__(self, file):
        import zstandard

        self.file, self.new = file, zstandard.ZstdDecompressor().decompressobj
        self.frame, self.waiting = None, b""

    def readable(self):
        return True

    def readinto(self, buffer):
        while not self.waiting:
            data = self.frame.unused_data if self.frame and self.frame.eof else b""
            data = data or self.file.read(2**17)
            if not data:
                if self.frame and not self.frame.eof:
                    raise EOFError("the file is cut off")
                return 0
            self.frame = self.new() if self.frame is None or self.frame.eof else self.frame
            self.waiting = self.frame.decompress(data)
        part, self.waiting = self.waiting[: len(buffer)], self.waiting[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


def decompress(file, compression):
    """Return a binary file with the decompressed content of `file`."""
    if compression == ".zst":
        try:
            return io.BufferedReader(ZstdFile(file))
        except ImportError:
            raise MissingPackage("a .zst file needs a package: pip install zstandard") from None
    return {"": lambda file: file, ".gz": gzip.open, ".xz": lzma.open}[compression](file)


def read_blocks(name, path, form, text_field):
    """Yield (block, bytes of the file read so far). An unreadable rest is a block of form bad."""
    base, compression = os.path.splitext(name)
    if compression not in (".gz", ".xz", ".zst"):
        base, compression = name, ""
    if form == "auto":
        form = FORMATS.get(os.path.splitext(base)[1].lower(), "text")
    reader = {"jsonl": read_lines, "parquet": read_rows, "text": read_text}[form]
    line, begun = 1, False  # begun: pieces of this document have been yielded
    try:
        with open(path or sys.stdin.fileno(), "rb", closefd=path is not None) as raw:
            for line, content, first in reader(decompress(raw, compression), text_field):
                begun = form == "text"
                yield Block(name, line, form, content, first), raw.tell() if path else 0
    except Bad as bad:
        line, reason = bad.args
        yield Block(name, line, "bad", reason, not begun), 0
    except MissingPackage:
        raise
    except Exception as error:  # of the disk or a library: the file is damaged or gone
        yield Block(name, line, "bad", f"cannot be read on ({error})", not begun), 0


def read_lines(file, text_field):
    """Yield (line number, lines, True). Lines before a damaged place are kept."""
    number, lines, size, damage = 1, [], 0, None
    while damage is None:
        try:
            lines.append(next(file))
        except StopIteration:
            damage = ""
        except Exception as error:  # of the disk, or of a library
            damage = f"cannot be read on ({error})"
        size += len(lines[-1]) if lines else 0
        if lines and (size >= CHUNK or damage is not None):
            yield number, b"".join(lines), True
            number, lines, size = number + len(lines), [], 0
    if damage:
        raise Bad(number, damage)


def read_rows(file, text_field):
    try:
        from pyarrow import parquet
    except ImportError:
        raise MissingPackage("a .parquet file needs a package: pip install pyarrow") from None
    table, number = parquet.ParquetFile(file), 1
    if text_field not in table.schema_arrow.names:
        raise Bad(1, f"has no column {text_field!r}")
    for batch in table.iter_batches(batch_size=100, columns=[text_field]):
        rows = batch.column(0).to_pylist()
        yield number, rows, True
        number += len(rows)


def read_text(file, text_field):
    """Yield (line number, piece, is first). Pieces are cut before a whitespace."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, first, text, more = 1, True, "", True
    while more:
        more = file.read(CHUNK)
        try:
            text += decoder.decode(more, final=not more)
        except UnicodeDecodeError as error:
            line += text.count("\n") + error.object[: error.start].count(b"\n")
            raise Bad(line, "is not UTF-8") from None
        cuts = [match.end() for match in CUT.finditer(text, max(0, len(text) - 4096))]
        cut = (cuts[-1] if cuts else 0) if more else len(text)
        if cut or (first and not more):
            yield line, text[:cut], first
            line, first, text = line + text.count("\n", 0, cut), False, text[cut:]


def read_chunks(files, form, text_field):
    """Yield (blocks of together about CHUNK bytes, bytes read since the last chunk)."""
    blocks, size, done = [], 0, 0
    for name, path in files:
        position = 0
        for block, position in read_blocks(name, path, form, text_field):
            blocks.append(block)
            texts = block.content if block.form == "parquet" else [block.content]
            size += sum(len(text) for text in texts if isinstance(text, (str, bytes)))
            if size >= CHUNK // 2:
                yield blocks, done + position
                blocks, size, done = [], 0, -position
        done += position
    if blocks:
        yield blocks, done


# -----------------------------------------------------------------------------
# Encoding: from chunks of blocks to parts, in worker processes
def start_worker(name, folder, field):
    global encoding, parts, text_field
    encoding, parts, text_field = get_encoding(name), folder, field
    parent = multiprocessing.parent_process()  # even if the parent is killed, its workers end
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def read_documents(block):
    """Yield (line, text) for each document of a block. An unreadable one has a Bad as its text."""
    if block.form == "bad":
        yield block.line, Bad(block.line, block.content)
    elif block.form == "text":
        yield block.line, block.content
    elif block.form == "parquet":
        yield from enumerate(block.content, start=block.line)
    else:
        for number, line in enumerate(block.content.split(b"\n"), start=block.line):
            if line.strip():
                try:
                    row = json.loads(line)
                    yield number, row.get(text_field) if isinstance(row, dict) else None
                except UnicodeDecodeError:
                    yield number, Bad(number, "is not UTF-8")
                except (ValueError, RecursionError):
                    yield number, Bad(number, "is not JSON")


def check_text(text, line, first):
    """Return the text as bytes. Raises Bad if it is not a valid text."""
    if isinstance(text, Bad):
        raise text
    if not isinstance(text, str):
        raise Bad(line, f"has no text {text_field!r}")
    if first and not text:
        raise Bad(line, "is empty")
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        raise Bad(line, "is not Unicode") from None


def encode_chunk(blocks):
    """Write a part: the tokens of a chunk and a row per document. Skipped if it exists undamaged.

    Returns (path of the part without suffix, [(name, line, reason)] of the bad documents).
    """
    rows, texts, bad = [], [], []
    for block in blocks:
        for line, text in read_documents(block):
            try:
                content = check_text(text, line, block.first)
            except Bad as reason:
                bad.append((block.name, *reason.args))
                rows.append((0, 0, 0, 0, block.first, True))
                continue
            digest = hashlib.sha256(content).digest()
            key = hashlib.sha256(block.name.encode()).digest() if block.form == "text" else digest
            rows.append(
                (
                    0,
                    len(content),
                    int.from_bytes(key[:4], "big"),
                    int.from_bytes(digest[:8], "big"),
                    block.first,
                    False,
                )
            )
            texts.append(text)
    rows = np.array(rows, PIECE)
    settings = repr((encoding.name, tiktoken.__version__, bad)).encode()
    path = parts / hashlib.sha256(settings + rows.tobytes()).hexdigest()
    if not is_whole(path):
        encoded, end_of_text = [], np.array([encoding.eot_token], np.uint16)
        for i, text in zip(np.flatnonzero(~rows["bad"]), texts):
            tokens = encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)
            rows["tokens"][i] = len(tokens) + rows["first"][i]
            encoded += [end_of_text, tokens] if rows["first"][i] else [tokens]
        save_part(path, np.concatenate([*encoded, end_of_text[:0]]), rows)
    return path, bad


def checksum(path, tokens, rows):
    """Return the 4 bytes that a .rows file starts with: a CRC-32 of the part's name and content."""
    crc = 0
    for content in os.path.basename(path).encode(), tokens, rows:
        crc = zlib.crc32(content, crc)
    return crc.to_bytes(4, "little")


def save_part(path, tokens, rows):
    """Write a part as two files, each atomically. The .rows file is last: it completes the part."""
    tokens, rows = tokens.tobytes(), rows.tobytes()
    for suffix, content in (".tokens", tokens), (".rows", checksum(path, tokens, rows) + rows):
        partial = f"{path}{suffix}.{os.getpid()}.partial"
        with open(partial, "wb") as file:
            file.write(content)
        os.replace(partial, f"{path}{suffix}")


def is_whole(path):
    """Return whether an earlier run wrote this part and both of its files are undamaged."""
    try:
        with open(f"{path}.rows", "rb") as rows, open(f"{path}.tokens", "rb") as tokens:
            return rows.read(4) == checksum(path, tokens.read(), rows.read())
    except OSError:
        return False


# -----------------------------------------------------------------------------
# Layout: from parts to shards
class Documents:
    """The documents of all parts: their sizes, hashes and places, and which of them are kept."""

    def __init__(self, paths):
        rows = [np.fromfile(f"{path}.rows", PIECE, offset=4) for path in paths]
        self.paths = paths
        self.part = np.repeat(np.arange(len(rows), dtype=np.uint32), [len(r) for r in rows])
        self.offset = np.concatenate([np.cumsum(r["tokens"]) - r["tokens"] for r in rows])
        rows = np.concatenate(rows)
        firsts = np.flatnonzero(rows["first"])  # the first piece of each document
        self.first = np.append(firsts, len(rows))
        self.piece_tokens, self.key = rows["tokens"], rows["key"][firsts]
        self.tokens, self.bytes, self.text = (
            np.add.reduceat(rows[name], firsts, dtype=np.uint64)
            for name in ("tokens", "bytes", "text")
        )
        self.kept = ~np.logical_or.reduceat(rows["bad"], firsts)

    def drop_duplicates(self):
        """Keep one of each set of equal texts; return the number of documents dropped.

        The one with the lowest key is kept. If it is held out, added copies cannot change that.
        """
        kept = np.flatnonzero(self.kept)
        kept = kept[np.argsort(self.key[kept], kind="stable")]
        _, lowest = np.unique(self.text[kept], return_index=True)
        self.kept[:] = False
        self.kept[kept[lowest]] = True
        return len(kept) - len(lowest)

    def read(self, order):
        """Yield the tokens of the documents in this order, as uint16; neighbors in one array."""
        counts = self.first[order + 1] - self.first[order]
        pieces = np.repeat(self.first[order] - np.cumsum(counts) + counts, counts)
        pieces += np.arange(len(pieces))
        apart = (np.diff(pieces) != 1) | (np.diff(self.part[pieces]) != 0)
        starts = np.append(0, np.flatnonzero(apart) + 1)[: len(pieces)]
        lengths = np.add.reduceat(self.piece_tokens[pieces], starts) if len(pieces) else []
        part, file = None, None
        for piece, length in zip(pieces[starts], lengths):
            if self.part[piece] != part:
                part, file = self.part[piece], open(f"{self.paths[self.part[piece]]}.tokens", "rb")
            file.seek(2 * int(self.offset[piece]))
            yield np.fromfile(file, np.uint16, length)


def validation_bar(documents, val_tokens, val_fraction, earlier):
    """Return the key below which documents are held out. Raises ValueError if there are too few."""
    if val_tokens is None:
        return math.ceil(val_fraction * 2**32)
    order = np.flatnonzero(documents.kept)
    order = order[np.argsort(documents.key[order], kind="stable")]
    sums = np.cumsum(documents.tokens[order])
    if val_tokens >= sums[-1]:
        raise ValueError(
            f"--val_tokens={val_tokens} must be below {sums[-1]}, all there are: lower it"
        )
    last = order[np.searchsorted(sums, val_tokens, side="right")]  # one more token: the last target
    return max(int(documents.key[last]) + 1, earlier)


def cut_at(size, arrays):
    """Yield (shard index, array): the arrays, cut wherever a shard of `size` tokens is full."""
    done = 0
    for array in arrays:
        while len(array):
            shard, place = divmod(done, size)
            part, array = array[: size - place], array[size - place :]
            yield shard, part
            done += len(part)


def between(first, last, arrays):
    """Yield the parts of the arrays, laid end to end, that lie at positions first to last - 1."""
    position = 0
    for array in arrays:
        yield array[max(0, first - position) : max(0, last - position)]
        position += len(array)


def text_bytes(arrays, encoding):
    """Return how many bytes of text the tokens in these arrays stand for."""
    counts = sum(np.bincount(array, minlength=encoding.n_vocab) for array in arrays)
    tokens = [token for token in np.flatnonzero(counts).tolist() if token != encoding.eot_token]
    return sum(
        int(counts[token]) * len(encoding.decode_single_token_bytes(token)) for token in tokens
    )


def write_split(folder, split, number, documents, part, encoding, shard_tokens):
    """Write a Part of the documents as shards; return its entry in the manifest.

    number: of the first shard.
    """
    order, first, last = part
    total, sums = last - first, {}
    arrays = cut_at(shard_tokens, between(first, last, documents.read(order)))
    for shard, group in itertools.groupby(arrays, key=lambda pair: pair[0]):
        name = f"{split}_{number + shard:06d}.bin"
        count = min(shard_tokens, total - shard * shard_tokens)
        sums[name] = write_shard(folder / name, count, (array for _, array in group))
    ends = np.cumsum(documents.tokens[order])
    whole = total == documents.tokens[order].sum()
    size = documents.bytes[order].sum()
    if not whole:
        size = text_bytes(between(first, last, documents.read(order)), encoding)
    begun = (ends > first) & (ends - documents.tokens[order] < last)  # at least in part
    return {
        "documents": int(begun.sum()),
        "tokens": total,
        "bytes": int(size),
        "sha256": sums,
    }


def refuse_foreign(out, known):
    """Raise ValueError if out holds unknown shards: training would read them through its glob."""
    foreign = {path.name for path in shards_in(out)} - set(known)
    if foreign:
        names = ", ".join(sorted(foreign))
        raise ValueError(f"{out} holds {names}, which no pack wrote: move them, or change --out")


def shards_in(folder):
    return [*folder.glob("train_*.bin"), *folder.glob("val_*.bin")]


def publish(waiting, out, sums, texts):
    """Move the new shards and {name: text} from `waiting` to out and delete all other shards.

    out/.pack exists from before the first change until the last file is in place. A shard that is
    there already with the same content stays: a training run may have it open.
    """
    incomplete, complete = out / ".pack", out / ".pack_next"
    if waiting != incomplete:
        os.replace(waiting, incomplete)
    for path in shards_in(out):
        if path.name not in sums or file_sha256(path) != sums[path.name]:
            path.unlink()  # of an earlier pack; training would read it through its glob
    for name in sums:
        if not (out / name).exists():
            os.replace(incomplete / name, out / name)
    for name, text in texts.items():
        (incomplete / name).write_text(text, encoding="utf-8")
        os.replace(incomplete / name, out / name)
    shutil.rmtree(complete, ignore_errors=True)
    os.replace(incomplete, complete)  # at once, whereas deleting a folder takes time
    shutil.rmtree(complete)


# -----------------------------------------------------------------------------
# Packing
def encode_all(files, args, parts):
    """Return (paths of the parts in order, bad documents). Raises ValueError unless --skip_bad."""
    total = sum(path.stat().st_size for _, path in files if path and path.exists()) or None
    paths, bad, waiting = [], [], collections.deque()
    settings = args.encoding, parts, args.text_field
    pool = concurrent.futures.ProcessPoolExecutor(args.workers, None, start_worker, settings)
    pool.submit(int)  # starts the workers before any thread, because they may be forked
    threading.Thread(target=stop_on_interrupt, daemon=True).start()
    bar = tqdm(total=total, unit="B", unit_scale=True, disable=not sys.stderr.isatty())

    def take_oldest():
        future, size = waiting.popleft()
        path, found = future.result()
        if found and not args.skip_bad:
            name, line, reason = found[0]
            raise ValueError(
                f"{name}:{line} {reason}: correct it, give another --text_field, leave the file "
                f"out with --exclude or --pattern, or pass --skip_bad to leave out bad documents"
            )
        bar.update(size)
        paths.append(path)
        bad.extend(found)

    try:
        for blocks, size in read_chunks(files, args.format, args.text_field):
            waiting.append((pool.submit(encode_chunk, blocks), size))
            while len(waiting) > 2 * args.workers + 1:
                take_oldest()
        while waiting:
            take_oldest()
    except concurrent.futures.BrokenExecutor:
        raise ValueError(
            "a worker was killed (out of memory?): run the same command again, which continues "
            "from here, or use fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
        bar.close()
    return paths, bad


def working_folder(out):
    """Return the folder for unfinished files: out/.pack, or out/.pack_next if out is complete.

    train_gpt2.py refuses to read shards beside a .pack. Beside a complete set of shards, the
    working folder therefore has the other name until the first of them is replaced.
    """
    incomplete = out / ".pack"
    if (out / "manifest.json").exists() and not incomplete.exists():
        return out / ".pack_next"
    return incomplete


def choose(documents, args, earlier):
    """Return (the training Part, the validation Part, threshold).

    The threshold is 0 if the end of the text is held out instead of whole documents.
    """
    same = args.val_tokens and earlier.get("val_tokens") == args.val_tokens
    bar = validation_bar(
        documents, args.val_tokens, args.val_fraction, earlier["val_below"] if same else 0
    )
    order = np.arange(len(documents.kept))
    if args.shuffle_seed is not None:
        order = np.random.RandomState(args.shuffle_seed).permutation(order)
    order = order[documents.kept[order]]
    held_out = documents.key[order] < bar
    if len(order) > FEW and held_out.any() and not held_out.all():
        orders = order[~held_out], order[held_out]
        return *(Part(part, 0, int(documents.tokens[part].sum())) for part in orders), bar
    total = int(documents.tokens[order].sum())
    if args.val_tokens is None:
        text = total - len(order)  # without the end-of-text tokens
        held = text - int(text * (1 - args.val_fraction))
    else:
        held = args.val_tokens + 1
    if held >= total - len(order):
        raise ValueError(
            "all documents are held out and none is left for training: give more documents, or "
            "lower --val_tokens or --val_fraction"
        )
    return Part(order, 0, total - held), Part(order, total - held, total), 0


def pack(args):
    """Write the shards and manifest.json of all inputs into args.out; return the manifest."""
    encoding = get_encoding(args.encoding)  # before the workers start, which may share its memory
    files = list_files(args.inputs, args.pattern, args.exclude, args.out)
    waiting, earlier = working_folder(args.out), read_manifest(args.out / "manifest.json")
    incomplete = args.out / ".pack"
    if not incomplete.exists():  # otherwise a killed pack may have published some of its shards
        refuse_foreign(args.out, earlier["shards"])
    waiting.mkdir(parents=True, exist_ok=True)
    with open(waiting / "lock", "w") as file:
        busy = f"another pack writes into {args.out}: wait for its end, or give another --out"
        lock(file, busy)
        if waiting != working_folder(args.out):  # another pack renamed it before this one's lock
            raise ValueError(busy)
        paths, bad = encode_all(files, args, waiting)
        documents = Documents(paths) if paths else None
        if documents is None or not documents.kept.any():
            raise ValueError(f"no text in {', '.join(args.inputs)}: give other inputs")
        dropped = documents.drop_duplicates() if args.drop_duplicates else 0
        train, val, bar = choose(documents, args, earlier)
        shared = encoding, args.shard_tokens
        splits = {
            "train": write_split(waiting, "train", 1, documents, train, *shared),
            "val": write_split(waiting, "val", 0, documents, val, *shared),
        }
        sums = [split["sha256"] for split in splits.values()]
        reasons = collections.Counter(re.sub(r" \(.*", "", reason) for *_, reason in bad)
        manifest = {
            "encoding": args.encoding,
            "vocab_size": encoding.n_vocab,
            "data_hash": hashlib.sha256(json.dumps(sums).encode()).hexdigest()[:16],
            "source": args.inputs,
            "files": len(files),
            "shuffle_seed": args.shuffle_seed,
            "val_tokens": args.val_tokens,
            "val_below": bar,
            "dropped_duplicates": dropped,
            "skipped": dict(reasons),
            **splits,
        }
        skipped = "".join(f"{name}:{line} {reason}\n" for name, line, reason in bad)
        texts = {"skipped.txt": skipped, "manifest.json": json.dumps(manifest, indent=2) + "\n"}
        refuse_foreign(args.out, {*earlier["shards"], *sums[0], *sums[1]})
        publish(waiting, args.out, {**sums[0], **sums[1]}, texts)
    return manifest


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="file, folder, or - for standard input")
    add("--out", required=True, type=Path, help="folder for the shards")
    add(
        "--encoding",
        default="bytes",
        help="bytes, which needs no download, or gpt2 or another encoding of tiktoken",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--val_tokens", type=int, help="minimum size of the validation split in tokens"
    )
    size.add_argument(
        "--val_fraction",
        default=0.1,
        type=float,
        help="fraction to hold out: of the documents, or of a single text (0.1)",
    )
    add(
        "--format",
        default="auto",
        choices=["auto", "text", "jsonl", "parquet"],
        help="format of the inputs; auto goes by the file name and takes standard input as text",
    )
    add("--text_field", default="text", help="field of a JSON line or a parquet row")
    add("--pattern", default="*", help="only read files of a folder whose names match")
    add("--exclude", default=[], nargs="*", help="relative paths to leave out")
    add("--shuffle_seed", type=int, help="shuffle the documents with this seed")
    add("--drop_duplicates", action="store_true", help="keep one of each set of equal texts")
    add("--skip_bad", action="store_true", help="leave out documents that cannot be read")
    add("--shard_tokens", default=100_000_000, type=int, help="tokens per shard (100M)")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add("--workers", default=cores, type=int, help="number of processes (all cores)")
    args = parser.parse_args()
    for name, low, high in (
        ("shard_tokens", 1, 2**31 - 1),
        ("workers", 1, 1024),
        ("val_fraction", 0, 1),
        ("val_tokens", 1, 2**63 - 1),
        ("shuffle_seed", 0, 2**32 - 1),
    ):
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            raise ValueError(f"--{name}={value} must be in {low}..{high}: correct it")
    return args


def stop_on_interrupt():
    """Exit at an interrupt, even in the middle of a read. The workers notice and exit, too."""
    signal.sigwait({signal.SIGINT})
    os.write(2, b"data/pack.py: stopped; the same command goes on from here\n")
    os._exit(130)


def warn_of_equal_shards(sums):
    """Print a warning if shards in {name: sha256} have equal content."""
    by_sum = collections.defaultdict(list)
    for name, digest in sums.items():
        by_sum[digest].append(name)
    for names in by_sum.values():
        if len(names) > 1:
            print(
                f"data/pack.py: warning: {', '.join(names)} have equal content, so they count as "
                f"fresh data only once: remove repeated inputs, or pass --drop_duplicates",
                file=sys.stderr,
            )


def main():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # stop_on_interrupt waits for it
    try:
        args = parse_args()
        manifest = pack(args)
    except (ValueError, OSError) as error:
        sys.exit(f"data/pack.py: {error}")
    for split in ("train", "val"):
        part = manifest[split]
        print(
            f"{split}: {part['documents']:,} documents, {part['tokens']:,} tokens, "
            f"{part['bytes']:,} bytes, {len(part['sha256'])} shards"
        )
    for reason, count in manifest["skipped"].items():
        print(f"skipped: {count:,} x {reason}; each is named in {args.out / 'skipped.txt'}")
    if not manifest["val_below"] and manifest["val"]["tokens"]:
        print(f"held out: the end of the text, {manifest['val']['tokens']:,} tokens")
    warn_of_equal_shards({**manifest["train"]["sha256"], **manifest["val"]["sha256"]})
    print(f"data_hash:{manifest['data_hash']}")


if __name__ == "__main__":
    main()
