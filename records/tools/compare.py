"""Is it real? Tests on validation losses of repeated runs, from their logs alone.

    python records/tools/compare.py LOG... --target 1.32 --n 10     # is the mean loss below it?
    python records/tools/compare.py LOG... --against LOG... --n 5   # is A's mean below B's?

LOG as for report.py. --n is the number of runs a side that was fixed before them; only with it a
verdict is given, and "record" is said only when p is below --alpha; without it the status is 0.
Refused with status 1: another number of runs than --n, runs that were cut or diverged, a seed or a
run twice, settings, source or torch that vary in a group, runs resumed under another header, sides
that differ in data hashes, validation tokens, context, target or hardware, a side of runs that
were prolonged against one of runs in one go, and a better side that read more tokens. Old and new
scripts hash the training data in two ways (16 and 12 digits): such sides must have as many tokens.
Lines in which the sources differ go to stderr. Losses: nats a token.
t-tests: scipy.stats; the least n: from the noncentral t distribution, for 90% power.
"""

import argparse
import difflib
import itertools
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from report import (
    SAME,
    check_starts,
    collect,
    command,
    dots,
    escaped,
    fact,
    markdown,
    new_figure,
    one_value,
    save,
)
from runlog import INCIDENTAL, packages, require

with packages():
    from scipy import stats

POWER = 0.9  # of the least n
FEWEST, MOST = 2, 100_000  # runs a side
DIFF = 40  # lines shown of the difference of two sources


def check_group(name, runs, n):
    """Raise ValueError unless these runs repeat one experiment, n where that is given."""
    require(len(runs) >= FEWEST, f"{name} has {len(runs)} run: a test needs at least {FEWEST}")
    require(
        n is None or len(runs) == n,
        f"{name} has {len(runs)} runs, but n={n} was fixed before them: give just these {n}, or "
        f"report without --n and claim no record",
    )
    for run in runs:
        check_finished(run)
        for what, of in {
            "settings": lambda run: run.definition(),
            "plan": lambda run: run.planned,
            "source": lambda run: run.sources,
            "torch": lambda run: run.facts.get("torch"),
        }.items():
            require(
                of(run) == of(runs[0]),
                f"{run.path} has another {what} than {runs[0].path}: a group repeats one "
                f"experiment",
            )
    check_starts(runs)
    seeds = [run.seed for run in runs if run.seed is not None]
    twice = sorted({seed for seed in seeds if seeds.count(seed) > 1})
    require(not twice, f"{name} holds the seeds {twice} more than once: one run a seed counts")
    for a, b in itertools.combinations(runs, 2):
        require(
            [point[:2] for point in a.points["train"] + a.points["val"]]
            != [point[:2] for point in b.points["train"] + b.points["val"]],
            f"{a.path} and {b.path} have the same losses at every step: one run, or a script that "
            f"its seed does not change",
        )


def check_finished(run):
    require(
        run.finished,
        f"{run.path} {'diverged' if run.fault == 'diverged' else 'ended'} at step {run.steps} of "
        f"{run.last}: run it to its end, for leaving runs out biases the mean",
    )


def unlike(runs):
    """Raise ValueError if runs cannot be compared; return what their logs leave open."""
    whats = {what: fact(name) for what, name in SAME.items()}
    whats |= {
        "number of validation tokens": lambda run: run.settings.get("val_tokens"),
        "context (sequence_length)": lambda run: run.settings["sequence_length"],
        "hardware": fact("device"),
        "target": lambda run: run.settings.get("target_val_loss"),
        "plans": lambda run: "prolonged" if len(run.planned) > 1 else "in one go",
    }
    unknown = [what for what, of in whats.items() if not one_value(what, of, runs)]
    return unknown + training_data(runs)


def digits(run):
    """Return how many digits the data_hash of a run's script has; 0: it logs none."""
    return max(map(len, run.hashes.values()), default=0)


def training_data(runs):
    """Raise ValueError if the runs read other tokens; return in a list whether that is open.

    data_hash is compared wherever two runs logged it after as many tokens, since fewer steps read
    less of the same stream. Hashes of other lengths are other functions: there the number of all
    training tokens stands in for them.
    """
    kinds = {}
    for run in runs:
        kinds.setdefault(digits(run), []).append(run)
    known = [hashes_agree(of_kind) for of_kind in kinds.values()]
    totals = {run.facts.get("train_tokens") for run in runs}
    known.append(len(kinds) == 1 or (len(totals) == 1 and None not in totals))
    return [] if all(known) else ["training tokens (data_hash)"]


