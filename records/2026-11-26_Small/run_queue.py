"""Train the preset `small` with changes and seeds, one thread a run, two runs at a time.

    python run_queue.py [--parallel=2]     # in the folder that holds data/small

The runs and their order are fixed in RUNS. A run whose log is complete is not repeated, and one
that was stopped continues, so the queue can be stopped and started at any time. Logs are written
into logs/ beside this file.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tools"))
import runlog  # noqa: E402

SCRIPT = HERE.parent.parent / "train_gpt2.py"
GPT2 = ["--model=gpt2", "--learning_rate=0.0036", "--muon_learning_rate=0.00088"]
# {name: settings, or [(text of the script, replacement)]}
CHANGES = {
    "base": [],
    "gpt2": GPT2,
    "no_key_offset": [("self.offset_keys = layer in roles.long", "self.offset_keys = False")],
    "no_value_tables": [("if layer in roles.values:", "if False:")],
    "no_ngram_table": ["--ngram_rows=0"],
    "no_normuon": [("beta2=0.95, cautious=True", "beta2=0.0, cautious=True")],
    "no_cautious_decay": ["--muon_weight_decay=0"],
    "no_softcap": [("LOGIT_SOFTCAP = 15.0", "LOGIT_SOFTCAP = 0.0")],
    "no_backout": [("x = x - self.backout_weight * outputs[roles.reused]", "pass")],
    "no_skip": [("x = x + self.skip_weight * outputs[roles.skip_from]", "pass")],
    "no_saved_input": [
        ("reused = outputs[roles.reused] if layer > roles.reused else None", "reused = None")
    ],
    "no_windows": ["--window=0"],
    "no_zero_projections": [("nn.init.zeros_(self.c_proj.weight)", "pass")],
    "no_momentum_warmup": ["--muon_warmup_fraction=0"],
    "adamw_every_step": ["--adamw_every=1"],
    "gelu": [("F.relu(self.c_fc(x)).square()", "F.gelu(self.c_fc(x))")],
    "no_qk_norm": [
        ("q = self.rotary(norm(self.split_heads(self.c_q(x))))",
         "q = self.rotary(self.split_heads(self.c_q(x)))"),
        ("k = self.rotary(norm(self.split_heads(self.c_k(x))))",
         "k = self.rotary(self.split_heads(self.c_k(x)))"),
    ],
    "adamw_for_muon": [
        ("muon = Muon(matrices, args.muon_learning_rate, **muon_options)",
         "muon = torch.optim.AdamW(matrices, 0.003, (0.9, 0.95), weight_decay=0.0)"),
    ],
    "full_rotary": [  # compare with no_key_offset: without channels that have no position,
        # there is nothing to shift
        ("return F.pad(1024.0 ** -torch.linspace(0, 1, D // 4), (0, D // 2 - D // 4))",
         "return 1024.0 ** -torch.linspace(0, 1, D // 2)"),
        ("self.offset_keys = layer in roles.long", "self.offset_keys = False"),
    ],
    "no_equal_weights": [("if layer == args.n_layer - 1:", "if False:")],
    "public_values": [
        ("if layer == args.n_layer - 1:", "if False:"),
        ("torch.tensor([1.0, 0.0, 0.3])", "torch.tensor([1.1, 0.0, 0.1])"),
        ("nn.init.normal_(self.value_table.weight, std=0.5)",
         "nn.init.normal_(self.value_table.weight, std=0.01)"),
    ],
    "half_steps": ["--num_iterations=300"],
}  # fmt: skip
SINGLE = [name for name in CHANGES if name not in ("base", "gpt2", "half_steps")]
FIRST = ["no_key_offset", "no_value_tables", "no_ngram_table", "public_values", "gelu"]
RUNS = [("base", 1), ("base", 2), ("base", 3)]
RUNS += [("public_values", seed) for seed in (2, 1, 3)] + [("gpt2", 1)]
RUNS += [(name, 1) for name in FIRST] + [("half_steps", 1)]
RUNS += [(name, 1) for name in SINGLE if name not in FIRST]
RUNS += [("base", 4), ("base", 5), ("gpt2", 2)]
RUNS += [(name, seed) for seed in (2, 3, 4, 5) for name in SINGLE]


def train(name, seed):
    """Run the change `name` with a seed, unless its log is complete."""
    log = HERE / "logs" / f"{name}_seed{seed}.txt"
    if log.exists() and runlog.read(log).finished:
        return
    source, flags = SCRIPT.read_text(), []
    for change in CHANGES[name]:
        if isinstance(change, str):
            flags.append(change)
        else:
            old, new = change
            assert old in source, f"{name}: {old!r} is not in {SCRIPT}"
            source = source.replace(old, new)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train_gpt2.py")
        script.write_text(source)
        command = [sys.executable, str(script), "--preset=small", *flags, f"--seed={seed}"]
        command += [f"--run_id={log.stem}", f"--log_dir={log.parent}", "--resume=auto"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(f"{log.stem}: {done.stderr[-300:]}", flush=True)
    else:
        print(f"{log.stem}: {runlog.read(log).val_loss}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parallel", type=int, default=2)
    with ThreadPoolExecutor(parser.parse_args().parallel) as pool:
        futures = [pool.submit(train, name, seed) for name, seed in RUNS]
    for future in futures:
        future.result()  # raises what was raised in a run


if __name__ == "__main__":
    main()
