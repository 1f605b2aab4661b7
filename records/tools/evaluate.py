"""Measure a trained model: its loss on texts, its perplexity and its bits per byte.

    bash run.sh evaluate [TEXT ...] [--weights logs/RUN]

A TEXT is a file that data/pack.py can read, such as a text or a shard of tokens. Without one, the
run's own validation tokens are measured, and the loss that the run logged is printed, too.

Each document of a text is preceded by an end-of-text token, as in training. Every token after the
first counts exactly once. As in training, it is predicted from the tokens before it in a window of
sequence_length tokens, and windows do not overlap, so tokens early in a window have little context.

The loss is the mean in nats per token, and the perplexity is its exponential. Bits per byte (the
total loss in bits, divided by the bytes of the text) are also comparable between encodings. An
end-of-text token counts as zero bytes.
"""

import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import weights
from runlog import command, require
from tqdm import tqdm
from weights import pack

import train_gpt2

TOKENS_PER_PASS = 2**13


@torch.no_grad()
def total_nats(gpt, tokens, T):
    """Return the summed cross-entropy of tokens[1:], tokens: (N,) int64, N at least 2."""
    device = next(gpt.parameters()).device
    # The model is causal, so padding at the end does not change the other predictions.
    padding = -(len(tokens) - 1) % T
    inputs = F.pad(tokens[:-1], (0, padding)).view(-1, T)
    targets = F.pad(tokens[1:], (0, padding), value=-1).view(-1, T)
    rows = max(1, TOKENS_PER_PASS // T)
    batches = [*zip(inputs.split(rows), targets.split(rows))]
    total = 0.0
    for x, y in tqdm(batches, disable=None, leave=False):
        total += gpt(x.to(device), y.to(device)).item() * (y != -1).sum().item()
    return total


def read_shards(pattern, args, encoding, count=None):
    """Return the first `count` tokens (default: all) of the shards matching a glob, (N,) int64."""
    found = weights.known_encoding(pattern)
    if found and encoding is None:
        raise ValueError(
            f"{pattern!r} has the encoding {found}, and that of the model is unknown: pass "
            f"--encoding={found} if it is the same"
        )
    if found and found != encoding.name:
        raise ValueError(
            f"{pattern!r} has the encoding {found}, and the model {encoding.name}: give a text, or "
            "shards of the model's encoding"
        )
    n_vocab = encoding.n_vocab if encoding else args.vocab_size
    stream = train_gpt2.TokenStream(pattern, n_vocab)
    return torch.from_numpy(stream.read(0, count or stream.total_tokens).astype(np.int64))


def read_text(name, args, encoding, text_field):
    """Return the tokens, (N,) int64, of a shard or a text file, which is read as data/pack.py does.

    encoding: None if it is unknown, which is an error for a text.
    """
    require(Path(name).is_file(), f"{name} is no file: give a text file or a shard of tokens")
    if np.fromfile(name, "<i4", 1).tolist() == [pack.SHARD_MAGIC]:
        return read_shards(name, args, encoding)
    require(encoding, weights.UNKNOWN_ENCODING)
    documents = pack.read_documents(name, Path(name), text_field)
    tokens = [pack.tokens_of(text, encoding) for _, text in documents]
    # The empty array makes the result int64, and allows a text without documents.
    return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *tokens]))


def bytes_of(tokens, encoding):
    """Return the number of bytes of text that tokens, (N,) int, stand for."""
    ids = tokens[tokens != encoding.eot_token].tolist()
    return sum(len(encoding.decode_single_token_bytes(token)) for token in ids)


def main(argv):
    parser = weights.parser_for(__doc__)
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="text file or shard")
    parser.add_argument(
        "--text_field", default="text", help="field of a line or row (default: text)"
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    options = parser.parse_intermixed_args(argv)  # texts and options in any order
    path = weights.find(options.weights)
    gpt, args, state = weights.load(path, options.device)
    encoding = weights.encoding_of(state, args, options.encoding)
    texts = {name: read_text(name, args, encoding, options.text_field) for name in options.texts}
    if not texts:
        stream = train_gpt2.TokenStream(args.val_files, args.vocab_size)
        is_same = train_gpt2.digest(stream.checksums()) == state["fixed"]["val_data"]
        require(
            is_same,
            f"{args.val_files!r} no longer holds the validation data of the run: give a TEXT",
        )
        texts = {args.val_files: read_shards(args.val_files, args, encoding, args.val_tokens + 1)}
    for name, tokens in texts.items():  # report mistakes before printing a row
        require(len(tokens) > 1, f"{name} has too few tokens: nothing is left to predict")
    print(f"{path}: {next(gpt.parameters()).device.type}, {args.dtype}")
    print("\n| text | tokens | loss | perplexity | bits per byte |\n|---|---|---|---|---|")
    for name, tokens in texts.items():
        count = len(tokens) - 1
        nats = total_nats(gpt, tokens, args.sequence_length)
        loss = nats / count
        perplexity = np.exp(loss)  # inf if it overflows
        size = bytes_of(tokens[1:], encoding) if encoding else 0
        bits = f"{nats / math.log(2) / size:.4f}" if size else "n/a"
        print(f"| {name} | {count:,} | {loss:.4f} | {perplexity:.5g} | {bits} |", flush=True)
    if not options.texts and "optimizers" not in state:  # a checkpoint's loss may be old
        print(f"\nthe run logged val_loss:{state['val_loss']:.4f}")


if __name__ == "__main__":
    command(main)
