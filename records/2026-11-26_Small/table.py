"""Print what each change does to the loss of preset `small`, beside its public effect.

    python table.py

A difference is that of runs with the same seed. Its size in steps follows from the slope of the
loss between 300 and 600 steps. The 95% interval is Student's, for n of 2 or more. The verdict needs
n of 3 or more, and p below 0.05 after Holm's correction for all changes with that many runs.
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

# What leaving the piece out costs in the public records on 8 x H100, in steps
PUBLIC = {
    "no_key_offset": "+50 (record 49)", "no_value_tables": "+220 (14)",
    "no_ngram_table": "+165 (62)",
    "no_normuon": "+15 (41)", "no_cautious_decay": "+40 (43)", "no_softcap": "worse (9, 18)",
    "no_backout": "+90 with other changes (40)", "no_skip": "worse (45)",
    "no_saved_input": "worse (77)", "no_windows": "+125 (13)",
    "no_zero_projections": "worse (before 7)", "no_momentum_warmup": "worse (9)",
    "adamw_every_step": "slower, tokens +3% with another batch (39)", "gelu": "worse (before 7)",
    "no_qk_norm": "worse (before 7)", "adamw_for_muon": "worse (before 7)",
    "full_rotary": "worse (18), against no_key_offset", "no_equal_weights": "ours",
    "public_values": "the public values",
}  # fmt: skip


def losses():
    """Return {change: {seed: loss}} of the finished runs."""
    found = {}
    for path in sorted((HERE / "logs").glob("*.txt")):
        run = runlog.read(path)
        if run.finished:
            found.setdefault(path.stem.rsplit("_seed", 1)[0], {})[run.seed] = run.val_loss
    return found


def main():
    found = losses()
    base = found.pop("base")
    half = found.pop("half_steps", {})
    slope = math.nan
    if common := base.keys() & half.keys():
        slope = statistics.mean(half[seed] - base[seed] for seed in common) / math.log(2)
    values = [*base.values()]
    spread = f", sd {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    print(f"base: {statistics.mean(values):.4f}{spread}, n={len(values)}: {base}")
    print(f"slope: {slope:.3f} nats for each e-fold of the steps\n")
    rows, p_values = [], {}
    for name, of_seed in found.items():
        against = found.get("no_key_offset", {}) if name == "full_rotary" else base
        pairs = [of_seed[seed] - against[seed] for seed in of_seed if seed in against]
        if not pairs:
            continue
        mean, interval = statistics.mean(pairs), "n/a"
        if len(pairs) > 1:
            test = stats.ttest_1samp(pairs, 0.0)
            low, high = test.confidence_interval(0.95)
            interval = f"{low:+.3f} to {high:+.3f}"
            if len(pairs) > 2:
                p_values[name] = test.pvalue
        steps = f"{100 * math.expm1(mean / slope):+.0f}%"
        rows.append([name, PUBLIC.get(name, ""), f"{mean:+.4f}", steps, interval, len(pairs)])
    rejected, shown = True, {}
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda pair: pair[1])):
        rejected = rejected and p * (len(p_values) - rank) < 0.05
        shown[name] = rejected
    head = ["change", "public effect, steps", "nats", "steps here", "95% interval", "n", "verdict"]
    for row in rows:
        verdict = "not resolved"
        if shown.get(row[0]):
            verdict = "worse, shown" if float(row[2]) > 0 else "better, shown"
        row[5:] = [str(row[5]), verdict]
    print(markdown(head, sorted(rows, key=lambda row: -float(row[2]))))


if __name__ == "__main__":
    main()
