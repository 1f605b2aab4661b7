#!/usr/bin/env bash
# How the logs of this folder were made: bash run.sh, alone on the machine.
# PYTHON: interpreter with torch.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
python=${PYTHON:-python3}
bench=("$python" tests/bench_step.py)
bar=(--n_layer=6 --n_head=3 --n_embd=384 --batch_size=8 --device_batch_size=8 --sequence_length=512)
small=(--batch_size=8 --device_batch_size=8 --rounds=5 --steps=1)

# commit 7b044d6, CHUNK_LOGITS, MAX_CHUNKS = 2**23, 16
"${bench[@]}" plain "${bar[@]}" --rounds=7 --steps=1 >"$here/bar_16.txt"
"${bench[@]}" eager regional "compiled autograd" max-autotune "${small[@]}" >"$here/compile_16.txt"
"${bench[@]}" all "${small[@]}" --cold=False >"$here/levers_16.txt" # ended after the head's levers

# commit a200b2c, CHUNK_LOGITS, MAX_CHUNKS = 2**24, 8, which these had shown to be better
"${bench[@]}" plain "${bar[@]}" --rounds=5 --steps=1 >"$here/bar.txt"

# commit 6e82c55
"${bench[@]}" "4 chunks" "16 chunks" "q and k kept" plain "${bar[@]}" --rounds=5 --steps=1 \
    --cold=False >"$here/bar_chunks.txt"
# commit 67399d1
for seed in 1 2 3; do
    for side in ours plain; do # two at a time, OMP_NUM_THREADS=1
        "$python" "$here/learning.py" "$side" "$seed" data/torch_sources
        mv "logs/${side}_seed$seed.txt" "$here"
    done
done

# commit 63c163f
"${bench[@]}" all "${small[@]}" >"$here/levers.txt"

# commit b2eb163: chunks of 516 tokens; data/books: the unpacked book shards; OMP_NUM_THREADS=1
tiny=(--n_layer=2 --n_head=2 --n_embd=64 --batch_size=2 --device_batch_size=2 --sequence_length=128
    --rounds=1 --steps=1 --loss_steps=200 --val_tokens=16384 --cold=False
    --train_files='data/books/train_*.bin' --val_files='data/books/val_*.bin')
"${bench[@]}" all "${tiny[@]}" >"$here/losses_1.txt" # ended after its first table, for time; these two at once:
"${bench[@]}" F.linear_cross_entropy "2 chunks" "8 chunks" "32 chunks" max-autotune "compiled autograd" \
    "all kept" "huge pages" "micro-batch / 2" "Muon compiled" "Muon batched" "${tiny[@]}" >"$here/losses_2.txt"
"${bench[@]}" "1 chunks" "4 chunks" "16 chunks" eager regional "q and k kept" "half kept" "kept memory" \
    "Muon per matrix" "foreach AdamW" "${tiny[@]}" >"$here/losses_3.txt"

# commit d97d882
"$python" "$here/products.py" >"$here/products.txt"
"${bench[@]}" plain "${bar[@]}" --rounds=7 --steps=1 >"$here/bar_last.txt"
"$python" "$here/products.py" >>"$here/products.txt"
