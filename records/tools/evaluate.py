"""Measure a trained model: its loss on texts, its perplexity and its bits per byte.

    bash run.sh evaluate [TEXT ...] [--weights logs/RUN] [--stride N]

A TEXT is a file in UTF-8, a shard of tokens, or - for standard input. Without one, the run's own
validation tokens are measured, and the loss is the run's val_loss. A hash tells whether they are
still the tokens that the run was validated on.

A text is preceded by an end-of-text token, as each document is in training. Every later token
counts exactly once. It is predicted from the tokens before it in a window of sequence_length
tokens. By default windows do not overlap, as in training, so tokens early in a window have little
context. With --stride N, a window begins every N tokens, and only the tokens that the previous
window did not reach count. They have at least sequence_length - N + 1 tokens of context. This
takes sequence_length / N times as long.

The loss is the mean in nats per token, and the perplexity is its exponential. Bits per byte are the
total in bits, divided by the bytes of the text, so they also compare models of different encodings.
An end-of-text token has no bytes.

For benchmarks such as HellaSwag, export the model (export.py) and run EleutherAI's lm-eval on it.
"""

import glob
import hashlib
import itertools
import math
import sys
from pathlib import Path

import numpy as np
import torch
import weights
from runlog import ROOT, command
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from train_gpt2 import DistributedDataLoader, UserError

TOKENS_PER_PASS = 2**13
SHARD_BEGINNING = (20240520).to_bytes(4, "little")


# ---- Loss ---------------------------------------------------------------------------------------
def windows(tokens, T, stride):
    """Yield (inputs, targets), each of at most T tokens, (T,) int64, for each window of tokens.

    Every token but the first is a target once. The other targets are -1.
    """
    for first in range(0, max(0, len(tokens) - 1 - T) + stride, stride):
        targets = tokens[first + 1 : first + T + 1].to(torch.int64, copy=True)
        inputs = tokens[first : first + len(targets)].long()
        if first > 0:
            targets[: T - stride] = -1  # counted in the window before
        yield inputs, targets


