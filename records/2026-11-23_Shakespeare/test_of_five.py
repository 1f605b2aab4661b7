"""Test the five runs of this record: python records/2026-11-23_Shakespeare/test_of_five.py

compare.py refuses them, because each seed shuffles the text differently.
"""

import re
from pathlib import Path

import numpy as np
from scipy.stats import ttest_1samp

losses, seconds = [], []
for path in sorted(Path(__file__).parent.glob("seed*.txt")):
    [(loss, ms)] = re.findall(
        r"^step:720/720 val_loss:(\S+) train_time:(\d+)ms", path.read_text(), re.M
    )
    losses.append(float(loss))
    seconds.append(int(ms) / 1000)
print("losses:", losses)
print(f"mean {np.mean(losses):.4f}, sd {np.std(losses, ddof=1):.4f}, n {len(losses)}")
print(
    "seconds of training:", [round(value) for value in seconds], f"median {np.median(seconds):.0f}"
)
for target in (1.4697, 1.45):
    p = ttest_1samp(losses, target, alternative="less").pvalue
    print(f"one-sided t-test, mean below {target}: p = {p:.2g}")
