"""Train the preset `small` with changes and seeds, one thread a run, two runs at a time.

    python run_queue.py [--parallel=2]     # in the folder that holds data/small

The runs and their order are fixed in RUNS. A run whose log is complete is not repeated, and one
that was stopped continues, so the queue can be stopped and started at any time. Complete logs are
written to full_logs/; logs/ gets them with a checksum in place of the
source, and with every tenth step only.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tools"))
import runlog  # noqa: E402

SCRIPT = HERE.parent.parent / "train_gpt2.py"
FULL_LOGS = HERE / "full_logs"
WITHOUT_OFFSET = ("self.offset_keys = layer.is_long", "self.offset_keys = False")
MUON = "muon = Muon(matrices, args.muon_learning_rate, **muon_options)\n    others = ["


def adamw_for_muon(rate):
    """Return the edit that trains the matrices with AdamW, and weight decay as in Muon's place."""
    adamw = f"torch.optim.AdamW(matrices, {rate}, (0.9, 0.95), weight_decay=0.0)"
    return [(MUON, f"muon = {adamw}\n    others = [")]


def width(channels):
    """Return the settings of modern_recipe for another width."""
    rate = 0.03 / channels**0.5
    decay = 1.2 * 0.03 * channels**0.5
    heads = max(1, channels // 128)
    return [f"--n_embd={channels}", f"--n_head={heads}", f"--muon_learning_rate={rate}",
            f"--muon_weight_decay={decay}"]  # fmt: skip


def gpt2(muon_rate):
    """Return the settings of record 7's model, with a tuned rate of Muon."""
    return ["--model=gpt2", "--learning_rate=0.0036", f"--muon_learning_rate={muon_rate}"]


# {name: settings, or (text of the script, replacement)}
CHANGES = {
    "base": [],
    "gpt2": gpt2(0.00088),
    # One piece less, or the piece that it replaced
    "no_key_offset": [WITHOUT_OFFSET],
    "no_value_tables": [("i in (1, 2, n - 3, n - 2, n - 1)", "False")],
    "no_ngram_table": ["--ngram_rows=0"],
    "no_normuon": [("beta2=0.95, cautious=True", "beta2=0.0, cautious=True")],
    "no_weight_decay": ["--muon_weight_decay=0"],
    "no_softcap": [("LOGIT_SOFTCAP = 15.0", "LOGIT_SOFTCAP = 0.0")],
    "no_backout": [("x = x - self.backout_weight * saved", "pass")],
    "no_skip": [("x = x + self.skip_weight * skip", "pass")],
    "no_saved_input": [("saved if layer.reads_saved else None", "None")],
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
    "adamw_0.002": adamw_for_muon(0.002),
    "adamw_0.004": adamw_for_muon(0.004),
    "adamw_0.008": adamw_for_muon(0.008),
    # Without channels that have no position, there is nothing to offset: compare with no_key_offset
    "full_rotary": [
        ("return F.pad(1024.0 ** -torch.linspace(0, 1, D // 4), (0, D // 2 - D // 4))",
         "return 1024.0 ** -torch.linspace(0, 1, D // 2)"),
        WITHOUT_OFFSET,
    ],
    "tied_head": [  # with the initial values and the rate of record 51
        ("nn.init.zeros_(self.lm_head.weight)\n",
         "self.wte.weight = self.lm_head.weight\n"
         "        nn.init.normal_(self.lm_head.weight, std=0.005)\n"),
        ("model.modules() if isinstance(m, nn.Embedding)]",
         "model.modules() if isinstance(m, nn.Embedding) and m is not model.wte]"),
    ],
    # Our own
    "equal_keys": ["--equal_keys=True"],
    "earlier_values": [
        ("torch.tensor([1.1, 0.0, 0.1])", "torch.tensor([1.0, 0.0, 0.3])"),
        ("nn.init.normal_(block.attn.value_table.weight, std=0.01)",
         "nn.init.normal_(block.attn.value_table.weight, std=0.5)"),
    ],
    # How many steps the recipe needs for the loss of record 7's model, at three widths
    "steps_180": ["--num_iterations=180"],
    "steps_300": ["--num_iterations=300"],
    "gpt2_64": ["--n_embd=64", "--n_head=1", *gpt2(0.00125)],
    "steps_180_64": [*width(64), "--num_iterations=180"],
    "steps_300_64": [*width(64), "--num_iterations=300"],
    "gpt2_256": ["--n_embd=256", "--n_head=2", *gpt2(0.00062)],
    "steps_180_256": [*width(256), "--num_iterations=180"],
    "steps_300_256": [*width(256), "--num_iterations=300"],
}  # fmt: skip
NAMES = list(CHANGES)
PIECES = NAMES[NAMES.index("no_key_offset") : NAMES.index("steps_180")]
SCALES = NAMES[NAMES.index("steps_180") :]
RUNS = [("base", 1), ("base", 2), ("gpt2", 1), ("base", 3)]
RUNS += [(name, 1) for name in PIECES] + [("base", 4), ("base", 5)]
RUNS += [("steps_180", 1), ("steps_300", 1)]
RUNS += [("gelu", seed) for seed in (2, 3, 4, 5)]  # the worked example in the main README
RUNS += [(name, 1) for name in SCALES]
RUNS += [(name, seed) for seed in (2, 3, 4, 5) for name in ("equal_keys", "earlier_values")]
RUNS += [(name, seed) for seed in (2, 3, 4, 5) for name in PIECES]
RUNS += [("base", 6), ("base", 7), ("base", 8)]
RUNS = list(dict.fromkeys(RUNS))


def edited_script(name):
    """Return (source, settings) of a change."""
    source, settings = SCRIPT.read_text(), []
    for change in CHANGES[name]:
        if isinstance(change, str):
            settings.append(change)
        else:
            old, new = change
            assert old in source, f"{name}: {old!r} is not in {SCRIPT}"
            source = source.replace(old, new)
    return source, settings


def shortened(log, source):
    """Return a log with a checksum in place of the source, and with every tenth step only."""
    digest = hashlib.sha256(source.encode()).hexdigest()
    lines = log.replace(source, f"source with sha256 {digest}").splitlines(keepends=True)
    return "".join(line for line in lines if not re.match(r"step:\d*[1-9]/\d+ train_loss", line))


def train(name, seed):
    """Run the change `name` with a seed, unless its log is complete."""
    log = HERE / "logs" / f"{name}_seed{seed}.txt"
    if log.exists() and runlog.read(log).finished:
        return
    source, settings = edited_script(name)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train_gpt2.py")
        script.write_text(source)
        command = [sys.executable, str(script), "--preset=small", *settings, f"--seed={seed}"]
        command += [f"--run_id={log.stem}", f"--log_dir={FULL_LOGS}", "--resume=auto"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(f"{log.stem}: {done.stderr[-300:]}", flush=True)
        return
    text = (FULL_LOGS / log.name).read_text().replace(f"{FULL_LOGS}/", "full_logs/")
    text = text.replace(repr(str(FULL_LOGS)), repr("full_logs"))
    log.parent.mkdir(exist_ok=True)
    log.write_text(shortened(text, source))
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