@torch.no_grad()
def nats_of(gpt, tokens, T, stride):
    """Return the summed cross-entropy of tokens[1:], tokens: (N,) int32, N at least 2."""
    device = gpt.lm_head.weight.device
    windows_per_pass = max(1, TOKENS_PER_PASS // T)
    found = windows(tokens, T, stride)
    total = 0.0
    with tqdm(total=len(tokens) - 1, unit="tok", disable=None, leave=False) as bar:
        while batch := list(itertools.islice(found, windows_per_pass)):
            # The model is causal, so padding at the end changes none of the other predictions.
            inputs = pad_sequence([x for x, _ in batch], batch_first=True)
            targets = pad_sequence([y for _, y in batch], batch_first=True, padding_value=-1)
            count = (targets != -1).sum().item()
            total += gpt(inputs.to(device), targets.to(device)).item() * count
            bar.update(count)
    return total


# ---- Texts --------------------------------------------------------------------------------------
def read_shards(pattern, args, count=None):
    """Return the first `count` tokens of the shards of a glob, by default all, (N,) int32."""
    cpu = torch.device("cpu")
    loader = DistributedDataLoader(pattern, 1, args.sequence_length, 0, 1, cpu, args.vocab_size)
    count = count or loader.total_tokens
    if count > loader.total_tokens:
        raise UserError(
            f"{pattern!r} holds {loader.total_tokens} tokens, fewer than the {count} that the run "
            f"was validated on: restore the shards"
        )
    return torch.from_numpy(loader.read(0, count).astype(np.int32))


def is_shard(name):
    """Tell whether a file begins as a shard does. No text in UTF-8 does."""
    if not Path(name).is_file():
        return False
    with open(name, "rb") as file:
        return file.read(4) == SHARD_BEGINNING


def read_text(name, args, encoding):
    """Return the tokens, (N,) int32, of a shard, a text file or - for standard input."""
    if is_shard(name):
        return read_shards(glob.escape(name), args)
    if name != "-" and not Path(name).is_file():
        raise UserError(f"{name} is not a file: name texts, shards, or - for standard input")
    content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 (at byte {error.start}): give a text") from None
    return torch.tensor([encoding.eot_token, *encoding.encode_ordinary(text)], dtype=torch.int32)


def bytes_of(tokens, encoding, name):
    """Return the number of bytes of text that tokens, (N,) int, stand for."""
    total = 0
    ids, counts = tokens.unique(return_counts=True)
    for token, count in zip(ids.tolist(), counts.tolist()):
        try:
            if token != encoding.eot_token:
                total += count * len(encoding.decode_single_token_bytes(token))
        except (KeyError, ValueError):
            raise UserError(
                f"{name} holds the token {token}, which the encoding {encoding.name} does not "
                f"have: pass the --encoding of its tokens"
            ) from None
    return total


def measure(gpt, texts, encoding, T, stride):
    """Print the table of texts, {name: tokens}, each row as soon as it is known."""
    sizes = {}
    for name, tokens in texts.items():  # all mistakes are found before the first row
        if len(tokens) < 2:
            raise UserError(f"{name} has too few tokens: nothing is left to predict")
        sizes[name] = bytes_of(tokens[1:], encoding, name) if encoding else 0
    print("\n| text | tokens | loss | perplexity | bits per byte |\n|---|---|---|---|---|")
    for name, tokens in texts.items():
        count = len(tokens) - 1
        nats = nats_of(gpt, tokens, T, stride)
        perplexity = torch.tensor(nats / count, dtype=torch.float64).exp()  # inf if it overflows
        bits = f"{nats / math.log(2) / sizes[name]:.4f}" if sizes[name] else "n/a"
        row = [name, f"{count:,}", f"{nats / count:.4f}", f"{perplexity:.5g}", bits]
        print(f"| {' | '.join(row)} |", flush=True)


# ---- The command --------------------------------------------------------------------------------
def own_loss(state, args, tokens):
    """Return a sentence on the run's val_loss, if it is of the same tokens."""
    here = hashlib.sha256(tokens.numpy().astype("<u2")).hexdigest()[:16]
    there = state.get("val_hash")
    if there != here:
        return (
            f"the run was validated on other tokens (val_hash {there}) than {args.val_files!r} "
            f"holds now (val_hash {here}): do not compare the loss above with that of the run"
        )
    if "val_loss" not in state:
        return "the run was validated on the same tokens; a checkpoint does not hold its val_loss"
    own = f"the run's own val_loss:{state['val_loss']:.4f}"
    return f"{own} on the same tokens, computed in {state.get('dtype')}"


def find_encoding(options, args):
    """Return the encoding, or None if it is unavailable and only bits per byte would need it."""
    try:
        return weights.encoding_of(args, options.encoding)
    except ValueError as error:
        if options.encoding or not all(map(is_shard, options.texts)):
            raise
        print(f"evaluate.py: no bits per byte: {error}", file=sys.stderr)
        return None


def main(argv):
    parser = weights.parser_for(__doc__)
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="file, shard, or - for stdin")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument(
        "--stride", type=int, help="tokens from one window to the next (default: sequence_length)"
    )
    options = parser.parse_intermixed_args(argv)  # texts and options in any order
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    path = weights.find(options.weights)
    gpt, args, state = weights.load(path, device)
    T = args.sequence_length
    stride = T if options.stride is None else options.stride
    if not 1 <= stride <= T:
        raise UserError(f"--stride={stride} must be from 1 to the model's sequence_length={T}")
    encoding = find_encoding(options, args)
    texts = {name: read_text(name, args, encoding) for name in options.texts}
    if not options.texts:
        pattern = str(ROOT / args.val_files)
        texts[args.val_files] = read_shards(pattern, args, args.val_tokens + 1)
    print(f"{path}: windows of {T} tokens, stride {stride}; {device}, {gpt.dtype}")
    measure(gpt, texts, encoding, T, stride)
    if not options.texts:
        print(f"\n{own_loss(state, args, texts[args.val_files])}")


if __name__ == "__main__":
    command(main)
