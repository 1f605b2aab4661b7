"""Tokenize text into the shards that train_gpt2.py reads, on all cores.

    python data/pack.py INPUT... --out DIR [--encoding bytes] [--val_fraction 0.1]

An INPUT is a file, a folder, or - for standard input. Folders are read recursively, without hidden
files and links to folders. A .jsonl file holds one document per line and a .parquet file one per
row (it needs pyarrow), both in the field --text_field. A .bin file is a shard of tokens, such as
FineWeb's. Any other file is one document in UTF-8. Files may end in .gz or .xz.

Documents keep the order of the inputs; the files of a folder are sorted by relative path. Empty
documents are left out. Each document starts with the end-of-text token. With --split_at TEXT,
documents are split wherever TEXT occurs; TEXT and the whitespace around it are removed.

A document is held out for validation if the hash of its name is below --val_fraction. The name is a
file's relative path, or the text of a line, row or part, so added documents do not move others
between the splits. If documents differ so much in size that this holds out less than half or more
than twice the fraction of the tokens, documents are held out in the order of their hashes instead,
except those that would exceed the fraction. If that is less than half of it, too, or if there are
ten documents or fewer, the end of the whole text is held out. With --hash_only, sizes do not count.

The output is DIR/train_000001.bin..., DIR/val_000000.bin... and DIR/manifest.json. It replaces all
train_*.bin and val_*.bin of an earlier pack after all text has been tokenized. If a pack is killed
while it replaces them, DIR/.pack remains and training refuses the folder: run the same command
again. The tokens are held in memory, which takes 4 bytes for each.
"""

import argparse
import gzip
import hashlib
import itertools
import json
import lzma
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

HASH_SPLIT_ABOVE = 10  # if there are more documents than this, whole ones are held out, by hash
DOCUMENTS_AT_ONCE = 1000  # that the cores share
END_OF_TEXT = "<|endoftext|>"  # within a text, these characters are packed as plain text
# A shard is a header of 256 int32 values (magic number, version, number of tokens, zeros), then the
# tokens as uint16.
SHARD_MAGIC = 20240520
SHARD_VERSION = 1
HEADER_BYTES = 1024
SHARD_TOKENS = 100_000_000  # the most in one shard


