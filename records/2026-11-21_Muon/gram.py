"""How the iteration on the Gram matrix errs in bf16, by where it is restarted.

    python records/2026-11-21_Muon/gram.py

Relative error against float64 (Frobenius) of five iterations whose products are rounded to bf16.
Rounds "2+3": two iterations on one Gram matrix, then three on a new one; "1+1+1+1+1" is the plain
iteration; "5" has no restart.
"""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from test_muon import exact_orthogonalization, spectra  # noqa: E402

from train_gpt2 import NS_COEFFICIENTS  # noqa: E402

SPLITS = [(1, 1, 1, 1, 1), (2, 2, 1), (2, 3), (3, 2), (5,)]


def rounded(x):
    return x.bfloat16().float()


def iterate(G, schedule, splits):
    X = rounded(G / G.norm())
    eye, step = torch.eye(len(X)), 0
    for split in splits:
        A, Q = rounded(X @ X.T), None
        for last in [False] * (split - 1) + [True]:
            a, b, c = schedule[min(step, len(schedule) - 1)]
            B = rounded(b * A + c * A @ A)
            Q = rounded(a * eye + B) if Q is None else rounded(a * Q + B @ Q)
            if not last:
                A = rounded(a * A + B @ A)
                A = rounded(a * A + A @ B)
            step += 1
        X = rounded(Q @ X)
    return X


for m, n in [(128, 512), (256, 1024)]:
    for name, schedule in NS_COEFFICIENTS.items():
        heads = ["+".join(map(str, splits)) for splits in SPLITS]
        print(f"{m} x {n}, {name:16s}" + "".join(f"{head:>11s}" for head in heads))
        for spectrum, G in spectra(m, n).items():
            exact = exact_orthogonalization(G, name)
            errors = [
                (iterate(G, schedule, splits) - exact).norm() / exact.norm() for splits in SPLITS
            ]
            print(f"  {spectrum:24s}" + "".join(f"{error:11.3g}" for error in errors))
