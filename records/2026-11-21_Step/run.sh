#!/usr/bin/env bash
# How the logs of this folder were made: bash run.sh BOOKS. The first three alone on the machine.
# BOOKS: a folder with train_*.bin and val_*.bin of GPT-2 tokens. PYTHON: interpreter with torch.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
python=${PYTHON:-python3}
bench=("$python" tests/bench_step.py)
books=(--train_files="$1/train_*.bin" --val_files="$1/val_*.bin")
small=(--batch_size=8 --device_batch_size=8 --rounds=5 --steps=1)

"${bench[@]}" plain --n_layer=6 --n_head=3 --n_embd=384 --batch_size=8 --device_batch_size=8 \
    --sequence_length=512 --rounds=7 --steps=1 >"$here/bar.txt"
"${bench[@]}" eager regional "compiled autograd" max-autotune "${small[@]}" >"$here/compile.txt"
"${bench[@]}" all "${small[@]}" --cold=False >"$here/levers.txt"

"${bench[@]}" all "${books[@]}" --n_layer=2 --n_embd=64 --batch_size=2 --device_batch_size=2 \
    --sequence_length=128 --rounds=1 --steps=1 --cold=False --loss_steps=200 --val_tokens=16384 \
    --learning_rate=0.01 --muon_learning_rate=0.0005 >"$here/losses.txt"

PYTHON="$python" bash run.sh data
for seed in 1 2 3; do
    for side in ours plain; do
        OMP_NUM_THREADS=1 "$python" "$here/learning.py" $side $seed data/torch_sources >/dev/null &
    done
    wait
done
cp logs/{ours,plain}_seed?.txt "$here"
