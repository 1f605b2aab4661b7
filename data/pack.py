"""Turn text into the shards that train_gpt2.py reads.

    python data/pack.py INPUT... --out DIR [--encoding gpt2|bytes] [--val_fraction 0.01]

INPUT: files or folders of text or code (one document a file, UTF-8), or .jsonl files (one document
a line, its text in --text_field). Folders are walked in the order of their sorted relative paths;
inputs keep the order they are given in.

Writes DIR/train_000001.bin..., DIR/val_000000.bin and DIR/manifest.json. A shard is 256 int32
(magic 20240520, version 1, token count, zeros), then uint16 tokens; end-of-text leads every
document. A document is held out for validation when the hash of its name (a file's relative path;
a JSON line's text) says so: adding documents moves no other from one side to the other.
"""

import argparse
import fnmatch
import hashlib
import json
import os
import sys
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from train_gpt2 import SHARD_HEADER, SHARD_MAGIC, SHARD_VERSION


def get_encoding(name):
    """Return a tiktoken Encoding: `bytes` (256 bytes and end-of-text, no download) or gpt2."""
    if name != "bytes":
        try:
            return tiktoken.get_encoding(name)
        except OSError as error:
            raise ValueError(
                f"the vocabulary of {name} cannot be downloaded ({type(error).__name__}): set "
                f"TIKTOKEN_CACHE_DIR to a folder that has it, or take --encoding bytes"
            ) from None
    return tiktoken.Encoding(
        name="bytes",
        pat_str=r"\S+|\s+",  # any split will do: no two bytes are ever merged
        mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={"<|endoftext|>": 256},
    )


def list_files(inputs, patterns, exclude):
    """Yield (name, path) of every file in order. Raises ValueError for an input that is none."""
    for given in map(Path, inputs):
        if given.is_file():
            yield given.name, given
        elif given.is_dir():
            found = {p.relative_to(given).as_posix(): p for p in given.rglob("*") if p.is_file()}
            for name in sorted(found):
                base = name.rpartition("/")[2]
                if fnmatch.fnmatch(base, patterns) and name not in exclude:
                    yield name, found[name]
        else:
            raise ValueError(f"{given} is neither a file nor a folder: name existing ones")


def read_documents(name, path, text_field):
    """Yield (key, text) of every document in a file. Raises ValueError naming file and line."""
    if path.suffix != ".jsonl":
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path} is not UTF-8 text (byte {error.start}): leave it out with --exclude or "
                f"--pattern"
            ) from None
        if text:
            yield name, text
        return
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[text_field]
                text.encode()
            except (ValueError, LookupError, TypeError, AttributeError):
                raise ValueError(
                    f"{path}:{number} is not a UTF-8 JSON object with a text {text_field!r}: mend "
                    f"the line or name the field with --text_field"
                ) from None
            yield text, text


def held_out(key, val_fraction):
    """Tell whether a document belongs to the validation split; depends on its key alone."""
    return int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) < val_fraction * 2**32


class ShardWriter:
    """Collects tokens and writes a split as shards of shard_tokens, each under its final name
    only when it is whole."""

    def __init__(self, folder, split, shard_tokens, first):
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.number, self.parts, self.waiting = first, [], 0
        self.files, self.documents, self.tokens, self.bytes = {}, 0, 0, 0

    def add(self, tokens, text_bytes):
        """Append one document: tokens, (n,) uint16; text_bytes: length of its text."""
        self.documents += 1
        self.tokens += len(tokens)
        self.bytes += text_bytes
        self.parts.append(tokens)
        self.waiting += len(tokens)
        if self.waiting >= self.shard_tokens:
            tokens = np.concatenate(self.parts)
            whole = len(tokens) // self.shard_tokens * self.shard_tokens
            for start in range(0, whole, self.shard_tokens):
                self.write(tokens[start : start + self.shard_tokens])
            self.parts, self.waiting = [tokens[whole:]], len(tokens) - whole

    def write(self, tokens):
        header = np.zeros(SHARD_HEADER, dtype=np.int32)
        header[:3] = SHARD_MAGIC, SHARD_VERSION, len(tokens)
        content = header.tobytes() + tokens.astype(np.uint16).tobytes()
        path = self.folder / f"{self.split}_{self.number:06d}.bin"
        partial = path.with_suffix(f".{os.getpid()}.partial")
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        self.files[path.name] = hashlib.sha256(content).hexdigest()
        self.number += 1

    def finish(self):
        """Write what is left and return this split's part of the manifest."""
        if self.waiting:
            self.write(np.concatenate(self.parts))
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "sha256": self.files,
        }


