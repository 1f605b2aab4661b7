"""Print what each change does to the loss of preset `small`, in pairs of equal seeds."""

import math
import statistics
import sys
from pathlib import Path

from scipy import stats
from train_pairs import (
    FAILED,
    FIRST_SEEDS,
    MORE_SEEDS,
    ROWS,
    best_adamw,
    differences,
    loss_of,
    missing_runs,
    planned_seeds,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from compare import per_cent_of_steps
from report import markdown

# What the change costs on 8xH100, in steps where a public record says so, and its sign: 1 if the
# loss rises, -1 if it falls, None if it is not known. The numbers are those of the records.
PUBLIC = {
    "no_normuon": ("+15 (41)", 1),
    "no_cautious": ("+40, with weight decay (43)", 1),
    "no_saved_input": ("+40 (73, 77)", 1),
    "no_skip": ("+20, with other changes (45)", 1),
    "no_backout": ("+90, with another change (40)", 1),
    "no_softcap": ("worse (9, 18)", 1),
    "no_weight_decay": ("+40 (43)", 1),
    "no_momentum_warmup": ("worse (9)", 1),
    "gelu": ("worse (before 7)", 1),
    "no_qk_norm": ("worse (before 7)", 1),
    "no_windows": ("+125, for its growth (13)", 1),
    "no_ngram_table": ("+165 (62)", 1),
    "larger_table": ("better (92)", -1),
    "decay_to_zero": ("none", None),
    "no_zero_projections": ("worse (before 7)", 1),
    "no_value_tables": ("+220 (14), +33 (63, 70)", 1),
    "no_offset_keys": ("+50 (49)", 1),
    "full_rotary": ("worse (18)", 1),
    "tied_head": ("+10%, with learning rates (8); -55 (51, untied later)", None),
    "earlier_values": ("ours", None),
    "adamw": ("worse (before 7)", 1),
}


def holm(p_values):
    """Return {name: p corrected by Holm for all rows of PUBLIC; those without p count as 1}."""
    corrected, largest = {}, 0.0
    ranked = sorted(p_values.items(), key=lambda pair: pair[1])
    for rank, (name, p) in enumerate(ranked):
        largest = max(largest, min(1.0, p * (len(PUBLIC) - rank)))
        corrected[name] = largest
    return corrected


def verdict_of(row, mean, p):
    missing = [f"{seed}" for seed in planned_seeds(row) if seed not in differences(row)]
    if missing:
        return f"missing: {', '.join(missing)}"
    if p >= 0.05:
        return "not resolved"
    sign = PUBLIC[row][1]
    if sign is None:
        return "worse" if mean > 0 else "better"
    return ("same sign" if sign * mean > 0 else "OPPOSITE SIGN") + " as public"


def reach_of(values):
    """Return half the width of the 95% interval of the mean."""
    deviation = statistics.stdev(values)
    t = stats.t.ppf(0.975, len(values) - 1)
    return t * deviation / math.sqrt(len(values))


def effect_cells(pairs, price):
    """Return the mean difference in nats and in per cent of the steps, and its 95% interval."""
    mean = statistics.mean(pairs)
    steps = f"{per_cent_of_steps(mean, price):+.1f}%" if price else ""
    interval = ""
    if len(pairs) > 1:
        reach = reach_of(pairs)
        interval = f"{mean - reach:+.4f} to {mean + reach:+.4f}"
    return [f"{mean:+.4f}", steps, interval]


def nats_per_percent(prefix=""):
    """Return the loss that one per cent more steps gains, or None before the runs are made.

    The gain is assumed to be proportional to the logarithm of the steps. prefix: "wide_" for
    256 channels.
    """
    runs = f"{prefix}steps_300", f"{prefix}base"
    pairs = [[loss_of(name, seed) for name in runs] for seed in FIRST_SEEDS]
    gains = [half - full for half, full in pairs if None not in (half, full)]
    return statistics.mean(gains) * math.log(1.01) / math.log(2) if gains else None


def main():
    losses = {seed: loss_of("base", seed) for seed in FIRST_SEEDS + MORE_SEEDS}
    losses = {seed: loss for seed, loss in losses.items() if loss is not None}
    print(f"The base, by seed: {', '.join(f'{seed}: {x:.4f}' for seed, x in losses.items())}.")
    if len(losses) > 1:
        mean, deviation = statistics.mean(losses.values()), statistics.stdev(losses.values())
        print(f"Mean {mean:.4f}, standard deviation {deviation:.4f}, n={len(losses)}.")
    price = nats_per_percent()
    if price:
        print(f"One per cent more steps gains {price:.4f} nats.")
    if best_adamw():
        print(f"The row adamw is {best_adamw()}.")
    rows = {row: list(differences(row).values()) for row in ROWS}
    tested = {row: d for row, d in rows.items() if len(d) >= 3 and statistics.stdev(d) > 0}
    complete = [row for row in tested if {*planned_seeds(row)} <= differences(row).keys()]
    corrected = holm({row: stats.ttest_1samp(tested[row], 0).pvalue for row in complete})
    table = []
    for row in sorted(tested, key=lambda row: -statistics.mean(tested[row])):
        d = tested[row]
        nats, steps, interval = effect_cells(d, price)
        cells = [row, PUBLIC[row][0], nats, steps, f"{statistics.stdev(d):.4f}", interval]
        p = corrected.get(row)
        shown_p = f"{p:.2g}" if row in complete else ""
        table.append([*cells, f"{len(d)}", shown_p, verdict_of(row, statistics.mean(d), p)])
    missing = missing_runs()
    head = ["change", "public effect, in steps (record)", "nats", "of the steps", "sd of pairs"]
    head += ["95% interval", "pairs", "p (Holm)", "verdict"]
    print("\n" + markdown(head, table))
    resolved = [row for row in complete if corrected[row] < 0.05]
    signs = [row for row in tested if PUBLIC[row][1] is not None]
    same = [row for row in signs if PUBLIC[row][1] * statistics.mean(tested[row]) > 0]
    excludes_0 = [row for row in signs if abs(statistics.mean(tested[row])) > reach_of(tested[row])]
    excludes_0_same = [row for row in excludes_0 if row in same]
    print(f"\n{len(resolved)} of the {len(complete)} complete rows are resolved at 0.05.")
    if missing:
        print(f"{len(missing)} runs are missing, if the means that are small now stay small.")
    print(f"{len(signs)} rows have a public sign; {len(same)} of their means have this sign.")
    intervals = f"{len(excludes_0)} have an interval that excludes 0"
    print(
        f"Of the {len(signs)}, {intervals}; {len(excludes_0_same)} of these have the public sign."
    )
    for (name, seed), reason in FAILED.items():
        print(f"{name} with seed {seed} was not finished: {reason}.")


if __name__ == "__main__":
    main()
