"""Time square matrix products by dtype: python records/2026-11-21_Muon/products.py"""

import time

import torch

print(
    f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, "
    f"{torch.get_num_threads()} threads"
)
for n in (128, 768):
    spent = {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(n, n).to(dtype)
        times = []
        for _ in range(6):
            start = time.perf_counter()
            a @ a
            times.append(time.perf_counter() - start)
        spent[dtype] = sorted(times[1:])[2]  # the median of five, after a first
    ms = ", ".join(f"{dtype} {1000 * seconds:.3f} ms" for dtype, seconds in spent.items())
    print(f"{n} x {n}: {ms}, ratio {spent[torch.bfloat16] / spent[torch.float32]:.0f}")