# ---- Encodings -----------------------------------------------------------------------------------
def get_encoding(name):
    """Return the tiktoken.Encoding bytes, gpt2 or gpt2-N. Raises ValueError if it is unavailable.

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
    size = re.fullmatch(r"gpt2-(\d+)", name)
    if name != "gpt2" and not (size and 257 <= int(size[1]) <= 50256):
        raise ValueError(
            f"there is no encoding {name}: give bytes, gpt2, or gpt2-N with N from 257 to 50256"
        )
    try:
        gpt2 = tiktoken.get_encoding("gpt2")
    except (ValueError, OSError) as error:  # neither in the folder nor downloadable
        fix = "set TIKTOKEN_CACHE_DIR to a folder that has it"
        raise ValueError(f"cannot download GPT-2's vocabulary ({error}): {fix}") from None
    if name == "gpt2":
        return gpt2
    size = int(size[1])
    ranks = {token: rank for token, rank in gpt2._mergeable_ranks.items() if rank < size}
    return tiktoken.Encoding(
        name, pat_str=gpt2._pat_str, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: size}
    )


def tokens_of(text, encoding):
    """Return the end-of-text token and the tokens of a text, (N,) uint16."""
    tokens = encoding.encode_to_numpy(text, disallowed_special=())
    return np.insert(tokens.astype(np.uint16), 0, encoding.eot_token)


# ---- Reading: from inputs to documents, in order -------------------------------------------------
def list_files(inputs, pattern="*", exclude=(), out=None):
    """Return [(name, path)] of all input files, in order. The folder `out` is left out.

    Raises ValueError if an input does not exist.
    """
    files = []
    for path in map(Path, inputs):
        if str(path) == "-":
            files.append(("-", Path("/dev/stdin")))
        elif path.is_dir():
            found = [file for file in path.rglob(pattern) if not file.is_dir()]
            for name, file in sorted((file.relative_to(path).as_posix(), file) for file in found):
                is_hidden = re.search(r"(^|/)\.", name)
                is_output = out is not None and out.resolve() in file.resolve().parents
                if not is_hidden and not is_output and name not in exclude:
                    files.append((name, file))
        elif path.exists():
            files.append((path.name, path))
        else:
            raise ValueError(f"{path} is neither a file nor a folder: give one that exists")
    return files


def read_shard(file, folder):
    """Yield the texts of the documents in an open shard of tokens, such as FineWeb's.

    The encoding is that of the manifest in the shard's folder, else GPT-2's. Raises ValueError or
    KeyError if the shard is incomplete or holds other tokens.
    """
    manifest = folder / "manifest.json"
    name = json.loads(manifest.read_text())["encoding"] if manifest.exists() else "gpt2"
    encoding = get_encoding(name)
    header = np.frombuffer(file.read(HEADER_BYTES), "<i4")
    tokens = np.frombuffer(file.read(), "<u2")
    if header[:3].tolist() != [SHARD_MAGIC, SHARD_VERSION, len(tokens)]:
        raise ValueError("it is not a complete shard of tokens")
    starts = np.flatnonzero(tokens == encoding.eot_token)
    for document in np.split(tokens, starts):
        yield encoding.decode(document[document != encoding.eot_token].tolist())


def read_texts(path, ending, text_field):
    """Yield the texts in a file, one for each line of a .jsonl file, even if it is empty.

    ending: of the name without .gz or .xz. Raises many kinds of errors if the file is damaged.
    """
    open_as_bytes = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with open_as_bytes(path, "rb") as file:
        if ending == ".jsonl":
            for line in file:
                yield json.loads(line)[text_field] if line.strip() else ""
        elif ending == ".parquet":
            from pyarrow import parquet

            for rows in parquet.ParquetFile(file).iter_batches(columns=[text_field]):
                yield from rows[text_field].to_pylist()
        elif ending == ".bin":
            yield from read_shard(file, path.parent)
        else:
            yield file.read().decode().removeprefix("\ufeff")


def read_documents(name, path, text_field="text", split_at=None):
    """Yield (name, text) of the documents in a file that are not empty.

    name: of the file. Raises ValueError if the file is damaged or is not text.
    """
    ending = Path(re.sub(r"\.(gz|xz)$", "", path.name)).suffix
    is_one_document = ending not in (".jsonl", ".parquet", ".bin") and split_at is None
    number = 1  # of the line, row or document
    try:
        for text in read_texts(path, ending, text_field):
            text.encode()  # raises an error if it is no string, or has half of a surrogate pair
            parts = [text] if split_at is None else map(str.strip, text.split(split_at))
            for part in filter(None, parts):
                yield name if is_one_document else part, part
            number += 1
    except Exception as error:  # of the disk, the content or a library
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path}:{number} cannot be read ({reason}): give text in UTF-8; that of .jsonl and "
            f".parquet files is in the field {text_field!r} (see --text_field)"
        ) from None


def tokenize(documents, encoding):
    """Return the tokens of all documents, a list of (N,) uint16, and their hashes, (documents,).

    documents: iterator over (name, text). A hash is 32 bits of the sha256 of the name. tiktoken
    releases the GIL, so all cores share the work.
    """
    tokens, hashes, separators = [], [], 0
    with ThreadPoolExecutor() as pool:
        while batch := list(itertools.islice(documents, DOCUMENTS_AT_ONCE)):
            for name, text in batch:
                separators += text.count(END_OF_TEXT)
                digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
                hashes.append(int.from_bytes(digest[:4], "big"))
            tokens += pool.map(lambda document: tokens_of(document[1], encoding), batch)
    if separators:
        print(
            f"warning: the texts contain {END_OF_TEXT} {separators:,} times, packed as plain text; "
            f"--split_at '{END_OF_TEXT}' splits them into documents there"
        )
    return tokens, np.array(hashes)


# ---- Validation ----------------------------------------------------------------------------------
def up_to(wanted, lengths, hashes):
    """Return a mask of documents with at most `wanted` tokens: in the order of their hashes.

    Those that would exceed it are passed over.
    """
    chosen = np.zeros(len(lengths), bool)
    for i in np.argsort(hashes, kind="stable").tolist():
        if lengths[i] <= wanted:
            chosen[i] = True
            wanted -= lengths[i]
    return chosen


def choose(lengths, hashes, val_fraction, hash_only=False):
    """Return which documents are held out, (documents,) bool; None for the end of the whole text.

    lengths: tokens of each document, (documents,) int.
    """
    wanted = val_fraction * lengths.sum()
    if len(lengths) > HASH_SPLIT_ABOVE:
        by_hash = hashes < val_fraction * 2**32
        for held_out in by_hash, up_to(wanted, lengths, hashes):
            is_close = wanted / 2 <= lengths[held_out].sum() <= 2 * wanted
            if (is_close or hash_only) and held_out.any() and not held_out.all():
                return held_out
    return None


def split(documents, hashes, val_fraction, hash_only=False):
    """Return the training tokens and the validation tokens, each (N,) uint16."""
    lengths = np.array([len(tokens) for tokens in documents])
    held_out = choose(lengths, hashes, val_fraction, hash_only)
    if held_out is not None:
        train = np.concatenate([*itertools.compress(documents, ~held_out)])
        return train, np.concatenate([*itertools.compress(documents, held_out)])
    # The fraction is one of the text, without the end-of-text token of each document.
    text_tokens = int(lengths.sum()) - len(documents)
    cut = len(documents) + int(text_tokens * (1 - val_fraction))
    tokens = np.concatenate(documents)
    return tokens[:cut], tokens[cut:]


# ---- Writing -------------------------------------------------------------------------------------
def write_shard(path, tokens):
    """Write tokens, (N,) uint16, as one shard; return its sha256. A kill leaves no part of it."""
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = SHARD_MAGIC, SHARD_VERSION, len(tokens)
    content = header.tobytes() + tokens.tobytes()
    partial = Path(f"{path}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)
    return hashlib.sha256(content).hexdigest()


def write_split(folder, split, number, tokens):
    """Write tokens as shards, numbered from `number`; return the manifest's entry."""
    sums = {}
    for i, start in enumerate(range(0, len(tokens), SHARD_TOKENS), start=number):
        path = folder / f"{split}_{i:06d}.bin"
        sums[path.name] = write_shard(path, tokens[start : start + SHARD_TOKENS])
    return {"tokens": len(tokens), "sha256": sums}


