"""Compare bfloat16 losses of one process, of smaller micro-batches, and of two processes.

    python records/2026-11-25_Wishes/world.py

For each of ten seeds, trains a small run in three ways, which see the same tokens in the same
order: as one process, as one process with half of the device_batch_size, and as two processes.
Prints the validation losses after 6 and 12 steps, then the differences from the first way.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SETTINGS = [
    *("--preset=cpu", "--dtype=bfloat16", "--compile=False", "--target_val_loss=0"),
    *("--num_iterations=12", "--warmdown_iters=8", "--batch_size=16", "--sequence_length=128"),
    *("--ngram_rows=16384", "--val_tokens=16384", "--val_loss_every=6"),
]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
WAYS = {
    "one process": ([], []),
    "half the micro-batch": ([], ["--device_batch_size=8"]),
    "two processes": (TORCHRUN, []),
}


def losses(launcher, settings):
    """Train and return the validation losses after 6 and 12 steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *launcher, "train_gpt2.py", *SETTINGS, *settings]
        command.append(f"--log_dir={folder}")
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    _, *after = re.findall(r"^step:\S+ val_loss:(\S+)", run.stdout, re.M)
    return [float(loss) for loss in after]


def main():
    print(*SETTINGS, flush=True)
    results = {way: [] for way in WAYS}
    for seed in range(1, 11):
        for way, (launcher, settings) in WAYS.items():
            results[way].append(losses(launcher, [*settings, f"--seed={seed}"]))
            print(f"seed {seed}, {way}:", *results[way][-1], flush=True)
    first, *others = results
    for way in others:
        for i, step in enumerate((6, 12)):
            differences = [
                row[i] - reference[i] for row, reference in zip(results[way], results[first])
            ]
            mean, sd = statistics.mean(differences), statistics.stdev(differences)
            print(
                f"{way} - {first}, step {step}: mean {mean:+.4f}, sd {sd:.4f}, "
                f"standard error {sd / 10**0.5:.4f}, range {min(differences):+.4f} to "
                f"{max(differences):+.4f}"
            )
    spread = statistics.stdev(row[1] for row in results[first])
    print(f"standard deviation of {first} over the seeds, step 12: {spread:.4f}")


if __name__ == "__main__":
    main()
