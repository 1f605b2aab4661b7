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
