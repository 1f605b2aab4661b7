"""export.py: transformers computes what train_gpt2.py does, with the tokens of its encoding."""

import copy
import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys

import export
import pytest
import tiktoken
import torch
import train_modern
import transformers
import weights
from conftest import ROOT, random_run, small_state, write_run_on_own_tokens, write_weights
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_gpt2

T = 32  # sequence_length of the trained models
pytestmark = pytest.mark.usefixtures("modules_cache")


def load_model(folder, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)
    return model.requires_grad_(False)


def exported(path, out):
    """Export weights; return (the new folder, their GPT, the model as users load it)."""
    export.export(path, out)
    gpt = weights.load(path, dtype=torch.float32)[0].requires_grad_(False)
    return out, gpt, load_model(out)


@pytest.fixture(scope="module")
def plain(plain_run, tmp_path_factory):
    return exported(plain_run / "model.pt", tmp_path_factory.mktemp("plain") / "exported")


@pytest.fixture(scope="module")
def modern(modern_run, tmp_path_factory):
    return exported(modern_run / "model.pt", tmp_path_factory.mktemp("modern") / "exported")


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """A modern model with windows of 3 blocks and 1, and with all that a layer can have."""
    folder = random_run(
        tmp_path_factory.mktemp("windowed"), train_modern.RECIPE, n_layer=8, n_head=2, n_embd=16,
        sequence_length=512, attention_window=300, document_token=256, ngram_rows=50,
    )  # fmt: skip
    return exported(folder / "model.pt", folder / "exported")


@pytest.fixture(params=["plain", "modern", "windowed"])
def each(request):
    return request.getfixturevalue(request.param)


def random_tokens(*shape):
    return torch.randint(257, shape, generator=torch.Generator().manual_seed(1))


def random_sequence(length):
    """Return tokens in which a document starts after two thirds."""
    tokens = random_tokens(length) % 256
    tokens[2 * length // 3] = 256
    return tokens


def close(a, b):
    return torch.allclose(a, b, rtol=0, atol=1e-5)


# ---- The model ----------------------------------------------------------------------------------
def test_logits_and_loss_are_those_of_gpt(each):
    """As usual in transformers, the labels are the inputs, and the model shifts them itself."""
    _, gpt, model = each
    for length in 1, 2, 3, 4, model.config.sequence_length:  # also below max_ngram
        inputs = random_tokens(3, length)
        inputs[0] = random_sequence(length)
        logits = model(inputs).logits
        assert logits.dtype == torch.float32 and close(logits, gpt(inputs))
        assert close(model(inputs, logits_to_keep=1).logits, logits[:, -1:])
    targets = inputs[:, 1:].clone()
    targets[0, :9] = -1
    labels = inputs.clone()
    labels[0, 1:10] = -100
    assert close(model(inputs, labels=labels).loss, gpt(inputs[:, :-1], targets))
    logits_bf16 = copy.deepcopy(model).to(torch.bfloat16)(inputs).logits
    assert logits_bf16.dtype == torch.float32 and torch.allclose(logits_bf16, logits, atol=0.5)


def test_a_model_loaded_in_bfloat16_computes_what_train_gpt2_does(tmp_path):
    path = random_run(tmp_path, n_layer=2, n_embd=32, sequence_length=512) / "model.pt"
    export.export(path, tmp_path / "out")
    gpt = weights.load(path, dtype=torch.bfloat16)[0]
    model = load_model(tmp_path / "out", dtype=torch.bfloat16)
    inputs = random_tokens(2, 512)
    assert model.dtype == torch.bfloat16 and torch.equal(model(inputs).logits, gpt(inputs))


@pytest.mark.parametrize("left", [True, False])
def test_padding_does_not_change_the_logits_of_tokens(left, each):
    """The ids of padding do not matter. Its logits are 0, also in a row of padding alone."""
    _, gpt, model = each
    T = model.config.sequence_length
    sequences = [random_sequence(T * share // 32) for share in (27, 6, 7)]
    inputs, mask = torch.full((4, T), 20), torch.zeros(4, T)
    places = [slice(T - len(x), T) if left else slice(len(x)) for x in sequences]
    for row, (place, tokens) in enumerate(zip(places, sequences)):
        inputs[row] = row  # an id for padding
        inputs[row, place], mask[row, place] = tokens, 1
    logits = model(inputs, attention_mask=mask).logits
    assert (logits[mask == 0] == 0).all()
    for row, (place, tokens) in enumerate(zip(places, sequences)):
        assert close(logits[row, place], gpt(tokens[None])[0])


def test_the_model_can_be_trained_and_saved(each, tmp_path):
    model, tokens = copy.deepcopy(each[2]).requires_grad_(True).train(), random_tokens(2, T)
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), 0.01).step()
    assert model(tokens, labels=tokens).loss < loss
    model.save_pretrained(tmp_path)
    again = load_model(tmp_path)
    assert torch.equal(again(tokens).logits, model.eval()(tokens).logits)


# ---- The files ----------------------------------------------------------------------------------
def test_the_folder_holds_float32_weights_settings_and_code(each):
    folder, gpt, model = each
    tensors = load_file(folder / "model.safetensors")
    expected = dict(gpt.named_parameters(prefix="gpt"))
    assert tensors.keys() == expected.keys()  # of a tied weight, one name
    for key, tensor in tensors.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, expected[key])
    assert not list(folder.parent.glob("*.partial"))
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    config = model.config
    card = (folder / "README.md").read_text()
    run = json.loads(re.search(r"```json\n(.*?)```", card, re.S)[1])
    for name, value in run.items():
        if name != "dtype":
            assert getattr(config, name) == value
    assert {"n_layer", "num_iterations"} < run.keys() and not {"train_files", "init"} & run.keys()
    assert config.max_position_embeddings == run["sequence_length"]
    assert config.hidden_size == run["n_embd"]
    assert f"transformers 4.57.1 to {transformers.__version__};" in card
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (256, 256, 255)
    assert (folder / "train_gpt2.py").read_text() == (ROOT / "train_gpt2.py").read_text()


