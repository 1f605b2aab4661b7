"""Write a trained model as a folder that transformers loads, and put it on the Hugging Face Hub.

    python records/tools/export.py [WEIGHTS] --out DIR [--push USER/NAME]

WEIGHTS is a file (logs/RUN/model.pt or a checkpoint) or a run's folder, logs/RUN, of which the
weights of the most steps are taken. Without it, the newest weights in logs/ are taken.

DIR must be new, empty or an earlier export. It gets the weights in float32, the model's code for
transformers, the tokenizer of the training data, and a model card that is made from the run's log,
logs/RUN.txt. Before DIR appears, transformers loads it, and its logits are compared with those of
train_gpt2.py's GPT. --push needs a token: `hf auth login`, or HF_TOKEN.
"""

import argparse
import itertools
import json
import math
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from runlog import INCIDENTAL, RESUMABLE, packages, read, require

with packages():
    import huggingface_hub
    import torch
    import transformers
    import weights
    from modeling_gpt2_speedrun import GPT2SpeedrunConfig, GPT2SpeedrunForCausalLM
    from report import command, escaped
    from safetensors.torch import save
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT = "<|endoftext|>"
MODELING = "modeling_gpt2_speedrun.py"
FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    MODELING,
    "tokenizer.json",
    "tokenizer_config.json",
}
PRIVATE = {"log_dir", "resume", "run_id"}  # settings that say nothing of the model


# ---- Tokenizer ----------------------------------------------------------------------------------
def byte_letters():
    """Return the printable character that stands for each byte in a tokenizer of byte level."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def ranks_of(encoding):
    """Return {bytes: id} of an encoding's tokens, without the special ones."""
    if encoding.name == "bytes":
        return {bytes([byte]): byte for byte in range(256)}
    return {token: encoding.encode_single_token(token) for token in encoding.token_byte_values()}


def last_merge(token, ranks):
    """Return the two tokens, as bytes, that byte pair encoding joins last to make this one."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, math.inf) for a, b in itertools.pairwise(parts)]
        first = pairs.index(min(pairs))
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return parts


def tokenizer_of(encoding):
    """Return the encoding as a Tokenizer of the package tokenizers, which gives the same ids."""
    letters, ranks = byte_letters(), ranks_of(encoding)

    def spelled(token):
        return "".join(letters[byte] for byte in token)

    longer = sorted((token for token in ranks if len(token) > 1), key=ranks.get)
    merges = [tuple(map(spelled, last_merge(token, ranks))) for token in longer]
    vocab = {spelled(token): rank for token, rank in ranks.items()}
    # the end of text is a token of the vocabulary, too: ids of added ones follow the vocabulary's
    vocab[END_OF_TEXT] = encoding.eot_token
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    by_words = encoding.name != "bytes"  # with GPT-2's pattern, which r50k_base and p50k_base have
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_words)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return tokenizer


# ---- Model card ---------------------------------------------------------------------------------
def log_of(path, state):
    """Return the Run of the log beside the folder of these weights, None if there is none.
    Raises ValueError if it is of another run, or none."""
    folder = path.resolve().parent
    log = folder.parent / f"{folder.name}.txt"
    if not log.is_file():
        return None
    fix = "move it away to export without it"
    try:
        run, saved = read(log), state["hyperparameters"]
    except ValueError as error:
        raise ValueError(f"{error}; {fix}") from None
    names = run.settings.keys() - INCIDENTAL - RESUMABLE - {"num_iterations"}
    others = sorted(name for name in names if run.settings[name] != saved.get(name))
    require(not others, f"{log} is of another run than {path} ({', '.join(others)} differ): {fix}")
    loss = losses_of(run).get(step_of(state))
    known = state.get("val_loss")
    same = known is None or (loss is not None and f"{known:.4f}" == f"{loss:.4f}")
    require(same, f"{log} does not hold the validation loss of {path}, {known}: {fix}")
    return run


def step_of(state):
    """Return the steps after which these weights were written; model.pt: all of the run's."""
    return state.get("step", state["hyperparameters"]["num_iterations"])


