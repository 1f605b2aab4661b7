"""Print what each change does to the loss of preset `small`, beside its effect in public records.

    python table.py

All arms are assumed to have the same standard deviation between seeds, which is pooled from the
arms with several seeds. A difference is that of the means of an arm and of the base; its interval
is Student's, and p is corrected by Holm for all rows. In per cent of the steps, it is the change of
num_iterations that would make the same difference, by the slope between 300 and 600 steps.
"""

import math
import statistics
import sys
from pathlib import Path

from scipy import stats

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tools"))
import runlog  # noqa: E402
from report import markdown  # noqa: E402

# What the change costs on 8xH100, in steps where a public record says so, and its sign: 1 if the
# loss rises, -1 if it falls, None if it is not known. The numbers are those of the records.
PUBLIC = {
    "no_key_offset": ("+50 (record 49)", 1),
    "no_value_tables": ("+220 (14), +33 (63, 70)", 1),
    "no_ngram_table": ("+165 (62)", 1),
    "no_normuon": ("+15 (41)", 1),
    "no_weight_decay": ("+40 (43)", 1),
    "no_softcap": ("worse (9, 18)", 1),
    "no_backout": ("+90, with another change (40)", 1),
    "no_skip": ("+20, with other changes (45)", 1),
    "no_saved_input": ("+40 (73, 77)", 1),
    "no_windows": ("+125, its growth (13)", 1),
    "no_zero_projections": ("worse (before 7)", 1),
    "no_momentum_warmup": ("worse (9)", 1),
    "adamw_every_step": ("with a smaller batch (39)", None),
    "gelu": ("worse (before 7)", 1),
    "no_qk_norm": ("worse (before 7)", 1),
    "adamw": ("worse (before 7)", 1),
    "full_rotary": ("worse (18)", 1),
    "tied_head": ("+10%, with rates (8); -55 (51, untied later)", None),
    "equal_keys": ("ours", None),
    "earlier_values": ("ours", None),
}


def finished_losses():
    """Return {arm: [losses]} of the finished runs."""
    losses = {}
    for path in sorted((HERE / "logs").glob("*.txt")):
        run = runlog.read(path)
        if run.finished:
            losses.setdefault(path.stem.rsplit("_seed", 1)[0], []).append(run.val_loss)
    return losses


def pooled_deviation(arms):
    """Return the standard deviation within arms, and its degrees of freedom."""
    squares = freedom = 0
    for values in arms:
        squares += sum((value - statistics.mean(values)) ** 2 for value in values)
        freedom += len(values) - 1
    return math.sqrt(squares / freedom), freedom


def holm(p_values):
    """Return {name: corrected p}."""
    corrected, largest = {}, 0.0
    ranked = sorted(p_values.items(), key=lambda pair: pair[1])
    for rank, (name, p) in enumerate(ranked):
        largest = max(largest, min(1.0, p * (len(ranked) - rank)))
        corrected[name] = largest
    return corrected


def print_changes(losses):
    arms = {name: values for name, values in losses.items() if name in PUBLIC}
    rates = [name for name in losses if name.startswith("adamw_0")]
    if rates:
        best = min(rates, key=lambda name: statistics.mean(losses[name]))
        arms["adamw"] = losses[best]
        print(f"adamw is {best}, the best of {', '.join(rates)}.")
    deviation, freedom = pooled_deviation([losses["base"], *arms.values()])
    print(f"base: {statistics.mean(losses['base']):.4f}, n={len(losses['base'])}.")
    print(f"Standard deviation between seeds, pooled: {deviation:.4f} ({freedom} degrees).")
    slope = math.nan
    if "steps_300" in losses:
        half = statistics.mean(losses["steps_300"])
        slope = (half - statistics.mean(losses["base"])) / math.log(2)
    print(f"Slope: {slope:.3f} nats for each e-fold of the steps.\n")
    rows, p_values = {}, {}
    for name, values in arms.items():
        against = losses["no_key_offset" if name == "full_rotary" else "base"]
        difference = statistics.mean(values) - statistics.mean(against)
        error = deviation * math.sqrt(1 / len(values) + 1 / len(against))
        reach = stats.t.ppf(0.975, freedom) * error
        p_values[name] = 2 * stats.t.sf(abs(difference) / error, freedom)
        medians = statistics.median(values) - statistics.median(against)
        higher = all(value > max(against) for value in values)
        lower = all(value < min(against) for value in values)
        apart = "all above" if higher else "all below" if lower else ""
        rows[name] = (difference, reach, len(values), medians, apart)
    corrected = holm(p_values)
    table = []
    ranked = sorted(rows.items(), key=lambda row: -row[1][0])
    for name, (difference, reach, n, medians, apart) in ranked:
        public, sign = PUBLIC[name]
        verdict = "not resolved"
        if corrected[name] < 0.05:
            verdict = "worse" if difference > 0 else "better"
            if sign is not None:
                verdict = ("same sign" if sign * difference > 0 else "OPPOSITE SIGN") + " shown"
        steps = f"{100 * math.expm1(difference / slope):+.0f}%"
        interval = f"{difference - reach:+.3f} to {difference + reach:+.3f}"
        p = f"{corrected[name]:.2g}"
        cells = [name, public, f"{difference:+.4f}", steps, interval, str(n), p, verdict]
        table.append([*cells, f"{medians:+.4f}", apart])
    head = ["change", "public effect of it, in steps", "nats", "steps here", "95% interval", "n"]
    print(markdown([*head, "p", "verdict", "medians", "runs and base"], table))


def print_widths(losses):
    rows = []
    for width in (64, 128, 256):
        suffix = "" if width == 128 else f"_{width}"
        names = [f"gpt2{suffix}", f"steps_180{suffix}", f"steps_300{suffix}"]
        if not all(name in losses for name in names):
            continue
        goal, first, second = (statistics.mean(losses[name]) for name in names)
        slope = (first - second) / math.log(300 / 180)
        steps = 180 * math.exp((first - goal) / slope)
        cells = [goal, first, second]
        rows.append([str(width), *(f"{x:.4f}" for x in cells), f"{steps:.0f}", f"{steps / 6:.0f}%"])
    head = ["width", "record 7's model, 600 steps", "modern, 180", "modern, 300"]
    print(markdown([*head, "steps to the same loss", "of its tokens"], rows))


def main():
    losses = finished_losses()
    print_changes(losses)
    print()
    print_widths(losses)


if __name__ == "__main__":
    main()
