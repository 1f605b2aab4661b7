"""Print what changes do to the loss with 128 and with 256 channels, in pairs of equal seeds."""

import statistics
import sys
from pathlib import Path

from scipy import stats
from table import nats_per_percent, reach_of
from train_pairs import WIDE_ROWS, differences, loss_of, missing_wide_runs

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from compare import per_cent_of_steps
from report import markdown


def effect_of(row, price):
    """Return the mean effect in nats and the cells of a row: nats, per cent, interval, pairs."""
    pairs = list(differences(row).values())
    if not pairs:
        return None, ["", "", "", "0"]
    mean = statistics.mean(pairs)
    steps = f"{per_cent_of_steps(mean, price):+.1f}%" if price else ""
    interval = ""
    if len(pairs) > 1:
        interval = f"{mean - reach_of(pairs):+.4f} to {mean + reach_of(pairs):+.4f}"
    return mean, [f"{mean:+.4f}", steps, interval, f"{len(pairs)}"]


def main():
    narrow_price, wide_price = nats_per_percent(), nats_per_percent("wide_")
    table, effects = [], []
    for row in WIDE_ROWS:
        narrow, narrow_cells = effect_of(row, narrow_price)
        wide, wide_cells = effect_of(f"wide_{row}", wide_price)
        if wide is not None:
            effects.append((narrow, wide))
            kept = "yes" if narrow * wide > 0 else "NO"
            table.append([row, *narrow_cells, *wide_cells, kept])
    losses = [loss_of("wide_base", seed) for seed in (1, 2, 3)]
    shown = ", ".join(f"{loss:.4f}" for loss in losses if loss is not None)
    print(f"The base with 256 channels, seeds 1 to 3: {shown}.")
    if wide_price:
        print(f"One per cent more steps gains {wide_price:.4f} nats with 256 channels.")
    cells = ["nats", "of the steps", "95% interval", "pairs"]
    head = ["change", *[f"{width}: {cell}" for width in (128, 256) for cell in cells], "sign kept"]
    print("\n" + markdown(head, table))
    print(f"\n{sum(a * b > 0 for a, b in effects)} of {len(effects)} signs are kept.")
    if len(effects) == len(WIDE_ROWS):
        print(f"Spearman's correlation of the effects: {stats.spearmanr(effects).statistic:.2f}.")
    if missing := missing_wide_runs():
        print(f"{len(missing)} runs are missing.")


if __name__ == "__main__":
    main()