def losses_of(run):
    """Return {step: validation loss} of a Run."""
    return {step: loss for step, loss, _ in run.points["val"]}


def code(text):
    """Return text as Markdown code, or escaped if it holds what ends such code or begins HTML."""
    if re.fullmatch("[^`<>&\\n]+", text):
        return f"`{text}`"
    return re.sub(r"([*_\[\]#])", r"\\\1", escaped(text))


def literal(value):
    """Return the Python literal of a value, without characters that could begin HTML."""
    return repr(value).replace("<", r"\x3c").replace(">", r"\x3e")


def training_lines(state, run):
    """Return the sentences of the model card on how these weights came to be."""
    settings, step = state["hyperparameters"], step_of(state)
    tokens = step * settings["batch_size"] * settings["sequence_length"]
    loss = losses_of(run).get(step) if run else state.get("val_loss")
    yield f"Steps: {step:,} of {settings['num_iterations']:,} planned."
    files = code(settings["train_files"])
    seen = f"Training data: {files}; the model has seen {tokens:,} tokens of it"
    if run and (all_tokens := run.number("train_tokens")):
        seen += f", which holds {all_tokens:,.0f} ({tokens / all_tokens:.2f} epochs)"
    yield f"{seen}."
    where = f"{settings['val_tokens']:,} tokens of {code(settings['val_files'])}"
    if loss is not None:
        yield f"Validation loss: {loss:.4f} nats a token, on the first {where}."
    elif run:
        yield "Validation loss: not known, as the run did not validate after this step."
    if run is None:
        yield (
            "The log of the run was not beside the weights, so hardware, time, version of torch "
            "and commit are not known here."
        )
        return
    names = "device", "torch", "commit", "products", "processes"
    facts = {name: escaped(run.facts.get(name, "not recorded")) for name in names}
    yield f"Hardware: {facts['device']}; processes: {facts['processes']}."
    if times := [ms for at, _, ms in run.points["val"] if at == step]:
        yield f"Training time: {times[-1] / 1000:,.1f} s, without compilation and validation."
    yield "torch: {torch}; products in training: {products}; commit: {commit}.".format(**facts)
    if run.fault:
        yield f"The run has no result, by its log: {run.fault}."


def piece_lines(settings):
    """Return the items of the model card on the pieces that not every model has."""
    longest, shift = settings.get("max_ngram", 0), settings.get("key_shift", 0)
    lines = []
    if longest > 1:
        sizes = "2 tokens" if longest == 2 else f"2 to {longest} tokens"
        lines.append(
            f"A table of {settings['ngram_rows']:,} rows adds to the embedding of each token one "
            f"row for each\n  n-gram of {sizes} that ends there, by its hash. The parameters "
            f"count it."
        )
    if shift:
        places = "1 position" if shift == 1 else f"{shift} positions"
        lines.append(f"The key of each position is that of {places} before; the first are zeros.")
    if lines:
        lines.append(
            "So it keeps no cache of keys and values: each new token takes a pass over all tokens."
        )
    if softcap := settings.get("logit_softcap"):
        lines.append(f"Logits z are capped: {softcap:g} tanh(z / {softcap:g}).")
    return lines


def card_of(name, state, run, encoding, parameters):
    """Return the model card, README.md; name: of the model on the Hub, or of its folder."""
    settings = state["hyperparameters"]
    training = "\n".join(f"- {line}" for line in training_lines(state, run))
    shown = "\n".join(f"{k}={literal(v)}" for k, v in settings.items() if k not in PRIVATE)
    sources = "the weights and the log of the run" if run else "the weights alone"
    sizes = "{n_layer} layers, {n_head} attention heads, {n_embd} channels".format(**settings)
    pieces = "".join(f"- {line}\n" for line in piece_lines(settings))
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- gpt2-speedrun
- custom_code
---

# {escaped(name.rpartition("/")[2])}

A language model of {parameters:,} parameters, trained from scratch by `train_gpt2.py`, a
single-file GPT-2 speedrun. A program has made this card, from {sources}.

