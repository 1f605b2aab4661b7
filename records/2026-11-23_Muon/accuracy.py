"""Compare the error of Newton-Schulz with that of commit c1b9612.

    python records/2026-11-23_Muon/accuracy.py

The error is the relative Frobenius norm of the difference from the same five iterations in
float64, in percent, and the mean of two matrices. Each cell: c1b9612, now, now / c1b9612.
"""

import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "bench")]
from bench_muon import load_script, script_at  # noqa: E402

SHAPES = [
    (128, 128), (128, 512), (512, 128), (256, 256), (256, 1024), (1024, 256),
    (768, 768), (768, 3072), (3072, 768), (64, 96), (31, 400), (1000, 17),
]  # fmt: skip
SCALES = [1e-5, 1e-3, 1.0, 1e3, 1e15, 1e30]


def reference(G):
    """Five Newton-Schulz iterations in float64, as in Keller Jordan's definition."""
    X = G.double() / torch.linalg.matrix_norm(G.double())
    for _ in range(5):
        A = X @ X.mT
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X


def main():
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        before = load_script(script_at("c1b9612", folder)).zeropower_via_newtonschulz5
        now = load_script(script_at(None, folder)).zeropower_via_newtonschulz5
    for dtype in (torch.bfloat16, torch.float32):
        print(f"\nmatmuls in {dtype}; scale of the input:")
        print(f"{'shape':>11s} " + " ".join(f"{scale:^21g}" for scale in SCALES))
        for shape in SHAPES:
            cells = []
            for scale in SCALES:
                errors = {before: 0.0, now: 0.0}
                for seed in range(2):
                    generator = torch.Generator().manual_seed(seed)
                    G = torch.randn(shape, generator=generator) * scale
                    exact = reference(G)
                    for orthogonalize in errors:
                        difference = orthogonalize(G, dtype).double() - exact
                        errors[orthogonalize] += float(difference.norm() / exact.norm()) / 2
                ratio = errors[now] / errors[before]
                worst = max(worst, ratio)
                cells.append(f"{100 * errors[before]:6.3f} {100 * errors[now]:6.3f} x{ratio:6.3f}")
            print(f"{shape[0]:>5d}x{shape[1]:<5d} " + " ".join(cells))
    print(f"\nlargest ratio: {worst:.3f}")


if __name__ == "__main__":
    main()
