"""Export a trained model as a folder that Hugging Face transformers loads.

    bash run.sh export --out DIR [--weights logs/RUN]

DIR must be new or empty. It gets the weights in float32, the script that trained them, the code
that adapts its model to transformers, a model card and, if the encoding of the training data is
known, its tokenizer. First, transformers loads the export in a temporary folder in DIR: its logits
must be those of the weights, and its token ids those of the encoding.
To publish DIR, run `hf auth login` and `hf upload USER/NAME DIR`.
"""

import ast
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

from runlog import ROOT, command, packages, require

with packages():
    import torch
    import transformers
    import weights
    from safetensors.torch import save_file
    from transformers.convert_slow_tokenizer import TikTokenConverter

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|padding|>"
PADDING_BYTE = b"\xff"  # occurs in no text in UTF-8, so its token is free for PADDING
MODELING = "modeling_gpt2_speedrun"  # the module that adapts the model to transformers


# ---- Tokenizer and model ------------------------------------------------------------------------
class PreTrainedTokenizerFast(transformers.PreTrainedTokenizerFast):
    """A tokenizer that is saved under this class name, which transformers 4 and 5 both know.

    Version 5's own name, TokenizersBackend, is unknown to version 4.
    """


def tokenizer_of(encoding, sequence_length):
    """Return a transformers tokenizer that gives the same ids as the tiktoken encoding."""
    # The vocabulary lists the special tokens, which would otherwise get other ids: the last.
    vocabulary = {**encoding._mergeable_ranks, END_OF_TEXT.encode(): encoding.eot_token}
    vocabulary[PADDING.encode()] = vocabulary.pop(PADDING_BYTE)
    special = [END_OF_TEXT, PADDING]
    converter = TikTokenConverter(pattern=encoding._pat_str, extra_special_tokens=special)
    with patch("tiktoken.load.load_tiktoken_bpe", lambda file: vocabulary):  # reads no file
        tokenizer = converter.converted()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,  # trainers do not train on padding, but a model must learn to end
        padding_side="left",  # generation continues on the right
        model_max_length=sequence_length,
        model_input_names=["input_ids", "attention_mask"],
    )


def settings_of(args):
    """Return a dict of the settings, without init and those that a resumed run may change."""
    hidden = {*weights.train_gpt2.changeable_names(args), "init"}
    return {name: value for name, value in vars(args).items() if name not in hidden}


def as_module(text, modules):
    """Return the text of a script as a module of a package with these modules.

    Imports between them become relative, and statements that extend sys.path are left out.
    """
    left_out = set()  # numbers of lines
    for node in ast.parse(text).body:
        if ast.get_source_segment(text, node).startswith("sys.path"):
            left_out.update(range(node.lineno, node.end_lineno + 1))
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        if number in left_out:
            continue
        words = line.split()
        if len(words) > 1 and words[0] == "import" and words[1] in modules:
            line = line.replace("import ", "from . import ", 1)
        if len(words) > 2 and words[0] == "from" and words[1] in modules and words[2] == "import":
            line = line.replace("from ", "from .", 1)
        lines.append(line)
    return "\n".join(lines) + "\n"


def write_code(folder, recipe):
    """Write the files of a recipe as the modules of a package, and the one that adapts its model.

    Imports between the modules become relative. Otherwise, two exports that are loaded together
    would share a module, and transformers would take an absolute import for a missing package.
    """
    modules = [Path(file).stem for file in recipe.sources]
    for file, text in recipe.sources.items():
        (folder / file).write_text(as_module(text, modules), encoding="utf-8")
        for name in transformers.dynamic_module_utils.get_imports(folder / file):
            places = [ROOT, ROOT / "data", (ROOT / recipe.script).parent]
            require(
                not any((place / f"{name}.py").exists() for place in places),
                f"{file} imports {name}, which the export lacks: add it to the `sources` of its "
                "Recipe, and import it in a statement of its own",
            )
    adapter = Path(__file__).with_name(f"{MODELING}.py").read_text(encoding="utf-8")
    # transformers copies only modules that this one imports.
    imports = [f"from .{name} import __file__ as _" for name in modules]
    imports += ["from .train_gpt2 import changeable_names", f"from .{modules[-1]} import RECIPE"]
    replaced = "from .train_gpt2 import RECIPE, changeable_names"
    adapter = adapter.replace(replaced, "\n".join(imports))
    (folder / f"{MODELING}.py").write_text(adapter, encoding="utf-8")


