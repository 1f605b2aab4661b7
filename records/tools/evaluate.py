"""Measure a trained model: its loss on texts, in bits per byte, too, and its HellaSwag accuracy.

    python records/tools/evaluate.py [TEXT ...] [--weights logs/RUN] [--stride N] [--tokens N]
    python records/tools/evaluate.py --hellaswag [N] [--weights logs/RUN]

TEXT: a file in UTF-8, a shard of tokens, or - for standard input. Without one, and without
--hellaswag, it is the run's own validation tokens, and the loss is the run's val_loss. The hash of
the tokens is compared with the val_hash of the run, and a difference is reported.

An end-of-text leads a text, as it leads each document in training; a shard is taken as it is. Every
token after the first counts exactly once. It is predicted from those before it in a window of
sequence_length tokens. Windows follow each other as in training, where a token early in a window
has little context. With --stride N a window begins every N tokens, and only those that the window
before did not reach count: all but the first window's have sequence_length - N + 1 tokens of
context or more. That takes sequence_length / N times as long.

The loss is the mean in nats a token, perplexity its exponential. Bits per byte are all bits by all
bytes of the tokens that count, of which an end-of-text has none: they alone compare models of
different encodings.

HellaSwag: which of four endings follows a context? The model's choice is the one to whose tokens it
gives the highest log-probability, their sum or their mean; chance is right in 25%. Context and
" " + ending are encoded apart, without end-of-text, as in llm.c's dev/data/hellaswag.py, which says
0.2859 and 0.2955 for OpenAI's GPT-2 124M. With N only N items count, spread evenly over the file,
whose parts differ. An item longer than sequence_length is scored in windows that overlap by half.
"""

import argparse
import glob
import hashlib
import itertools
import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

sys.path.insert(0, str(Path(__file__).resolve().parent))
from runlog import ROOT, packages

with packages():
    import numpy as np
    import torch
    import torch.nn.functional as F
    import weights
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import HTTPError  # httpx's own: the base of all network errors
    from shards import SHARD_MAGIC, file_sha256
    from torch.nn.utils.rnn import pad_sequence
    from tqdm import tqdm

    from train_gpt2 import DistributedDataLoader, UserError

PASS_TOKENS = 2**13  # of a forward pass over windows
PASS_LOGITS = 2**26  # of a forward pass over endings: 256 MB in float32
# REPOSITORY@REVISION:FILE of the validation split, 10,042 items, by HellaSwag's author; his JSONL
# on GitHub is blocked since September 2026
SOURCE = (
    "Rowan/hellaswag@218ec52e09a7e7462a5400043bb9a69a41d06b76:"
    "data/validation-00000-of-00001.parquet"
)
SHA256 = "899813071e1e95efafec90f856e1987d2150fa4d020fc005df6962c259f660cd"


# ---- Windows: which tokens are predicted from which ---------------------------------------------
def windows(count, T, stride):
    """Yield (first, begin, end) of each window on `count` predictions, of which i is tokens[i + 1].
    A window holds the inputs tokens[first:end], at most T; its predictions begin..end - 1 count."""
    begin = 0
    for first in itertools.count(0, stride):
        end = min(first + T, count)
        yield first, begin, end
        if end == count:
            return
        begin = end


def pieces(tokens, T, stride, start=1):
    """Yield the windows of tokens, (N,) int, as (inputs, targets), each at most (T,) int64.
    Each of tokens[start:] is once a target; targets that do not count are -1."""
    for first, begin, end in windows(len(tokens) - 1, T, stride):
        targets = tokens[first + 1 : end + 1].long().clone()
        targets[: max(begin, start - 1) - first] = -1
        yield tokens[first:end].long(), targets


def batches(items, size):
    """Yield lists of `size` items in turn, the last of fewer."""
    items = iter(items)
    while batch := list(itertools.islice(items, size)):
        yield batch


