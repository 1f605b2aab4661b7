"""Settings for a number of minutes: the rule, and the command that the check prints."""

import shlex
from pathlib import Path

import check
import minutes
import pytest
from conftest import options, trained, write_shard
from hypothesis import given
from hypothesis import strategies as st
from minutes import MAX_EPOCHS, SIZES, Rule, arguments

from train_gpt2 import parse_args


@pytest.mark.parametrize("name", minutes.RATES)
def test_the_rule_gives_the_tuned_rates(name):
    tuned = minutes.learning_rate(name, 64, 128), minutes.learning_rate(name, 1040, 128)
    assert tuned == minutes.RATES[name]
    assert minutes.learning_rate(name, 30, 128) == tuned[0]
    assert tuned[0] > minutes.learning_rate(name, 300, 128) > tuned[1]
    assert tuned[1] == getattr(parse_args(["--preset=text"]), name)


def parameters(arguments):
    """Return the number of parameters in the blocks of a model with these settings."""
    args = parse_args(["--preset=text", *arguments])
    return 12 * args.n_layer * args.n_embd**2


@given(
    tokens=st.integers(4097, 10**9),
    vocab_size=st.sampled_from([257, 50304]),
    few=st.floats(0.1, 1000),
    more=st.floats(0, 1000),
    speed=st.floats(1e3, 1e9),  # parameters per second
)
def test_the_settings_are_allowed_and_fit_the_text_and_the_time(
    tokens, vocab_size, few, more, speed
):
    """More minutes never choose a smaller model."""
    rule = Rule(tokens, vocab_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minutes, "seconds_of", lambda argv: (parameters(argv) / speed, 0.0))
        chosen = [arguments(rule.choose(time, [])) for time in (few, few + more)]
    small, large = map(parameters, chosen)
    assert small <= large
    assert large == parameters(arguments(rule.settings(SIZES[0], 1, 1))) or large <= tokens
    args = parse_args(["--preset=text", *chosen[0]])
    epochs = args.num_iterations * args.batch_size * args.sequence_length / tokens
    assert epochs <= MAX_EPOCHS
    if args.num_iterations > 8:
        assert (args.num_iterations - 1) * small / speed <= 60 * few
    # N-grams are dropped if the text is read more than once. Near 1, rounding decides.
    assert (args.ngram_dropout > 0) == (epochs > 1) or abs(epochs - 1) < 0.01


@pytest.fixture
def text_of_bytes(tmp_path):
    """Settings for a text of 30,000 tokens, in a folder with a space in its name."""
    folder = tmp_path / "a text"
    folder.mkdir()
    for name, tokens in ("train", 30_000), ("val", 600):
        write_shard(folder / f"{name}_0.bin", [i * i % 251 for i in range(tokens)])
    files = {f"{name}_files": folder / f"{name}_*.bin" for name in ("train", "val")}
    return {"preset": "text", **files, "log_dir": tmp_path / "logs", "device": "cpu"}


@pytest.mark.parametrize("processes", [1, 2])
def test_the_check_prints_a_command_for_the_minutes(processes, text_of_bytes, tmp_path):
    script = tmp_path / "small.py"
    script.write_text(
        "import sys\nimport check, minutes, train_gpt2\nminutes.SIZES[:] = [(2, 64)]\n"
        "check.main(sys.argv[1:])\ntrain_gpt2.leave_ranks()\n"
    )
    text = trained({**text_of_bytes, "minutes": 9}, processes, script)
    assert "the run reads 30,000 tokens 3.96 times" in text
    words = shlex.split(text.splitlines()[-1])
    if processes > 1:
        assert words.pop(0) == "NPROC=2"
    assert words[0] == "bash" and Path(words[1]).name == "run.sh"
    args = parse_args(words[2:])
    assert (args.n_embd, args.n_layer, args.num_iterations) == (64, 2, 29)
    assert args.train_files == str(text_of_bytes["train_files"]) and not args.compile


@pytest.mark.parametrize("seconds, save_every", [(0.1, 9000), (1, 900), (1000, 1)])
def test_a_checkpoint_is_saved_at_least_every_15_minutes(seconds, save_every):
    assert Rule(10**9, 257).settings(SIZES[0], 10**5, seconds)["save_every"] == save_every


@pytest.mark.parametrize("name", ["batch_size", "num_iterations", "resume", "compile"])
def test_settings_that_the_rule_chooses_are_refused(name, text_of_bytes):
    value = {"resume": "auto", "compile": "True"}.get(name, 4)
    with pytest.raises(ValueError, match=rf"does not go with the settings \['{name}'\]"):
        check.main([*options(text_of_bytes), "--run_id=new", f"--{name}={value}", "--minutes=3"])


@pytest.mark.parametrize("preset, value", [("text", "0"), ("text", "nan"), ("cpu", "3")])
def test_minutes_are_a_positive_number_with_the_preset_for_text(preset, value):
    with pytest.raises(ValueError, match=r"--minutes needs a number above 0, .* --preset=text"):
        check.main([f"--preset={preset}", f"--minutes={value}"])
