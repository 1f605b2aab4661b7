"""Tokenize text into the shards that train_gpt2.py reads.

    python data/pack.py INPUT... --out DIR [--encoding bytes] [--val_fraction 0.1]

An INPUT is a file, a folder, or - for standard input. Folders are read recursively, except hidden
files, links to folders, special files such as named pipes, and folders that cannot be read. A
.jsonl file holds one document per line and a .parquet file (which needs pyarrow) one per row, both
in the field --text_field. A .bin file is a shard of tokens: FineWeb's, or one beside a
manifest.json that names its encoding. Any other file is one document in UTF-8. Files may end in .gz
or .xz.

Documents keep the order of the inputs; the files of a folder are sorted by relative path. Empty
documents are left out. Each document starts with the end-of-text token. With --split_at TEXT,
documents are split wherever TEXT occurs; TEXT and the whitespace around each part are removed.

Validation data: with ten documents or fewer, the end of the whole text is held out. With more,
each document is held out whose hash, divided by 2^64, is below --val_fraction. So copies are on one
side, and added documents do not move others. If this gives less than half or more than twice
--val_fraction of the tokens, documents are taken in the order of their hashes instead, except those
that would exceed the fraction; if even this is not close, the end of the text is held out. With
--by_name, the relative paths of the files are hashed instead of their texts, and the size is not
checked.

The output is DIR/train_000001.bin..., DIR/val_000000.bin... and DIR/manifest.json. When all of it
has been written to DIR/.new, it replaces all train_*.bin and val_*.bin of an earlier pack. Until
then, both take disk space. If a pack is killed while it replaces them, DIR/.pack remains and
training refuses the folder: run the same command again. The tokens are held in memory, which takes
5 bytes for each; tokenizing a large document with GPT-2's encoding takes 6 for each byte of the
document.
"""

import argparse
import contextlib
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
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

