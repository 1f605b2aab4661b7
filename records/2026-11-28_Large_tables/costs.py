"""Print what a large table of pairs of tokens costs on GPUs. Planned, not measured.

    python costs.py

Tables, gradients and AdamW's states are bfloat16. The rates of the GPUs, and the fractions of them
that kernels are assumed to reach, are those of records/tools/plan.py.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "records" / "modern"), str(ROOT / "records" / "tools")]
import gpu_compiler  # noqa: E402
import plan  # noqa: E402
from report import markdown  # noqa: E402

TOKENS = 2**18  # of a step
CHANNELS = 768
BYTES = 2  # of a bfloat16 number
KEY_BYTES = 8


def costs(rows, gpu, world_size):
    """Return {quantity: value} for a step; milliseconds, or GB for memory."""
    table_bytes = rows * CHANNELS * BYTES
    bandwidth = plan.STREAM_SHARE * gpu.bandwidth
    gathered_bytes = TOKENS * (KEY_BYTES + CHANNELS * BYTES)
    on_others = (world_size - 1) / world_size  # the fraction of the data that other ranks have
    # Reads the gradient of each row; reads and writes its sum.
    scattered_bytes = 3 * TOKENS * CHANNELS * BYTES
    scatter_bandwidth = plan.SCATTER_SHARE * gpu.bandwidth
    return {
        "memory, GB": 4 * table_bytes / 1e9,  # weights, gradients and two states
        # AdamW reads four of these and writes three; the gradient is set to zero first.
        "AdamW, ms": 1e3 * 8 * table_bytes / bandwidth,
        "dense: all-reduce, ms": 1e3 * 2 * on_others * table_bytes / gpu.bus,
        "dense: scatter, ms": 1e3 * scattered_bytes / world_size / scatter_bandwidth,
        "gathered: all-gather, ms": 1e3 * on_others * gathered_bytes / gpu.bus,
        "gathered: scatter, ms": 1e3 * scattered_bytes / scatter_bandwidth,
    }


def main():
    rows = []
    for name, device, world_size in ("8 x H100", "H100", 8), ("1 x 4090", "4090", 1):
        for size in 251_520, 1_000_000, 4_000_000:  # the first: preset modern
            values = costs(size, gpu_compiler.GPUS[device], world_size)
            rows.append([name, f"{size:,}", *(f"{value:.1f}" for value in values.values())])
    print(markdown(["GPUs", "rows", *values], rows))


if __name__ == "__main__":
    main()
