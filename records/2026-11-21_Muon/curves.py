"""Draw what five iterations make of a singular value, for each coefficient schedule.

python records/2026-11-21_Muon/curves.py     # prints a table, writes curves.png beside itself
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent.parent))
from train_gpt2 import NS_COEFFICIENTS  # noqa: E402


def after(s, schedule, steps=5):
    for i in range(steps):
        a, b, c = schedule[min(i, len(schedule) - 1)]
        s = a * s + b * s**3 + c * s**5
    return s


s = np.geomspace(1e-4, 1, 2000)
figure = Figure(figsize=(6, 4), layout="constrained")
axes = figure.subplots()
print("singular value over the Frobenius norm -> after five iterations")
samples = np.array([0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0])
print(f"{'':14s}" + "".join(f"{x:9g}" for x in samples))
for name, schedule in NS_COEFFICIENTS.items():
    axes.plot(s, after(s, schedule), label=name)
    print(f"{name:14s}" + "".join(f"{y:9.3f}" for y in after(samples, schedule)))
axes.axhline(1, color="gray", linewidth=0.5)
axes.set(xscale="log", xlabel="singular value / Frobenius norm", ylabel="after five iterations")
axes.legend()
figure.savefig(FOLDER / "curves.png", dpi=90)