HASH_SPLIT_ABOVE = 10  # if there are more documents than this, whole ones are held out, by hash
DOCUMENTS_AT_ONCE = 1000  # tokenized in parallel
FIELD_ENDINGS = {".jsonl", ".parquet"}  # of files whose documents have fields
MULTI_DOCUMENT_ENDINGS = {*FIELD_ENDINGS, ".bin"}  # of files that may hold several documents
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

    gpt2-N is GPT-2's encoding cut to its first N tokens; its end-of-text token is N. It is still a
    byte-pair encoding, because a merge uses only earlier tokens.
    """
    if name == "bytes":
        return tiktoken.Encoding(
            name,
            pat_str=r"[\s\S]{1,64}",  # affects only speed, as no bytes are merged
            mergeable_ranks={bytes([value]): value for value in range(256)},
            special_tokens={END_OF_TEXT: 256},
        )
    cut = re.fullmatch(r"gpt2-(\d+)", name)
    if name != "gpt2" and not (cut and 257 <= int(cut[1]) <= 50256):
        raise ValueError(
            f"there is no encoding {name}: give bytes, gpt2, or gpt2-N with N from 257 to 50256"
        )
    try:
        gpt2 = tiktoken.get_encoding("gpt2")
    except (ValueError, OSError) as error:  # neither in the folder nor downloadable
        raise ValueError(
            f"cannot download GPT-2's vocabulary ({error}): check the network, or set "
            "TIKTOKEN_CACHE_DIR to a folder that has it"
        ) from None
    if name == "gpt2":
        return gpt2
    size = int(cut[1])
    ranks = {token: rank for token, rank in gpt2._mergeable_ranks.items() if rank < size}
    return tiktoken.Encoding(
        name, pat_str=gpt2._pat_str, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: size}
    )


def tokens_of(text, encoding):
    """Return the end-of-text token and the tokens of a text, (N,) uint16."""
    if encoding.name == "bytes":  # gives the same tokens in a quarter of the memory
        tokens = np.frombuffer(text.encode(), np.uint8)
    else:
        tokens = encoding.encode_to_numpy(text, disallowed_special=())
    return np.concatenate([[encoding.eot_token], tokens], dtype=np.uint16, casting="unsafe")


# ---- Reading: from inputs to documents, in order -------------------------------------------------
def list_files(inputs, pattern="*", exclude=(), out=None):
    """Return ([(name, path)] of all input files, in order, and the paths that are left out).

    The folder `out` and hidden files are not counted as left out. Raises ValueError if an input is
    empty or does not exist, if a folder has no file to read, if an excluded path has no file, or if
    a pattern is given without a folder.
    """
    if "" in inputs:  # Path("") would be the current folder
        raise ValueError("an INPUT is empty: give a file, a folder or -")
    files, left_out, found_excluded = [], [], set()
    for path in map(Path, inputs):
        if str(path) == "-":
            files.append(("-", Path("/dev/stdin")))
        elif path.is_dir():
            files_before = len(files)
            found = [(file.relative_to(path).as_posix(), file) for file in path.rglob(pattern)]
            for name, file in sorted(found):
                is_hidden = re.search(r"(^|/)\.", name)
                is_output = out is not None and out.resolve() in file.resolve().parents
                if is_hidden or is_output:
                    continue
                is_broken_link = not file.exists()  # reading it will fail and name it
                excluded = {name, *map(str, Path(name).parents)} & set(exclude)
                if excluded:
                    found_excluded |= excluded
                elif file.is_file() or is_broken_link:
                    files.append((name, file))
                elif file.is_dir() and not file.is_symlink():
                    continue  # rglob also lists the files in it
                else:  # a link to a folder, or a special file
                    left_out.append(file)
            if len(files) == files_before:
                raise ValueError(
                    f"no files to read in {path}: hidden files, excluded ones, those that do not "
                    f"match {pattern!r}, and those in --out are left out"
                )
        elif path.exists():
            files.append((path.name, path))
        else:
            raise ValueError(f"{path} is neither a file nor a folder: give one that exists")
    if missing := sorted(set(exclude) - found_excluded):
        raise ValueError(
            f"--exclude {missing}: give relative paths of files that match --pattern, or of "
            "folders with such files"
        )
    if pattern != "*" and not any(Path(path).is_dir() for path in inputs):
        raise ValueError(f"--pattern={pattern} selects files in folders: give a folder, or omit it")
    return files, left_out


def encoding_beside(folder, name):
    """Return the name of the encoding of shards with this name, or None if it is unknown.

    The manifest in their folder tells. FineWeb's shards hold GPT-2's tokens.
    """
    manifest = folder / "manifest.json"
    if manifest.exists():
        return json.loads(manifest.read_text(encoding="utf-8")).get("encoding")
    return "gpt2" if "fineweb" in name else None


def read_shard(file, path):
    """Yield the texts of the documents in an open shard of tokens.

    Raises ValueError or KeyError if it is incomplete, or if its encoding is unknown or wrong.
    """
    header = np.frombuffer(file.read(HEADER_BYTES), "<i4")
    content = file.read()
    if header[:3].tolist() != [SHARD_MAGIC, SHARD_VERSION, len(content) / 2]:
        raise ValueError(
            f"it is not a complete shard: it must begin with {SHARD_MAGIC}, {SHARD_VERSION} and "
            f"the number of uint16 tokens, but begins with {header[:3].tolist()}, and "
            f"{len(content):,} bytes follow"
        )
    encoding_name = encoding_beside(path.parent, path.name)
    if encoding_name is None:
        raise ValueError(
            'its encoding is unknown: write {"encoding": "gpt2"}, for example, to '
            f"{path.parent / 'manifest.json'}"
        )
    encoding = get_encoding(encoding_name)
    tokens = np.frombuffer(content, "<u2")
    starts = np.flatnonzero(tokens == encoding.eot_token)
    for document in np.split(tokens, starts):  # all but the first start with end-of-text
        yield encoding.decode(document[document != encoding.eot_token].tolist())


def check_text(text):
    """Raise ValueError if a file's content is probably not text, or not one document."""
    if "\0" in text:
        raise ValueError("it has a zero byte, as archives, images and UTF-16 do")
    if re.match(r'\{".*\}\r?\n\{"', text):
        raise ValueError(
            "it has JSON lines: read them from a file whose name ends in .jsonl or .jsonl.gz"
        )


