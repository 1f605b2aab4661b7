"""Test whether a difference in validation loss is significant, from the logs of repeated runs.

    python records/tools/compare.py LOG... --target 1.35 --n 5      # is the mean loss below it?
    python records/tools/compare.py LOG... --against LOG... --n 5   # is A's mean below B's?

LOG as for report.py. With equal sizes, runs of one seed read the same batches and start from the
same weights. So if both sides have the same seeds, the test is on the differences of the pairs; if
they have no seed in common, it is Welch's test. If both sides have the same name, they are called
first and second. If the runs logged a target, --target must be equal to it.

--n is the number of runs per side that was fixed before the runs. Without it there is no verdict,
and the exit status is 0. With it, the verdict is "Significant" and the status 0 if the one-sided p
is below 0.01; otherwise, the verdict is "Not significant" and the status 1. --nats_per_percent is
the loss that one per cent more steps saves; with it, a difference is also printed as the change in
the number of steps that would cancel it, if the loss is linear in the logarithm of the steps.

The tool rejects unfinished, diverged or edited runs, a run or a seed that occurs twice on a side,
sides that share some of their seeds but not all, and groups whose settings, source or torch version
vary. It also rejects sides that differ in data, validation tokens, sequence_length, number of
processes or dtype. With --n, it also rejects a first group that read more tokens than the second.
Losses are in nats per token.
"""

import numpy as np
from report import check_equal, collect, markdown
from runlog import COMPARABLE, MAY_VARY, argument_parser, command, packages, require

with packages():
    from scipy import stats

ALPHA = 0.01  # a significant difference has a p below this


def side(logs):
    """Return the name and the runs of one side, for LOG arguments."""
    groups = collect(logs)
    return " + ".join(groups), [run for runs in groups.values() for run in runs]


# ---- Checks -------------------------------------------------------------------------------------
def differences(run, other):
    """Describe how two runs differ: settings (except MAY_VARY), source, torch."""
    left, right = run.settings, other.settings
    changed = [
        f"{name} {left.get(name)!r} against {right.get(name)!r}"
        for name in sorted((left.keys() | right.keys()) - MAY_VARY)
        if left.get(name) != right.get(name)
    ]
    if run.source != other.source:
        changed.append("source of the script")
    if run.facts.get("torch") != other.facts.get("torch"):
        changed.append(f"torch {run.facts.get('torch')} against {other.facts.get('torch')}")
    return "; ".join(changed)


def check_finished(run):
    """Raise ValueError for a run without a valid result: leaving it out would bias the mean."""
    require(
        run.fault != "diverged",
        f"{run.path} diverged by step {run.last_step}, so its side has no mean: change the "
        "settings, and train all of its seeds again",
    )
    require(
        run.fault != "unfinished",
        f"{run.path} is unfinished at step {run.last_step} of {run.num_iterations}: resume it, "
        "because every run counts",
    )
    edit = "the script was edited between two starts, so the result belongs to no version"
    require(not run.edited, f"{run.path}: {edit}")


def check_repetitions(runs):
    """Raise ValueError unless these are finished runs of one experiment with different seeds."""
    for run in runs:
        check_finished(run)
        found = differences(run, runs[0])
        require(not found, f"{run.path} differs from {runs[0].path} in: {found}")
    seeds = sorted(run.seed for run in runs)
    require(len(set(seeds)) == len(seeds), f"runs of one group share a seed: {seeds}")


