"""Generate text: `bash run.sh sample [PROMPT] [--weights=logs/RUN] [--top_k=40 ...]`.

The text is printed as it is generated. Without --weights, the newest weights are used. Each token
takes a whole forward pass of the script's own model, without a key-value cache, so an edited model
needs no other code for sampling. The model sees the last sequence_length tokens. Every prompt
begins a new document, and an end-of-text token ends the text.
"""

import codecs
import math
import sys

import torch
import weights
from runlog import command, require


def pick(logits, temperature, top_k, generator):
    """Return a random token id, distributed according to logits (V,), float32.

    temperature: 0 takes the most likely token, and more than 1 flattens the distribution.
    top_k: choose among this many of the most likely tokens; 0 allows all.
    """
    if temperature == 0:
        return logits.argmax().item()
    if top_k:
        lowest = logits.topk(min(top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    probabilities = (logits.double() / temperature).softmax(-1)
    return torch.multinomial(probabilities, 1, generator=generator).item()


@torch.no_grad()
def generate(gpt, tokens, count, choose, T, n_vocab):
    """Yield `count` ids that follow tokens, a list. choose(logits (n_vocab,)) returns an id."""
    tokens = list(tokens)
    device = next(gpt.parameters()).device
    for _ in range(count):
        inputs = torch.tensor([tokens[-T:]], device=device)
        logits = gpt(inputs)[0, -1, :n_vocab]  # the rest of the vocabulary is padding
        tokens.append(choose(logits.cpu()))
        yield tokens[-1]


def write(ids, encoding):
    """Print ids as text while they are generated, until end-of-text."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a token may be part of a character
    for token in ids:
        if token == encoding.eot_token:
            break
        text = decoder.decode(encoding.decode_single_token_bytes(token))
        print(text, end="", flush=True)
    print(decoder.decode(b"", final=True), flush=True)


def main(argv):
    parser = weights.parser_for(__doc__)
    add = parser.add_argument
    add("prompt", nargs="?", default="", help="what the text begins with; -: standard input")
    add("--tokens", type=int, default=300, help="length limit of the text (default: 300)")
    add("--temperature", type=float, default=0.8, help="0: the most likely token (default: 0.8)")
    add("--top_k", type=int, default=40, help="candidates for each token; 0: all (default: 40)")
    add("--seed", type=int, default=0, help="the same seed gives the same text (default: 0)")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="default: cpu")
    options = parser.parse_args(argv)
    require(0 <= options.temperature < math.inf, "--temperature must be 0 or more")
    require(options.top_k >= 0, "--top_k must be 0 or more")
    require(options.tokens >= 0, "--tokens must be 0 or more")
    if options.prompt == "-":
        options.prompt = sys.stdin.read()
    path = weights.find(options.weights)
    gpt, args, state = weights.load(path, options.device, torch.float32)
    if args.n_embd < 512:
        # In short forward passes, threads spend more time waiting than working.
        torch.set_num_threads(1)
    encoding = weights.encoding_of(state, args, options.encoding)
    require(encoding, weights.UNKNOWN_ENCODING)
    prompt = [encoding.eot_token, *encoding.encode_ordinary(options.prompt)]
    generator = torch.Generator().manual_seed(options.seed)

    def choose(logits):
        return pick(logits, options.temperature, options.top_k, generator)

    print(f"{path}, seed {options.seed}", file=sys.stderr)
    print(options.prompt, end="", flush=True)
    T = args.sequence_length
    write(generate(gpt, prompt, options.tokens, choose, T, encoding.n_vocab), encoding)


if __name__ == "__main__":
    command(main)