def read_texts(path, ending, text_field):
    """Yield the texts in a file. Empty lines of a .jsonl file yield "", so that lines are counted.

    ending: of the name without .gz or .xz. Raises many kinds of errors if the file is damaged.
    """
    decompress = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, contextlib.nullcontext)
    with open(path, "rb") as raw, decompress(raw) as file:
        if raw.peek(30).startswith(b"version https://git-lfs"):
            raise ValueError("it is a Git LFS pointer: run `git lfs pull`")
        if ending == ".jsonl":
            for line in file:
                yield json.loads(line)[text_field] if line.strip() else ""
        elif ending == ".parquet":
            from pyarrow import parquet

            for rows in parquet.ParquetFile(file).iter_batches(columns=[text_field]):
                yield from rows[text_field].to_pylist()
        elif ending == ".bin":
            yield from read_shard(file, path)
        else:
            text = file.read().decode().removeprefix("\ufeff")
            check_text(text)
            yield text


def ending_of(path):
    """Return the ending of a file's name without .gz or .xz."""
    return Path(re.sub(r"\.(gz|xz)$", "", path.name)).suffix


def read_documents(name, path, text_field="text"):
    """Yield (name, text) of the documents in a file that are not empty.

    name: that of the file. Documents of .jsonl, .parquet and .bin files have their text as name.
    Raises ValueError if the file is damaged or is not text.
    """
    ending = ending_of(path)
    is_one_document = ending not in MULTI_DOCUMENT_ENDINGS
    number = 1  # of the line, row or document
    try:
        for text in read_texts(path, ending, text_field):
            if not isinstance(text, str):
                raise TypeError(f"it holds {type(text).__name__} instead of text")
            text.encode()  # raises an error if it has half of a surrogate pair
            if text:
                yield name if is_one_document else text, text
            number += 1
    except ImportError as error:
        fix = f"{sys.executable} -m pip install pyarrow"
        raise ValueError(f"cannot read {path} ({error}): {fix}") from None
    except Exception as error:  # of the disk, the content or a library
        place = path if is_one_document else f"{path}:{number}"
        fix = "give another file, or text in UTF-8"
        is_about_field = isinstance(error, (KeyError, TypeError, UnicodeError))
        if ending in FIELD_ENDINGS and is_about_field:
            fix = f"the field {text_field!r} must hold text in UTF-8 (see --text_field)"
        raise ValueError(
            f"{place} cannot be read ({type(error).__name__}: {error}): {fix}"
        ) from None


def split_texts(documents, split_at):
    """Yield (name, text) of the parts of documents, named by their texts.

    The whitespace around a part is removed. Raises ValueError if split_at is empty or occurs in no
    document.
    """
    if not split_at:
        raise ValueError("--split_at is empty: give a text that separates documents")
    occurs = False
    for _, text in documents:
        occurs = occurs or split_at in text
        yield from ((part, part) for part in map(str.strip, text.split(split_at)) if part)
    if not occurs:
        raise ValueError(
            f"--split_at {split_at!r} does not occur: give a text that occurs; in bash, "
            "$'\\n\\n' is an empty line"
        )


