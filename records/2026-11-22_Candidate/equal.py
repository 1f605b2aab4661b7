"""Compare the validation losses of equal_time/: python records/2026-11-22_Candidate/equal.py

A: record 7, 1,000 steps; B: the candidate, 840. The first 500 steps have equal tokens and the
full rate. Welch's one-sided test at each; train_time is that of runs of one go.
"""

import re
import statistics
from pathlib import Path

from scipy import stats

FOLDER = Path(__file__).resolve().parent / "equal_time"


def read(path):
    """Return ({step: validation loss}, seconds of training) of a log's own steps."""
    lines = re.findall(r"^step:(\d+)/\d+ val_loss:(\S+) train_time:(\d+)ms", path.read_text(), re.M)
    losses = {int(step): float(loss) for step, loss, _ in lines}
    return losses, int(lines[-1][2]) / 1000


def main():
    sides = {name: [read(FOLDER / f"{name}_round{i}.txt") for i in (1, 2, 3)] for name in "AB"}
    # the candidate's first run goes on from step 600 of one that was begun for 1,000 steps
    begun, _ = read(FOLDER.parent / "equal_tokens" / "candidate_seed1.txt")
    sides["B"][0][0].update({step: begun[step] for step in (250, 500)})
    for title, steps in {
        "250 steps each": (250, 250),
        "500 steps each": (500, 500),
        "the end, 1,000 against 840": (1000, 840),
    }.items():
        a, b = ([losses[step] for losses, _ in sides[n]] for n, step in zip("AB", steps))
        p = stats.ttest_ind(b, a, equal_var=False, alternative="less").pvalue
        difference = statistics.mean(b) - statistics.mean(a)
        print(f"{title}: A {a} B {b} B - A {difference:+.4f}, p={p:.2g}")
    for name in "AB":
        print(f"{name}: s of training", [f"{seconds:.0f}" for _, seconds in sides[name]])


if __name__ == "__main__":
    main()
