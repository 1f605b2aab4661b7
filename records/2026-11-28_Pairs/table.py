"""Print what each change does to the loss of preset `small`, in pairs of equal seeds."""

import math
import statistics
import sys
from pathlib import Path

from scipy import stats
from train_pairs import FIRST_SEEDS, MORE_SEEDS, ROWS, best_adamw, differences, loss_of

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
    "no_windows": ("+125, for growing windows (13)", 1),
    "no_ngram_table": ("+165 (62)", 1),
    "larger_table": ("better (92)", -1),
    "decay_to_zero": ("not known", None),
    "no_zero_projections": ("worse (before 7)", 1),
    "no_value_tables": ("+220 (14), +33 (63, 70)", 1),
    "no_offset_keys": ("+50 (49)", 1),
    "full_rotary": ("worse (18)", 1),
    "tied_head": ("+10%, with learning rates (8); -55 (51, untied later)", None),
    "earlier_values": ("ours", None),
    "adamw": ("worse (before 7)", 1),
}


def holm(p_values):
    """Return {name: p corrected by Holm's method}."""
    corrected, largest = {}, 0.0
    ranked = sorted(p_values.items(), key=lambda pair: pair[1])
    for rank, (name, p) in enumerate(ranked):
        largest = max(largest, min(1.0, p * (len(p_values) - rank)))
        corrected[name] = largest
    return corrected


def verdict_of(row, mean, p):
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
    steps = f"{per_cent_of_steps(mean, price):+.1f}%"
    reach = reach_of(pairs)
    return [f"{mean:+.4f}", steps, f"{mean - reach:+.4f} to {mean + reach:+.4f}"]


def nats_per_percent(prefix=""):
    """Return the loss that one per cent more steps gains. prefix: "wide_" for 256 channels.

    The gain is assumed to be proportional to the logarithm of the steps.
    """
    runs = f"{prefix}steps_300", f"{prefix}base"
    pairs = [[loss_of(name, seed) for name in runs] for seed in FIRST_SEEDS]
    gains = [half - full for half, full in pairs if None not in (half, full)]
    return statistics.mean(gains) * math.log(1.01) / math.log(2)


def main():
    losses = {seed: loss_of("base", seed) for seed in FIRST_SEEDS + MORE_SEEDS}
    mean, deviation = statistics.mean(losses.values()), statistics.stdev(losses.values())
    price = nats_per_percent()
    print(f"The base, by seed: {', '.join(f'{seed}: {x:.4f}' for seed, x in losses.items())}.")
    print(f"Mean {mean:.4f}, standard deviation {deviation:.4f}, n={len(losses)}.")
    print(f"One per cent more steps gains {price:.4f} nats.")
    print(f"The row adamw is {best_adamw()}.")
    rows = {row: list(differences(row).values()) for row in ROWS}
    means = {row: statistics.mean(pairs) for row, pairs in rows.items()}
    p_values = holm({row: stats.ttest_1samp(pairs, 0).pvalue for row, pairs in rows.items()})
    table = []
    for row in sorted(rows, key=lambda row: -means[row]):
        nats, steps, interval = effect_cells(rows[row], price)
        cells = [row, PUBLIC[row][0], nats, steps, f"{statistics.stdev(rows[row]):.4f}", interval]
        verdict = verdict_of(row, means[row], p_values[row])
        table.append([*cells, f"{len(rows[row])}", f"{p_values[row]:.2g}", verdict])
    head = ["change", "public effect, in steps (record)", "nats", "of the steps", "sd of pairs"]
    head += ["95% interval", "pairs", "p (Holm)", "verdict"]
    print("\n" + markdown(head, table))
    resolved = [row for row in rows if p_values[row] < 0.05]
    signs = [row for row in rows if PUBLIC[row][1] is not None]
    same = [row for row in signs if PUBLIC[row][1] * means[row] > 0]
    excludes_0 = [row for row in signs if abs(means[row]) > reach_of(rows[row])]
    excludes_0_same = [row for row in excludes_0 if row in same]
    print(f"\n{len(resolved)} of the {len(rows)} rows are resolved at 0.05.")
    print(f"{len(signs)} rows have a public sign; {len(same)} of their means have this sign.")
    intervals = f"{len(excludes_0)} have an interval that excludes 0"
    print(
        f"Of the {len(signs)}, {intervals}; {len(excludes_0_same)} of these have the public sign."
    )


if __name__ == "__main__":
    main()