def hash_of(text):
    """Return the first 64 bits of the sha256 of a text or name."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big")


def tokenize(documents, encoding):
    """Return the tokens of all documents, a list of (N,) uint16, and hashes, (documents, 2) uint64.

    documents: iterator over (name, text). The hashes are those of names and texts. tiktoken
    releases the GIL, so all cores share its work.
    """
    tokens, hashes, separators = [], [], 0
    with ThreadPoolExecutor() as pool:
        while batch := list(itertools.islice(documents, DOCUMENTS_AT_ONCE)):
            for name, text in batch:
                separators += text.count(END_OF_TEXT)
                hashes.append((hash_of(name), hash_of(text)))
            tokens += pool.map(lambda document: tokens_of(document[1], encoding), batch)
    if separators:
        print(
            f"warning: the texts contain {END_OF_TEXT} {separators:,} times, packed as plain text; "
            f"--split_at '{END_OF_TEXT}' splits them into documents there"
        )
    return tokens, np.array(hashes, np.uint64)


# ---- Validation ----------------------------------------------------------------------------------
def up_to(wanted, lengths, hashes):
    """Choose documents with at most `wanted` tokens in total; return a mask, (documents,) bool.

    They are taken in the order of their hashes, except those that no longer fit. Documents with
    equal hashes stay together.
    """
    unique, group_of = np.unique(hashes, return_inverse=True)
    chosen = np.zeros(len(unique), bool)
    for i, length in enumerate(np.bincount(group_of, lengths)):
        if length <= wanted:
            chosen[i] = True
            wanted -= length
    return chosen[group_of]


def choose(lengths, hashes, val_fraction, any_size=False):
    """Return which documents are held out, (documents,) bool; None for the end of the whole text.

    lengths: tokens of each document, (documents,) int. hashes: (documents,) uint64. any_size: do
    not check the size of what is held out.
    """
    wanted = val_fraction * lengths.sum()
    if len(lengths) > HASH_SPLIT_ABOVE:
        by_hash = hashes / 2.0**64 < val_fraction
        for held_out in by_hash, up_to(wanted, lengths, hashes):
            is_close = wanted / 2 <= lengths[held_out].sum() <= 2 * wanted
            if (is_close or any_size) and held_out.any() and not held_out.all():
                return held_out
    return None


def split(documents, hashes, val_fraction, any_size=False):
    """Return the training tokens and the validation tokens, each (N,) uint16.

    documents: the tokens of each document, (length,) uint16.
    """
    lengths = np.array([len(tokens) for tokens in documents])
    held_out = choose(lengths, hashes, val_fraction, any_size)
    if held_out is not None:
        train = [tokens for tokens, held in zip(documents, held_out) if not held]
        val = [tokens for tokens, held in zip(documents, held_out) if held]
        return np.concatenate(train), np.concatenate(val)
    if len(np.unique(hashes)) < len(hashes) and val_fraction:
        print("warning: the end of the text is held out, which may be a copy of training text")
    # The fraction is one of the text: end-of-text tokens do not count. All of them are added before
    # the cut, which is exact for one document.
    text_tokens = int(lengths.sum()) - len(documents)
    cut = len(documents) + int(text_tokens * (1 - val_fraction))
    tokens = np.concatenate(documents)
    return tokens[:cut], tokens[cut:]


# ---- Writing -------------------------------------------------------------------------------------
def write_shard(path, tokens):
    """Write tokens, (N,) uint16, as one shard; return its sha256.

    A kill leaves no incomplete file of this name, but perhaps one that ends in .partial.
    """
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = SHARD_MAGIC, SHARD_VERSION, len(tokens)
    partial = Path(f"{path}.partial")
    checksum = hashlib.sha256()
    with open(partial, "wb") as file:
        for part in header, np.ascontiguousarray(tokens):
            file.write(part)
            checksum.update(part)
    os.replace(partial, path)
    return checksum.hexdigest()


def write_split(folder, prefix, number, tokens):
    """Write tokens as shards, numbered from `number`; return the manifest's entry."""
    sums = {}
    for i, start in enumerate(range(0, len(tokens), SHARD_TOKENS), start=number):
        path = folder / f"{prefix}_{i:06d}.bin"
        sums[path.name] = write_shard(path, tokens[start : start + SHARD_TOKENS])
    return {"tokens": len(tokens), "sha256": sums}


def shards_of(manifest_path):
    """Return the names of the shards that a manifest of pack.py lists."""
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        return {*manifest["train"]["sha256"], *manifest["val"]["sha256"]}
    except (OSError, ValueError, KeyError, TypeError):  # none, or not written by pack.py
        return set()


