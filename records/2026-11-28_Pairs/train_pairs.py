"""Train preset `small` with each change and seed, one thread a run, two runs at a time.

    python train_pairs.py [--data FOLDER]     # FOLDER holds small/, default: data of the repository
    python train_pairs.py --wide              # some changes, with 256 channels
    python train_pairs.py --candidates        # changes that may enter the recipe

planned_runs(), planned_wide_runs() and planned_candidates() fix the runs, which use the scripts of
commit CODE, edited as in CHANGES. Complete logs and weights are in work/; logs/ gets the finished
logs, shortened. The program can be stopped and started at any time: it keeps finished runs and
continues others.
"""

import argparse
import contextlib
import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


# {name: its settings and edits}. An edit is (file, text, replacement).
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
        (MODERN, "norm(self.wte(inputs))", "norm(self.wte(inputs).to(self.dtype))"),
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
    "triples": ["--ngram_rows=40960", "--max_ngram=3"],
    "largest_table": ["--ngram_rows=163840"],
    "bfloat16_tables": [  # all other runs with 128 channels have float32 tables
        (MODERN, "args.n_embd, dtype=dtype)", "args.n_embd, dtype=torch.bfloat16)"),
        (MODERN, "NgramTable(args, dtype)", "NgramTable(args, torch.bfloat16)"),
        (MODERN, "self.ngrams(inputs)", "self.ngrams(inputs).to(self.dtype)"),
        (MODERN, "norm(self.wte(inputs))", "norm(self.wte(inputs).to(self.dtype))"),
        (MODERN, "self.value_table(tokens)", "self.value_table(tokens).type_as(x)"),
    ],
}
PER_HEAD = (  # Muon orthogonalizes the queries, keys and values of each head separately
    MODERN,
    "    muon = Muon(\n        matrices,",
    "    split = [block.attn for block in model.h if block.attn is not None]\n"
    "    split = [m.weight for attn in split for m in (attn.c_q, attn.c_k, attn.c_v)]\n"
    "    whole = [p for p in matrices if p not in {*split}]\n"
    "    muon = Muon(\n        [dict(params=split, blocks=args.n_head), dict(params=whole)],",
)
ADAMW = [name for name in CHANGES if name.startswith("adamw_")]
CANDIDATES = {  # {change: seeds}
    "bfloat16_tables": (1, 2, 3),
    "triples": (1, 2, 3),
    "largest_table": (1, 2, 3),
}
NO_ROWS = ["base", "steps_300", *ADAMW, *CANDIDATES]
ROWS = [name for name in CHANGES if name not in NO_ROWS] + ["adamw"]
FIRST_SEEDS, MORE_SEEDS = (1, 2, 3, 4, 5), (6, 7, 8)
SMALL_EFFECT = 0.01  # nats; rows with a smaller effect in five pairs get MORE_SEEDS
# What is not compared with the base
AGAINST = {"full_rotary": "no_offset_keys", "triples": "larger_table"}
# With 256 channels: changes with large or doubtful effects, the clearest first
WIDE_ROWS = ["no_offset_keys", "no_qk_norm", "larger_table", "no_ngram_table", "no_value_tables"]
WIDE_ROWS += ["no_windows", "gelu", "tied_head"]
WIDE_SEEDS = (1, 2, 3)
WIDE_BFLOAT16_SEEDS = (2, 3, 4)  # from another machine, which multiplies faster in bfloat16
WIDE = [  # Muon's settings follow from the width as in modern()
    "--n_embd=256",
    "--n_head=2",
    f"--muon_learning_rate={0.03 / 256**0.5}",
    f"--muon_weight_decay={1.2 * 0.03 * 256**0.5}",
]
IN_BOTH_WIDTHS = ["base", "steps_300", *WIDE_ROWS, "largest_table"]
CHANGES |= {f"wide_{name}": WIDE + CHANGES[name] for name in IN_BOTH_WIDTHS}
# With 128 channels, there is only one head
CHANGES["wide_muon_per_head"] = [*WIDE, PER_HEAD]
CANDIDATES |= {"wide_base": (2, 3, 4), "wide_muon_per_head": (2, 3, 4)}
CANDIDATES |= {"wide_largest_table": (2, 3, 4)}
AGAINST |= {name: "wide_base" for name in CHANGES if name.startswith("wide_")}


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
    """Return the seeds of a row's pairs. Seeds 6 to 8 depend on the mean of the first five."""
    pairs = differences(row)
    first = [pairs[seed] for seed in FIRST_SEEDS if seed in pairs]
    is_complete = len(first) == len(FIRST_SEEDS)
    is_small = is_complete and abs(sum(first)) < SMALL_EFFECT * len(first)
    return FIRST_SEEDS + MORE_SEEDS if is_small else FIRST_SEEDS


def best_adamw():
    """Return the change with the best learning rate of AdamW, or None before all are trained."""
    losses = {name: loss_of(name, 9) for name in ADAMW}
    return None if None in losses.values() else min(losses, key=losses.get)


def planned_runs():
    """Return the runs, (name, seed), of the table that are known to be needed."""
    runs = [("base", seed) for seed in FIRST_SEEDS + MORE_SEEDS]
    runs += [("steps_300", seed) for seed in FIRST_SEEDS]
    runs += [(name, 9) for name in ADAMW]
    for row in ROWS if best_adamw() else []:  # else the change of row `adamw` is not known yet
        runs += [(name, seed) for name in names_of(row) for seed in planned_seeds(row)]
    return runs


def planned_wide_runs():
    names = [f"wide_{name}" for name in ("base", *WIDE_ROWS, "steps_300")]
    return [(name, seed) for seed in WIDE_SEEDS for name in names]


def planned_candidates():
    return [(name, seed) for name, seeds in CANDIDATES.items() for seed in seeds]


def missing(runs):
    """Return those of the planned runs that are not finished."""
    runs = dict.fromkeys(runs)  # some are in more than one row
    return [(name, seed) for name, seed in runs if loss_of(name, seed) is None]


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
    in_bfloat16 = name.startswith("wide_") and seed in WIDE_BFLOAT16_SEEDS
    dtype = "bfloat16" if in_bfloat16 else "float32"
    command = [sys.executable, MODERN, "--preset=small", f"--dtype={dtype}", "--device=cpu"]
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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=ROOT / "data")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--wide", action="store_true", help="train with 256 channels")
    which.add_argument("--candidates", action="store_true", help="train candidates")
    options = parser.parse_args()
    planned = planned_runs
    if options.wide:
        planned = planned_wide_runs
    if options.candidates:
        planned = planned_candidates
    settings = {name: write_script(name) for name in CHANGES}
    tried = set()
    # The results of some runs decide which others are needed
    while runs := [run for run in missing(planned()) if run not in tried]:
        tried.update(runs)
        with ThreadPoolExecutor(2) as pool:
            started = [
                pool.submit(train, name, seed, settings[name], options.data) for name, seed in runs
            ]
            try:
                for run in started:
                    run.result()  # raises what it raised
            except BaseException:  # for example Ctrl-C, which also stops the runs
                pool.shutdown(cancel_futures=True)
                raise
    if left := missing(planned()):
        sys.exit(f"Not finished: {left}")


if __name__ == "__main__":
    main()
