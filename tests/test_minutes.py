"""Settings for a number of minutes: the rule, and the command that the check prints."""

import re
import shlex
from pathlib import Path

import check
import minutes
import pytest
from conftest import options, trained, write_shard
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
    steps = rule.clamp(steps)
    args = parse_args(["--preset=text", *minutes.arguments(rule.settings(size, steps))])
    assert args.num_iterations == steps and (args.n_layer, args.n_embd) == size
    epochs = steps * args.batch_size * args.sequence_length / tokens
    assert epochs <= MAX_EPOCHS or steps == 8
    # N-grams are dropped if the text is read more than once. Near 1, rounding decides.
    assert (args.ngram_dropout > 0) == (epochs > 1) or abs(epochs - 1) < 0.01


@given(
    tokens=st.integers(10_000, 10**9),
    few=st.floats(0.1, 1000),
    more=st.floats(0, 1000),
    speed=st.floats(1e3, 1e9),  # parameters per second
)
def test_more_minutes_never_choose_a_smaller_model(tokens, few, more, speed):
    rule = Rule(tokens, 257)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minutes, "seconds_per_step", lambda argv: parameters(argv) / speed)
        small, _ = rule.choose(few, [])
        large, _ = rule.choose(few + more, [])
    assert SIZES.index(small) <= SIZES.index(large)
    layers, channels = large
    assert large == SIZES[0] or 12 * layers * channels**2 <= tokens


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
        "check.main(sys.argv[1:])\ntrain_gpt2.leave_processes()\n"
    )
    given = {**text_of_bytes, "compile": False}
    text = trained({**given, "minutes": 9}, processes, script)
    assert re.search(r"^settings: 2 layers with 64 channels, [\d,]+ steps", text, re.M)
    found = (
        r"^command: 29 steps and 5 validations in about \d\.\d minutes.* 3\.96 times, and no run"
    )
    assert re.search(found, text, re.M)
    words = shlex.split(text.splitlines()[-1])
    if processes > 1:
        assert words.pop(0) == "NPROC=2"
    assert words[0] == "bash" and Path(words[1]).name == "run.sh"
    args = parse_args(words[2:])
    assert (args.n_embd, args.n_layer, args.num_iterations) == (64, 2, 29)
    assert args.train_files == str(text_of_bytes["train_files"]) and not args.compile


@pytest.mark.parametrize("seconds, save_every", [(0.1, 9000), (1, 900), (1000, 1)])
def test_a_checkpoint_is_saved_at_least_every_15_minutes(seconds, save_every):
    checks = check.Checks([])
    checks.rule, checks.size, checks.world_size = Rule(10**9, 257), SIZES[0], 1
    checks.minutes = 90
    checks.seconds_per_step, checks.seconds_per_validation = seconds, 0
    words = shlex.split(checks.check_command().splitlines()[-1])
    assert parse_args(["--preset=text", *words[2:]]).save_every == save_every


@pytest.mark.parametrize("setting", ["--batch_size=4", "--num_iterations=5", "--resume=auto"])
def test_settings_that_the_rule_chooses_are_refused(setting, text_of_bytes):
    [fault] = check.main([*options(text_of_bytes), "--run_id=new", setting, "--minutes=3"])
    name = setting.partition("=")[0].removeprefix("--")
    sentence = f"settings: --minutes does not go with the settings ['{name}']: leave them out"
    assert fault.startswith(sentence)


@pytest.mark.parametrize("preset", ["cpu", "text"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "ten", ""])
def test_invalid_minutes_are_refused(preset, value):
    [fault] = check.main([f"--preset={preset}", f"--minutes={value}"])
    assert fault == f"setup: --minutes={value} must be a number above 0, such as 15"


def test_minutes_need_the_preset_for_text():
    [fault] = check.main(["--preset=cpu", "--minutes=3"])
    assert fault == "setup: --minutes needs --preset=text: pass both"