def write_model(folder, gpt, args, encoding, recipe):
    """Write the code, the settings and the float32 weights of the model of a recipe."""
    write_code(folder, recipe)
    generation = dict(use_cache=False)
    unused = None
    if encoding:
        end, pad_token = encoding.eot_token, encoding.encode_single_token(PADDING_BYTE)
        generation |= dict(bos_token_id=end, eos_token_id=end, pad_token_id=pad_token)
        unused = [pad_token, *range(encoding.n_vocab, args.vocab_size)]  # ids that occur in no text
    generation_config = transformers.GenerationConfig(**generation, suppress_tokens=unused)
    generation_config.save_pretrained(folder)
    config = dict(
        model_type="gpt2_speedrun",
        architectures=["GPT2SpeedrunForCausalLM"],
        auto_map=dict(
            AutoConfig=f"{MODELING}.GPT2SpeedrunConfig",
            AutoModelForCausalLM=f"{MODELING}.GPT2SpeedrunForCausalLM",
        ),
        dtype="float32",
        # TRL computes the logits itself, so it must know the soft cap of train_modern.py.
        final_logit_softcapping=getattr(sys.modules[type(gpt).__module__], "LOGIT_SOFTCAP", None),
        tie_word_embeddings=gpt.lm_head.weight is gpt.wte.weight,
    )
    config = settings_of(args) | config | generation
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    tensors = {f"gpt.{name}": tensor for name, tensor in gpt.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # safetensors makes a file that only its owner can read.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")


def card_of(name, args, state, encoding, parameters):
    """Return the model card, README.md."""
    tokens = state["step"] * args.batch_size * args.sequence_length
    training = f"{state['step']:,} of {args.num_iterations:,} planned steps, {tokens:,} tokens"
    # A checkpoint may be newer than its val_loss.
    loss = "unknown" if "optimizers" in state else f"{state['val_loss']:.4f} nats per token"
    script = Path(state["script"]).name
    tokenizer = "unknown. This folder has no tokenizer: use that of the training data."
    if encoding:
        tokenizer = f"""`{encoding.name}`, with {encoding.n_vocab:,} ids. Each document begins with
  `{END_OF_TEXT}`."""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- gpt2-speedrun
- custom_code
---

# {name}

A language model with {parameters:,} parameters, trained by `{script}`.

- Training: {training}.
- Validation loss: {loss}.
- Encoding: {tokenizer}
- `{script}` in this folder defines the model, and `{MODELING}.py` adapts it to transformers.
- There is no cache of keys and values: each generated token costs a pass over the whole text.
- Works with transformers 4.57.1 to {transformers.__version__}; refuses older versions.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

name = {json.dumps(name)}  # the path of this folder, or USER/NAME on the Hub
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
inputs = tokenizer(tokenizer.bos_token + "The", return_tensors="pt")
outputs = model.generate(**inputs, max_new_tokens=20, do_sample=True, top_k=40)
print(tokenizer.decode(outputs[0], skip_special_tokens=True))
```

`trust_remote_code=True` runs the Python files in this folder: read them first. Trainers that load
a second model need it, too, such as TRL's `DPOConfig(trust_remote_code=True)`.

Several texts may be padded or packed into a row, with `position_ids` that restart at 0. They are
computed one after another, unless padding is on the right. To generate beyond sequence_length, the
model sees the last tokens of a text only. If `tie_word_embeddings` is true in config.json, `wte` is
also the output head, `lm_head`, and peft cannot merge a LoRA of either.

The settings of the run:

```json
{json.dumps(settings_of(args), indent=2)}
```
"""


# ---- Folder -------------------------------------------------------------------------------------
@torch.no_grad()
def check(folder, gpt, args, encoding, script):
    """Return the largest difference between the logits of the export and those of gpt.

    Raises ValueError if it exceeds rounding errors, or if the ids of a text differ.
    """
    ids = [*range(args.vocab_size)]
    if encoding:
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        text = f"{__doc__} naïve 12.5 € \t\n  日本語 🙂 can't  "
        ids = [tokenizer.eos_token_id, *tokenizer.encode(text, verbose=False)]
        equal = ids == [encoding.eot_token, *encoding.encode_ordinary(text)]
        require(equal, f"the exported tokenizer gives different ids from {encoding.name}")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    inputs = torch.tensor([ids[: args.sequence_length]])
    expected = gpt(inputs)
    difference = (model(inputs).logits - expected).abs().max().item()
    require(
        difference <= 1e-5 * max(1, expected.abs().max().item()),
        f"the exported logits differ from those of {script} by {difference:.2g}: a setting "
        "that changes the model must be declared with setting(), not changeable()",
    )
    return difference


def export(path, out, encoding_name=""):
    """Write the weights of a file as the folder `out`, or nothing. Return a one-line report."""
    is_new = not os.path.lexists(out)
    is_free = is_new or (out.is_dir() and not os.listdir(out))
    require(is_free, f"{out} exists: give a new or an empty folder")
    gpt, args, state = weights.load(path, dtype=torch.float32)
    encoding, script = weights.encoding_of(state, args, encoding_name), state["script"]
    parameters = sum(parameter.numel() for parameter in gpt.parameters())
    card = card_of(out.name, args, state, encoding, parameters)
    out.mkdir(parents=True, exist_ok=True)
    require(os.access(out, os.W_OK), f"{out} is not writable")
    try:
        # It is inside of out, which may be a mounted volume or the current folder of a shell.
        with tempfile.TemporaryDirectory(dir=out) as partial:
            folder = Path(partial)
            write_model(folder, gpt, args, encoding, weights.recipe_of(script))
            if encoding:
                tokenizer_of(encoding, args.sequence_length).save_pretrained(folder)
            else:
                print(f"the export has no tokenizer: {weights.UNKNOWN_ENCODING}")
            (folder / "README.md").write_text(card, encoding="utf-8")
            difference = check(folder, gpt, args, encoding, script)
            # config.json is last, because a folder without it is no model.
            for file in sorted(folder.iterdir(), key=lambda file: file.name == "config.json"):
                file.rename(out / file.name)
    except BaseException:
        if is_new:
            out.rmdir()
        raise
    return f"{path} -> {out}; its logits differ from those of {script} by at most {difference:.1g}"


def main(argv):
    parser = weights.parser_for(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    options = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # check() loads the export's code, of which transformers keeps a copy, normally in HOME.
    with tempfile.TemporaryDirectory() as cache:
        transformers.dynamic_module_utils.HF_MODULES_CACHE = cache
        print(export(weights.find(options.weights), options.out.resolve(), options.encoding))


if __name__ == "__main__":
    command(main)
