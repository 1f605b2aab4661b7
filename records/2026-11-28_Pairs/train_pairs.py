"""Train preset `small` with each change and seed, one thread a run, two runs at a time.

    python train_pairs.py [--data FOLDER]     # FOLDER holds small/, default: data of the repository
    python train_pairs.py --wide              # some changes, with 256 channels
    python train_pairs.py --candidates        # changes that may enter the recipe

missing_runs(), missing_wide_runs() and missing_candidates() fix the runs and their order. All runs
use the scripts of commit CODE, edited as in CHANGES. Complete logs and weights are in work/; logs/
gets the finished logs, shortened. The program can be stopped and started at any time: it keeps
finished runs and continues others.
"""

import argparse
import contextlib
import hashlib
import math
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WORK = HERE / "work"
sys.path.insert(0, str(HERE.parent / "tools"))
import runlog  # noqa: E402

CODE = "bce73d5"  # the commit of the scripts
CORE, MODERN = "train_gpt2.py", "records/modern/train_modern.py"
NO_OFFSET = (MODERN, "self.has_offset_keys = has_offset_keys", "self.has_offset_keys = False")


def adamw(learning_rate):
    """Return the edit that trains the matrices with AdamW; the schedule sets its weight decay."""
    built = f"muon = torch.optim.AdamW(matrices, {learning_rate}, (0.9, 0.95))"
    return [(MODERN, "return [muon, ", f"{built}\n    return [muon, ")]


# {name: its settings and edits}. An edit is (file, text, replacement). After no_normuon, changes
# with large effects in the earlier table come first.
CHANGES = {
    "base": [],
    "no_normuon": [(MODERN, "beta2=0.95", "beta2=0.0")],
    "no_offset_keys": [NO_OFFSET],
    "no_value_tables": [(MODERN, "i in self.table_layers", "False")],
    "no_zero_projections": [(CORE, "nn.init.zeros_(self.c_proj.weight)", "pass")],
    "no_ngram_table": ["--ngram_rows=0"],
    "no_qk_norm": [
        (MODERN, "norm(self.split_heads(self.c_q(x)))", "self.split_heads(self.c_q(x))"),
        (MODERN, "norm(self.split_heads(self.c_k(x)))", "self.split_heads(self.c_k(x))"),
    ],
    "no_windows": ["--attention_window=0"],
    "no_momentum_warmup": ["--momentum_warmup_fraction=0"],
    "no_cautious": [(MODERN, "cautious=True", "cautious=False")],
    "no_saved_input": [
        (MODERN, "outputs[self.saved_layer] if i > self.saved_layer else None", "None")
    ],
    "no_skip": [(MODERN, "x = x + self.skip_weight * outputs[self.skip_start]", "pass")],
    "no_backout": [(MODERN, "x = x - self.backout_weight * outputs[self.saved_layer]", "pass")],
    "no_softcap": [(MODERN, "LOGIT_SOFTCAP = 15.0", "LOGIT_SOFTCAP = 0.0")],
    "no_weight_decay": ["--muon_weight_decay=0"],
    "gelu": [(CORE, "F.relu(self.c_fc(x)).square()", "F.gelu(self.c_fc(x))")],
    "larger_table": ["--ngram_rows=40960"],
    "decay_to_zero": ["--final_lr_fraction=0"],
    # Without channels that have no position, nothing can be offset: see AGAINST
    "full_rotary": [
        (
            MODERN,
            "F.pad(1024.0 ** -torch.linspace(0, 1, D // 4), (0, D // 2 - D // 4))",
            "1024.0 ** -torch.linspace(0, 1, D // 2)",
        ),
        NO_OFFSET,
    ],
    "tied_head": [  # with the initial values and the learning rate of record 51
        (
            MODERN,
            "nn.init.zeros_(self.lm_head.weight)",
            "self.wte.weight = self.lm_head.weight\n"
            "        nn.init.normal_(self.lm_head.weight, std=0.005)",
        ),
        (
            MODERN,
            "isinstance(m, (nn.Embedding, NgramTable))]",
            "isinstance(m, (nn.Embedding, NgramTable)) and m is not model.wte]",
        ),
    ],
    "earlier_values": [  # ours, before 2026-11-26
        (MODERN, "torch.tensor([1.1, 0.0, 0.1])", "torch.tensor([1.0, 0.0, 0.3])"),
        (MODERN, "value_table.weight, std=0.01", "value_table.weight, std=0.5"),
    ],
    # For the row "adamw": the best of these with seed 9, which no pair has, gets the pairs.
    "adamw_0.0005": adamw(0.0005),
    "adamw_0.001": adamw(0.001),
    "adamw_0.002": adamw(0.002),
    "adamw_0.004": adamw(0.004),
    # For the price of a change in steps
    "steps_300": ["--num_iterations=300"],
    # Candidates for the recipe that are not in the table
    "triples": ["--ngram_rows=40960", "--max_ngram=3"],  # compared with larger_table
    "bfloat16_tables": [  # all other runs have float32 tables
        (MODERN, "args.n_embd, dtype=dtype)", "args.n_embd, dtype=torch.bfloat16)"),
        (MODERN, "NgramTable(args, dtype)", "NgramTable(args, torch.bfloat16)"),
        (MODERN, "self.ngrams(inputs)", "self.ngrams(inputs).to(self.dtype)"),
        (MODERN, "norm(self.wte(inputs))", "norm(self.wte(inputs).to(self.dtype))"),
        (MODERN, "self.value_table(tokens)", "self.value_table(tokens).type_as(x)"),
    ],
}
ADAMW = [name for name in CHANGES if name.startswith("adamw_")]
CANDIDATES, CANDIDATE_SEEDS = ["bfloat16_tables", "triples"], (1, 2, 3)
NO_ROWS = ["base", "steps_300", *ADAMW, *CANDIDATES]
ROWS = [name for name in CHANGES if name not in NO_ROWS] + ["adamw"]
FIRST_SEEDS, MORE_SEEDS = (1, 2, 3, 4, 5), (6, 7, 8)
SMALL_EFFECT = 0.01  # nats; rows with a smaller effect in five pairs get MORE_SEEDS
AGAINST = {"full_rotary": "no_offset_keys"}  # rows that are not compared with the base
# With 256 channels: changes with large or doubtful effects, the clearest first
WIDE_ROWS = ["no_offset_keys", "no_qk_norm", "larger_table", "no_ngram_table", "no_value_tables"]
WIDE_ROWS += ["no_windows", "gelu", "tied_head"]
WIDE_SEEDS = (1, 2, 3)
WIDE = [  # Muon's settings follow from the width as in modern()
    "--n_embd=256",
    "--n_head=2",
    f"--muon_learning_rate={0.03 / 256**0.5}",
    f"--muon_weight_decay={1.2 * 0.03 * 256**0.5}",
]
CHANGES |= {f"wide_{name}": WIDE + CHANGES[name] for name in ("base", "steps_300", *WIDE_ROWS)}
AGAINST |= {f"wide_{row}": "wide_base" for row in WIDE_ROWS}
FAILED = {}  # {(change, seed): why it cannot be finished}; these runs are not tried again