def test_an_export_is_a_package_of_its_own(each):
    """It neither imports the script by a name that others could have, nor changes sys.path."""
    folder, gpt, model = each
    names = [path.stem for path in folder.glob("*.py")]
    own = ["muon", "train_modern"] if hasattr(gpt, "ngrams") else []
    assert sorted(names) == sorted(["modeling_gpt2_speedrun", "train_gpt2", *own])
    for name in names:  # of an absolute import, transformers expects an installed package
        needed = transformers.dynamic_module_utils.get_imports(folder / f"{name}.py")
        assert not {*names} & {*needed}
    package = type(model).__module__.rpartition(".")[0]
    assert type(model.gpt).__module__ in {f"{package}.{name}" for name in names}
    assert not [path for path in sys.path if path.startswith(sys.modules[package].__path__[0])]


def test_transformers_4_and_5_read_the_same_from_the_folder(each, monkeypatch):
    """Values with other defaults in transformers 4 are written; versions below 4.57.1 refused."""
    folder, _, model = each
    contents = {path.name: json.loads(path.read_text()) for path in folder.glob("*config.json")}
    is_tied = not hasattr(model.gpt, "ngrams")
    token_ids = dict(bos_token_id=256, eos_token_id=256, pad_token_id=255)
    generation = token_ids | dict(use_cache=False)
    settings = generation | dict(tie_word_embeddings=is_tied, dtype="float32")
    assert contents["config.json"].items() >= settings.items()
    assert contents["generation_config.json"].items() >= generation.items()
    assert contents["tokenizer_config.json"]["tokenizer_class"] == "PreTrainedTokenizerFast"
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.56.2")
    with pytest.raises(ImportError, match=r"transformers>=4\.57\.1 is required .*==4\.56\.2"):
        importlib.reload(sys.modules[type(model).__module__])


EDITS = {  # another activation, with a new setting
    "F.relu(self.c_fc(x)).square()": "F.gelu(self.slope * self.c_fc(x))",
    "        self.c_fc = ": "        self.slope = args.slope\n        self.c_fc = ",
    "    # Training\n": '    slope: float = setting(1.0, "of the MLP")\n\n    # Training\n',
}