def pack(inputs, out, encoding, val_fraction, text_field, pattern, exclude, shard_tokens):
    """Write the shards and manifest.json of all inputs into out; return the manifest."""
    encoder = get_encoding(encoding)
    if encoder.n_vocab > 65536:
        raise ValueError(f"encoding {encoding} has {encoder.n_vocab} ids; uint16 holds 65536")
    if shard_tokens < 1:
        raise ValueError(f"--shard_tokens={shard_tokens} must be at least 1")
    if not 0 <= val_fraction < 1:
        raise ValueError(f"--val_fraction={val_fraction} must be at least 0 and below 1")
    files = list(list_files(inputs, pattern, exclude))
    if not files:
        raise ValueError(f"no file matches {pattern!r} in {', '.join(map(str, inputs))}")
    out.mkdir(parents=True, exist_ok=True)
    train = ShardWriter(out, "train", shard_tokens, first=1)
    val = ShardWriter(out, "val", shard_tokens, first=0)
    for name, path in tqdm(files, unit="file", disable=not sys.stderr.isatty()):
        for key, text in read_documents(name, path, text_field):
            tokens = np.array([encoder.eot_token, *encoder.encode_ordinary(text)], dtype=np.uint16)
            (val if held_out(key, val_fraction) else train).add(tokens, len(text.encode()))
    splits = {"train": train.finish(), "val": val.finish()}
    sums = json.dumps([split["sha256"] for split in splits.values()])
    manifest = {
        "encoding": encoding,
        "vocab_size": encoder.n_vocab,
        "data_hash": hashlib.sha256(sums.encode()).hexdigest()[:16],
        **splits,
    }
    partial = out / f"manifest.{os.getpid()}.partial"
    partial.write_text(json.dumps(manifest, indent=2) + "\n")
    os.replace(partial, out / "manifest.json")
    for stale in {*out.glob("train_*.bin"), *out.glob("val_*.bin")}:
        if stale.name not in train.files and stale.name not in val.files:
            stale.unlink()  # of an earlier, longer pack: a glob would read it
    return manifest


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="file, folder or .jsonl")
    parser.add_argument("--out", required=True, type=Path, help="folder for the shards")
    parser.add_argument("--encoding", default="gpt2", choices=["gpt2", "bytes"])
    parser.add_argument("--val_fraction", default=0.01, type=float, help="of the documents")
    parser.add_argument("--text_field", default="text", help="of a JSON line")
    parser.add_argument("--pattern", default="*", help="of file names taken from folders")
    parser.add_argument("--exclude", default=[], nargs="*", help="relative paths to leave out")
    parser.add_argument("--shard_tokens", default=100_000_000, type=int, help="tokens a shard")
    try:
        manifest = pack(**vars(parser.parse_args()))
    except (ValueError, OSError) as error:
        sys.exit(f"data/pack.py: {error}")
    for split in ("train", "val"):
        part = manifest[split]
        print(f"{split}: {part['documents']:,} documents, {part['tokens']:,} tokens, "
              f"{part['bytes']:,} bytes, {len(part['sha256'])} shards")  # fmt: skip
    print(f"data_hash:{manifest['data_hash']}")


if __name__ == "__main__":
    main()
