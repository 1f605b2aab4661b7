"""Print what candidates for the recipe do to the loss, in pairs of equal seeds."""

import sys
from pathlib import Path

from table import effect_cells, nats_per_percent
from train_pairs import AGAINST, CANDIDATES, differences

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from report import markdown


def main():
    table = []
    for name in CANDIDATES:
        if name != "wide_base":
            pairs = differences(name)
            listed = ", ".join(f"{seed}: {difference:+.4f}" for seed, difference in pairs.items())
            prefix = "wide_" if name.startswith("wide_") else ""
            effect = effect_cells([*pairs.values()], nats_per_percent(prefix))
            table.append([name, AGAINST.get(name, "base"), listed, *effect])
    head = ["change", "compared with", "nats, by seed", "mean", "of the steps", "95% interval"]
    print(markdown(head, table))


if __name__ == "__main__":
    main()