def pack(args):
    """Pack all inputs into args.out; return the manifest."""
    manifest_path = args.out / "manifest.json"
    marker = args.out / ".pack"  # a folder; while it exists, train_gpt2.py refuses args.out
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out {args.out} is not a folder: change --out")
    strangers = {path.name for path in args.out.glob("*.bin")} - shards_of(manifest_path)
    if strangers and not marker.exists():
        raise ValueError(
            f"{args.out} holds shards that pack.py did not write, such as {min(strangers)}: "
            "change --out"
        )
    if manifest_path.exists() and not shards_of(manifest_path) and not marker.exists():
        raise ValueError(f"{manifest_path} was not written by pack.py: change --out")
    encoding = get_encoding(args.encoding)
    files, left_out = list_files(args.inputs, args.pattern, args.exclude, args.out)
    if left_out:
        print(f"left out {len(left_out)} links to folders or special files, such as {left_out[0]}")
    endings = {ending_of(path) for _, path in files}
    if args.text_field and not endings & FIELD_ENDINGS:
        raise ValueError("--text_field is for .jsonl and .parquet files: omit it")
    if args.by_name and (endings & MULTI_DOCUMENT_ENDINGS or args.split_at is not None):
        raise ValueError(
            "--by_name holds out whole files: omit it with --split_at, .jsonl, .parquet and .bin"
        )
    documents = itertools.chain.from_iterable(
        read_documents(*file, args.text_field or "text") for file in files
    )
    if args.split_at is not None:
        documents = split_texts(documents, args.split_at)
    progress = tqdm(documents, unit=" documents", disable=None)
    tokens, hashes = tokenize(iter(progress), encoding)
    if not tokens:
        raise ValueError(f"no text in {', '.join(args.inputs)}: give other inputs or --pattern")
    name_hashes, text_hashes = hashes.T
    if args.by_name:
        train, val = split(tokens, name_hashes, args.val_fraction, any_size=True)
    else:
        train, val = split(tokens, text_hashes, args.val_fraction)

    args.out.mkdir(parents=True, exist_ok=True)
    new = args.out / ".new"
    shutil.rmtree(new, ignore_errors=True)  # a pack that was killed may have left it
    new.mkdir()
    try:
        manifest = {
            "encoding": args.encoding,
            "vocab_size": encoding.n_vocab,
            "source": args.inputs,
            "documents": len(tokens),
            "copies": len(tokens) - len(np.unique(text_hashes)),
            "train": write_split(new, "train", 1, train),
            "val": write_split(new, "val", 0, val),
        }
        text = json.dumps(manifest, indent=2) + "\n"
        (new / manifest_path.name).write_text(text, encoding="utf-8")
        marker.mkdir(exist_ok=True)
        for pattern in "train_*.bin", "val_*.bin":
            for old in args.out.glob(pattern):
                old.unlink()
        for path in list(new.iterdir()):
            path.replace(args.out / path.name)
        marker.rmdir()
    except OSError as error:
        fix = "check the disk, or change --out"
        raise ValueError(f"{args.out} cannot be written ({error}): {fix}") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return manifest


def parse_args(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="file or folder")
    add("--out", required=True, type=Path, help="folder for the shards")
    add("--encoding", default="bytes", help="bytes, gpt2 or gpt2-N (its first N tokens)")
    add("--val_fraction", default=0.1, type=float, help="fraction to hold out (default: 0.1)")
    add("--by_name", action="store_true", help="hold out files by the hash of their paths")
    add("--text_field", help="field of a line or row (default: text)")
    add("--split_at", metavar="TEXT", help=f"split documents here, for example at '{END_OF_TEXT}'")
    add("--pattern", default="*", help="in folders, read only files whose names match")
    add(
        "--exclude",
        default=[],
        nargs="*",
        help="relative paths of files or folders to leave out (pass it after INPUT)",
    )
    args = parser.parse_args(argv)
    if not 0 <= args.val_fraction < 1:
        parser.error(f"--val_fraction={args.val_fraction} must be at least 0 and less than 1")
    return args


def main(argv=None):
    args = parse_args(argv)
    try:
        manifest = pack(args)
    except (ValueError, OSError, RuntimeError) as error:  # such as "can't start new thread"
        sys.exit(f"data/pack.py: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        sys.exit("data/pack.py: stopped; run the same command again")
    train, val = manifest["train"], manifest["val"]
    print(f"{manifest['documents']:,} documents in {args.encoding}, {manifest['copies']:,} copies")
    for name, part in ("train", train), ("val", val):
        share = part["tokens"] / (train["tokens"] + val["tokens"])
        print(
            f"{name}: {part['tokens']:,} tokens ({share:.1%} of all), {len(part['sha256'])} shards"
        )


if __name__ == "__main__":
    main()