def test_the_command_exports_an_edited_model_into_the_current_folder(tmp_path):
    """The folder stays the same one, as a mounted volume must; HOME need not be writable."""
    for path in [ROOT / "train_gpt2.py", *ROOT.glob("data/*.py"), *ROOT.glob("records/tools/*.py")]:
        copied_path = tmp_path / path.relative_to(ROOT)
        copied_path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copied_path)
    script = tmp_path / "train_gpt2.py"
    code = script.read_text()
    for old, new in EDITS.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    script.write_text(code)
    saved = random_run(tmp_path, n_layer=2, n_embd=32) / "model.pt"
    state = torch.load(saved)
    state["hyperparameters"]["slope"] = 0.5
    write_weights(saved, state)
    (tmp_path / "out").mkdir()
    inode = (tmp_path / "out").stat().st_ino
    command = [sys.executable, tmp_path / "records" / "tools" / "export.py"]
    command += ["--weights", saved, "--out=."]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment["HOME"] = os.devnull
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=tmp_path / "out", env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("warning: train_gpt2.py has changed since it saved ")
    assert done.stderr.count("\n") == done.stdout.count("\n") == 1
    assert (tmp_path / "out").stat().st_ino == inode
    edited = runpy.run_path(str(script))
    args = edited["Hyperparameters"](**state["hyperparameters"])
    gpt, unedited = (build(args, torch.float32) for build in (edited["GPT"], train_gpt2.GPT))
    gpt.load_state_dict(state["model"])
    unedited.load_state_dict(state["model"])
    tokens = random_tokens(2, 16)
    logits = load_model(tmp_path / "out")(tokens).logits
    assert close(logits, gpt(tokens)) and not close(logits, unedited(tokens))


IDEA = """
import sys
{imports}
sys.path.insert(
    0, "here"
)
def double(inputs):
    import train_gpt2
    return 2 * inputs
class Mine(base.GPT):
    def forward(self, inputs, targets=None):
        return double(super().forward(inputs, targets))
SOURCES = base.RECIPE.sources | dict([("my_idea.py", open(__file__).read())])
RECIPE = base.RECIPE._replace(script="my_idea.py", sources=SOURCES, build_model=Mine)
"""


