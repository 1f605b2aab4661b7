#!/usr/bin/env bash
# How the logs of this folder were made: bash run.sh BOOKS. bench_step.py alone on the machine.
# BOOKS: a folder with train_*.bin and val_*.bin of GPT-2 tokens. PYTHON: interpreter with torch.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
python=${PYTHON:-python3}
bench=("$python" tests/bench_step.py)
books=(--train_files="$1/train_*.bin" --val_files="$1/val_*.bin")
bar=(--n_layer=6 --n_head=3 --n_embd=384 --batch_size=8 --device_batch_size=8 --sequence_length=512)
small=(--batch_size=8 --device_batch_size=8 --rounds=5 --steps=1)

# commit 7b044d6, CHUNK_LOGITS, MAX_CHUNKS = 2**23, 16
"${bench[@]}" plain "${bar[@]}" --rounds=7 --steps=1 >"$here/bar_16.txt"
"${bench[@]}" eager regional "compiled autograd" max-autotune "${small[@]}" >"$here/compile_16.txt"
"${bench[@]}" all "${small[@]}" --cold=False >"$here/levers_16.txt" # ended after the head's levers

# commit 75a7533, CHUNK_LOGITS, MAX_CHUNKS = 2**24, 8, which these had shown to be better
"${bench[@]}" plain "${bar[@]}" --rounds=5 --steps=1 >"$here/bar.txt"
"${bench[@]}" "4 chunks" "16 chunks" "32 chunks" "all kept" "half kept" "kept memory" "huge pages" \
    "micro-batch / 2" "micro-batch / 8" "Muon compiled" "Muon per matrix" "Muon batched" \
    "foreach AdamW" "${small[@]}" --cold=False >"$here/levers.txt"
"${bench[@]}" "synchronous x2" "one bucket x2" "DDP whole x2" "DDP split x2" "${small[@]}" \
    --cold=False >"$here/levers_x2.txt"

# losses and learning; times mean nothing here
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
