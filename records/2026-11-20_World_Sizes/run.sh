#!/usr/bin/env bash
# The same 50 steps on 1, 2, 3 and 4 processes: LOGS=... bash run.sh FOLDER_WITH_SHARDS
set -euo pipefail
books=$1
cd "$(dirname "$0")/../.."
for n in 1 2 3 4; do
    "${PYTHON:-python3}" -m torch.distributed.run --standalone --nproc_per_node="$n" train_gpt2.py \
        --train_files="$books/train_*.bin" --val_files="$books/val_*.bin" \
        --n_layer=4 --n_head=1 --n_embd=128 --sequence_length=128 \
        --batch_size=24 --device_batch_size=2 --num_iterations=50 --warmdown_iters=25 \
        --learning_rate=0.01 --val_loss_every=25 --val_tokens=65536 --device=cpu \
        --log_dir="${LOGS:-records/2026-11-20_World_Sizes}" --run_id="processes_$n"
done