def loss_of(name, seed):
    """Return the validation loss of a finished run, else None."""
    log = HERE / "logs" / f"{name}_seed{seed}.txt"
    run = runlog.read(log) if log.exists() else None
    return run.val_loss if run is not None and run.finished else None


def names_of(row):
    """Return the change of a row and what it is compared with."""
    return best_adamw() if row == "adamw" else row, AGAINST.get(row, "base")


def differences(row):
    """Return {seed: change minus base} for the pairs of a row that are finished."""
    pairs = {}
    for seed in FIRST_SEEDS + MORE_SEEDS:
        losses = [loss_of(name, seed) for name in names_of(row)]
        if None not in losses:
            pairs[seed] = round(losses[0] - losses[1], 4)
    return pairs


def planned_seeds(row):
    """Return the seeds of the pairs that decide about a row, without FAILED runs."""
    first = [pair for seed, pair in differences(row).items() if seed in FIRST_SEEDS]
    is_small = len(first) > 0 and abs(sum(first)) < SMALL_EFFECT * len(first)
    seeds = FIRST_SEEDS + MORE_SEEDS if is_small else FIRST_SEEDS
    return [seed for seed in seeds if not any((name, seed) in FAILED for name in names_of(row))]


def best_adamw():
    """Return the change with the best learning rate of AdamW, or None before all are trained."""
    tried = [name for name in ADAMW if (name, 9) not in FAILED]
    losses = {name: loss_of(name, 9) for name in tried}
    return None if None in losses.values() else min(losses, key=losses.get)


def is_missing(name, seed):
    return loss_of(name, seed) is None and (name, seed) not in FAILED


def missing_pairs(row, seeds):
    """Return the runs, (name, seed), that the pairs of a row with these seeds still need."""
    runs = [(name, seed) for seed in seeds for name in names_of(row)]
    return [run for run in runs if is_missing(*run)]


def runs_to_verdict(row):
    return len(missing_pairs(row, planned_seeds(row)))


def spread(row):
    """Return the standard deviation of a row's differences, divided by the size of their mean."""
    pairs = differences(row).values()
    if len(pairs) < 2:
        return math.inf
    size = max(abs(statistics.mean(pairs)), 0.0001)  # losses have four decimals
    return statistics.stdev(pairs) / size


def missing_runs():
    """Return all runs that are missing, in the order of training."""
    runs = [("base", seed) for seed in FIRST_SEEDS + MORE_SEEDS]
    runs += [("steps_300", seed) for seed in FIRST_SEEDS]
    runs += [(name, 9) for name in ADAMW]
    runs = [run for run in runs if is_missing(*run)]
    if best_adamw() is None:
        return runs
    # Three seeds of every row come first, so that the whole table is known early
    for row in ROWS:
        runs += missing_pairs(row, FIRST_SEEDS[:3])
    # Then the rows whose verdict needs the fewest runs and, among these, the clearest differences
    for row in sorted(ROWS, key=lambda row: (runs_to_verdict(row), spread(row))):
        runs += missing_pairs(row, planned_seeds(row))
    return list(dict.fromkeys(runs))  # some are in more than one row


