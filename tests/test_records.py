"""The parser of logs, report.py, and the READMEs of the records."""

import dataclasses
import math
import os
import re
from types import SimpleNamespace

import compare
import first_run
import numpy as np
import pytest
import report
import runlog
import torch
from conftest import ROOT, SCRIPT, TINY, run_tool
from matplotlib.figure import Figure

from train_gpt2 import PRESETS, Hyperparameters, main

HEADER = dict(
    num_iterations=40, batch_size=4, sequence_length=8, val_tokens=64, seed=1, target_val_loss=1.5,
    learning_rate=0.01, n_embd=16,
)  # fmt: skip
FACTS = dict(
    val_data="aa", train_data="bb", device="CPU one", matmul_dtype="float32", processes=1,
    torch="2.13.0", ms=7, memory=500, parameters="1,234",
)  # fmt: skip


def write_log(
    path, loss=1.25, source="print('a script')", stopped_at=None, every=20, first=0, **changes
):
    """Write a log in the format of train_gpt2.py: 40 steps, validated every 20.

    changes replace HEADER and FACTS. stopped_at: the last step of a log without a result. every:
    steps between validations. first: the first step, above 0 if the run was resumed.
    """
    changed = {name: changes.pop(name) for name in FACTS.keys() & changes.keys()}
    facts = SimpleNamespace(**FACTS | changed)
    values = HEADER | changes
    last = values["num_iterations"]
    lines = [f"Log of train_gpt2.py, run_id={path.stem}", source]
    lines += [f"hyperparameter {name}={value!r}" for name, value in values.items()]
    lines += [
        f"training GPT with Muon, AdamW, {facts.parameters} parameters",
        f"torch:{facts.torch} commit: device:{facts.device} processes:{facts.processes} threads:2",
        f"matmul_dtype:{facts.matmul_dtype} micro_batch:4 val_tokens:{values['val_tokens']}",
        f"train_tokens:12345 train_data:{facts.train_data} val_data:{facts.val_data}",
    ]
    for step in range(first, (last if stopped_at is None else stopped_at) + 1):
        ms = facts.ms * step
        tail = f"train_time:{ms:.0f}ms step_avg:{ms / max(step, 1):.2f}ms"
        train_loss = 5 - step / 20 + values["seed"] / 1e3
        if step:
            lines.append(f"step:{step}/{last} train_loss:{train_loss:.4f} {tail}")
        if step % every == 0:
            value = loss if step == last else 5 - step / 20
            lines.append(f"step:{step}/{last} val_loss:{value:.4f} {tail}")
    if stopped_at is None:
        lines += [
            f"val_loss: {loss:.4f}",
            f"seed: {values['seed']}",
            f"peak_memory_mib: {facts.memory}",
            "weights: model.pt",
        ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def write_group(folder, name, losses, first_seed=1, **changes):
    return [
        str(write_log(folder / f"{name}_seed{seed}.txt", loss, seed=seed, **changes))
        for seed, loss in enumerate(losses, first_seed)
    ]


def resumed_log(path, before, **changes):
    """Append another start, which continues after step `before`; return the Run."""
    text = path.read_text()
    path.write_text(text + write_log(path, first=before + 1, **changes).read_text())
    return runlog.read(path)


# ---- One log ------------------------------------------------------------------------------------
def test_log_written_by_training_is_read(tiny):
    own = {**tiny, "run_id": "mine_seed7", "seed": 7, "dtype": "bfloat16"}
    loss = main(Hyperparameters(**own))
    run = runlog.read(f"{tiny['log_dir']}/mine_seed7.txt")
    assert run.val_loss == pytest.approx(loss, abs=5e-5) and run.finished
    assert (run.label, run.seed, run.last_val_step, run.num_iterations) == ("mine", 7, 6, 6)
    assert run.settings == {**vars(Hyperparameters()), **own}
    assert run.source == (ROOT / "train_gpt2.py").read_text()
    assert [step for step, _ in run.points["train"]] == [1, 2, 3, 4, 5, 6]
    assert run.tokens == 6 * TINY["batch_size"] * 16
    assert (len(run.facts["train_data"]), len(run.facts["val_data"])) == (12, 12)
    assert run.facts["parameters"].replace(",", "").isdigit()
    assert run.facts["torch"] == torch.__version__ and run.facts["matmul_dtype"] == "bfloat16"
    assert run.facts["val_loss"] == f"{loss:.4f}"
    assert (run.facts["processes"], run.facts["train_tokens"]) == ("1", "3000")
    assert float(run.facts["peak_memory_mib"]) > 50


# ---- Resumed runs -------------------------------------------------------------------------------
def test_steps_that_a_resume_repeats_are_replaced(tmp_path):
    path = write_log(tmp_path / "a.txt", stopped_at=35, every=5)
    run = resumed_log(path, 25, stopped_at=30, loss=9.0)
    assert (run.last_val_step, run.last_step, run.val_loss) == (25, 30, 3.75)
    assert [step for step, _ in run.points["train"]] == list(range(1, 31))
    assert (run.fault, run.num_iterations) == ("unfinished", 40)
    run = resumed_log(path, 10, loss=2.5)
    assert run.finished and [step for step, _ in run.points["val"]] == [0, 5, 10, 20, 40]
    assert [step for step, _ in run.points["train"]] == list(range(1, 41))
    assert run.val_loss == 2.5


def test_the_starts_of_a_run_share_a_seed(tmp_path):
    """The script may have been edited between two of them, which the tools then say."""
    path = write_log(tmp_path / "a.txt", stopped_at=29)
    text = path.read_text()
    changes = dict(device="CPU two", target_val_loss=1.4, processes=2)
    again = write_log(tmp_path / "b.txt", first=25, **changes).read_text()
    path.write_text(text + again)
    run = runlog.read(path)
    assert run.finished and run.facts["device"] == "CPU two"
    assert run.facts["processes"] == "1, 2"  # so it does not mix with runs of 1 or of 2
    assert run.settings["target_val_loss"] == 1.4
    assert [step for step, _ in run.points["train"]] == list(range(1, 41))
    assert not run.edited and report.progress(run) == "40"
    path.write_text(text + again.replace("a script", "another"))
    run = runlog.read(path)
    assert run.finished and run.edited and report.progress(run) == "40, script edited"
    assert run.source == "print('another')"
    with pytest.raises(ValueError, match="the script was edited between two starts"):
        compare.check_finished(run)
    path.write_text(text + again.replace("seed=", "seed=1"))
    with pytest.raises(ValueError, match=r"holds runs with the seeds \[1, 11\]"):
        runlog.read(path)


def test_a_start_without_a_checkpoint_does_not_count_after_the_run_began_anew(tmp_path):
    """Unless it has given a result: two results of different runs are never taken for one."""
    path = tmp_path / "a.txt"
    lost = write_log(path, stopped_at=29, source="print('old')", seed=2).read_text()
    whole = write_log(path).read_text()
    path.write_text(lost + whole)
    run = runlog.read(path)
    assert run.finished and not run.edited and run.seed == 1
    assert [step for step, _ in run.points["train"]] == list(range(1, 41))
    path.write_text(whole.replace("a script", "another") + whole)
    assert runlog.read(path).edited
    path.write_text(whole.replace("seed=", "seed=1") + whole)
    with pytest.raises(ValueError, match=r"holds runs with the seeds \[1, 11\]"):
        runlog.read(path)


def test_a_start_that_was_killed_in_its_header_does_not_count(tmp_path):
    """An earlier script wrote its header in 47 pieces."""
    whole = write_log(tmp_path / "a.txt").read_text()
    path = tmp_path / "b.txt"
    for cut in range(whole.index("step:1/")):
        path.write_text(whole[:cut].rsplit("\n", 1)[0] + "\n" + whole)
        assert runlog.read(path).val_loss == 1.25
        assert not runlog.read(path).edited


# ---- Damaged logs -------------------------------------------------------------------------------
@pytest.mark.parametrize("literal", ["", "1" + "+1" * 10**5])
def test_a_literal_that_python_cannot_read_is_one_sentence(literal, tmp_path):
    """Also in a folder of other logs: silently omitting a run would bias the result."""
    write_group(tmp_path, "a", [1.2, 1.3])
    path = tmp_path / "a_seed2.txt"
    path.write_text(re.sub(r"(hyperparameter batch_size)=.*", rf"\1={literal}", path.read_text()))
    with pytest.raises(
        ValueError, match=r"^[^\n]*a_seed2.txt is not the log of a training run[^\n]*$"
    ):
        report.main([str(tmp_path)])


def test_a_line_of_the_source_may_begin_like_a_setting(tmp_path):
    source = 'print("""\nhyperparameter search\n""")'
    run = runlog.read(write_log(tmp_path / "a.txt", source=source))
    assert run.source == source and run.settings == HEADER


def test_a_run_that_its_script_ended_early_is_finished(tmp_path, capsys):
    path = write_log(tmp_path / "a.txt", stopped_at=20)
    assert not runlog.read(path).finished
    with path.open("a") as log:
        log.write("val_loss: 4.0000\nsteps: 20\ntokens: 640\n")
    run = runlog.read(path)
    assert (run.finished, run.steps, run.tokens) == (True, 20, 640)
    report.main([str(path)])
    assert "| a | 1 | 20 | 4.0000 |" in capsys.readouterr().out


def test_a_setting_may_be_infinite(tmp_path):
    assert runlog.read(write_log(tmp_path / "a.txt", clip=math.inf)).settings["clip"] == math.inf


@pytest.mark.parametrize("text", ["", "soak: 30 cycles", "hyperparameter a=1\n"])
def test_other_files_are_not_read_as_logs(text, tmp_path):
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(ValueError, match=r"a\.txt is not the log of a training run"):
        runlog.read(tmp_path / "a.txt")
    assert runlog.logs_in(tmp_path) == []


# ---- Groups and tables --------------------------------------------------------------------------
def test_a_group_counts_each_run_once(tmp_path, capsys):
    write_group(tmp_path / "X", "a", [1.2, 1.3])
    write_group(tmp_path / "X" / "below", "a", [2.2, 2.3])
    write_log(tmp_path / "X" / "a_seed10.txt", 1.4, seed=10)
    groups = report.collect([str(tmp_path / "X")])
    assert {name: [run.seed for run in runs] for name, runs in groups.items()} == {
        f"{tmp_path}/X/a": [1, 2, 10],
        f"{tmp_path}/X/below/a": [1, 2],
    }
    assert report.main([f"mine={tmp_path}/X/below"]) == 0
    assert "| mine | 2 | 40 | 2.2500 (sd 0.0707) | 0 s | 7.0 |" in capsys.readouterr().out
    with pytest.raises(ValueError, match="is named twice"):
        report.collect([str(tmp_path / "X"), str(tmp_path / "X" / "a_seed1.txt")])
    with pytest.raises(ValueError, match="no log at"):
        report.collect([str(tmp_path / "Z")])
    equals = write_log(tmp_path / "lr=0.1_seed1.txt")
    assert list(report.collect([str(equals)])) == ["lr=0.1"]
    brackets = write_log(tmp_path / "X [1]" / "lr=1" / "b.txt")
    assert list(report.collect([str(brackets)])) == ["b"]


def test_a_log_in_the_current_folder_has_a_name(tmp_path, monkeypatch):
    write_log(tmp_path / "mine" / "seed1.txt")
    monkeypatch.chdir(tmp_path / "mine")
    assert list(report.collect(["seed1.txt"])) == ["mine"]


@pytest.mark.parametrize(
    "changes, step",
    [
        ({"stopped_at": 40}, "40 of 40, unfinished"),
        ({"stopped_at": 9, "first": 1}, "9 of 40, unfinished"),
        ({"stopped_at": 0, "first": 1}, "0 of 40, unfinished"),
        ({"loss": math.nan}, "40 of 40, diverged"),
    ],
)
def test_no_failed_run_is_left_out_unseen(changes, step, tmp_path, capsys):
    write_group(tmp_path, "a", [1.2, 1.3])
    write_log(tmp_path / "a_seed3.txt", seed=3, **changes)
    assert report.main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "| a | 3 | 40 | n/a | n/a |" in printed and f"| a | 3 | {step} |" in printed


def test_longer_runs_do_not_mix_with_others(tmp_path):
    write_log(tmp_path / "a_seed1.txt", num_iterations=20)
    write_log(tmp_path / "a_seed2.txt", seed=2)
    sentence = r"these runs differ in num_iterations.*: 20 in .*, 40 in"
    with pytest.raises(ValueError, match=sentence):
        report.main([str(tmp_path)])


def test_mistakes_are_one_sentence(tmp_path):
    log = write_log(tmp_path / "a.txt")
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError(name='matplotlib')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for argument, sentence in (
        ("nothing", "no log at 'nothing'"),
        ("--picture=p.png", "matplotlib is"),
    ):
        done = run_tool("report.py", log, argument, env=environment)
        assert done.returncode == 1 and done.stderr.startswith(f"report.py: {sentence}")
        assert done.stderr.count("\n") == 1


# ---- Pictures -----------------------------------------------------------------------------------
@pytest.fixture
def saved(monkeypatch):
    """The figures that report.py would save, in order."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    return figures


def curves_of(figure):
    """Return the coordinates of the training and of the validation curves, and the horizontals."""
    [axes] = figure.axes
    lines = {style: [] for style in ("-", ":", "--")}
    for line in axes.lines:
        if len(line.get_xdata()):
            lines[line.get_linestyle()].append([list(values) for values in line.get_data()])
    return lines.values()


def test_a_picture_of_groups(tmp_path, saved):
    write_group(tmp_path, "a", [1.2, 1.3, 1.25], num_iterations=95, every=19)
    write_group(tmp_path, "b", [1.6, 1.7], num_iterations=95, every=19, target_val_loss=9.0)
    assert report.main([str(tmp_path), "--picture", "p.png"]) == 0
    train, val, targets = curves_of(saved[0])
    assert len(train) == 5 and [losses[-1] for _, losses in val] == [1.2, 1.3, 1.25, 1.6, 1.7]
    assert val[0][0] == pytest.approx([0.000608, 0.001216, 0.001824, 0.002432, 0.00304])
    # Means over 2 or 3 of the 86 steps from step 10 on.
    millions, losses = train[0]
    assert len(millions) == 30 and millions[0] == pytest.approx(11 * 32 / 1e6)
    assert losses == pytest.approx([5.001 - x * 1e6 / 32 / 20 for x in millions])
    assert sorted(y for _, (y, _) in targets) == [1.5, 9.0]
    [axes] = saved[0].axes
    low, high = axes.get_ylim()
    assert low < 0.5 and max(losses) < high < 5, "a distant target must not squeeze the curves"
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend[:2] == ["a: 1.2500 (sd 0.0500), n=3", "b: 1.6500 (sd 0.0707), n=2"]
    write_group(tmp_path, "b", [1.2, 1.3], val_data="bb")
    with pytest.raises(ValueError, match="these runs differ in validation data"):
        report.main([str(tmp_path), "--picture", "p.png"])


@pytest.mark.parametrize("line, length, last", [("step:1/", 30, 0), ("step:20/40 val", 75, 20)])
def test_a_running_log_is_drawn_without_its_incomplete_last_line(
    line, length, last, tmp_path, saved
):
    path = write_log(tmp_path / "a_seed1.txt")
    text = path.read_text()
    path.write_text(text[: text.index(line) + length])
    assert report.main([str(path), "--picture=p.png"]) == 0
    [axes] = saved[0].axes
    assert axes.get_legend().get_texts()[0].get_text() == f"a: {last} of 40, unfinished, n=1"
    train, val, _ = curves_of(saved[0])
    drawn = [x for millions, _ in train + val for x in millions]
    assert max([0, *drawn]) == pytest.approx(32 * last / 1e6)


# ---- What the READMEs show ----------------------------------------------------------------------
def test_readmes_show_what_their_logs_say(capsys):
    status = report.main(["--stale"])
    assert status == 0, f"run `python records/tools/report.py --refresh`: {capsys.readouterr().out}"


def test_the_first_run_says_which_loss_to_expect():
    """Only for the settings and the validation data of the recorded runs."""
    runs = [runlog.read(path) for path in ROOT.glob(first_run.RECORDED)]
    losses = [run.val_loss for run in runs]
    assert len(losses) == 5
    expected = f"expected: about {np.mean(losses):.3f}; 5 seeds reached {min(losses):.3f} to "
    assert first_run.expectation(runs[0]).startswith(expected)
    settings = Hyperparameters(**PRESETS["cpu"])
    for name in runs[0].settings.keys() - {"run_id", "seed", "dtype", "val_tokens"}:
        assert runs[0].settings[name] == getattr(settings, name), name
    for change in (
        dict(facts=runs[0].facts | {"val_data": "0123"}),
        dict(settings=runs[0].settings | {"n_layer": 5}),
    ):
        other = dataclasses.replace(runs[0], **change)
        assert first_run.expectation(other).startswith("no recorded run has these settings")


def test_the_first_run_has_no_options(monkeypatch):
    monkeypatch.setattr(first_run, "run_child", lambda command: pytest.fail("it was started"))
    with pytest.raises(SystemExit):
        first_run.main(["--num_iterations=5"])


PAGES = [ROOT / "README.md", *sorted(ROOT.glob("records/**/*.md"))]
RESULTS = {  # {start of a row in README: its logs}
    "`--preset=cpu`]": "2026-11-28_First_run/cpu_seed*.txt",
    "`modern --preset=small`]": "2026-11-28_Pairs/logs/base_seed*.txt",
    "record 7's model](records/2026-11-28_Steps_to_the_same_loss)": (
        "2026-11-28_Steps_to_the_same_loss/logs/record7_seed*.txt"
    ),
    "record 7's model](records/2026-11-28_Steps_to_the_same_loss#": (
        "2026-11-28_Steps_to_the_same_loss/search/record7_muon1_adamw8_*.txt"
    ),
}


def anchors_of(page):
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=[f"{page.relative_to(ROOT)}" for page in PAGES])
def test_links_and_anchors_exist(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path = page.parent / target if target else page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors_of(path / "README.md" if path.is_dir() else path), anchor


def test_the_readme_shows_the_losses_and_the_lines_that_exist():
    text = (ROOT / "README.md").read_text()
    lines = SCRIPT.read_text().splitlines()
    core = next(i for i, line in enumerate(lines) if line.startswith("# ---- Machinery"))
    assert f"core has {core} lines: " in text and f" other {len(lines) - core}: " in text
    for name, logs in RESULTS.items():
        losses = [runlog.read(path).val_loss for path in sorted(ROOT.glob(f"records/{logs}"))]
        each = ", ".join(f"{loss:.4f}" for loss in losses)
        [row] = [line for line in text.splitlines() if line.startswith(f"| [{name}")]
        assert row.endswith(f" | {np.mean(losses):.4f} | {each} |"), name


def test_stale_tables_are_noticed_and_renewed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text("no table\n")
    (tmp_path / "records").mkdir()
    readme, tool = tmp_path / "records" / "README.md", tmp_path / "tool.py"
    tool.write_text("import sys; print('| table |', *sys.argv[1:])")
    page = "# A\n<!-- python tool.py 'a b' -->\n{}<!-- end -->\ntext\n"
    for old in "", "| another |\n| table |\n":
        readme.write_text(page.format(old))
        assert report.main(["--stale"]) == 1 and str(readme) in capsys.readouterr().out
        assert report.main(["--refresh"]) == 0 and report.main(["--stale"]) == 0
        assert readme.read_text() == page.format("| table | a b\n")
    tool.write_text("print('half a table'); raise ValueError")
    with pytest.raises(ValueError, match=r"README\.md: this command fails: (.|\n)*ValueError"):
        report.main(["--refresh"])
    tool.write_text("print('a table')")
    open_table = page.format("").replace("<!-- end -->", "<!-- end-->")
    for kept in open_table, open_table + page.format(""):
        readme.write_text(kept)
        with pytest.raises(ValueError, match=r"README\.md: .*no <!-- end -->"):
            report.main(["--refresh"])
        assert readme.read_text() == kept
