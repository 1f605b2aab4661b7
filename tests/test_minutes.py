"""Settings for a number of minutes: the rule, and the command that the check prints."""

import re
import shlex

import check
import minutes
import pytest
from conftest import options
from hypothesis import given
from hypothesis import strategies as st
from minutes import MAX_EPOCHS, SIZES, Rule

from train_gpt2 import parse_args


@pytest.mark.parametrize("preset", ["cpu", "text"])
def test_the_rates_of_both_presets_lie_on_the_rule(preset):
    args = parse_args([f"--preset={preset}"])
    for name in minutes.RATES:
        rate = minutes.learning_rate(name, args.num_iterations, args.n_embd)
        assert rate == pytest.approx(getattr(args, name))


def parameters(arguments):
    """Return the number of parameters in the blocks of a model with these settings."""
    args = parse_args(["--preset=text", *arguments])
    return 12 * args.n_layer * args.n_embd**2


@given(
    tokens=st.integers(10_000, 10**9),
    vocab_size=st.sampled_from([257, 50304]),
    steps=st.floats(0, 1e7),
    size=st.sampled_from(SIZES),
)
def test_the_settings_are_allowed_and_fit_the_text(tokens, vocab_size, steps, size):
    rule = Rule(tokens, vocab_size)
    steps = rule.limit(steps)
    arguments = rule.settings(size, steps)
    args = parse_args(["--preset=text", *arguments])
    assert args.num_iterations == steps and (args.n_layer, args.n_embd) == size
    epochs = steps * args.batch_size * args.sequence_length / tokens
    assert epochs <= MAX_EPOCHS or steps == 8
    assert (args.ngram_dropout > 0) == (round(epochs, 2) > 1) or abs(epochs - 1) < 0.1


@given(
    tokens=st.integers(10_000, 10**9),
    few=st.floats(0.1, 1000),
    more=st.floats(0, 1000),
    speed=st.floats(1e3, 1e9),  # parameters per second
)
def test_more_minutes_never_give_a_smaller_model_or_fewer_tokens(tokens, few, more, speed):
    rule = Rule(tokens, 257)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minutes, "seconds_per_step", lambda argv: parameters(argv) / speed)
        small, _ = rule.choose(few, [])
        large, _ = rule.choose(few + more, [])
    assert SIZES.index(small) <= SIZES.index(large)
    layers, channels = large
    assert large == SIZES[0] or 12 * layers * channels**2 <= tokens


SMALL = {  # replaces settings of the rule, for speed
    "n_head": 1, "n_embd": 16, "max_ngram": 2, "ngram_rows": 100, "batch_size": 2,
    "sequence_length": 16, "compile": False, "device": "cpu",
}  # fmt: skip


def test_the_check_prints_a_command_for_the_minutes(tiny, capsys):
    data = {name: tiny[name] for name in ("train_files", "val_files", "log_dir")}
    given = ["--preset=text", *options({**data, **SMALL})]
    assert not check.main([*given, "--minutes=0.2"])
    text = capsys.readouterr().out
    assert re.search(r"^settings: 2 layers with 16 channels, about [\d,]+ steps$", text, re.M)
    assert re.search(r"^command: 8 steps and 5 validations in about \d\.\d minutes", text, re.M)
    _, command = text.split("\n\nbash run.sh ")
    arguments = shlex.split(command)
    assert arguments[: len(given)] == given
    args = parse_args(arguments)
    assert (args.n_embd, args.n_layer) == (16, 2)
    assert args.val_loss_every == -(-args.num_iterations // 4)


@pytest.mark.parametrize("preset", ["cpu", "text"])
@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf", "ten"])
def test_mistakes_are_refused(preset, minutes, capsys):
    [fault] = check.main([f"--preset={preset}", f"--minutes={minutes}"])
    assert fault == f"setup: --minutes={minutes} must be a number above 0, such as 15"


def test_minutes_need_the_preset_for_text():
    [fault] = check.main(["--preset=cpu", "--minutes=3"])
    assert fault == "setup: --minutes needs --preset=text: pass both"