def missing_wide_runs():
    """Return all runs with 256 channels that are missing, in the order of training."""
    names = [f"wide_{name}" for name in ("base", *WIDE_ROWS, "steps_300")]
    runs = [(name, seed) for seed in WIDE_SEEDS for name in names]
    return [run for run in runs if is_missing(*run)]


def missing_candidates():
    runs = [(name, seed) for name in CANDIDATES for seed in CANDIDATE_SEEDS]
    return [run for run in runs if is_missing(*run)]


def next_run(missing, started):
    """Return the first of the runs `missing` that can start and is not in `started`, or None."""
    undecided = {name for row in ROWS if missing_pairs(row, FIRST_SEEDS) for name in names_of(row)}
    for name, seed in missing:
        # Whether seeds 6 to 8 are needed is known when seeds 1 to 5 are finished
        waits = seed in MORE_SEEDS and name in undecided and name != "base"
        if (name, seed) not in started and not waits:
            return name, seed
    return None


def write_script(name):
    """Write the edited scripts of a change into work/NAME; return its settings."""
    folder = WORK / name
    folder.mkdir(parents=True, exist_ok=True)
    files = subprocess.run(
        ["git", "archive", CODE, CORE, "records/modern"], cwd=ROOT, capture_output=True, check=True
    )
    subprocess.run(["tar", "-x"], cwd=folder, input=files.stdout, check=True)
    settings = []
    for change in CHANGES[name]:
        if isinstance(change, str):
            settings.append(change)
            continue
        file, old, new = change
        source = (folder / file).read_text(encoding="utf-8")
        assert old in source, f"{name}: {old!r} is not in {file}"
        (folder / file).write_text(source.replace(old, new), encoding="utf-8")
    return settings


def shortened(log):
    """Return a log with a checksum in place of each source, and with every tenth step only."""
    lines = []
    for start in f"\n{log}".split(f"\n{runlog.TITLE}")[1:]:  # more than one if it was resumed
        title, _, rest = start.partition("\n")
        source, _, rest = rest.partition("\nhyperparameter ")
        digest = hashlib.sha256(source.encode()).hexdigest()
        lines += [f"{runlog.TITLE}{title}", f"source with sha256 {digest}"]
        rest = f"hyperparameter {rest}".splitlines()
        lines += [line for line in rest if not is_dropped(line)]
    return "\n".join([*lines, ""])


def is_dropped(line):
    """Return whether a line of a log belongs to a step that is not a multiple of ten."""
    step, _, rest = line.partition("/")
    return step.startswith("step:") and not step.endswith("0") and " train_loss:" in rest


def train(name, seed, settings, data):
    folder = WORK / name
    with contextlib.suppress(FileExistsError):  # another run of the change may have made it
        (folder / "data").symlink_to(data.resolve())
    stem = f"{name}_seed{seed}"
    command = [sys.executable, MODERN, "--preset=small", "--dtype=float32", "--device=cpu"]
    command += [*settings, f"--seed={seed}", f"--run_id={stem}", "--save_every=100"]
    command += ["--keep_checkpoints=1", "--resume=auto"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(f"{stem}: {done.stderr[-500:]}", flush=True)
        return
    log = folder / "logs" / f"{stem}.txt"
    run = runlog.read(log)
    if run.finished:  # not if a signal stopped it
        (HERE / "logs").mkdir(exist_ok=True)
        text = shortened(log.read_text(encoding="utf-8"))
        (HERE / "logs" / log.name).write_text(text, encoding="utf-8")
        print(f"{stem}: {run.val_loss}", flush=True)


def train_missing(missing, settings, data, started, lock):
    """Train one run after the other until the other threads have started all that are left."""
    while True:
        with lock:
            run = next_run(missing(), started)
            if run is None:
                return
            started.add(run)
        train(*run, settings[run[0]], data)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=ROOT / "data")
    parser.add_argument("--wide", action="store_true", help="train with 256 channels")
    parser.add_argument("--candidates", action="store_true", help="train candidates")
    options = parser.parse_args()
    missing = missing_runs
    if options.wide:
        missing = missing_wide_runs
    if options.candidates:
        missing = missing_candidates
    settings = {name: write_script(name) for name in CHANGES}
    started, lock = set(), Lock()
    with ThreadPoolExecutor(2) as pool:
        arguments = missing, settings, options.data, started, lock
        workers = [pool.submit(train_missing, *arguments) for _ in range(2)]
    for worker in workers:
        worker.result()  # raises what the worker raised
    if left := missing():
        sys.exit(f"Not finished: {left}. Start again, or list them in FAILED.")


if __name__ == "__main__":
    main()