## Training

{training}

## How to load it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

name = {json.dumps(name)}  # or the path of this folder
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
inputs = tokenizer(tokenizer.bos_token + "The", return_tensors="pt")
outputs = model.generate(**inputs, max_new_tokens=20, do_sample=True, top_k=40)
print(tokenizer.decode(outputs[0], skip_special_tokens=True))
```

`trust_remote_code=True` runs `{MODELING}` from this folder: read it first.

## The model

- Size: {sizes}; at most {settings["sequence_length"]:,} tokens.
- Unlike OpenAI's GPT-2 it has rotary positions, RMSNorm without gain, normalised queries and keys,
  ReLU^2 and no biases; as in GPT-2 the embedding is also the head. The weights are float32.
{pieces}- The encoding is `{encoding.name}`, with {encoding.n_vocab:,} ids; `{END_OF_TEXT}`, id
  {encoding.eot_token}, leads each document.
- It was trained to predict the next token, and for nothing else.

## Settings

```
{shown}
```
"""


# ---- The folder ---------------------------------------------------------------------------------
def check_out(out):
    """Raise ValueError unless `out` is new, empty, or an export, which may be replaced."""
    require(out.is_dir() or not os.path.lexists(out), f"{out} is no folder: give a new one")
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    fix = "give a new or an empty folder"
    foreign = sorted(names - FILES)
    require(not foreign, f"{out} holds {foreign[:3]}, which no export has: {fix}")
    if names:
        config = out / "config.json"
        ours = config.is_file() and '"gpt2_speedrun"' in config.read_text(errors="replace")
        require(ours, f"{out} holds {sorted(names)[:3]}, but not of an export: {fix}")


def write_json(path, content):
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_model(folder, gpt, args, encoding):
    """Write weights, configuration and code; return the number of parameters."""
    tensors = {name: p.detach().float().contiguous() for name, p in gpt.named_parameters()}
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    shutil.copyfile(Path(__file__).with_name(MODELING), folder / MODELING)
    module = Path(MODELING).stem
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), encoding.eot_token)
    shape = "vocab_size", "n_layer", "n_head", "n_embd", "sequence_length"
    pieces = "max_ngram", "ngram_rows", "key_shift", "logit_softcap"
    config = {
        "model_type": "gpt2_speedrun",
        "architectures": ["GPT2SpeedrunForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{module}.GPT2SpeedrunConfig",
            "AutoModelForCausalLM": f"{module}.GPT2SpeedrunForCausalLM",
        },
        **{name: getattr(args, name) for name in shape + pieces},
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    write_json(folder / "config.json", config | tokens)
    # ids above the encoding's are padding of the vocabulary, which no text has
    generation = {"suppress_tokens": [*range(encoding.n_vocab, args.vocab_size)] or None}
    if not GPT2SpeedrunConfig(**{name: getattr(args, name) for name in pieces}).can_cache:
        generation["use_cache"] = False
    write_json(folder / "generation_config.json", tokens | generation)
    return sum(tensor.numel() for tensor in tensors.values())


def write_tokenizer(folder, args, encoding):
    tokenizer_of(encoding).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": args.sequence_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "left",  # generation goes on at the right
        "clean_up_tokenization_spaces": False,
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT),
    }
    write_json(folder / "tokenizer_config.json", config)


@torch.no_grad()
def check(folder, gpt, args, encoding):
    """Return the largest difference of the logits from GPT's, with transformers' loading.
    Raises ValueError if it is more than rounding, or if a text gets other ids."""
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    text = f"{__doc__} naïve 12.5 € \t\n  日本語 🙂 can't  "
    same = tokenizer.encode(text, verbose=False) == encoding.encode_ordinary(text)
    require(same, f"the tokenizer of the export gives other ids than {encoding.name}'s own")
    model = GPT2SpeedrunForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    shape = 2, min(args.sequence_length, 128)
    inputs = torch.randint(args.vocab_size, shape, generator=generator)
    known = tokenizer.encode(text, verbose=False)[: shape[1]]
    inputs[1, : len(known)] = torch.tensor(known)  # n-grams of a text, too
    expected = gpt(inputs)
    difference = (model(inputs).logits - expected).abs().max().item()
    require(
        difference <= 1e-5 * max(1, expected.abs().max().item()),  # nan is not
        f"the logits of {MODELING} differ from those of train_gpt2.py's GPT by {difference:.2g}: "
        f"change it as that was changed, or train a run that does not diverge",
    )
    return difference


def publish(made, out):
    """Move the folder `made` to `out`; an earlier export there is moved beside `made`."""
    if out.exists() and any(out.iterdir()):
        os.rename(out, made.with_name("earlier"))
    os.rename(made, out)


def export(path, out, encoding_name="", name=""):
    """Write the weights of a file as the folder `out`, all of it or nothing; return a report.
    name: of the model in the card; empty: the folder's. Raises ValueError for what cannot be."""
    check_out(out)
    gpt, args, state = weights.load(path, dtype=torch.float32)
    encoding = weights.encoding_of(args, encoding_name)
    require(
        encoding.n_vocab <= args.vocab_size,
        f"vocab_size={args.vocab_size} of {path} is less than the {encoding.n_vocab} ids of "
        f"{encoding.name}: give the --encoding of its data",
    )
    run = log_of(path, state)
    parent = next(folder for folder in out.parents if folder.is_dir())
    names = dict(prefix=f"{out.name}.", suffix=".partial")
    with tempfile.TemporaryDirectory(dir=parent, **names) as folder:
        made = Path(folder, "export")
        made.mkdir()
        parameters = write_model(made, gpt, args, encoding)
        write_tokenizer(made, args, encoding)
        card = card_of(name or out.name, state, run, encoding, parameters)
        (made / "README.md").write_text(card, encoding="utf-8")
        difference = check(made, gpt, args, encoding)
        out.parent.mkdir(parents=True, exist_ok=True)
        publish(made, out)
    log = "its log" if run else "no log beside it"
    return (
        f"{path}: {parameters:,} parameters after step {step_of(state)}, {log}\n"
        f"{out}: transformers loads it; its logits differ from GPT's by at most {difference:.1g}"
    )


def check_push(name):
    """Raise ValueError unless this can be a model's name on the Hub, and there is a token."""
    require(name.count("/") == 1, f"--push={name} must be USER/NAME")
    huggingface_hub.utils.validate_repo_id(name)
    token = huggingface_hub.get_token()
    require(token, "--push needs a token of the Hub: `hf auth login`, or set HF_TOKEN")


def push(folder, name):
    """Upload the folder to the Hub as the model USER/NAME; return its address.
    Raises ValueError with the reason if that fails."""
    try:
        api = huggingface_hub.HfApi()
        url = api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Model of train_gpt2.py")
    except Exception as error:  # of the client, the network or the storage: many classes
        if type(error) is RuntimeError:  # which only says that an upload failed
            error = error.__cause__ or error
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder} is written, but not pushed to {name}: {reason}") from None
    return url


def parse_args(argv):
    def refuse(message):
        raise ValueError(f"{message}; see --help")

    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.error = refuse
    parser.add_argument("weights", nargs="?", default="", metavar="WEIGHTS")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--push", default="", metavar="USER/NAME", help="upload it to the Hub, too")
    parser.add_argument("--encoding", default="", help="of the data; empty: what its manifest says")
    parser.add_argument("--log_dir", default="logs", help="where the newest weights are looked for")
    return parser.parse_args(argv)


def main(argv):
    options = parse_args(argv)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    huggingface_hub.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        huggingface_hub.utils.disable_progress_bars()
    if options.push:
        check_push(options.push)
    path = weights.find(options.weights, options.log_dir)
    out = options.out.resolve()
    print(export(path, out, options.encoding, options.push))
    if options.push:
        print(f"pushed: {push(out, options.push)}")
    return 0


if __name__ == "__main__":
    command(main)