def hashes_agree(runs):
    """Raise ValueError if hashes of one function differ; return whether each run shares one."""
    seen, connected = {}, True
    for run in runs:
        shared = run.hashes.keys() & seen.keys()
        for tokens in shared:
            known, path = seen[tokens]
            require(
                run.hashes[tokens] == known,
                f"the training data differ: data_hash after {tokens:,} tokens is "
                f"{run.hashes[tokens]} in {run.path}, {known} in {path}: compare equal data",
            )
        connected &= bool(shared) or run is runs[0]
        seen |= {tokens: (value, run.path) for tokens, value in run.hashes.items()}
    return connected


def two_functions(a, b):
    """Return a line where two runs hash their data in two ways, else None."""
    lengths = digits(a), digits(b)
    if 0 in lengths or lengths[0] == lengths[1]:
        return None
    totals = dict.fromkeys(run.facts.get("train_tokens", "n/a") for run in (a, b))
    return (
        f"data_hash has {lengths[0]} and {lengths[1]} digits, two functions that do not compare; "
        f"all training tokens: {' and '.join(totals)}{' in both' * (len(totals) == 1)}."
    )


def differences(a, b, but=INCIDENTAL):
    """Return a line on all that sets two runs apart: settings (but some), source, versions."""
    left, right = a.definition(but), b.definition(but)
    changed = [
        f"{name} {left.get(name)!r} against {right.get(name)!r}"
        for name in sorted(left.keys() | right.keys())
        if left.get(name) != right.get(name)
    ]
    names = sorted(a.sources.keys() | b.sources.keys())
    changed += [f"source of {n}" for n in names if a.sources.get(n) != b.sources.get(n)]
    if a.facts.get("torch") != b.facts.get("torch"):
        changed.append(f"torch {a.facts.get('torch')} against {b.facts.get('torch')}")
    return "; ".join(changed) or "nothing"


def source_diff(a, b):
    """Return the lines in which the sources of two runs differ, as a unified diff cut to DIFF."""
    lines = []
    for name in dict.fromkeys([*a.sources, *b.sources]):  # the script first
        old, new = (run.sources.get(name, "").splitlines() for run in (b, a))
        titles = f"{b.path}: {name}", f"{a.path}: {name}"
        lines += difflib.unified_diff(old, new, *titles, n=0, lineterm="")
    more = [f"... and {len(lines) - DIFF} lines more"] if len(lines) > DIFF else []
    return "\n".join(lines[:DIFF] + more)


def least_n(effect, deviations, alpha, power=POWER):
    """Return the runs a side that show a lower mean with that power, one-sided; None: over MOST.

    effect: the difference of means to be shown, > 0; deviations: the standard deviation of one
    group (against a target) or of two, as many runs each (Welch).
    """
    variances = np.square(deviations)
    low, high = FEWEST, MOST
    while low < high:
        n = (low + high) // 2
        # Welch-Satterthwaite with equal n: (n - 1) (v1 + v2)^2 / (v1^2 + v2^2)
        freedom = (n - 1) * variances.sum() ** 2 / np.square(variances).sum()
        shift = effect / math.sqrt(variances.sum() / n)
        reached = stats.nct.sf(stats.t.isf(alpha, freedom), freedom, shift) >= power
        low, high = (low, n) if reached else (n + 1, high)
    return low if low < MOST else None


def describe_groups(groups):
    rows = []
    for name, x in groups.items():
        each = " ".join(f"{loss:.4f}" for loss in x)
        rows.append([name, f"{len(x)}", f"{np.mean(x):.4f}", f"{np.std(x, ddof=1):.4f}", each])
    return markdown(["group", "n", "mean", "std", "each"], rows)


def needed(effect, deviations, options):
    """Return a sentence on the least n for the claimed effect, or for the one seen."""
    claimed = effect if options.effect is None else options.effect
    if claimed <= 0 or not any(deviations):
        return "Least n: n/a, there is no effect to show or no spread."
    n = least_n(claimed, deviations, options.alpha)
    kind = "seen" if options.effect is None else "claimed"
    return (
        f"Least n to show the effect {kind}, {claimed:.4f}, at p < {options.alpha:g} with "
        f"{POWER:.0%} power: {n or f'over {MOST:,}'} {'a side' if len(deviations) > 1 else ''}"
    ).rstrip() + "."


def against_target(name, x, options):
    """Print the one-sided test of mean < target; return p."""
    result = stats.ttest_1samp(x, options.target, alternative="less")
    interval = stats.ttest_1samp(x, options.target).confidence_interval(0.95)
    print(
        f"\nTarget {options.target:g}. One-sided t-test that the mean of {escaped(name)} is below "
        f"it: t={result.statistic:.2f} p={result.pvalue:.2g}; the mean's 95% interval "
        f"{interval.low:.4f} to {interval.high:.4f}.\n"
    )
    print(needed(options.target - np.mean(x), [np.std(x, ddof=1)], options))
    return result.pvalue