def check(sides, target, n):
    """Raise ValueError if the sides cannot be tested."""
    for name, runs in sides:
        require(len(runs) > 1, f"{name} has {len(runs)} run: a test needs at least 2")
        require(
            n in (None, len(runs)),
            f"{name} has {len(runs)} runs, but n={n} was fixed in advance: give exactly the {n} "
            "runs, or omit --n for no verdict",
        )
        check_repetitions(runs)
    every = [run for _, runs in sides for run in runs]
    require(len({run.path.resolve() for run in every}) == len(every), "a log is on both sides")
    logged = every[0].settings.get("target_val_loss")
    is_target_of_runs = target is None or not logged or target == logged  # 0 means no target
    require(
        is_target_of_runs,
        f"--target={target} is not the target of these runs: pass --target={logged}, which was "
        "fixed before them",
    )
    for what, value_of in COMPARABLE.items():
        check_equal(what, value_of, every)
    if n and len(sides) > 1:
        (a, runs), (b, others) = sides
        most = max(run.tokens for run in runs)
        fewest = min(run.tokens for run in others)
        require(
            most <= fewest,
            f"{a} read {most:,} tokens and {b} {fewest:,}: the first side may read fewer, not more",
        )


def pairs_of(runs, others):
    """Return [(run, other)] with equal seeds, or [] if the sides have no seed in common."""
    by_seed = {other.seed: other for other in others}
    seeds = {run.seed for run in runs}
    pairs = [(run, by_seed[run.seed]) for run in runs if run.seed in by_seed]
    alone = sorted(seeds ^ by_seed.keys())
    fix = "give the same seeds on both sides, for a test of pairs, or no common seed"
    require(not (pairs and alone), f"the seeds {alone} are on one side only: {fix}")
    return sorted(pairs, key=lambda pair: pair[0].seed)


def check_spread(name, values):
    """Raise ValueError if all values are equal."""
    require(len(set(values)) > 1, f"all {name} are {values[0]}: a test needs some spread")


# ---- Tests --------------------------------------------------------------------------------------
def losses_table(groups):
    """Return a row per group (name, losses)."""
    rows = []
    for name, x in groups:
        each = " ".join(f"{loss:.4f}" for loss in x)
        rows.append([name, f"{len(x)}", f"{np.mean(x):.4f}", f"{np.std(x, ddof=1):.4f}", each])
    return markdown(["group", "n", "mean", "std", "each"], rows)


def interval_of_mean(x):
    """Return the 95% t-interval of the mean, as text."""
    if len(set(x)) == 1:
        return "unknown, because all losses are equal"
    low, high = stats.ttest_1samp(x, 0).confidence_interval(0.95)
    return f"{low:.4f} to {high:.4f}"


def against_target(name, x, target):
    """Print the one-sided t-test of mean < target; return p."""
    check_spread(f"losses of {name}", x)
    result = stats.ttest_1samp(x, target, alternative="less")
    print(
        f"\nTarget {target:g}. One-sided t-test that the mean of {name} is below it: "
        f"t={result.statistic:.2f} p={result.pvalue:.2g}; the mean's 95% interval "
        f"{interval_of_mean(x)}."
    )
    return result.pvalue


def against_group(a, x, b, y, nats_per_percent=None):
    """Print Welch's test, one- and two-sided, and the difference's interval; return one-sided p."""
    check_spread(f"losses of {a}", x)
    check_spread(f"losses of {b}", y)
    two = stats.ttest_ind(x, y, equal_var=False)
    less = stats.ttest_ind(x, y, equal_var=False, alternative="less")
    print("\nNo seed is on both sides, so the runs are not paired.")
    print_difference(a, b, np.mean(x) - np.mean(y), two, less, "Welch's", nats_per_percent)
    return less.pvalue


def in_pairs(a, b, pairs, nats_per_percent=None):
    """Print the differences of pairs of runs and Student's test on them; return one-sided p."""
    x = [run.val_loss for run, _ in pairs]
    y = [other.val_loss for _, other in pairs]
    d = np.round(np.subtract(x, y), 4)  # as in the logs, so that equal differences are equal
    check_spread("differences of the pairs", d.tolist())
    rows = [
        [f"{run.seed}", f"{run.val_loss:.4f}", f"{other.val_loss:.4f}", f"{difference:+.4f}"]
        for (run, other), difference in zip(pairs, d)
    ]
    print(f"\n{markdown(['seed', a, b, 'difference'], rows)}")
    sizes = [run.facts.get("parameters") for run in pairs[0]]
    if None not in sizes and sizes[0] != sizes[1]:
        counts = f"{sizes[0]} and {sizes[1]} parameters"
        print(f"\nThe sides have {counts}, so the runs of a pair start from different weights.")
    two = stats.ttest_1samp(d, 0)
    less = stats.ttest_1samp(d, 0, alternative="less")
    print(f"\n{len(d)} pairs of runs with equal seeds; standard deviation {np.std(d, ddof=1):.4f}.")
    print_difference(a, b, np.mean(d), two, less, "Student's", nats_per_percent)
    return less.pvalue


