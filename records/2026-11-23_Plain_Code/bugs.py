"""Run the commands of the issue's bugs with the script of one commit; print what each one does.

python records/2026-11-23_Plain_Code/bugs.py FOLDER     # a clone, at any commit
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SCRIPT = Path(sys.argv[1], "train_gpt2.py").resolve()
SETTINGS = (
    "--vocab_size=64 --n_layer=2 --n_head=2 --n_embd=16 --batch_size=12 --sequence_length=16 "
    "--num_iterations=6 --warmdown_iters=3 --val_loss_every=3 --val_tokens=304 --device=cpu "
    "--compile=False --train_files=train_0.bin --val_files=val_0.bin"
)


def write_shard(path, tokens):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + np.asarray(tokens, "<u2").tobytes())


def run(title, more="", edit=None, environment=(), before=(), keep=("result", "resume", "stopped")):
    """Run the script in the current folder; print its status and the lines that say something."""
    script = Path("script.py")
    text = SCRIPT.read_text()
    if edit:
        text = text.replace("    for step in steps:\n", f"    for step in steps:\n        {edit}\n")
    script.write_text(text)
    command = [*before, sys.executable, str(script), *SETTINGS.split(), *more.split()]
    began = time.perf_counter()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **dict(environment)},
    )
    said = [
        line for line in done.stdout.splitlines() if line.startswith(keep) or "finished" in line
    ]
    said += done.stderr.splitlines()[-2:]
    print(f"\n{title}\n  {' '.join([*before, 'train_gpt2.py', more])}")
    print(f"  status {done.returncode}, {time.perf_counter() - began:.1f} s")
    for line in said:
        print(f"  | {line[:150]}")


def main():
    stream = np.cumsum(np.random.default_rng(0).integers(1, 4, size=4000)) % 64
    write_shard(Path("train_0.bin"), stream[:3000])
    write_shard(Path("val_0.bin"), stream[3000:])
    kill = "os.kill(os.getpid(), signal.SIG{})"
    run(
        "A hang-up under nohup",
        "--run_id=a",
        f"step == 3 and {kill.format('HUP')}",
        before=["nohup"],
    )
    run("A run to be rewound", "--run_id=b --save_every=1 --keep_checkpoints=9")
    if Path("logs/b.txt").exists():  # as if it had been killed before its end
        text = Path("logs/b.txt").read_text()
        Path("logs/b.txt").write_text(text[: text.rindex("step:6/6 val_loss")])
        Path("logs/b/model.pt").unlink()
    stop = f"step == 4 and {kill.format('TERM')}"
    run(
        "... goes back to step 2, is stopped",
        "--run_id=b --resume=logs/b/state_step0000000002.pt",
        stop,
    )
    run("... and auto", "--run_id=b --resume=auto")
    run("A run is stopped", "--run_id=c", stop)
    run("... auto to its end", "--run_id=c --resume=auto")
    run("... and auto again", "--run_id=c --resume=auto")
    run("A start fails", "--run_id=d --resume=none.pt")
    run("... and is repeated without the mistake", "--run_id=d")
    run("A GPU is asked for where there is none", "--device=cuda")
    run("A momentum that no run can have", "--muon_momentum=5 --run_id=e")
    run("The final weights cannot be written", "--run_id=f --n_embd=32",
        "step == 5 and resource.setrlimit(resource.RLIMIT_FSIZE, (90000, 90000))")  # fmt: skip
    run("Plain srun", "--run_id=g", environment={"SLURM_NTASKS": "4"}.items())
    twice = f"step == 3 and [{kill.format('TERM')}, time.sleep(0.1), {kill.format('TERM')}]"
    run("Two SIGTERM at once", "--run_id=h", twice)
    run("A weight that is not finite", "--run_id=i --save_every=2 --val_loss_every=0",
        "step == 5 and gpt.h[1].attn.c_q.weight.data.fill_(math.inf)")  # fmt: skip
    run("--help", "--help")
    code = """
import copy, torch, script
p = torch.nn.Parameter(torch.randn(4, 4)); p.grad = torch.randn(4, 4)
copy.deepcopy(script.Muon([p], lr=0.1)).step()
print("stepped")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    print(f"\ncopy.deepcopy(muon).step()\n  | {(done.stdout + done.stderr).splitlines()[-1]}")


if __name__ == "__main__":
    signal.alarm(600)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        main()