def pack(args):
    """Pack all inputs into args.out; return the manifest."""
    manifest_path = args.out / "manifest.json"
    marker = args.out / ".pack"  # train_gpt2.py refuses a folder with it
    is_ours = manifest_path.exists() or marker.exists()
    if not is_ours and any(args.out.glob("*.bin")):
        raise ValueError(f"{args.out} holds shards that pack.py did not write: change --out")
    encoding = get_encoding(args.encoding)
    files = list_files(args.inputs, args.pattern, args.exclude, args.out)
    documents = itertools.chain.from_iterable(
        read_documents(*file, args.text_field, args.split_at) for file in files
    )
    progress = tqdm(documents, unit=" documents", disable=None)
    tokens, hashes = tokenize(iter(progress), encoding)
    if not tokens:
        raise ValueError(f"no text in {', '.join(args.inputs)}: give other inputs or --pattern")
    train, val = split(tokens, hashes, args.val_fraction, args.hash_only)

    args.out.mkdir(parents=True, exist_ok=True)
    marker.mkdir(exist_ok=True)
    for pattern in "train_*.bin", "val_*.bin", "*.bin.partial":  # the last are left by a kill
        for old in args.out.glob(pattern):
            old.unlink()
    manifest = {
        "encoding": args.encoding,
        "vocab_size": encoding.n_vocab,
        "source": args.inputs,
        "documents": len(tokens),
        "train": write_split(args.out, "train", 1, train),
        "val": write_split(args.out, "val", 0, val),
    }
    manifest_path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    marker.rmdir()
    return manifest


def parse_args(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="file or folder")
    add("--out", required=True, type=Path, help="folder for the shards")
    add("--encoding", default="bytes", help="bytes, gpt2 or gpt2-N (its first N tokens)")
    add("--val_fraction", default=0.1, type=float, help="fraction to hold out (0.1)")
    add("--hash_only", action="store_true", help="hold out by the hash, whatever the size")
    add("--text_field", default="text", help="field of a JSON line or a parquet row (text)")
    add("--split_at", metavar="TEXT", help=f"split documents here, for example at '{END_OF_TEXT}'")
    add("--pattern", default="*", help="in folders, read only files whose names match")
    add("--exclude", default=[], nargs="*", help="relative paths to leave out")
    args = parser.parse_args(argv)
    if not 0 <= args.val_fraction < 1:
        parser.error(f"--val_fraction={args.val_fraction} must be at least 0 and less than 1")
    return args


def main(argv=None):
    args = parse_args(argv)
    try:
        manifest = pack(args)
    except (ValueError, OSError) as error:
        sys.exit(f"data/pack.py: {error}")
    train, val = manifest["train"], manifest["val"]
    print(f"{manifest['documents']:,} documents in {args.encoding}")
    for name, part in ("train", train), ("val", val):
        share = part["tokens"] / (train["tokens"] + val["tokens"])
        print(
            f"{name}: {part['tokens']:,} tokens ({share:.1%} of all), {len(part['sha256'])} shards"
        )


if __name__ == "__main__":
    main()
