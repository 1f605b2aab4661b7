#!/usr/bin/env bash
# bash tests/bench/gpu_report.sh DIR PART ...   measure what needs a CUDA GPU
#
# Writes the output of each part to DIR/PART.txt, and the logs of its runs to DIR. To end it in time,
# begin the command with `timeout 530`. The parts, the most valuable first:
#   default   40 steps of the default settings, then 15 steps with a warm compiler cache
#   modern    STEPS steps (default 400, about 105M tokens) of the modern script, then as many tokens
#             of the default settings
#   profile   where the time of a step goes (records/tools/step_profile.py)
#   plain     a step against the plain implementation
#   muon      tests/bench/bench_muon.py
#   long      STEPS steps (default 360) of the default settings, and a picture
#   levers    a step against steps with one option changed. There is time for a few in one call:
#             ONLY="combo_kernels cuda_graphs" chooses from the list below
#   tests     pytest -m cuda
#   resume    a run that is killed and resumed: bit-identical?
#   small     three seeds of preset small, whose data must be in data/small
# DATA: folder with *train_*.bin and *val_*.bin, or .bin.xz (default data/fineweb10B). PYTHON:
# interpreter. The compiler's cache stays in logs/gpu_cache.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:?usage: bash tests/bench/gpu_report.sh DIR PART ...}
shift
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR=$PWD/logs/gpu_cache
mkdir -p "$out"
work=$(mktemp -d)
trap 'cp "$work"/logs/*.txt "$out" 2>/dev/null; rm -rf "$work"' EXIT
nvidia-smi >"$out/nvidia-smi.txt"

cp "${DATA:-data/fineweb10B}"/*.bin* "$work"
for path in "$work"/*.xz; do
    [ ! -e "$path" ] || xz -d "$path"
done
logs=(--log_dir="$work/logs" --device=cuda)
data=(--train_files="$work/*train_*.bin" --val_files="$work/*val_*.bin" --allow_repeat=True)
default=("${data[@]}" "${logs[@]}" --val_tokens=1048576)

train() { "$python" train_gpt2.py --warmdown_fraction=0.3 "$@"; }
bench() { "$python" tests/bench/bench_step.py "$@" "${default[@]}" --rounds=5; }

default() {
    TORCHINDUCTOR_CACHE_DIR=$work/cold train "${default[@]}" --run_id=cold --num_iterations=40 \
        --val_loss_every=0
    train "${default[@]}" --run_id=cached --num_iterations=15 --val_loss_every=0  # fills the cache
    train "${default[@]}" --run_id=warm --num_iterations=15 --val_loss_every=0
}
modern() {
    local steps=${STEPS:-400}
    "$python" records/modern/train_modern.py --warmdown_fraction=0.3 "${data[@]}" "${logs[@]}" \
        --val_tokens=983040 --run_id=modern --num_iterations="$steps" --val_loss_every=$((steps / 4))
    # A step of the default settings has twice as many tokens.
    train "${default[@]}" --run_id=record7 --num_iterations=$((steps / 2)) \
        --val_loss_every=$((steps / 4))
}
profile() {
    "$python" records/tools/step_profile.py "${default[@]}"
    cp "$work"/logs/profile_*/*.json.gz "$out"
}
plain() { bench plain --steps=1; }
muon() { "$python" tests/bench/bench_muon.py; }
long() {
    train "${default[@]}" --run_id=long --num_iterations="${STEPS:-360}" --val_loss_every=40
    "$python" records/tools/report.py "$work/logs/long.txt" --picture="$out/long.png"
}
declare -A options=(
    [combo_kernels]="torch._inductor.config.combo_kernels = True"
    [coordinate_descent]="torch._inductor.config.coordinate_descent_tuning = True"
    [max_autotune]="torch._inductor.config.max_autotune = True"
    [cuda_graphs]="torch._inductor.config.triton.cudagraphs = True"
    [recompute_some]="torch._functorch.config.activation_memory_budget = 0.7"
    [no_cudnn_attention]="torch.backends.cuda.enable_cudnn_sdp(False)"
    [no_flash_attention]="torch.backends.cuda.enable_flash_sdp(False)"
    [expandable_segments]="torch.cuda.memory._set_allocator_settings('expandable_segments:True')"
)
levers() {
    local name scripts=()
    for name in ${ONLY:-${!options[@]}}; do
        scripts+=("$work/$name.py")
        printf '%s\n' "from train_gpt2 import *" "import torch, torch._functorch.config" \
            "import torch._inductor.config" "${options[$name]}" >"$work/$name.py"
    done
    bench "${scripts[@]}" --batch_size=64 --steps=4
}
tests() { "$python" -m pytest -v -m cuda tests/test_cuda.py -p no:cacheprovider; }
resume() {
    local settings=("${default[@]}" --batch_size=64 --num_iterations=15 --val_loss_every=0)
    "$python" train_gpt2.py "${settings[@]}" --run_id=whole
    settings+=(--run_id=cut --save_every=3 --keep_checkpoints=1)
    "$python" train_gpt2.py "${settings[@]}" &
    while kill -0 $! && ! compgen -G "$work/logs/cut/state_step*.pt"; do sleep 0.05; done
    kill -KILL $!
    "$python" train_gpt2.py "${settings[@]}" --resume=auto
    "$python" -c "
import torch
whole, cut = (torch.load(f'$work/logs/{run}/model.pt')['model'] for run in ('whole', 'cut'))
largest = max((whole[name] - cut[name]).abs().max().item() for name in whole)
print('killed after a checkpoint and resumed: largest difference of a weight', largest)"
}
small() {
    NPROC=1 "$python" records/tools/repeat.py 3 modern --preset=small --run_id=small "${logs[@]}"
}

for part; do
    "$part" 2>&1 | tee "$out/$part.txt"
done
