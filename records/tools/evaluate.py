"""Measure a trained model: its loss on texts, its perplexity and its bits per byte.

    bash run.sh evaluate [TEXT ...] [--weights logs/RUN] [--stride N]

A TEXT is a shard of tokens, a file or folder that data/pack.py reads, or - for standard input.
Without one, the run's own validation tokens are measured, and the loss that the run logged is
printed, too.

A document is preceded by an end-of-text token, as in training. Every token after the first counts
exactly once. It is predicted from the tokens before it in a window of sequence_length
tokens. By default windows do not overlap, as in training, so tokens early in a window have little
context. With --stride N, a window begins every N tokens, and tokens that the previous window also
covers count only there. The others have at least sequence_length - N + 1 tokens of context.

The loss is the mean in nats per token, and the perplexity is its exponential. Bits per byte, the
total in bits divided by the bytes of the text, are also comparable between encodings. An
end-of-text token has no bytes.
"""

import glob
import math
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import weights
from runlog import command
from tqdm import tqdm
from weights import pack

import train_gpt2
from train_gpt2 import TokenStream, UserError

TOKENS_PER_PASS = 2**13


# ---- Loss ---------------------------------------------------------------------------------------
@torch.no_grad()
def total_nats(gpt, tokens, T, stride):
    """Return the summed cross-entropy of tokens[1:], tokens: (N,) int32, N at least 2."""
    device = gpt.lm_head.weight.device
    count = len(tokens) - 1
    windows = 1 + math.ceil(max(0, count - T) / stride)
    padding = (windows - 1) * stride + T - count
    # The model is causal, so padding at the end does not change the other predictions.
    inputs = F.pad(tokens[:-1], (0, padding)).unfold(0, T, stride)  # (windows, T)
    targets = F.pad(tokens[1:], (0, padding), value=-1).unfold(0, T, stride)
    batch_size = max(1, TOKENS_PER_PASS // T)
    total = 0.0
    for first in tqdm(range(0, windows, batch_size), disable=None, leave=False):
        batch = slice(first, first + batch_size)
        batch_targets = targets[batch].long()  # a copy
        later_windows = batch_targets[1:] if first == 0 else batch_targets
        later_windows[:, : T - stride] = -1  # counted in the window before
        loss = gpt(inputs[batch].long().to(device), batch_targets.to(device))
        total += loss.item() * (batch_targets != -1).sum().item()
    return total


# ---- Texts --------------------------------------------------------------------------------------
def read_shards(pattern, args, encoding, count=None):
    """Return the first `count` tokens (default: all) of the shards matching a glob, (N,) int32."""
    found = train_gpt2.read_manifest(pattern).get("encoding", encoding.name)
    if found != encoding.name:
        raise UserError(
            f"{pattern!r} has the encoding {found}, and the model {encoding.name}: give a text, or "
            "shards of that encoding"
        )
    stream = TokenStream(pattern, args.vocab_size)
    return torch.from_numpy(stream.read(0, count or stream.total_tokens).astype(np.int32))


def read_text(name, args, encoding, options):
    """Return the tokens, (N,) int32, of a shard, what pack.py reads, or - for standard input."""
    if Path(name).is_file() and np.fromfile(name, "<i4", 1).tolist() == [pack.SHARD_MAGIC]:
        folder, file = os.path.split(name)
        return read_shards(os.path.join(folder, glob.escape(file)), args, encoding)
    tokens = [
        pack.tokens_of(text, encoding).astype(np.int32)
        for file in pack.list_files([name])
        for _, text in pack.read_documents(*file, options.text_field or "text", options.split_at)
    ]
    return torch.from_numpy(np.concatenate(tokens or [[]]))


def bytes_of(tokens, encoding):
    """Return the number of bytes of text that tokens, (N,) int, stand for."""
    tokens = tokens[tokens != encoding.eot_token]
    ids, counts = tokens.unique(return_counts=True)
    sizes = [len(encoding.decode_single_token_bytes(token)) for token in ids.tolist()]
    return sum(size * count for size, count in zip(sizes, counts.tolist()))


def measure(gpt, texts, encoding, T, stride):
    """Print the table of texts, {name: tokens}, each row as soon as it is known."""
    for name, tokens in texts.items():  # all mistakes are found before the first row
        if len(tokens) < 2:
            raise UserError(f"{name} has too few tokens: nothing is left to predict")
    print("\n| text | tokens | loss | perplexity | bits per byte |\n|---|---|---|---|---|")
    for name, tokens in texts.items():
        count = len(tokens) - 1
        loss = total_nats(gpt, tokens, T, stride) / count
        perplexity = torch.tensor(loss, dtype=torch.float64).exp()  # inf if it overflows
        size = bytes_of(tokens[1:], encoding)
        bits = f"{loss * count / math.log(2) / size:.4f}" if size else "n/a"
        print(f"| {name} | {count:,} | {loss:.4f} | {perplexity:.5g} | {bits} |", flush=True)


# ---- The command --------------------------------------------------------------------------------
def check_validation_data(state, args):
    """Raise UserError unless val_files holds the data that a run was validated on."""
    checksums = TokenStream(args.val_files, args.vocab_size).checksums()
    if train_gpt2.digest(checksums) != state["facts"]["val_data"]:
        raise UserError(
            f"{args.val_files!r} differs from the data that the run was validated on: restore the "
            "shards, or name a text"
        )


def main(argv):
    parser = weights.parser_for(__doc__)
    add = parser.add_argument
    add("texts", nargs="*", metavar="TEXT", help="file, shard, or - for standard input")
    add("--device", default="auto", choices=("auto", "cuda", "cpu"), help="default: auto")
    add("--text_field", help="as for data/pack.py")
    add("--split_at", help="as for data/pack.py")
    add("--stride", type=int, help="tokens from one window to the next (default: sequence_length)")
    options = parser.parse_intermixed_args(argv)  # texts and options in any order
    path = weights.find(options.weights)
    gpt, args, state = weights.load(path, options.device)
    T = args.sequence_length
    stride = T if options.stride is None else options.stride
    if not 1 <= stride <= T:
        raise UserError(f"--stride={stride} must be from 1 to the model's sequence_length={T}")
    encoding = weights.encoding_of(state, args, options.encoding)
    given = [name for name in ("text_field", "split_at") if getattr(options, name) is not None]
    if given and not options.texts:
        raise UserError(f"--{given[0]} has no effect without a TEXT: name one, or leave it out")
    texts = {name: read_text(name, args, encoding, options) for name in options.texts}
    if not texts:
        check_validation_data(state, args)
        texts = {args.val_files: read_shards(args.val_files, args, encoding, args.val_tokens + 1)}
    device = gpt.lm_head.weight.device.type
    print(f"{path}: windows of {T} tokens, stride {stride}; {device}, {gpt.dtype}")
    measure(gpt, texts, encoding, T, stride)
    if not options.texts and "optimizers" not in state:  # a checkpoint's val_loss may be older
        print(f"\nthe run logged val_loss:{state['val_loss']:.4f}")


if __name__ == "__main__":
    command(main)