def print_difference(a, b, mean, two, less, test, nats_per_percent):
    """Print a mean difference with its interval and p. two, less: two- and one-sided results."""
    low, high = two.confidence_interval(0.95)
    print(
        f"{a} minus {b}: {mean:+.4f}, 95% interval {low:+.4f} to {high:+.4f}. "
        f"{test} t={two.statistic:.2f} df={two.df:.1f} p={two.pvalue:.2g} (two-sided), "
        f"p={less.pvalue:.2g} (one-sided: {a} is lower)."
    )
    if nats_per_percent:
        values = [per_cent_of_steps(nats, nats_per_percent) for nats in (mean, low, high)]
        percent = [f"{value:+.1f}%" for value in values]
        interval = f"{percent[1]} to {percent[2]}"
        print(f"In per cent of the steps (minus: {a} saves steps): {percent[0]}, {interval}.")


def per_cent_of_steps(nats, nats_per_percent):
    """Return by how many per cent more steps (negative: fewer) lower the loss by nats.

    The loss is assumed to be linear in the logarithm of the steps.
    """
    return 100 * (1.01 ** (nats / nats_per_percent) - 1)


def verdict(p, n):
    """Return the verdict and the exit status: 1 if --n was given and it is not significant."""
    if n is None:
        return "No verdict: pass --n, the number of runs fixed in advance.", 0
    if p < ALPHA:
        return f"Significant: p={p:.2g} is below {ALPHA:g}, with n={n} fixed in advance.", 0
    return f"Not significant: p={p:.2g} is not below {ALPHA:g}.", 1


# ---- Command line -------------------------------------------------------------------------------
def main(argv):
    parser = argument_parser(__doc__)
    parser.add_argument("logs", nargs="+", metavar="LOG")
    other = parser.add_mutually_exclusive_group(required=True)
    other.add_argument("--against", nargs="+", metavar="LOG", help="the other side")
    other.add_argument("--target", type=float, help="loss that the mean must be below")
    parser.add_argument("--n", type=int, help="number of runs per side, fixed in advance")
    help = "with --against: loss that one per cent more steps saves"
    parser.add_argument("--nats_per_percent", type=float, help=help)
    options = parser.parse_args(argv)
    if options.nats_per_percent is not None:
        require(options.nats_per_percent > 0, "--nats_per_percent must be more than 0")
        require(options.against, "--nats_per_percent needs --against")
    if options.target is not None:
        require(np.isfinite(options.target), "--target must be a finite number")
    sides = [side(options.logs)]
    if options.against:
        sides.append(side(options.against))
        (a, runs), (b, others) = sides
        if a == b:
            sides = [("first", runs), ("second", others)]
    check(sides, options.target, options.n)
    groups = [(name, [run.val_loss for run in runs]) for name, runs in sides]
    print(losses_table(groups))
    if options.against:
        (a, runs), (b, others) = sides
        print(f"\nThey differ in: {differences(runs[0], others[0]) or 'nothing'}.")
        pairs = pairs_of(runs, others)
        if pairs:
            p = in_pairs(a, b, pairs, options.nats_per_percent)
        else:
            p = against_group(*groups[0], *groups[1], options.nats_per_percent)
    else:
        p = against_target(*groups[0], options.target)
    sentence, status = verdict(p, options.n)
    print(f"\n{sentence}")
    return status


if __name__ == "__main__":
    command(main)