def against_group(groups, options):
    """Print Welch's test, one- and two-sided, and the difference's interval; return one-sided p."""
    (x, y), (a, b) = groups.values(), map(escaped, groups)
    two = stats.ttest_ind(x, y, equal_var=False)
    less = stats.ttest_ind(x, y, equal_var=False, alternative="less")
    interval = two.confidence_interval(0.95)
    effect = np.mean(y) - np.mean(x)
    print(
        f"\n{a} minus {b}: {-effect:+.4f}, 95% interval {interval.low:+.4f} to "
        f"{interval.high:+.4f}. Welch's t={two.statistic:.2f} df={two.df:.1f} p={two.pvalue:.2g} "
        f"(two-sided), p={less.pvalue:.2g} (one-sided: {a} is lower).\n"
    )
    print(needed(abs(effect), [np.std(x, ddof=1), np.std(y, ddof=1)], options))
    return less.pvalue


def draw(groups, paths, options):
    """Draw each run's loss, the means, and the target where there is one."""
    figure = new_figure(2.5 + 1.5 * len(groups), 3.5)
    axes = figure.subplots()
    dots(axes, groups, "validation loss, nats a token")
    if options.target:
        axes.axhline(options.target, linestyle="--", color="gray", label=f"target {options.target}")
        axes.legend()
    losses = [f"{name} {x}" for name, x in groups.items()]
    save(figure, options.picture, draw, dots, *losses, *paths, options.target)


def verdict(p, unknown, options):
    """Return the last sentence and the exit status: 1 where a record was asked for and is none."""
    if options.n is None:
        return "No verdict: --n, the number of runs fixed before them, is not given.", 0
    if unknown:
        return f"No record: the logs do not hold the {', '.join(unknown)}.", 1
    if not p < options.alpha:  # also where p is not a number
        return f"No record: p={p:.2g} is not below {options.alpha:g}.", 1
    return f"Record: p={p:.2g} is below {options.alpha:g}, with the n={options.n} fixed before.", 0


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logs", nargs="+", metavar="LOG")
    parser.add_argument("--against", nargs="+", metavar="LOG", help="the other side")
    parser.add_argument("--target", type=float, help="loss that the mean must be below")
    parser.add_argument("--n", type=int, help="runs a side, fixed before the runs")
    parser.add_argument("--alpha", type=float, default=0.01, help="level of p, 0.01")
    parser.add_argument("--effect", type=float, help="claimed difference; default: the one seen")
    parser.add_argument("--picture", help="a .png to draw")
    options = parser.parse_args(argv)
    if (options.target is None) == (options.against is None):
        parser.error("give --target or --against, one of them")
    if not 0 < options.alpha <= 0.01:
        parser.error(f"--alpha={options.alpha} must be above 0 and at most 0.01")
    if options.effect is not None and not options.effect > 0:
        parser.error(f"--effect={options.effect} must be above 0")
    return options


def side(arguments):
    """Return (name, runs) of one side's logs."""
    groups = collect(arguments)
    return " + ".join(groups), [run for runs in groups.values() for run in runs]


def main(argv):
    options = parse(argv)
    sides = [side(logs) for logs in (options.logs, options.against) if logs]
    if len(sides) == 2 and sides[0][0] == sides[1][0]:
        sides = [(f"{name} ({letter})", runs) for (name, runs), letter in zip(sides, "AB")]
    for name, runs in sides:
        check_group(name, runs, options.n)
    every = [run for _, runs in sides for run in runs]
    unknown = unlike(every)
    target = every[0].settings.get("target_val_loss") or None  # 0: none
    require(
        None in (options.target, target) or options.target == target,
        f"--target={options.target} is not the target that the logs name, {target}, and it is to "
        f"be fixed before the runs",
    )
    paths = [run.path.resolve() for run in every]
    require(len(set(paths)) == len(paths), "a log stands on both sides")
    if options.n and options.against:
        (a, runs), (b, others) = sides
        ours, theirs = runs[0].tokens, others[0].tokens
        require(
            ours <= theirs,
            f"{a} read {ours:,} tokens and {b} {theirs:,}: the better side may read fewer, not "
            f"more",
        )
    groups = {name: [run.val_loss for run in runs] for name, runs in sides}
    for name, x in groups.items():
        require(len(set(x)) > 1, f"all losses of {name} are {x[0]}: no spread, no test")
    print(describe_groups(groups))
    if options.picture:
        draw(groups, [run.path for run in every], options)
    if options.against:
        a, b = sides[0][1][0], sides[1][1][0]
        print(f"\nThey differ in: {escaped(differences(a, b))}.")
        if line := two_functions(a, b):
            print(f"\n{line}")
        if a.sources != b.sources:
            print(source_diff(a, b), file=sys.stderr)
        p = against_group(groups, options)
    else:
        p = against_target(*groups.popitem(), options)
    sentence, status = verdict(p, unknown, options)
    print(f"\n{sentence}")
    return status


if __name__ == "__main__":
    command(main)