def padded(batch, device):
    """Return (inputs, targets), each (B, T) int64, of pieces; what fills them up does not count.
    It comes last, and the model is causal: it changes nothing that counts."""
    inputs, targets = zip(*batch)
    inputs = pad_sequence(inputs, batch_first=True)
    targets = pad_sequence(targets, batch_first=True, padding_value=-1)
    return inputs.to(device), targets.to(device)


@torch.no_grad()
def nats_of(gpt, tokens, T, stride, bar=None):
    """Return the summed cross-entropy of tokens[1:], tokens: (N,) int, N at least 2."""
    device = gpt.lm_head.weight.device
    total = 0.0
    for batch in batches(pieces(tokens, T, stride), max(1, PASS_TOKENS // T)):
        inputs, targets = padded(batch, device)
        count = (targets != -1).sum().item()
        total += gpt(inputs, targets).item() * count
        if bar is not None:
            bar.update(count)
    return total


@torch.no_grad()
def log_probabilities(gpt, rows, T):
    """Return the summed log-probability of the last tokens of each row, float64 (len(rows),).
    rows: [(tokens, start)]: tokens[start:] count, tokens (N,) int, start at least 1."""
    device = gpt.lm_head.weight.device
    found = []
    for i, (tokens, start) in enumerate(rows):
        found += [(i, piece) for piece in pieces(tokens, T, max(1, T // 2), start)]
    found.sort(key=lambda row: len(row[1][0]))  # alike in length: little is filled up
    longest = len(found[-1][1][0])
    size = max(1, PASS_LOGITS // (longest * len(gpt.lm_head.weight)))
    sums = torch.zeros(len(rows), dtype=torch.float64)
    for batch in tqdm(batches(found, size), total=-(-len(found) // size), disable=None):
        indices, parts = zip(*batch)
        inputs, targets = padded(parts, device)
        logits = gpt(inputs).flatten(0, 1)  # (B * T, V)
        nats = F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction="none")
        nats = nats.view_as(targets).double().sum(1).cpu()
        sums.index_add_(0, torch.tensor(indices), -nats)
    return sums


# ---- Texts --------------------------------------------------------------------------------------
@dataclass
class Text:
    """What a row of the table is about."""

    name: str
    tokens: torch.Tensor  # (N,) int32; all but the first count
    bytes: int | None  # of text, in the tokens that count; None: unknown

    def __post_init__(self):
        if len(self.tokens) < 2:
            raise UserError(f"{self.name} holds one token: nothing is left to predict")


def encode(text, name, encoding, vocab_size):
    """Return the tokens of a text, a list. Raises UserError for ids that the model has not."""
    tokens = encoding.encode_ordinary(text)
    largest = max(tokens)
    if largest >= vocab_size:
        raise UserError(
            f"{name} holds id {largest} in the encoding {encoding.name}, but the model has "
            f"vocab_size={vocab_size}: give the --encoding of its data"
        )
    return tokens


def read_text(content, name, encoding, vocab_size):
    """Return the tokens, (N,) int32, of a text as bytes. Raises UserError if it is none."""
    if not content:
        raise UserError(f"{name} is empty: give a text")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 (at byte {error.start}): give a text") from None
    if encoding.eot_token >= vocab_size:
        raise UserError(
            f"the encoding {encoding.name} does not fit vocab_size={vocab_size}: give the "
            f"--encoding of the model's data"
        )
    tokens = [encoding.eot_token, *encode(text, name, encoding, vocab_size)]
    return torch.tensor(tokens, dtype=torch.int32)


def read_shards(pattern, args, limit=math.inf):
    """Return up to limit + 1 tokens of the shards of a glob, (N,) int32. UserError: bad shards."""
    cpu = torch.device("cpu")
    loader = DistributedDataLoader(pattern, 1, args.sequence_length, 0, 1, cpu, args.vocab_size)
    tokens = loader.read(0, min(limit + 1, loader.total_tokens))
    return torch.from_numpy(tokens.astype(np.int32))


def is_shard(path):
    """Tell whether a file begins as a shard does; no text in UTF-8 does."""
    if not Path(path).is_file():
        return False
    with open(path, "rb") as file:
        return file.read(4) == SHARD_MAGIC.to_bytes(4, "little")


def read_input(given, args, encoding):
    """Return the tokens, (N,) int32, of what the command line names. UserError if it is nothing."""
    if given == "-":
        return read_text(sys.stdin.buffer.read(), "standard input", encoding, args.vocab_size)
    if not Path(given).is_file():
        raise UserError(f"{given} is not a file: name texts, shards, or - for standard input")
    if is_shard(given):
        return read_shards(glob.escape(given), args)
    return read_text(Path(given).read_bytes(), given, encoding, args.vocab_size)


def text_bytes(tokens, encoding, name):
    """Return how many bytes of text tokens, (N,) int, stand for. UserError: not of the encoding."""
    total = 0
    for token, count in enumerate(torch.bincount(tokens).tolist()):
        if count and token != encoding.eot_token:
            try:
                total += count * len(encoding.decode_single_token_bytes(token))
            except (KeyError, ValueError):
                raise UserError(
                    f"{name} holds id {token}, which the encoding {encoding.name} has not: give "
                    f"the --encoding of its tokens"
                ) from None
    return total


def measure_texts(gpt, texts, T, stride):
    """Print the table of texts, a row as soon as it is known."""
    print("\n| text | tokens | loss | perplexity | bits per byte |\n|---|---|---|---|---|")
    for text in texts:
        count = len(text.tokens) - 1
        with tqdm(total=count, unit="tok", unit_scale=True, disable=None, leave=False) as bar:
            nats = nats_of(gpt, text.tokens, T, stride, bar)
        loss = nats / count
        perplexity = math.inf if loss > 700 else math.exp(loss)  # of NaN it is NaN
        bits = f"{nats / math.log(2) / text.bytes:.4f}" if text.bytes else "n/a"
        print(f"| {text.name} | {count:,} | {loss:.4f} | {perplexity:.5g} | {bits} |", flush=True)


# ---- HellaSwag ----------------------------------------------------------------------------------
@dataclass
class Item:
    """A context and its endings, of which the one at `label` is right; else ValueError."""

    context: str
    endings: list
    label: int

    def __post_init__(self):
        self.label = int(self.label)  # the hub's is a text
        if not isinstance(self.endings, list):
            raise ValueError("no list")
        texts = [self.context, *self.endings]
        if not all(isinstance(text, str) and text for text in texts):
            raise ValueError("a text is missing")
        if not 0 <= self.label < len(self.endings):
            raise ValueError("no ending has this label")


def fetch(source):
    """Return the path of REPOSITORY@REVISION:FILE, downloaded once. UserError where that fails."""
    parts = re.fullmatch(r"([^@]+)@([^:]+):(.+)", source)
    if not parts:
        raise UserError(f"--hellaswag_source={source} must be REPOSITORY@REVISION:FILE")
    repository, revision, name = parts.groups()
    try:
        path = hf_hub_download(repository, name, repo_type="dataset", revision=revision)
    except (HTTPError, OSError, ValueError) as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise UserError(
            f"{name} of {repository} does not come from {constants.ENDPOINT} ({reason}): check "
            f"the network and HF_ENDPOINT, or give your copy as --hellaswag_file"
        ) from None
    if source == SOURCE and file_sha256(path) != SHA256:
        raise UserError(f"{path} has not sha256 {SHA256}: delete it, to fetch it again")
    return Path(path)


def read_lines(path):
    """Return the lines, bytes, of a file of JSON lines; of a .parquet file the rows, dicts."""
    if path.suffix != ".parquet":
        return path.read_bytes().split(b"\n")
    try:
        from pyarrow import parquet
    except ImportError:
        fix = f"{sys.executable} -m pip install pyarrow"
        raise UserError(f"{path.name} needs a package: {fix}") from None
    return parquet.read_table(path).to_pylist()


def read_items(path):
    """Return the Items of a file. Raises UserError for one with anything else."""
    items = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            if line:
                row = line if isinstance(line, dict) else json.loads(line)
                items.append(Item(row["ctx"], row["endings"], row["label"]))
        except (ValueError, TypeError, KeyError):
            raise UserError(
                f"{path}:{number} is no item of HellaSwag, which has ctx, endings and label, as in "
                f"the validation split: the test split has no labels"
            ) from None
    if not items:
        raise UserError(f"{path} is empty: give HellaSwag's validation split")
    return items


def evenly(items, count):
    """Return `count` of the items, evenly spaced; 0: all. Raises UserError for more than all."""
    if count > len(items):
        raise UserError(f"--hellaswag={count}: there are {len(items)} items")
    count = count or len(items)
    return [items[i * len(items) // count] for i in range(count)]


def rows_of(items, encoding, vocab_size):
    """Return [(tokens of context and ending, where the ending starts)] of all endings in turn."""
    rows = []
    for item in items:
        context = encode(item.context, "HellaSwag", encoding, vocab_size)
        for ending in item.endings:
            tokens = context + encode(f" {ending}", "HellaSwag", encoding, vocab_size)
            rows.append((torch.tensor(tokens, dtype=torch.int32), len(context)))
    return rows


def answers(gpt, items, rows, T):
    """Return two lists, by sum and by mean: whether the model's choice is right for each item.
    rows: rows_of(items). Of equal endings it takes the first."""
    sums = log_probabilities(gpt, rows, T)
    means = sums / torch.tensor([len(tokens) - start for tokens, start in rows])
    sizes = [len(item.endings) for item in items]
    right = []
    for kind in sums, means:
        choices = [scores.argmax().item() for scores in kind.split(sizes)]
        right.append([choice == item.label for choice, item in zip(choices, items)])
    return right


def interval(right, n):
    """Return Wilson's 95% interval of a share of which `right` of n were seen.
    Source: https://doi.org/10.1080/01621459.1927.10502953"""
    z = NormalDist().inv_cdf(0.975)
    centre = (right + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(right * (n - right) / n + z * z / 4)
    return centre - half, centre + half


def measure_hellaswag(gpt, items, rows, T):
    """Print the table of the accuracies. rows: rows_of(items)."""
    answered = answers(gpt, items, rows, T)
    print("\n| HellaSwag by | items | accuracy | 95% interval |\n|---|---|---|---|")
    for name, right in zip(("sum of log-probabilities", "mean a token"), answered):
        low, high = interval(sum(right), len(right))
        share = sum(right) / len(right)
        print(f"| {name} | {len(right):,} | {share:.4f} | {low:.4f} to {high:.4f} |")


# ---- The command --------------------------------------------------------------------------------
def parse_args(argv):
    parser = argparse.ArgumentParser(
        prog="evaluate.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("texts", nargs="*", metavar="TEXT", help="file, shard, or - for standard input")
    add("--weights", default="", help=weights.HELP)
    add("--log_dir", default="logs", help="where the newest is looked for")
    add("--device", default="auto", choices=("auto", "cuda", "cpu"), help="auto: cuda, if any")
    add("--encoding", default="", help="of texts; empty: that of the training data")
    add("--stride", type=int, help="tokens from window to window (default: sequence_length)")
    add("--tokens", type=int, help="of each text, the first that count (default: all)")
    add("--hellaswag", nargs="?", type=int, const=0, metavar="N", help="on N items; without N: all")
    add("--hellaswag_file", type=Path, help="your copy of the validation split: .jsonl, .parquet")
    add("--hellaswag_source", default=SOURCE, help="REPOSITORY@REVISION:FILE on the hub")
    options = parser.parse_intermixed_args(argv)  # texts and options in any order
    if options.hellaswag_file and options.hellaswag is None:
        options.hellaswag = 0
    for name, least in dict(stride=1, tokens=1, hellaswag=0).items():
        value = getattr(options, name)
        if value is not None and not least <= value < 2**31:
            raise UserError(f"--{name}={value} must be a number from {least} to 2**31 - 1")
    return options


def choose_device(name):
    """Return the device of this name. Raises UserError for cuda without a GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device=cuda: no GPU is visible; give --device=cpu")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


def choose_encoding(options, args):
    """Return the encoding; None if it is not here and only bits per byte would need it."""
    texts = [name for name in options.texts if not is_shard(name)]
    try:
        return weights.encoding_of(args, options.encoding)
    except ValueError as error:
        if texts or options.encoding or options.hellaswag is not None:
            raise
        print(f"evaluate.py: no bits per byte: {error}", file=sys.stderr)
        return None


def validation_tokens(args):
    """Return the tokens, (val_tokens + 1,) int32, on which the run was validated."""
    tokens = read_shards(str(ROOT / args.val_files), args, args.val_tokens)
    if len(tokens) <= args.val_tokens:
        raise UserError(
            f"{args.val_files!r} holds {len(tokens)} tokens, too few for the run's "
            f"val_tokens={args.val_tokens}: restore its shards"
        )
    return tokens


def own_loss(state, args, tokens):
    """Return a sentence that states the run's val_loss, and whether it is of the same tokens."""
    here = hashlib.sha256(tokens.numpy().astype("<u2")).hexdigest()[:16]
    there = state.get("val_hash")
    if there not in (here, None):
        return (
            f"the run was validated on other tokens (val_hash {there}) than {args.val_files!r} "
            f"holds now (val_hash {here}): do not compare the loss above with that of the run"
        )
    if "val_loss" not in state:  # a checkpoint
        return ""
    own = f"the run's own val_loss:{state['val_loss']:.4f}"
    if there is None:
        return (
            f"{own} may be of other tokens, because the file of weights holds no val_hash: "
            f"check that the run's log says val_hash:{here}"
        )
    dtype = f", computed in {state['dtype']}" if "dtype" in state else ""
    return f"{own} on the same {args.val_tokens:,} tokens{dtype}"


def gather(options, args, encoding, validation):
    """Return the Texts to measure: those named, and validation tokens if there are any."""
    tokens = {name: read_input(name, args, encoding) for name in options.texts}
    if validation is not None:
        tokens[args.val_files] = validation
    texts = []
    for name, of_text in tokens.items():
        if options.tokens:
            of_text = of_text[: options.tokens + 1]
        size = text_bytes(of_text[1:], encoding, name) if encoding else None
        texts.append(Text(name, of_text, size))
    return texts


def main(argv):
    options = parse_args(argv)
    device = choose_device(options.device)
    path = weights.find(options.weights, options.log_dir)
    gpt, args, state = weights.load(path, device)
    T = args.sequence_length
    stride = options.stride or T
    if stride > T:
        raise UserError(f"--stride={stride} must be at most the model's sequence_length={T}")
    encoding = choose_encoding(options, args)
    own_data = not options.texts and options.hellaswag is None
    validation = validation_tokens(args) if own_data else None
    texts = gather(options, args, encoding, validation)
    if options.hellaswag is not None:
        items = read_items(options.hellaswag_file or fetch(options.hellaswag_source))
        items = evenly(items, options.hellaswag)
        rows = rows_of(items, encoding, args.vocab_size)
    print(f"{path}: windows of {T} tokens, stride {stride}; {device}, {gpt.dtype}")
    if texts:
        measure_texts(gpt, texts, T, stride)
    if own_data and (sentence := own_loss(state, args, validation)):
        print(f"\n{sentence}")
    if options.hellaswag is not None:
        measure_hellaswag(gpt, items, rows, T)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"evaluate.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
