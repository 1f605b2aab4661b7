"""Test and draw the five runs of this record: python records/2026-11-23_Shakespeare/five.py"""

import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from scipy.stats import ttest_1samp

FOLDER = Path(__file__).parent

figure, axes = plt.subplots(figsize=(7, 4))
final_losses = []
final_seconds = []
for path in sorted(FOLDER.glob("seed*.txt")):
    points = re.findall(r"^step:\d+/\d+ val_loss:(\S+) train_time:(\d+)ms", path.read_text(), re.M)
    losses = [float(loss) for loss, _ in points]
    seconds = [int(ms) / 1000 for _, ms in points]
    axes.plot(seconds[1:], losses[1:], "o-", color="tab:blue", linewidth=1, markersize=3)
    final_losses.append(losses[-1])
    final_seconds.append(seconds[-1])

print("losses:", final_losses)
n = len(final_losses)
print(f"mean {np.mean(final_losses):.4f}, sd {np.std(final_losses, ddof=1):.4f}, n {n}")
rounded_seconds = [round(value) for value in final_seconds]
print("seconds of training:", rounded_seconds, f"median {np.median(final_seconds):.0f}")
for target in (1.4697, 1.45):
    p = ttest_1samp(final_losses, target, alternative="less").pvalue
    print(f"one-sided t-test, mean below {target}: p = {p:.2g}")

axes.plot(180, 1.88, "s", color="tab:orange", label="nanoGPT on a CPU, 3 minutes (its README)")
axes.plot(180, 1.4697, "D", color="tab:red", label="nanoGPT on an A100, 3 minutes (its README)")
axes.plot([], [], "o-", color="tab:blue", label="--preset=text on two CPU cores, five seeds")
axes.set_xlabel("seconds of training")
axes.set_ylabel("validation loss, nats per byte")
axes.set_xlim(0, 200)
axes.legend()
axes.grid(alpha=0.3)
figure.tight_layout()
figure.savefig(FOLDER / "against_nanogpt.png", dpi=110)
