#!/usr/bin/env bash
# bash records/2026-11-25_Wishes/levers.sh: the mean time of a step of --preset=text, in three rounds, with one setting changed at a
# time. It expects data/mine, runs in the current folder, and prints ms per step. A first run fills the compiler's cache.
root=$(cd "$(dirname "$0")/../.." && pwd)
logs=$(mktemp -d)

arm() {  # NAME THREADS [SETTING ...]
    local name=$1 threads=$2
    shift 2
    OMP_NUM_THREADS=$threads "${PYTHON:-python3}" "$root/train_gpt2.py" --preset=text --device=cpu --num_iterations=10 --warmdown_iters=8 \
        --val_loss_every=0 --val_tokens=2048 --save_every=0 --log_dir="$logs" --run_id="$name" "$@" >/dev/null
    echo "$name: $(grep -o 'step_avg:[0-9.]*' "$logs/$name.txt" | tail -n 1)"
}

for round in 0 1 2 3; do
    arm "two_threads_$round" 2
    arm "one_thread_$round" 1
    arm "not_compiled_$round" 2 --compile=False
    arm "device_batch_size_4_$round" 2 --device_batch_size=4
done