@pytest.mark.parametrize(
    "imports", ["import train_gpt2 as base", "import helper, train_gpt2 as base"]
)
def test_a_script_of_ones_own_is_exported_with_all_that_it_needs(imports, tmp_path, monkeypatch):
    """A module that is not in `sources` would be missing elsewhere, so the export is refused."""
    for module in export, weights:
        monkeypatch.setattr(module, "ROOT", tmp_path)
    for name in "my_idea", "helper":
        monkeypatch.setitem(sys.modules, name, None)  # is removed after the test
        del sys.modules[name]
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "helper.py").touch()
    (tmp_path / "my_idea.py").write_text(IDEA.format(imports=imports))
    state = small_state() | {"script": "my_idea.py"}
    path = write_weights(tmp_path / "model.pt", state)
    if "helper" in imports:
        with pytest.raises(ValueError, match=r"my_idea\.py imports helper, which the export lacks"):
            export.export(path, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    else:
        _, gpt, model = exported(path, tmp_path / "out")
        tokens = random_tokens(2, 4)
        assert close(model(tokens).logits, gpt(tokens))


def test_the_card_says_how_the_model_was_trained_and_its_example_runs(
    plain, plain_run, tmp_path, monkeypatch, capsys
):
    folder = plain[0]
    card = (folder / "README.md").read_text()
    log = plain_run.with_suffix(".txt").read_text()
    loss = re.search(r"^val_loss: (\S+)", log, re.M)[1]
    for part in "32,800 parameters", "60 of 60 planned steps, 15,360 tokens", f"loss: {loss} nats":
        assert part in card
    assert '"num_iterations": 60' in card and "log_dir" not in card
    [code] = re.findall(r"```python\n(.*?)```", card, re.S)
    monkeypatch.chdir(folder.parent)
    exec(code, {})
    assert capsys.readouterr().out.startswith("The")
    export.export(plain_run / "state_step0000000040.pt", tmp_path / "checkpoint")
    card = (tmp_path / "checkpoint" / "README.md").read_text()
    assert "40 of 60 planned steps, 10,240 tokens.\n- Validation loss: unknown" in card


# ---- The tokenizer ------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_ids_are_those_of_the_encoding(name, gpt2_vocabulary):
    encoding = weights.pack.get_encoding(name)
    tokenizer = export.tokenizer_of(encoding, T)
    pieces = st.sampled_from([*" \t\n\r\x0b\xa0\u2003a7.'_é日٣🙂ﬀ", "'ll", "'S", "  ", " the"])

    @settings(deadline=None, max_examples=400)
    @example((ROOT / "train_gpt2.py").read_text())
    @given(st.text() | st.lists(pieces, max_size=30).map("".join))
    def check(text):
        for special in export.END_OF_TEXT, export.PADDING:
            assume(special not in text)  # which the tokenizer takes for the token
        ids = tokenizer(text, verbose=False)["input_ids"]
        assert ids == encoding.encode_ordinary(text) and tokenizer.decode(ids) == text

    check()


def test_end_of_text_is_one_token_with_the_id_of_the_encoding(plain):
    tokenizer = AutoTokenizer.from_pretrained(plain[0])
    assert tokenizer("a<|endoftext|>é")["input_ids"] == [97, 256, 195, 169]
    assert tokenizer.decode([97, 256, 98], skip_special_tokens=True) == "ab"
    assert len(tokenizer) == 257 and tokenizer.bos_token_id == tokenizer.eos_token_id == 256
    assert tokenizer.model_max_length == T
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"ab": 257}  # ids after end-of-text
    encoding = tiktoken.Encoding(
        "odd", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256}
    )
    assert export.tokenizer_of(encoding, T)("abc<|endoftext|>")["input_ids"] == [257, 99, 256]


def test_ids_that_only_pad_the_vocabulary_are_never_generated(tmp_path):
    state = small_state(vocab_size=300)
    state["model"]["lm_head.weight"][257:] *= 100
    *_, model = exported(write_weights(tmp_path / "model.pt", state), tmp_path / "out")
    inputs = random_tokens(4, 8)
    assert model(inputs).logits[:, -1].argmax(-1).max() > 256
    ids = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=5)
    assert ids.max() <= 256


def test_without_a_known_encoding_the_tokenizer_is_left_out(tmp_path, capsys):
    *_, model = exported(write_run_on_own_tokens(tmp_path / "run"), tmp_path / "out")
    assert "the export has no tokenizer: the encoding of" in capsys.readouterr().out
    assert not list((tmp_path / "out").glob("token*"))
    assert "- Encoding: unknown." in (tmp_path / "out" / "README.md").read_text()
    inputs = random_tokens(1, 4)
    ids = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=3)
    assert ids.shape == (1, 7)


# ---- The command --------------------------------------------------------------------------------
@pytest.mark.parametrize("out", ["notes", "notes/n.txt"])
def test_existing_files_are_not_replaced(out, plain_run, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "n.txt").write_text("mine")
    with pytest.raises(ValueError, match=f"{out} exists: give a new or an empty folder"):
        export.export(plain_run / "model.pt", tmp_path / out)
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "notes", tmp_path / "notes" / "n.txt"]


def test_a_failed_export_leaves_the_folder_as_it_was(modern_run, tmp_path, monkeypatch):
    """It fails because a changeable setting is not exported, so the exported model differs."""
    names = train_gpt2.changeable_names(train_gpt2.Hyperparameters) | {"max_ngram"}
    monkeypatch.setattr(train_gpt2, "changeable_names", lambda settings: names)
    (tmp_path / "empty").mkdir()
    for name in "empty", "new":
        with pytest.raises(
            ValueError, match=r"exported logits differ .* declared with setting\(\)"
        ):
            export.export(modern_run / "model.pt", tmp_path / name)
    assert list(tmp_path.rglob("*")) == [tmp_path / "empty"]
