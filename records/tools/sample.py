"""Generate text: `bash run.sh sample [PROMPT] [--weights=logs/RUN] [--top_k=40 ...]`.

The text is printed as it is generated. Without --weights, the newest weights are used. Each token
takes a whole forward pass of train_gpt2.py's own model, without a key-value cache, so that an
edited model samples exactly as it was trained. The model sees the last sequence_length tokens. An
empty prompt begins a new document, and an end-of-text token ends a sample.
"""

import argparse
import codecs
import sys
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
from runlog import packages

with packages():
    import torch
    import weights

    import train_gpt2
    from train_gpt2 import UserError


def of_last_position(compute_logits):
    """Return compute_logits for the last position alone, which is all that sampling needs."""
    return lambda x, *others: compute_logits(x[:, -1:], *others)


def pick(logits, temperature, top_k, generator):
    """Return a token id from logits (V,), float32: among the top_k most likely, 0: among all.
    temperature: 0 takes the most likely one; above 1 flattens the distribution."""
    if temperature == 0:
        return logits.argmax().item()
    if top_k:
        least = logits.topk(min(top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = (logits / temperature).softmax(-1)
    return torch.multinomial(probabilities, 1, generator=generator).item()


@torch.no_grad()
def generate(gpt, tokens, count, choose, T, n_vocab):
    """Yield up to `count` ids that follow tokens, a list: each by choose(logits (n_vocab,))."""
    tokens = list(tokens)
    device = gpt.lm_head.weight.device
    of_last = of_last_position(train_gpt2.compute_logits)
    with mock.patch.object(train_gpt2, "compute_logits", of_last):
        for _ in range(count):
            inputs = torch.tensor([tokens[-T:]], device=device)
            logits = gpt(inputs)[0, -1, :n_vocab]  # the rest of the vocabulary is padding
            tokens.append(choose(logits.cpu()))
            yield tokens[-1]


def write(ids, encoding, output):
    """Print ids as text, as they come, until end-of-text; return how many there were."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a character may be cut
    count = 0
    for token in ids:
        count += 1
        if token == encoding.eot_token:
            break
        text = decoder.decode(encoding.decode_single_token_bytes(token))
        print(text, end="", file=output, flush=True)
    print(decoder.decode(b"", final=True), file=output, flush=True)
    return count


def parse_args(argv):
    parser = argparse.ArgumentParser(
        prog="sample.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("prompt", nargs="?", default="", help="what the text begins with")
    add("--weights", default="", help=weights.HELP)
    add("--log_dir", default="logs", help="where the newest is looked for")
    add("--tokens", type=int, default=300, help="at most, of each sample (default: 300)")
    add("--number", type=int, default=1, help="of samples (default: 1)")
    add("--temperature", type=float, default=0.8, help="0: the most likely one (default: 0.8)")
    add("--top_k", type=int, default=40, help="choose among so many; 0: all (default: 40)")
    add("--seed", type=int, default=0, help="the same seed gives the same samples (default: 0)")
    add("--encoding", default="", help="of the text; empty: that of the training data")
    add("--device", default="cpu", help="cpu or cuda (default: cpu)")
    args = parser.parse_args(argv)
    for name, least in dict(tokens=1, number=1, temperature=0, top_k=0, seed=0).items():
        value = getattr(args, name)
        if not least <= value < 2**31:
            raise UserError(f"--{name}={value} must be a number from {least} to 2**31 - 1")
    return args


def main(argv, output=sys.stdout):
    args = parse_args(argv)
    path = weights.find(args.weights, args.log_dir)
    gpt, settings, _ = weights.load(path, args.device, torch.float32)
    encoding = weights.encoding_of(settings, args.encoding)
    if encoding.n_vocab > settings.vocab_size:
        raise UserError(f"the encoding {encoding.name} does not fit {path}: give its --encoding")
    prompt = [encoding.eot_token, *encoding.encode_ordinary(args.prompt)]
    generator = torch.Generator().manual_seed(args.seed)

    def choose(logits):
        return pick(logits, args.temperature, args.top_k, generator)

    print(f"{path}, seed {args.seed}", file=sys.stderr)
    start = time.perf_counter()
    count = 0
    for i in range(args.number):
        if args.number > 1:
            print(f"--- sample {i + 1} of {args.number}", file=output)
        print(args.prompt, end="", file=output, flush=True)
        T = settings.sequence_length
        ids = generate(gpt, prompt, args.tokens, choose, T, encoding.n_vocab)
        count += write(ids, encoding, output)
    ms = 1000 * (time.perf_counter() - start) / count
    print(f"{count} tokens, {ms:.1f} ms each", file=sys.stderr)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"sample.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
