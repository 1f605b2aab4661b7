"""Time a training step of commit 70c57ce and of this one on a CPU, in alternating runs.

    python time_steps.py BEFORE AFTER ROUNDS

BEFORE and AFTER are folders with the two commits. The current folder holds the data: torch_sources
and small, as data/prepare.py makes them, and two shards of GPT-2's tokens in data/fw. A round runs
both commits in random order. Prints the mean time of a step, without the first two of a run, and
the median, minimum and maximum of the ratios.
"""

import random
import re
import shutil
import statistics
import subprocess
import sys

RECORD7 = (
    "--preset=24gb --device=cpu --batch_size=8 --sequence_length=512 --val_loss_every=0 "
    "--val_tokens=4096 --target_val_loss=0 "
)
SMALL = "--preset=small --val_tokens=4096 "
CASES = {  # steps, settings before and after, script after
    "cpu (4 layers of 128, bytes, eager)": (
        12,
        *2 * [
            RECORD7 + "--compile=False --vocab_size=257 --n_layer=4 --n_head=1 --n_embd=128 "
            "--train_files=data/torch_sources/train_*.bin --shuffle=True --warmdown_fraction=0.5 "
            "--val_files=data/torch_sources/val_*.bin --learning_rate=0.004 "
            "--muon_learning_rate=0.0015"
        ],
        "train_gpt2.py",
    ),
    "4 layers of 256, 50,304 tokens, compiled": (
        6,
        *2 * [
            RECORD7 + "--n_layer=4 --n_head=2 --n_embd=256 --train_files=data/fw/train_*.bin "
            "--val_files=data/fw/val_*.bin"
        ],
        "train_gpt2.py",
    ),
    "small, compiled": (
        6, SMALL + "--adamw_every=1", SMALL, "records/modern/train_modern.py"
    ),
}  # fmt: skip


def step_ms(script, settings, steps):
    """Return the mean milliseconds of a step, without the first two."""
    shutil.rmtree("logs", ignore_errors=True)
    arguments = [*settings.split(), f"--num_iterations={steps}", "--run_id=timed"]
    done = subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, check=True
    )
    times = re.findall(r"train_loss:\S+ train_time:(\d+)ms", done.stdout)
    return (int(times[-1]) - int(times[1])) / (steps - 2)


def main(before, after, rounds):
    for name, (steps, old_settings, new_settings, script) in CASES.items():
        ratios = []
        for number in range(int(rounds)):
            sides = [
                ("before", f"{before}/train_gpt2.py", old_settings),
                ("after", f"{after}/{script}", new_settings),
            ]
            random.shuffle(sides)
            ms = {side: step_ms(path, settings, steps) for side, path, settings in sides}
            ratios.append(ms["after"] / ms["before"])
            times = f"before {ms['before']:.1f} ms, after {ms['after']:.1f} ms"
            print(f"{name}: round {number}: {times}, ratio {ratios[-1]:.3f}", flush=True)
        spread = f"({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"{name}: median ratio {statistics.median(ratios):.3f} {spread}, n={len(ratios)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
