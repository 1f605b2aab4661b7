"""Train once with each of the seeds 1, 2, ... and print the losses, their mean and its uncertainty.

    bash run.sh repeat 5 --run_id=mine [--name=value ...]     # mine_seed1 to mine_seed5
    bash run.sh repeat 5 modern --preset=small --run_id=mine  # of records/modern/train_modern.py

If target_val_loss is set, it prints p of a one-sided t-test that the mean is below the target. The
environment variable NPROC sets the number of processes. Called again, it keeps finished runs and
continues unfinished ones. Before it trains, it rejects runs of other sources, or with another
compile, val_loss_every or target_val_loss; the training script rejects other settings.
"""

import os
import re
import sys
from pathlib import Path

from compare import against_target, check, interval_of_mean, losses_table
from runlog import MAY_VARY, ROOT, argument_parser, command, read, require, run_child
from weights import recipe_and_settings, train_gpt2


def check_version(run, recipe):
    """Raise ValueError unless the whole run is of the recipe's present source."""
    same = run.source == "\n".join(recipe.sources.values()) and not run.edited
    require(same, f"{run.path} is of another version of {recipe.script}: pass another --run_id")


def check_settings(run, args):
    """Raise ValueError if a setting differs that a resumed run may change, but not a series."""
    for name in sorted(train_gpt2.changeable_names(args) - MAY_VARY):
        logged, given = run.settings.get(name), getattr(args, name)
        require(
            logged == given,
            f"{run.path} has {name}={logged} (here {given}): pass the same value, or another "
            "--run_id",
        )


def train(log, recipe, arguments):
    """Train the run with this log to the end, unless it is finished; return the Run."""
    processes = os.environ.get("NPROC", "1")
    launcher = []
    if processes != "1":
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    script = ROOT / recipe.script
    status = run_child([sys.executable, *launcher, script, *arguments, "--resume=auto"])
    require(
        status == 0,
        f"{log.stem} ended with exit status {status}. When the cause, above, is mended, the same "
        "command continues the series",
    )
    run = read(log)
    require(run.finished, f"{log.stem} was stopped: the same command continues the series")
    check_version(run, recipe)
    return run


def main(argv):
    parser = argument_parser(__doc__)
    parser.add_argument("seeds", type=int, help="number of runs, at least 2")
    parser.add_argument("--run_id", default="repeat", help="name of the series, default: repeat")
    parser.add_argument("--log_dir", type=Path, default="logs", help="default: logs")
    options, rest = parser.parse_known_args(argv)
    recipe, settings = recipe_and_settings(rest)
    require(options.seeds > 1, f"{options.seeds} run has no standard deviation: train at least 2")
    chosen = [argument for argument in settings if re.match("--(seed|resume)\\b", argument)]
    require(not chosen, f"repeat chooses seed and resume itself: leave out {' '.join(chosen)}")
    args = train_gpt2.parse_args(settings, recipe)  # ends with a sentence if it is wrong
    names = {seed: f"{options.run_id}_seed{seed}" for seed in range(1, options.seeds + 1)}
    for name in names.values():
        folder = options.log_dir / name
        if train_gpt2.checkpoints_in(folder) or (folder / "model.pt").exists():
            run = read(options.log_dir / f"{name}.txt")
            check_version(run, recipe)
            check_settings(run, args)
    runs = []
    for seed, name in names.items():
        chosen = [f"--log_dir={options.log_dir}", f"--run_id={name}", f"--seed={seed}"]
        runs.append(train(options.log_dir / f"{name}.txt", recipe, [*settings, *chosen]))
    target = runs[0].settings["target_val_loss"] or None  # 0 means none
    check([(options.run_id, runs)], target, options.seeds)
    losses = [run.val_loss for run in runs]
    print(losses_table([(options.run_id, losses)]))
    if target:
        against_target(options.run_id, losses, target)
    else:
        print(f"\nThe mean's 95% interval is {interval_of_mean(losses)}.")


if __name__ == "__main__":
    command(main)
