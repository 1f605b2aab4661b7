"""Print what changes do to the loss with 128 and with 256 channels, in pairs of equal seeds."""

import statistics
import sys
from pathlib import Path

from scipy import stats
from table import effect_cells, nats_per_percent
from train_pairs import WIDE_ROWS, WIDE_SEEDS, differences, loss_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from report import markdown


def main():
    narrow_price, wide_price = nats_per_percent(), nats_per_percent("wide_")
    table, effects = [], []
    for row in WIDE_ROWS:
        narrow, wide = ([*differences(name).values()] for name in (row, f"wide_{row}"))
        means = statistics.mean(narrow), statistics.mean(wide)
        effects.append(means)
        cells = [*effect_cells(narrow, narrow_price), f"{len(narrow)}"]
        cells += [*effect_cells(wide, wide_price), f"{len(wide)}"]
        table.append([row, *cells, "yes" if means[0] * means[1] > 0 else "NO"])
    losses = {seed: loss_of("wide_base", seed) for seed in WIDE_SEEDS}
    shown = ", ".join(f"{seed}: {loss:.4f}" for seed, loss in losses.items())
    print(f"The base with 256 channels, by seed: {shown}.")
    print(f"One per cent more steps gains {wide_price:.4f} nats with 256 channels.")
    cells = ["nats", "of the steps", "95% interval", "pairs"]
    head = ["change", *[f"{width}: {cell}" for width in (128, 256) for cell in cells], "sign kept"]
    print("\n" + markdown(head, table))
    print(f"\n{sum(a * b > 0 for a, b in effects)} of {len(effects)} signs are kept.")
    print(f"Spearman's correlation of the effects: {stats.spearmanr(effects).statistic:.2f}.")


if __name__ == "__main__":
    main()
